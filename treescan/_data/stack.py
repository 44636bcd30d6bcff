"""Stacks of layers: pytrees of arrays whose first axis is the layers. How they are made and split, and flax's metadata.

Variables of nnx and boxes of linen name the axes of their array. flax's helpers shard the array by these names.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import PartitionSpec

from .._avals import describe_argument, describe_leaf, dtype_of, exact_int, is_weak, same_type, shape_of, spec_parts
from .._axes import LeafAxes
from .._body.carry import agree, find_differences
from .._checks.arguments import axis_spec, with_axes
from .._errors import Fault, LayerError, Row, expect, expect_int, verb
from .._flax import box_classes, holds, variable_classes
from .._loop.body import under_a_trace
from .._tree import freeze_leaves, is_number, is_static, leaves_with_path, path_str, same_structure, thaw_static
from .._types import Array, ArrayLike, PyTree, TreeDef

_PARTITION_NAME = "partition_name"  # PARTITION_NAME of `flax.nnx` and `flax.core.meta`
_NAMES = ("out_sharding", "sharding_names")  # what a variable calls the names of its axes, now and in flax 0.12.2


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
        if isinstance(box, variable_classes()):
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
    if not holds(stacked, box_classes()):
        return stacked
    nodes = leaves_with_path(root, stacked, is_leaf=_is_box)
    boxes = [(path, node) for path, node in nodes if _is_box(node)]
    whole = [names for _, box in boxes if (names := _names(box)) and len(names) == _rank(box)]
    others = [(path, names) for path, box in boxes if (names := _names(box)) and names[0] != name]
    if name is not None and others:
        raise Fault(
            LayerError,
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


def _remove(box: Any, name: Any) -> Any:
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


def _names(box: Any) -> tuple[Any, ...] | None:
    """The names of the axes in a box; None if it has none."""
    is_variable = isinstance(box, variable_classes())
    metadata: dict[str, Any] = box.get_metadata() if is_variable else {"out_sharding": getattr(box, "names", None)}
    names = next((metadata[key] for key in _NAMES if key in metadata), None)
    return tuple(spec_parts(names)) if isinstance(names, tuple | list | PartitionSpec) else None


def _rank(box: Any) -> int:
    return max((len(shape_of(leaf) or ()) for leaf in jax.tree.leaves(box)), default=0)


def _is_box(node: Any) -> bool:
    return isinstance(node, box_classes())


def _map_boxes(root: str, tree: PyTree, function: Callable[[Any], Any], method: str) -> PyTree:
    def mapped(path: Any, node: Any) -> Any:
        try:
            return function(node) if _is_box(node) else node
        except Exception as error:
            failed = f"`{type(node).__name__}.{method}` failed for {path_str(root, path)}"
            raise Fault(
                LayerError,
                f"{{call}}: {failed}. {type(error).__name__}: {error}",
                "The method receives 0, the axis of the layers, and `{'partition_name': layer_axis_name}`. Fix the "
                "method, or take the arrays out of their boxes, `flax.core.meta.unbox(layer)`.",
                cause=error,
            ) from None

    return jax.tree.map_with_path(mapped, tree, is_leaf=_is_box) if holds(tree, box_classes()) else tree


def _check_name(name: Any) -> None:
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


def is_traced_number(leaf: Any) -> bool:
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
    raise Fault(
        LayerError,
        "{call}: layers of a stack are on different devices.",
        "Every device runs all layers, so it would have to fetch the layers of the other devices. Shard other axes "
        f"instead, or none: `{cure}`.",
        header=("leaf", "axis of the layers", "is"),
        rows=[
            Row(path, f"{axis}, split over {_spec(leaf)[axis]!r}", describe_leaf(leaf)) for path, leaf, axis in split
        ],
    )


def _spec(leaf: Any) -> tuple[Any, ...]:
    """How each axis of a leaf is split."""
    typed = getattr(jax.typeof(leaf), "sharding", None)
    parts = () if typed is None else spec_parts(typed.spec)
    if not any(part is not None for part in parts) and not isinstance(leaf, Tracer):
        parts = spec_parts(getattr(leaf.sharding, "spec", ()))
    return (*parts, *(None,) * (len(leaf.shape) - len(parts)))


Layer = TypeVar("Layer")


@verb
def stack(layers: Iterable[Layer], *, layer_axis_name: str | None = None) -> Layer:
    """Makes a stack from a list of layers: each leaf is stacked along a new first axis.

    Args:
        layers: the layers, n of them: any pytrees of one structure, whose leaves have the same shapes and dtypes.
            Leaves that are not arrays (functions, strings, Python numbers and flags) must be the same in all layers,
            and do not change. Under `jax.jit`, a number that is an argument is an array.
        layer_axis_name: the name of the new axis in the metadata of flax, if leaves have metadata
            (`nnx.with_partitioning`, `nn.with_partitioning`): a stack's names are `(layer_axis_name, *names)`. None
            shards nothing along it.

    Returns:
        The stack, in the layers' own types, with leaves `[n, ...]`. `treescan.scan_layers` runs it, `unstack`
        undoes it.

    Raises:
        ArgumentTypeError: if `layers` is not a sequence, or `layer_axis_name` not a string.
        LayerError: if there are no layers, or some differ; all leaves that differ are listed.

    Examples:
        >>> import jax.numpy as jnp
        >>> import treescan
        >>> stacked = treescan.stack(
        ...     [{"w": jnp.ones((2, 3))}, {"w": jnp.zeros((2, 3))}]
        ... )
        >>> print(stacked["w"].shape)
        (2, 2, 3)
    """
    cure = (
        "Give a list of them, `[first, second, ...]`; a tree whose leaves have the axis of the layers is a stack "
        "already."
    )
    if isinstance(layers, Mapping):
        cure = "If its values are the layers, stack these: `treescan.stack(layers.values())`."
    is_list = isinstance(layers, Iterable) and not isinstance(layers, Mapping | str)
    expect(is_list, "layers", "a sequence of layers", layers, cure)
    listed = list(layers)
    if not listed:
        raise Fault(LayerError, "{verb}: there are no layers.", "Give at least one layer.")
    return add_layer_axis(_stack(listed), layer_axis_name)


@verb
def unstack(stacked: Layer, *, layer_axis_name: str | None = None) -> list[Layer]:
    """Returns the layers of a stack as a list: `unstack(stack(layers))` equals `layers` bitwise.

    NumPy arrays are returned as JAX arrays, and 64-bit types as JAX handles them (`jax_enable_x64`).

    Args:
        stacked: any pytree of arrays whose first axis is the layers, `[n, ...]`.
        layer_axis_name: the name of the layer axis in the metadata of flax, if leaves have metadata. It is removed.
            None reads it from the metadata.

    Returns:
        A list of n trees, in the stack's own types, with leaves `[...]`.

    Raises:
        ArgumentTypeError: if `layer_axis_name` is not a string.
        LayerError: if the leaves have different numbers of layers, or if their metadata names the axis differently.

    Examples:
        >>> import jax.numpy as jnp
        >>> import treescan
        >>> first, second = treescan.unstack({"b": jnp.array([1.0, 2.0])})
        >>> print(second["b"])
        2.0
    """
    frozen = freeze_shared(stacked)
    count_layers(frozen, "stacked")
    layers = split_layers(remove_layer_axis(frozen, "stacked", layer_axis_name))
    return [thaw_static(layer) for layer in layers]


@verb
def layer_at(stacked: Layer, i: ArrayLike, *, layer_axis_name: str | None = None) -> Layer:
    """Takes one layer out of a stack.

    Args:
        stacked: any pytree of arrays whose first axis is the layers, `[n, ...]`.
        i: the number of the layer, from 0 to n - 1, or from -n counted from the end. It may be traced. A traced number
            that is out of range is clamped, as in `jax.lax.dynamic_index_in_dim`.
        layer_axis_name: the name of the layer axis in the metadata of flax, if leaves have metadata. It is removed.
            None reads it from the metadata.

    Returns:
        The layer, in the stack's own types, with leaves `[...]`.

    Raises:
        ArgumentTypeError: if `i` is not an int, or `layer_axis_name` not a string.
        LayerError: if a concrete number is out of range, if the leaves have different numbers of layers, or if their
            metadata names the axis differently.

    Examples:
        >>> import jax.numpy as jnp
        >>> import treescan
        >>> print(treescan.layer_at({"b": jnp.array([1.0, 2.0])}, -1)["b"])
        2.0
    """
    frozen = freeze_shared(stacked)
    number = _check_number(i, count_layers(frozen, "stacked"))
    return thaw_static(_take(remove_layer_axis(frozen, "stacked", layer_axis_name), number))


@verb
def set_layer(stacked: Layer, i: ArrayLike, layer: Layer) -> Layer:
    """Returns a new stack in which one layer is replaced.

    Args:
        stacked: any pytree of arrays whose first axis is the layers, `[n, ...]`. It is not changed.
        i: the number of the layer, as for `layer_at`.
        layer: the new layer: leaves `[...]`, of the stack's structure and types.

    Returns:
        The new stack, with leaves `[n, ...]`.

    Raises:
        LayerError: if the layer does not fit; all leaves that do not fit are listed. Also as `layer_at`.

    Examples:
        >>> import jax.numpy as jnp
        >>> import treescan
        >>> print(
        ...     treescan.set_layer(
        ...         {"b": jnp.array([1.0, 2.0])}, 0, {"b": jnp.array(5.0)}
        ...     )["b"]
        ... )
        [5. 2.]
    """
    frozen = freeze_shared(stacked)
    number = _check_number(i, count_layers(frozen, "stacked"))
    structure: TreeDef = jax.tree.structure(frozen)
    leaves = jax.tree.leaves(_put(remove_layer_axis(frozen, "stacked"), number, layer))
    return thaw_static(jax.tree.unflatten(structure, leaves))


def _in_one_call(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of whole trees as one program; within a trace, a part of the one that is being traced."""
    jitted = jax.jit(function)

    def call(*args: Any) -> Any:
        return function(*args) if under_a_trace() else jitted(*args)

    return call


