"""Prefix trees of axes: one axis for each leaf of a tree, or None."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.tree_util as jtu

from ._avals import LeafAxes, PyTree, describe_leaf, shape_of
from ._errors import ArgumentError, Fault, Misuse, Row, TreescanError, expect
from ._tree import Prefix, PrefixMismatch, Root, broadcast_prefix, path_str
from ._types import Axes


def spread_axes(option: str, axes: Axes, tree: PyTree, root: str, *, none: bool = False) -> LeafAxes:
    """One axis a leaf from a prefix tree, each an int (or None, where `none` allows it).

    Raises:
        Fault: for an `ArgumentError` if the prefix does not fit or holds anything else.
    """
    cure = f"Give one int for all leaves, or a prefix tree of {root}, in which one int may cover a whole subtree."
    spread = spread_prefix(f"`{option}`", axes, tree, root, cure)
    _check_ints(option, spread, none=none)
    return tuple(None if axis is None else int(axis) for axis in spread)


def spread_prefix(
    option: str,
    prefix: PyTree,
    tree: PyTree,
    root: str,
    cure: str,
    *,
    whole: str | None = None,
    error: type[TreescanError] = ArgumentError,
) -> list[Any]:
    """One value of a prefix tree for each leaf of a tree.

    Args:
        option: what messages call the prefix.
        prefix: the prefix tree.
        tree: the tree.
        root: what the user calls the tree where a path in it begins.
        cure: what the user may do about a prefix that does not fit.
        whole: what messages call the tree, if not as its root.
        error: the public exception.
    """
    try:
        return broadcast_prefix(prefix, tree, root)
    except PrefixMismatch as off:
        raise Fault(error, f"{{call}}: {option} is not a prefix of {whole or root}: {off}.", cure) from None


def static_axes(option: str, axes: Axes, *, none: bool = False) -> Prefix:
    """A prefix tree of axes as a static value. Whether it fits a tree is checked where it is used."""
    prefix = Prefix.of(axes)
    _check_ints(option, prefix.leaves, none=none)
    return prefix


def _check_ints(option: str, axes: Sequence[Any], *, none: bool) -> None:
    for axis in axes:
        is_int = hasattr(axis, "__index__") and not isinstance(axis, bool | jax.Array)
        allowed = "ints or None" if none else "ints"
        cure = "Give one for all leaves, or a prefix tree of them."
        expect(is_int or (none and axis is None), option, allowed, axis, cure)


def check_axes(option: str, axes: LeafAxes, tree: PyTree, root: str) -> None:
    """Refuses axes that a leaf does not have, all leaves at once."""
    rows, options = [], set()
    for (path, leaf), axis in zip(jtu.tree_flatten_with_path(tree)[0], axes, strict=True):
        rank = len(shape_of(leaf) or ())
        if axis is not None and not -rank <= axis < rank:
            name = next((key.axes for key in path if isinstance(key, Root) and key.axes), option)
            options.add(name)
            rows.append(Row(path_str(root, path), f"{name} {axis}", describe_leaf(leaf), f"rank {rank}"))
    if rows:
        names = " and ".join(f"`{name}`" for name in sorted(options))
        raise Misuse(
            f"{{call}}: {names} {'name' if len(options) > 1 else 'names'} an axis that is not there.",
            "Axes count from 0, and negative axes count from the end"
            + (". {axis_none}." if "in_axes" in options else "."),
            header=("leaf", "axis", "is"),
            rows=rows,
        )
