"""Stacks of layers: pytrees of arrays whose first axis is the layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.core import Tracer

from .._avals import describe_argument, describe_leaf, describe_traced, dtype_of, exact_int, same_type, shape_of
from .._body.differences import agree, find_differences
from .._errors import ArgumentTypeError, Fault, LayerError, Row, explain, verb
from .._loop.retrace import under_a_trace
from .._tree import freeze_leaves, is_number, is_static, leaves_with_path, same_structure, thaw_static
from .._types import Array, ArrayLike, PyTree, TreeDef
from .boxes import add_layer_axis, remove_layer_axis
from .shared import freeze_shared, is_same_number, is_traced_number, numbers_in
from .split import refuse_split

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
    try:
        listed = _as_list(layers)
        if not listed:
            raise Fault(LayerError, "{verb}: there are no layers.", "Give at least one layer.")
        return add_layer_axis(_stack(listed), layer_axis_name)
    except Exception as error:
        explained = explain(error, "stack")
    raise explained


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
    try:
        frozen = freeze_shared(stacked)
        count_layers(frozen, "stacked")
        layers = split_layers(remove_layer_axis(frozen, "stacked", layer_axis_name))
        return [thaw_static(layer) for layer in layers]
    except Exception as error:
        explained = explain(error, "unstack")
    raise explained


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
    try:
        frozen = freeze_shared(stacked)
        number = _check_number(i, count_layers(frozen, "stacked"))
        return thaw_static(_take(remove_layer_axis(frozen, "stacked", layer_axis_name), number))
    except Exception as error:
        explained = explain(error, "layer_at")
    raise explained


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
    try:
        frozen = freeze_shared(stacked)
        number = _check_number(i, count_layers(frozen, "stacked"))
        structure: TreeDef = jax.tree.structure(frozen)
        leaves = jax.tree.leaves(_put(remove_layer_axis(frozen, "stacked"), number, layer))
        return thaw_static(jax.tree.unflatten(structure, leaves))
    except Exception as error:
        explained = explain(error, "set_layer")
    raise explained


def _as_list(layers: Any) -> list[Any]:
    if isinstance(layers, Iterable) and not isinstance(layers, Mapping | str):
        return list(layers)
    cure = (
        "Give a list of them, `[first, second, ...]`; a tree whose leaves have the axis of the layers is a stack "
        "already."
    )
    if isinstance(layers, Mapping):
        cure = "If its values are the layers, stack these: `treescan.stack(layers.values())`."
    raise Fault(
        ArgumentTypeError, f"{{verb}}: `layers` must be a sequence of layers, got {describe_argument(layers)}.", cure
    )


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
    shared = _shared_leaves(layers)
    numbers = [_differing_numbers(f"layers[{i}]", layers[0], layer, shared) for i, layer in enumerate(layers)]
    rows = [
        row
        for i, layer in enumerate(layers)
        for row in (*_differing_types(f"layers[{i}]", layers[0], layer), *numbers[i])
    ]
    if rows:
        raise Fault(
            LayerError,
            "{verb}: the layers differ, and cannot be one stack.",
            "Layers of one stack have the same structure, shapes and dtypes, and equal static leaves. Keep layers of "
            "several kinds in several stacks: `treescan.scan_layers` takes a sequence of blocks, and a stack for each.",
            *_number_cures([row for rows_of_layer in numbers for row in rows_of_layer]),
            header=("leaf", "layers[0]", "is"),
            rows=rows,
        )
    structure: TreeDef = jax.tree.structure(freeze_leaves(layers[0], shared))
    columns = zip(shared, *map(jax.tree.leaves, layers), strict=True)
    rest = [leaves for is_shared, *leaves in columns if not is_shared]
    return thaw_static(jax.tree.unflatten(structure, _stack_arrays(list(map(list, zip(*rest, strict=True))))))


def _shared_leaves(layers: list[PyTree]) -> list[bool]:
    """For each leaf of the first layer whether all share it: no array, or in every layer a Python number."""
    alike = [numbers_in(layer) for layer in layers if same_structure(layers[0], layer)]
    columns = zip(*alike, strict=True)
    return [is_static(leaf) or all(column) for leaf, column in zip(jax.tree.leaves(layers[0]), columns, strict=True)]


def _differing_types(root: str, given: PyTree, layer: PyTree) -> list[Row]:
    return [] if agree(given, layer) else [difference.row for difference in find_differences(root, (), given, layer)]


def _differing_numbers(root: str, given: PyTree, layer: PyTree, shared: list[bool]) -> list[Row]:
    """The Python numbers, among the leaves that are shared, whose values differ. Their types are compared with all."""
    if not same_structure(given, layer):
        return []
    triples = zip(jax.tree.leaves(given), leaves_with_path(root, layer), shared, strict=True)
    pairs = [(old, path, new) for old, (path, new), is_shared in triples if is_shared and is_number(old)]
    return [
        Row(path, repr(old), describe_argument(new), "number")
        for old, path, new in pairs
        if same_type(old, new) and not is_same_number(old, new)
    ]


def _number_cures(rows: list[Row]) -> list[str]:
    """The advice for a number that differs between layers."""
    if not rows:
        return []
    row = rows[0]
    return [
        f"{row.leaf}: a Python number or flag must be the same in all layers. If it differs, make it an array in "
        f"all of them, `jnp.array({row.came})`: it is then traced, as weights are."
    ]


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
    if structure != own or any(not _fits(leaf, one) for leaf, one in zip(arrays, new, strict=True)):
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
    return freeze_leaves(
        layer,
        [
            is_static(leaf) or (is_shared and is_number(leaf))
            for leaf, is_shared in zip(jax.tree.leaves(layer), numbers_in(stacked), strict=True)
        ],
    )


def _fits(leaf: Any, one: Any) -> bool:
    """Whether one layer's leaf has the type of a stacked leaf's slices; of what is shared, of the leaf itself."""
    return (shape_of(leaf) or ())[1:] == shape_of(one) and dtype_of(leaf) == dtype_of(one)


def _check_number(i: Any, count: int) -> int | Array:
    """The number of a layer, counted from 0; a traced number is returned unchanged."""
    number = exact_int(i)
    if number is None:
        if isinstance(i, Tracer) and i.shape == () and jnp.issubdtype(i.dtype, jnp.integer):
            return i.astype(jnp.int32)  # a smaller type may not hold the number of layers
        raise Fault(
            ArgumentTypeError,
            f"{{verb}}: `i` must be the number of a layer, got {describe_traced(i)}.",
            "Give one int, or an int array of shape []. For several layers, index the leaves, "
            "`jax.tree.map(lambda leaf: leaf[i], stacked)`.",
        )
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
        rows = [
            Row(path, "none" if size is None else str(size), describe_leaf(leaf), "")
            for (path, leaf), size in zip(leaves, sizes, strict=True)
        ]
        raise Fault(
            LayerError,
            f"{{call}}: the leaves of `{root}` do not have the same number of layers on their first axis.",
            _list_cure(root, stacked)
            or "The first axis of all arrays in a stack is the layers. If all layers share a number, make it a "
            "Python number, or keep it out of the stack.",
            header=("leaf", "layers", "is"),
            rows=rows,
        )
    refuse_split(leaves, placed=False)
    assert sizes[0] is not None
    return sizes[0]


def _list_cure(root: str, tree: PyTree) -> str | None:
    """The advice for a plain sequence of trees that look like layers."""
    if not isinstance(tree, list | tuple) or hasattr(tree, "_fields") or not tree:
        return None
    if len({str(jax.tree.structure(layer)) for layer in tree}) > 1:
        return None
    return f"If each item of `{root}` is a layer, stack them: `treescan.stack({root})`."
