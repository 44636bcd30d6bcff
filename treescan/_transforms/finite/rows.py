"""The rows of a checked loop: they have their own first bad step, and padding shows what a row that runs shows."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..._axes import LeafAxes
from ..._loop.loop import Loop
from ..._trace.hoist import Hoisted
from ..._types import Array
from ..rows.batch_axes import Begins, Rows, with_axes
from ..rows.leaves import select_valid, take_row, unsigned
from ..rows.resets import begins_of


def batch_of(loop: Loop) -> tuple[int, ...]:
    """The batch shape; () for a loop without rows."""
    valid = loop.xs.valid
    return () if loop.rows is None or valid is None else valid.shape[1:]


def with_heads(loop: Loop, heads: list[Array], axes: LeafAxes | None = None) -> Loop:
    """The loop with further leaves before those of its state, which are never reset.

    Args:
        loop: the loop.
        heads: the leaves.
        axes: for each where the rows are, in a loop that has rows; None: they lead in all of them.
    """
    loop = dataclasses.replace(loop, state=[*heads, *loop.state])
    if loop.rows is None:
        return loop
    rows, none = loop.rows, (None,) * len(heads)
    begins = begins_of(loop, loop.state[len(heads) :]) if rows.resets is not None else None
    if begins is not None:
        tables = (*(False for _ in heads), *begins.tables)
        begins = begins._replace(targets=[*none, *begins.targets], tables=tables)
    trace = loop.trace._replace(fixed=(*(False for _ in heads), *loop.trace.fixed))
    loop = dataclasses.replace(loop, trace=trace, rows=rows._replace(begins=begins, unchanged=_after(heads, rows)))
    return with_axes(loop, state=(*(axes or (0,) * len(heads)), *rows.axes.state))


def _after(heads: list[Array], rows: Rows) -> Any:
    unchanged = rows.unchanged
    return None if unchanged is None else lambda: (*(False for _ in heads), *unchanged())


def in_rows(loop: Loop, hoisted: Hoisted) -> Hoisted:
    """The trace of a masked loop that `is_untraced`, with its rows where it has them."""
    rows, fixed = loop.rows, hoisted.fixed
    on = tuple(axis for axis, is_fixed in zip(rows.axes.state, fixed, strict=True) if is_fixed)
    state = _others(rows.axes.state, fixed)
    _, (closed, _) = hoisted.loop.consts
    axes = rows.axes._replace(consts=(*on, *(None for _ in closed), *rows.axes.consts), state=tuple(state))
    begins = rows.begins
    if begins is not None:
        begins = Begins(begins.flags, _others(begins.targets, fixed), tuple(_others(begins.tables, fixed)))
    rows = rows._replace(axes=axes, fixed=on, begins=begins, unchanged=None)
    return hoisted._replace(loop=dataclasses.replace(hoisted.loop, rows=rows))


def _others(values: Sequence[Any], fixed: Sequence[bool]) -> list[Any]:
    return [value for value, is_fixed in zip(values, fixed, strict=True) if not is_fixed]


def show_one(leaves: Sequence[Array], axes: LeafAxes, valid: Array) -> list[Array]:
    """The leaves, in which rows that are not valid have what one that is valid has."""
    lender = unsigned(jnp.argmax(valid.reshape(-1)))

    def shown(leaf: Array, axis: int | None) -> Array:
        if axis is None:
            return leaf
        return select_valid(valid, leaf, take_row(leaf, lender, axis, valid.shape), axis)

    return [shown(leaf, axis) for leaf, axis in zip(leaves, axes, strict=True)]


def without_tangents(rows: Rows | None) -> Rows | None:
    """The same, with what segments begin from as constants."""
    if rows is None or rows.begins is None:
        return rows
    return rows._replace(begins=rows.begins._replace(targets=jax.lax.stop_gradient(rows.begins.targets)))


class RowArrays(NamedTuple):
    """The arrays of the rows of a loop, as far as its steps need them.

    Attributes:
        resets: where segments begin, or None.
        lengths: of each row, or None.
        flags: where a row begins anew, if that is another place; or None.
        targets: what it begins from.
    """

    resets: Array | None
    lengths: Array | None
    flags: Array | None
    targets: list[Array | None] | None

    @classmethod
    def of(cls, rows: Rows) -> RowArrays:
        """Those of the rows of a loop."""
        flags, targets = (None, None) if rows.begins is None else (rows.begins.flags, rows.begins.targets)
        return cls(rows.resets, rows.given.lengths, flags, targets)

    def put(self, rows: Rows) -> Rows:
        """The rows with these."""
        begins = rows.begins
        if begins is not None and self.flags is not None and self.targets is not None:
            begins = begins._replace(flags=self.flags, targets=self.targets)
        return rows._replace(resets=self.resets, given=rows.given._replace(lengths=self.lengths), begins=begins)
