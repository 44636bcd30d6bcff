"""`repad`: packed sequences in rows of their own, against the list that `unpack` makes of them, padded anew."""

import contextlib

import chex
import jax
import jax.numpy as jnp
import numpy as np
import numpy.testing as npt
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
    packed = pack(sequences, fill=1)
    want = pad(unpack(packed.data, packed), length=packed.steps, fill=0)
    assert_same_bits(repad(packed.data, packed), want)
    assert_same_bits(jax.jit(repad)(packed.data, packed), want)
    longest = max(np.asarray(packed.index.length))
    assert_same_bits(repad(packed.data, packed, length=int(longest)), pad(sequences))
    assert_same_bits(repad(packed.data, packed, length=packed.steps + 2), pad(sequences, length=packed.steps + 2))


def test_what_stands_in_the_padding():
    packed = pack([{"a": array(n), "b": np.ones((n, 2), np.int32)} for n in LONG])
    want = pad(unpack(packed.data, packed), length=packed.steps, fill={"a": np.nan, "b": -1})
    assert_same_bits(repad(packed.data, packed, fill={"a": np.nan, "b": -1}), want)


def test_keys():
    keys = jax.random.split(jax.random.key(0), 5)
    packed = pack([keys[:1], keys[1:4], keys[:0]])
    padded = repad(packed.data, packed)
    for i, sequence in enumerate(unpack(packed.data, packed)):
        npt.assert_array_equal(as_numpy(padded.data[: len(sequence), i]), as_numpy(sequence))


def test_differentiates_and_reads_no_padding():
    packed = batch()
    ys = jnp.where(packed.mask[..., None], packed.data, jnp.nan)
    weights = array(packed.steps, len(LONG), 2, seed=9)

    def total(ys):
        return jnp.sum(jnp.sin(repad(ys, packed).data) * weights)

    def by_hand(ys):
        return sum(jnp.sum(jnp.sin(y) * weights[: len(y), i]) for i, y in enumerate(unpack(ys, packed)))

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
    assert len(list(equations(jax.make_jaxpr(lambda ys: repad(ys, packed))(ys).jaxpr, "gather"))) == 1


def test_of_a_mapped_batch():
    one, other = batch(), pack([array(n, 2, seed=7 + i) for i, n in enumerate([5, 5, 0, 1, 1, 1])], rows=2, length=8)
    one = pack([array(n, 2, seed=i) for i, n in enumerate(LONG)], rows=2, length=8)
    both = jax.tree.map(lambda *leaves: jnp.stack(leaves), one, other)
    want = [repad(packed.data, packed) for packed in (one, other)]
    got = jax.vmap(lambda packed: repad(packed.data, packed))(both)
    chex.assert_trees_all_equal(got, jax.tree.map(lambda *leaves: jnp.stack(leaves), *want))


def test_nothing_but_empty_sequences():
    for options in ({}, {"length": 3}):
        packed = pack([np.zeros((0, 2), np.float32)] * 2, **options)
        padded = repad(packed.data, packed, fill=4)
        assert_same_bits(padded.data, jnp.full((packed.steps, 2, 2), 4.0))
    assert repad(packed.data, packed, length=0).data.shape == (0, 2, 2)
    assert repad({"y": None}, packed).data == {"y": None}


@pytest.mark.devices
def test_rows_over_an_explicit_mesh():
    mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Explicit,))
    packed = treescan.pack([jnp.arange(3.0), jnp.full(2, 5.0), jnp.full(1, 7.0)], rows=2)
    place = lambda leaf: jax.device_put(leaf, jax.NamedSharding(mesh, jax.P(None, "i")))  # noqa: E731
    spread = packed._replace(data=place(packed.data), mask=place(packed.mask), resets=place(packed.resets))
    runs = [lambda packed: treescan.repad(packed.data, packed, length=3).data]
    runs += [lambda packed: treescan.last(packed.data, packed, reverse=False)]
    wanted = [jax.device_get(run(packed)) for run in runs]
    for is_set in (False, True):
        with jax.set_mesh(mesh) if is_set else contextlib.nullcontext():
            for run, want in zip(runs, wanted, strict=True):
                npt.assert_array_equal(jax.device_get(jax.jit(run)(spread)), want)
