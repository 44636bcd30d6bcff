"""What a stack of layers is: arrays whose first axis is the layers, numbers that all share, and flax's metadata."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import PartitionSpec

from .._arguments import axis_spec, with_axes
from .._avals import Array, AxisSpec, LeafAxes, PyTree, describe_leaf, dtype_of, is_weak, shape_of, spec_parts
from .._errors import LayerFault, Row, expect
from .._flax import box_classes, holds, variable_classes
from .._tree import KeyPath, freeze_leaves, is_number, is_static, leaves_with_path, path_str, same_structure

_PARTITION_NAME = "partition_name"  # PARTITION_NAME of `flax.nnx` and `flax.core.meta`
_NAMES = ("out_sharding", "sharding_names")  # what a variable calls the names of its axes, now and in flax 0.12.2


def add_layer_axis(stacked: PyTree, name: str | None) -> PyTree:
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
        if isinstance(box, variable_classes()):
            return sys.modules["flax.nnx"].spmd.add_axis(_copy(box), 0, params)
        return box.add_axis(0, params)

    return _map_boxes("layer", stacked, add, "add_axis")


def remove_layer_axis(stacked: PyTree, root: str, name: str | None = None) -> PyTree:
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
    if not holds(stacked, box_classes()):
        return stacked
    nodes = leaves_with_path(root, stacked, is_leaf=_is_box)
    boxes = [(path, node) for path, node in nodes if _is_box(node)]
    whole = [names for _, box in boxes if (names := _names(box)) and len(names) == _rank(box)]
    others = [(path, names) for path, box in boxes if (names := _names(box)) and names[0] != name]
    if name is not None and others:
        raise LayerFault(
            f"{{call}}: the metadata does not call the axis of the layers {name!r}.",
            "Without `layer_axis_name`, the name is read from the metadata. `treescan.stack` and "
            "`treescan.init_layers` write it there, and so does `nnx.vmap` with `transform_metadata`.",
            header=("leaf", "axis of the layers", "names of all axes"),
            rows=[Row(path, repr(name), repr(names)) for path, names in others],
        )
    axis = whole[0][0] if whole else name

    def remove(box: Any) -> Any:
        names = _names(box)
        if names is None:
            return _remove(box, axis)
        is_short = 0 < len(names) < _rank(box) and (whole or name is not None) and names[0] == axis
        return _remove(box, names[0]) if is_short or len(names) == _rank(box) else box

    return _map_boxes(root, stacked, remove, "remove_axis")


def _remove(box: Any, name: AxisSpec) -> Any:
    if not isinstance(box, variable_classes()):
        return box.remove_axis(0, {_PARTITION_NAME: name})
    copy = _copy(box)
    if _names(box) is None:
        copy.remove_axis(0, name)  # hooks, if it has any
        return copy
    return sys.modules["flax.nnx"].spmd.remove_axis(copy, 0, {_PARTITION_NAME: name})


def _copy(box: Any) -> Any:
    """Another variable with the same array, whose metadata may be changed."""
    return jax.tree.map(lambda leaf: leaf, box)


def _names(box: Any) -> tuple[AxisSpec, ...] | None:
    """The names of the axes in a box; None if it has none."""
    is_variable = isinstance(box, variable_classes())
    metadata: dict[str, Any] = box.get_metadata() if is_variable else {"out_sharding": getattr(box, "names", None)}
    names = next((metadata[key] for key in _NAMES if key in metadata), None)
    return tuple(spec_parts(names)) if isinstance(names, tuple | list | PartitionSpec) else None


def _rank(box: PyTree) -> int:
    return max((len(shape_of(leaf) or ()) for leaf in jax.tree.leaves(box)), default=0)


def _is_box(node: object) -> bool:
    return isinstance(node, box_classes())


def _map_boxes(root: str, tree: PyTree, function: Callable[[Any], object], method: str) -> PyTree:
    def mapped(path: KeyPath, node: PyTree) -> PyTree:
        try:
            return function(node) if _is_box(node) else node
        except Exception as error:
            failed = f"`{type(node).__name__}.{method}` failed for {path_str(root, path)}"
            raise LayerFault(
                f"{{call}}: {failed}. {type(error).__name__}: {error}",
                "The method receives 0, the axis of the layers, and `{'partition_name': layer_axis_name}`. Fix the "
                "method, or take the arrays out of their boxes, `flax.core.meta.unbox(layer)`.",
                cause=error,
            ) from None

    return jax.tree.map_with_path(mapped, tree, is_leaf=_is_box) if holds(tree, box_classes()) else tree


def _check_name(name: object) -> None:
    flax = 'It is the name of the axis of the layers in flax\'s metadata, for example `layer_axis_name="layers"`.'
    expect(name is None or isinstance(name, str), "layer_axis_name", "a string or None", name, flax)


def freeze_shared(tree: PyTree) -> PyTree:
    """Replaces what all layers share by nodes that hold it; a tree without any comes back unchanged."""
    pairs = zip(jax.tree.leaves(tree), numbers_in(tree), strict=True)
    return freeze_leaves(tree, [shared or is_static(leaf) for leaf, shared in pairs])


def numbers_in(tree: PyTree) -> list[bool]:
    """For each leaf whether it is a plain Python number; in a variable of flax one is an array."""
    boxes = box_classes()
    if not holds(tree, boxes):
        return [is_number(leaf) for leaf in jax.tree.leaves(tree)]
    parts = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, boxes))
    numbers: list[bool] = []
    for part in parts:
        numbers += [False] * len(jax.tree.leaves(part)) if isinstance(part, boxes) else [is_number(part)]
    return numbers


def is_traced_number(leaf: object) -> bool:
    """Whether a leaf is what JAX makes of a Python number that it traces: a scalar with a weak type, or a flag."""
    if getattr(leaf, "ndim", 0):  # faster than to ask JAX for the type
        return False
    return shape_of(leaf) == () and (is_weak(leaf) or dtype_of(leaf) == np.bool_)


def refuse_split(leaves: list[tuple[str, Any]], axes: LeafAxes | None = None, *, placed: bool = True) -> None:
    """Refuses leaves whose layers lie on different devices, as far as that is known before a program is compiled.

    Args:
        leaves: the leaves of a stack, each with its path.
        axes: the axis of the layers in each; None: the first in all.
        placed: whether arrays count that are only placed so, where their types do not say it.
    """

    def is_split(leaf: Any, axis: int) -> bool:
        if axis_spec(leaf, axis) is not None:
            return True
        concrete = placed and isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and leaf.size
        return bool(concrete and leaf.sharding.shard_shape(leaf.shape)[axis] != leaf.shape[axis])

    split = [(path, leaf, axis) for path, leaf, axis in with_axes(leaves, axes) if is_split(leaf, axis)]
    if not split:
        return
    path, leaf, axis = split[0]
    parts = ["None" if i == axis else repr(part) for i, part in enumerate(_spec(leaf))]
    spec = f"jax.P({', '.join(parts)})"
    cure = f"jax.device_put({path}, jax.NamedSharding(mesh, {spec}))"
    if axis_spec(leaf, axis) is not None:
        cure = f"jax.sharding.reshard({path}, {spec})"
    raise LayerFault(
        "{call}: layers of a stack are on different devices.",
        "Every device runs all layers, so it would have to fetch the layers of the other devices. Shard other axes "
        f"instead, or none: `{cure}`.",
        "If each device is to run its own layers, on another part of the batch: call `treescan.pipeline`.",
        header=("leaf", "axis of the layers", "is"),
        rows=[
            Row(path, f"{axis}, split over {_spec(leaf)[axis]!r}", describe_leaf(leaf)) for path, leaf, axis in split
        ],
    )


def _spec(leaf: Array) -> tuple[AxisSpec, ...]:
    """How each axis of a leaf is split."""
    typed = getattr(jax.typeof(leaf), "sharding", None)
    parts = () if typed is None else spec_parts(typed.spec)
    if not any(part is not None for part in parts) and not isinstance(leaf, Tracer):
        parts = spec_parts(getattr(leaf.sharding, "spec", ()))
    return (*parts, *(None,) * (len(leaf.shape) - len(parts)))


def count_layers(stacked: PyTree, root: str) -> int:
    """How many layers a stack holds: what every leaf leads with, but for what is frozen, or a traced number.

    Raises:
        Fault: for a `LayerError` if leaves disagree, have no axis, or are of a type that is split along it.
    """
    leaves = leaves_with_path(root, stacked)
    if not leaves:
        raise LayerFault(
            f"{{call}}: the number of layers is unknown. `{root}` holds no arrays.",
            "A stack is a pytree of arrays whose first axis is the layers: `treescan.stack` makes one of a list of "
            "layers.",
        )
    leaves = [(path, leaf) for path, leaf in leaves if not is_traced_number(leaf)] or leaves
    sizes = [(shape_of(leaf) or (None,))[0] for _, leaf in leaves]
    if None in sizes or len(set(sizes)) > 1:
        cure = (
            "The first axis of all arrays in a stack is the layers. If all layers share a number, make it a Python "
            "number, or keep it out of the stack."
        )
        if root == "layers" and not any(sizes):
            cure += " If this is x: it comes before the layers."
        plain = isinstance(stacked, list | tuple) and not hasattr(stacked, "_fields") and stacked
        if plain and all(same_structure(layer, stacked[0]) for layer in stacked):
            cure = f"If each item of `{root}` is a layer, stack them: `treescan.stack({root})`."
        counts = ["none" if size is None else str(size) for size in sizes]
        rows = [Row(path, count, describe_leaf(leaf)) for (path, leaf), count in zip(leaves, counts, strict=True)]
        raise LayerFault(
            f"{{call}}: the leaves of `{root}` do not have the same number of layers on their first axis.",
            cure,
            header=("leaf", "layers", "is"),
            rows=rows,
        )
    refuse_split(leaves, placed=False)
    assert sizes[0] is not None
    return sizes[0]
