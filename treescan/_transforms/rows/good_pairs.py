"""Pairs (state, x) on which the body is known to run; the body is given these in place of padding."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ..._axes import LeafAxes
from ..._types import Array
from .leaves import RowMask, pick_steps, take_row, unsigned


class GoodPair(NamedTuple):
    """What padded rows are shown; the batch axes may have size 1, where all rows are shown one.

    Attributes:
        state: leaves of the state.
        fixed: of the leaves that no step changes, None for one that is shown as it is.
        x: leaves of one step's x.
    """

    state: list[Array]
    fixed: list[Array | None]
    x: list[Array]


def first_valid(valid: Array, *, reverse: bool) -> tuple[Array, Array]:
    """For each row whether any step is valid, and the position of the first one in the order of the run.

    Args:
        valid: bool[T, *batch].
        reverse: whether the loop runs from the last position to the first.

    Returns:
        bool[*batch] and int32[*batch]; of a row without a valid step any position.
    """
    length = valid.shape[0]
    steps = jnp.arange(length, dtype=jnp.int32).reshape(length, *(1 for _ in valid.shape[1:]))
    # The least of numbers, which is cheaper than an argmax.
    if reverse:
        first = jnp.max(jnp.where(valid, steps, -1), axis=0)
        return first >= 0, jnp.maximum(first, 0)
    first = jnp.min(jnp.where(valid, steps, length), axis=0)
    return first < length, jnp.minimum(first, length - 1)


def own_pairs(
    state: list[Array], xs: list[Array], valid: Array, axes: tuple[LeafAxes, LeafAxes], *, reverse: bool
) -> GoodPair:
    """Each row's own first valid pair; a row that has none borrows that of another row of the batch.

    `axes` says where the batch shape starts in the state and in one step's x. No unchanged leaf is looked at.
    """
    carry_axes, x_axes = axes
    batch = valid.shape[1:]
    have, first = first_valid(valid, reverse=reverse)
    lender, mask = unsigned(jnp.argmax(have.reshape(-1))), RowMask(have)

    def borrow(leaf: Array, axis: int | None) -> Array:
        assert axis is not None
        return mask.select(leaf, take_row(leaf, lender, axis, batch), axis)

    at_first = [pick_steps(leaf, first, axis) for leaf, axis in zip(xs, x_axes, strict=True)]
    return GoodPair(list(map(borrow, state, carry_axes)), [], list(map(borrow, at_first, x_axes)))


def earliest_pair(
    state: list[Array],
    fixed: list[Array | None],
    xs: list[Array],
    valid: Array,
    axes: tuple[LeafAxes, LeafAxes, LeafAxes],
    *,
    reverse: bool,
) -> GoodPair:
    """The first valid pair of the row that begins first, with the leaves that all rows share as they were then.

    `axes` says where the batch shape starts in the state, in unchanged leaves and in one step's x.
    """
    carry_axes, fixed_axes, x_axes = axes
    batch, length = valid.shape[1:], valid.shape[0]
    have, first = first_valid(valid, reverse=reverse)
    order = length - 1 - first if reverse else first
    lender = unsigned(jnp.argmin(jnp.where(have, order, length).reshape(-1)))
    step = first.reshape(-1)[lender]

    def row(leaf: Array, axis: int | None) -> Array:
        return leaf if axis is None else take_row(leaf, lender, axis, batch)

    lasting = [None if leaf is None else row(leaf, axis) for leaf, axis in zip(fixed, fixed_axes, strict=True)]
    at_step = [jax.lax.dynamic_index_in_dim(leaf, step, 0, keepdims=False) for leaf in xs]
    return GoodPair(list(map(row, state, carry_axes)), lasting, list(map(row, at_step, x_axes)))
