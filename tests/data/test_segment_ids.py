"""Segment ids and positions of packed rows, and rows made of the ids of a pipeline: against a loop over their steps."""

import functools
import itertools
import re

import chex
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import numpy.testing as npt
import pytest
from hypothesis import example, given, settings
from loops import array
from oracle import assert_close
from test_pad import assert_same_bits

import treescan
from treescan import Packed, linear_scan, mask_scan, pack, repad, unpack

T = 8
GIVEN = np.array(
    [
        [1, 1, 1, 2, 2, 3, 0, 0],  # as maxtext and grain number them
        [0, 0, 7, 7, 0, 0, 2, 2],  # padding at the start and in the middle, ids that decrease
        [0, 0, 0, 0, 0, 0, 0, 0],
        [5, 5, 5, 5, 5, 5, 5, 5],
    ]
)
LONG = [3, 2, 1, 2, 2, 8]


def runs(ids):
    """The oracle: the row, the first step and the length of each run of equal ids, of ids [R, T]."""
    return [
        (row, steps[0], len(steps))
        for row, line in enumerate(ids)
        for number, group in itertools.groupby(range(len(line)), lambda t, line=line: line[t])
        if number
        for steps in [list(group)]
    ]


def numbered(spans, shape):
    """The oracle: segment ids and positions, of spans in rows [R, T]."""
    ids, positions = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    for row, start, length in sorted(spans, key=lambda span: span[:2]):
        if length:
            ids[row, start : start + length] = ids[row].max() + 1
            positions[row, start : start + length] = np.arange(length)
    return ids, positions


def of_ids(ids, data=None, num_segments=None):
    data = np.arange(ids.size, dtype=np.float32).reshape(ids.shape) if data is None else data
    return Packed.from_segment_ids(data, ids, time_axis=1, num_segments=num_segments)


def check(packed, spans, empty=0):
    ids, positions = numbered(spans, (packed.rows, packed.steps))
    spans = np.array([*spans, *[(0, 0, 0)] * empty], np.int32).reshape(-1, 3)
    resets = np.zeros_like(ids, bool)
    rows, starts, _ = spans[spans[:, 2] > 0].T
    resets[rows, starts] = True
    assert_same_bits(tuple(packed.index), tuple(spans.T))
    assert_same_bits((packed.mask.T, packed.resets.T), (ids > 0, resets))
    assert_same_bits((packed.segment_ids.T, packed.positions.T), (ids, positions))


@st.composite
def rows_of_ids(draw):
    """Ids [R, T] that are right: each number is one run of its row."""
    rows, steps = draw(st.integers(0, 3)), draw(st.integers(0, 7))
    ids = np.zeros((rows, steps), np.int32)
    for row in range(rows):
        numbers = draw(st.permutations(range(1, 8)))
        breaks = draw(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=steps, max_size=steps))
        k, is_padding = 0, False
        for t, (begins, pads) in enumerate(breaks):
            if t == 0 or begins or is_padding:
                k, is_padding = k + 1, pads
            ids[row, t] = 0 if is_padding else numbers[k - 1]
    return ids


@settings(max_examples=10)
@given(rows_of_ids(), st.integers(0, 2))
@example(GIVEN, 2)
def test_a_batch_of_ids_is_read_as_a_loop_reads_it(ids, more):
    spans = runs(ids)
    check(of_ids(ids), spans, empty=not spans)
    count = max(len(spans), 1) + more
    check(of_ids(ids, num_segments=count), spans, empty=count - len(spans))
    traced = jax.jit(functools.partial(of_ids, num_segments=count))(ids)
    assert_same_bits(traced, of_ids(ids, num_segments=count))
    turned = Packed.from_segment_ids(traced.data, ids.T, time_axis=0, num_segments=count)
    assert_same_bits(turned, traced)


@settings(max_examples=10)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=9), st.sampled_from([None, 10]))
def test_packed_sequences_are_numbered_in_their_rows(lengths, length):
    packed = pack([np.zeros(n, np.float32) for n in lengths], length=length)
    spans = list(zip(*(part.tolist() for part in packed.index), strict=True))
    want = numbered(spans, (packed.rows, packed.steps))
    assert_same_bits((packed.segment_ids.T, packed.positions.T), want)
    assert_same_bits(jax.jit(lambda packed: (packed.segment_ids.T, packed.positions.T))(packed), want)
    again = of_ids(np.asarray(packed.segment_ids.T), packed.data.T)
    assert_same_bits((again.mask, again.resets, again.positions), (packed.mask, packed.resets, packed.positions))


