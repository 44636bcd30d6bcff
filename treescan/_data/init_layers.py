"""`init_layers` initializes all layers of a stack at once, each with its own key."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from .._avals import describe_argument, describe_leaf, describe_traced, exact_int, spec_parts
from .._checks.arguments import check_key
from .._errors import ArgumentError, ArgumentTypeError, BodyError, Fault, LayerError, Row, explain, verb
from .._loop.body import Body
from .._loop.retrace import under_a_trace
from .._loop.run import is_jit_disabled
from .._tree import Prefix, PrefixMismatch, freeze_static, leaves_with_path, thaw_static
from .._types import Array, PyTree
from .boxes import add_layer_axis
from .shared import freeze_shared

Layer = TypeVar("Layer")


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

    `init` is traced once, whatever the number of layers, and mapped over the keys by `jax.vmap`; with `shardings` once
    more before, for its types. Under `jax.eval_shape` it makes the types alone.

    Args:
        init: makes one layer, `init(key, *args) -> layer`: any pytree. Leaves that are no arrays, Python's numbers and
            flags among them, are the same in all layers, and stay as they are.
        key: a PRNG key. Layer i is made with `jax.random.split(key, n)[i]`.
        n: how many layers, an int from 1 up.
        *args: passed to `init` for each layer. All but arrays are a part of the program: sizes can be used as sizes.
        shardings: for each leaf of *one* layer (a prefix tree) a `jax.sharding.NamedSharding`, a `PartitionSpec` (where
            a mesh is set) or None. The stack is sharded like this, the axis of the layers not at all. Each device makes
            its own part: none ever holds the whole.
        layer_axis_name: what the metadata of flax calls the new axis, where leaves have such (`nnx.with_partitioning`,
            `nn.with_partitioning`): a stack's names are `(layer_axis_name, *names)`. None shards nothing along it.

    Returns:
        The stack, in the types that `init` returns, with leaves `[n, ...]`.

    Raises:
        ArgumentError: if `n` is no number of layers, `key` no key, or `layer_axis_name` no string.
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
    try:
        return add_layer_axis(thaw_static(_run(init, key, _check_count(n), args, shardings)), layer_axis_name)
    except Exception as error:
        explained = explain(error, "init_layers", init)
    raise explained


def _run(init: Any, key: Any, n: int, args: tuple[Any, ...], shardings: PyTree) -> PyTree:
    if not callable(init):
        raise Fault(
            BodyError,
            f"{{verb}} needs a function that makes a layer, but got {describe_argument(init)}.",
            "Pass it first: `treescan.init_layers(init, key, n)`, with `init(key) -> layer`.",
        )
    body = Body.of(init)
    alive = body.function
    key = check_key(key, "layer i is made with `jax.random.split(key, n)[i]`.")
    frozen = freeze_static(args, scalars=True)
    if key is None:
        raise Fault(ArgumentTypeError, "{verb} over {body}: there is no key.", "Pass `jax.random.key(seed)`.")
    if shardings is None and (under_a_trace() or is_jit_disabled()):
        return _all(body, n, key, frozen)
    given, structure = jax.tree.flatten((key, frozen))
    types = (structure, *map(jax.typeof, given), Prefix(*_flatten_places(shardings)))
    mesh = jax.sharding.get_abstract_mesh()
    made = body.programs(("init_layers", n, types, mesh), lambda: _program(body, n, shardings, mesh, key, frozen))
    with jax.disable_jit(False):  # which would leave shardings out
        stacked = made(key, frozen)
    del alive
    return stacked


def _one(body: Body, key: Array, frozen: PyTree) -> PyTree:
    return freeze_shared(body.function(key, *thaw_static(frozen)))


def _all(body: Body, n: int, key: Array, frozen: PyTree) -> PyTree:
    return jax.vmap(functools.partial(_one, body), in_axes=(0, None))(jax.random.split(key, n), frozen)


def _program(body: Body, n: int, shardings: PyTree, mesh: Any, key: Array, frozen: PyTree) -> Callable[..., PyTree]:
    """Makes all layers, each leaf in its place on the mesh that is set, or on its own."""
    make = functools.partial(_all, body, n)
    if shardings is None:
        return jax.jit(make)
    places = _stacked_shardings(functools.partial(_one, body), key, frozen, shardings).tree
    if AxisType.Explicit in mesh.axis_types:  # there each value would be made as its type says: on every device
        return jax.jit(jax.sharding.auto_axes(make, out_sharding=_map_places(_spec_of, places)))
    return jax.jit(make, out_shardings=places)


def _map_places(function: Callable[[Any], Any], places: PyTree) -> PyTree:
    return jax.tree.map(function, places, is_leaf=_is_place)


def _is_place(node: Any) -> bool:
    return node is None or isinstance(node, jax.sharding.Sharding | PartitionSpec)


def _spec_of(place: Any) -> PartitionSpec:
    if place is None:
        return PartitionSpec()
    return place.spec if isinstance(place, NamedSharding) else place


def _stacked_shardings(one: Callable[..., PyTree], key: Array, frozen: PyTree, shardings: PyTree) -> Prefix:
    """The shardings of the stack's leaves, from those of a layer's.

    Raises:
        Fault: for a `LayerError` that lists all the leaves that cannot be sharded so.
    """
    layer = jax.eval_shape(one, key, frozen)
    prefix = Prefix(*_flatten_places(shardings))
    try:
        places = prefix.spread(layer, "layer")
    except PrefixMismatch as error:
        raise Fault(
            LayerError,
            f"{{verb}} over {{body}}: `shardings` is no prefix of a layer: {error}.",
            "Give one sharding for all leaves, or a tree with the structure of a layer down to where one holds for "
            "everything below; None leaves it to JAX.",
        ) from None
    rows: list[Row] = []
    for (path, leaf), place in zip(leaves_with_path("layer", layer), places, strict=True):
        why = _misfit(leaf, place)
        if why:
            rows.append(Row(path, str(getattr(place, "spec", place)), describe_leaf(leaf), why))
    if rows:
        raise Fault(
            LayerError,
            "{verb} over {body}: leaves of a layer cannot be sharded as `shardings` says.",
            "It speaks of one layer, without the axis of the layers; a PartitionSpec needs `jax.set_mesh`, and mesh "
            "axes divide the axes that they shard.",
            header=("leaf", "sharding", "is"),
            rows=rows,
        )
    return Prefix(tuple(map(_stacked, places)), jax.tree.structure(layer))


def _flatten_places(shardings: PyTree) -> tuple[tuple[Any, ...], Any]:
    leaves, structure = jax.tree.flatten(shardings, is_leaf=_is_place)
    return tuple(leaves), structure


def _misfit(leaf: Any, place: Any) -> str:
    """Why a leaf cannot be sharded so; nothing if it can."""
    if place is None:
        return ""
    if not _is_place(place) or (isinstance(place, jax.sharding.Sharding) and not isinstance(place, NamedSharding)):
        return f"no NamedSharding: {describe_argument(place)}"
    if len(spec_parts(_spec_of(place))) > len(leaf.shape):
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


def _stacked(place: Any) -> Any:
    if place is None:
        return None
    spec = PartitionSpec(None, *spec_parts(_spec_of(place)))
    return NamedSharding(place.mesh, spec, memory_kind=place.memory_kind) if isinstance(place, NamedSharding) else spec


def _check_count(n: Any) -> int:
    count = exact_int(n)
    if count is None:
        raise Fault(
            ArgumentTypeError,
            f"{{verb}} over {{body}}: `n` is an int, got {describe_traced(n)}.",
            "It is the number of layers, a part of the program: `treescan.init_layers(init, key, n)`.",
        )
    if count < 1:
        raise Fault(ArgumentError, f"{{verb}} over {{body}}: `n` counts layers, got {count}.", "Give an int from 1 up.")
    return count
