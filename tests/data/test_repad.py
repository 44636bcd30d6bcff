"""`repad`: packed sequences in rows of their own, against the list that `unpack` makes of them, padded anew."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import numpy.testing as npt
import optax
import pytest
from hypothesis import given, settings
from jaxprs import equations
from loops import array
from oracle import as_numpy
from test_pad import assert_same_bits, lists_of_sequences

import treescan
from treescan import pack, pad, repad, unpack

LONG = [3, 0, 5, 1, 0, 2]


def batch():
    return pack([array(n, 2, seed=i) for i, n in enumerate(LONG)], rows=2)


@settings(max_examples=15)
@given(lists_of_sequences())
def test_is_what_pad_makes_of_the_list(sequences):
    packed = pack(sequences, value=1)
    want = pad(unpack(packed, packed.data), length=packed.steps, value=0)
    assert_same_bits(repad(packed, packed.data), want)
    assert_same_bits(jax.jit(repad)(packed, packed.data), want)
    longest = max(np.asarray(packed.index.length))
    assert_same_bits(repad(packed, packed.data, length=int(longest)), pad(sequences))
    assert_same_bits(repad(packed, packed.data, length=packed.steps + 2), pad(sequences, length=packed.steps + 2))


def test_what_stands_in_the_padding():
    packed = pack([{"a": array(n), "b": np.ones((n, 2), np.int32)} for n in LONG])
    want = pad(unpack(packed, packed.data), length=packed.steps, value={"a": np.nan, "b": -1})
    assert_same_bits(repad(packed, packed.data, value={"a": np.nan, "b": -1}), want)


def test_keys():
    keys = jax.random.split(jax.random.key(0), 5)
    packed = pack([keys[:1], keys[1:4], keys[:0]])
    padded = repad(packed, packed.data)
    for i, sequence in enumerate(unpack(packed, packed.data)):
        npt.assert_array_equal(as_numpy(padded.data[: len(sequence), i]), as_numpy(sequence))


def test_differentiates_and_reads_no_padding():
    packed = batch()
    ys = jnp.where(packed.mask[..., None], packed.data, jnp.nan)
    weights = array(packed.steps, len(LONG), 2, seed=9)

    def total(ys):
        return jnp.sum(jnp.sin(repad(packed, ys).data) * weights)

    def by_hand(ys):
        return sum(jnp.sum(jnp.sin(y) * weights[: len(y), i]) for i, y in enumerate(unpack(packed, ys)))

    for run in (total, jax.jit(total)):
        value, grad = jax.value_and_grad(run)(ys)
        want = jax.value_and_grad(by_hand)(ys)
        npt.assert_allclose(value, want[0], rtol=1e-6)
        npt.assert_allclose(grad, want[1], rtol=1e-6)
    npt.assert_array_equal(grad[~packed.mask], 0)
    ones = jnp.where(packed.mask[..., None], jnp.ones_like(ys), jnp.nan)
    tangent = jax.jvp(total, (ys,), (ones,))[1]
    npt.assert_allclose(tangent, jnp.sum(jax.grad(by_hand)(ys)), rtol=1e-5)
    with jax.disable_jit():
        npt.assert_allclose(jax.grad(total)(ys), grad, rtol=1e-6)
    stacked = jnp.stack([ys, 2 * ys])
    chex.assert_trees_all_close(
        jax.vmap(jax.grad(total))(stacked), jnp.stack([jax.grad(total)(each) for each in stacked]), rtol=1e-6
    )
    assert len(list(equations(jax.make_jaxpr(lambda ys: repad(packed, ys))(ys).jaxpr, "gather"))) == 1


def test_of_a_mapped_batch():
    one, other = batch(), pack([array(n, 2, seed=7 + i) for i, n in enumerate([5, 5, 0, 1, 1, 1])], rows=2, length=8)
    one = pack([array(n, 2, seed=i) for i, n in enumerate(LONG)], rows=2, length=8)
    both = jax.tree.map(lambda *leaves: jnp.stack(leaves), one, other)
    want = [repad(packed, packed.data) for packed in (one, other)]
    got = jax.vmap(lambda packed: repad(packed, packed.data))(both)
    chex.assert_trees_all_equal(got, jax.tree.map(lambda *leaves: jnp.stack(leaves), *want))


def test_nothing_but_empty_sequences():
    for options in ({}, {"length": 3}):
        packed = pack([np.zeros((0, 2), np.float32)] * 2, **options)
        padded = repad(packed, packed.data, value=4)
        assert_same_bits(padded.data, jnp.full((packed.steps, 2, 2), 4.0))
    assert repad(packed, packed.data, length=0).data.shape == (0, 2, 2)
    assert repad(packed, {"y": None}).data == {"y": None}


def gru(w, h, x):
    r, z = jax.nn.sigmoid(x @ w["x"] + h @ w["h"]), jax.nn.sigmoid(x @ w["z"])
    h = (1 - z) * jnp.tanh(r * h + x @ w["x"]) + z * h
    return h, h @ w["out"]


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
def test_a_ctc_loss_of_each_sequence(reverse):
    """Packed, and each sequence by itself: the same losses, and the same gradient of the weights."""
    w = {"x": array(2, 3, seed=1), "h": array(3, 3, seed=2), "z": array(2, 3, seed=3), "out": array(3, 4, seed=4)}
    sequences = [array(n, 2, seed=10 + n) for n in (4, 6, 3)]
    labels, absent = np.array([[1, 2], [3, 0], [2, 2]]), np.array([[0, 0], [0, 1], [0, 0]], np.float32)
    packed = pack(sequences, rows=2)

    def losses(w, packed):
        _, ys = treescan.mask_scan(lambda h, x: gru(w, h, x), jnp.zeros((packed.rows, 3)), packed, reverse=reverse)
        logits = repad(packed, ys)
        return optax.ctc_loss(
            logits.data.swapaxes(0, 1), 1.0 - logits.mask.T.astype(jnp.float32), jnp.asarray(labels), absent
        )

    def one_by_one(w):
        found = []
        for i, sequence in enumerate(sequences):
            _, ys = jax.lax.scan(lambda h, x: gru(w, h, x), jnp.zeros(3), sequence, reverse=reverse)
            none = jnp.zeros((1, len(sequence)))
            found.append(optax.ctc_loss(ys[None], none, jnp.asarray(labels[i : i + 1]), absent[i : i + 1])[0])
        return jnp.stack(found)

    npt.assert_allclose(jax.jit(losses)(w, packed), one_by_one(w), rtol=1e-4)
    got = jax.jit(jax.grad(lambda w: losses(w, packed).sum()))(w)
    chex.assert_trees_all_close(got, jax.grad(lambda w: one_by_one(w).sum())(w), rtol=1e-3, atol=1e-5)
