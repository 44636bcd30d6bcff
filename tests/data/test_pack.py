"""`pack`, `unpack` and `last`: first-fit decreasing against a plain loop, and the sequences against themselves."""

import functools

import chex
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import numpy.testing as npt
import pytest
from hypothesis import example, given, settings
from jaxprs import equations
from loops import array
from oracle import as_numpy
from test_pad import assert_same_bits, assert_same_lists, lists_of_sequences, steps_of

import treescan
from treescan import Packed, last, pack, pad, unpack


def of_lengths(lengths):
    """Sequences that can be told apart."""
    starts = np.cumsum([0, *lengths])
    return [np.arange(start, start + n, dtype=np.int32) for start, n in zip(starts, lengths, strict=False)]


def first_fit(lengths, length):
    """The oracle: the number of rows, and the row and the start of each sequence."""
    free, row, start = [], [0] * len(lengths), [0] * len(lengths)
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if lengths[i]:
            fitting = [r for r, left in enumerate(free) if left >= lengths[i]]
            if not fitting:
                free.append(length)
            row[i] = fitting[0] if fitting else len(free) - 1
            start[i] = length - free[row[i]]
            free[row[i]] -= lengths[i]
    return len(free), row, start


def check(packed, sequences):
    """All that holds for every packed batch."""
    lengths = np.array([steps_of(sequence) for sequence in sequences])
    mask, resets = np.zeros((packed.steps, packed.rows), bool), np.zeros((packed.steps, packed.rows), bool)
    for row, start, n in zip(*map(np.asarray, packed.index), strict=True):
        assert not mask[start : start + n, row].any(), "two sequences in one place"
        assert 0 <= start <= start + n <= packed.steps
        mask[start : start + n, row] = True
        resets[start : start + min(n, 1), row] = True
    npt.assert_array_equal(packed.index.length, lengths)
    assert_same_bits((packed.mask, packed.resets), (mask, resets))
    assert all(part.dtype == jnp.int32 for part in packed.index)
    assert packed.efficiency == (lengths.sum() / mask.size if mask.size else 1.0)
    assert packed.rows >= 1
    assert_same_lists(unpack(packed.data, packed), sequences)


@given(lists_of_sequences(), st.sampled_from([None, 1, 2, 5]), st.sampled_from([None, 0, 3]), st.sampled_from([0, 1]))
def test_packs_and_unpacks(sequences, rows, more, value):
    lengths = [steps_of(sequence) for sequence in sequences]
    length = None if more is None else max(lengths) + more
    try:
        packed = pack(sequences, rows=rows, length=length, fill=value)
    except treescan.errors.ArgumentError as error:
        assert rows is not None
        assert length is not None
        assert "cannot hold" in str(error)
        assert first_fit(lengths, length)[0] > rows
        return
    check(packed, sequences)
    assert rows is None or packed.rows == rows
    assert length is None or packed.steps == length
    for leaf in jax.tree.leaves(packed.data):
        padding = as_numpy(leaf)[~np.asarray(packed.mask)]
        npt.assert_array_equal(padding, np.full_like(padding, value))


def test_keys():
    keys = jax.random.split(jax.random.key(0), 4)
    packed = pack([keys[:1], keys, keys[:0]])
    assert_same_lists(unpack(packed.data, packed), [keys[:1], keys, keys[:0]])
    ends = last(packed.data, packed, reverse=False)
    npt.assert_array_equal(as_numpy(ends)[:2], as_numpy(keys[jnp.array([0, 3])]))
    assert not as_numpy(ends)[2].any()


# Where sequences go.


@given(st.lists(st.integers(0, 30), min_size=1, max_size=40), st.integers(0, 40))
def test_is_first_fit_decreasing(lengths, more):
    length = max(lengths) + more
    packed = pack(of_lengths(lengths), length=length)
    rows, row, start = first_fit(lengths, length)
    assert (packed.rows, packed.index.row.tolist(), packed.index.start.tolist()) == (max(rows, 1), row, start)


