"""A Kalman filter and its smoother, for series of different lengths.

Observations may be missing, in any step and any entry: they are NaN.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.linalg import cho_factor, cho_solve, solve_triangular
from jaxtyping import Array, Float, Int

import treescan


class System(NamedTuple):
    """A linear Gaussian system: z' = A z + N(0, Q), y = C z + N(0, R)."""

    a: Float[Array, "state state"]
    q: Float[Array, "state state"]
    c: Float[Array, "seen state"]
    r: Float[Array, "seen seen"]


class Belief(NamedTuple):
    """Normal distributions of the states of B series."""

    mean: Float[Array, "batch state"]
    cov: Float[Array, "batch state state"]


class Filtered(NamedTuple):
    """What a filter says of a step: before and after its observation."""

    predicted: Belief
    updated: Belief
    log_likelihood: Float[Array, " batch"]


def observe(
    system: System, belief: Belief, y: Float[Array, "batch seen"]
) -> Filtered:
    """Updates by what was seen; a missing entry tells nothing."""
    seen = ~jnp.isnan(y)
    both = seen[:, :, None] & seen[:, None, :]
    across = jnp.where(seen[..., None], system.c @ belief.cov, 0.0)
    # A missing entry becomes one of variance 1 that was as expected.
    spread = across @ system.c.T + system.r
    spread = jnp.where(both, spread, jnp.eye(y.shape[-1]))
    error = jnp.where(seen, y, 0.0) - belief.mean @ system.c.T
    error = jnp.where(seen, error, 0.0)
    root = jnp.linalg.cholesky(spread)
    # With `spread = root root'`, the gain is `across' root'^-1 root^-1`.
    solved = jnp.concatenate([across, error[..., None]], -1)
    solved = solve_triangular(root, solved, lower=True)
    across, scaled = solved[..., :-1], solved[..., -1]
    mean = belief.mean + jnp.einsum("bji,bj->bi", across, scaled)
    cov = belief.cov - across.swapaxes(-1, -2) @ across
    diagonal = jnp.diagonal(root, axis1=-2, axis2=-1)
    log_det = 2 * jnp.log(diagonal).sum(-1)
    count = seen.sum(-1) * jnp.log(2 * jnp.pi)
    log_likelihood = -0.5 * (jnp.square(scaled).sum(-1) + log_det + count)
    return Filtered(belief, Belief(mean, cov), log_likelihood)


def predict(system: System, belief: Belief) -> Belief:
    """One step of time."""
    cov = system.a @ belief.cov @ system.a.T + system.q
    return Belief(belief.mean @ system.a.T, cov)


def look_back(system: System, later: Belief, here: Filtered) -> Belief:
    """Smooths a step, given what is known of the next one.

    `later` is the smoothed belief of the next step minus its prediction.
    """
    a, cov = system.a, here.updated.cov
    following = a @ cov @ a.T + system.q
    root = cho_factor(following, lower=True)
    gain = cho_solve(root, a @ cov).swapaxes(-1, -2)
    mean = here.updated.mean + jnp.einsum("bij,bj->bi", gain, later.mean)
    cov = cov + gain @ later.cov @ gain.swapaxes(-1, -2)
    return Belief(mean, cov)


def minus(left: Belief, right: Belief) -> Belief:
    """The differences of means and covariances."""
    return jax.tree.map(jnp.subtract, left, right)


# --8<-- [start:treescan]
def filtered(
    system: System, first: Belief, ys: Array, lengths: Int[Array, " batch"]
) -> Filtered:
    """Filters ys [T, B, seen]; leaves [T, B, ...], 0 after the end.

    `chunk=0` runs padded steps too, and saves what each step computes for the
    gradient. By default a chunk is computed once more, and a factorization
    takes longer than saving its result.
    """

    def step(belief: Belief, y: Array) -> tuple[Belief, Filtered]:
        told = observe(system, belief, y)
        return predict(system, told.updated), told

    return treescan.mask_scan(step, first, ys, lengths=lengths, chunk=0)[1]


def smoothed(
    system: System, found: Filtered, lengths: Int[Array, " batch"]
) -> Belief:
    """The Rauch-Tung-Striebel smoother: each row from its own end."""

    def step(later: Belief, here: Filtered) -> tuple[Belief, Belief]:
        belief = look_back(system, later, here)
        return minus(belief, here.predicted), belief

    nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape[1:]), found)
    return treescan.mask_scan(
        step,
        nothing.updated,
        found,
        lengths=lengths,
        reverse=True,
        chunk=0,
    )[1]


# --8<-- [end:treescan]
# --8<-- [start:by_hand]
def chosen(valid: Array, new: Belief, old: Belief) -> Belief:
    """The new belief of valid rows, the old one of others."""
    return Belief(
        jnp.where(valid[:, None], new.mean, old.mean),
        jnp.where(valid[:, None, None], new.cov, old.cov),
    )


def filtered_by_hand(
    system: System, first: Belief, ys: Array, lengths: Int[Array, " batch"]
) -> Filtered:
    """The same with `jax.lax.scan` and a mask."""
    mask = jnp.arange(len(ys))[:, None] < lengths

    def step(
        belief: Belief, inputs: tuple[Array, Array]
    ) -> tuple[Belief, Filtered]:
        y, valid = inputs
        told = observe(system, belief, y)
        new = predict(system, told.updated)
        return chosen(valid, new, belief), told

    told = jax.lax.scan(step, first, (ys, mask))[1]

    def blank(leaf: Array) -> Array:
        return jnp.where(
            mask.reshape(mask.shape + (1,) * (leaf.ndim - 2)), leaf, 0.0
        )

    return jax.tree.map(blank, told)


def smoothed_by_hand(
    system: System, found: Filtered, lengths: Int[Array, " batch"]
) -> Belief:
    """The same with `jax.lax.scan` and a mask.

    Padded steps get the belief of the first step. Their own are zeros, for
    which the result and the gradient of the solve are NaN.
    """
    mask = jnp.arange(len(found.log_likelihood))[:, None] < lengths

    def good(leaf: Array) -> Array:
        valid = mask.reshape(mask.shape + (1,) * (leaf.ndim - 2))
        return jnp.where(valid, leaf, leaf[0])

    def step(
        later: Belief, inputs: tuple[Filtered, Array]
    ) -> tuple[Belief, Belief]:
        here, valid = inputs
        belief = look_back(system, later, here)
        new = minus(belief, here.predicted)
        zeros = jax.tree.map(jnp.zeros_like, belief)
        return chosen(valid, new, later), chosen(valid, belief, zeros)

    inputs = (jax.tree.map(good, found), mask)
    nothing = jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape[1:]), found.updated
    )
    return jax.lax.scan(step, nothing, inputs, reverse=True)[1]


# --8<-- [end:by_hand]