def test_a_stack_of_batches_is_numbered_and_mapped():
    both = np.stack([GIVEN, GIVEN[::-1]])
    one, other = (of_ids(ids, num_segments=6) for ids in both)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), one, other)
    for name in ("segment_ids", "positions"):
        want = jnp.stack([getattr(one, name), getattr(other, name)])
        assert_same_bits(getattr(stacked, name), want)
        assert_same_bits(jax.vmap(lambda packed, name=name: getattr(packed, name))(stacked), want)
    mapped = jax.vmap(functools.partial(of_ids, num_segments=6))(both, jnp.stack([one.data.T, other.data.T]))
    chex.assert_trees_all_equal(mapped, stacked)


def test_data_are_trees_of_any_leaves():
    """NumPy, JAX, typed keys, and whatever else a pipeline has beside its tokens."""
    keys = jax.random.split(jax.random.key(0), GIVEN.shape)
    data = {"tokens": GIVEN.astype(np.int8), "x": jnp.ones((*GIVEN.shape, 3)), "keys": keys, "none": None}
    for run in (of_ids, lambda ids, data: jax.jit(lambda data: of_ids(ids, data))(data)):
        packed = run(GIVEN, data)
        assert packed.data["x"].shape == (T, 4, 3)
        assert packed.data["tokens"].dtype == jnp.int8
        for part, (row, start, length) in zip(unpack(packed.data, packed), runs(GIVEN), strict=True):
            npt.assert_array_equal(part["tokens"], GIVEN[row, start : start + length])
            assert jnp.array_equal(part["keys"], keys[row, start : start + length])
            assert part["none"] is None


def test_ids_of_any_type_and_ids_that_a_trace_closes_over():
    want = of_ids(GIVEN)
    for dtype in (np.int8, np.uint32, np.int64):
        assert_same_bits(of_ids(GIVEN.astype(dtype)), want)
    assert_same_bits(of_ids(jnp.asarray(GIVEN)), want)
    assert_same_bits(jax.jit(lambda data: of_ids(GIVEN, data))(want.data.T), want)


def test_traced_segments_after_the_last_that_fits_are_padding():
    traced = jax.jit(functools.partial(of_ids, num_segments=4))(GIVEN)
    check(traced, runs(GIVEN)[:4])


def test_a_traced_id_that_returns_is_another_sequence():
    ids = np.array([[1, 1, 0, 1, 2, 1]])
    check(jax.jit(functools.partial(of_ids, num_segments=4))(ids), runs(ids))


@pytest.mark.parametrize("time_axis", [0, 1])
def test_the_cure_of_an_id_that_returns(time_axis):
    ids = np.array([[1, 1, 0, 1, 2, 1], [0, 2, 1, 2, 0, 2], [3, 3, 3, 3, 3, 3]])
    given = ids if time_axis else ids.T
    with pytest.raises(treescan.errors.ArgumentError, match="begins twice in one row") as caught:
        Packed.from_segment_ids(given, given, time_axis=time_axis)
    code = next(code for code in re.findall("`([^`]*)`", " ".join(str(caught.value).split())) if "cumsum" in code)
    anew = eval(code, {"jnp": jnp, "segment_ids": given})
    check(Packed.from_segment_ids(given, anew, time_axis=time_axis), runs(ids))


# Loops over such rows, against each sequence alone.


def cell(w, h, x):
    h = jnp.tanh(h @ w + x)
    return h, (h, h.sum(-1))


def alone(w, h, x, reverse):
    """The oracle: a loop in Python over one sequence."""
    hs = [h]
    for step in x[::-1] if reverse else x:
        hs.append(jnp.tanh(hs[-1] @ w + step))
    ys = hs[1:][::-1] if reverse else hs[1:]
    return hs[-1], jnp.stack(ys)


def loss_of_each(w, inits, data, reverse):
    total = 0.0
    for (row, start, length), h in zip(runs(GIVEN), inits, strict=True):
        carry, ys = alone(w, h, data[row, start : start + length], reverse)
        total += jnp.sum(jnp.cos(ys)) + jnp.sum(jnp.sin(3 * carry))
    return total


