"""Stacks of what flax boxes with names for its axes: the axis of the layers is one of them."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.core import meta
from jax.sharding import AxisType, PartitionSpec as P

import treescan

pytestmark = pytest.mark.devices

N, D = 4, 2
KEY = jax.random.key(0)
KEYS = jax.random.split(KEY, N)
H = jnp.ones((1, D))
NAMES = ["layers", None]
SHARDING = "out_sharding" if hasattr(nnx, "set_graph_mode") else "sharding_names"  # what flax calls it


@pytest.fixture(autouse=True)
def mesh() -> Any:
    with jax.set_mesh(jax.make_mesh((2, 1), ("in", "out"), axis_types=(AxisType.Auto,) * 2)):
        yield


def named(initial: Any, *names: str | None) -> Any:
    return nnx.with_partitioning(initial, names)


class Layer(nnx.Module):
    """Names of all axes, of the first alone, and none."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        full = named(nnx.initializers.lecun_normal(), "in", "out")
        short = named(nnx.initializers.lecun_normal(), "in")
        self.full = nnx.Linear(D, D, kernel_init=full, bias_init=named(nnx.initializers.zeros, "out"), rngs=rngs)
        self.short = nnx.Linear(D, D, kernel_init=short, use_bias=False, rngs=rngs)
        self.plain = nnx.Linear(D, D, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.tanh(self.plain(self.short(self.full(x))))


def make(key: jax.Array) -> Layer:
    return Layer(nnx.Rngs(key))


def by_nnx(name: str | None) -> Layer:
    return nnx.vmap(make, in_axes=0, out_axes=0, transform_metadata={nnx.PARTITION_NAME: name})(KEYS)


class Dense(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, _: None = None) -> Any:
        full = nn.with_partitioning(nn.initializers.lecun_normal(), ("in", "out"))
        logical = nn.with_logical_partitioning(nn.initializers.zeros, ("wide",))
        return nn.tanh(nn.Dense(D, kernel_init=full, bias_init=logical)(x)), None


def init_dense(key: jax.Array) -> Any:
    return Dense().init(key, H)["params"]


def by_linen(name: str | None) -> Any:
    roles: dict[str, Any] = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "length": N}
    return nn.scan(Dense, **roles, metadata_params={nn.PARTITION_NAME: name})().init(KEY, H, None)["params"]


MAKERS: dict[str, Callable[..., Any]] = {
    "init_layers": lambda init, name: treescan.init_layers(init, KEY, N, layer_axis_name=name),
    "stack": lambda init, name: treescan.stack([init(key) for key in KEYS], layer_axis_name=name),
}


def specs(tree: Any) -> list[Any]:
    """What flax makes of the names."""
    is_spec = lambda node: isinstance(node, P)  # noqa: E731
    if isinstance(tree, nnx.Module):
        return jax.tree.leaves(nnx.get_partition_spec(nnx.state(tree)), is_leaf=is_spec)
    return jax.tree.leaves(nn.get_partition_spec(tree), is_leaf=is_spec)


