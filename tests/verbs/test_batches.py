"""Batches as parts of xs: `(packed, extra)` and `(padded, extra)`, against the batch with the rest as its data."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import numpy.testing as npt
import pytest
from loops import array

import treescan

LONG = [3, 1, 4, 0, 2]
SEQUENCES = [array(n, 2, seed=i) for i, n in enumerate(LONG)]
BATCHES = {
    "packed": treescan.pack(SEQUENCES, rows=2, length=6, value=np.nan),
    "packed inits": treescan.pack(SEQUENCES, rows=2, length=6, value=np.nan, init=list(array(5, 2, seed=5))),
    "padded": treescan.pad(SEQUENCES, length=6, value=np.nan),
}  # fmt: skip
OPTIONS = {
    "plain": {},
    "reverse": {"reverse": True, "chunk": 2},
    "compact": {"compact": True, "chunk": 2, "save": "last"},
}


def step(w, carry, x):
    first, (second, scale) = x
    carry = jnp.tanh(carry @ w + first * second) * scale
    return carry, carry


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("packed", "plain"),
        ("packed", "compact"),
        ("packed inits", "reverse"),
        ("padded", "plain"),
        ("padded", "compact"),
    ],
)
def test_is_the_batch_with_the_rest_as_its_data(name, option):
    batch = BATCHES[name]
    valid = batch.mask
    rows = valid.shape[1]
    extra = jnp.where(valid[..., None], array(6, rows, 2, seed=9), jnp.nan)
    scales = 1 + abs(array(6, seed=8))
    options = {**OPTIONS[option], "x_axes": (0, (0, None))}

    def composed(w, init, data, extra, scales):
        xs = (batch._replace(data=data), (extra, scales))
        return treescan.mask_scan(functools.partial(step, w), init, xs, **options)

    def whole(w, init, data, extra, scales):
        xs = batch._replace(data=(data, (extra, scales)))
        return treescan.mask_scan(functools.partial(step, w), init, xs, **options)

    def derivatives(run):
        def loss(*given):
            result = run(*given)
            return sum(jnp.sum(jnp.sin(part)) for part in result), result

        return jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3, 4), has_aux=True))

    given = array(2, 2, seed=7), array(rows, 2, seed=6), batch.data, extra, scales
    chex.assert_trees_all_close(derivatives(composed)(*given), derivatives(whole)(*given), rtol=1e-6, atol=1e-6)
    if option == "plain":
        with jax.disable_jit():
            chex.assert_trees_all_close(composed(*given), whole(*given), rtol=1e-6, atol=1e-6)
        mapped = jax.vmap(composed, (None, 0, None, None, None))
        inits = jnp.stack([given[1], -given[1]])
        want = [composed(given[0], init, *given[2:]) for init in inits]
        chex.assert_trees_all_close(
            mapped(given[0], inits, *given[2:]),
            jax.tree.map(lambda *leaves: jnp.stack(leaves), *want),
            rtol=1e-6,
            atol=1e-6,
        )


def plus(carry, x):
    parts = jax.tree.leaves(x)
    return carry + functools.reduce(jnp.add, parts), None


def test_the_sum_of_each_sequence():
    sequences = [np.arange(n, dtype=np.float32) for n in LONG]
    packed, padded = treescan.pack(sequences, rows=2), treescan.pad(sequences)
    want = [sequence.sum() for sequence in sequences]
    for batch, rows in ((packed, 2), (padded, 5)):
        init, shape = jnp.zeros(rows), batch.mask.shape
        twice = treescan.mask_scan(plus, init, {"a": batch, "b": batch.data})[0]
        npt.assert_array_equal(twice, 2 * np.array(want))
        both = treescan.mask_scan(plus, init, [batch, batch])[0]
        npt.assert_array_equal(both, 2 * np.array(want))
        again = treescan.mask_scan(plus, init, (batch, jax.tree.map(jnp.copy, batch)))[0]
        npt.assert_array_equal(again, 2 * np.array(want))
        ones = treescan.mask_scan(plus, init, (batch, jnp.ones(shape)))[0]
        npt.assert_array_equal(ones, np.array(want) + LONG)
        times = treescan.mask_scan(plus, init, (batch, jnp.ones(shape[0])), x_axes=(0, None))[0]
        npt.assert_array_equal(times, np.array(want) + LONG)
        whole = treescan.mask_scan(plus, init, (batch, jnp.ones(())), in_axes=(0, None))[0]
        npt.assert_array_equal(whole, np.array(want) + LONG)
        columns = treescan.mask_scan(plus, init, (batch, jnp.ones(shape).T), in_axes=(0, 1))[0]
        npt.assert_array_equal(columns, np.array(want) + LONG)


def test_traced_batches_that_share_their_rows():
    sequences = [np.arange(n, dtype=np.float32) for n in LONG]
    for batch, rows in ((treescan.pack(sequences, rows=2), 2), (treescan.pad(sequences), 5)):
        run = jax.jit(lambda batch, rows=rows: treescan.mask_scan(
            plus, jnp.zeros(rows), (batch, batch._replace(data=2 * batch.data)))[0])  # fmt: skip
        npt.assert_array_equal(run(batch), [3 * sequence.sum() for sequence in sequences])


def test_resets_of_a_padded_part():
    sequences = [np.ones(n, np.float32) for n in (3, 2)]
    resets = np.array([[0, 0], [0, 1], [1, 0]], bool)
    padded = treescan.pad(sequences)
    got = treescan.mask_scan(plus, jnp.zeros(2), (padded, padded.data), resets=resets, reset_to=5.0)[0]
    npt.assert_array_equal(got, [7, 7])