@_in_one_call
def _stack_arrays(layers: list[list[Any]]) -> list[Array]:
    return [jnp.stack(leaves) for leaves in zip(*layers, strict=True)]


@_in_one_call
def _take_arrays(arrays: list[Any], i: Any) -> list[Array]:
    take = jax.lax.index_in_dim if isinstance(i, int) else jax.lax.dynamic_index_in_dim
    return [leaf if is_traced_number(leaf) else take(jnp.asarray(leaf), i, keepdims=False) for leaf in arrays]


@_in_one_call
def _split_arrays(arrays: list[Any]) -> list[list[Array]]:
    count = next(leaf.shape[0] for leaf in arrays if not is_traced_number(leaf))
    return [_take_arrays(arrays, i) for i in range(count)]


@_in_one_call
def _put_arrays(arrays: list[Any], i: Any, layer: list[Any]) -> list[Array]:
    put = jax.lax.dynamic_update_index_in_dim
    return [
        leaf if is_traced_number(leaf) else put(jnp.asarray(leaf), jnp.asarray(new), i, 0)
        for leaf, new in zip(arrays, layer, strict=True)
    ]


def _stack(layers: list[PyTree]) -> PyTree:
    alike = [numbers_in(layer) for layer in layers if same_structure(layers[0], layer)]
    columns = zip(jax.tree.leaves(layers[0]), *alike, strict=True)
    shared = [is_static(leaf) or all(are_numbers) for leaf, *are_numbers in columns]  # the same in all layers
    rows: list[Row] = []
    for i, layer in enumerate(layers):
        root = f"layers[{i}]"
        rows += [*_differing_types(root, layers[0], layer), *_differing_numbers(root, layers[0], layer, shared)]
    if rows:
        raise Fault(
            LayerError,
            "{verb}: the layers differ, and cannot be one stack.",
            "Layers of one stack have the same structure, shapes and dtypes, and equal static leaves. Keep layers of "
            "several kinds in several stacks: `treescan.scan_layers` takes a sequence of blocks, and a stack for each.",
            *(
                f"{row.leaf}: a Python number or flag must be the same in all layers. If a layer only computes with "
                f"it, make it a leaf that is an array in all of them, `jnp.array({row.came})`: it is then traced, as "
                "weights are. If code branches on it, or makes a shape of it, keep one stack for each value."
                for row in [row for row in rows if row.note.endswith("number")][:1]
            ),
            header=("leaf", "layers[0]", "is"),
            rows=rows,
        )
    structure: TreeDef = jax.tree.structure(freeze_leaves(layers[0], shared))
    columns = zip(shared, *map(jax.tree.leaves, layers), strict=True)
    rest = [leaves for is_shared, *leaves in columns if not is_shared]
    return thaw_static(jax.tree.unflatten(structure, _stack_arrays(list(map(list, zip(*rest, strict=True))))))


