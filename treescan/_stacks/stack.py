"""Stacks of layers: how they are initialized, made of layers, and taken apart."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ParamSpec, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from .._arguments import check_key
from .._avals import (
    Array,
    ArrayLike,
    PyTree,
    TreeDef,
    describe_argument,
    describe_leaf,
    dtype_of,
    exact_int,
    same_type,
    shape_of,
    spec_parts,
    types_of,
)
from .._body.call import names_of
from .._body.carry import agree, find_differences
from .._body.registered import refuse_unregistered
from .._body.traced import rename
from .._errors import BodyFault, LayerError, LayerFault, Row, TypeMisuse, expect, expect_int, noted, speaking_of, verb
from .._loop.loop import Body, is_jit_disabled, under_a_trace
from .._loop.replaced import own_scan
from .._transforms.axes import spread_prefix
from .._tree import (
    Prefix,
    are_same,
    freeze_leaves,
    freeze_static,
    is_number,
    is_static,
    leaves_with_path,
    same_structure,
    thaw_static,
)
from .layer_axis import (
    add_layer_axis,
    count_layers,
    freeze_shared,
    is_traced_number,
    numbers_in,
    remove_layer_axis,
)

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
    is_list = isinstance(layers, Iterable) and not isinstance(layers, Mapping | str) and not hasattr(layers, "_fields")
    expect(is_list, "layers", "a sequence of layers", layers, cure)
    listed = list(layers)
    if not listed:
        raise LayerFault("{verb}: there are no layers.", "Give at least one layer.")
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
    leaves = _put(remove_layer_axis(frozen, "stacked"), number, layer)
    return thaw_static(jax.tree.unflatten(structure, leaves))


_P = ParamSpec("_P")
_T = TypeVar("_T")


def _in_one_call(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """A function of whole trees as one program; within a trace, a part of the one that is being traced."""
    jitted = jax.jit(function)

    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        return function(*args, **kwargs) if under_a_trace() else jitted(*args, **kwargs)

    return call


@_in_one_call
def _stack_arrays(layers: list[list[Array]]) -> list[Array]:
    return [jnp.stack(leaves) for leaves in zip(*layers, strict=True)]


@_in_one_call
def _take_arrays(arrays: list[Array], i: int | Array) -> list[Array]:
    take: Callable[..., Array] = jax.lax.index_in_dim if isinstance(i, int) else jax.lax.dynamic_index_in_dim
    return [leaf if is_traced_number(leaf) else take(jnp.asarray(leaf), i, keepdims=False) for leaf in arrays]


@_in_one_call
def _split_arrays(arrays: list[Array]) -> list[list[Array]]:
    count = next(leaf.shape[0] for leaf in arrays if not is_traced_number(leaf))
    return [_take_arrays(arrays, i) for i in range(count)]


@_in_one_call
def _put_arrays(arrays: list[Array], i: int | Array, layer: list[Array]) -> list[Array]:
    put = jax.lax.dynamic_update_index_in_dim
    return [
        leaf if is_traced_number(leaf) else put(jnp.asarray(leaf), jnp.asarray(new), i, 0)
        for leaf, new in zip(arrays, layer, strict=True)
    ]


def _stack(layers: list[PyTree]) -> PyTree:
    refuse_unregistered({f"layers[{i}]": layer for i, layer in enumerate(layers)}, LayerFault)
    alike = [numbers_in(layer) for layer in layers if same_structure(layers[0], layer)]
    columns = zip(jax.tree.leaves(layers[0]), *alike, strict=True)
    shared = [is_static(leaf) or all(are_numbers) for leaf, *are_numbers in columns]  # the same in all layers
    rows: list[Row] = []
    for i, layer in enumerate(layers):
        rows += _differences(f"layers[{i}]", layers[0], layer, shared)
    if rows:
        raise LayerFault(
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


def _differences(root: str, given: PyTree, layer: PyTree, shared: list[bool]) -> list[Row]:
    """Where a layer has another type, or another value of a Python number, among the leaves that are shared."""
    rows = [] if agree(given, layer) else [difference.row for difference in find_differences(root, (), given, layer)]
    if not same_structure(given, layer):
        return rows
    for old, (path, new), is_shared in zip(jax.tree.leaves(given), leaves_with_path(root, layer), shared, strict=True):
        if is_shared and is_number(old) and same_type(old, new) and not are_same(old, new):
            rows.append(Row(path, repr(old), describe_argument(new), "number"))
    return rows


def split_layers(frozen: PyTree) -> list[PyTree]:
    """The layers of a stack, whose static leaves stay frozen."""
    arrays, structure = jax.tree.flatten(frozen)
    return [jax.tree.unflatten(structure, layer) for layer in _split_arrays(arrays)]


def _take(frozen: PyTree, i: int | Array) -> PyTree:
    arrays, structure = jax.tree.flatten(frozen)
    return jax.tree.unflatten(structure, _take_arrays(arrays, i))


def _put(frozen: PyTree, i: int | Array, layer: PyTree) -> list[Array]:
    """The arrays of a stack with those of a layer in their places."""
    stacked = thaw_static(frozen)
    if same_structure(stacked, layer):  # its Python numbers are shared where those of the stack are
        pairs = zip(jax.tree.leaves(layer), numbers_in(stacked), strict=True)
        given = freeze_leaves(layer, [is_static(leaf) or (is_shared and is_number(leaf)) for leaf, is_shared in pairs])
    else:
        given = freeze_shared(layer)
    arrays, structure = jax.tree.flatten(frozen)
    own: TreeDef
    new, own = jax.tree.flatten(given)
    types = [[(shape_of(leaf), dtype_of(leaf)) for leaf in leaves] for leaves in (arrays, new)]
    if structure != own or [((shape or ())[1:], dtype) for shape, dtype in types[0]] != types[1]:
        first = thaw_static(types_of(lambda tree: _take(tree, 0), frozen))
        rows = _differences("layer", first, layer, numbers_in(stacked))
        if rows:  # static leaves without a hash make other structures, and may be equal
            raise LayerFault(
                "{verb}: the layer does not fit the stack.",
                "A layer must have the structure, static leaves, Python numbers, dtypes and shapes of the stack, "
                "without the axis of the layers.",
                header=("leaf", "in the stack", "is"),
                rows=rows,
            )
    return _put_arrays(arrays, i, new)


def _check_number(i: Any, count: int) -> int | Array:
    """The number of a layer, counted from 0; a traced number is returned unchanged."""
    number = exact_int(i)
    if number is None:
        if isinstance(i, Tracer) and i.shape == () and jnp.issubdtype(i.dtype, jnp.integer):
            # A smaller type may not hold the number of layers; a larger one would wrap.
            return i.astype(jnp.int32) if i.dtype.itemsize < 4 else i
        several = (
            "Give one int, or an int array of shape []. For several layers, index the leaves, "
            "`jax.tree.map(lambda leaf: leaf[i], stacked)`."
        )
        return expect_int(i, "i", several, kind="the number of a layer")
    if not -count <= number < count:
        raise LayerFault(
            f"{{verb}}: there is no layer {number}: the stack holds {count}.",
            *([f"Layers are numbered from 0 to {count - 1}; negative numbers count from the end."] if count else []),
        )
    return number % count


_Place: TypeAlias = NamedSharding | PartitionSpec | None
"""How an array is split over devices; None: as JAX chooses."""


def _is_place(node: object) -> bool:
    return node is None or isinstance(node, jax.sharding.Sharding | PartitionSpec)


def spec_of(place: _Place) -> PartitionSpec:
    """How a sharding splits the axes of an array."""
    if place is None:
        return PartitionSpec()
    return place.spec if isinstance(place, NamedSharding) else place


def stacked_shardings(layer: PyTree, shardings: PyTree) -> Prefix:
    """The shardings of the stack's leaves, from those of a layer's.

    Args:
        layer: one layer, or its types.
        shardings: a prefix tree of it.

    Raises:
        Fault: for a `LayerError` that lists all the leaves that cannot be sharded so.
    """
    one = "Give one sharding for all leaves, or a prefix tree of a layer with shardings. None lets JAX choose."
    places = spread_prefix("`shardings`", shardings, layer, "layer", one, whole="a layer", error=LayerError)
    named = zip(leaves_with_path("layer", layer), places, strict=True)
    rows = [
        Row(path, str(getattr(place, "spec", place)), describe_leaf(leaf), why)
        for (path, leaf), place in named
        if (why := _misfit(leaf, place))
    ]
    if rows:
        raise LayerFault(
            "{call}: leaves of a layer cannot be sharded as `shardings` says.",
            "A sharding describes one layer, without the axis of the layers. A PartitionSpec needs `jax.set_mesh`, "
            "and a mesh axis must divide the axis that it shards.",
            header=("leaf", "sharding", "is"),
            rows=rows,
        )
    return Prefix(tuple(map(_stacked, places)), jax.tree.structure(layer))


def _misfit(leaf: Array | jax.ShapeDtypeStruct, place: Any) -> str:
    """Why a leaf cannot be sharded so; nothing if it can."""
    if place is None:
        return ""
    if not _is_place(place) or (isinstance(place, jax.sharding.Sharding) and not isinstance(place, NamedSharding)):
        return f"no NamedSharding: {describe_argument(place)}"
    if len(spec_parts(spec_of(place))) > len(leaf.shape):
        return f"rank {len(leaf.shape)}"
    mesh = jax.sharding.get_abstract_mesh()
    if isinstance(place, PartitionSpec) and mesh.empty:
        return "no mesh is set"
    try:
        sharding = place if isinstance(place, NamedSharding) else NamedSharding(mesh, place)
        sharding.shard_shape(leaf.shape)
    except ValueError as error:
        return "does not divide" if "divi" in str(error) else "no such axis of the mesh"
    return ""


def _stacked(place: _Place) -> _Place:
    if place is None:
        return None
    spec = PartitionSpec(None, *spec_parts(spec_of(place)))
    return NamedSharding(place.mesh, spec, memory_kind=place.memory_kind) if isinstance(place, NamedSharding) else spec


@verb
def init_layers(
    init: Callable[..., Layer],
    key: Array,
    n: int,
    *args: Any,
    shardings: PyTree = None,
    layer_axis_name: str | None = None,
) -> Layer:
    """Makes a stack of n layers: `stack([init(k, *args) for k in jax.random.split(key, n)])`, as one program.

    `init` is traced once, for any number of layers, and mapped over the keys by `jax.vmap`. Keys other than threefry,
    for example "rbg", draw other numbers under `jax.vmap`, so with these the layers are made in a loop. With
    `shardings`, `init` is traced once more, for its types. Under `jax.eval_shape`, only the types are made.

    Args:
        init: makes one layer, `init(key, *args) -> layer`: any pytree. Leaves that are not arrays, including Python
            numbers and flags, are the same in all layers, and do not change.
        key: a PRNG key. Layer i is made with `jax.random.split(key, n)[i]`.
        n: how many layers, an int from 1 up.
        *args: passed to `init` for each layer. Arguments that are not arrays are part of the program, so sizes can be
            used as sizes.
        shardings: for each leaf of *one* layer (a prefix tree) a `jax.sharding.NamedSharding`, a `PartitionSpec` (if a
            mesh is set) or None. The layer axis is not sharded. Each device makes its own part, and none ever holds the
            whole.
        layer_axis_name: the name of the new axis in the metadata of flax, if leaves have metadata
            (`nnx.with_partitioning`, `nn.with_partitioning`): a stack's names are `(layer_axis_name, *names)`. None
            shards nothing along it.

    Returns:
        The stack, in the types that `init` returns, with leaves `[n, ...]`.

    Raises:
        ArgumentError: if `n`, `key` or `layer_axis_name` has the wrong type or value.
        BodyError: if `init` is not callable.
        LayerError: if `shardings` do not fit a layer.

    Examples:
        >>> import jax
        >>> import treescan
        >>> def init(key, width):
        ...     return {"w": jax.random.normal(key, (width, width)) / width**0.5}
        >>> layers = treescan.init_layers(init, jax.random.key(0), 4, 8)
        >>> print(layers["w"].shape)
        (4, 8, 8)
    """
    with speaking_of(init):
        count = expect_int(
            n,
            "n",
            "It is the number of layers, and must be known when the program is traced: `treescan.init_layers(init, "
            "key, n)`.",
            least=1,
            small="Give an int of at least 1.",
        )
        return add_layer_axis(thaw_static(_init_layers(init, key, count, args, shardings)), layer_axis_name)


def _init_layers(
    init: Callable[..., PyTree], key: Array | None, n: int, args: tuple[PyTree, ...], shardings: PyTree
) -> PyTree:
    if not callable(init):
        raise BodyFault(
            f"{{verb}} needs a function that makes a layer, but got {describe_argument(init)}.",
            "Pass it first: `treescan.init_layers(init, key, n)`, with `init(key) -> layer`.",
        )
    body = Body.of(init)
    alive = body.function
    key = check_key(key, "layer i is made with `jax.random.split(key, n)[i]`.")
    frozen = freeze_static(args, scalars=True)
    if key is None:
        raise TypeMisuse("{call}: `key` is missing.", "Pass `jax.random.key(seed)`.")
    if shardings is None and (under_a_trace() or is_jit_disabled()):
        return _all(body, n, key, frozen)
    given, structure = jax.tree.flatten((key, frozen))
    places, of_places = jax.tree.flatten(shardings, is_leaf=_is_place)
    types = (structure, *map(jax.typeof, given), of_places, *places)
    mesh = jax.sharding.get_abstract_mesh()
    make = functools.partial(_program, body, n, shardings, mesh, key, frozen)
    made = body.programs.program(("init_layers", n, types, mesh), make)
    with jax.disable_jit(False):  # which would leave shardings out
        stacked = made(key, frozen)
    del alive
    return stacked


def _one(body: Body, key: Array, frozen: PyTree) -> PyTree:
    with noted("`init` of `init_layers`, called with a key and `args`,"):
        args = thaw_static(frozen)
        try:
            layer = body.function(key, *args)
        except Exception as error:
            rename(error, zip(names_of(body, len(args) + 1, 0), args, strict=True))
            raise
    refuse_unregistered({"layer": layer}, LayerFault)
    return freeze_shared(layer)


def _all(body: Body, n: int, key: Array, frozen: PyTree) -> PyTree:
    """The layers, made side by side; in a loop with keys of which `jax.vmap` draws other numbers than of each alone.

    Of "rbg", it draws for all layers from the first key.
    """
    split = jax.random.split(key, n)
    if jax.random.key_impl(key) != "threefry2x32":
        return own_scan(lambda _, own: (None, _one(body, own, frozen)), None, split)[1]
    return jax.vmap(functools.partial(_one, body), in_axes=(0, None))(split, frozen)


def _program(
    body: Body, n: int, shardings: PyTree, mesh: AbstractMesh, key: Array, frozen: PyTree
) -> Callable[..., PyTree]:
    """Makes all layers, each leaf in its place on the mesh that is set, or on its own."""
    make = functools.partial(_all, body, n)
    if shardings is None:
        return jax.jit(make)
    places = stacked_shardings(types_of(functools.partial(_one, body), key, frozen), shardings).tree
    if AxisType.Explicit in mesh.axis_types:  # where each value would be made as its type says: on every device
        return jax.jit(jax.sharding.auto_axes(make, out_sharding=jax.tree.map(spec_of, places, is_leaf=_is_place)))
    return jax.jit(make, out_shardings=places)
