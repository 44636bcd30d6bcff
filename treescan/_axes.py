"""Prefix trees of axes: one axis for each leaf of a tree, or None."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from ._avals import describe_argument, describe_leaf, shape_of
from ._errors import ArgumentError, ArgumentTypeError, Fault, Row
from ._tree import Prefix, PrefixMismatch, broadcast_prefix, leaves_with_path
from ._types import Axes, PyTree

LeafAxes = tuple[int | None, ...]


def spread_axes(option: str, axes: Axes, tree: PyTree, root: str, *, none: bool = False) -> LeafAxes:
    """One axis a leaf from a prefix tree, each an int (or None, where `none` allows it).

    Raises:
        Fault: for an `ArgumentError` if the prefix does not fit or holds anything else.
    """
    try:
        spread = broadcast_prefix(axes, tree, root)
    except PrefixMismatch as error:
        raise Fault(
            ArgumentError,
            f"{{verb}} over {{body}}: `{option}` is no prefix of {root}: {error}.",
            f"Give one int for all leaves, or a tree with the structure of {root} down to where one int holds for "
            "everything below.",
        ) from None
    _check_ints(option, spread, none=none)
    return tuple(None if axis is None else int(axis) for axis in spread)


def _is_int(axis: Any) -> bool:
    return hasattr(axis, "__index__") and not isinstance(axis, bool | jax.Array)


def static_axes(option: str, axes: Axes, *, none: bool = False) -> Prefix:
    """A prefix tree of axes in a form that can stand in a plan. Whether it fits is seen where it is used."""
    prefix = Prefix.of(axes)
    _check_ints(option, prefix.leaves, none=none)
    return prefix


def _check_ints(option: str, axes: Sequence[Any], *, none: bool) -> None:
    wrong = [axis for axis in axes if not (_is_int(axis) or (none and axis is None))]
    if wrong:
        allowed = "ints or None" if none else "ints"
        raise Fault(
            ArgumentTypeError,
            f"{{verb}} over {{body}}: `{option}` takes {allowed}, got {describe_argument(wrong[0])}.",
            "Give one for all leaves, or a prefix tree of them.",
        )


def check_axes(option: str, axes: LeafAxes, tree: PyTree, root: str) -> None:
    """Refuses axes that a leaf does not have, all leaves at once."""
    rows = []
    for (path, leaf), axis in zip(leaves_with_path(root, tree), axes, strict=True):
        rank = len(shape_of(leaf) or ())
        if axis is not None and not -rank <= axis < rank:
            rows.append(Row(path, f"{option} {axis}", describe_leaf(leaf), f"rank {rank}"))
    if rows:
        raise Fault(
            ArgumentError,
            f"{{verb}} over {{body}}: `{option}` names an axis that is not there.",
            "An axis counts from 0, or from the end if it is negative"
            + (", and None gives a leaf whole to every step." if option == "in_axes" else "."),
            header=("leaf", "axis", "is"),
            rows=rows,
        )
