"""One step of a recurrence: products, elementwise or of matrices; selections; and types of arrays."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ..._avals import Array, ArrayLike, is_explicit, parts_of, shard, vary_over, varying_axes
from ..._rows.leaves import expand, select

_SMALL = 8
"""Up to this size, a product of matrices is faster as multiplications and sums: 0.3 of the time for 4 x 4."""


class How(NamedTuple):
    """How one recurrence is computed. It is static.

    Attributes:
        method: "sequential", "chunked" or "parallel".
        matrix: whether a holds matrices.
        reverse: whether it runs from the last step to the first.
        remat: as the verb is told.
        save: the same.
        time_axis: the same.
        axis_name: the same.
        hold: whether padded steps have the last state.
        state: the dtype of the state.
        out: the dtype of the states that are kept.
    """

    method: str
    matrix: bool
    reverse: bool
    remat: int | None
    save: str | None
    time_axis: int
    axis_name: str | None
    hold: bool
    state: np.dtype
    out: np.dtype


class Given(NamedTuple):
    """What the steps read: arrays [T, ...], or [1, ...] for what all steps share.

    Within a scan, they are those of a step.

    Attributes:
        a: the factors.
        b: what is added.
        start: the state before the first step.
        target: what segments begin from; None: 0.
        valid: bool[T, *batch]: whether a step is data; None: all are.
        linked: bool[T, *batch]: whether a step reads the state before it, and not the target; None: all do.
        fill: what is kept of a step that is not valid, in the dtype that is kept; None: its state.
    """

    a: Array
    b: Any
    start: Any = None
    target: Array | None = None
    valid: Array | None = None
    linked: Array | None = None
    fill: Array | None = None


def but(flags: Array | None, kept: Array, other: ArrayLike) -> Array:
    """What is kept where rows are flagged, and something else elsewhere. None: all are flagged."""
    if flags is None:
        return kept
    return select(expand(flags, kept, 0), kept, jnp.asarray(other, kept.dtype))


def step(how: How, h: Array, x: Given) -> Array:
    """The state after one step. Of stacks, the states after all steps, where `h` are those before."""
    before = but(x.linked, h, 0 if x.target is None else x.target)
    return but(x.valid, times(how, factor(how, x), before) + x.b.astype(how.state), h)


def linear_step(how: How, h: Array, x: Given) -> Array:
    """The state after one step with a target of 0, where b counts in each step, valid or not."""
    return times(how, factor(how, x), but(x.linked, h, 0)) + x.b


def factor(how: How, x: Given) -> Array:
    """The factor, in the dtype of the state: 1 in a step that is not valid."""
    one = jnp.expand_dims(jnp.eye(x.a.shape[-1]), range(x.a.ndim - 2)) if how.matrix else 1
    return but(x.valid, x.a.astype(how.state), one)


def times(how: How, a: Array, h: Array) -> Array:
    """A factor times a state."""
    if not how.matrix:
        return a * h
    if a.shape[-1] <= _SMALL:
        return jnp.sum(a * h[..., None, :], axis=-1)
    return jnp.einsum("...ij,...j->...i", a, h, precision="highest")


def compose(how: How, second: Array, first: Array) -> Array:
    """The factor of two steps."""
    if not how.matrix:
        return second * first
    if second.shape[-1] <= _SMALL:
        return jnp.sum(second[..., None] * first[..., None, :, :], axis=-2)
    return jnp.einsum("...ij,...jk->...ik", second, first, precision="highest")


def joined(how: How, later: Given, earlier: Given) -> Given:
    """Two parts as one, each by its factor, what it makes of 0, and whether it is linked: else its factor is 0."""
    linked = None if later.linked is None or earlier.linked is None else later.linked & earlier.linked
    together = compose(how, later.a, earlier.a)
    return Given(but(linked, together, 0), linear_step(how, earlier.b, later), linked=linked)


def like_step(value: ArrayLike, b: Array, dtype: np.dtype, *others: Array | None) -> Array:
    """A value in the shape and with the sharding of a step of b, that varies over the manual axes of all the others."""
    wide = jnp.broadcast_to(jnp.asarray(value, dtype), b.shape[1:])
    if is_explicit(jax.typeof(b).sharding):
        wide = shard(wide, NamedSharding(jax.typeof(b).sharding.mesh, PartitionSpec(*parts_of(b)[1:])))
    axes = (varying_axes(jax.typeof(each)) for each in (b, *others) if each is not None)
    return vary_over(wide, frozenset[str]().union(*axes))
