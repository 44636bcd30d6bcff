"""`resets` and `reset_to`: a row starts again where a segment begins, from its init or from `reset_to`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ..._avals import on_automatic_axes, parts_of, vary_over, varying_axes
from ..._axes import LeafAxes
from ..._loop.loop import Feed, Loop, Step
from ..._types import Array, PyTree
from .axes import Begins, with_axes
from .leaves import expand, pick_steps, select
from .mask import first_valid
from .packed import numbers_of, refuse_split_rows, turns


@dataclass(frozen=True)
class Reset:
    """The step that begins segments first. Its consts are (targets, inner consts), its state a list of leaves.

    A target is what a leaf begins from, in the leaf's shape or a scalar; or a table of that, with an entry for each
    sequence. The feed's flags then are the numbers of the sequences that begin, counted from 1.

    Attributes:
        step: the inner step.
        carry_axes: for each leaf of the state, the axis where the batch shape starts; None: shared by all rows, and
            never reset.
        tables: for each leaf of the state whether its target is a table.
    """

    step: Step
    carry_axes: LeafAxes
    tables: tuple[bool, ...]

    def __call__(self, consts: Any, state: list[Array], feed: Feed) -> tuple[PyTree, PyTree]:
        targets, inner = consts
        assert feed.reset is not None
        state = begin(feed.reset, state, targets, self.carry_axes, self.tables)
        return self.step(inner, state, feed._replace(reset=None))


def begin(
    flags: Array, state: list[Array], targets: list[Array | None], axes: LeafAxes, tables: tuple[bool, ...]
) -> list[Array]:
    """The state, with the rows that are flagged at what they begin from; flags are bool[*batch] or numbers, int[R]."""
    begins = flags if flags.dtype == jnp.bool_ else flags > 0

    def of_leaf(leaf: Array, target: Array | None, axis: int | None, is_table: bool) -> Array:
        if axis is None or target is None:
            return leaf
        new = _rows_of(target, flags, axis, leaf) if is_table else target
        return select(expand(begins, leaf, axis), new if new.dtype == leaf.dtype else new.astype(leaf.dtype), leaf)

    return [of_leaf(*each) for each in zip(state, targets, axes, tables, strict=True)]


def _rows_of(table: Array, numbers: Array, axis: int, leaf: Array) -> Array:
    """For each row of a leaf the entry of its number, counted from 1; of a row that has none any entry."""

    def entries(table: Array, numbers: Array) -> Array:
        return jnp.moveaxis(jnp.take(table, jnp.maximum(numbers - 1, 0), 0, mode="clip"), 0, axis)

    return on_automatic_axes(entries, parts_of(leaf), table, numbers)


@dataclass(frozen=True)
class BeginSegments:
    """`reset_to`, and packed sequences with an init each: what segments begin from, and so each row's first valid step.

    A row whose first valid step is flagged is never shown its init. So its loop starts from what it begins from, which
    is what its padding is shown.
    """

    moves = True

    def __call__(self, loop: Loop) -> Loop:
        begins, valid, axes = self._begins(loop), loop.xs.valid, loop.rows.axes.state
        assert valid is not None
        state = loop.state
        if not (loop.rows.all_valid or 0 in valid.shape):
            have, first = first_valid(valid, reverse=loop.reverse)
            flags = pick_steps(begins.flags, first, 0)
            flags = flags & have if flags.dtype == jnp.bool_ else select(have, flags, jnp.zeros_like(flags))
            state = begin(flags, state, begins.targets, axes, begins.tables)
        return dataclasses.replace(loop, state=state, rows=loop.rows._replace(begins=begins))

    def _begins(self, loop: Loop) -> Begins:
        rows, valid = loop.rows, loop.xs.valid
        assert valid is not None
        varying = varying_axes(jax.typeof(valid))
        given = rows.given.to if rows.given.inits is None else rows.given.inits
        own = [value for value, is_fixed in zip(given, rows.was_fixed, strict=True) if not is_fixed]
        tables = tuple(rows.given.inits is not None and value is not None for value in own)
        targets = [
            None if axis is None else leaf if value is None else vary_over(value, varying)
            for leaf, value, axis in zip(loop.state, own, rows.axes.state, strict=True)
        ]
        flags = flags_of(loop)
        if rows.given.inits is not None:
            numbers = numbers_of(rows.given.spans, valid.shape)
            flags = select(flags, numbers, jnp.zeros_like(numbers))
        return Begins(flags, targets, tables)


@dataclass(frozen=True)
class ResetRows:
    """`resets`: before each step that begins a segment, restores the state that the segment begins from."""

    moves = True

    def __call__(self, loop: Loop) -> Loop:
        return loop if loop.rows.resets is None else reset_rows(loop)


def reset_rows(loop: Loop) -> Loop:
    """Makes a loop restore the state that a segment begins from, before each step that is flagged."""
    axes, begins = loop.rows.axes, begins_of(loop, loop.state)
    pairs = zip(begins.targets, begins.tables, axes.state, strict=True)
    own = [None if is_table or not target.ndim else axis for target, is_table, axis in pairs if target is not None]
    loop = dataclasses.replace(
        loop,
        step=Reset(loop.step, axes.state, begins.tables),
        consts=(begins.targets, loop.consts),
        xs=loop.xs._replace(reset=begins.flags),
    )
    return with_axes(loop, consts=(*own, *axes.consts))


def begins_of(loop: Loop, state: list[Array]) -> Begins:
    """What segments begin from, in the leaves of a state: what was said, or that state."""
    if loop.rows.begins is not None:
        return loop.rows.begins
    inits = [leaf if axis is not None else None for leaf, axis in zip(state, loop.rows.axes.state, strict=True)]
    return Begins(flags_of(loop), inits, (False,) * len(inits))


def flags_of(loop: Loop) -> Array:
    """bool[T, *batch]: before which steps a segment begins."""
    return _flags_in(loop, reverse=loop.reverse)


def segments_in_time(loop: Loop) -> Array | None:
    """bool[T, *batch]: where segments begin in time; that of a row's first may be left out. None: no row has two."""
    return None if loop.rows.resets is None else _flags_in(loop, reverse=False)


