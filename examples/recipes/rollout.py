"""A rollout whose loop ends episodes, and resets each row with its own key.

The game keeps water in a tank: a valve that is open too far empties it, which
terminates the episode. The logarithm and the root of its level are NaN then.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

import treescan
from treescan.carries import keys

LIMIT = 6  # steps


class Policy(NamedTuple):
    """How far the valve is opened, by the logarithm of the level."""

    slope: Float[Array, ""]
    bias: Float[Array, ""]


class Tank(NamedTuple):
    """The state of a game: one number each, or one per row."""

    level: Float[Array, "..."]
    played: Int[Array, "..."]


class Played(NamedTuple):
    """A step of all rows. `final` is the state after it, before a reset."""

    begins: Bool[Array, " batch"]
    state: Tank
    reward: Float[Array, " batch"]
    final: Tank
    terminated: Bool[Array, " batch"]
    truncated: Bool[Array, " batch"]


def reset(key: PRNGKeyArray) -> Tank:
    """A tank that is filled."""
    level = jax.random.uniform(key, minval=0.3, maxval=1.2)
    return Tank(level, jnp.int32(0))


def act(p: Policy, state: Tank, key: PRNGKeyArray) -> Array:
    """How far the valve is opened."""
    noise = 0.5 * jax.random.normal(key)
    return jax.nn.sigmoid(p.slope * jnp.log(state.level) + p.bias + noise)


def move(state: Tank, action: Array) -> tuple[Tank, Array, Array]:
    """The state after an action, the reward, and whether it terminates."""
    flow = action * jnp.sqrt(state.level)
    level = state.level - flow + 0.1
    return Tank(level, state.played + 1), flow, level <= 0


# --8<-- [start:rollout]
def choose(flags: Array, new: Any, old: Any) -> Any:
    """`new` in the rows in which the flag is True, and `old` in others."""

    def of_leaf(a: Array, b: Array) -> Array:
        shape = (*flags.shape, *[1] * (a.ndim - flags.ndim))
        return jnp.where(flags.reshape(shape), a, b)

    return jax.tree.map(of_leaf, new, old)


def start(row_keys: PRNGKeyArray) -> tuple[Tank, Array, Any]:
    """The carry of a first rollout: in each row, an episode begins."""
    state = jax.vmap(reset)(row_keys)  # is reset before it is used
    return state, jnp.ones(len(row_keys), bool), keys(row_keys)


def rollout(p: Policy, carry: Any, steps: int) -> tuple[Any, Played]:
    """Plays `steps` steps; its carry is that of the next rollout."""

    def step(carry: Any, _: None) -> tuple[Any, Played]:
        state, begins, row_keys = carry
        pairs = jax.vmap(jax.random.split)(row_keys)
        for_reset, for_action = pairs[:, 0], pairs[:, 1]
        state = jax.lax.cond(
            begins.any(),
            lambda: choose(begins, jax.vmap(reset)(for_reset), state),
            lambda: state,
        )
        action = jax.vmap(act, (None, 0, 0))(p, state, for_action)
        after, reward, terminated = jax.vmap(move)(state, action)
        truncated = ~terminated & (after.played >= LIMIT)
        # No value is computed of a state in which nobody can play.
        final = choose(terminated, state, after)
        told = Played(begins, state, reward, final, terminated, truncated)
        return (final, terminated | truncated, None), told

    return treescan.scan(step, carry, length=steps)


# --8<-- [end:rollout]
