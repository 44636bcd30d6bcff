"""Loops of public projects, written by hand and with treescan.

Each `..._by_hand` is a program of our own that computes what the project's
computes, in the same way. The page names the projects.
"""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

import treescan

State = Float[Array, " n"]


# A bounded loop that stops, with a gradient.
class Problem(NamedTuple):
    """A quadratic function, and where its descent begins."""

    matrix: Float[Array, "n n"]
    target: State
    start: State


def slope(problem: Problem, z: State) -> State:
    """The gradient of |A z - target|^2 / 2."""
    return problem.matrix.T @ (problem.matrix @ z - problem.target)


# --8<-- [start:descent]
def descent(problem: Problem, most: int) -> State:
    """Gradient descent until the slope is small."""

    def steep(z: State) -> Array:
        return jnp.abs(slope(problem, z)).max() > 1e-4

    def step(z: State, _: None) -> tuple[State, None]:
        return z - 0.3 * slope(problem, z), None

    return treescan.while_scan(
        steep, step, problem.start, max_length=most
    ).carry


# --8<-- [end:descent]
# --8<-- [start:descent_by_hand]
def descent_by_hand(problem: Problem, most: int) -> State:
    """A scan over all steps. After the end, a step does nothing."""

    def steep(z: State) -> Array:
        return jnp.abs(slope(problem, z)).max() > 1e-4

    def step(z: State) -> tuple[State, Array]:
        z = z - 0.3 * slope(problem, z)
        return z, steep(z)

    def maybe(carry: tuple[State, Array], _: None) -> Any:
        z, going = carry
        stop = jnp.bool_(False)
        return jax.lax.cond(going, step, lambda z: (z, stop), z), None

    begin = (problem.start, steep(problem.start))
    return jax.lax.scan(maybe, begin, length=most)[0][0]


# --8<-- [end:descent_by_hand]
# Nested recomputation.
class Wave(NamedTuple):
    """Heights and speeds of a wave on a grid."""

    height: Float[Array, "x y"]
    speed: Float[Array, "x y"]


def flow(stiffness: Array, wave: Wave, _: None) -> tuple[Wave, Array]:
    """One step of a nonlinear wave; y is its energy."""
    h = wave.height
    around = sum(jnp.roll(h, by, axis) for by in (1, -1) for axis in (0, 1))
    speed = wave.speed + stiffness * jnp.tanh(around - 4 * h)
    return Wave(h + 0.1 * speed, speed), jnp.square(speed).mean()


# --8<-- [start:nested]
def nested(stiffness: Array, wave: Wave, sizes: tuple[int, int]) -> Array:
    """The energies of all steps; the gradient saves a wave per chunk."""
    outer, inner = sizes
    return treescan.scan(
        functools.partial(flow, stiffness),
        wave,
        length=outer * inner,
        remat=treescan.Remat("everything_saveable", chunk=inner),
    )[1]


# --8<-- [end:nested]
# --8<-- [start:nested_by_hand]
def nested_by_hand(
    stiffness: Array, wave: Wave, sizes: tuple[int, int]
) -> Array:
    """A scan of checkpointed scans, for lengths that are products."""
    outer, inner = sizes
    step = functools.partial(flow, stiffness)

    @jax.checkpoint
    def chunk(wave: Wave, _: None) -> tuple[Wave, Array]:
        return jax.lax.scan(step, wave, length=inner)

    return jax.lax.scan(chunk, wave, length=outer)[1].reshape(-1)


# --8<-- [end:nested_by_hand]
# Thinning.
class Walker(NamedTuple):
    """A random walk on a density."""

    place: Float[Array, "chains n"]
    log_density: Float[Array, " chains"]


def metropolis(walker: Walker, key: PRNGKeyArray) -> Walker:
    """One step of Metropolis on a normal distribution."""
    to, accept = jax.random.split(key)
    place = walker.place + jax.random.normal(to, walker.place.shape)
    density = -0.5 * jnp.square(place).sum(-1)
    chance = jnp.log(jax.random.uniform(accept, density.shape))
    moves = chance < density - walker.log_density
    return Walker(
        jnp.where(moves[:, None], place, walker.place),
        jnp.where(moves, density, walker.log_density),
    )


# --8<-- [start:thinned]
def thinned(walker: Walker, keys: PRNGKeyArray, thinning: int) -> Array:
    """Every `thinning`-th place: the others are never stacked."""

    def step(walker: Walker, key: PRNGKeyArray) -> tuple[Walker, Array]:
        walker = metropolis(walker, key)
        return walker, walker.place

    return treescan.scan(step, walker, keys, save=thinning)[1]


