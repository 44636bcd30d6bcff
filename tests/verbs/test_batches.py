"""Batches as parts of xs: `(packed, extra)` and `(padded, extra)`, against the batch with the rest as its data."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpy.testing as npt
import pytest
from loops import array
from oracle import assert_close
from thin import parametrize
from works.transforms import gradient

import treescan

LONG = [3, 1, 4, 0, 2]
SEQUENCES = [array(n, 2, seed=i) for i, n in enumerate(LONG)]
BATCHES = {
    "packed": (treescan.pack(SEQUENCES, rows=2, length=6, fill=np.nan), {}),
    "packed inits": (
        treescan.pack(SEQUENCES, rows=2, length=6, fill=np.nan, init=list(array(5, 2, seed=5))),
        {"reverse": True, "chunk": 2},
    ),
    "padded": (treescan.pad(SEQUENCES, length=6, fill=np.nan), {"compact": True, "chunk": 2, "save": "last"}),
}


def step(w, carry, x):
    first, (second, scale) = x
    carry = jnp.tanh(carry @ w + first * second) * scale
    return carry, carry


@parametrize("case", BATCHES)
def test_is_the_batch_with_the_rest_as_its_data(case):
    batch, options = case
    rows = batch.mask.shape[1]
    extra = jnp.where(batch.mask[..., None], array(6, rows, 2, seed=9), jnp.nan)
    given = array(2, 2, seed=7), array(rows, 2, seed=6), batch.data, extra, 1 + abs(array(6, seed=8))

    def run(laid_out, given):
        w, init, data, extra, scales = given
        xs = laid_out(data, (extra, scales))
        return treescan.mask_scan(functools.partial(step, w), init, xs, row_axes={"x": (0, (0, None))}, **options)

    def composed(data, rest):
        return batch._replace(data=data), rest

    def whole(data, rest):
        return batch._replace(data=(data, rest))

    derived = [jax.jit(functools.partial(gradient, functools.partial(run, form)))(given) for form in (composed, whole)]
    assert_close(*derived)
    with jax.disable_jit():
        assert_close(run(composed, given), derived[1][0])


def plus(carry, x):
    parts = jax.tree.leaves(x)
    return carry + functools.reduce(jnp.add, parts), None


@pytest.mark.parametrize("padded", [False, True])
def test_the_sum_of_each_sequence(padded):
    sequences = [np.arange(n, dtype=np.float32) for n in LONG]
    sums = np.array([sequence.sum() for sequence in sequences])
    batch = treescan.pad(sequences) if padded else treescan.pack(sequences, rows=2)
    ones = jnp.ones(batch.mask.shape)
    for xs, options, want in (
        ({"a": batch, "b": batch.data}, {}, 2 * sums),
        ([batch, batch], {}, 2 * sums),
        ((batch, jax.tree.map(jnp.copy, batch)), {}, 2 * sums),
        ((batch, ones), {}, sums + LONG),
        ((batch, ones[:, 0]), {"row_axes": {"x": (0, None)}}, sums + LONG),
        ((batch, jnp.ones(())), {"in_axes": (0, None)}, sums + LONG),
        ((batch, ones.T), {"in_axes": (0, 1)}, sums + LONG),
    ):
        final, _ = treescan.mask_scan(plus, jnp.zeros(ones.shape[1]), xs, **options)
        npt.assert_array_equal(final, want)
    traced = jax.jit(lambda one: treescan.mask_scan(plus, jnp.zeros(ones.shape[1]), (one, one))[0])
    npt.assert_array_equal(traced(batch), 2 * sums)


def test_resets_of_a_padded_part():
    sequences = [np.ones(n, np.float32) for n in (3, 2)]
    resets = np.array([[0, 0], [0, 1], [1, 0]], bool)
    padded = treescan.pad(sequences)
    got = treescan.mask_scan(plus, jnp.zeros(2), (padded, padded.data), resets=resets, reset_to=5.0)[0]
    npt.assert_array_equal(got, [7, 7])


def test_a_mask_without_data_says_how_many_steps_there_are():
    def count(n, _, *, valid):
        return n + 1, valid

    packed = treescan.pack([np.ones(3), np.ones(2)], length=4)
    for time_axis in (0, 1):
        mask, resets = (np.moveaxis(each, 0, time_axis) for each in (packed.mask, packed.resets))
        options = {"time_axis": {"mask": time_axis, "ys": time_axis}}
        counts, valid = treescan.mask_scan(count, jnp.zeros(packed.rows), None, mask=mask, **options)
        np.testing.assert_array_equal(counts, packed.mask.sum(0))
        np.testing.assert_array_equal(valid, mask)
        last, _ = treescan.mask_scan(count, jnp.zeros(packed.rows), None, resets=resets, **options)
        assert last.shape == (packed.rows,)
    counts, _ = treescan.mask_scan(count, jnp.zeros(packed.rows), packed._replace(data=None))
    np.testing.assert_array_equal(counts, [3, 2])
