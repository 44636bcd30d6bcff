"""Custom carries: what the body sees of them, what is written back, and where their rows stand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import jax.tree_util as jtu

from .._avals import describe_node, is_key
from .._errors import ArgumentError, Cure, Fault, PluginError, Row
from .._loop import is_last_trace
from .._tree import KeyPath, Prefix, children, leaves_with_path, path_str
from .._types import Array, PyTree
from ..carries._base import AbstractCarry, describe_class, describe_error, is_carry, parts_of
from ..carries._keys import Keys
from .axes import LeafAxes, spread_axes
from .batch_axes import check_batch_axes
from .differences import agree, find_differences

_T = TypeVar("_T")


@jtu.register_static
class _Place:
    """Stands where a custom carry is while a returned tree is compared: it is equal to all that the body may return."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Place)

    def __hash__(self) -> int:
        return hash(_Place)


def read_carries(state: PyTree, root: str) -> PyTree:
    """What the body sees of the state. `root` is the body's own name for it."""
    nodes, outer = jax.tree.flatten(state, is_leaf=is_carry)
    seen = [_call(state, root, i, "read", node.read) if is_carry(node) else node for i, node in enumerate(nodes)]
    return jax.tree.unflatten(outer, seen)


def without_carries(given: PyTree, returned: PyTree) -> tuple[PyTree, PyTree]:
    """Both trees with the places of custom carries blanked, as far as the returned tree has them: to be compared."""
    if is_carry(given):
        return _Place(), _Place()
    mine, theirs = children(given), children(returned)
    if mine is None or theirs is None or type(given) is not type(returned):
        return given, returned
    there = dict(theirs)
    pairs = {key: without_carries(child, there[key]) if key in there else (child, None) for key, child in mine}
    seconds = [pairs[key][1] if key in pairs else child for key, child in theirs]
    return _rebuild(given, [pairs[key][0] for key, _ in mine]), _rebuild(returned, seconds)


def _rebuild(node: PyTree, parts: list[Any]) -> PyTree:
    return jax.tree.unflatten(jax.tree.structure(node, is_leaf=lambda part: part is not node), parts)


def write_carries(state: PyTree, returned: PyTree, valid: Array | None, root: str) -> PyTree:
    """The next state, from a returned tree that was found to fit it.

    Raises:
        Fault: for a `PluginError` if a carry fails to write, or is another kind of carry afterwards.
    """
    nodes, outer = jax.tree.flatten(state, is_leaf=is_carry)
    parts = parts_of(outer, returned)
    assert parts is not None

    def write(index: int, node: AbstractCarry[Any, Any], part: PyTree) -> AbstractCarry[Any, Any]:
        new = _call(state, root, index, "write", lambda: node.write(part, valid), part)
        if type(node) is not type(new) or not agree(node, new):
            _check_written(node, new, _path_of(state, root, index))
        return new

    pairs = enumerate(zip(nodes, parts, strict=True))
    return jax.tree.unflatten(outer, [write(i, node, part) if is_carry(node) else part for i, (node, part) in pairs])


def _check_written(old: AbstractCarry[Any, Any], new: Any, path: str) -> None:
    """Compares a written carry with the one before; a weakly typed leaf may change once, as lax.scan lets it."""
    name = type(old).__name__
    differences = list(find_differences(path, (), old, new))
    if differences and all(difference.given_is_weak for difference in differences) and not is_last_trace():
        return
    drift = (
        f"`{name}.write` returns a `{name}` with the structure, the static fields, the shapes and the dtypes of the "
        "one before. Either it does not see to that, or what the body returned there does not fit."
    )
    raise Fault(
        PluginError,
        f"{{verb}} over {{body}}: the custom carry at {path} is of another type after `{name}.write`.",
        drift,
        describe_class(type(old)),
        header=("leaf", "before", "written"),
        rows=[difference.row for difference in differences],
    )


def _call(state: PyTree, root: str, index: int, hook: str, call: Callable[[], _T], *returned: PyTree) -> _T:
    """Calls a hook of the carry that is the `index`-th node of the state, with what was returned in its place."""
    try:
        return call()
    except Fault:
        raise
    except Exception as error:
        node = jax.tree.leaves(state, is_leaf=is_carry)[index]
        raise Fault(
            PluginError,
            f"{{verb}} over {{body}}: `{type(node).__name__}.{hook}` failed for the custom carry at "
            f"{_path_of(state, root, index)}.",
            describe_error(error),
            *(f"The body returned {describe_node(part)} there.{_ASK if is_carry(part) else ''}" for part in returned),
            describe_class(type(node)),
            cause=error,
        ) from None


_ASK = " It returns what is to be written to the carry, not the carry itself."


def _path_of(state: PyTree, root: str, index: int) -> str:
    return leaves_with_path(root, state, is_leaf=is_carry)[index][0]


def spread_carry_axes(prefix: Prefix, state: PyTree, root: str, batch: tuple[int, ...]) -> LeafAxes:
    """Where the batch shape starts in each leaf of a carry: as its custom carries say, and `carry_axes` of the rest.

    Raises:
        Fault: for an `ArgumentError` if the batch shape does not stand there, or a `PluginError` if `rows` of a custom
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
    "A custom carry says itself where its rows stand (`rows`): start it from arrays that have the batch shape there. "
    "For one that all rows share, give None in `carry_axes`, or `shared=True` to it if it has that option."
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
                f"{{verb}} over {{body}}: `carry_axes` is {axis} for {path}, a custom carry (`{type(node).__name__}`), "
                "which says itself where its rows stand.",
                "`carry_axes` takes a tree with an axis for each part of the carry: give 0 for this one, or None if "
                "all rows share it.",
            )
        else:
            axes.extend(row_axes(node, path))
    return tuple(axes)


def row_axes(node: AbstractCarry[Any, Any], path: str) -> tuple[int | None, ...]:
    """What `rows` of a custom carry says, for each of its leaves.

    Raises:
        Fault: for a `PluginError` if it does not fit the carry.
    """
    rows = _call(node, path, 0, "rows", node.rows)
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
        says = f"gives {given!r} for the field `{name}`, {describe_node(child)}, which it does not fit"
        raise _bad_rows(node, path, says) from None


def _bad_rows(node: AbstractCarry[Any, Any], path: str, says: str) -> Fault:
    name = type(node).__name__
    return Fault(
        PluginError,
        f"{{verb}} over {{body}}: `{name}.rows` of the custom carry at {path} {says}.",
        "It returns the axis where the batch shape starts in the leaves (0: it leads), None if all rows share them, or "
        "a mapping from the names of fields to these: to a prefix tree of them for a field that holds a tree, to 0 or "
        "None for one that holds a custom carry.",
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
                Row(path, "one key a row", "one for all", "")
                for (path, leaf), axis in own
                if axis is None and _is_random(node, leaf)
            )
    if rows:
        raise Fault(
            ArgumentError,
            "{verb} over {body}: `compact` runs the body on fewer rows, for which a key that all rows share would draw "
            "other numbers.",
            "Give each row a key of its own: `keys(jax.random.split(key, rows))`.",
            header=("leaf", "needed", "is"),
            rows=rows,
        )


def _is_random(node: AbstractCarry[Any, Any], leaf: Array) -> bool:
    """Whether a leaf is a key; raw key data look like any integers, but in `Keys`."""
    return is_key(leaf) or (isinstance(node, Keys) and leaf is node.key)
