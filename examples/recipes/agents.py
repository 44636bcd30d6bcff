"""Recurrent agents: stored states with burn-in, GAE and V-trace.

Episodes begin in the middle of a row. Each function has a twin by hand.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

import treescan

Pair = tuple[Array, Array]


class Network(NamedTuple):
    """An Elman network and a head for the values of the actions."""

    x: Float[Array, "features hidden"]
    h: Float[Array, "hidden hidden"]
    out: Float[Array, "hidden actions"]


class Replayed(NamedTuple):
    """What R2D2 draws from its memory: rows of steps, and their states."""

    stored: Float[Array, "batch hidden"]
    observations: Float[Array, "time batch features"]
    begins: Bool[Array, "time batch"]


def step(p: Network, h: Array, x: Array) -> tuple[Array, Array]:
    """The new state, and the values of the actions."""
    h = jnp.tanh(x @ p.x + h @ p.h)
    return h, h @ p.out


# --8<-- [start:r2d2]
def r2d2(p: Network, data: Replayed, burn_in: int) -> Array:
    """Values of actions [T - burn_in, B, actions], after a burn-in.

    A row continues from the state that was stored with it. `reset_to` starts
    each episode that begins within the row from zeros.
    """
    run = functools.partial(
        treescan.mask_scan, functools.partial(step, p), reset_to=0.0
    )
    xs = (data.observations, data.begins)
    before = jax.tree.map(lambda leaf: leaf[:burn_in], xs)
    after = jax.tree.map(lambda leaf: leaf[burn_in:], xs)
    warm, _ = run(data.stored, before[0], resets=before[1])
    warm = jax.lax.stop_gradient(warm)
    return run(warm, after[0], resets=after[1])[1]


# --8<-- [end:r2d2]
def r2d2_by_hand(p: Network, data: Replayed, burn_in: int) -> Array:
    """The same by `jax.lax.scan`."""

    def reset_first(h: Array, inputs: Pair) -> Pair:
        x, begins = inputs
        return step(p, jnp.where(begins[:, None], 0.0, h), x)

    xs = (data.observations, data.begins)
    before = jax.tree.map(lambda leaf: leaf[:burn_in], xs)
    after = jax.tree.map(lambda leaf: leaf[burn_in:], xs)
    warm, _ = jax.lax.scan(reset_first, data.stored, before)
    return jax.lax.scan(reset_first, jax.lax.stop_gradient(warm), after)[1]


# --8<-- [start:returns]
class Trajectory(NamedTuple):
    """What actors did, [T, B].

    `next_values` are the values of what followed each step, before a reset:
    at a time limit, of the last observation of the episode. Where an episode
    terminates, they do not count.
    """

    rewards: Float[Array, "time batch"]
    values: Float[Array, "time batch"]
    next_values: Float[Array, "time batch"]
    terminated: Bool[Array, "time batch"]
    truncated: Bool[Array, "time batch"]
    ratios: Float[Array, "time batch"]


def errors_of(data: Trajectory, discount: float) -> Array:
    """How far rewards and later values are from the values."""
    later = jnp.where(data.terminated, 0.0, discount * data.next_values)
    return data.rewards + later - data.values


def begins_of(ends: Bool[Array, "time batch"]) -> Array:
    """An episode begins after the end of another."""
    return jnp.concatenate([jnp.zeros_like(ends[:1]), ends[:-1]])


def gae(data: Trajectory, discount: float, trace: float) -> Array:
    """Generalized advantage estimates, [T, B]."""
    errors = errors_of(data, discount)

    def add(later: Array, error: Array) -> tuple[Array, Array]:
        total = error + discount * trace * later
        return total, total

    zeros = jnp.zeros_like(data.rewards[0])
    resets = begins_of(data.terminated | data.truncated)
    return treescan.mask_scan(
        add, zeros, errors, resets=resets, reverse=True
    )[1]


# --8<-- [end:returns]
# --8<-- [start:vtrace]
def vtrace(data: Trajectory, discount: float) -> Array:
    """V-trace's targets of the values, [T, B]."""
    clipped = jnp.minimum(data.ratios, 1.0)
    errors = errors_of(data, discount)

    def add(later: Array, inputs: Pair) -> Pair:
        error, ratio = inputs
        total = ratio * (error + discount * later)
        return total, total

    zeros = jnp.zeros_like(data.rewards[0])
    resets = begins_of(data.terminated | data.truncated)
    _, corrections = treescan.mask_scan(
        add, zeros, (errors, clipped), resets=resets, reverse=True
    )
    return data.values + corrections


# --8<-- [end:vtrace]
def gae_by_hand(data: Trajectory, discount: float, trace: float) -> Array:
    """The same by `jax.lax.scan`: the end of an episode is a factor of 0."""
    errors = errors_of(data, discount)
    ends = data.terminated | data.truncated
    factors = jnp.where(ends, 0.0, discount * trace)

    def add(later: Array, inputs: Pair) -> Pair:
        error, factor = inputs
        total = error + factor * later
        return total, total

    zeros = jnp.zeros_like(data.rewards[0])
    return jax.lax.scan(add, zeros, (errors, factors), reverse=True)[1]


def vtrace_by_hand(data: Trajectory, discount: float) -> Array:
    """The same by `jax.lax.scan`."""
    clipped = jnp.minimum(data.ratios, 1.0)
    errors = errors_of(data, discount)
    ends = data.terminated | data.truncated
    factors = jnp.where(ends, 0.0, discount)

    def add(later: Array, inputs: tuple[Array, ...]) -> Pair:
        error, ratio, factor = inputs
        total = ratio * (error + factor * later)
        return total, total

    zeros = jnp.zeros_like(data.rewards[0])
    inputs = (errors, clipped, factors)
    corrections = jax.lax.scan(add, zeros, inputs, reverse=True)[1]
    return data.values + corrections
