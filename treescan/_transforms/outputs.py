"""`save` and `out_axes`: which outputs are kept, and along which axis they are stacked."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from .._avals import describe_argument, exact_int
from .._axes import static_axes
from .._errors import ArgumentError, Fault
from .._loop.loop import Loop
from .._loop.sizes import Wish
from .._trace.hoist import is_untraced, traced
from .._tree import Prefix, PrefixMismatch
from .._types import Array, Axes, PyTree, Save
from .axes import move_outputs
from .refuse import refuse_symbolic, refuse_with_refs

Keep = int | None
"""Every how many steps an output is kept (1: in all of them), LAST, or None for never."""

ALL, LAST = 1, 0
EVERYTHING = Prefix.of(ALL)


@dataclass(frozen=True)
class KeepOutputs:
    """`save`: keeps of each output what a prefix of y says."""

    save: Prefix
    moves = True

    @classmethod
    def of(cls, save: Any) -> KeepOutputs | None:
        """What the user said: a prefix of y with "all", "last", numbers or None; None if everything is kept.

        Raises:
            Fault: for an `ArgumentError` if it holds anything else.
        """
        prefix = check_save(save)
        return None if prefix is None else cls(prefix)

    def __call__(self, loop: Loop) -> Loop:
        save, reverse = self.save, loop.reverse
        if is_untraced(loop):
            return loop.finished(ys=lambda _, ys: keep_afterwards(ys, save, reverse=reverse))
        loop = traced(loop)
        keeps, structure = spread_keeps(save, loop.trace.y), jax.tree.structure(loop.trace.y)
        if is_thinned(keeps):
            refuse_symbolic(loop.length, "save")
            if loop.trace.refs:
                refuse_with_refs("save")
        loop = dataclasses.replace(loop, keeps=keeps)
        return loop.finished(ys=lambda _, ys: without_dropped(kept_leaves(ys, keeps), structure, save))


@dataclass(frozen=True)
class MoveOutputs:
    """`out_axes`: moves the stacked axis of each output; `save` says which outputs have one."""

    axes: Prefix
    save: Prefix | None = None
    moves = True

    @classmethod
    def of(cls, out_axes: Axes, save: Any = "all") -> MoveOutputs | None:
        """What the user said of `out_axes` and `save`; None if all axes stay where they are.

        Raises:
            Fault: for an `ArgumentTypeError` if `out_axes` holds anything but ints.
        """
        if type(out_axes) is int and out_axes == 0:
            return None
        return cls(static_axes("out_axes", out_axes), check_save(save))

    def __call__(self, loop: Loop) -> Loop:
        return loop.finished(ys=lambda _, ys: move_kept(ys, self.axes.tree, self.save))


def check_save(save: Save) -> Prefix | None:
    """A prefix tree of what is kept: how often, LAST or None. None as a whole: everything is."""
    if isinstance(save, str) and save == "all":
        return None
    prefix = Prefix.of(save)
    leaves = tuple(map(_check_keep, prefix.leaves))
    return None if all(keep == ALL for keep in leaves) else Prefix(leaves, prefix.structure)


def _check_keep(keep: Any) -> int | None:
    if keep is None:
        return None
    if isinstance(keep, str) and keep in ("all", "last"):
        return ALL if keep == "all" else LAST
    steps = None if isinstance(keep, np.ndarray) else exact_int(keep)
    if steps is None or steps < 1:
        raise Fault(
            ArgumentError,
            '{verb} over {body}: `save` must be "all", "last", an int of at least 1 or None, got '
            f"{describe_argument(keep)}.",
            "An int k keeps the positions k-1, 2k-1 and so on, and None drops an output. Give one for all of y, or "
            "a prefix tree of y. For other positions, keep all and index ys.",
        )
    return steps


def spread_keeps(save: Prefix, y: PyTree) -> tuple[Keep, ...]:
    """What is kept of each leaf of y.

    Raises:
        Fault: for an `ArgumentError` if the prefix does not fit.
    """
    try:
        return tuple(save.spread(y, "y"))
    except PrefixMismatch as error:
        raise Fault(
            ArgumentError,
            f"{{verb}} over {{body}}: `save` is not a prefix of y: {error}.",
            'Give "all", "last", a number or None for all of y, or a prefix tree of y with these.',
        ) from None


def boundaries(keeps: Sequence[Keep], length: int) -> list[Wish]:
    """What outputs that are not kept in all steps ask of the planner."""
    return [Wish(keep, exact=True) for keep in sorted({k for k in keeps if k and k > 1}) if keep < length]


def is_thinned(keeps: Sequence[Keep] | None) -> bool:
    """Whether any output is kept in some steps alone; None: ys are stacked whole."""
    return any(keep not in (ALL, None) for keep in keeps or ())


def keep_afterwards(ys: PyTree, save: Prefix, *, reverse: bool) -> PyTree:
    """The same from the outputs of all steps, where these were computed one by one, or where there is no step."""

    def kept(leaf: Array, keep: Keep) -> Array | None:
        if keep is None:
            return None
        if keep == LAST:
            return leaf[0 if reverse else -1] if leaf.shape[0] else jax.lax.full(leaf.shape[1:], 0, leaf.dtype)
        return leaf if keep == ALL else leaf[keep - 1 :: keep]

    leaves, structure = jax.tree.flatten(ys)
    keeps = spread_keeps(save, one_of(ys))
    return without_dropped([kept(leaf, keep) for leaf, keep in zip(leaves, keeps, strict=True)], structure, save)


def one_of(ys: PyTree) -> PyTree:
    """The types of one step's y."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), ys)


def kept_leaves(ys: list[Any], keeps: Sequence[Keep]) -> list[Any]:
    """One entry for each leaf of y, None where nothing is kept, from those that are left."""
    left = iter(ys)
    return [None if keep is None else next(left) for keep in keeps]


def without_dropped(leaves: list[Any], structure: Any, save: Prefix) -> PyTree:
    """The tree of ys, with None in the places where `save` says None."""
    ys = jax.tree.unflatten(structure, leaves)
    return jax.tree.map(lambda keep, part: None if keep is None else part, save.tree, ys, is_leaf=lambda k: k is None)


def move_kept(ys: PyTree, out_axes: Axes, save: Prefix | None) -> PyTree:
    """Moves the stacked axis of the outputs that have one to where `out_axes` wants it."""
    if save is None or LAST not in save.leaves:
        return move_outputs(ys, out_axes)
    leaves, structure = jax.tree.flatten(ys)
    stacked = [keep != LAST for keep in save.spread(ys, "y")]
    whole = [y if on else y[None] for y, on in zip(leaves, stacked, strict=True)]
    moved = jax.tree.leaves(move_outputs(jax.tree.unflatten(structure, whole), out_axes))
    return jax.tree.unflatten(structure, [m if on else y for m, y, on in zip(moved, leaves, stacked, strict=True)])
