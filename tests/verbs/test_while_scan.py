"""`while_scan` of a single row, and `fori` with traced bounds; and what outputs and gradients take of memory.

That it is the Python loop, values and gradients, is in `test_semantics.py`; `works` has its options.
"""

import collections
import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hlo import Program
from jax.experimental import checkify

from treescan import Remat, fori, rewriting, while_scan


def close(actual, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5), actual, expected)


@pytest.mark.parametrize("length", [0, 1, 3, 7, 100])
def test_runs_into_max_length(length):
    result = while_scan(lambda c: c < 2000, lambda c, _: (c + 1, None), 0, max_length=length)
    assert (int(result.carry), int(result.steps), bool(result.stopped)) == (length, length, False)
    result = while_scan(lambda c: c < 0, lambda c, _: (c + 1, c), 0, max_length=length, fill=5)
    assert (int(result.carry), int(result.steps), bool(result.stopped)) == (0, 0, True)
    np.testing.assert_array_equal(result.ys, np.full(length, 5))


@pytest.mark.parametrize(("init", "traces"), [(0.0, 1), (jnp.zeros(()), 1), (0, 2)])
def test_a_condition_is_traced_again_only_for_the_type_that_the_carry_takes_on(init, traces):
    seen = []

    def cond(c):
        seen.append(jax.typeof(c).dtype)
        return c < 2.75

    assert while_scan(cond, lambda c, _: (c + 0.5, None), init, max_length=9).carry == 3.0
    assert len(seen) == traces


def test_an_element_without_steps_borrows_all_that_the_body_reads():
    """A leaf that no step changes, leaves that are given whole, and one that is closed over: NaN would come of each."""
    xs = jnp.linspace(0.5, 1.0, 5)

    def run(weights, left):
        closed, carried, first, second = weights

        def body(carry, x):
            h, carried, left = carry
            x, (first, second) = x
            h = h + jnp.sqrt(first * x) / second + jnp.log(carried) / closed
            return (h, carried, left - 1.0), h

        whole = (0, (None, None))
        result = while_scan(lambda c: c[2] > 0, body, (1.0, carried, left), (xs, (first, second)), in_axes=whole)
        return result.carry[0] + jnp.sum(result.ys)

    rows = jnp.array([[0.0, 2.0, 3.0], [0.0, 3.0, 4.0], [0.0, 4.0, 5.0], [0.0, 5.0, 6.0]])
    lefts, gradient = jnp.array([0.0, 3.0, 5.0]), jax.grad(run)
    got = jax.jit(jax.vmap(gradient))(tuple(rows), lefts)
    want = [gradient(tuple(rows[:, i]), lefts[i]) for i in (1, 2)]
    close(jnp.stack(got), jnp.stack([jnp.zeros(4), *map(jnp.stack, want)], 1))
    values = jax.vmap(run)(tuple(rows), lefts)
    with jax.disable_jit():
        close(jax.vmap(run)(tuple(rows), lefts), values)


def test_steps_that_are_not_taken_are_passed_over_many_at_a_time():
    def run(h):
        return while_scan(lambda c: c < 3, lambda c, _: (c + 1, None), h, max_length=10**6).carry

    assert len(Program(run, 0.0).loops()) >= 5  # within one another


def test_disable_jit_sees_values():
    seen = []

    def body(carry, x):
        seen.append(float(carry))
        return carry + x, carry

    with jax.disable_jit():
        result = while_scan(lambda c: float(c) < 3, body, 0.0, jnp.ones(9), fill=-1)
    assert seen == [0.0, 1.0, 2.0]
    close(result.ys, np.array([0, 1, 2, -1, -1, -1, -1, -1, -1.0], np.float32))


