"""The verbs over layers as a newcomer may try them: odd blocks, odd leaves, arguments in the wrong places."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import assert_bitwise as equal

from treescan import fold_layers, init_layers, layer_at, scan_layers, set_layer, stack, unstack
from treescan.errors import LayerError
from treescan.state_dict import layers_from_state_dict, layers_to_state_dict

pytestmark = pytest.mark.quick

X = jnp.arange(3.0)
LAYERS = {"w": jnp.stack([jnp.eye(3) * (i + 1) for i in range(4)]), "b": jnp.zeros((4, 3))}
NUMBERS = {"b": jnp.arange(4.0)}


# --- blocks -----------------------------------------------------------------------------------------------------------


def with_default(layer: Any, x: Any, by: float = 1.0) -> Any:
    return x + layer["b"] + by


def with_any(layer: Any, x: Any, *others: Any, **options: Any) -> Any:
    return x + layer["b"] + 1 + len(others) + len(options)


BLOCKS: dict[str, Callable[..., Any]] = {
    "default": with_default,
    "*others": with_any,
    "partial of the first": functools.partial(lambda by, layer, x: x + layer["b"] + by, 1.0),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_of_any_kind(name: str) -> None:
    np.testing.assert_array_equal(fold_layers(BLOCKS[name], X, LAYERS), X + 4)
    np.testing.assert_array_equal(fold_layers([BLOCKS[name]] * 2, X, [LAYERS] * 2), X + 8)
    with jax.disable_jit():
        np.testing.assert_array_equal(fold_layers(BLOCKS[name], X, LAYERS), X + 4)


def test_an_argument_takes_the_place_of_a_default() -> None:
    for args in ((2.0,), [2.0]):
        np.testing.assert_array_equal(fold_layers(with_default, X, LAYERS, args=args), X + 8)


def test_a_block_that_changes_what_it_is_given() -> None:
    def block(layer: Any, x: Any) -> Any:
        x["h"] = x["h"] @ (layer.pop("w") * 2)
        return x

    layers, x = dict(LAYERS), {"h": X}
    np.testing.assert_array_equal(fold_layers(block, x, layers)["h"], 16 * 24 * X)
    equal((layers, x), (LAYERS, {"h": X}))


# --- arguments in the wrong places ------------------------------------------------------------------------------------


def test_xs_of_another_kind() -> None:
    def block(layer: Any, x: Any, own: Any) -> Any:
        return x, own

    np.testing.assert_array_equal(scan_layers(block, X, LAYERS, np.arange(4, dtype=np.int32))[1], np.arange(4))
    with pytest.raises(LayerError, match=r"Make it an array, `jnp.asarray\(xs\)`"):
        scan_layers(block, X, LAYERS, [1.0, 2.0, 3.0, 4.0])
    static = scan_layers(lambda layer, x, own: (x, own["i"]), X, LAYERS, {"i": jnp.arange(4), "kind": "a"})
    np.testing.assert_array_equal(static[1], np.arange(4))
    assert scan_layers(lambda layer, x, own: (x, None), X, LAYERS, {})[1] is None


# --- stacks of all sorts ----------------------------------------------------------------------------------------------

KEYS = [jax.random.key(0), jax.random.key(7)]


def test_layers_from_an_iterator() -> None:
    equal(stack({"b": jnp.float32(i)} for i in range(4)), NUMBERS)
    equal(jax.jit(lambda x: stack(x * i for i in (1.0, 2.0)))(X), jnp.stack([X, 2 * X]))
    equal(stack(LAYERS["w"]), LAYERS["w"])


def test_empty_trees() -> None:
    assert stack([None, None]) is None
    assert stack([(), ()]) == ()
    for nothing in (None, (), {"f": jnp.tanh}):
        for use in (unstack, layers_to_state_dict, lambda tree: layer_at(tree, 0)):
            with pytest.raises(LayerError, match="`stacked` holds no arrays"):
                use(nothing)


# --- the number of a layer --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("i, nearest", [(3, 3), (4, 3), (-1, 3), (-4, 0), (-5, 0), (np.uint32(3e9), 3)])
def test_a_traced_number_out_of_range_is_moved_to_the_nearest(i: Any, nearest: int) -> None:
    equal(jax.jit(layer_at)(NUMBERS, i), {"b": jnp.float32(nearest)})
    changed = jax.jit(set_layer)(NUMBERS, i, {"b": jnp.float32(9)})
    equal(changed, {"b": NUMBERS["b"].at[nearest].set(9.0)})
    equal(jax.vmap(lambda number: layer_at(NUMBERS, number))(jnp.array([i])), {"b": jnp.array([float(nearest)])})


# --- set_layer --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [np.zeros, jnp.zeros])
def test_set_layer_leaves_the_stack_as_it_was(make: Callable[..., Any]) -> None:
    stacked = {"b": make((3, 2), np.float32)}
    changed = set_layer(stacked, 1, {"b": np.ones(2, np.float32)})
    equal(stacked, {"b": jnp.zeros((3, 2))})
    equal(changed, {"b": jnp.array([[0.0, 0], [1, 1], [0, 0]])})


def test_set_layer_takes_numbers_of_the_same_kind_alone() -> None:
    equal(set_layer(NUMBERS, 0, {"b": 5.0}), {"b": jnp.array([5.0, 1, 2, 3])})
    for other in (5, True, 5j, jnp.bfloat16(5), np.int32(5), KEYS[0], None, "a"):
        with pytest.raises(LayerError, match=r'layer\["b"\] +float32\[\] '):
            set_layer(NUMBERS, 0, {"b": other})


# --- init_layers, and flat checkpoints --------------------------------------------------------------------------------


def test_init_layers_of_any_kind() -> None:
    def init(key: Any, width: int = 2, kind: str = "dense") -> Any:
        return {"w": jax.random.normal(key, (width,)), "kind": kind, "scale": 1.0, "nothing": None}

    for n in (3, np.int64(3), jnp.int32(3)):
        made = init_layers(init, KEYS[0], n, 5, "sparse")
        expected = stack([init(key, 5, "sparse") for key in jax.random.split(KEYS[0], 3)])
        assert made["kind"] == "sparse" and made["nothing"] is None
        equal([made["w"], made["scale"]], [expected["w"], expected["scale"]])
    equal(init_layers(functools.partial(init, width=4), KEYS[0], 2)["w"].shape, (2, 4))
    raw, draw = jax.random.PRNGKey(3), lambda key: jax.random.normal(key, (2,))
    equal(init_layers(draw, raw, 3), stack([draw(key) for key in jax.random.split(raw, 3)]))


def test_flat_checkpoints_of_any_kind() -> None:
    assert layers_from_state_dict({"layers.0.w": True, "layers.1.w": False})["w"].tolist() == [True, False]
    equal(layers_from_state_dict({"layers.0.k": KEYS[0], "layers.1.k": KEYS[1]})["k"], stack(KEYS))
    state = {"layers.0.w.1": X, "layers.0.w.0": 2 * X, 7: X, "layers.x.w": X, "Xlayers.1.w": X}
    equal(layers_from_state_dict(state, {"w": (X, X)}), {"w": (2 * X[None], X[None])})
    like = {"w": X, "b": None, "f": jnp.tanh}
    made = layers_from_state_dict({"layers.0.w": np.ones(3, np.float32)}, like)
    assert made["b"] is None and made["f"] is jnp.tanh and isinstance(made["w"], np.ndarray)
