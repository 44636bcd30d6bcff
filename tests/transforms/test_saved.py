"""The gradient of a masked scan by default: steps are saved in place, so it takes the memory of a mask by hand.

The oracle is a mask by hand under `jax.lax.scan`, values and derivatives of every kind.
"""

import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from by_hand import masked_by_hand
from hlo import Program
from jaxprs import equations
from loops import array

import treescan
from treescan._faster import saved as saved_steps

ROWS, WIDTH = 4, 3


def attention(params, carry, x):
    carry = jax.nn.softmax(carry @ params["w"], -1) + x
    return carry, (carry.max(-1), carry.argmax(-1))


def wave(params, carry, x):
    carry = jnp.sin(carry * params["a"] + x)
    return carry, carry * 2


def branch(params, carry, x):
    h, steps = carry
    h = jax.lax.cond(steps[0] % 2 > 0.5, lambda h: jnp.sin(h) * params["a"], lambda h: h @ params["w"] * 0.3, h) + x
    return (h, steps + 1), (h, steps)


def average(params, carry, x):
    carry = carry + params["a"] * (x - carry)
    return carry, carry


def recurrent(params, carry, x):
    carry = jnp.tanh(x @ params["w"] + carry @ params["w"])
    return carry, carry


def row_by_row(params, carry, x):
    carry = jax.lax.map(lambda row: jnp.tanh(row @ params["w"]), carry + x)
    return carry, carry


def wide(params, carry, x):
    """Its products with weights are most of it."""
    out, back = (jnp.concatenate([params["w"]] * 40, axis) for axis in (1, 0))
    carry = jnp.tanh(carry @ out @ back / 40 + x)
    return carry, carry


def sweep(params, carry, x):
    """Each result is cheap to compute from the carry and x: the first half of Thomas's algorithm."""
    over = 1.5 + jnp.square(x) - params["a"] * carry
    carry = params["a"] / over
    return carry, (x - params["a"] * carry) / over


BODIES = {"attention": attention, "wave": wave, "branch": branch, "average": average, "sweep": sweep}


def init_of(body, rows=ROWS, width=WIDTH):
    init = array(rows, width)
    return (init, jnp.zeros(rows)) if body is branch else init


def by_hand(body, params, init, xs, lengths, **options):
    mask = jnp.arange(len(xs))[:, None] < lengths[None]
    return masked_by_hand(functools.partial(body, params), init, xs, mask, **options)


def masked(body, params, init, xs, lengths, **options):
    return treescan.mask_scan(functools.partial(body, params), init, xs, lengths=lengths, **options)


def total(run, body, lengths, **options):
    def of(params, init, xs):
        leaves = jax.tree.leaves(run(body, params, init, xs, lengths, **options))
        return sum(jnp.sum(jnp.sin(leaf)) for leaf in leaves if leaf.dtype == jnp.float32)

    return of


def given(body, steps):
    params = {"a": jnp.float32(0.7), "w": array(WIDTH, WIDTH, seed=1) * 0.3}
    return (params, init_of(body), array(steps, ROWS, WIDTH, seed=2)), jnp.array([steps, steps // 3, 0, 5])


def assert_alike(one, other, tolerance=2e-4):
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=tolerance, atol=tolerance), one, other)


@jax.custom_jvp
def with_tangent_of(value, surrogate):
    return value


@with_tangent_of.defjvp
def _surrogate(primals, tangents):
    return primals[0], tangents[1]


def forced(params, carry, x):
    """The next carry is given, and its gradient is that of the prediction."""
    return with_tangent_of(x, jnp.tanh(carry @ params["w"])), carry


def test_a_value_that_a_rule_ignores_may_have_a_gradient():
    args, lengths = given(forced, 37)
    ours, theirs = (jax.grad(total(run, forced, lengths))(*args) for run in (masked, by_hand))
    assert_alike(ours, theirs)
    assert float(jnp.abs(ours["w"]).max()) > 0.1


