"""`pad`, `unpad` and `length_mask` against the sequences themselves, laid out by a loop in NumPy."""

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import numpy.testing as npt
import pytest
from hypothesis import given
from loops import State
from oracle import as_numpy, assert_bitwise
from thin import by_turns, parametrize
from traces import compilations

import treescan
from treescan import length_mask, pack, pad, unpack, unpad

DTYPES = [np.bool_, np.int8, np.uint32, np.int32, jnp.bfloat16, np.float16, np.float32, np.complex64]
LENGTHS = [0, 1, 2, 3, 5, 7, 13]


def leaf_of(seed, steps, trail, dtype):
    """Bits of every kind, NaN and -0.0 among them."""
    rng = np.random.default_rng(seed)
    if dtype == np.bool_:
        return rng.random((steps, *trail)) < 0.5
    if np.issubdtype(dtype, np.integer):
        return rng.integers(np.iinfo(dtype).min, np.iinfo(dtype).max, (steps, *trail), endpoint=True).astype(dtype)
    values = rng.choice([np.nan, np.inf, -0.0, 1.5, -2.25], (steps, *trail))
    return (values + 1j * rng.random(values.shape) if dtype == np.complex64 else values).astype(dtype)


STRUCTURES = {
    "array": lambda leaves: leaves[0],
    "namedtuple": lambda leaves: State(leaves[0], {"b": leaves[1], "a": None}),
    "nested": lambda leaves: [leaves[0], (leaves[1], {"x": [leaves[2]]}), ()],
}


@st.composite
def lists_of_sequences(draw):
    """Sequences of one structure, of arrays of NumPy and of JAX."""
    make = STRUCTURES[draw(st.sampled_from(sorted(STRUCTURES)))]
    types = draw(st.lists(st.tuples(st.sampled_from([(), (1,), (2, 3)]), st.sampled_from(DTYPES)), min_size=3))
    seed, convert = draw(st.integers(0, 2**32)), draw(st.sampled_from([np.asarray, jnp.asarray]))
    counts = draw(st.lists(st.sampled_from(LENGTHS), min_size=1, max_size=8))
    return [
        make([convert(leaf_of((seed, i, j), n, *kind)) for j, kind in enumerate(types)]) for i, n in enumerate(counts)
    ]


def steps_of(sequence):
    return len(jax.tree.leaves(sequence)[0])


