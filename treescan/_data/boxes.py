"""Adds the axis of the layers to the metadata of flax, and removes it.

Variables of nnx and boxes of linen name the axes of their array. flax's helpers shard the array by these names.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from .._avals import shape_of, spec_parts
from .._errors import Fault, LayerError, Row, expect
from .._flax import box_classes, holds, variable_classes
from .._tree import leaves_with_path
from .._types import PyTree

_PARTITION_NAME = "partition_name"  # PARTITION_NAME of `flax.nnx` and `flax.core.meta`
_NAMES = ("out_sharding", "sharding_names")  # what a variable calls the names of its axes, now and in flax 0.12.2


def _is_variable(box: Any) -> bool:
    return isinstance(box, variable_classes())


def add_layer_axis(stacked: PyTree, name: Any) -> PyTree:
    """A stack whose boxes have the metadata of one layer, with the axis of the layers in it, first.

    Args:
        stacked: the stack; what it holds is not changed.
        name: what the axis is called; None where nothing is to be sharded along it.

    Raises:
        Fault: if the name is none, or a box of the user's own fails.
    """
    _check_name(name)
    params = {_PARTITION_NAME: name}

    def add(box: Any) -> Any:
        if _is_variable(box):
            return sys.modules["flax.nnx"].spmd.add_axis(_copy(box), 0, params)
        return box.add_axis(0, params)

    return _map_boxes("layer", stacked, add, "add_axis")


def remove_layer_axis(stacked: PyTree, root: str, name: Any = None) -> PyTree:
    """A stack, arrays and all, whose boxes have the metadata of one layer.

    flax's own `vmap` leaves the axis out of the metadata unless it is told its name. So names count as those of a stack
    where there is one for each axis of an array, and shorter ones beside these if they begin with the same name.

    Args:
        stacked: the stack; what it holds is not changed.
        root: what it is called.
        name: what the axis is called, if the user says so.

    Raises:
        Fault: if the axis is called otherwise, or a box of the user's own fails.
    """
    _check_name(name)
    boxes = _boxes(root, stacked)
    if not boxes:
        return stacked
    whole = [names for _, box in boxes if (names := _names(box)) and len(names) == _rank(box)]
    if name is not None:
        _refuse_other_names(boxes, name)
    axis = whole[0][0] if whole else name

    def remove(box: Any) -> Any:
        names = _names(box)
        if names is None:
            return _remove(box, axis)
        is_short = 0 < len(names) < _rank(box) and (whole or name is not None) and names[0] == axis
        return _remove(box, names[0]) if is_short or len(names) == _rank(box) else box

    return _map_boxes(root, stacked, remove, "remove_axis")


def _remove(box: Any, name: Any) -> Any:
    if not _is_variable(box):
        return box.remove_axis(0, {_PARTITION_NAME: name})
    copy = _copy(box)
    if _names(box) is None:
        copy.remove_axis(0, name)  # hooks, if it has any
        return copy
    return sys.modules["flax.nnx"].spmd.remove_axis(copy, 0, {_PARTITION_NAME: name})


def _copy(box: Any) -> Any:
    """Another variable with the same array, whose metadata may be changed."""
    leaves, structure = jax.tree.flatten(box)
    return jax.tree.unflatten(structure, leaves)


def _names(box: Any) -> tuple[Any, ...] | None:
    """The names of the axes in a box; None if it has none."""
    if _is_variable(box):
        metadata = box.get_metadata()
        names = next((metadata[key] for key in _NAMES if key in metadata), None)
    else:
        names = getattr(box, "names", None)
    return tuple(spec_parts(names)) if isinstance(names, tuple | list | PartitionSpec) else None


def _rank(box: Any) -> int:
    return max((len(shape_of(leaf) or ()) for leaf in jax.tree.leaves(box)), default=0)


def _boxes(root: str, tree: PyTree) -> list[tuple[str, Any]]:
    """All boxes with their paths."""
    if not holds(tree, box_classes()):
        return []
    return [(path, node) for path, node in leaves_with_path(root, tree, is_leaf=_is_box) if _is_box(node)]


def _is_box(node: Any) -> bool:
    return isinstance(node, box_classes())


def _map_boxes(root: str, tree: PyTree, function: Callable[[Any], Any], method: str) -> PyTree:
    mapped: list[Any] = []
    for path, box in _boxes(root, tree):
        try:
            mapped.append(function(box))
        except Exception as error:
            raise Fault(
                LayerError,
                f"{{call}}: `{type(box).__name__}.{method}` failed for {path}. {type(error).__name__}: {error}",
                "The method receives 0, the axis of the layers, and `{'partition_name': layer_axis_name}`. Fix the "
                "method, or take the arrays out of their boxes, `flax.core.meta.unbox(layer)`.",
                cause=error,
            ) from None
    rest = iter(mapped)
    return jax.tree.map(lambda node: next(rest) if _is_box(node) else node, tree, is_leaf=_is_box) if mapped else tree


def _check_name(name: Any) -> None:
    flax = 'It is the name of the axis of the layers in flax\'s metadata, for example `layer_axis_name="layers"`.'
    expect(name is None or isinstance(name, str), "layer_axis_name", "a string or None", name, flax)


def _refuse_other_names(boxes: list[tuple[str, Any]], name: str) -> None:
    rows = [Row(path, repr(name), repr(names)) for path, box in boxes if (names := _names(box)) and names[0] != name]
    if rows:
        raise Fault(
            LayerError,
            f"{{call}}: the metadata does not call the axis of the layers {name!r}.",
            "Without `layer_axis_name`, the name is read from the metadata. `treescan.stack` and "
            "`treescan.init_layers` write it there, and so does `nnx.vmap` with `transform_metadata`.",
            header=("leaf", "axis of the layers", "names of all axes"),
            rows=rows,
        )
