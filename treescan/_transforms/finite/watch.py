"""The step that looks at its state: one int rides along, the first step after which it was NaN or infinite."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp

from ..._avals import place_like
from ..._axes import LeafAxes
from ..._loop.loop import Feed, Loop, Step
from ..._trace.blame import becomes_bad, is_checked
from ..._trace.hoist import Repeatable
from ..._types import Array, PyTree

GOOD = -1
"""In place of a step's number: none went wrong."""


@dataclass(frozen=True, eq=False)
class Watched:
    """A step after which its state is looked at. It numbers steps in the order in which they run, from 0.

    Its state is [the first bad step, with `counts` the number of this one, *the inner state]. In a masked loop each row
    has its own of these, int32[*batch]: they are masked as the carry is, so that no padding is ever looked at.

    Attributes:
        step: the inner step; its state is a list of leaves.
        keyed: whether the inner step is fed its position too.
        watched: for each leaf of its state whether it is looked at: the body may change it.
        axes: for each leaf of its state where the batch shape starts; None: it belongs to all rows.
        counts: whether the state counts the steps; else the feed has their positions.
        last: the highest position, of a loop in reverse; else None.
    """

    step: Step
    keyed: bool
    watched: tuple[bool, ...]
    axes: LeafAxes
    counts: bool = False
    last: Any = None

    def __call__(self, consts: PyTree, state: list[Array], feed: Feed) -> tuple[PyTree, PyTree]:
        (first, *count), given = state[: self.heads], state[self.heads :]
        number = count[0] if count else number_of_position(feed.position, self.last)
        new, y = self.step(consts, given, feed if self.keyed else feed._replace(position=None))
        bad = (first == GOOD) & place_like(self._went_bad(given, new, first.ndim), jax.typeof(first))
        return [jnp.where(bad, number, first), *(n + 1 for n in count), *new], y

    def _went_bad(self, given: Sequence[Array], new: Sequence[Array], rows: int) -> Array:
        """bool[*batch]: whether a leaf of a row became NaN or infinite, or one of all rows did."""
        bad = jnp.zeros((1,) * rows, bool)
        for old, leaf, watched, axis in zip(given, new, self.watched, self.axes, strict=True):
            if watched and is_checked(leaf):
                bad = bad | any_of_rows(becomes_bad(old, leaf), axis, rows)
        return bad

    @property
    def heads(self) -> int:
        """How many leaves lead the state."""
        return 1 + self.counts

    @property
    def once_only(self) -> bool:
        """Whether it has effects that JAX refuses to repeat."""
        return cast(Repeatable, self.step).once_only

    def silenced(self) -> Watched:
        """The same without what the body says in callbacks."""
        return dataclasses.replace(self, step=cast(Repeatable, self.step).silenced())


def number_of_position(position: Array | None, last: Any) -> Array:
    """How many steps run before the one at a position; `last` is the highest one, of a loop in reverse."""
    assert position is not None
    return position if last is None else last - position


def any_of_rows(flags: Array, axis: int | None, rows: int) -> Array:
    """bool[*batch], from the flags of a leaf: those of each row together; of all rows, for a leaf without."""
    if axis is None:
        return jnp.any(flags)
    return jnp.any(flags, tuple(i for i in range(flags.ndim) if not axis <= i < axis + rows))


def earliest(firsts: Array) -> Array:
    """int32[]: the first bad step of all rows."""
    none = jnp.iinfo(firsts.dtype).max
    first = jnp.min(jnp.where(firsts == GOOD, none, firsts), initial=none)
    return jnp.where(first == none, GOOD, first)


def numbers_of(loop: Loop) -> Array:
    """int32[T]: for each position how many steps run before it."""
    order = jnp.arange(loop.length, dtype=jnp.int32)
    return order[::-1] if loop.reverse else order
