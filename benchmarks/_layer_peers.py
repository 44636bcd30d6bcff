"""Stacks of Llama blocks without treescan: by hand, and as haiku, flax and equinox have it.

All run the same block on the same weights, stacked as treescan has them. How a peer's own tree of weights is put
together from these is part of tracing and costs nothing in the compiled program.
"""

import importlib
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
from jax import Array, lax

from benchmarks._llama import Block, Layer, Rotation, block

HAIKU_NAME = "layers"
HAIKU_PARAMETERS = f"{HAIKU_NAME}/~"  # where haiku keeps what a function asks for outside of a module


def lax_scan(layers: Layer, x: Array, rotation: Rotation) -> Array:
    """`lax.scan` by hand."""

    def step(x: Array, layer: Layer) -> tuple[Array, None]:
        return block(layer, x, rotation), None

    return lax.scan(step, x, layers)[0]


def lax_scan_remat(layers: Layer, x: Array, rotation: Rotation) -> Array:
    """`lax.scan` by hand, each layer run again in the backward pass."""

    def step(x: Array, layer: Layer) -> tuple[Array, None]:
        return block(layer, x, rotation), None

    return lax.scan(jax.checkpoint(step, prevent_cse=False), x, layers)[0]


def python_loop(layers: list[Layer], x: Array, rotation: Rotation, block: Block = block) -> Array:
    """The unrolled loop; its layers are separate arrays, so that it slices and stacks none."""
    for layer in layers:
        x = block(layer, x, rotation)
    return x


def haiku_stack(layers: Layer, x: Array, rotation: Rotation) -> Array:
    """`hk.experimental.layer_stack` around a function that asks for its parameters by name."""
    hk: Any = importlib.import_module("haiku")  # not installed where the code is only checked

    def layer(x: Array) -> Array:
        return block(Layer(*map(get_parameter, Layer._fields)), x, rotation)

    def get_parameter(name: str) -> Array:
        shape = getattr(layers, name).shape[1:]
        return hk.get_parameter(name, shape, init=hk.initializers.VarianceScaling())

    stack = hk.experimental.layer_stack(layers[0].shape[0], name=HAIKU_NAME)
    network = hk.without_apply_rng(hk.transform(stack(layer)))
    return network.apply({HAIKU_PARAMETERS: layers._asdict()}, x)


class FlaxBlock(nn.Module):
    """The block as a module of flax; `shapes` are those of its weights."""

    shapes: dict[str, tuple[int, ...]]

    @nn.compact
    def __call__(self, x: Array, rotation: Rotation) -> tuple[Array, None]:
        """The carry and no y, as `nn.scan` wants it."""
        weights = (self.param(name, nn.initializers.normal(), self.shapes[name]) for name in Layer._fields)
        return block(Layer(*weights), x, rotation), None


def flax_scan(layers: Layer, x: Array, rotation: Rotation) -> Array:
    """`nn.scan` over the block."""
    scan: Any = nn.scan  # its types do not know `nn.broadcast`
    stack = scan(
        FlaxBlock,
        variable_axes={"params": 0},
        split_rngs={"params": True},
        in_axes=nn.broadcast,
        length=layers[0].shape[0],
    )
    weights = layers._asdict()
    shapes = {name: leaf.shape[1:] for name, leaf in weights.items()}
    return stack(shapes).apply({"params": weights}, x, rotation)[0]


class EquinoxBlock(eqx.Module):
    """The block as a module of equinox."""

    layer: Layer

    def __call__(self, x: Array, rotation: Rotation) -> Array:
        """One layer."""
        return block(self.layer, x, rotation)


def equinox_scan(layers: Layer, x: Array, rotation: Rotation) -> Array:
    """The recipe of equinox's documentation: modules made under vmap, a scan over what of them is an array.

    https://docs.kidger.site/equinox/tricks/
    """
    blocks = eqx.filter_vmap(EquinoxBlock)(layers)
    dynamic, static = eqx.partition(blocks, eqx.is_array)

    def step(x: Array, dynamic: EquinoxBlock) -> tuple[Array, None]:
        return eqx.combine(dynamic, static)(x, rotation), None

    return lax.scan(step, x, dynamic)[0]