def same(one: Any, other: Any) -> bool:
    return jax.tree.structure(one) == jax.tree.structure(other) and all(
        map(np.array_equal, jax.tree.leaves(one), jax.tree.leaves(other))
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("maker", MAKERS)
def test_the_metadata_of_nnx_is_that_of_nnx_vmap(maker: str, name: str | None) -> None:
    stacked = MAKERS[maker](make, name)
    assert specs(stacked) == specs(by_nnx(name))
    assert same(stacked, by_nnx(name))
    assert stacked.full.kernel.get_metadata(SHARDING) == (name, "in", "out")
    assert stacked.short.kernel.get_metadata(SHARDING) == (name, "in")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("maker", MAKERS)
def test_the_boxes_of_linen_are_those_of_its_scan(maker: str, name: str | None) -> None:
    stacked = MAKERS[maker](init_dense, name)
    assert specs(stacked) == specs(by_linen(name))
    assert stacked["Dense_0"]["kernel"].names == (name, "in", "out")
    assert stacked["Dense_0"]["bias"].names == (name, "wide")


@pytest.mark.parametrize(
    ("kind", "name", "told"),
    [("nnx", "layers", True), ("nnx", None, False), ("linen", "layers", False), ("linen", None, True)],
)
def test_a_layer_has_the_metadata_that_it_had(kind: str, name: str | None, told: bool) -> None:
    layers = [(make if kind == "nnx" else init_dense)(key) for key in KEYS]
    stacked = treescan.stack(layers, layer_axis_name=name)
    told_name = name if told else None
    assert all(map(same, treescan.unstack(stacked, layer_axis_name=told_name), layers))
    assert same(treescan.layer_at(stacked, 1, layer_axis_name=told_name), layers[1])
    assert same(jax.jit(treescan.layer_at)(stacked, 1), layers[1])
    changed = treescan.set_layer(stacked, 0, layers[1])
    assert jax.tree.structure(changed) == jax.tree.structure(stacked)
    assert same(treescan.layer_at(changed, 0), layers[1])
    assert same(treescan.stack(layers, layer_axis_name=name), stacked), "what is given is not changed"
    state = treescan.state_dict.layers_to_state_dict(stacked)
    assert same(treescan.state_dict.layers_from_state_dict(state, layers[0]), treescan.stack(layers))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("init", [make, init_dense])
def test_a_block_is_given_the_metadata_of_one_layer(init: Any, name: str | None) -> None:
    """Under a mesh flax constrains the array in a box of linen by its names: each needs its axis."""
    seen = []

    def run(layer: Any, x: jax.Array) -> jax.Array:
        seen.append((specs(layer), specs(init(KEY))))
        return layer(x) if init is make else Dense().apply({"params": layer}, x)[0]

    stacked = treescan.init_layers(init, KEY, N, layer_axis_name=name)
    y = treescan.fold_layers(run, H, stacked, remat="step")
    assert seen and all(given == expected for given, expected in seen)
    x = H
    for layer in treescan.unstack(stacked):
        x = run(layer, x)
    np.testing.assert_allclose(y, x, rtol=1e-5)


def test_flax_shards_the_axes_that_have_the_names() -> None:
    stacked = treescan.init_layers(make, KEY, N)
    mesh = jax.make_mesh((2, 1), ("in", "out"), axis_types=(AxisType.Auto,) * 2)
    sharded = jax.device_put(nnx.state(stacked), nnx.get_named_sharding(nnx.state(stacked), mesh))
    nnx.update(stacked, sharded)
    kernel = jax.tree.leaves(stacked.full.kernel)[0]
    assert kernel.sharding.shard_shape(kernel.shape) == (N, D // 2, D)
    assert treescan.fold_layers(Layer.__call__, H, stacked).shape == H.shape  # layers that lie apart are refused


def test_shardings_of_one_layer_beside_names() -> None:
    stacked = treescan.init_layers(make, KEY, N, shardings=P(), layer_axis_name="layers")
    assert stacked.full.kernel.get_metadata(SHARDING) == ("layers", "in", "out")


def test_a_stack_of_flax_that_does_not_name_its_layers() -> None:
    """`nnx.vmap` without `transform_metadata` leaves the names of one layer."""
    stacked = nnx.vmap(make, in_axes=0, out_axes=0)(KEYS)
    assert stacked.full.kernel.get_metadata(SHARDING) == ("in", "out")
    assert same(treescan.layer_at(stacked, 2), make(KEYS[2]))
    assert treescan.fold_layers(Layer.__call__, H, stacked).shape == H.shape


def test_shorter_names_are_those_of_a_stack_if_they_begin_as_those_of_all_axes_do() -> None:
    names = {"all": ("layers", "in", "out"), "begin so": ("layers", "in"), "begin otherwise": ("in", "out")}
    stacked = {which: meta.Partitioned(jnp.ones((N, D, D)), of_axes) for which, of_axes in names.items()}
    layer = {which: box.names for which, box in treescan.layer_at(stacked, 1).items()}
    assert layer == {"all": ("in", "out"), "begin so": ("in",), "begin otherwise": ("in", "out")}


def test_a_number_in_a_variable_is_one_of_each_layer() -> None:
    stacked = treescan.stack([nnx.Param(1.0), nnx.Param(2.0)])
    np.testing.assert_array_equal(stacked[...], [1, 2])
    made = treescan.init_layers(lambda key: nnx.Param(1.0), KEY, 3)
    assert same(made, nnx.vmap(lambda key: nnx.Param(1.0), in_axes=0, out_axes=0)(KEYS[:3]))


def test_flax_calls_the_name_as_it_is_called_here() -> None:
    assert nnx.PARTITION_NAME == meta.PARTITION_NAME == treescan._stacks.layer_axis._PARTITION_NAME
