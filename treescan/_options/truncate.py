"""`truncate` cuts the gradient between segments of steps, for truncated backpropagation through time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from .._avals import Array, LeafAxes, PyTree, exact_int
from .._errors import ArgumentError, Misuse, expect
from .._loop.feed import Feed, Slot
from .._loop.loop import Loop, Step, is_untraced
from .._rows.leaves import any_along, expand, select
from .._trace.hoist import fixed_leaves, flattened, lifted, traced
from .._transforms.call import Arguments, Call
from .._transforms.transform import Stage, Transform
from .._tree import split
from .resets import flags_of

CUT: Slot[Array] = Slot("cut", rows=True)
"""Before which steps the gradient is cut."""

CUT_SHARED: Slot[Array] = Slot("cut_shared", rows=False)
"""bool[]: the same for leaves that all rows share."""


@dataclass(frozen=True)
class Truncated:
    """A step before which the gradient is cut where its feed says so. Its state is a list of leaves.

    Attributes:
        step: the inner step.
        axes: for each leaf where the shape of the flag starts; None: it has a flag that all rows share.
        fixed: for each leaf whether no step changes it.
    """

    step: Step
    axes: LeafAxes
    fixed: tuple[bool, ...]

    def __call__(self, consts: PyTree, state: list[Array], feed: Feed) -> tuple[PyTree, PyTree]:
        leaves = [
            leaf if is_fixed or not jnp.issubdtype(leaf.dtype, jnp.inexact) else _cut(feed, leaf, axis)
            for leaf, axis, is_fixed in zip(state, self.axes, self.fixed, strict=True)
        ]
        return self.step(consts, leaves, CUT_SHARED.put(CUT.put(feed, None), None))


def _cut(feed: Feed, leaf: Array, axis: int | None) -> Array:
    cut = CUT_SHARED.of(feed) if axis is None else CUT.of(feed)
    assert cut is not None
    return select(expand(cut, leaf, axis or 0), jax.lax.stop_gradient(leaf), leaf)


@dataclass(frozen=True)
class Truncate(Transform):
    """`truncate`: cuts the gradient of the carry at the positions that `size` divides."""

    size: int
    stage: ClassVar[Stage] = Stage.CUT

    @classmethod
    def of(cls, truncate: Any) -> Truncate | None:
        """What the user said: a number of steps, or None.

        Raises:
            Fault: for an `ArgumentError` if it is neither.
        """
        if truncate is None:
            return None
        steps = exact_int(truncate) or 0
        cure = "The gradient is cut after every so many steps, for example `truncate=32`. None does not cut it."
        expect(steps >= 1, "truncate", "an int of at least 1", truncate, cure, error=ArgumentError)
        return cls(steps)

    def refuse_part(self, call: Call, given: Arguments) -> None:
        if call.reverse:
            raise Misuse(
                "{call}: `truncate` and `offset` cannot be combined in reverse: where the gradient is cut depends on "
                "the end of the whole run.",
                "Leave `truncate` out, and cut the gradient between parts, `jax.lax.stop_gradient(carry)`.",
            )
        if (rows := given.rows) is not None and (rows.mask is not None or rows.resets is not None):
            name = "mask" if rows.mask is not None else "resets"
            raise Misuse(
                f"{{call}}: `truncate` counts the valid steps of each row, and with `{name}` their number before this "
                "part is not known. `offset` says only how many steps came before.",
                "Say by `lengths` where rows are valid, or leave `truncate` out and cut the gradient between parts, "
                "`jax.lax.stop_gradient(carry)`.",
            )

    def __call__(self, loop: Loop) -> Loop:
        if not loop.length:
            return loop
        if loop.rows is not None:
            return truncate_rows(loop, self.size)
        if is_untraced(loop):
            return truncate(flattened(loop), self.size, fixed_leaves(loop))
        loop = lifted(traced(loop))
        return truncate(loop, self.size, _left_unchanged(loop))


def _left_unchanged(loop: Loop) -> tuple[bool, ...]:
    """For each leaf of a traced loop's state whether no step changes it, although it stayed there."""
    returned, fixed = loop.hoisted.returned, loop.hoisted.fixed
    left: list[bool] = split(fixed[len(fixed) - len(returned) :], returned)[1]  # an option may have put leaves before
    return (*(False for _ in range(len(loop.state) - len(left))), *left)


def truncate(loop: Loop, size: int, fixed: tuple[bool, ...]) -> Loop:
    """Cuts the gradient at the positions that `size` divides, in reverse too.

    Args:
        loop: the loop, its state a list of leaves.
        size: the steps of a stretch.
        fixed: for each leaf whether no step changes it.
    """
    position = jnp.arange(loop.length)
    position = position if loop.offset is None else loop.offset + position
    if loop.reverse:  # a stretch begins with its highest position
        cut = ((position + 1) % size == 0) & (position + 1 < loop.length)
    else:
        cut = (position % size == 0) & (position > 0)
    step = Truncated(loop.step, (0,) * len(loop.state), fixed)
    return loop.having(step=step, xs=CUT.put(loop.xs, cut))


def truncate_rows(loop: Loop, size: int) -> Loop:
    """Cuts the gradient of each row by itself. It counts the valid steps of a segment from its first one in time.

    With an offset, `lengths` alone say where rows are, so a row that still runs took as many steps as there were. A
    leaf that all rows share is never reset. Its steps are those in which any row is valid.
    """
    valid, unchanged, axes, ran = loop.xs.valid, loop.masked.unchanged, loop.masked.axes.state, loop.offset
    # Where segments begin in time; that of a row's first may be left out.
    begins = None if loop.segments is None else flags_of(loop, reverse=False)
    cut = _cuts(valid, begins, size, ran, reverse=loop.reverse)
    shared = None
    if None in axes:
        shared = _cuts(any_along(valid, range(1, valid.ndim)), None, size, ran, reverse=loop.reverse)
    step = Truncated(loop.step, axes, _left_unchanged(loop) if unchanged is None else unchanged())
    return loop.having(step=step, xs=CUT_SHARED.put(CUT.put(loop.xs, cut), shared))


def _cuts(valid: Array, begins: Array | None, size: int, ran: Array | None, *, reverse: bool) -> Array:
    """bool[T, ...]: the valid steps before which a stretch of `size` valid steps of one segment ends.

    Args:
        valid: bool[T, ...].
        begins: the same: the valid steps that begin a segment in time; None: the first of all does.
        size: the steps of a stretch.
        ran: int32[], the valid steps before the first, of each row that still has one; None: 0.
        reverse: whether the loop runs from the last position to the first.
    """
    number = jax.lax.cumsum(valid.astype(jnp.int32))  # counted from 1
    first = jnp.minimum(number, 1)
    within = number - (first if begins is None else jax.lax.cummax(jnp.where(begins, number, first)))
    within = within if ran is None else ran + within
    if reverse:  # a stretch begins with its highest step; the first step that runs has nothing before it
        return valid & ((within + 1) % size == 0) & (number < number[-1:])
    return valid & (within % size == 0) & (within > 0)
