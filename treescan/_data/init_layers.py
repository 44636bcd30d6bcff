"""`init_layers` initializes all layers of a stack at once, each with its own key."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax.sharding import AxisType

from .._avals import describe_argument, describe_traced, exact_int
from .._checks.arguments import check_key
from .._errors import ArgumentError, ArgumentTypeError, BodyError, Fault, explain, verb
from .._loop.body import Body
from .._loop.retrace import under_a_trace
from .._loop.run import is_jit_disabled
from .._tree import Prefix, freeze_static, thaw_static
from .._types import Array, PyTree
from .boxes import add_layer_axis
from .shardings import flatten_places, map_places, spec_of, stacked_shardings
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
        raise Fault(ArgumentTypeError, "{verb} over {body}: `key` is missing.", "Pass `jax.random.key(seed)`.")
    if shardings is None and (under_a_trace() or is_jit_disabled()):
        return _all(body, n, key, frozen)
    given, structure = jax.tree.flatten((key, frozen))
    types = (structure, *map(jax.typeof, given), Prefix(*flatten_places(shardings)))
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
    if (
        AxisType.Explicit in mesh.axis_types
    ):  # with explicit axes, each value would be made as its type says: on every device
        return jax.jit(jax.sharding.auto_axes(make, out_sharding=map_places(spec_of, places)))
    return jax.jit(make, out_shardings=places)


def _check_count(n: Any) -> int:
    count = exact_int(n)
    if count is None:
        raise Fault(
            ArgumentTypeError,
            f"{{verb}} over {{body}}: `n` must be an int, got {describe_traced(n)}.",
            "It is the number of layers, and must be known when the program is traced: `treescan.init_layers(init, "
            "key, n)`.",
        )
    if count < 1:
        raise Fault(
            ArgumentError, f"{{verb}} over {{body}}: `n` must be at least 1, got {count}.", "Give an int of at least 1."
        )
    return count
