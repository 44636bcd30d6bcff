"""Gathers the weights of a layer for `prefetch`: on all devices, or with a function of the user."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AxisType, PartitionSpec

from ..._avals import describe_argument, describe_node, exact_int
from ..._axes import LeafAxes
from ..._errors import ArgumentError, Fault
from ..._loop.loop import Feed, Step
from ..._tree import Static, same_structure, thaw_static
from ..._types import Array, PyTree, TreeDef

_MANUAL = (
    "`prefetch=1` gathers whole arrays, but within a `jax.shard_map` each device has only its part",
    'Give a function that gathers them: `prefetch=lambda layer: jax.lax.all_gather(layer, "data", tiled=True)`.',
)
_NO_MESH = (
    "`prefetch=1` gathers the weights on the devices of a mesh, but no mesh is set",
    "Call it under `jax.set_mesh(mesh)`. Or give a function: `prefetch=lambda layer: "
    "jax.lax.with_sharding_constraint(layer, whole)`, where `whole` is a sharding.",
)


@dataclass(frozen=True)
class Gather:
    """Gathers one layer.

    Attributes:
        function: maps a layer to a gathered one; None: each of its arrays becomes whole on each device.
    """

    function: Callable[[PyTree], PyTree] | None = None

    @classmethod
    def of(cls, prefetch: Any) -> Gather | None:
        """What the user said.

        Raises:
            Fault: for an `ArgumentError` if it is neither 1, a function nor None.
        """
        if prefetch is None:
            return None
        if callable(prefetch):
            return cls(prefetch)
        if exact_int(prefetch) == 1:
            return cls()
        raise Fault(
            ArgumentError,
            f"{{call}}: `prefetch` must be 1, a function of one layer, or None, got {describe_argument(prefetch)}.",
            "1 gathers the weights of the next layer on all devices while the current layer is computed. A function "
            "gathers them in its own way, and returns the layer.",
        )

    def __call__(self, layer: PyTree) -> PyTree:
        """The gathered layer; static leaves are frozen in both."""
        if self.function is None:
            return jax.tree.map(_whole, layer)
        given = thaw_static(layer)
        gathered = self.function(given)
        if not same_structure(given, gathered):
            raise Fault(
                ArgumentError,
                "{call}: `prefetch` must return a layer with the structure that it was given, but returned "
                f"{describe_node(gathered)}.",
                "Return the same layer with its weights gathered. Shapes and dtypes may change.",
            )
        nodes = jax.tree.leaves(layer, is_leaf=lambda node: isinstance(node, Static))
        pairs = zip(nodes, jax.tree.leaves(gathered), strict=True)
        return jax.tree.unflatten(
            jax.tree.structure(layer), [leaf for node, leaf in pairs if not isinstance(node, Static)]
        )


def _whole(leaf: Any) -> Any:
    """An array whole on each device of the mesh that is set."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        raise _fault(_NO_MESH)
    if AxisType.Manual in mesh.axis_types:
        raise _fault(_MANUAL)
    spec = PartitionSpec(*[None] * leaf.ndim)
    if AxisType.Explicit in mesh.axis_types:
        leaf = jax.sharding.reshard(leaf, spec)
    return jax.lax.with_sharding_constraint(leaf, spec) if AxisType.Auto in mesh.axis_types else leaf


def _fault(says: tuple[str, str]) -> Fault:
    return Fault(ArgumentError, f"{{call}}: {says[0]}.", says[1])


@dataclass(frozen=True)
class GatherFirst:
    """The step that gathers its own layer before it runs. Its x is a tuple that begins with the layer."""

    step: Step
    gather: Gather

    def __call__(self, consts: PyTree, state: PyTree, feed: Feed) -> tuple[PyTree, PyTree]:
        layer, *others = feed.x
        return self.step(consts, state, feed._replace(x=(self.gather(layer), *others)))


@dataclass(frozen=True)
class GatherLeaves:
    """Gathers a layer that comes as the leaves which are its own and those which all layers share.

    Attributes:
        gather: gathers the layer.
        structure: of the layer.
        axes: for each leaf None if all layers share it.
    """

    gather: Gather
    structure: TreeDef
    axes: LeafAxes

    def __call__(self, own: Sequence[Array], shared: Sequence[Array]) -> list[Array]:
        """The layer's own leaves, gathered."""
        of_layer, of_all = iter(own), iter(shared)
        leaves = [next(of_all if axis is None else of_layer) for axis in self.axes]
        gathered = jax.tree.leaves(self.gather(jax.tree.unflatten(self.structure, leaves)))
        return [leaf for leaf, axis in zip(gathered, self.axes, strict=True) if axis is not None]
