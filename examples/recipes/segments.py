"""Layers over packed rows: attention, and a causal convolution."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

import treescan
from treescan.carries import window


# --8<-- [start:attention]
class Heads(NamedTuple):
    """What attention reads: [steps, heads, features] of each sequence."""

    query: Array
    key: Array
    value: Array


def rotate(
    x: Float[Array, "R T H D"], positions: Int[Array, "R T"]
) -> Float[Array, "R T H D"]:
    """The rotary embedding: turns pairs of features by their position."""
    half = x.shape[-1] // 2
    rates = 10_000.0 ** -(jnp.arange(half) / half)
    angles = positions[..., None, None] * rates
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def attend(packed: treescan.Packed[Heads]) -> Float[Array, "T R H D"]:
    """Causal attention, in which a step sees only its own sequence."""
    ids, positions = packed.segment_ids.T, packed.positions.T  # [R, T]
    same = ids[:, :, None] == ids[:, None, :]  # [R, T, T]
    query, key, value = (leaf.swapaxes(0, 1) for leaf in packed.data)
    out = jax.nn.dot_product_attention(
        rotate(query, positions),
        rotate(key, positions),
        value,
        mask=same[:, None],
        is_causal=True,
    )
    return out.swapaxes(0, 1)


# --8<-- [end:attention]


# --8<-- [start:convolution]
def convolve(
    packed: treescan.Packed[Float[Array, "T R C"]],
    kernel: Float[Array, "K C"],
) -> Float[Array, "T R C"]:
    """A causal convolution of each feature. Each sequence follows zeros."""

    def step(earlier: Array, x: Array) -> tuple[Array, Array]:
        taps = jnp.concatenate([earlier, x[None]])  # [K, R, C]
        return x, jnp.einsum("krc,kc->rc", taps, kernel)

    zeros = jnp.zeros((len(kernel) - 1, *packed.data.shape[1:]))
    return treescan.mask_scan(step, window(zeros), packed)[1]


# --8<-- [end:convolution]


# --8<-- [start:shifts]
def convolve_at_once(
    packed: treescan.Packed[Float[Array, "T R C"]],
    kernel: Float[Array, "K C"],
) -> Float[Array, "T R C"]:
    """The same by shifts of whole rows."""
    ys = jnp.zeros_like(packed.data)
    for back, weights in enumerate(kernel[::-1]):
        inside = packed.mask & (packed.positions >= back)
        earlier = jnp.roll(packed.data, back, axis=0)
        ys += jnp.where(inside[..., None], earlier, 0.0) * weights
    return ys


# --8<-- [end:shifts]