def _differing_types(root: str, given: PyTree, layer: PyTree) -> list[Row]:
    return [] if agree(given, layer) else [difference.row for difference in find_differences(root, (), given, layer)]


def _differing_numbers(root: str, given: PyTree, layer: PyTree, shared: list[bool]) -> list[Row]:
    """The Python numbers, among the leaves that are shared, whose values differ. Their types are compared with all."""
    if not same_structure(given, layer):
        return []
    rows: list[Row] = []
    for old, (path, new), is_shared in zip(jax.tree.leaves(given), leaves_with_path(root, layer), shared, strict=True):
        is_same = (type(old), repr(old)) == (type(new), repr(new))  # 1 is not True, NaN is NaN
        if is_shared and is_number(old) and same_type(old, new) and not is_same:
            rows.append(Row(path, repr(old), describe_argument(new), "number"))
    return rows


def split_layers(frozen: PyTree) -> list[PyTree]:
    """The layers of a stack, whose static leaves stay frozen."""
    arrays, structure = jax.tree.flatten(frozen)
    return [jax.tree.unflatten(structure, layer) for layer in _split_arrays(arrays)]


def _take(frozen: PyTree, i: Any) -> PyTree:
    arrays, structure = jax.tree.flatten(frozen)
    return jax.tree.unflatten(structure, _take_arrays(arrays, i))


