"""Pairs (state, x) that the body is known to run on: what padded rows are shown in place of their padding."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from .._types import Array
from .axes import LeafAxes
from .rows import expand, pick_steps, select, take_row


class GoodPair(NamedTuple):
    """Leaves of the state and of one step's x; their batch axes may have size 1, where all rows are shown one."""

    state: list[Array]
    x: list[Array]


def first_valid(valid: Array, *, reverse: bool) -> tuple[Array, Array]:
    """For each row whether any step is valid, and the position of the first one in the order of the run.

    Args:
        valid: bool[T, *batch].
        reverse: whether the loop runs from the last position to the first.

    Returns:
        bool[*batch] and int32[*batch].
    """
    have = jnp.any(valid, axis=0)
    if reverse:
        return have, valid.shape[0] - 1 - jnp.argmax(valid[::-1], axis=0)
    return have, jnp.argmax(valid, axis=0)


def own_pairs(
    state: list[Array], xs: list[Array], valid: Array, carry_axes: LeafAxes, x_axes: LeafAxes, *, reverse: bool
) -> GoodPair:
    """Each row's own first valid pair; a row that has none borrows that of another row of the batch."""
    batch = valid.shape[1:]
    have, first = first_valid(valid, reverse=reverse)
    lender = jnp.argmax(have.reshape(-1))

    def borrow(leaf: Array, axis: int | None) -> Array:
        assert axis is not None
        return select(expand(have, leaf, axis), leaf, take_row(leaf, lender, axis, batch))

    at_first = [pick_steps(leaf, first, axis) for leaf, axis in zip(xs, x_axes, strict=True)]
    return GoodPair(list(map(borrow, state, carry_axes)), list(map(borrow, at_first, x_axes)))


def earliest_pair(
    state: list[Array], xs: list[Array], valid: Array, carry_axes: LeafAxes, x_axes: LeafAxes, *, reverse: bool
) -> GoodPair:
    """The first valid pair of the row that begins first, with the leaves that all rows share as they were then."""
    batch, length = valid.shape[1:], valid.shape[0]
    have, first = first_valid(valid, reverse=reverse)
    order = length - 1 - first if reverse else first
    lender = jnp.argmin(jnp.where(have, order, length).reshape(-1))
    step = first.reshape(-1)[lender]

    def row(leaf: Array, axis: int | None) -> Array:
        return leaf if axis is None else take_row(leaf, lender, axis, batch)

    at_step = [jax.lax.dynamic_index_in_dim(leaf, step, 0, keepdims=False) for leaf in xs]
    return GoodPair(list(map(row, state, carry_axes)), list(map(row, at_step, x_axes)))
