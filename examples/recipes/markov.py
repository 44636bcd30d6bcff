"""Forward and backward passes of a hidden Markov model.

Series have different lengths. Chances are scaled in each step, so that they
neither vanish nor need logarithms: a step is a product with a matrix.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

import treescan

Pair = tuple[Array, Array]


class Chain(NamedTuple):
    """Logarithms of the chances of first states and of transitions."""

    first: Float[Array, " states"]
    transition: Float[Array, "states states"]


class Posterior(NamedTuple):
    """What is known of each step; of padding, zeros."""

    states: Float[Array, "time batch states"]
    log_likelihood: Float[Array, " batch"]


def scaled(chances: Array) -> Pair:
    """Chances that add up to 1, and the logarithm of their sum before."""
    total = chances.sum(-1, keepdims=True)
    return chances / total, jnp.log(total[..., 0])


def weigh(predicted: Array, seen: Array) -> Pair:
    """Updates chances by evidence, given as its logarithms."""
    most = seen.max(-1, keepdims=True)
    here, scale = scaled(predicted * jnp.exp(seen - most))
    return here, scale + most[..., 0]


def look_back(transition: Array, later: Array, seen: Array) -> Array:
    """What a step's evidence says of the state before it, up to a factor."""
    likely = later * jnp.exp(seen - seen.max(-1, keepdims=True))
    return scaled(likely @ transition.T)[0]


# --8<-- [start:treescan]
def forward(
    chain: Chain,
    evidence: Float[Array, "time batch states"],
    lengths: Int[Array, " batch"],
) -> Pair:
    """The filter: the log likelihood [B], and chances given the past."""
    transition = jnp.exp(chain.transition)

    def step(carry: Pair, seen: Array) -> tuple[Pair, Array]:
        predicted, total = carry
        here, scale = weigh(predicted, seen)
        return (here @ transition, total + scale), here

    first = jnp.broadcast_to(jnp.exp(chain.first), evidence.shape[1:])
    init = (first, jnp.zeros(lengths.shape))
    (_, total), heres = treescan.mask_scan(
        step, init, evidence, lengths=lengths
    )
    return total, heres


def posterior(
    chain: Chain,
    evidence: Float[Array, "time batch states"],
    lengths: Int[Array, " batch"],
) -> Posterior:
    """Chances of states, given the logarithms of the evidence."""
    transition = jnp.exp(chain.transition)

    def step(later: Array, inputs: Pair) -> Pair:
        here, seen = inputs
        return look_back(transition, later, seen), scaled(here * later)[0]

    log_likelihood, heres = forward(chain, evidence, lengths)
    _, states = treescan.mask_scan(
        step,
        jnp.ones(evidence.shape[1:]),
        (heres, evidence),
        lengths=lengths,
        reverse=True,
    )
    return Posterior(states, log_likelihood)


# --8<-- [end:treescan]
# --8<-- [start:by_hand]
def by_hand(
    chain: Chain,
    evidence: Float[Array, "time batch states"],
    lengths: Int[Array, " batch"],
) -> Posterior:
    """The same with `jax.lax.scan` and a mask."""
    transition = jnp.exp(chain.transition)
    mask = jnp.arange(len(evidence))[:, None] < lengths

    def ahead(carry: Pair, inputs: Pair) -> tuple[Pair, Array]:
        predicted, total = carry
        seen, valid = inputs
        here, scale = weigh(predicted, seen)
        after = jnp.where(valid[:, None], here @ transition, predicted)
        return (after, total + jnp.where(valid, scale, 0.0)), here

    def back(later: Array, inputs: tuple[Array, Array, Array]) -> Pair:
        here, seen, valid = inputs
        before = look_back(transition, later, seen)
        chances = scaled(here * later)[0]
        return (
            jnp.where(valid[:, None], before, later),
            jnp.where(valid[:, None], chances, 0.0),
        )

    batch = evidence.shape[1:]
    first = jnp.broadcast_to(jnp.exp(chain.first), batch)
    init = (first, jnp.zeros(lengths.shape))
    (_, total), heres = jax.lax.scan(ahead, init, (evidence, mask))
    inputs = (heres, evidence, mask)
    _, states = jax.lax.scan(back, jnp.ones(batch), inputs, reverse=True)
    return Posterior(states, total)


# --8<-- [end:by_hand]
