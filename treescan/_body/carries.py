"""Custom carries: what the body sees of them, and what is written back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.tree_util as jtu

from .._avals import describe_node
from .._errors import Fault, PluginError
from .._loop.run import is_last_trace
from .._tree import children, leaves_with_path
from .._types import Array, PyTree
from ..carries._base import AbstractCarry, describe_class, describe_error, is_carry, parts_of
from .differences import agree, find_differences

_T = TypeVar("_T")


@jtu.register_static
class _Place:
    """Replaces a custom carry while a returned tree is compared. It is equal to everything that the body may return."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Place)

    def __hash__(self) -> int:
        return hash(_Place)


def read_carries(state: PyTree, root: str) -> PyTree:
    """What the body sees of the state. `root` is the body's own name for it."""
    nodes, outer = jax.tree.flatten(state, is_leaf=is_carry)
    seen = [call_hook(state, root, i, "read", node.read) if is_carry(node) else node for i, node in enumerate(nodes)]
    return jax.tree.unflatten(outer, seen)


def without_carries(given: PyTree, returned: PyTree) -> tuple[PyTree, PyTree]:
    """Both trees without their custom carries, as far as the returned tree has these places, for a comparison."""
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
        new = call_hook(state, root, index, "write", lambda: node.write(part, valid), part)
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
        f"`{name}.write` must return a `{name}` with the same structure, static fields, shapes and dtypes as "
        "before. Either the method does not, or it was given a value from the body that does not fit."
    )
    raise Fault(
        PluginError,
        f"{{verb}} over {{body}}: `{name}.write` changed the type of the custom carry at {path}.",
        drift,
        describe_class(type(old)),
        header=("leaf", "before", "written"),
        rows=[difference.row for difference in differences],
    )


def call_hook(state: PyTree, root: str, index: int, hook: str, call: Callable[[], _T], *returned: PyTree) -> _T:
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


_ASK = " Return the value to write to the carry, not the carry itself."


def _path_of(state: PyTree, root: str, index: int) -> str:
    return leaves_with_path(root, state, is_leaf=is_carry)[index][0]