def test_steps_that_are_not_taken_are_not_run():
    """What the gradient computes again, it does not say again."""
    calls = collections.Counter()

    def body(carry, x):
        jax.debug.callback(lambda _: calls.update(["body"]), carry[1])
        return (carry[0] + 1, jnp.sin(carry[1])), x

    def cond(carry):
        jax.debug.callback(lambda _: calls.update(["cond"]), carry[1])
        return carry[0] < 7

    def run(c):
        return while_scan(cond, body, (0, c), jnp.arange(100.0)).carry[1]

    for call in (run, jax.jit(jax.grad(run))):
        calls.clear()
        jax.block_until_ready(call(1.0))
        jax.effects_barrier()
        assert calls == {"body": 7, "cond": 8}


def test_what_a_step_says_in_a_loop_or_branch_of_its_own_is_not_said_again_either():
    said = []

    def speaking(h, _):
        jax.debug.callback(lambda _: said.append("said"), h)
        return jnp.sin(h), None

    def body(carry, _):
        h = jax.lax.scan(speaking, carry[1], None, length=2)[0]
        return (carry[0] + 1, jax.lax.cond(h > 0, lambda h: speaking(h, None)[0], jnp.cos, h)), None

    def run(h):
        return while_scan(lambda c: c[0] < 3, body, (0, h), max_length=9).carry[1]

    jax.block_until_ready(jax.jit(jax.grad(run))(1.0))
    jax.effects_barrier()
    assert len(said) == 3 * (2 + 1)


def test_steps_that_are_not_taken_are_not_differentiated():
    """Those that are taken are so equally often, and no other is beside them."""
    seen = collections.Counter()

    @jax.custom_jvp
    def told(h, step):
        return h

    @told.defjvp
    def _(primals, tangents):
        jax.debug.callback(lambda step: seen.update([int(step)]), primals[1])
        return primals[0], tangents[0]

    def run(h):
        body = lambda c, _: ((2 * told(*c), c[1] + 1), None)  # noqa: E731
        return while_scan(lambda c: c[1] < 3, body, (h, jnp.int32(0)), max_length=40).carry[0]

    assert jax.grad(run)(1.0) == 8
    jax.effects_barrier()
    assert seen.keys() == {0, 1, 2} and len(set(seen.values())) == 1


def _checked(t, end):
    checkify.check(t < end, "ran at {t} of {end}", t=t, end=end)
    return t


def _called_back(t, end):
    return jax.pure_callback(lambda t, end: t if t < end else 1 / 0, t, t, end, vmap_method="sequential")


def _counted(t, end):
    """Ends only while t is before the end."""
    return t + 0.0 * jax.lax.while_loop(lambda i: i < 2, lambda i: i + jnp.where(t < end, 1.0, 0.0), 0.0)


@pytest.mark.parametrize("noticed", [_checked, _called_back, _counted])
def test_no_check_sees_an_element_that_has_stopped(noticed):
    """Nor does a callback, or a loop that ends on some values alone, in steps that other elements of a vmap take."""

    def run(end, outputs=False):
        def body(t, _):
            return noticed(t, end) + 1, (t if outputs else None)

        return while_scan(lambda t: t < end, body, 0.0, max_length=12).carry

    runs = [run, functools.partial(run, outputs=True)]
    runs += [jax.grad(lambda end: run(end) * end)] if noticed is _checked else []
    for each in runs:
        each, ends = jax.vmap(each), jnp.array([3.0, 7.0, -1.0])
        if noticed is _counted:  # JAX takes no check of such a loop
            values = each(ends)
        else:
            error, values = checkify.checkify(each)(ends)
            assert error.get() is None
        close(values, jnp.array([3.0, 7.0, 0.0]))


def test_fori_with_traced_bounds():
    """Beyond `max_length`, and where the bounds of elements of a vmap differ; `works` has the others."""

    def power(x, n):
        return fori(0, n, lambda i, c: c * x, 1.0, max_length=20)

    close(jax.jit(power)(2.0, 50), 2.0**20)
    for disabled in (False, True):
        with jax.disable_jit(disabled):
            grads = jax.vmap(jax.grad(power), (None, 0))(2.0, jnp.arange(-1, 4))
        close(grads, np.array([0, 0, 1, 4, 12.0], np.float32))