def _flags_in(loop: Loop, *, reverse: bool) -> Array:
    """The beginnings in a direction. For a `Packed`, also those of sequences whose first step is not valid."""
    rows, valid = loop.rows, loop.xs.valid
    assert valid is not None
    if rows.all_valid:
        return _shifted(rows.resets) if reverse else rows.resets
    flags = beginnings(rows.resets, valid, reverse=reverse)
    if rows.given.spans is None:
        return flags
    refuse_split_rows(rows.given.spans, valid)
    return flags | turns(numbers_of(rows.given.spans, valid.shape), valid, later=reverse)


def _shifted(resets: Array) -> Array:
    """In reverse, if every step is valid, a segment begins one step before each flag, in time."""
    return jnp.concatenate([resets[1:], jnp.zeros_like(resets[:1])])


def beginnings(resets: Array, valid: Array, *, reverse: bool) -> Array:
    """bool[T, *batch]: where a segment begins. In reverse, that is its last valid step.

    Flags at invalid steps are ignored.
    """
    resets = resets & valid
    if not reverse or not valid.shape[0]:
        return resets
    steps = jnp.arange(valid.shape[0]).reshape(-1, *(1 for _ in valid.shape[1:]))
    valid_from = jax.lax.cummin(jnp.where(valid, steps, valid.shape[0]), reverse=True)  # the first valid step >= t
    flag_from = jax.lax.cummin(jnp.where(resets, steps, valid.shape[0]), reverse=True)
    end = jnp.full_like(valid_from[:1], valid.shape[0])
    next_valid = jnp.concatenate([valid_from[1:], end])
    next_flag = jnp.concatenate([flag_from[1:], end])
    return valid & (next_valid == next_flag) & (next_valid < valid.shape[0])
