"""Finds the axes of the batch in the carry: `carry_axes` for plain leaves, `rows` for custom carries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from ..._avals import describe_node, is_key
from ..._axes import LeafAxes, spread_axes
from ..._body.carries import call_hook
from ..._errors import ArgumentError, Cure, Fault, PluginError, Row
from ..._tree import KeyPath, Prefix, children, leaves_with_path, path_str
from ..._types import Array, PyTree
from ...carries._base import AbstractCarry, describe_class, is_carry
from ...carries._keys import Keys
from .batch_axes import check_batch_axes


def spread_carry_axes(prefix: Prefix, state: PyTree, root: str, batch: tuple[int, ...]) -> LeafAxes:
    """Where the batch shape starts in each leaf of a carry: as its custom carries say, and `carry_axes` of the rest.

    Raises:
        Fault: for an `ArgumentError` if the batch shape is not there, or a `PluginError` if `rows` of a custom
            carry says something that does not fit it.
    """
    if not any(map(is_carry, jax.tree.leaves(state, is_leaf=is_carry))):
        axes = spread_axes("carry_axes", prefix.tree, state, root, none=True)
        return check_batch_axes("carry_axes", axes, state, root, batch)
    axes = _axes_within(state, root, prefix.tree)
    own = sorted({path for path, node in leaves_with_path(root, state, is_leaf=is_carry) if is_carry(node)})
    try:
        return check_batch_axes("carry_axes", axes, state, root, batch)
    except Fault as fault:
        if any(row.leaf.startswith(path) for row in fault.rows for path in own):
            fault.cures = (*fault.cures, Cure(_ROWS))
        raise


_ROWS = (
    "The method `rows` of a custom carry says where its rows are. Start the carry from arrays that have the batch "
    "shape there. If all rows share it, give None in `carry_axes`, or create it with `shared=True` if it has that "
    "option."
)


def _axes_within(state: PyTree, root: str, prefix: PyTree) -> LeafAxes:
    """One axis a leaf from a prefix that knows the custom carries of a tree as leaves only."""
    named, outer = leaves_with_path(root, state, is_leaf=is_carry), jax.tree.structure(state, is_leaf=is_carry)
    places = [type(node) if is_carry(node) else node for _, node in named]  # a carry counts as one leaf
    above = spread_axes("carry_axes", prefix, jax.tree.unflatten(outer, places), root, none=True)
    axes: list[int | None] = []
    for (path, node), axis in zip(named, above, strict=True):
        if not is_carry(node):
            axes.extend([axis] * len(jax.tree.leaves(node)))
        elif axis is None:
            axes.extend([None] * len(jax.tree.leaves(node)))
        elif axis != 0:
            raise Fault(
                ArgumentError,
                f"{{verb}} over {{body}}: `carry_axes` is {axis} for {path}, a custom carry "
                f"(`{type(node).__name__}`), whose own method `rows` says where its rows are.",
                "Give a tree with an entry for each part of the carry: 0 for this one, or None if all rows share it.",
            )
        else:
            axes.extend(row_axes(node, path))
    return tuple(axes)


def row_axes(node: AbstractCarry[Any, Any], path: str) -> tuple[int | None, ...]:
    """What `rows` of a custom carry says, for each of its leaves.

    Raises:
        Fault: for a `PluginError` if it does not fit the carry.
    """
    rows = call_hook(node, path, 0, "rows", node.rows)
    fields = children(node) or []
    names = [path_str("", key).removeprefix(".") for key, _ in fields]
    if isinstance(rows, Mapping):
        wrong = [repr(name) for name in rows if name not in names]
        if wrong:
            raise _bad_rows(node, path, f"names {', '.join(wrong)}, but its fields are {', '.join(names) or 'none'}")
        by_field = [rows.get(name, 0) for name in names]
    elif rows is None or type(rows) is int:
        by_field = [rows] * len(names)
    else:
        raise _bad_rows(
            node, path, f"returned {describe_node(rows)}, not an axis, None or a mapping from fields to these"
        )
    return tuple(
        axis
        for (key, child), given in zip(fields, by_field, strict=True)
        for axis in _field_axes(node, path, key, child, given)
    )


def _field_axes(node: AbstractCarry[Any, Any], path: str, key: KeyPath, child: PyTree, given: PyTree) -> LeafAxes:
    try:
        return _axes_within(child, path_str(path, key), given)
    except Fault as fault:
        if fault.error is PluginError:
            raise
        name = path_str("", key).removeprefix(".")
        says = f"returned {given!r} for the field `{name}`, which does not fit {describe_node(child)}"
        raise _bad_rows(node, path, says) from None


def _bad_rows(node: AbstractCarry[Any, Any], path: str, says: str) -> Fault:
    name = type(node).__name__
    return Fault(
        PluginError,
        f"{{verb}} over {{body}}: `{name}.rows` of the custom carry at {path} {says}.",
        "Return the axis where the batch shape starts in all leaves (0: it leads), None if all rows share them, or "
        "a mapping from the names of fields to these. A field that holds a tree may have a prefix tree of them. A "
        "field that holds a custom carry has 0 or None.",
        describe_class(type(node)),
    )


def refuse_shared_keys(state: PyTree, axes: LeafAxes, root: str) -> None:
    """Refuses to order rows where a custom carry draws random numbers for all of them at once."""
    paths = iter(zip(leaves_with_path(root, state), axes, strict=True))
    rows: list[Row] = []
    for node in jax.tree.leaves(state, is_leaf=is_carry):
        own = [next(paths) for _ in jax.tree.leaves(node)]
        if is_carry(node):
            rows.extend(
                Row(path, "one key per row", "one for all", "")
                for (path, leaf), axis in own
                if axis is None and _is_random(node, leaf)
            )
    if rows:
        raise Fault(
            ArgumentError,
            "{verb} over {body}: `compact` calls the body with fewer rows, so a key that all rows share would draw "
            "different numbers.",
            "Give each row a key of its own: `keys(jax.random.split(key, rows))`.",
            header=("leaf", "needed", "is"),
            rows=rows,
        )


def _is_random(node: AbstractCarry[Any, Any], leaf: Array) -> bool:
    """Whether a leaf is a key; raw key data look like any integers, but in `Keys`."""
    return is_key(leaf) or (isinstance(node, Keys) and leaf is node.key)