def gradient_program(run, body, steps=96, rows=8, width=16):
    params = {"a": jnp.float32(0.7), "w": array(width, width, seed=1) * 0.1}
    xs, lengths = array(steps, rows, width, seed=2), jnp.full(rows, steps)
    return jax.jit(jax.grad(total(run, body, lengths))), (params, init_of(body, rows, width), xs)


@pytest.mark.parametrize("name", BODIES)
def test_a_gradient_takes_the_memory_of_a_mask_by_hand(name):
    ours, theirs = (
        Program(program, *args).temp_bytes
        for program, args in (gradient_program(run, BODIES[name]) for run in (masked, by_hand))
    )
    assert ours <= 1.05 * theirs


def computed_again(body, monkeypatch):
    """The names of the primitives with which the tangent of a step computes what it reads."""
    found, linearize = [], saved_steps.linearize
    monkeypatch.setattr(saved_steps, "linearize", lambda *args: found.append(linearize(*args)) or found[-1])
    program, args = gradient_program(masked, body)
    jax.make_jaxpr(program)(*args)
    (step,) = found
    return {equation.primitive.name for equation in step.push.jaxpr.eqns}


def test_what_is_cheap_is_computed_again(monkeypatch):
    ours, theirs = (
        Program(program, *args).temp_bytes
        for program, args in (gradient_program(run, sweep) for run in (masked, by_hand))
    )
    assert ours <= 0.6 * theirs
    assert "div" in computed_again(sweep, monkeypatch)


def test_nothing_is_decided_again(monkeypatch):
    def threshold(params, carry, x):
        new = sweep(params, carry, x)[0]
        return jnp.where(new * new > 0.3, new * x, carry), None

    names = computed_again(threshold, monkeypatch)
    assert "square" in names
    assert "gt" not in names


def test_of_a_step_that_chooses_nothing_is_computed_again_that_is_rounded(monkeypatch):
    def choice(params, carry, x):
        new, y = sweep(params, carry, x)
        return jnp.maximum(new, y), None

    assert computed_again(choice, monkeypatch) <= {"broadcast_in_dim", "reshape", "select_n", "squeeze"}


@pytest.mark.parametrize(
    ("body", "options", "saved"),
    [
        (attention, {}, True),
        (average, {}, True),
        (branch, {}, True),
        (recurrent, {}, True),
        (wide, {}, False),
        (attention, {"chunk": 8}, False),
        (attention, {"compact": True}, False),
        (attention, {"remat": "step"}, False),
    ],
)
def test_steps_are_saved_unless_products_pay_or_chunks_are_asked_for(body, options, saved):
    program, args = gradient_program(functools.partial(masked, **options), body)
    found = list(equations(jax.make_jaxpr(program)(*args).jaxpr, "custom_linear_solve"))
    assert bool(found) is saved


@pytest.mark.parametrize(("rows", "width", "saved"), [(1, 16, True), (3, 16, True), (4, 16, False), (1, 32, False)])
def test_products_of_few_rows_with_weights_that_a_cache_holds_do_not_pay(rows, width, saved):
    program, args = gradient_program(masked, wide, rows=rows, width=width)
    found = list(equations(jax.make_jaxpr(program)(*args).jaxpr, "custom_linear_solve"))
    assert bool(found) is saved