def _put(frozen: PyTree, i: Any, layer: PyTree) -> PyTree:
    arrays, structure = jax.tree.flatten(frozen)
    own: TreeDef
    new, own = jax.tree.flatten(_frozen_like(frozen, layer))
    types = [[(shape_of(leaf), dtype_of(leaf)) for leaf in leaves] for leaves in (arrays, new)]
    if structure != own or [((shape or ())[1:], dtype) for shape, dtype in types[0]] != types[1]:
        first = thaw_static(jax.eval_shape(lambda tree: _take(tree, 0), frozen))
        numbers = _differing_numbers("layer", first, layer, numbers_in(thaw_static(frozen)))
        rows = [*_differing_types("layer", first, layer), *numbers]
        if rows:  # static leaves without a hash make other structures, and may be equal
            raise Fault(
                LayerError,
                "{verb}: the layer does not fit the stack.",
                "A layer must have the structure, static leaves, Python numbers, dtypes and shapes of the stack, "
                "without the axis of the layers.",
                header=("leaf", "in the stack", "is"),
                rows=rows,
            )
    return jax.tree.unflatten(structure, _put_arrays(arrays, i, new))


def _frozen_like(frozen: PyTree, layer: PyTree) -> PyTree:
    """A layer that is to fit a stack: its Python numbers are shared where those of the stack are."""
    stacked = thaw_static(frozen)
    if not same_structure(stacked, layer):
        return freeze_shared(layer)
    pairs = zip(jax.tree.leaves(layer), numbers_in(stacked), strict=True)
    return freeze_leaves(layer, [is_static(leaf) or (is_shared and is_number(leaf)) for leaf, is_shared in pairs])


def _check_number(i: Any, count: int) -> int | Array:
    """The number of a layer, counted from 0; a traced number is returned unchanged."""
    number = exact_int(i)
    if number is None:
        if isinstance(i, Tracer) and i.shape == () and jnp.issubdtype(i.dtype, jnp.integer):
            return i.astype(jnp.int32)  # a smaller type may not hold the number of layers
        several = (
            "Give one int, or an int array of shape []. For several layers, index the leaves, "
            "`jax.tree.map(lambda leaf: leaf[i], stacked)`."
        )
        return expect_int(i, "i", several, kind="the number of a layer")
    if not -count <= number < count:
        raise Fault(
            LayerError,
            f"{{verb}}: there is no layer {number}: the stack holds {count}.",
            *([f"Layers are numbered from 0 to {count - 1}; negative numbers count from the end."] if count else []),
        )
    return number % count


def count_layers(stacked: PyTree, root: str) -> int:
    """How many layers a stack holds: what every leaf leads with, but for what is frozen, or a traced number.

    Raises:
        Fault: for a `LayerError` if leaves disagree, have no axis, or are of a type that is split along it.
    """
    leaves = leaves_with_path(root, stacked)
    if not leaves:
        raise Fault(
            LayerError,
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
        plain = isinstance(stacked, list | tuple) and not hasattr(stacked, "_fields") and stacked
        if plain and all(same_structure(layer, stacked[0]) for layer in stacked):
            cure = f"If each item of `{root}` is a layer, stack them: `treescan.stack({root})`."
        counts = ["none" if size is None else str(size) for size in sizes]
        rows = [Row(path, count, describe_leaf(leaf)) for (path, leaf), count in zip(leaves, counts, strict=True)]
        raise Fault(
            LayerError,
            f"{{call}}: the leaves of `{root}` do not have the same number of layers on their first axis.",
            cure,
            header=("leaf", "layers", "is"),
            rows=rows,
        )
    refuse_split(leaves, placed=False)
    assert sizes[0] is not None
    return sizes[0]
