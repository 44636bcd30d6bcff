"""`while_scan`, and `fori` with traced bounds: against Python loops, and scans of as many steps."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hlo import Program
from loops import array
from oracle import assert_bitwise
from thin import slow

import treescan
from treescan import fori, while_scan

LENGTH = 23


def step(carry, x):
    n, c = carry
    c = jnp.sin(c) * 1.1 + 0.1 + (0.0 if x is None else x)
    return (n + 1, c), {"y": c * 2, "n": n}


def until(stop, **options):
    def run(c, xs=None):
        most = {} if xs is not None else {"max_length": LENGTH}
        return while_scan(lambda carry: carry[0] < stop, step, (0, c), xs, **most, **options)

    return run


def scanned(stop, reverse=False):
    """The same as a scan of as many steps."""

    def run(c, xs=None):
        first = slice(LENGTH - stop, None) if reverse else slice(0, stop)
        some = None if xs is None else xs[first]
        (n, c), ys = jax.lax.scan(step, (jnp.int32(0), c), some, length=stop, reverse=reverse)
        left = jax.tree.map(lambda y: jnp.zeros((LENGTH - stop, *y.shape[1:]), y.dtype), ys)
        parts = (left, ys) if reverse else (ys, left)
        return (n, c), jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)

    return run


def loss_of(run):
    def loss(c, *xs):
        carry, ys = run(c, *xs)[:2]
        return jnp.sum(carry[1] ** 2) + jnp.sum(jnp.cos(ys["y"]))

    return loss


def close(actual, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5), actual, expected)


EVERYDAY = [(0, True, False), (7, False, False), (7, True, True), (23, False, True)]
OTHERS = [(1, True, False), (23, True, True)]


@pytest.mark.parametrize(("stop", "with_xs", "reverse"), [*EVERYDAY, *slow(*OTHERS)])
def test_is_a_scan_of_as_many_steps(stop, with_xs, reverse):
    args = (array(3), array(LENGTH, 3, seed=1)) if with_xs else (array(3),)
    result = until(stop, reverse=reverse)(*args)
    close((result.carry, result.ys), scanned(stop, reverse)(*args))
    assert int(result.steps) == stop and bool(result.stopped)
    over = tuple(range(len(args)))
    mine, theirs = loss_of(until(stop, reverse=reverse)), loss_of(scanned(stop, reverse))
    close(jax.jit(jax.grad(mine, over))(*args), jax.grad(theirs, over)(*args))
    close(jax.jvp(mine, args, args), jax.jvp(theirs, args, args))
    if stop == 7:
        close(jax.jit(jax.hessian(mine))(*args), jax.jit(jax.hessian(theirs))(*args))


@pytest.mark.parametrize("length", [0, 1, 2, 3, 7, 100, 1000])
def test_runs_into_max_length(length):
    result = while_scan(lambda c: c < 2000, lambda c, _: (c + 1, None), 0, max_length=length)
    assert (int(result.carry), int(result.steps), bool(result.stopped)) == (length, length, False)
    result = while_scan(lambda c: c < 0, lambda c, _: (c + 1, c), 0, max_length=length, fill=5)
    assert (int(result.carry), int(result.steps), bool(result.stopped)) == (0, 0, True)
    np.testing.assert_array_equal(result.ys, np.full(length, 5))


def test_longer_xs_are_cut():
    xs = array(30, 3)
    result = while_scan(lambda _: True, lambda c, x: (c + x, c), jnp.zeros(3), xs, max_length=7)
    close(result.carry, xs[:7].sum(0))
    assert result.ys.shape == (7, 3)
    result = while_scan(lambda _: True, lambda c, x: (c + x, x), jnp.zeros(3), xs, max_length=7, reverse=True)
    close(result.ys, xs[:7])


def logs(carry, x):
    """Is NaN from where it stops on, and so is its derivative."""
    c, left = carry
    return (c + jnp.log(left), left - 1.0), 1.0 / left


def test_elements_of_vmap_stop_each_by_itself():
    lefts = jnp.array([0.0, 3.0, 1.0, 6.0])

    def run(left, weight):
        result = while_scan(lambda carry: carry[1] > 0, logs, (weight * 1.0, left), max_length=10)
        return result.carry[0] + jnp.sum(result.ys) * weight, result.steps

    values, steps = jax.vmap(run, in_axes=(0, None))(lefts, 2.0)
    assert_bitwise(steps, lefts.astype(jnp.int32))
    for each, left in zip(values, lefts, strict=True):
        close(each, run(left, 2.0)[0])

    def expected(left):
        terms = [float(left) - i for i in range(int(left))]
        return [sum(1 / t - 2.0 / t**2 for t in terms), 1.0 + sum(1 / t for t in terms)]

    grads = jax.jit(jax.vmap(jax.grad(lambda left, w: run(left, w)[0], (0, 1)), in_axes=(0, None)))(lefts, 2.0)
    close(jnp.stack(grads, 1), np.array([expected(left) for left in lefts], np.float32))
    summed = jax.grad(lambda lefts, w: jnp.sum(jax.vmap(run, in_axes=(0, None))(lefts, w)[0]), (0, 1))(lefts, 2.0)
    close(summed, (grads[0], jnp.sum(grads[1])))
    nested = jax.vmap(jax.vmap(jax.grad(lambda left, w: run(left, w)[0]), in_axes=(0, None)), in_axes=(None, 0))
    close(nested(lefts, jnp.array([2.0, 2.0])), jnp.stack([grads[0]] * 2))


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
    calls = collections.Counter()

    def count(name):
        calls[name] += 1

    def body(carry, x):
        jax.debug.callback(lambda _: count("body"), carry[1])
        return (carry[0] + 1, jnp.sin(carry[1])), x

    def cond(carry):
        jax.debug.callback(lambda _: count("cond"), carry[1])
        return carry[0] < 7

    for xs in (None, jnp.arange(100.0)):
        calls.clear()
        jax.block_until_ready(while_scan(cond, body, (0, 1.0), xs, max_length=100))
        jax.effects_barrier()
        assert calls == {"body": 7, "cond": 8}
        calls.clear()
        jax.jit(jax.grad(lambda c, xs=xs: while_scan(cond, body, (0, c), xs, max_length=100).carry[1]))(1.0)
        jax.effects_barrier()
        assert calls == {"body": 7, "cond": 8}, "what the gradient computes again, it does not say again"


def test_what_body_and_condition_close_over_is_differentiated():
    def run(a, limit):
        return while_scan(lambda c: c < limit, lambda c, _: (c * a, None), a, max_length=50).carry

    close(jax.jit(jax.grad(run))(2.0, 30.0), 5 * 2.0**4)
    close(jax.jit(jax.vmap(jax.grad(run), in_axes=(None, 0)))(2.0, jnp.array([1.0, 30.0])), np.array([1.0, 80.0]))


def power(x, n):
    return fori(0, n, lambda i, c: c * x, 1.0, max_length=20)


def test_fori_with_traced_bounds():
    close(jax.jit(power)(2.0, 5), 32.0)
    close(jax.jit(jax.grad(power))(2.0, 5), 80.0)
    close(jax.vmap(jax.grad(power), (None, 0))(2.0, jnp.arange(-1, 4)), np.array([0, 0, 1, 4, 12.0], np.float32))
    close(jax.jit(jax.grad(jax.grad(power)))(2.0, 5), 160.0)
    close(jax.jit(power)(2.0, 50), 2.0**20)
    with jax.disable_jit():
        close(jax.vmap(jax.grad(power), (None, 0))(2.0, jnp.arange(4)), np.array([0, 1, 4, 12.0], np.float32))


@pytest.mark.parametrize("reverse", [False, True])
def test_the_indices_of_traced_bounds(reverse):
    def digits(lower, upper):
        return fori(lower, upper, lambda i, c: c * 10 + i, 0, max_length=4, reverse=reverse)

    for bounds in ((2, 5), (1, 1), (3, 1), (-1, 3)):
        expected = treescan.fori(*bounds, lambda i, c: c * 10 + i, 0, reverse=reverse)
        assert int(jax.jit(digits)(*bounds)) == int(expected)
    far = jnp.iinfo(jnp.int32)
    assert int(jax.jit(digits)(far.min, far.max)) == int(jax.jit(digits)(far.min, far.min + 4))


def test_keys_of_traced_bounds():
    def body(i, c, *, key):
        return c.at[i].set(jax.random.uniform(key))

    key = jax.random.key(0)
    expected = fori(1, 5, body, jnp.zeros(5), key=key)
    for reverse in (False, True):
        run = jax.jit(lambda n, r=reverse: fori(1, n, body, jnp.zeros(5), key=key, max_length=9, reverse=r))
        assert_bitwise(run(5), expected)


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
        run = jax.shard_map(
            lambda left, w: one(left[0], w, True)[None],
            mesh=mesh,
            in_specs=(rows, shared),
            out_specs=rows,
            check_vma=check,
        )
        return jnp.sum(run(lefts, weight))

    def expected(lefts, weight):
        return jnp.sum(jax.vmap(lambda left: one(left, weight, False))(lefts))

    close(jax.jit(jax.value_and_grad(sharded, (0, 1)))(lefts, 2.0), jax.value_and_grad(expected, (0, 1))(lefts, 2.0))
