"""Rows of a `while_scan` that stop each by itself: against a Python loop for each row."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hlo import Program
from jaxprs import equations
from loops import array
from oracle import as_numpy, assert_close
from thin import slow

import treescan
from treescan import while_scan

LENGTH, D, FILL = 13, 2, -1.0
STOPS = jnp.array([0.0, 3.0, 7.0, 30.0, 13.0, 1.0])


def step(weights, carry, x):
    """Divides by what is zero where a row has stopped, and reads a scale that is bad where a row never starts."""
    h = jnp.tanh(carry["h"] @ weights + (0.3 if x is None else x)) * jnp.log(carry["scale"])[..., None]
    h = h + 0.1 * jnp.sqrt(carry["left"])[..., None]
    y = {"a": h / carry["left"][..., None], "n": carry["n"]}
    return {**carry, "h": h, "n": carry["n"] + 1, "left": carry["left"] - 1.0}, y


def goes_on(carry):
    return carry["left"] > 0


def init_of(h, left):
    bad = jnp.where(left > 0, 0.5 + 0.1 * left, jnp.nan)
    return {"h": h, "left": left, "n": jnp.zeros(left.shape, jnp.int32), "scale": bad}


def ours(options, weights, h, left, xs=None):
    body = functools.partial(step, weights)
    return while_scan(goes_on, body, init_of(h, left), xs, max_length=LENGTH, fill={"a": FILL, "n": -1}, **options)


def loss_of(run):
    """A loss of what is smooth; it reads nothing that is bad before the loop."""

    def loss(weights, h, left, xs=None):
        carry, ys = run(weights, h, left, xs)[:2]
        return jnp.sum(jnp.sin(carry["h"])) + jnp.sum(ys["a"] ** 2) + jnp.sum(carry["left"])

    return loss


def given_of(*batch, xs=True, stops=STOPS):
    left = stops.reshape(batch)
    return array(D, D, seed=1), array(*batch, D, seed=2), left, *([array(LENGTH, *batch, D, seed=3)] if xs else [])


# Where the rows are.


def test_a_weakly_typed_init():
    def grow(carry, _):
        return (carry[0] + 1.5, carry[1] * 1.5), None

    init = jnp.zeros(4), 2
    result = while_scan(lambda c: c[0] < 3, grow, init, max_length=5, row_axes={"carry": (0, None)}, compact=True)
    assert_close(result.carry, (jnp.full(4, 3.0), jnp.float32(4.5)))


def test_a_body_and_a_condition_see_good_values_alone():
    """Not even forwards does a row that has stopped show what it stopped with."""
    seen = []

    def body(left, x):
        jax.debug.callback(lambda left: seen.append(as_numpy(left)), left)
        return left - 1, None

    jax.block_until_ready(while_scan(lambda left: left > 0, body, jnp.array([0.0, 2.0, 5.0]), max_length=9))
    jax.effects_barrier()
    assert [rows.tolist() for rows in seen] == [[2, 2, 5], [2, 1, 4], [2, 2, 3], [2, 2, 2], [2, 2, 1]]


def test_a_body_that_takes_valid_only_where_there_are_rows():
    def body(left, x, valid=None):
        return left - 1, None if valid is None else valid

    rows = while_scan(lambda left: left > 0, body, jnp.array([1.0, 3.0]), max_length=4)
    assert rows.ys.tolist() == [[True, True], [False, True], [False, True], [False, False]]
    assert while_scan(lambda left: left > 0, body, 2.0, max_length=4).ys is None


# On devices, and beside what JAX has of its own.

LEFT = jnp.array([0.0, 3.0, 7.0, 2.0, 1.0, 1.0, 0.0, 12.0])


@pytest.mark.devices
@pytest.mark.parametrize(("compact", "check"), [(True, True), (False, False)])
def test_rows_of_several_devices(compact, check):
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, shared = jax.sharding.PartitionSpec("d"), jax.sharding.PartitionSpec()
    loss = loss_of(functools.partial(ours, {"compact": compact}))

    def inner(*given):
        return jax.lax.psum(loss(*given), "d")

    def sharded(*given):
        return jax.shard_map(inner, mesh=mesh, in_specs=(shared, rows, rows), out_specs=shared, check_vma=check)(*given)

    assert_close(*(jax.jit(jax.value_and_grad(f, (0, 1)))(*given_of(8, xs=False, stops=LEFT)) for f in (sharded, loss)))


@pytest.mark.parametrize("compact", [False, True])
def test_what_the_gradient_computes_again_it_does_not_say_again(compact):
    rows = []

    def body(carry, _):
        jax.debug.callback(lambda h: rows.append(len(h)), carry[0])
        return (jnp.sin(carry[0]), carry[1] - 1), None

    def loss(h):
        result = while_scan(lambda c: c[1] > 0, body, (h, LEFT), max_length=16, compact=compact)
        return jnp.sum(result.carry[0])

    jax.block_until_ready(jax.jit(jax.grad(loss))(LEFT))
    jax.effects_barrier()
    assert rows == ([6] * 8 + [1] * 4 if compact else [8] * 12)


def test_a_number_of_rows_that_is_symbolic():
    def run(left):
        return while_scan(lambda left: left > 0, lambda left, _: (left - 1, left), left, max_length=16).steps

    (rows,) = jax.export.symbolic_shape("b")
    exported = jax.export.export(jax.jit(run))(jax.ShapeDtypeStruct((rows,), jnp.float32))
    assert_close(exported.call(LEFT), LEFT.astype(jnp.int32))


@pytest.mark.parametrize("most", [700, *slow((691,))])
def test_of_many_chunks_several_are_left_out_together(most):
    """In a derivative, of a length that they divide, and of one that they do not."""

    def loss(weights, h, xs):
        body = lambda c, x: ((jnp.tanh(c[0] @ weights + x), c[1] - 1), c[0])  # noqa: E731
        run = while_scan(lambda c: c[1] > 0, body, (h, LEFT), xs, max_length=most, compact=(3,), fill=0)
        return jnp.sum(run.carry[0] ** 2) + jnp.sum(jnp.sin(run.ys))

    def by_rows(weights, h, xs):
        total = 0.0
        for b, steps in enumerate(np.asarray(LEFT)):
            c = h[b]
            for t in range(int(steps)):
                total, c = total + jnp.sum(jnp.sin(c)), jnp.tanh(c @ weights + xs[t, b])
            total = total + jnp.sum(c**2)
        return total

    given = array(3, 3, seed=1), array(8, 3, seed=2), array(most, 8, 3, seed=3)
    got, want = (jax.jit(jax.value_and_grad(f, (0, 1, 2)))(*given) for f in (loss, by_rows))
    assert_close(got, want)
    tangents = jax.tree.map(jnp.cos, given)
    assert_close(*(jax.jit(functools.partial(jax.jvp, f))(given, tangents) for f in (loss, by_rows)))


# What it costs.


def test_with_compact_each_row_is_run_on_its_own_steps():
    """Of rows that stop after exponentially distributed numbers of steps: at most 1.5 times their sum."""
    rows, steps = 64, np.ceil(np.random.default_rng(0).exponential(50, 64))
    count = []

    def body(carry, _):
        jax.debug.callback(lambda c: count.append(c.shape[0]), carry[1])
        return (carry[0] - 1, jnp.sin(carry[1])), None

    left = jnp.asarray(steps, jnp.float32)
    init = left, jnp.ones(rows)
    jax.block_until_ready(while_scan(lambda c: c[0] > 0, body, init, max_length=512, compact=True))
    jax.effects_barrier()
    assert steps.sum() <= sum(count) <= 1.5 * steps.sum()


def selections(function, *args, shape):
    """How many instructions choose between two arrays of a shape."""
    return sum(f"{shape}{{" in line.split(" select(")[0] for line in Program(function, *args) if " select(" in line)


def decode(axes, left, cache):
    """Writes a row of a cache in each step, as decoding does; `axes` says where the cache has rows."""
    rows = jnp.arange(left.shape[0])

    def body(carry, _, *, valid):
        left, cache = carry
        place = jnp.where(valid, left.astype(int), cache.shape[1])
        return (left - 1, cache.at[rows, place].set(jnp.sin(left), mode="drop")), None

    init = left, cache
    return while_scan(lambda carry: carry[0] > 0, body, init, max_length=64, row_axes={"carry": (0, axes)}).carry


def test_what_all_rows_share_is_not_copied():
    """A step runs where some row takes it, so that nothing chooses between a shared leaf of before and of after."""
    left, cache = jnp.arange(8.0), jnp.zeros((8, 33))
    assert selections(functools.partial(decode, None), left, cache, shape="f32[8,33]") == 0
    assert selections(functools.partial(decode, 0), left, cache, shape="f32[8,33]") > 0


def test_rows_that_have_stopped_are_shown_what_they_keep():
    """One selection per leaf and step, where a body that takes `valid` needs two."""

    def plain(carry, _):
        left, h = carry
        return (left - 1, jnp.tanh(h + 0.5)), None

    def told(carry, _, *, valid):
        left, h = carry
        return (left - 1, jnp.tanh(h + jnp.sum(h * valid[:, None].astype(h.dtype), 0, keepdims=True))), None

    def run(body, left, h):
        return while_scan(lambda carry: carry[0] > 0, body, (left, h), max_length=64).carry

    given = jnp.arange(8.0), jnp.ones((8, 33))
    assert [selections(functools.partial(run, body), *given, shape="f32[8,33]") for body in (plain, told)] == [1, 2]


def test_a_cache_that_all_rows_share_is_not_copied_for_a_body_that_decides():
    def body(carry, _):
        left, cache = carry
        chosen = jnp.argmax(2 * cache[:, :4], -1)
        return (left - 1, cache.at[0, 0].add(1.0)), chosen

    init, axes = (jnp.arange(4), jnp.ones((4, 8))), (0, None)
    jaxpr = jax.make_jaxpr(
        lambda *init: while_scan(lambda c: c[0] > 0, body, init, max_length=9, row_axes={"carry": axes})
    )
    copies = [each for each in equations(jaxpr(*init).jaxpr, "gather") if each.outvars[0].aval.shape == (4, 8)]
    assert not copies


# A large leaf of which a step writes a small part


def cache_of_rows(shared):
    """A step that writes one position per row into a cache, its init, and the options that it needs."""
    rows, positions = 4, 512
    init = {"cache": jnp.zeros((rows, positions, 16)), "i": jnp.zeros(rows, jnp.int32)}

    def write(carry, x, at):
        h = jnp.sin(x + carry["i"].astype(x.dtype)[:, None])
        cache = carry["cache"].at[jnp.arange(rows), at].set(h, mode="drop")
        return {"cache": cache, "i": carry["i"] + 1}, h

    def step(carry, x):
        return write(carry, x, carry["i"])

    def step_of_shared(carry, x, valid):
        return write(carry, x, jnp.where(valid, carry["i"], positions))

    return (step_of_shared, init, {"row_axes": {"carry": {"cache": None, "i": 0}}}) if shared else (step, init, {})


@pytest.mark.parametrize("shared", [True, False])
def test_a_cache_that_all_rows_share_is_not_copied(shared):
    """The loop then selects nothing of the size of the cache. The results are the same."""
    lengths, xs, (step, init, options) = jnp.array([5, 0, 40, 17]), jnp.ones((40, 4, 16)), cache_of_rows(shared)

    def run(init, xs):
        return while_scan(lambda carry: carry["i"] < lengths, step, init, xs, **options)[:3]

    selects = [line for text in Program(run, init, xs).loops() for line in text.splitlines() if "select(" in line]
    assert any("= f32[4,512,16]" in line for line in selects) != shared
    # A mask by hand has the copy too: what is written is selected from, and from what was there before.
    assert Program(run, init, xs).copies_in_loops(4, 512, 16) != shared
    carry, ys, _ = run(init, xs)
    assert_close((carry, ys), treescan.mask_scan(cache_of_rows(False)[0], init, xs, lengths=lengths))


@pytest.mark.parametrize("options", [{}, {"save": "last"}, {"remat": "step"}, {"reverse": True}], ids=str)
def test_the_gradient_of_no_rows(options):
    """A data loader drops all rows of a batch. `lax.scan` goes on, and so do the other verbs."""
    given = given_of(0, stops=STOPS[:0])
    gradient = jax.grad(loss_of(functools.partial(ours, options)), (0, 1, 2, 3))
    for leaf, of in zip(gradient(*given), given, strict=True):
        np.testing.assert_array_equal(leaf, np.zeros(of.shape))
