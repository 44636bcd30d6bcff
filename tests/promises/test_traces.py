"""A body is traced once, compiled once, and freed with its last reference."""

import contextlib
import functools
import gc
import sys
import weakref

import jax
import jax.numpy as jnp
import pytest
from jax.custom_derivatives import SymbolicZero
from jaxprs import equations
from jaxtyping import Array, Float
from loops import LENGTHS, OPTIONS, array, arrays, masked, over, plain
from thin import parametrize
from traces import Counted, compilations

import treescan
from treescan._loop.loop import Body

pytestmark = pytest.mark.quick


def annotated(
    carry: dict[str, Float[Array, "batch _"]], x: Float[Array, "batch d"]
) -> tuple[dict[str, Float[Array, "batch _"]], Float[Array, "batch d"]]:
    return plain(carry, x)


def with_static(carry, x):
    return carry | {"h": carry["act"](carry["h"] + x)}, x


def _with_static_leaves(body, init, xs):
    return treescan.scan(body, init | {"act": jnp.sin}, xs)[1]


ALL_AT_ONCE = {"lengths": LENGTHS, "reverse": True, "unroll": 2, "time_axis": {"ys": -1}, "fill": 2, "chunk": 2}
MORE = {
    "annotated": (annotated, over(treescan.scan), 1),
    "annotated_mask": (annotated, over(treescan.mask_scan, lengths=LENGTHS), 1),
    "static_leaves": (with_static, _with_static_leaves, 1),
    "split": (plain, over(treescan.scan, _split_transpose=True), 1),
    "all_at_once": (masked, over(treescan.mask_scan, **ALL_AT_ONCE), 1),
}
CALLS = {name: (option.body, option.run, option.traces) for name, option in OPTIONS.items()} | MORE


@parametrize("case", CALLS)
def test_one_trace_and_then_none_eager_and_in_an_outer_trace(case):
    body, run, traces = case
    counted, (init, xs) = Counted(body), arrays()
    assert compilations(lambda: run(counted.body, init, xs))
    assert counted.calls == traces
    assert compilations(lambda: run(counted.body, init, xs)) == []
    counted = Counted(body)
    call = jax.jit(lambda init, xs: run(counted.body, init, xs))
    assert [counted.traces(lambda _, given=given: call(init, given)) for given in (xs, xs, 2 * xs)] == [traces, 0, 0]


@pytest.mark.parametrize("transform", [jax.grad, jax.vmap, jax.checkpoint], ids=lambda t: t.__name__)
@pytest.mark.parametrize("name", ["scan", "accumulate"])
def test_transforms_trace_as_often_as_lax_scan(name, transform):
    def total(scan, body):
        def run(init, xs):
            out = scan(body, init, xs)
            return jnp.sum(jax.tree.leaves(out)[0]) if transform is jax.grad else out

        return lambda _: transform(run)(array(4), array(4, 4))

    def body(c, x):
        return (jnp.sin(c * x), x) if name == "scan" else jnp.sin(c * x)

    ours, lax = Counted(body), Counted(lambda c, x: (jnp.sin(c * x), x))
    for expected_again in (1, 0):
        assert ours.traces(total(getattr(treescan, name), ours.body)) == expected_again
        assert lax.traces(total(jax.lax.scan, lax.body)) == expected_again


def test_new_shapes_are_one_new_trace():
    init, xs = arrays()
    wider = jax.tree.map(lambda leaf: jnp.concatenate([leaf, leaf], -1), (init, xs))
    for verb in (treescan.scan, functools.partial(treescan.mask_scan, lengths=LENGTHS)):
        counted = Counted(plain)
        seen = [counted.traces(lambda f, a=a, verb=verb: verb(f, *a)) for a in ((init, xs), wider, (init, xs))]
        assert seen == [1, 1, 0]


def test_new_values_are_no_new_trace():
    counted = Counted(plain)
    init, xs = arrays()
    for i, expected in enumerate((1, 0, 0)):
        assert counted.traces(lambda f, i=i: treescan.mask_scan(f, init, xs, lengths=(LENGTHS + i) % 6)) == expected
    keyed = Counted(lambda c, x, *, key: (c + jax.random.uniform(key), x))
    for i, expected in enumerate((1, 0, 0)):
        assert keyed.traces(lambda f, i=i: treescan.scan(f, 0.0, xs, key=jax.random.key(i))) == expected


# Nothing leaks: what a body closes over is in `test_leaks.py`.


class Callable:
    def __call__(self, carry, x):
        return carry + x, x


def failing():
    return lambda carry, x: (carry + bad, x)  # noqa: F821


def two(scale, carry, x):
    return carry + scale * x, x


