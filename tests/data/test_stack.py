"""Stacks of any pytrees: what goes in comes out, bit by bit; and checkpoints that name arrays one by one."""

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from loops import State, array

import treescan
from treescan import state_dict

pytestmark = pytest.mark.quick


class Params(NamedTuple):
    w: Any
    rest: Any


@jax.tree_util.register_pytree_with_keys_class
class Node:
    """A container that is none of Python's, with metadata."""

    def __init__(self, child: Any, name: str) -> None:
        self.child, self.name = child, name

    def tree_flatten_with_keys(self) -> Any:
        return ((jax.tree_util.GetAttrKey("child"), self.child),), self.name

    @classmethod
    def tree_unflatten(cls, name: str, children: Any) -> "Node":
        return cls(*children, name)


DTYPES = [np.float32, np.float16, jnp.bfloat16, np.int8, np.uint32, np.bool_, np.complex64]


@st.composite
def leaves(draw):
    """What one leaf is in each layer: arrays of any bits, keys, or something static."""
    kind = draw(st.sampled_from(["array", "array", "array", "key", "raw key", "function", "text", "number"]))
    if kind == "function":
        return lambda i: jnp.tanh
    if kind == "text":
        return lambda i: "gelu"
    if kind == "number":
        number = draw(st.sampled_from([0.5, -0.0, float("inf"), float("nan"), 3, False, 1j]))
        return lambda i: number
    if kind == "key":
        return lambda i: jax.random.key(i)
    if kind == "raw key":
        return lambda i: jax.random.PRNGKey(i)
    shape = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    seed = draw(st.integers(0, 99))

    def bits(i):
        rng = np.random.default_rng(seed + 1000 * i)
        if dtype == np.bool_:
            return jnp.asarray(rng.integers(0, 2, shape).astype(bool))
        size = int(np.prod(shape)) * dtype.itemsize
        raw = rng.integers(0, 256, size, np.uint8)  # NaNs of all kinds among them
        array = np.frombuffer(raw.tobytes(), dtype).reshape(shape)
        if dtype == jnp.bfloat16:  # XLA turns one NaN of it into another where it computes in float32
            numbers = array.view(np.uint16)
            array = np.where(numbers & 0x7FFF > 0x7F80, np.uint16(0x7FC0), numbers).view(dtype)
        return jnp.asarray(array)

    return bits


TREES = st.recursive(
    leaves(),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
        st.builds(Params, inner, inner),
        st.builds(Node, inner, st.sampled_from(["x", "y"])),
        st.builds(State, inner, st.none()),
    ),
    max_leaves=5,
)


def as_bits(tree: Any) -> Any:
    """The structure of a tree, and the bytes of each leaf with its type; static leaves as they are."""

    def bits(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array | np.ndarray):
            return (type(leaf), repr(leaf)) if isinstance(leaf, bool | int | float | complex) else leaf
        key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return str(leaf.dtype), leaf.shape, np.asarray(jax.random.key_data(leaf) if key else leaf).tobytes()

    flat, structure = jax.tree.flatten(tree)
    return structure, [bits(leaf) for leaf in flat]


@settings(max_examples=20)
@given(TREES, st.integers(1, 3))
def test_what_is_stacked_comes_out_bit_by_bit(tree, count):
    layers = [jax.tree.map(lambda make, i=i: make(i), tree) for i in range(count)]
    if not any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(layers[0])):
        return  # nothing tells how many there are
    stacked = treescan.stack(layers)
    assert list(map(as_bits, treescan.unstack(stacked))) == list(map(as_bits, layers))
    assert as_bits(treescan.stack(treescan.unstack(stacked))) == as_bits(stacked)
    for i in range(-count, count):
        assert as_bits(treescan.layer_at(stacked, i)) == as_bits(layers[i])
    changed = treescan.set_layer(stacked, -1, layers[0])
    assert list(map(as_bits, treescan.unstack(changed))) == list(map(as_bits, [*layers[:-1], layers[0]]))


@pytest.mark.parametrize("context", ["eager", "jit", "disable_jit"])
def test_traced_numbers(context):
    layers = [Params(array(2, seed=i), {"b": jax.random.key(i)}) for i in range(3)]
    stacked = treescan.stack(layers)

    def swap(stacked, i, j):
        first, second = treescan.layer_at(stacked, i), treescan.layer_at(stacked, j)
        return treescan.set_layer(treescan.set_layer(stacked, i, second), j, first)

    with jax.disable_jit(context == "disable_jit"):
        swapped = (jax.jit(swap) if context == "jit" else swap)(stacked, jnp.int32(0), jnp.int32(2))
        assert list(map(as_bits, treescan.unstack(swapped))) == list(map(as_bits, layers[::-1]))


def test_static_leaves_without_a_hash():
    """To JAX a set is a leaf."""
    layers = [{"w": array(2, seed=i), "f": {"a"}} for i in range(2)]
    stacked = treescan.set_layer(treescan.stack(layers), 0, layers[1])
    np.testing.assert_array_equal(stacked["w"], np.stack([layers[1]["w"]] * 2))
    with pytest.raises(treescan.errors.LayerError, match=r'layer\["f"\]'):
        treescan.set_layer(stacked, 0, {"w": layers[0]["w"], "f": {"b"}})


