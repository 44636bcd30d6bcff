"""The products of a recurrence: elementwise, or of matrices; and selections and types of arrays."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from ..._avals import Array, is_explicit, parts_of, shard, vary_over, varying_axes
from ..._rows.leaves import expand, select

_SMALL = 8
"""Up to this size, a product of matrices is faster as multiplications and sums: 0.3 of the time for 4 x 4."""


class How(NamedTuple):
    """How one recurrence is computed. It is static.

    Attributes:
        method: "sequential", "chunked" or "parallel".
        matrix: whether a holds matrices.
        reverse: whether it runs from the last step to the first.
        state: the dtype of the state.
        out: the dtype of the states that are kept.
    """

    method: str
    matrix: bool
    reverse: bool
    state: Any
    out: Any


class Steps(NamedTuple):
    """What is known of the steps of each row; None: it holds for all, or for none.

    Attributes:
        valid: bool[T, *batch]: whether a step is data.
        cut: bool[T, *batch]: whether a segment begins there, in the order of the run. Only valid steps are flagged.
    """

    valid: Array | None = None
    cut: Array | None = None


def times(how: How, a: Array, h: Array) -> Array:
    """What the factor of a step makes of a state."""
    if not how.matrix:
        return a * h
    if a.shape[-1] <= _SMALL:
        return jnp.sum(a * h[..., None, :], axis=-1)
    return jnp.einsum("...ij,...j->...i", a, h, precision="highest")


def compose(how: How, second: Array, first: Array) -> Array:
    """The factor of two steps."""
    if not how.matrix:
        return second * first
    if first.shape[-1] <= _SMALL:
        return jnp.sum(second[..., None] * first[..., None, :, :], axis=-2)
    return jnp.einsum("...ij,...jk->...ik", second, first, precision="highest")


def turned(how: How, a: Array) -> Array:
    """The factor of the transposed step."""
    return jnp.swapaxes(a, -1, -2) if how.matrix else a


def one(how: How, a: Array) -> Array:
    """The factor that changes nothing, in the dtype of the state and the rank of a."""
    unit = jnp.eye(a.shape[-1], dtype=how.state) if how.matrix else jnp.ones((), how.state)
    return unit.reshape((1,) * (a.ndim - unit.ndim) + unit.shape)


def where(flags: Array | None, new: Any, old: Any) -> Array:
    """What is new where rows are flagged. The leading axes of both are those of the flags, or of size 1."""
    if flags is None:
        return old
    wide = new if jnp.ndim(new) >= jnp.ndim(old) else old
    return select(expand(flags, wide, 0), jnp.asarray(new, jnp.asarray(wide).dtype), jnp.asarray(old))


def but(flags: Array | None, kept: Array, other: Any) -> Array:
    """What is kept where rows are flagged, and something else elsewhere. None: all are flagged."""
    return kept if flags is None else where(flags, kept, jnp.asarray(other, kept.dtype))


def like_step(value: Any, b: Array, dtype: Any, *others: Array | None) -> Array:
    """A value in the shape and with the sharding of a step of b, that varies over the manual axes of all the others."""
    wide = jnp.broadcast_to(jnp.asarray(value, dtype), b.shape[1:])
    if is_explicit(jax.typeof(b).sharding):
        wide = shard(wide, NamedSharding(jax.typeof(b).sharding.mesh, PartitionSpec(*parts_of(b)[1:])))
    return varying(wide, b, *others)


def varying(value: Array, *others: Array | None) -> Array:
    """A value that varies over all manual axes of the mesh that the others vary over."""
    axes = (varying_axes(jax.typeof(each)) for each in others if each is not None)
    return vary_over(value, frozenset[str]().union(*axes))