@given(st.lists(st.integers(0, 30), min_size=1, max_size=30), st.integers(1, 12))
@example([6, 5, 4, 4, 4, 4, 4, 2, 2, 2, 1], 3)
@example([39, 35, 33, 33, 29, 25, 19, 19, 19, 19, 17, 11, 11, 10, 1], 5)  # 65 steps will do, and 66 will not
@example([0, 0], 2)
@example([1], 5)
def test_so_many_rows_are_as_short_as_can_be(lengths, rows):
    packed = pack(of_lengths(lengths), rows=rows)
    candidates = range(max(lengths), max(lengths) + -(-sum(lengths) // rows) + 1)
    assert packed.steps == next(length for length in candidates if first_fit(lengths, length)[0] <= rows)
    check(packed, of_lengths(lengths))


@given(st.lists(st.integers(0, 30), min_size=1, max_size=30))
def test_rows_and_length_waste_little(lengths):
    packed = pack(of_lengths(lengths))
    check(packed, of_lengths(lengths))
    costs = [(max(first_fit(lengths, n)[0], 1) * n, n) for n in range(max(lengths), 2 * max(lengths) + 1)]
    cost, steps = min(costs)
    taken = packed.rows * packed.steps
    assert taken == cost if cost < 512 else taken <= cost * 513 / 512  # what less than a part in 512 would gain
    assert cost >= 512 or packed.steps == steps


def test_long_sequences_are_not_tried_step_by_step():
    """Which would take minutes."""
    longest = 1_000_000
    lengths = np.random.default_rng(0).integers(longest // 3, longest, 30).tolist()
    sequences = [np.zeros((n, 0), bool) for n in lengths]  # of which the data weighs nothing
    for rows in (1, 7, 20, 40):
        packed = pack(sequences, rows=rows)
        assert first_fit(lengths, packed.steps)[0] <= rows


def test_nothing_but_empty_sequences():
    for options, shape in (
        ({}, (0, 1)),
        ({"rows": 3}, (0, 3)),
        ({"length": 2}, (2, 1)),
        ({"rows": 2, "length": 1}, (1, 2)),
    ):
        packed = pack(of_lengths([0, 0]), **options)
        assert packed.data.shape == packed.mask.shape == shape
        check(packed, of_lengths([0, 0]))
        npt.assert_array_equal(last(packed.data, packed, reverse=False), [0, 0])


# unpack, and last.


@settings(max_examples=10)
@given(lists_of_sequences())
def test_last_of_each(sequences):
    def ends(reverse, *leaves):
        step = 0 if reverse else -1
        return np.stack([leaf[step] if len(leaf) else np.zeros(leaf.shape[1:], leaf.dtype) for leaf in leaves])

    jitted = jax.jit(last, static_argnames="reverse")
    for reverse in (False, True):
        want = jax.tree.map(functools.partial(ends, reverse), *sequences)
        for batch in (pack(sequences, fill=1), pad(sequences, fill=1)):
            assert_same_bits(last(batch.data, batch, reverse=reverse), want)
            assert_same_bits(jitted(batch.data, batch, reverse=reverse), want)


def batches():
    sequences = of_lengths([3, 0, 5, 1, 0, 2])
    return {"packed": pack(sequences, rows=2), "padded": pad(sequences)}


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("name", ["packed", "padded"])
def test_last_is_one_gather_and_differentiates(name, reverse):
    last = functools.partial(treescan.last, reverse=reverse)
    batch = batches()[name]
    ys, weights = array(*batch.data.shape, 4), array(6, 4, seed=1)
    mask = np.zeros(batch.data.shape, bool)
    if isinstance(batch, Packed):
        row, start, length = map(np.asarray, batch.index)
    else:
        length = np.asarray(batch.lengths)
        row, start = np.arange(6), np.zeros(6, int)
    want = np.zeros((*mask.shape, 4), np.float32)
    for i in np.flatnonzero(length):
        end = start[i] if reverse else start[i] + length[i] - 1
        want[end, row[i]] = weights[i]
        mask[end, row[i]] = True
    poisoned = jnp.where(jnp.asarray(mask)[..., None], ys, jnp.nan)  # what is not an end is never read
    value, grad = jax.value_and_grad(lambda ys: jnp.vdot(last(ys, batch), weights))(poisoned)
    assert np.isfinite(value)
    npt.assert_array_equal(grad, want)
    assert len(list(equations(jax.make_jaxpr(lambda ys: last(ys, batch))(ys).jaxpr, "gather"))) == 1
    stacked = jnp.stack([ys, 2 * ys])
    chex.assert_trees_all_equal(jax.vmap(last, (0, None))(stacked, batch), jnp.stack([last(s, batch) for s in stacked]))
    twice = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), batch)
    chex.assert_trees_all_equal(jax.vmap(last)(stacked, twice), jax.vmap(last, (0, None))(stacked, batch))
    tangent = jax.jvp(lambda ys: last(ys, batch), (ys,), (ys,))[1]
    chex.assert_trees_all_equal(tangent, last(ys, batch))


def test_last_of_several_batch_axes_and_clamped_lengths():
    data = jnp.arange(24.0).reshape(4, 2, 3)
    lengths = jnp.array([[1, 2, 3], [4, 0, 9]])
    for reverse, want in ((False, [[0, 7, 14], [21, 0, 23]]), (True, [[0, 1, 2], [3, 0, 5]])):
        npt.assert_array_equal(last(data, treescan.Padded(data, lengths), reverse=reverse), want)
        single = treescan.Padded(data[:, 0, 0], jnp.array(2))
        npt.assert_array_equal(last(single.data, single, reverse=reverse), 0 if reverse else 6)


def test_trees_without_leaves():
    batch = batches()["packed"]
    assert unpack({"y": None}, batch) == [{"y": None}] * 6
    assert last({"y": None}, batch, reverse=True) == {"y": None}


def test_unpack_of_traced_ys():
    batch = batches()["packed"]
    ys = array(*batch.data.shape)
    grads = jax.grad(lambda ys: sum((i + 1) * jnp.sum(s) for i, s in enumerate(unpack(ys, batch))))(ys)
    want = np.zeros(ys.shape)
    for i, (row, start, length) in enumerate(zip(*map(np.asarray, batch.index), strict=True)):
        want[start : start + length, row] = i + 1
    npt.assert_array_equal(grads, want)
    assert_same_lists(jax.jit(lambda ys: unpack(ys, batch))(ys), unpack(ys, batch))
