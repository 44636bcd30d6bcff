"""`init_layers` initializes all layers of a stack at once, each with its own key."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from .._avals import Array, PyTree, describe_argument, describe_leaf, spec_parts
from .._axes import spread_prefix
from .._checks.arguments import check_key
from .._errors import BodyFault, LayerError, LayerFault, Row, TypeMisuse, expect_int, speaking_of, verb
from .._loop.loop import Body, is_jit_disabled
from .._loop.retraces import under_a_trace
from .._tree import Prefix, freeze_static, leaves_with_path, thaw_static
from .layer_axis import add_layer_axis, freeze_shared


def _is_place(node: Any) -> bool:
    return node is None or isinstance(node, jax.sharding.Sharding | PartitionSpec)


def spec_of(place: Any) -> PartitionSpec:
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


def _misfit(leaf: Any, place: Any) -> str:
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


def _stacked(place: Any) -> Any:
    if place is None:
        return None
    spec = PartitionSpec(None, *spec_parts(spec_of(place)))
    return NamedSharding(place.mesh, spec, memory_kind=place.memory_kind) if isinstance(place, NamedSharding) else spec


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

    `init` is traced once, for any number of layers, and mapped over the keys by `jax.vmap`. With `shardings`, it is
    traced once more, for its types. Under `jax.eval_shape`, only the types are made.

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
        return add_layer_axis(thaw_static(_run(init, key, count, args, shardings)), layer_axis_name)


def _run(init: Any, key: Any, n: int, args: tuple[Any, ...], shardings: PyTree) -> PyTree:
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
    places = stacked_shardings(jax.eval_shape(functools.partial(_one, body), key, frozen), shardings).tree
    if AxisType.Explicit in mesh.axis_types:  # where each value would be made as its type says: on every device
        return jax.jit(jax.sharding.auto_axes(make, out_sharding=jax.tree.map(spec_of, places, is_leaf=_is_place)))
    return jax.jit(make, out_shardings=places)
