"""Products with weights that are computed for a chunk of steps at once: as if they were computed step by step.

The oracle of `mask_scan` is `chunk=0`, where no product is moved; it is tried itself against unpadded rows elsewhere.
That of `scan` and `fold` with `remat` is `jax.lax.scan`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hlo import Program
from jaxprs import equations
from loops import array
from oracle import assert_close, compiled
from thin import parametrize

import treescan
import treescan._faster.in_bulk as in_bulk
import treescan._remat.remat as auto_remat
from treescan._trace.cost import count_operations

STEPS, CHUNK, ROWS, D, H = 10, 4, 3, 2, 3
LENGTHS = np.array([9, 0, 4])


def lstm(p, h, x):
    """Two products, one of them of x alone."""
    i, f, g, o = jnp.split(x @ p["x4"] + h @ p["h4"] + p["b"][None], 4, -1)
    h = jnp.tanh(jax.nn.sigmoid(f) * h + jax.nn.sigmoid(i) * g) * jax.nn.sigmoid(o)
    return h, h


def of_integers(p, h, x):
    """Products of numbers that have no derivative, and of halves, beside others."""
    counts = jnp.round(x).astype(jnp.int32) @ jnp.arange(D * H).reshape(D, H)
    halves = jax.lax.dot(h.astype(jnp.bfloat16), p["h"].astype(jnp.bfloat16), preferred_element_type=jnp.float32)
    return jnp.tanh(halves + counts.astype(jnp.float32)), (counts, (h @ p["h"]) > 0)


@jax.custom_vjp
def _twice(w):
    return 2 * w


_twice.defvjp(lambda w: (2 * w, None), lambda _, d: (3 * d,))  # not what it is: the rule is to be seen


def with_own_rule(p, h, x):
    """A function with a rule for its gradient."""
    h = jnp.tanh(_twice(h @ p["h"]) + x @ _twice(p["x"]))
    return h, h


def params():
    sizes = {"x": (D, H), "h": (H, H), "x4": (D, 4 * H), "h4": (H, 4 * H), "b": (4 * H,)}
    return {name: array(*shape, seed=seed) for seed, (name, shape) in enumerate(sizes.items())}


def given():
    return params(), array(ROWS, H, seed=20), array(STEPS, ROWS, D, seed=21)


def run(body, p, h, xs, *, verb=treescan.mask_scan, **options):
    masked = {"lengths": LENGTHS, "chunk": CHUNK} if verb is treescan.mask_scan else {}
    return verb(functools.partial(body, p), h, xs, **{**masked, **options})


def loss(body, *args, **options):
    """A number that depends on all that is returned and can have a derivative."""
    leaves = [leaf for leaf in jax.tree.leaves(run(body, *args, **options)) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    return sum(jnp.sum(jnp.sin((1 + i) * leaf)) for i, leaf in enumerate(leaves))


def gradient(body, *args, **options):
    return jax.grad(functools.partial(loss, body, **options), argnums=(0, 1, 2))(*args)


def tolerance_of(body):
    """Cotangents of halves are rounded once a chunk instead of once a step."""
    return 1e-2 if body is of_integers else 1e-5


def assert_as_step_by_step(derive, body, args, **options):
    ours, expected = (functools.partial(derive, body, **each) for each in (options, {"chunk": 0}))
    tolerance = tolerance_of(body)
    assert_close(compiled(ours, *args), compiled(expected, *args), tolerance, tolerance)


WHOLE_STEPS = treescan.Remat("everything_saveable", chunk=CHUNK)


LONG = 37


@pytest.fixture(params=["at once", "recomputed"])
def auto(request, monkeypatch):
    """Both plans of "auto": the size of the loop decides between them."""
    monkeypatch.setattr(auto_remat, "LARGE", 0 if request.param == "recomputed" else 2**60)
    monkeypatch.setattr(in_bulk, "PAYS", 0)
    return request.param


def test_auto_computes_products_at_once():
    def gated(p, h, x):
        f, i, o, g = jnp.split(x @ p["x4"] + h @ p["h4"], 4, -1)
        h = jax.nn.sigmoid(o) * jnp.tanh(jax.nn.sigmoid(f) * h + jax.nn.sigmoid(i) * jnp.tanh(g))
        return h, h

    p, h, _ = wide(WIDE)
    args = p, h, array(1024, ROWS, WIDE, seed=1)
    ours = Program(functools.partial(gradient, gated, verb=treescan.scan, remat="auto"), *args)
    assert not adds_up(ours, f"f32[{WIDE},{4 * WIDE}]")
    assert adds_up(Program(functools.partial(gradient, gated, verb=jax.lax.scan), *args), f"f32[{WIDE},{4 * WIDE}]")


def test_auto_saves_no_more_than_without():
    """The last gate is read as it comes: to save the products in its place would take more."""
    p, h, _ = wide(WIDE)
    args = p, h, array(1024, ROWS, WIDE, seed=1)

    ways = {"verb": treescan.scan, "remat": "auto"}, {"verb": jax.lax.scan}
    auto, plain = (Program(functools.partial(gradient, lstm, **way), *args).temp_bytes for way in ways)
    assert auto <= plain


def with_a_callback(p, h, x):
    jax.debug.callback(lambda: None)
    return lstm(p, h, x)


def without_products(p, h, x):
    h = h * jnp.sin(h) + p["b"][None, :H]
    return h, h


@parametrize(
    "body, steps",
    {
        "effects": (with_a_callback, LONG),
        "a rule for reverse mode": (with_own_rule, LONG),
        "no products": (without_products, LONG),
        "few steps": (lstm, 31),
    },
)
def test_auto_leaves_alone_what_it_cannot_speed_up(body, steps):
    args = params(), array(ROWS, H, seed=20), array(steps, ROWS, D, seed=21)

    def jaxpr(verb, **options):
        loops = equations(jax.make_jaxpr(functools.partial(run, body, verb=verb, **options))(*args), "scan")
        return [(loop.params["length"], str(loop.params["jaxpr"])) for loop in loops]

    assert [length for length, _ in jaxpr(treescan.scan, remat="auto")] == [steps]


def planned(rows, features, hidden, steps=64):
    p = {"x4": array(features, 4 * hidden), "h4": array(hidden, 4 * hidden), "b": array(4 * hidden)}
    xs = jax.ShapeDtypeStruct((steps, rows, features), jnp.float32)
    return treescan.plan_remat(functools.partial(lstm, p), array(rows, hidden), xs, remat="auto")


def test_what_auto_chooses():
    """Products are computed at once where they are most of a step, and chunks are recomputed of a large loop."""
    small, large, few = planned(32, 64, 128), planned(512, 64, 128), planned(4096, 4, 8)
    assert (small.remat, small.evaluations) == ("auto", 1)
    assert isinstance(large.remat, treescan.Remat) and large.evaluations == 2
    assert large.saved_bytes < 64 * large.step_bytes
    assert few.remat is None
    with treescan.rewriting(False):
        assert planned(32, 64, 128).remat is None


def test_auto_has_chunks_of_about_a_sixteenth_or_32_steps():
    plans = {steps: planned(1024, 64, 64, steps) for steps in (64, 256, 500, 512, 521, 1000, 100_000)}
    assert {steps: plan.sizes[0] for steps, plan in plans.items()} == {
        64: 4, 256: 16, 500: 50, 512: 32, 521: 32, 1000: 40, 100_000: 32,  # divisors of all but 521, which is prime
    }  # fmt: skip
    assert all(plan.saved_bytes < steps * plan.step_bytes for steps, plan in plans.items())


@parametrize(
    "function, shapes",
    {
        "product": (lambda a, b: a @ b, ((8, 16), (16, 32))),
        "batched": (lambda a, b: jnp.einsum("bij,bjk->bik", a, b), ((3, 8, 16), (3, 16, 4))),
        "elementwise": (lambda a, b: a * b + a, ((64, 64), (64, 64))),
        "convolution": (lambda a, b: jax.lax.conv(a, b, (1,), "SAME"), ((2, 3, 32), (4, 3, 5))),
    },
)
def test_operations_are_counted_as_xla_counts_them(function, shapes):
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    ours = count_operations(jax.make_jaxpr(function)(*args).jaxpr)
    assert 0.8 < ours / jax.jit(function).lower(*args).compile().cost_analysis()["flops"] < 1.3


# What is run how often.

WIDE = 64  # WIDE * 4 * 4 * WIDE elements are as many as are computed for a chunk at once forward too


def dots_in_loops(program: Program) -> list[int]:
    """For each innermost loop how often it multiplies."""
    return sorted(text.count(" dot(") for text in program.loops() if " while(" not in text and " dot(" in text)


def adds_up(program: Program, shape: str) -> bool:
    """Whether an innermost loop adds arrays of this shape."""
    inner = [text for text in program.loops() if " while(" not in text and " dot(" in text]
    return any(f"= {shape}" in line and " add(" in line for text in inner for line in text.splitlines())


def wide(features):
    p = {"x4": array(features, 4 * WIDE), "h4": array(WIDE, 4 * WIDE, seed=1), "b": array(4 * WIDE, seed=2)}
    return p, array(ROWS, WIDE, seed=3), array(4 * CHUNK, ROWS, features, seed=4)


def test_forward_large_weights_are_multiplied_once_a_chunk():
    assert dots_in_loops(Program(functools.partial(run, lstm), *wide(4 * WIDE))) == [1]
    assert dots_in_loops(Program(functools.partial(run, lstm), *wide(WIDE))) == [2]


def test_forward_products_of_what_is_computed_before_them():
    """`jax.nn.relu` has a rule of its own, and gives for many steps what it gives for each; weights have no steps."""

    def body(p, h, x):
        h = jnp.tanh(h + (jax.nn.relu(x) @ jnp.sin(p["x4"]))[:, :WIDE])
        return h, h

    assert dots_in_loops(Program(functools.partial(run, body), *wide(4 * WIDE))) == []


@pytest.mark.parametrize(
    ("verb", "features", "dots"),
    [
        # Forward, again and backward one product each, with the carry or its cotangent: all others are outside.
        (treescan.mask_scan, WIDE, 1),
        (treescan.mask_scan, 4 * WIDE, 1),
        # A product of x with small weights is computed beside the other, as is what it gives to the cotangent of x.
        (treescan.scan, WIDE, 2),
        (treescan.scan, 4 * WIDE, 1),
    ],
)
def test_no_loop_over_steps_adds_up_the_cotangents_of_weights(verb, features, dots):
    masked = verb is treescan.mask_scan
    ours = {} if masked else {"verb": verb, "remat": WHOLE_STEPS}
    plain = {"chunk": 0} if masked else {"verb": jax.lax.scan}
    ours, by_steps = (Program(functools.partial(gradient, lstm, **each), *wide(features)) for each in (ours, plain))
    assert dots_in_loops(ours) == [dots] * 3
    assert max(dots_in_loops(by_steps)) >= 4
    assert not adds_up(ours, f"f32[{WIDE},{4 * WIDE}]")
    assert adds_up(by_steps, f"f32[{WIDE},{4 * WIDE}]")


def stacked_in_loops(program: Program, shape: str) -> int:
    """How many stacks of this shape the innermost loops write."""
    inner = [text for text in program.loops() if " while(" not in text and " dot(" in text]
    lines = [line for text in inner for line in text.splitlines()]
    return sum(f"= {shape}" in line and " dynamic-update-slice(" in line for line in lines)


def test_products_that_are_added_up_have_one_cotangent():
    """Beside it, a stack is kept of the forward pass. A product that is an output is one more, and has its own."""

    def apart(p, h, x):
        h, c = lstm(p, h, x)
        return h, (c, x @ p["x4"])

    shape = f"f32[{CHUNK},{ROWS},{4 * WIDE}]"
    counts = [
        stacked_in_loops(Program(functools.partial(gradient, body), *wide(WIDE)), shape) for body in (lstm, apart)
    ]
    assert counts == [2, 4]


def test_a_body_without_products_has_no_rule_for_its_chunks():
    def body(p, h, x):
        h = jnp.tanh(h * p["h"][:1] + x[:, :1])
        return h, h

    def rules(body):
        stacked = functools.partial(run, body, fill="hold")  # the loop has no rule of its own
        calls = equations(jax.make_jaxpr(stacked)(*given()).jaxpr, "custom_jvp_call")
        return [call for call in calls if list(equations(call.params["call_jaxpr"].jaxpr, "scan"))]

    assert not rules(body)
    assert rules(lstm)


def test_rows_over_an_explicit_mesh_are_multiplied_at_once():
    mesh = jax.make_mesh((1,), ("rows",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        p, h, xs = wide(4 * WIDE)
        xs = jax.device_put(xs, jax.NamedSharding(mesh, jax.P(None, "rows")))
        h = jax.device_put(h, jax.NamedSharding(mesh, jax.P("rows")))
        assert dots_in_loops(Program(functools.partial(run, lstm), p, h, xs)) == [1]


def test_a_body_with_effects_is_multiplied_step_by_step():
    seen = []

    def body(p, h, x):
        jax.debug.callback(lambda _: seen.append(1), h)
        return lstm(p, h, x)

    args = wide(4 * WIDE)
    assert dots_in_loops(Program(functools.partial(run, body), *args)) == [2]
    for derive in (run, gradient):
        seen.clear()
        jax.block_until_ready(jax.jit(functools.partial(derive, body))(*args))
        jax.effects_barrier()
        assert len(seen) == 3 * CHUNK


# On many devices.


def spread_rows(mesh, args):
    p, h, xs = args
    return (
        jax.device_put(p, jax.NamedSharding(mesh, jax.P())),
        jax.device_put(h, jax.NamedSharding(mesh, jax.P("rows"))),
        jax.device_put(xs, jax.NamedSharding(mesh, jax.P(None, "rows"))),
    )


def many_rows():
    p, h, xs = wide(4 * WIDE)
    return p, jnp.tile(h, (8, 1)), jnp.tile(xs / 8, (1, 8, 1))


@pytest.mark.devices
@parametrize("derive", {"values": run, "gradient": gradient})
def test_rows_that_are_spread_from_outside_do_not_communicate_in_the_steps(derive):
    """Only the cotangents of weights are added up over devices, once a chunk."""

    def simple(p, h, x):
        h = jnp.tanh((x @ p["x4"] + h @ p["h4"])[:, :WIDE])
        return h, h

    mesh = jax.make_mesh((8,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    options = {"lengths": np.arange(8 * ROWS) % (4 * CHUNK)}
    args = spread_rows(mesh, many_rows())
    function = functools.partial(derive, simple, **options)
    inner = [text for text in Program(function, *args).loops() if " while(" not in text]
    collectives = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")
    assert not any(name in text for text in inner for name in collectives)
    expected = jax.jit(functools.partial(function, chunk=0))(*many_rows())
    assert_close(jax.jit(function)(*args), expected, 1e-4, 1e-4)


@pytest.mark.devices
def test_a_function_that_says_where_its_results_are_is_called_as_it_is():
    mesh = jax.make_mesh((8,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    everywhere = jax.NamedSharding(mesh, jax.P())
    dense = jax.jit(jnp.matmul, out_shardings=everywhere)

    def body(p, h, x):
        h = jnp.tanh(dense(h, p["h"]) + x @ p["x"])
        return h, h

    jaxpr = jax.make_jaxpr(functools.partial(run, body))(*given()).jaxpr
    calls = [call for name in ("jit", "pjit") for call in equations(jaxpr, name)]
    assert any(everywhere in call.params["out_shardings"] for call in calls)
    assert_as_step_by_step(gradient, body, given())