@pytest.mark.parametrize(
    ("body", "options"),
    [(attention, {}), (recurrent, {}), (row_by_row, {}), (recurrent, {"chunk": 5}), (recurrent, {"remat": "step"})],
)
def test_an_exported_gradient_of_any_number_of_rows(body, options):
    (rows,) = jax.export.symbolic_shape("rows")
    (params, init, xs), _ = given(body, 32)
    lengths = jnp.array([32, 10, 0, 5], jnp.int32)
    shapes = (
        jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params),
        jax.ShapeDtypeStruct((rows, WIDTH), init.dtype),
        jax.ShapeDtypeStruct((32, rows, WIDTH), xs.dtype),
        jax.ShapeDtypeStruct((rows,), jnp.int32),
    )

    def of(params, init, xs, lengths):
        return total(masked, body, lengths, **options)(params, init, xs)

    exported = jax.export.export(jax.jit(jax.grad(of)))(*shapes)
    expected = jax.grad(total(by_hand, body, lengths))(params, init, xs)
    assert_alike(exported.call(params, init, xs, lengths), expected)


def indexes_a_table(w, i, x):
    return i + 1, w * jnp.take(jnp.array([1.0, 2.0, 3.0]), i) * x


def keeps_the_last_x(w, last, x):
    return x, w * last


def inverts(w, z, x):
    for _ in range(8):  # Newton's iteration for 1 / x, which diverges from the end of another x
        z = z * (2 - x * z)
    return z, w * z


@pytest.mark.parametrize(
    ("body", "init", "xs", "lengths"),
    [
        (indexes_a_table, jnp.zeros(2, jnp.int32), jnp.ones((6, 2)), [3, 2]),
        (keeps_the_last_x, jnp.zeros(2), jnp.array([[1.0, 1.0], [2.0, -jnp.inf], [3.0, 0.0]]), [3, 2]),
        (inverts, jnp.full(2, 0.01), jnp.array([[90, 1.5], [30, 1], [10, 1], [3, 1], [1, 1], [0.0, 1]]), [5, 6]),
    ],
)
def test_a_last_state_that_is_bad_for_any_further_step_reaches_no_gradient(body, init, xs, lengths):
    def total(w):
        step = functools.partial(body, w)
        return jnp.sum(treescan.mask_scan(step, init, xs, lengths=jnp.array(lengths))[1])

    value, gradient = jax.value_and_grad(total)(1.0)  # the outputs are multiples of w
    np.testing.assert_allclose(gradient, value, rtol=1e-6)


@pytest.mark.parametrize("name", BODIES)
def test_the_transpose_of_saved_steps_is_that_of_jax(name, monkeypatch):
    params, lengths = given(BODIES[name], 40)
    gradient = jax.grad(total(masked, BODIES[name], lengths), argnums=(0, 1, 2))
    ours, asked = gradient(*params), []

    def transposed_by_jax(push, pull, given, like):
        asked.append(pull)
        # Its tangent is the function itself. JAX 0.8 transposes a loop only as such a tangent.
        return jax.jvp(push, (jax.tree.map(jnp.zeros_like, given),), (given,))[1]

    monkeypatch.setattr(saved_steps, "with_transpose", transposed_by_jax)
    jax.clear_caches()
    assert_alike(ours, gradient(*params), 1e-5)
    assert asked


def test_jax_says_what_a_tangent_reads():
    """Its leaves are what a step saves. Were it no longer a tree of arrays, chunks would be computed again instead."""
    _, push = jax.linearize(lambda x: jnp.sin(x) * x, 2.0)
    assert isinstance(push, jax.tree_util.Partial)
    assert len(jax.tree.leaves(push)) >= 2


@pytest.mark.parametrize("lengths", [True, False])
def test_no_x_of_another_time_joins_a_leaf_that_rows_share(lengths):
    steps, counts = 64, jnp.array([64, 20])
    times = jnp.broadcast_to(jnp.arange(steps, dtype=jnp.float32)[:, None] + 0.5, (steps, 2))
    mask = jnp.arange(steps)[:, None] < counts[None]

    def total(w, first, times, **options):
        def step(carry, time):
            h, now = carry
            for _ in range(8):
                h = jnp.tanh(w * h)
            return (h + 1e-3 * jnp.sqrt(time - now)[:, None] * w, now + 1), jnp.sum(h, -1)

        init = jnp.ones((times.shape[1], 32)), jnp.float32(first)
        run = treescan.mask_scan if options else treescan.scan
        return jnp.sum(run(step, init, times, **options)[1])

    masked = {"lengths": counts} if lengths else {"mask": mask}
    ours = jax.grad(functools.partial(total, row_axes={"carry": (0, None)}, **masked))(1.1, 0, times)
    alone = sum(jax.grad(total)(1.1, 0, times[:n, i : i + 1]) for i, n in enumerate(counts.tolist()))
    np.testing.assert_allclose(ours, alone, rtol=1e-5)


