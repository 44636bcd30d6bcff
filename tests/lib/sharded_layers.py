"""Layers whose weights are split over eight devices, as with FSDP or over their hidden axis."""

import re
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from hlo import Program
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from loops import array

import treescan

DEVICES, LAYERS, WIDTH, HIDDEN, ROWS = 8, 6, 32, 128, 8
FSDP = {"up": P("d"), "down": P(None, "d"), "scale": None}  # each weight over one of its own axes
TENSOR = {"up": P(None, "d"), "down": P("d"), "scale": None}  # the hidden axis
X = array(ROWS, WIDTH)


def mesh_of(kind: AxisType = AxisType.Auto) -> Any:
    return jax.make_mesh((DEVICES,), ("d",), axis_types=(kind,))


def on(mesh: Any, specs: dict[str, Any]) -> dict[str, NamedSharding]:
    return {name: NamedSharding(mesh, P() if spec is None else spec) for name, spec in specs.items()}


def init(key: jax.Array) -> dict[str, jax.Array]:
    """Uniform numbers, times powers of two: every program gives the same bits, as it does not of a normal density."""
    up, down = jax.random.split(key)
    return {
        "up": (jax.random.uniform(up, (WIDTH, HIDDEN)) - 0.5) / 2,
        "down": (jax.random.uniform(down, (HIDDEN, WIDTH)) - 0.5) / 4,
        "scale": jnp.ones(WIDTH),
    }


def stack(shardings: Any = None) -> dict[str, jax.Array]:
    return treescan.init_layers(init, jax.random.key(0), LAYERS, shardings=shardings)


def block(layer: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    return x + jnp.tanh((x * layer["scale"][None]) @ layer["up"]) @ layer["down"]


def loss(layers: Any, x: jax.Array, block: Any = block, **options: Any) -> jax.Array:
    return jnp.mean(treescan.fold_layers(block, x, layers, **options) ** 2)


both = jax.value_and_grad(loss, (0, 1))


def assert_right(found: Any, layers: Any = None) -> None:
    """A value and the gradient of layers, or of layers and x; that of layers lies where they do, if they are given."""
    (value, gradient), (expected, expected_gradient) = jax.device_get((found, both(stack(), X)))
    of_both = isinstance(gradient, tuple)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    wanted = expected_gradient if of_both else expected_gradient[0]
    chex.assert_trees_all_close(gradient, wanted, rtol=1e-4, atol=1e-6)
    if layers is not None:
        of_layers = found[1][0] if of_both else found[1]
        for leaf, own in zip(jax.tree.leaves(of_layers), jax.tree.leaves(layers), strict=True):
            assert leaf.sharding.is_equivalent_to(own.sharding, own.ndim)


def gathered(program: Program) -> set[tuple[int, ...]]:
    """The shapes that all-gathers give."""
    shapes = re.findall(r"= \(?\w+\[([\d,]+)\]\S* all-gather", "\n".join(program))
    return {tuple(map(int, shape.split(","))) for shape in shapes}
