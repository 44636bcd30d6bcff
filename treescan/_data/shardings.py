"""Shardings of a stack, from those of one layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from .._avals import describe_argument, describe_leaf, spec_parts
from .._errors import Fault, LayerError, Row
from .._tree import Prefix, PrefixMismatch, leaves_with_path
from .._types import PyTree


def map_places(function: Callable[[Any], Any], places: PyTree) -> PyTree:
    """Maps a tree of shardings, in which None is one."""
    return jax.tree.map(function, places, is_leaf=_is_place)


def _is_place(node: Any) -> bool:
    return node is None or isinstance(node, jax.sharding.Sharding | PartitionSpec)


def spec_of(place: Any) -> PartitionSpec:
    """How a sharding splits the axes of an array."""
    if place is None:
        return PartitionSpec()
    return place.spec if isinstance(place, NamedSharding) else place


def stacked_shardings(layer: PyTree, shardings: PyTree, call: str = "{verb} over {body}") -> Prefix:
    """The shardings of the stack's leaves, from those of a layer's.

    Args:
        layer: one layer, or its types.
        shardings: a prefix tree of it.
        call: what messages begin with.

    Raises:
        Fault: for a `LayerError` that lists all the leaves that cannot be sharded so.
    """
    prefix = Prefix(*flatten_places(shardings))
    try:
        places = prefix.spread(layer, "layer")
    except PrefixMismatch as error:
        raise Fault(
            LayerError,
            f"{call}: `shardings` is not a prefix of a layer: {error}.",
            "Give one sharding for all leaves, or a prefix tree of a layer with shardings. None lets JAX choose.",
        ) from None
    rows: list[Row] = []
    for (path, leaf), place in zip(leaves_with_path("layer", layer), places, strict=True):
        why = _misfit(leaf, place)
        if why:
            rows.append(Row(path, str(getattr(place, "spec", place)), describe_leaf(leaf), why))
    if rows:
        raise Fault(
            LayerError,
            f"{call}: leaves of a layer cannot be sharded as `shardings` says.",
            "A sharding describes one layer, without the axis of the layers. A PartitionSpec needs `jax.set_mesh`, "
            "and a mesh axis must divide the axis that it shards.",
            header=("leaf", "sharding", "is"),
            rows=rows,
        )
    return Prefix(tuple(map(_stacked, places)), jax.tree.structure(layer))


def flatten_places(shardings: PyTree) -> tuple[tuple[Any, ...], Any]:
    """The leaves of a tree of shardings, in which None is one, and its structure."""
    leaves, structure = jax.tree.flatten(shardings, is_leaf=_is_place)
    return tuple(leaves), structure


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