def _unread(p, h, x):
    h = jnp.tanh(h * p["s"])
    return h, h * p["v"]


def _stopped(p, h, x):
    h = jnp.tanh(jax.lax.stop_gradient(h) * p["s"] + x)
    return h, h * p["v"]


def _same_y(p, h, x):
    return jnp.tanh(h * p["s"] + x), p["v"] * jnp.ones_like(h)


def _zero_y(p, h, x):
    return jnp.tanh(h * p["s"] + x), jnp.zeros_like(h)


def _affine(p, h, x):
    h = h * 0.5 + p["s"]
    return h, x * p["v"]


@pytest.mark.parametrize(
    ("body", "power"),
    [
        pytest.param(lambda h, x: (h + x, None), 2, id="sum"),
        pytest.param(lambda h, x: (h, x), 1, id="x alone"),
        pytest.param(lambda h, x: (x, h), 2, id="shift", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("way", [jax.jacfwd, pytest.param(jax.jacrev, marks=pytest.mark.slow)])
def test_second_derivatives_of_steps_that_only_add(body, power, way):
    """JAX fails on the tangent of what a linear loop is given and does not read, and on one that is zero alone."""
    lengths, xs = (33, 5, 0), jnp.asarray(np.random.default_rng(0).standard_normal((33, 3)), jnp.float32)

    def total(tree):
        return sum(jnp.sum(leaf**power) for leaf in jax.tree.leaves(tree))

    def ours(xs):
        return total(treescan.mask_scan(body, jnp.zeros(3), xs, lengths=jnp.array(lengths)))

    def each(xs):
        return sum(total(jax.lax.scan(body, jnp.zeros(1), xs[:n, i : i + 1])) for i, n in enumerate(lengths))

    np.testing.assert_allclose(jax.jit(way(jax.grad(ours)))(xs), way(jax.grad(each))(xs), atol=1e-6)


@pytest.mark.parametrize(
    "body", [_unread, _same_y, *(pytest.param(body, marks=pytest.mark.slow) for body in (_stopped, _zero_y, _affine))]
)
def test_a_gradient_of_a_gradient_parts_of_which_depend_on_nothing(body):
    """JAX transposes a loop only if all of its inputs are linear, also one whose derivative is the same anywhere."""
    rng, lengths = np.random.default_rng(0), (33, 5, 0)
    params = {"s": jnp.float32(0.7), "v": jnp.asarray(rng.standard_normal((1, 2)), jnp.float32)}
    init, xs = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((3, 2), (33, 3, 2)))

    def total(tree):
        return sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(tree))

    def ours(params, init, xs):
        return total(treescan.mask_scan(functools.partial(body, params), init, xs, lengths=jnp.array(lengths)))

    def each(params, init, xs):
        rows = ((init[i : i + 1], xs[:n, i : i + 1]) for i, n in enumerate(lengths))
        return sum(total(jax.lax.scan(functools.partial(body, params), *row)) for row in rows)

    def second(loss):
        def squares(*args):
            return sum(jnp.sum(g**2) for g in jax.tree.leaves(jax.grad(loss, (0, 1, 2))(*args)))

        return jax.jit(jax.grad(squares, (0, 1, 2)))(params, init, xs)

    for got, wanted in zip(*(jax.tree.leaves(second(loss)) for loss in (ours, each)), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)