def loss_of_packed(w, inits, data, reverse, num_segments=None, ids=GIVEN):
    packed = of_ids(ids, data, num_segments)
    more = len(packed.index.row) - len(LONG)
    packed = packed._replace(init=jnp.concatenate([inits, jnp.zeros((more, 2))]))
    carry, (ys, _) = mask_scan(functools.partial(cell, w), jnp.zeros((packed.rows, 2)), packed, reverse=reverse)
    ends = treescan.last(ys, packed, reverse=reverse)
    return jnp.sum(jnp.where(packed.mask[..., None], jnp.cos(ys), 0)) + jnp.sum(jnp.sin(carry + 2 * ends))


@pytest.mark.parametrize(
    ("reverse", "from_init"),
    [(True, True), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((False, True), (True, False)))],
)
def test_a_scan_runs_each_sequence_alone(reverse, from_init):
    data = np.where(GIVEN[..., None] > 0, array(4, T, 2), np.nan)
    given = array(2, 2, seed=1), float(from_init) * array(len(LONG), 2, seed=2), jnp.asarray(data)
    gradient = functools.partial(jax.value_and_grad, argnums=(0, 1, 2))
    want = jax.jit(gradient(lambda *given: loss_of_each(*given, reverse)))(*given)
    traced = lambda ids, *given: gradient(lambda *given: loss_of_packed(*given, reverse, 8, ids))(*given)  # noqa: E731
    assert_close(jax.jit(traced)(GIVEN, *given), want)
    if from_init and reverse:
        with jax.disable_jit():
            assert_close(gradient(lambda *given: loss_of_packed(*given, reverse))(*given), want)
    elif from_init:
        both = [jnp.stack([leaf, leaf]) for leaf in (GIVEN, *given)]
        assert_close(jax.jit(jax.vmap(traced))(*both), jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), want))


def test_rows_of_padding_alone():
    packed = of_ids(0 * GIVEN)
    carry, ys = mask_scan(lambda h, x: (h + x, h), jnp.full(4, 3.0), packed)
    npt.assert_array_equal(carry, [3.0])
    assert not ys.any()


def test_linear_scan_and_repad_take_it():
    data = array(4, T, seed=3)

    def run(data, ids=GIVEN, num_segments=None):
        packed = of_ids(ids, data, num_segments)
        carry, ys = linear_scan(0.5, packed)
        return carry[: len(LONG)], repad(ys, packed).data[:, : len(LONG)]

    want_ends, want = [], np.zeros((T, len(LONG)), "f")
    for i, (row, start, length) in enumerate(runs(GIVEN)):
        state = 0.0
        for t in range(length):
            state = want[t, i] = 0.5 * state + data[row, start + t]
        want_ends.append(state)
    for got in (run(data), jax.jit(functools.partial(run, num_segments=8))(data, GIVEN)):
        assert_close(got, (np.array(want_ends, "f"), want))


@pytest.mark.devices
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_rows_over_a_mesh(kind):
    mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType[kind],))
    data = array(4, T, seed=3)
    place = lambda leaf: jax.device_put(leaf, jax.NamedSharding(mesh, jax.P("i")))  # noqa: E731

    def run(data, ids):
        packed = of_ids(ids, data, 8)
        zeros = jnp.zeros_like(packed.data[0])
        return packed, packed.segment_ids, packed.positions, mask_scan(lambda h, x: (h + x, h + x), zeros, packed)

    want = jax.device_get(jax.jit(run)(data, GIVEN))
    with jax.set_mesh(mesh):
        assert_close(jax.device_get(jax.jit(run)(place(data), place(GIVEN))), want)


@pytest.mark.devices
def test_each_device_makes_its_own_batch_in_a_shard_map():
    mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    data = array(4, T, seed=3)

    def run(data, ids):
        packed = of_ids(ids, data, 5)
        ends, sums = mask_scan(lambda h, x: (h + x, h + x), jnp.zeros_like(packed.data[0]), packed)
        return ends, sums.T, packed.segment_ids.T, packed.positions.T

    spread = jax.shard_map(run, mesh=mesh, in_specs=jax.P("i"), out_specs=jax.P("i"))
    want = [run(data[half], GIVEN[half]) for half in (slice(0, 2), slice(2, 4))]
    assert_close(jax.jit(spread)(data, GIVEN), jax.tree.map(lambda *halves: jnp.concatenate(halves), *want))
