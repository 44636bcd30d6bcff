"""Stacks of layers: pytrees whose arrays lead with the layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.core import Tracer

from .._avals import describe_argument, describe_leaf, describe_traced, dtype_of, exact_int, shape_of, spec_parts
from .._axes import LeafAxes
from .._body.differences import agree, find_differences
from .._errors import ArgumentTypeError, Fault, LayerError, Row, explain, verb
from .._loop.retrace import under_a_trace
from .._tree import freeze_static, is_static, leaves_with_path, thaw_static
from .._types import Array, ArrayLike, PyTree, TreeDef

Layer = TypeVar("Layer")


@verb
def stack(layers: Iterable[Layer]) -> Layer:
    """Makes one tree of many alike: each leaf is the layers' leaves, stacked along a new first axis.

    Args:
        layers: the layers, n of them: any pytrees of one structure, whose leaves have the same shapes and dtypes.
            Leaves that are no arrays (functions, strings) are the same in all layers, and stay.

    Returns:
        The stack, in the layers' own types, with leaves `[n, ...]`. `treescan.scan_layers` runs it, `unstack`
        undoes it.

    Raises:
        LayerError: if there are no layers, or some differ; all leaves that do are listed.

    Examples:
        >>> import jax.numpy as jnp
        >>> import treescan
        >>> stacked = treescan.stack([{"w": jnp.ones((2, 3))}, {"w": jnp.zeros((2, 3))}])
        >>> print(stacked["w"].shape)
        (2, 2, 3)
    """
    try:
        listed = _as_list(layers)
        if not listed:
            raise Fault(LayerError, "{verb}: there are no layers.", "Give at least one: the others are held to it.")
        return _stack(listed)
    except Exception as error:
        explained = explain(error, "stack")
    raise explained


@verb
def unstack(stacked: Layer) -> list[Layer]:
    """The layers of a stack: `unstack(stack(layers))` is equal to `layers`, bit by bit.

    What is given as NumPy arrays comes back as JAX arrays, 64-bit ones in the types that JAX has for them
    (`jax_enable_x64`).

    Args:
        stacked: any pytree whose arrays lead with the layers: leaves `[n, ...]`.

    Returns:
        A list of n trees, in the stack's own types, with leaves `[...]`.

    Raises:
        LayerError: if the leaves do not lead with one number of layers.

    Examples:
        >>> import jax.numpy as jnp
        >>> import treescan
        >>> first, second = treescan.unstack({"b": jnp.array([1.0, 2.0])})
        >>> print(second["b"])
        2.0
    """
    try:
        frozen = freeze_static(stacked)
        count_layers(frozen, "stacked")
        return [thaw_static(layer) for layer in split_layers(frozen)]
    except Exception as error:
        explained = explain(error, "unstack")
    raise explained


@verb
def layer_at(stacked: Layer, i: ArrayLike) -> Layer:
    """One layer of a stack.

    Args:
        stacked: any pytree whose arrays lead with the layers: leaves `[n, ...]`.
        i: which, from 0 to n - 1, or from -n counted from the end; traced too. A traced number that is out of range is
            moved to the nearest that is not, as in `jax.lax.dynamic_index_in_dim`.

    Returns:
        The layer, in the stack's own types, with leaves `[...]`.

    Raises:
        LayerError: if a concrete number is out of range, or the leaves do not lead with one number of layers.

    Examples:
        >>> import jax.numpy as jnp
        >>> import treescan
        >>> print(treescan.layer_at({"b": jnp.array([1.0, 2.0])}, -1)["b"])
        2.0
    """
    try:
        frozen = freeze_static(stacked)
        return thaw_static(_take(frozen, _check_number(i, count_layers(frozen, "stacked"))))
    except Exception as error:
        explained = explain(error, "layer_at")
    raise explained


@verb
def set_layer(stacked: Layer, i: ArrayLike, layer: Layer) -> Layer:
    """A stack with another layer in the place of one.

    Args:
        stacked: any pytree whose arrays lead with the layers: leaves `[n, ...]`. It is not changed.
        i: which to replace, as for `layer_at`.
        layer: the new layer: leaves `[...]`, of the stack's structure and types.

    Returns:
        The new stack, with leaves `[n, ...]`.

    Raises:
        LayerError: if the layer does not fit; all leaves that do not are listed. Else as `layer_at`.

    Examples:
        >>> import jax.numpy as jnp
        >>> import treescan
        >>> print(treescan.set_layer({"b": jnp.array([1.0, 2.0])}, 0, {"b": jnp.array(5.0)})["b"])
        [5. 2.]
    """
    try:
        frozen = freeze_static(stacked)
        number = _check_number(i, count_layers(frozen, "stacked"))
        return thaw_static(_put(frozen, number, freeze_static(layer)))
    except Exception as error:
        explained = explain(error, "set_layer")
    raise explained


def _as_list(layers: Any) -> list[Any]:
    if isinstance(layers, Iterable) and not isinstance(layers, Mapping | str):
        return list(layers)
    cure = "Give a list of them, `[first, second, ...]`; what has the axis of the layers already is a stack."
    if isinstance(layers, Mapping):
        cure = "If its values are the layers, stack these: `treescan.stack(layers.values())`."
    raise Fault(
        ArgumentTypeError, f"{{verb}}: `layers` is a sequence of layers, got {describe_argument(layers)}.", cure
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
    return [take(jnp.asarray(leaf), i, keepdims=False) for leaf in arrays]


@_in_one_call
def _split_arrays(arrays: list[Any]) -> list[list[Array]]:
    return [_take_arrays(arrays, i) for i in range(arrays[0].shape[0])]


@_in_one_call
def _put_arrays(arrays: list[Any], i: Any, layer: list[Any]) -> list[Array]:
    put = jax.lax.dynamic_update_index_in_dim
    return [put(jnp.asarray(leaf), jnp.asarray(new), i, 0) for leaf, new in zip(arrays, layer, strict=True)]


def _stack(layers: list[PyTree]) -> PyTree:
    rows = [
        difference.row
        for i, layer in enumerate(layers)
        if not agree(layers[0], layer)
        for difference in find_differences(f"layers[{i}]", (), layers[0], layer)
    ]
    if rows:
        raise Fault(
            LayerError,
            "{verb}: the layers differ, and cannot be one stack.",
            "Layers of one stack have the same structure, shapes and dtypes, and equal static leaves. Keep layers of "
            "several kinds in several stacks: `treescan.scan_layers` takes a sequence of blocks, with a stack each.",
            header=("leaf", "layers[0]", "is"),
            rows=rows,
        )
    structure: TreeDef = jax.tree.structure(freeze_static(layers[0]))
    stacked = _stack_arrays([[leaf for leaf in jax.tree.leaves(layer) if not is_static(leaf)] for layer in layers])
    return thaw_static(jax.tree.unflatten(structure, stacked))


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
    new, own = jax.tree.flatten(layer)
    if structure != own or any(not _fits(leaf, one) for leaf, one in zip(arrays, new, strict=True)):
        first = jax.eval_shape(lambda tree: _take(tree, 0), frozen)
        differences = list(find_differences("layer", (), thaw_static(first), thaw_static(layer)))
        if differences:  # static leaves without a hash make other structures, and may be equal
            raise Fault(
                LayerError,
                "{verb}: the layer does not fit the stack.",
                "A layer has the stack's structure, static leaves, dtypes and shapes, less the axis of the layers.",
                header=("leaf", "in the stack", "is"),
                rows=[difference.row for difference in differences],
            )
    return jax.tree.unflatten(structure, _put_arrays(arrays, i, new))


def _fits(leaf: Any, one: Any) -> bool:
    """Whether one layer's leaf has the type of a stacked leaf's slices."""
    return (shape_of(leaf) or ())[1:] == shape_of(one) and dtype_of(leaf) == dtype_of(one)


def _check_number(i: Any, count: int) -> int | Array:
    """The number of a layer, from 0 up; one that is traced as it is."""
    number = exact_int(i)
    if number is None:
        if isinstance(i, Tracer) and i.shape == () and jnp.issubdtype(i.dtype, jnp.integer):
            return i.astype(jnp.int32)  # a smaller type may not hold the number of layers
        raise Fault(
            ArgumentTypeError,
            f"{{verb}}: `i` is the number of a layer, got {describe_traced(i)}.",
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
    """How many layers a stack without static leaves holds: what every leaf leads with.

    Raises:
        Fault: for a `LayerError` if leaves disagree, have no axis, or are of a type that is split along it.
    """
    leaves = leaves_with_path(root, stacked)
    if not leaves:
        raise Fault(
            LayerError,
            f"{{call}}: how many layers? `{root}` holds no arrays.",
            "A stack is a pytree whose arrays lead with the layers: `treescan.stack` makes one of a list of layers.",
        )
    sizes = [(shape_of(leaf) or (None,))[0] for _, leaf in leaves]
    if None in sizes or len(set(sizes)) > 1:
        rows = [
            Row(path, "none" if size is None else str(size), describe_leaf(leaf), "")
            for (path, leaf), size in zip(leaves, sizes, strict=True)
        ]
        raise Fault(
            LayerError,
            f"{{call}}: the leaves of `{root}` do not lead with one number of layers.",
            _list_cure(root, stacked)
            or "All leaves of a stack lead with the layers; what is the same for all layers is no part of it.",
            header=("leaf", "layers", "is"),
            rows=rows,
        )
    refuse_split(leaves, placed=False)
    assert sizes[0] is not None
    return sizes[0]


def _list_cure(root: str, tree: PyTree) -> str | None:
    """What to say of a plain sequence of trees that look like layers."""
    if not isinstance(tree, list | tuple) or hasattr(tree, "_fields") or not tree:
        return None
    if len({str(jax.tree.structure(layer)) for layer in tree}) > 1:
        return None
    return f"If each item of `{root}` is a layer, stack them: `treescan.stack({root})`."


def refuse_split(leaves: list[tuple[str, Any]], axes: LeafAxes | None = None, *, placed: bool = True) -> None:
    """Refuses leaves whose layers lie on different devices, as far as that is known before a program is compiled.

    Args:
        leaves: the leaves of a stack, each with its path.
        axes: the axis of the layers in each; None: the first in all.
        placed: whether arrays count that are only placed so, where their types do not say it.
    """
    of_each = zip(leaves, axes or (0,) * len(leaves), strict=True)
    split = [
        (path, leaf, axis)
        for (path, leaf), axis in of_each
        if axis is not None and (_typed_part(leaf, axis) is not None or (placed and _is_split(leaf, axis)))
    ]
    if not split:
        return
    path, leaf, axis = split[0]
    parts = ["None" if i == axis else repr(part) for i, part in enumerate(_spec(leaf))]
    spec = f"jax.sharding.PartitionSpec({', '.join(parts)})"
    cure = f"jax.device_put({path}, jax.sharding.NamedSharding(mesh, {spec}))"
    if _typed_part(leaf, axis) is not None:
        cure = f"jax.sharding.reshard({path}, {spec})"
    raise Fault(
        LayerError,
        "{call}: layers of a stack lie on different devices.",
        "A layer is needed whole: each device would have to fetch those of the others. Shard other axes instead, or "
        f"none: `{cure}`.",
        header=("leaf", "axis of the layers", "is"),
        rows=[
            Row(path, f"{axis}, split over {_spec(leaf)[axis]!r}", describe_leaf(leaf), "")
            for path, leaf, axis in split
        ],
    )


def _is_split(leaf: Any, axis: int) -> bool:
    if not isinstance(leaf, jax.Array) or isinstance(leaf, Tracer) or not leaf.size:
        return False
    return bool(leaf.sharding.shard_shape(leaf.shape)[axis] != leaf.shape[axis])


def _typed_part(leaf: Any, axis: int) -> Any:
    """What splits an axis, where shardings are a part of the type."""
    sharding = getattr(jax.typeof(leaf), "sharding", None)
    parts = () if sharding is None else spec_parts(sharding.spec)
    return parts[axis] if axis < len(parts) else None


def _spec(leaf: Any) -> tuple[Any, ...]:
    """How each axis of a leaf is split."""
    typed = getattr(jax.typeof(leaf), "sharding", None)
    parts = () if typed is None else spec_parts(typed.spec)
    if not any(part is not None for part in parts) and not isinstance(leaf, Tracer):
        parts = spec_parts(getattr(leaf.sharding, "spec", ()))
    return (*parts, *(None,) * (len(leaf.shape) - len(parts)))
