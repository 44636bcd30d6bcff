"""The LSTM that the suites of compiled programs run."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array


class Params(NamedTuple):
    """The weights of an LSTM; the gates in the order input, forget, cell, output."""

    inputs: Array  # [F, 4H]
    hidden: Array  # [H, 4H]
    bias: Array  # [4H]


class State(NamedTuple):
    """The carry of an LSTM."""

    h: Array  # [B, H]
    c: Array  # [B, H]


def lstm(params: Params, state: State, x: Array) -> tuple[State, Array]:
    """One step.

    Args:
        params: the weights.
        state: the carry, `[B, H]` each.
        x: `[B, F]`.

    Returns:
        The next state, and its h.
    """
    gates = x @ params.inputs + state.h @ params.hidden + params.bias
    i, f, g, o = jnp.split(gates, 4, axis=-1)
    c = jax.nn.sigmoid(f + 1.0) * state.c + jax.nn.sigmoid(i) * jnp.tanh(g)
    h = jax.nn.sigmoid(o) * jnp.tanh(c)
    return State(h, c), h


def make_params(features: int, hidden: int) -> Params:
    """Weights of a size that keeps the activations of order 1."""
    scale = hidden**-0.5
    return Params(
        inputs=scale * normal(2, (features, 4 * hidden)),
        hidden=scale * normal(3, (hidden, 4 * hidden)),
        bias=jnp.zeros(4 * hidden),
    )


def normal(seed: int, shape: tuple[int, ...]) -> Array:
    """Data, the same in every run."""
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)