# Python's numbers and flags, which all layers share


def test_a_number_beside_an_array_is_one():
    stacked = treescan.stack([{"gain": 1.0}, {"gain": jnp.float32(2.0)}, {"gain": 1.0}])
    np.testing.assert_array_equal(stacked["gain"], [1, 2, 1])
    np.testing.assert_array_equal(treescan.set_layer(stacked, 0, {"gain": 5.0})["gain"], [5, 2, 1])


def test_a_number_that_jax_traces_is_shared_too():
    stacked = {"w": array(3, 2), "scale": 0.5, "flag": True}
    layers = jax.jit(treescan.unstack)(stacked)
    assert [(float(layer["scale"]), bool(layer["flag"])) for layer in layers] == [(0.5, True)] * 3
    layer = jax.jit(treescan.layer_at)(stacked, 2)
    np.testing.assert_array_equal(layer["w"], stacked["w"][2])
    assert layer["scale"].shape == ()
    arrays = {"w": np.ones((3, 2)), "scale": jnp.array(0.5), "flag": np.array(True), "on": jnp.array(True)}
    state = state_dict.layers_to_state_dict(arrays)
    assert [state[f"layers.{i}.{name}"].shape for i in range(3) for name in arrays] == [(2,), (), (), ()] * 3
    changed = jax.jit(treescan.set_layer)(stacked, 0, layer)
    np.testing.assert_array_equal(changed["w"][0], stacked["w"][2])
    assert changed["scale"].shape == ()


def test_gradients_reach_the_layers():
    layers = [{"w": array(3, seed=i)} for i in range(3)]

    def total(layers):
        stacked = treescan.stack(layers)
        changed = treescan.set_layer(stacked, 1, treescan.layer_at(stacked, 0))
        return sum(jnp.sum((i + 1.0) * layer["w"] ** 2) for i, layer in enumerate(treescan.unstack(changed)))

    gradient = jax.jit(jax.grad(total))(layers)
    expected = [{"w": 2 * factor * layer["w"]} for factor, layer in zip((3.0, 0.0, 3.0), layers, strict=True)]
    chex.assert_trees_all_close(gradient, expected, rtol=1e-6)
    batched = jax.vmap(lambda scale: treescan.stack([layer["w"] * scale for layer in layers]))(jnp.arange(4.0))
    assert batched.shape == (4, 3, 3)


# Flat checkpoints


@settings(max_examples=20)
@given(TREES, st.integers(1, 3), st.sampled_from(["layers", "model.decoder.layers", ""]), st.booleans())
def test_a_checkpoint_comes_back(tree, count, prefix, on_host):
    layers = [jax.tree.map(lambda make, i=i: make(i), tree) for i in range(count)]
    if not any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(layers[0])):
        return
    stacked = treescan.stack(layers)
    state: dict[str, Any] = state_dict.layers_to_state_dict(stacked, prefix=prefix)
    has_keys = any(jnp.issubdtype(value.dtype, jax.dtypes.prng_key) for value in state.values())
    if on_host and not has_keys:
        state = {name: np.asarray(value) for name, value in state.items()}
    others = {"embed.weight": np.ones(3), "final.0": "no array"} if prefix else {}
    back = state_dict.layers_from_state_dict({**others, **dict(reversed(state.items()))}, layers[0], prefix=prefix)
    assert as_bits(back) == as_bits(stacked)
    if on_host and not has_keys:
        assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(back) if hasattr(leaf, "shape"))


def test_a_checkpoint_without_a_like_keeps_its_names():
    """Other names, and those of several stacks, are in `test_mixed_checkpoints.py`."""
    shapes = {"self_attn.q_proj.weight": (6, 4), "norm.weight": (4,)}
    state = {f"model.layers.{i}.{name}": np.full(shape, i) for i in range(3) for name, shape in shapes.items()}
    by_name = state_dict.layers_from_state_dict(state, prefix="model.layers.")
    assert {name: leaf.shape for name, leaf in by_name.items()} == {name: (3, *shapes[name]) for name in shapes}


def test_arrays_of_the_host_stay_there_with_every_bit():
    state = {f"layers.{i}.w": np.array([2**40 + i, -1]) for i in range(2)} | {
        "layers.0.x": array(2),
        "layers.1.x": array(2),
    }
    stacked = state_dict.layers_from_state_dict(state)
    assert isinstance(stacked["w"], np.ndarray)
    assert isinstance(stacked["x"], jax.Array)
    back = state_dict.layers_to_state_dict(stacked)
    assert back.keys() == state.keys()
    for name, leaf in state.items():
        assert type(back[name]) is type(leaf)
        assert as_bits(back[name]) == as_bits(leaf)


def test_a_number_with_zeros_before_it_is_a_name():
    state = {"layers.0.w": np.ones(2), "layers.00.w": np.zeros(2)}
    np.testing.assert_array_equal(state_dict.layers_from_state_dict(state)["w"], [[1, 1]])


def test_a_number_of_a_small_type():
    stacked = jnp.arange(200)
    assert jax.jit(treescan.layer_at)(stacked, jnp.int8(-1)) == 199
    assert jax.jit(treescan.layer_at)(stacked, jnp.uint8(199)) == 199