def assert_same_bits(got, want):
    """Equal structures, dtypes and shapes, and equal bits, of NaN and -0.0 too; `got` is of JAX, concrete or not."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), map(as_numpy, jax.tree.leaves(want)), strict=True):
        assert isinstance(a, jax.Array)
        assert as_numpy(a).shape == b.shape
        assert as_numpy(a).tobytes() == b.astype(as_numpy(a).dtype).tobytes()
        assert as_numpy(a).dtype == jax.dtypes.canonicalize_dtype(b.dtype)


def assert_same_lists(got, want):
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert_same_bits(a, b)


@given(lists_of_sequences(), st.sampled_from([None, 0, 1, 4]), st.sampled_from([0, 1]))
def test_lays_out_and_cuts_out_again(sequences, more, value):
    lengths = [steps_of(sequence) for sequence in sequences]
    steps = max(lengths) + (more or 0)
    batch = pad(sequences, length=None if more is None else steps, fill=value)

    def stacked(*leaves):
        want = np.full((steps, len(leaves), *leaves[0].shape[1:]), value, leaves[0].dtype)
        for b, leaf in enumerate(leaves):
            want[: len(leaf), b] = leaf
        return want

    assert_same_bits(batch.data, jax.tree.map(stacked, *sequences))
    assert_same_bits(batch.lengths, np.array(lengths, np.int32))
    npt.assert_array_equal(batch.mask, np.arange(steps)[:, None] < np.array(lengths))
    assert batch.efficiency == (sum(lengths) / (steps * len(lengths)) if steps else 1.0)
    assert_same_lists(unpad(batch), sequences)
    assert_same_lists(unpad(batch.data, batch.lengths), sequences)
    assert_same_lists(unpad(jax.tree.map(np.asarray, batch.data), lengths), sequences)


def test_keys():
    keys = jax.random.split(jax.random.key(0, impl="rbg"), 3)
    batch = pad([keys, keys[:0], keys[:1]], fill=7)
    assert (batch.data.shape, batch.data.dtype) == ((3, 3), keys.dtype)
    assert not as_numpy(batch.data)[1:, 1:].any()
    assert_same_lists(unpad(batch), [keys, keys[:0], keys[:1]])


def test_what_jax_makes_of_types_counts():
    """NumPy's floats are of 64 bits, and JAX's are not, unless it is told."""
    batch = pad([np.ones(3), jnp.ones(2), np.ones(1, np.float32)])
    assert batch.data.dtype == jnp.float32
    assert not jax.typeof(pad([jnp.full(2, 1.0)]).data).weak_type
    with jax.enable_x64(True):
        sequences = [np.array([2**40, 1]), np.array([3])]
        batch = pad(sequences, fill=2**50)
        assert (batch.data.dtype, batch.lengths.dtype) == (np.int64, np.int32)
        npt.assert_array_equal(batch.data, [[2**40, 3], [1, 2**50]])
        assert_same_lists(unpad(batch), sequences)


def test_one_value_for_each_leaf():
    sequences = [{"x": np.ones((n, 2), np.float32), "token": [np.ones(n, np.int32)] * 2} for n in (2, 1)]
    batch = pad(sequences, fill={"x": np.float32(np.nan), "token": -1})
    assert np.isnan(batch.data["x"][1, 1]).all()
    assert [int(leaf[1, 1]) for leaf in batch.data["token"]] == [-1, -1]


def test_values_round_as_their_dtype():
    with np.errstate(all="raise"):
        assert pad([np.ones(1, np.float16)], length=2, fill=1e30).data[1, 0] == np.inf
    assert pad([np.ones(1, np.complex64)], length=2, fill=1j).data[1, 0] == 1j
    assert pad([np.ones(1, bool)], length=2, fill=True).data.all()


@parametrize("value", {"out of range": 2**31, "negative": -(2**31) - 1, "text": "1", "none": None, "complex": 1j})
def test_values_that_do_not_fit(value):
    with pytest.raises(treescan.errors.ArgumentError, match="cannot hold the `fill`"):
        pad([np.ones(1, np.int32)], fill=value)


def test_nothing_is_shared_with_the_arrays_of_the_user():
    sequence, data = np.ones((64, 16), np.float32), np.ones((64, 1, 16), np.float32)
    batch, (piece,) = pad([sequence]), unpad(data, [64])
    sequence[:], data[:] = 2, 2
    assert (np.asarray(batch.data) == 1).all()
    assert (np.asarray(piece) == 1).all()


def test_compiles_nothing():
    """As many programs as there are lengths would take longer than all else."""
    sequences = [{"x": np.ones((n, 29), np.float32)} for n in (11, 3, 17)]
    assert not compilations(lambda: unpad(pad(sequences)))
    packed = pack(sequences)
    assert not compilations(lambda: unpack(packed.data, pack(sequences)))


def test_concrete_under_a_trace():
    """A batch that is made of constants stays one, and can be cut; traced data is cut where lengths are known."""
    sequences = [np.arange(3.0, dtype=np.float32), np.arange(2.0, dtype=np.float32)]
    keys = jax.random.split(jax.random.key(0), 2)

    @jax.jit
    def cut(data):
        batch, packed, efficiency = pad(sequences), pack(sequences), pad([keys]).efficiency
        whole = unpad(batch), unpad(data, batch.lengths), unpack(packed.data, packed)
        return whole, unpad(data, [3, 1]), unpad(pad([keys])), efficiency

    whole, shorter, unpadded, efficiency = cut(pad(sequences).data)
    for again in whole:
        assert_same_lists(again, sequences)
    assert_same_lists(shorter, [sequences[0], sequences[1][:1]])
    assert_same_lists(unpadded, [keys])
    assert efficiency == 1


def test_gradients_go_through_unpad():
    data, lengths = jnp.ones((3, 2)), np.array([2, 3])
    grads = jax.grad(lambda data: sum(jnp.sum(s) * (i + 1) for i, s in enumerate(unpad(data, lengths))))(data)
    npt.assert_array_equal(grads, [[1, 2], [1, 2], [0, 2]])


# length_mask


@by_turns(3, shape=[(), (2, 3), (0,)], dtype=[np.int8, np.uint32], steps=[0, 7, 300])
def test_mask_of_lengths(shape, dtype, steps):
    rng = np.random.default_rng(0)
    lengths = rng.integers(0, min(steps, np.iinfo(dtype).max), shape, endpoint=True).astype(dtype)
    want = np.stack([t < lengths for t in range(steps)]) if steps else np.zeros((0, *shape), bool)
    for given_as in (lengths, jnp.asarray(lengths), lengths.tolist()):
        assert_bitwise(length_mask(given_as, steps), jnp.asarray(want))
    assert_bitwise(jax.jit(length_mask, static_argnums=1)(lengths, steps), jnp.asarray(want))
    assert_bitwise(length_mask(lengths, np.int64(steps)), jnp.asarray(want))


def test_traced_lengths_are_clamped():
    lengths = jnp.array([-3, 0, 2, 9])
    want = np.arange(3)[:, None] < np.array([0, 0, 2, 3])
    npt.assert_array_equal(jax.jit(lambda n: length_mask(n, 3))(lengths), want)
    npt.assert_array_equal(jax.vmap(lambda n: length_mask(n, 3), out_axes=1)(lengths), want)
    npt.assert_array_equal(jax.jit(lambda a, b: length_mask([a, b], 3))(2, 9), want[:, 2:])


@pytest.mark.devices
def test_sharded_lengths():
    mesh = jax.make_mesh((4,), ("rows",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        lengths = jax.sharding.reshard(jnp.array([2, 0, 3, 1]), jax.sharding.PartitionSpec("rows"))
        npt.assert_array_equal(length_mask(lengths, 3), np.arange(3)[:, None] < np.array([2, 0, 3, 1]))
