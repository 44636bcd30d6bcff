"""`carry_axes`, `x_axes`, `y_axes` and `compact` of `while_scan`: the axes of rows that stop independently."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from ..._axes import LeafAxes
from ..._body.call import CallBody, needs_keyword
from ..._errors import ArgumentError, BodyError, Fault
from ..._loop.loop import Loop
from ..._tree import Prefix
from ..._types import Array
from ..axes import scan_over_axes
from ..rows.batch_axes import RowFlags
from ..rows.over_rows import OverRows

_LEADS = Prefix.of(0)
_FALLING = (1 / 32, 1 / 10, 1 / 5, 1 / 3, 1 / 2, 3 / 4)
"""The parts of a batch that tiers are made for: while rows stop, most steps are taken by many of them."""


@dataclass(frozen=True)
class StopRows:
    """Arranges the rows of a loop whose rows stop independently. In a loop without rows, only the axes of xs.

    Attributes:
        carry_axes: a prefix of the carry: where the batch shape starts; None: shared by all rows.
        x_axes: the same for one step's x.
        y_axes: the same for one step's y.
        in_axes: for each leaf of xs the axis scanned over, or None; None as a whole: axis 0 for all.
        compact: whether to order rows, or the numbers of rows to choose from.
    """

    carry_axes: Prefix
    x_axes: Prefix
    y_axes: Prefix
    in_axes: LeafAxes | None
    compact: bool | tuple[int, ...]
    moves = True

    def __call__(self, loop: Loop) -> Loop:
        loop = cut(loop, self.in_axes)
        if loop.rows is None:
            loop = self._without_rows(loop)
            return loop if self.in_axes is None else scan_over_axes(loop, self.in_axes)
        rows = loop.rows.lengths.shape[0]
        compact = falling_tiers(rows) if self.compact is True and isinstance(rows, int) else self.compact
        return OverRows(self.carry_axes, self.x_axes, self.y_axes, 0, self.in_axes, compact)(loop)

    def _without_rows(self, loop: Loop) -> Loop:
        """The loop, if no option and no body asks for rows.

        Raises:
            Fault: for an `ArgumentError` or a `BodyError` if one does.
        """
        axes = {"carry_axes": self.carry_axes, "x_axes": self.x_axes, "y_axes": self.y_axes}
        asked = [name for name, prefix in axes.items() if prefix != _LEADS]
        asked += ["compact"] if self.compact else []
        if asked:
            raise Fault(
                ArgumentError,
                f"{{verb}} over {{body}}: `{asked[0]}` is for rows that stop independently, but the condition "
                "returned a single bool.",
                "Let the condition return one bool for each row, bool[*batch], without reducing over the rows. Or "
                f"leave `{asked[0]}` out.",
            )
        step = loop.step
        assert isinstance(step, CallBody)
        if not step.sees_valid:
            return loop
        if needs_keyword(step.body, "valid"):
            raise Fault(
                BodyError,
                "{body} needs the keyword `valid`, which {verb} passes only if the condition returns one bool for "
                "each row. It returned a single bool.",
                "Let the condition return bool[*batch], or give `valid` a default.",
            )
        return dataclasses.replace(loop, step=dataclasses.replace(step, sees_valid=False))


def falling_tiers(rows: int) -> tuple[int, ...]:
    """The numbers of rows that `compact=True` makes the body for: closer together where they are large."""
    return tuple(sorted({rows, *(math.ceil(rows * part) for part in _FALLING)}))


def with_rows(loop: Loop, holds: Array) -> Loop:
    """The loop, for `StopRows`: rows whose condition does not hold to begin with take no step."""
    lengths = jnp.where(holds, jnp.int32(loop.length), jnp.int32(0))
    return dataclasses.replace(loop, rows=RowFlags(lengths=lengths))


def cut(loop: Loop, axes: LeafAxes | None) -> Loop:
    """The loop, with xs cut to its length."""
    leaves, structure = jax.tree.flatten(loop.xs.x)
    short = [
        leaf if axis is None else jax.lax.slice_in_dim(leaf, 0, loop.length, axis=axis)
        for leaf, axis in zip(leaves, axes or (0,) * len(leaves), strict=True)
    ]
    return dataclasses.replace(loop, xs=loop.xs._replace(x=jax.tree.unflatten(structure, short)))
