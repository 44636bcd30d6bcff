"""A Kalman filter and its smoother in about 2 log2(T) rounds, for series of
different lengths: Särkkä and García-Fernández, "Temporal parallelization of
Bayesian smoothers" (2021). Missing observations are NaN.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

import treescan

from .state_space import Belief, Filtered, System, observe


# --8<-- [start:filter]
class Passed(NamedTuple):
    """What several steps make of a state z, and what they say of it.

    They lead to A z + b + N(0, C). What was observed has the likelihood
    exp(eta' z - z' J z / 2), but for a factor.
    """

    a: Float[Array, "*steps state state"]
    b: Float[Array, "*steps state"]
    c: Float[Array, "*steps state state"]
    eta: Float[Array, "*steps state"]
    j: Float[Array, "*steps state state"]


def times(matrix: Array, vector: Array) -> Array:
    return jnp.einsum("...ij,...j->...i", matrix, vector)


def passed(before: Passed, here: Passed) -> Passed:
    """First the steps of `before`, then those of `here`."""
    eye = jnp.broadcast_to(jnp.eye(before.b.shape[-1]), before.a.shape)
    told = jnp.linalg.solve(eye + before.c @ here.j, eye)
    ahead, back = here.a @ told, (told @ before.a).mT
    return Passed(
        ahead @ before.a,
        times(ahead, before.b + times(before.c, here.eta)) + here.b,
        ahead @ before.c @ here.a.mT + here.c,
        times(back, here.eta - times(here.j, before.b)) + before.eta,
        back @ here.j @ before.a + before.j,
    )


def filtered(
    system: System, first: Belief, ys: Array, lengths: Int[Array, " batch"]
) -> tuple[Filtered, Belief]:
    """Filters ys [T, B, seen]; and the prediction after the end of each."""
    valid = treescan.length_mask(lengths, len(ys))
    ys = jnp.where(valid[..., None], ys, jnp.nan)
    seen = ~jnp.isnan(ys)
    both = seen[..., :, None] & seen[..., None, :]
    c = jnp.where(seen[..., None], system.c, 0.0)
    noise = jnp.where(both, system.r, jnp.eye(ys.shape[-1]))
    weighed = jnp.linalg.solve(noise, c).mT
    shape = (*ys.shape[:2], *system.a.shape)
    steps = Passed(
        jnp.broadcast_to(system.a, shape),
        jnp.zeros(shape[:-1]),
        jnp.broadcast_to(system.q, shape),
        times(weighed, jnp.where(seen, ys, 0.0)),
        weighed @ c,
    )
    none = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape[1:]), steps)
    start = none._replace(b=first.mean, c=first.cov)
    last, after = treescan.associative_scan(
        passed, steps, start, lengths=lengths, fill="hold"
    )

    def shifted(first: Array, after: Array) -> Array:
        return jnp.concatenate([first[None], after])[:-1]

    beliefs = Belief(
        shifted(first.mean, after.b), shifted(first.cov, after.c)
    )
    told = jax.vmap(observe, (None, 0, 0))(system, beliefs, ys)
    return told, Belief(last.b, last.c)


# --8<-- [end:filter]
# --8<-- [start:smoother]
class Known(NamedTuple):
    """A state, if a later state z is known: E z + g + N(0, L)."""

    e: Float[Array, "*steps state state"]
    g: Float[Array, "*steps state"]
    l: Float[Array, "*steps state state"]  # noqa: E741, its name there


def known(later: Known, here: Known) -> Known:
    return Known(
        here.e @ later.e,
        times(here.e, later.g) + here.g,
        here.e @ later.l @ here.e.mT + here.l,
    )


def smoothed(
    system: System,
    found: Filtered,
    after: Belief,
    lengths: Int[Array, " batch"],
) -> Belief:
    """Each row from its own end; `after` is the prediction there."""
    mean, cov = found.updated
    following = system.a @ cov @ system.a.mT + system.q
    gain = jnp.linalg.solve(following, system.a @ cov).mT
    steps = Known(
        gain,
        mean - times(gain @ system.a, mean),
        cov - gain @ following @ gain.mT,
    )
    start = Known(jnp.zeros_like(after.cov), *after)
    _, beliefs = treescan.associative_scan(
        known, steps, start, lengths=lengths, reverse=True
    )
    return Belief(beliefs.g, beliefs.l)


# --8<-- [end:smoother]
