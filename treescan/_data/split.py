"""Raises an error for stacks whose layers are on different devices."""

from __future__ import annotations

from typing import Any

import jax
from jax.core import Tracer

from .._avals import describe_leaf, spec_parts
from .._axes import LeafAxes
from .._errors import Fault, LayerError, Row


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
    spec = f"jax.P({', '.join(parts)})"
    cure = f"jax.device_put({path}, jax.NamedSharding(mesh, {spec}))"
    if _typed_part(leaf, axis) is not None:
        cure = f"jax.sharding.reshard({path}, {spec})"
    raise Fault(
        LayerError,
        "{call}: layers of a stack are on different devices.",
        "Every device runs all layers, so it would have to fetch the layers of the other devices. Shard other axes "
        f"instead, or none: `{cure}`.",
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
