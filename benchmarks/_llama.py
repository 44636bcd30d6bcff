"""The Llama block that the suite of layers runs: RMSNorm, rotary embedding, grouped-query attention, SwiGLU."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

EPSILON = 1e-5  # of RMSNorm
ROTARY_BASE = 10_000.0


@dataclasses.dataclass(frozen=True)
class Size:
    """The shape of a layer and of what runs through it; a layer has `kv_heads * groups` heads."""

    rows: int  # B
    tokens: int  # T
    width: int  # D
    kv_heads: int  # K
    groups: int  # G
    head: int  # H
    hidden: int  # F


class Layer(NamedTuple):
    """The weights of a block. Of stacked layers, each leaf has them along its first axis."""

    attention_norm: Array  # [D]
    q_proj: Array  # [D, K, G, H]
    k_proj: Array  # [D, K, H]
    v_proj: Array  # [D, K, H]
    o_proj: Array  # [K, G, H, D]
    mlp_norm: Array  # [D]
    gate_proj: Array  # [D, F]
    up_proj: Array  # [D, F]
    down_proj: Array  # [F, D]


class Rotation(NamedTuple):
    """The angles of the rotary embedding, the same for all layers."""

    cos: Array  # [T, H / 2]
    sin: Array  # [T, H / 2]


Block = Callable[[Layer, Array, Rotation], Array]


def block(layer: Layer, x: Array, rotation: Rotation) -> Array:
    """One layer.

    Args:
        layer: its weights.
        x: `[B, T, D]`.
        rotation: see `make_rotation`.

    Returns:
        x plus what attention and the feed-forward network add to it.
    """
    x = x + _attention(layer, _rms_norm(x, layer.attention_norm), rotation)
    return x + _feed_forward(layer, _rms_norm(x, layer.mlp_norm))


def make_layer(key: Array, size: Size) -> Layer:
    """Weights that keep the activations of order 1."""
    d, k, g, h, f = size.width, size.kv_heads, size.groups, size.head, size.hidden
    keys = iter(jax.random.split(key, len(Layer._fields)))

    def draw(fan_in: int, *shape: int) -> Array:
        return fan_in**-0.5 * jax.random.normal(next(keys), shape)

    return Layer(
        attention_norm=1 + draw(d, d),
        q_proj=draw(d, d, k, g, h),
        k_proj=draw(d, d, k, h),
        v_proj=draw(d, d, k, h),
        o_proj=draw(k * g * h, k, g, h, d),
        mlp_norm=1 + draw(d, d),
        gate_proj=draw(d, d, f),
        up_proj=draw(d, d, f),
        down_proj=draw(f, f, d),
    )


def make_rotation(size: Size) -> Rotation:
    """The angle of each token and each pair of features."""
    frequencies = ROTARY_BASE ** -(jnp.arange(size.head // 2) / (size.head // 2))
    angles = jnp.arange(size.tokens)[:, None] * frequencies
    return Rotation(jnp.cos(angles), jnp.sin(angles))


def _rms_norm(x: Array, scale: Array) -> Array:
    return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + EPSILON) * scale


def _attention(layer: Layer, x: Array, rotation: Rotation) -> Array:
    """Causal attention; the heads of a group share their keys and values."""
    q = _rotate(jnp.einsum("btd,dkgh->bktgh", x, layer.q_proj), rotation)
    k = _rotate(jnp.einsum("btd,dkh->bkth", x, layer.k_proj), rotation)
    v = jnp.einsum("btd,dkh->bkth", x, layer.v_proj)
    scores = jnp.einsum("bktgh,bksh->bkgts", q, k) * q.shape[-1] ** -0.5
    causal = jnp.tri(x.shape[1], dtype=bool)
    weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf), axis=-1)
    return jnp.einsum("bktgh,kghd->btd", jnp.einsum("bkgts,bksh->bktgh", weights, v), layer.o_proj)


def _rotate(x: Array, rotation: Rotation) -> Array:
    """Turns each pair of features of x, `[B, K, T, ..., H]`."""
    between = range(1, x.ndim - 3)
    cos, sin = (jnp.expand_dims(leaf, tuple(between)) for leaf in rotation)
    left, right = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([left * cos - right * sin, left * sin + right * cos], axis=-1)


def _feed_forward(layer: Layer, x: Array) -> Array:
    return (jax.nn.silu(x @ layer.gate_proj) * (x @ layer.up_proj)) @ layer.down_proj