@pytest.mark.parametrize("reverse", [False, True])
def test_the_indices_of_traced_bounds(reverse):
    def digits(lower, upper, **more):
        return fori(lower, upper, lambda i, c: c * 10 + i, 0, reverse=reverse, **more)

    traced = jax.jit(functools.partial(digits, max_length=4))
    for bounds in ((2, 5), (1, 1), (3, 1), (-1, 3)):
        assert int(traced(*bounds)) == int(digits(*bounds))
    total = jax.jit(lambda *bounds: fori(*bounds, lambda i, c: c + i, jnp.int32(0), reverse=reverse, max_length=400))
    assert int(total(jnp.int8(-100), jnp.int16(250))) == sum(range(-100, 250))  # beyond the type of the first
    far = jnp.iinfo(jnp.int32)
    assert int(traced(far.min, far.max)) == int(traced(far.min, far.min + 4))
    for lower, upper, taken in ((np.uint32(0), np.uint32(3e9), 400), (-1, np.uint32(3e9), 400), (np.uint32(3e9), 5, 0)):
        count = jax.jit(lambda *bounds: fori(*bounds, lambda _, c: c + 1, 0, reverse=reverse, max_length=400))
        assert int(count(lower, upper)) == taken


@pytest.mark.devices
@pytest.mark.parametrize("check", [False, True])
def test_devices_that_stop_each_by_itself(check):
    """With a collective in the body, at which devices that took different branches would wait forever."""
    lefts = jnp.array([0.0 if check else 2.0, 3.0, 1.0, 6.0])  # unchecked, nobody lends to who never starts
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, shared = jax.sharding.PartitionSpec("d"), jax.sharding.PartitionSpec()

    def one(left, weight, collective):
        def body(carry, _):
            c, left = carry
            ones = jax.lax.pmax(jnp.ones(()), "d") if collective else 1.0
            return (c + jnp.log(left) * weight * ones, left - 1.0), 1 / left

        result = while_scan(lambda carry: carry[1] > 0, body, (left * 0, left), max_length=10)
        return result.carry[0] + jnp.sum(result.ys)

    def sharded(lefts, weight):
        each = lambda left, w: one(left[0], w, True)[None]  # noqa: E731
        run = jax.shard_map(each, mesh=mesh, in_specs=(rows, shared), out_specs=rows, check_vma=check)
        return jnp.sum(run(lefts, weight))

    def expected(lefts, weight):
        return jnp.sum(jax.vmap(lambda left: one(left, weight, False))(lefts))

    close(jax.jit(jax.value_and_grad(sharded, (0, 1)))(lefts, 2.0), jax.value_and_grad(expected, (0, 1))(lefts, 2.0))


# Memory


def test_each_level_of_remat_is_a_loop_within_the_others():
    def loss(w, levels):
        body = lambda carry, _: ((jnp.sin(carry[0] * w), carry[1] + 1), None)  # noqa: E731
        return while_scan(lambda c: c[1] < 9, body, (w, 0), max_length=500, remat=Remat(levels=levels)).carry[0]

    two, three = (len(Program(jax.grad(functools.partial(loss, levels=n)), 0.5).loops()) for n in (2, 3))
    assert two < three


WIDTH = 4096


def memory(save, steps, *, gradient=False):
    """Bytes of outputs and of temporaries, in outputs of one step."""

    def run(c):
        result = while_scan(lambda c: c[0] < 1e9, lambda c, _: (c * 1.1, jnp.sin(c)), c, max_length=steps, save=save)
        return result.carry, result.ys

    def loss(c):
        return sum(jnp.sum(leaf * leaf) for leaf in jax.tree.leaves(run(c)))

    found = jax.jit(jax.grad(loss) if gradient else run).lower(jnp.ones(WIDTH)).compile().memory_analysis()
    return (found.output_size_in_bytes + found.temp_size_in_bytes) / (4 * WIDTH)


