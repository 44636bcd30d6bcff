"""Pairs (state, x) on which the body is known to run; the body is given these in place of padding."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..._avals import is_sharded
from ..._axes import LeafAxes
from ..._types import Array
from .leaves import RowMask, any_of, gather_rows, pick_steps, take_row, unsigned

_once_a_shape = functools.partial(jax.jit, inline=True)
"""Traces a function once for each shape of its arguments, and hands its equations out from then on."""


class GoodPair(NamedTuple):
    """The values that padded rows see. If all rows see the same values, the batch axes have size 1.

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
    # The least of numbers, which is cheaper than an argmax.
    if reverse:
        first = jax.lax.reduce_max(_steps_or(-1, valid), (0,))
        return jax.lax.ge(first, jnp.zeros_like(first)), jax.lax.max(first, jnp.zeros_like(first))
    first = jax.lax.reduce_min(_steps_or(length, valid), (0,))
    return first < length, jax.lax.min(first, jax.lax.full_like(first, length - 1))


def _steps_or(other: int, valid: Array) -> Array:
    """int32[T, *batch]: the position of each valid step, `other` elsewhere."""
    if is_sharded(valid) or not isinstance(other, int):
        steps = jnp.arange(valid.shape[0], dtype=jnp.int32).reshape(-1, *(1 for _ in valid.shape[1:]))
        return jnp.where(valid, steps, other)
    steps = jax.lax.broadcasted_iota(jnp.int32, valid.shape, 0)
    return jax.lax.select_n(valid, jax.lax.full(valid.shape, other, jnp.int32), steps)


def first_of_lengths(lengths: Array, steps: int, *, reverse: bool) -> tuple[Array, Array | None]:
    """The same where each row's steps are its first `lengths`, int[*batch]; None: the first position for all rows."""
    last = jnp.clip(lengths.astype(jnp.int32) - 1, 0, steps - 1) if reverse else None
    return jax.lax.gt(lengths, jnp.zeros_like(lengths)), last


def own_pairs(
    state: list[Array], xs: list[Array], begin: tuple[Array, Array | None], axes: tuple[LeafAxes, LeafAxes]
) -> GoodPair:
    """Each row's own first valid pair; a row that has none borrows that of another row of the batch.

    Args:
        state: leaves of the state.
        xs: leaves of x, of all steps.
        begin: for each row whether it has a valid step, and the first one; None: it is the first of all.
        axes: where the batch shape starts in the state and in one step's x.
    """
    carry_axes, x_axes = axes
    have, first = begin
    batch = have.shape
    # One gather per leaf, in place of a slice, its broadcast and a selection: less to trace.
    source = _own_or_first(have) if len(batch) == 1 and not is_sharded(have) else None

    @functools.cache
    def lender() -> tuple[Array, RowMask]:
        return unsigned(jnp.argmax(have.reshape(-1))), RowMask(have)

    def borrow(leaf: Array, axis: int | None) -> Array:
        assert axis is not None
        if source is None or is_sharded(leaf):
            row, mask = lender()
            return mask.select(leaf, take_row(leaf, row, axis, batch), axis)
        return gather_rows(leaf, source, axis)

    def borrow_x(leaf: Array, axis: int | None) -> Array:
        if first is not None:
            return borrow(pick_steps(leaf, first, axis), axis)
        if axis is None or source is None or is_sharded(leaf):
            return borrow(jax.lax.index_in_dim(leaf, 0, keepdims=False), axis)
        return gather_rows(leaf, source, axis, of_first_step=True)

    return GoodPair(list(map(borrow, state, carry_axes)), [], list(map(borrow_x, xs, x_axes)))


@functools.partial(jax.jit, static_argnames=("steps", "reverse", "axes"), inline=True)  # traced once for each shape
def own_pairs_of_lengths(
    state: list[Array],
    xs: list[Array],
    lengths: Array,
    *,
    steps: int,
    reverse: bool,
    axes: tuple[LeafAxes, LeafAxes],
) -> tuple[GoodPair, Array]:
    """`own_pairs` where each row's steps are its first `lengths`, int[*batch]; and whether any row has a pair.

    The pairs are under stop_gradient.
    """
    state, xs = jax.lax.stop_gradient((state, xs))
    have, first = first_of_lengths(lengths, steps, reverse=reverse)
    return own_pairs(state, xs, (have, first), axes), any_of(have)


@_once_a_shape
def _own_or_first(have: Array) -> Array:
    """uint32[N, 1]: for each row its own number, or that of the first row that has something."""
    first, shape = jax.lax.argmax(have, 0, np.uint32), (have.size, 1)
    own = jax.lax.broadcasted_iota(first.dtype, shape, 0)
    return jax.lax.select_n(jax.lax.reshape(have, shape), jax.lax.broadcast(first, shape), own)


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
