"""Recurrent PPO, whole: acting, advantages and updates are one program.

The game tests memory. A cue is shown in the first step of an episode
and asked for in the last. `train` is written with treescan, `by_hand` with
`jax.lax.scan` alone; both draw the same random numbers.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, PRNGKeyArray

import treescan

from . import agents

EPISODE = 5  # steps
DISCOUNT, TRACE, CLIP = 0.95, 0.9, 0.2
OPTIMIZER = optax.adam(3e-3)


class Policy(NamedTuple):
    """A recurrent network with two heads."""

    x: Float[Array, "features hidden"]
    h: Float[Array, "hidden hidden"]
    act: Float[Array, "hidden actions"]
    value: Float[Array, " hidden"]


class Game(NamedTuple):
    """Where each of B games is: its cue, and how many steps were played."""

    cue: Int[Array, " batch"]
    played: Int[Array, " batch"]


class Played(NamedTuple):
    """One step of all games; in a rollout, leaves lead with time."""

    seen: Float[Array, "batch features"]
    begins: Array
    action: Array
    chance: Array
    value: Array
    reward: Array
    ends: Array


class Learner(NamedTuple):
    """All that training carries."""

    policy: Policy
    moments: Any
    games: Game
    memory: Float[Array, "batch hidden"]


def make(key: PRNGKeyArray, games: int, hidden: int) -> Learner:
    """A new learner, with random weights."""
    of_x, of_h, of_a, of_cue = jax.random.split(key, 4)
    policy = Policy(
        jax.random.normal(of_x, (3, hidden)),
        jax.random.normal(of_h, (hidden, hidden)) * hidden**-0.5,
        0.1 * jax.random.normal(of_a, (hidden, 2)),
        jnp.zeros(hidden),
    )
    cue = jax.random.randint(of_cue, (games,), 0, 2)
    started = Game(cue, jnp.zeros(games, jnp.int32))
    memory = jnp.zeros((games, hidden))
    return Learner(policy, OPTIMIZER.init(policy), started, memory)


def think(p: Policy, memory: Array, seen: Array) -> tuple[Array, Any]:
    """The new memory; logarithms of chances, and values."""
    memory = jnp.tanh(seen @ p.x + memory @ p.h)
    return memory, (jax.nn.log_softmax(memory @ p.act), memory @ p.value)


def look(game: Game) -> Array:
    """What a player sees: the cue in the first step, and the time."""
    shown = jax.nn.one_hot(game.cue, 2) * (game.played == 0)[:, None]
    return jnp.concatenate([shown, game.played[:, None] / EPISODE], -1)


def play(
    p: Policy, carry: tuple[Game, Array], _: None, *, key: PRNGKeyArray
) -> tuple[tuple[Game, Array], Played]:
    """One step of all games. A game that ends starts again."""
    game, memory = carry
    for_action, for_cue = jax.random.split(key)
    begins, seen = game.played == 0, look(game)
    memory = jnp.where(begins[:, None], 0.0, memory)
    memory, (chances, value) = think(p, memory, seen)
    action = jax.random.categorical(for_action, chances)
    ends = game.played == EPISODE - 1
    reward = jnp.where(ends, 2.0 * (action == game.cue) - 1.0, 0.0)
    fresh = jax.random.randint(for_cue, game.cue.shape, 0, 2)
    after = Game(
        jnp.where(ends, fresh, game.cue),
        jnp.where(ends, 0, game.played + 1),
    )
    chance = jnp.take_along_axis(chances, action[:, None], 1)[:, 0]
    told = Played(seen, begins, action, chance, value, reward, ends)
    return (after, memory), told


def loss(
    think_again: Callable[[Policy], Any],
    played: Played,
    p: Policy,
    gains: Array,
) -> Array:
    """PPO's: the clipped gain, the error of the values, the entropy."""
    chances, values = think_again(p)
    chance = jnp.take_along_axis(chances, played.action[..., None], -1)
    ratio = jnp.exp(chance[..., 0] - played.chance)
    advantage = (gains - gains.mean()) / (gains.std() + 1e-6)
    clipped = jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * advantage
    policy = -jnp.minimum(ratio * advantage, clipped).mean()
    error = jnp.square(values - (gains + played.value)).mean()
    entropy = -(jnp.exp(chances) * chances).sum(-1).mean()
    return policy + 0.5 * error - 0.01 * entropy