@pytest.mark.parametrize(("steps", "copies"), [(1024, 0), (1021, 1)])
def test_memory_falls_with_what_is_kept(steps, copies):
    """Of a length that `save` does not divide, XLA copies what is kept once."""
    nothing = memory(None, steps)
    assert memory("all", steps) >= steps  # the measure sees them
    for every in (16, 64):
        assert steps // every <= memory(every, steps) - nothing <= (1.1 + copies) * steps / every + 2


@pytest.mark.parametrize("save", ["last", None])
def test_without_stacked_outputs_nothing_grows(save):
    assert memory(save, 1021) - memory(save, 16) <= 1


@pytest.mark.parametrize("reverse", [False, True])
def test_xs_are_not_copied_where_nothing_is_differentiated(reverse):
    """Not by a chunk that is fed its slices, and not to fill up the last chunk."""
    steps = 257

    def run(c, xs):
        return while_scan(lambda c: c[0] < 1e9, lambda c, x: (c + jnp.sin(x), None), c, xs, reverse=reverse).carry

    given = jnp.ones(WIDTH), jnp.ones((steps, WIDTH))
    assert jax.jit(run).lower(*given).compile().memory_analysis().temp_size_in_bytes < 4 * WIDTH
    np.testing.assert_allclose(run(*given), 1 + steps * jnp.sin(1.0), rtol=1e-5)


def test_memory_of_the_gradient():
    """The carries of about sqrt(max_length) chunks, and of the steps of one; not one output per step."""
    assert memory(64, 1024, gradient=True) <= 1024 / 4 < 1024 <= memory("all", 1024, gradient=True)


def test_the_gradient_saves_of_a_step_what_is_not_had_for_nothing():
    """Of 1,024 steps in chunks of 32: the carry before each chunk, and within one each step's carry and tanh."""

    def loss(w, c):
        run = while_scan(lambda c: c[0, 0] < 2, lambda c, _: (jnp.tanh(c @ w), None), c, max_length=1024)
        return jnp.sum(run.carry)

    w, c = jnp.eye(8), jnp.ones((4096, 8))
    saved = Program(jax.grad(loss, argnums=(0, 1)), w, c).temp_bytes / c.nbytes
    least = 32 + 2 * 32
    assert least <= saved <= least + 6


@pytest.mark.parametrize("options", [{}, {"remat": Remat(chunk=2)}], ids=str)
@pytest.mark.parametrize("rows", [False, True])
def test_the_gradient_where_no_branch_may_depend_on_data(rows, options):
    """Chunks that may not be left out, many more than each has steps, are not taken for chunks that are not run."""
    weight, h, xs = jnp.float32(0.5), jnp.zeros(2), jnp.ones((64, 2))

    def loss(weight, h, xs):
        def body(h, x):
            h = h + 0.1 * jnp.tanh(weight * h + x)
            return h, h

        result = while_scan(lambda h: h < 1.5 if rows else jnp.sum(h) < 3.0, body, h, xs, **options)
        return jnp.sum(result.carry) + jnp.sum(jnp.sin(result.ys))

    mesh, everywhere = jax.sharding.Mesh(np.array(jax.devices()), ("i",)), jax.P()
    gradient = jax.grad(loss, (0, 1, 2))
    specs = {"mesh": mesh, "in_specs": (everywhere,) * 3, "out_specs": everywhere}
    close(jax.jit(jax.shard_map(gradient, check_vma=False, **specs))(weight, h, xs), gradient(weight, h, xs))


def halve(c, _):
    return c / 2, c


def double(c, _):
    return c * jnp.bfloat16(2), c