# --8<-- [end:thinned]
# --8<-- [start:thinned_by_hand]
def thinned_by_hand(
    walker: Walker, keys: PRNGKeyArray, thinning: int
) -> Array:
    """A loop that writes into an array of its own, at every k-th step."""
    kept = len(keys) // thinning

    def step(i: Array, carry: tuple[Walker, Array]) -> tuple[Walker, Array]:
        walker, places = carry
        walker = metropolis(walker, keys[i])
        number = (i + 1) // thinning - 1
        keeps = (i + 1) % thinning == 0
        at = jnp.where(keeps, number, kept)  # past the end: not written
        return walker, places.at[at].set(walker.place, mode="drop")

    places = jnp.zeros((kept, *walker.place.shape))
    return jax.lax.fori_loop(0, len(keys), step, (walker, places))[1]


# --8<-- [end:thinned_by_hand]
# CTC over padded frames.
# --8<-- [start:ctc]
def ctc(
    logits: Float[Array, "time batch symbols"],
    lengths: Int[Array, " batch"],
    labels: Int[Array, "batch labels"],
    label_lengths: Int[Array, " batch"],
) -> Float[Array, " batch"]:
    """The CTC loss of each sequence. Blank is 0. Padding is skipped."""
    rows, most = labels.shape
    # Blanks between the labels: _ a _ b _
    path = jnp.zeros((rows, 2 * most + 1), labels.dtype)
    path = path.at[:, 1::2].set(labels)
    # As a product: the gradient of a gather would add entry by entry.
    is_symbol = jax.nn.one_hot(path, logits.shape[-1])
    chances = jnp.einsum(
        "tbv,bsv->tbs", jax.nn.log_softmax(logits), is_symbol
    )
    # From a label to the next one, unless both are the same.
    skips = (path[:, 2:] != 0) & (path[:, 2:] != path[:, :-2])

    def step(alpha: Array, chance: Array) -> tuple[Array, None]:
        low = jnp.full((len(alpha), 2), -1e30)
        one = jnp.concatenate([low[:, :1], alpha[:, :-1]], 1)
        two = jnp.where(skips, alpha[:, :-2], -1e30)
        two = jnp.concatenate([low, two], 1)
        highest = jnp.maximum(jnp.maximum(alpha, one), two)
        highest = jax.lax.stop_gradient(highest)
        total = sum(jnp.exp(each - highest) for each in (alpha, one, two))
        return highest + jnp.log(total) + chance, None

    # Before the first step: a place before the path, which leads to 0 and 1.
    start = jnp.full(path.shape, -1e30).at[:, 0].set(0.0)
    # With `chunk`, the gradient recomputes chunks, which is faster here.
    alpha, _ = treescan.mask_scan(
        step, start, chances, lengths=lengths, chunk=16
    )
    ends = 2 * label_lengths[:, None] + jnp.array([0, -1])
    last = jnp.take_along_axis(alpha, jnp.maximum(ends, 0), axis=1)
    both = jnp.where(ends < 0, -1e30, last)
    return -jax.nn.logsumexp(both, axis=1)


# --8<-- [end:ctc]
# A GRU whose state is reset.
# --8<-- [start:gru]
def gru(
    params: Mapping[str, Any],
    width: int,
    xs: Float[Array, "time batch features"],
    begins: Bool[Array, "time batch"],
) -> Float[Array, "time batch hidden"]:
    """A GRU of flax whose state is reset where an episode begins."""
    cell = nn.GRUCell(width)

    def step(h: Array, x: Array) -> tuple[Array, Array]:
        ran: Any = cell.apply(params, h, x)
        return ran

    zeros = jnp.zeros((xs.shape[1], width))
    return treescan.mask_scan(step, zeros, xs, resets=begins)[1]


# --8<-- [end:gru]
# --8<-- [start:gru_by_hand]
class ResetGru(nn.Module):
    """A module for the scan, with the reset in its step."""

    width: int

    @functools.partial(
        nn.scan,
        variable_broadcast="params",
        in_axes=0,
        out_axes=0,
        split_rngs={"params": False},
    )
    @nn.compact
    def __call__(self, h: Array, inputs: tuple[Array, Array]) -> Any:
        x, begins = inputs
        h = jnp.where(begins[:, None], jnp.zeros_like(h), h)
        return nn.GRUCell(self.width, name="cell")(h, x)


def gru_by_hand(
    params: Mapping[str, Any],
    width: int,
    xs: Float[Array, "time batch features"],
    begins: Bool[Array, "time batch"],
) -> Float[Array, "time batch hidden"]:
    """The module applied."""
    zeros = jnp.zeros((xs.shape[1], width))
    within = {"params": {"cell": params["params"]}}
    ran: Any = ResetGru(width).apply(within, zeros, (xs, begins))
    return ran[1]


# --8<-- [end:gru_by_hand]