BODIES = {
    "object": Callable,
    "partial": lambda: functools.partial(two, 2.0),
    "jax partial": lambda: jax.tree_util.Partial(two, 2.0),
    "jitted": lambda: jax.jit(lambda carry, x: (carry + x, x)),
    "failing": failing,
}
RUNS = (over(treescan.scan, in_axes=-1, out_axes=1), over(treescan.mask_scan, lengths=jnp.arange(4), fill=jnp.nan))


@parametrize("make", BODIES)
def test_every_kind_of_body_is_freed(make):
    def use(run):
        body = make()
        for _ in range(2):
            with pytest.raises(NameError) if make is failing else contextlib.nullcontext():
                run(body, array(4), array(4, 4))
        return weakref.ref(body)

    references = [use(run) for run in RUNS]
    gc.collect()
    assert [reference() for reference in references] == [None] * len(RUNS)


def test_64_programs_are_kept_a_body():
    body, made = Body.of(plain), []

    def ask(i):
        return body.memo(("test", i), lambda: made.append(i) or i)

    assert [ask(i) for i in range(64)] == list(range(64))
    ask(0)  # now the last used
    ask(64)  # puts 1 out
    made.clear()
    assert [ask(i) for i in (0, 2, 63, 64)] == [0, 2, 63, 64]
    assert made == []
    ask(1)
    assert made == [1]


def test_a_masked_scan_has_a_few_equations_for_each_leaf():
    """What a trace takes: once where the loop begins, to find what padded rows are shown, and in the step a mask."""

    def shift(carry, x):
        return jax.tree.map(lambda leaf: leaf + x, carry), None

    def add(carry, x):
        return jax.tree.map(jnp.add, carry, x), None

    def number(body, leaves):
        init, x = dict.fromkeys(map(str, range(leaves)), jnp.ones((4, 3))), jnp.ones((64, 4, 3))
        run = functools.partial(treescan.mask_scan, body, lengths=jnp.arange(4))
        xs = x if body is shift else dict.fromkeys(init, x)
        return len(list(equations(jax.make_jaxpr(run)(init, xs).jaxpr)))

    for body, most in ((shift, 11), (add, 24)):  # leaves of the carry alone; and of xs too
        counts = [number(body, leaves) for leaves in (10, 20, 30)]
        assert counts[2] - counts[1] == counts[1] - counts[0] <= most * 10


@pytest.mark.parametrize("options", [{}, {"chunk": 8}, {"compact": (4, 16)}], ids=str)
def test_a_masked_loop_is_differentiated_once(options):
    """JAX would do so once without a tangent of the state, and once more with the one that the first step makes."""
    asked = []

    @jax.custom_jvp
    def add(a, b):
        return jnp.tanh(a + b)

    @functools.partial(add.defjvp, symbolic_zeros=True)
    def _(primals, tangents):
        asked.append([isinstance(each, SymbolicZero) for each in tangents])
        out = add(*primals)
        return out, (1 - out**2) * sum(each for each in tangents if not isinstance(each, SymbolicZero))

    def final(weights):
        init, xs, lengths = jnp.zeros((16, 64)), jnp.ones((128, 16, 64)), jnp.arange(16) * 8
        h, _ = treescan.mask_scan(lambda h, x: (add(h, x @ weights), None), init, xs, lengths=lengths, **options)
        return jnp.sum(h)

    jax.jit(jax.grad(final)).trace(jnp.ones((64, 64)))
    assert asked == [[False, False]] * (1 if "compact" not in options else 2)


@pytest.mark.parametrize("options", [{}, {"chunk": 8}, {"compact": True}, {"remat": "nested", "save": 8}], ids=str)
def test_nothing_prints_a_step(options):
    """JAX asks functions for their names. A repr would print jaxprs, and arrays that a body closes over."""
    weights, init, xs = jnp.ones((64, 64)), jnp.zeros((16, 64)), jnp.ones((128, 16, 64))
    lengths, printed = jnp.arange(16) * 8, []

    def loss(weights):
        final, ys = treescan.mask_scan(
            lambda h, x: (jnp.tanh(h @ weights + x),) * 2, init, xs, lengths=lengths, **options
        )
        return jnp.sum(final) + jnp.sum(ys)

    def watch(frame, event, _):
        if event == "call" and frame.f_code.co_name == "__repr__":
            printed.append(type(frame.f_locals.get("self")))

    sys.setprofile(watch)
    try:
        jax.jit(jax.grad(loss)).lower(weights)
    finally:
        sys.setprofile(None)
    assert not [kind for kind in printed if kind.__module__.startswith("treescan")]