@pytest.mark.parametrize("how", [contextlib.nullcontext, jax.disable_jit, functools.partial(rewriting, False)])
@pytest.mark.parametrize(
    ("cond", "step", "init", "length", "taken"),
    [
        (lambda c: c * c > 100, halve, 50_000, 20, 13),  # an int of that size is negative when it is squared
        (lambda c: c * c > 100, halve, jnp.full(2, 50_000), 20, [13, 13]),
        (lambda c: c * c < 0, halve, jnp.full(2, 50_000), 20, [0, 0]),
        (lambda c: c * c > 100, halve, 50_000, 0, 0),
        (lambda c: c > 1.0, double, 1.001, 3, 0),  # in bfloat16 it is 1
        (lambda c: c > jnp.bfloat16(1.0), lambda c, _: (c * jnp.float32(2), c), 1.001, 3, 0),  # weak throughout
        (lambda c: c > jnp.bfloat16(1.0), lambda c, _: (c * jnp.float32(2), c), jnp.float32(1.001), 3, 3),
    ],
)
def test_a_condition_is_asked_about_the_type_that_the_carry_takes_on(cond, step, init, length, taken, how):
    with how(), jax.numpy_dtype_promotion("standard"):
        result = while_scan(cond, step, init, max_length=length)
    np.testing.assert_array_equal(result.steps, taken)
    np.testing.assert_array_equal(result.stopped, np.full(np.shape(taken), length > 0) & (np.max(taken) < length))

    def limited(carry):
        return jnp.any(cond(carry[0])) & (carry[1] < length)

    with jax.numpy_dtype_promotion("standard"):
        after, _ = jax.lax.while_loop(limited, lambda carry: (step(carry[0], None)[0], carry[1] + 1), (init, 0))
    assert length == 0 or result.carry.dtype == after.dtype
    np.testing.assert_array_equal(np.asarray(result.carry, float), np.asarray(after, float))


def test_the_gradient_of_a_carry_that_takes_on_another_type():
    def loss(w, init):
        return while_scan(lambda c: c * c > 100, lambda c, _: (c * w, None), init, max_length=20).carry

    close(jax.grad(loss)(0.5, 50_000), 13 * 50_000 * 0.5**12)
    close(jax.grad(loss)(0.5, 50_000), jax.grad(loss)(0.5, 50_000.0))


@pytest.mark.parametrize("init", [50_000, jnp.full(2, 50_000)])
def test_a_weak_type_costs_a_second_trace_as_in_lax_scan(init):
    bodies, conditions = [], []

    def body(c, _):
        bodies.append(c)
        return c / 2, None

    def cond(c):
        conditions.append(c)
        return c > 2

    while_scan(cond, body, init, max_length=5)
    assert (len(bodies), len(conditions)) == (2, 2)


@pytest.mark.parametrize(
    "loop",
    [
        lambda h: while_scan(lambda h: h < 3.0, lambda h, _: (h + 1.0, h), h, max_length=8),
        lambda h: while_scan(lambda h: h < 3.0, lambda h, _: (h + 1.0, h), jnp.stack([h, h]), max_length=8),
        lambda h: fori(0, jnp.asarray(h + 3, int), lambda i, h: h + i, h, max_length=8),
    ],
    ids=["one", "rows", "fori"],
)
def test_without_jit_what_is_staged_all_the_same_has_no_values(loop):
    """As `jax.lax.while_loop`, which goes on."""

    def of_branch(h):
        return jax.vmap(lambda on: jax.lax.cond(on, loop, lambda h: jax.tree.map(jnp.zeros_like, loop(h)), h))(flags)

    flags = jnp.array([True, False])
    expected = [loop(1.0), of_branch(1.0)]
    with jax.disable_jit():
        close([jax.checkpoint(loop)(1.0), of_branch(1.0)], expected)
        staged = jax.make_jaxpr(loop)(1.0)
    close(jax.core.eval_jaxpr(staged.jaxpr, staged.consts, 1.0), jax.tree.leaves(expected[0]))