def of_rewards(played: Played, last: Array) -> agents.Trajectory:
    """The part of a rollout that returns are made of."""
    return agents.Trajectory(
        rewards=played.reward,
        values=played.value,
        next_values=jnp.concatenate([played.value[1:], last[None]]),
        terminated=played.ends,
        truncated=jnp.zeros_like(played.ends),
        ratios=jnp.ones_like(played.value),
    )


def apply(p: Policy, moments: Any, gradient: Policy) -> tuple[Policy, Any]:
    """A step of the optimizer."""
    changes, moments = OPTIMIZER.update(gradient, moments, p)
    return jax.tree.map(jnp.add, p, changes), moments


# --8<-- [start:treescan]
def update(
    learner: Learner, _: None, *, key: PRNGKeyArray, steps: int, epochs: int
) -> tuple[Learner, Array]:
    """Plays `steps` steps and learns from them; returns the mean reward."""
    stored = learner.memory
    (games, memory), played = treescan.scan(
        functools.partial(play, learner.policy),
        (learner.games, stored),
        length=steps,
        key=key,
    )
    at_start = jnp.where((games.played == 0)[:, None], 0.0, memory)
    last = think(learner.policy, at_start, look(games))[1][1]
    gains = agents.gae(of_rewards(played, last), DISCOUNT, TRACE)

    def think_again(p: Policy) -> Any:
        return treescan.mask_scan(
            functools.partial(think, p),
            stored,
            played.seen,
            resets=played.begins,
            reset_to=0.0,
        )[1]

    def improve(_: Array, carry: tuple[Policy, Any]) -> tuple[Policy, Any]:
        p, moments = carry
        gradient = jax.grad(loss, argnums=2)(think_again, played, p, gains)
        return apply(p, moments, gradient)

    p, moments = treescan.fori(
        0, epochs, improve, (learner.policy, learner.moments)
    )
    return Learner(p, moments, games, memory), played.reward.mean()


def train(
    learner: Learner, key: PRNGKeyArray, updates: int, steps: int, epochs: int
) -> tuple[Learner, Float[Array, " updates"]]:
    """Trains, and returns the mean reward of a step in each update."""
    body = functools.partial(update, steps=steps, epochs=epochs)
    return treescan.scan(body, learner, length=updates, key=key)


# --8<-- [end:treescan]
# --8<-- [start:by_hand]
def by_hand(
    learner: Learner, key: PRNGKeyArray, updates: int, steps: int, epochs: int
) -> tuple[Learner, Float[Array, " updates"]]:
    """The same with `jax.lax.scan`."""

    def keys(key: PRNGKeyArray, length: int) -> PRNGKeyArray:
        return jax.vmap(jax.random.fold_in, (None, 0))(
            key, jnp.arange(length)
        )

    def update(learner: Learner, key: PRNGKeyArray) -> tuple[Learner, Array]:
        stored = learner.memory

        def act(carry: tuple[Game, Array], key: PRNGKeyArray) -> Any:
            return play(learner.policy, carry, None, key=key)

        (games, memory), played = jax.lax.scan(
            act, (learner.games, stored), keys(key, steps)
        )
        at_start = jnp.where((games.played == 0)[:, None], 0.0, memory)
        last = think(learner.policy, at_start, look(games))[1][1]
        rewards = of_rewards(played, last)
        gains = agents.gae_by_hand(rewards, DISCOUNT, TRACE)

        def think_again(p: Policy) -> Any:
            def reset_first(
                memory: Array, inputs: tuple[Array, Array]
            ) -> Any:
                seen, begins = inputs
                memory = jnp.where(begins[:, None], 0.0, memory)
                return think(p, memory, seen)

            inputs = (played.seen, played.begins)
            return jax.lax.scan(reset_first, stored, inputs)[1]

        def improve(carry: tuple[Policy, Any], _: None) -> Any:
            p, moments = carry
            g = jax.grad(loss, argnums=2)(think_again, played, p, gains)
            return apply(p, moments, g), None

        (p, moments), _ = jax.lax.scan(
            improve, (learner.policy, learner.moments), length=epochs
        )
        return Learner(p, moments, games, memory), played.reward.mean()

    return jax.lax.scan(update, learner, keys(key, updates))


# --8<-- [end:by_hand]
