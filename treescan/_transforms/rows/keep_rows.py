"""`save` and `fill` of a masked scan."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..._loop.loop import Loop
from ..._trace.hoist import is_untraced
from ..._tree import Prefix
from ..._types import Array, PyTree
from ..outputs import EVERYTHING, LAST, Keep, keep_afterwards, kept_leaves, one_of, spread_keeps, without_dropped
from .batch_axes import spread_batch_axes, with_axes
from .fill import HOLD, Idle, fill_leaves, hold, hold_afterwards, without_hold
from .packed import are_valid, ends_of


class RowOutputs(NamedTuple):
    """What a masked loop does with its outputs.

    Attributes:
        idle: the outputs that are kept where nothing is run.
        held: for each leaf of y whether the state holds it.
        lasts: for each leaf that the state holds whether its last value is what is kept.
    """

    idle: Idle
    held: tuple[bool, ...]
    lasts: tuple[bool, ...] = ()


@dataclass(frozen=True)
class KeepRows:
    """Applies `save` to the outputs, for each row separately, and holds outputs whose fill is "hold".

    Attributes:
        save: a prefix of y: what is kept; None: everything.
        fill: a prefix of y: what it is on padded steps.
    """

    save: Prefix | None
    fill: Prefix
    moves = True

    def __call__(self, loop: Loop) -> Loop:
        if is_untraced(loop):
            outputs = RowOutputs(Idle(without_hold(self.fill)), ())
            kept = dataclasses.replace(loop, rows=loop.rows._replace(outputs=outputs))
            return kept.finished(ys=lambda _, ys: self._afterwards(loop, ys))
        y, save = loop.trace.y, self.save or EVERYTHING
        keeps = spread_keeps(save, y)
        loop, stacked, outputs = self._hold(loop, keeps)
        loop = dataclasses.replace(loop, keeps=stacked, rows=loop.rows._replace(outputs=outputs))

        def finish(state: PyTree, left: list[Any]) -> PyTree:
            ys = kept_leaves(left, stacked)
            if any(outputs.held):
                kept = zip(state[0], _of(keeps, outputs.held), strict=True)
                last = iter(leaf for leaf, keep in kept if keep == LAST)
                ys = [next(last) if keep == LAST else y for y, keep in zip(ys, keeps, strict=True)]
            return without_dropped(ys, jax.tree.structure(y), save)

        return loop.finished(lambda state: state[1] if any(outputs.held) else state, finish)

    def _hold(self, loop: Loop, keeps: tuple[Keep, ...]) -> tuple[Loop, tuple[Keep, ...], RowOutputs]:
        """Holds the outputs whose fill says so, and those of which each row's last one is kept: none is stacked.

        Returns:
            The loop, what it keeps of the outputs that it stacks, and what it makes of them.
        """
        y, fill = loop.trace.y, self.fill
        start, fills = fill_leaves(fill, y), fill.spread(y, "y")
        if loop.rows.all_valid:  # nothing is filled, and the last y of all rows is that of the last step
            none = (False,) * len(keeps)
            left = _of(loop.rows.axes.y, [keep is not None for keep in keeps])
            return with_axes(loop, y=tuple(left)), keeps, RowOutputs(Idle(Prefix.of([])), none)
        held = tuple(k == LAST or (k is not None and fill == HOLD) for k, fill in zip(keeps, fills, strict=True))
        loop = hold(loop, held, start, loop.trace.y_avals)
        stacked = tuple(None if keep == LAST else keep for keep in keeps)
        left = [keep is not None for keep in stacked]
        numbers = iter(range(sum(held)))
        slots = _of([next(numbers) if on else None for on in held], left)
        idle = Idle(Prefix.of(_of(fills, left)), tuple(slots))
        lasts = tuple(keep == LAST for keep in _of(keeps, held))
        return with_axes(loop, y=tuple(_of(loop.rows.axes.y, left))), stacked, RowOutputs(idle, held, lasts)

    def _afterwards(self, loop: Loop, ys: PyTree) -> PyTree:
        """The same from the outputs of all steps, where these were computed one by one, or where there is no step."""
        starts, fills = fill_leaves(self.fill, ys), self.fill.spread(ys, "y")
        keeps, valid = spread_keeps(self.save or EVERYTHING, one_of(ys)), loop.xs.valid
        assert valid is not None
        y_axes = spread_batch_axes("y_axes", loop.rows.y_axes, one_of(ys), "y", valid.shape[1:])
        if loop.length:
            held = [keep == LAST or fill == HOLD for keep, fill in zip(keeps, fills, strict=True)]
            ys = hold_afterwards(ys, valid, held, starts, y_axes, reverse=loop.reverse)
        elif LAST in keeps:
            leaves = jax.tree.leaves(ys)
            wide = [jnp.broadcast_to(value, (1, *y.shape[1:])) for value, y in zip(starts, leaves, strict=True)]
            none = [leaf if keep == LAST else y for leaf, y, keep in zip(wide, leaves, keeps, strict=True)]
            ys = jax.tree.unflatten(jax.tree.structure(ys), none)
        if loop.rows.given.spans is not None:
            ys = _of_sequences(
                loop, ys, [axis if keep == LAST else None for axis, keep in zip(y_axes, keeps, strict=True)], starts
            )
        return ys if self.save is None else keep_afterwards(ys, self.save, reverse=loop.reverse)


def _of_sequences(loop: Loop, ys: PyTree, axes: Sequence[int | None], starts: Sequence[Array]) -> PyTree:
    """The outputs, those of which the last is kept with what the sequences ended with, as if of a single step."""
    spans, (leaves, structure) = loop.rows.given.spans, jax.tree.flatten(ys)
    assert loop.xs.valid is not None
    some = are_valid(spans, loop.xs.valid)
    ended = [
        y if axis is None else ends_of(y, spans, axis, start, some, reverse=loop.reverse)[None]
        for y, axis, start in zip(leaves, axes, starts, strict=True)
    ]
    return jax.tree.unflatten(structure, ended)


def _of(values: Sequence[Any], flags: Sequence[bool]) -> list[Any]:
    return [value for value, flag in zip(values, flags, strict=True) if flag]
