"""`in_axes` and `out_axes`: which axis of each leaf is scanned over, and where the stacked axis goes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from .._avals import describe_argument, describe_leaf, shape_of
from .._errors import ArgumentError, ArgumentTypeError, Fault, Row
from .._loop import Feed, Loop, Step
from .._tree import Prefix, PrefixMismatch, broadcast_prefix, leaves_with_path
from .._types import Axes, PyTree, TreeDef

LeafAxes = tuple[int | None, ...]


@dataclass(frozen=True)
class MergeWhole:
    """The step that puts the leaves which are given whole in their place among a step's slices.

    Its consts are (whole leaves, the inner step's consts); its x is the list of sliced leaves.
    """

    step: Step
    axes: LeafAxes
    structure: TreeDef

    def __call__(self, consts: PyTree, state: PyTree, feed: Feed) -> tuple[PyTree, PyTree]:
        whole, inner = consts
        sliced_leaves, whole_leaves = iter(feed.x), iter(whole)
        leaves = [next(whole_leaves if axis is None else sliced_leaves) for axis in self.axes]
        return self.step(inner, state, feed._replace(x=jtu.tree_unflatten(self.structure, leaves)))


@dataclass(frozen=True)
class OverAxes:
    """`in_axes`: scans each leaf of xs over its own axis, and gives those without one whole to every step."""

    axes: LeafAxes
    moves = True

    def __call__(self, loop: Loop) -> Loop:
        return scan_over_axes(loop, self.axes)


def scan_over_axes(loop: Loop, axes: LeafAxes) -> Loop:
    """Moves each leaf's axis to the front, and turns leaves without one into constants of the loop.

    A leaf that is scanned over axis 0 is passed on as it is. Others are transposed once, before the loop: indexing
    them inside of the loop would cost the gradient a zero array of the whole leaf each step.
    """
    leaves, structure = jax.tree.flatten(loop.xs.x)
    moved = [
        leaf if axis in (0, None) else jnp.moveaxis(leaf, axis, 0) for leaf, axis in zip(leaves, axes, strict=True)
    ]
    if None not in axes:
        return dataclasses.replace(loop, xs=loop.xs._replace(x=jax.tree.unflatten(structure, moved)))
    sliced = [leaf for leaf, axis in zip(moved, axes, strict=True) if axis is not None]
    whole = [leaf for leaf, axis in zip(moved, axes, strict=True) if axis is None]
    return dataclasses.replace(
        loop,
        step=MergeWhole(loop.step, axes, structure),
        consts=(whole, loop.consts),
        xs=loop.xs._replace(x=sliced),
    )


def move_outputs(ys: PyTree, out_axes: Axes, root: str = "y") -> PyTree:
    """Moves the stacked axis of every output, which leads, to where `out_axes` wants it.

    Raises:
        Fault: for an `ArgumentError` that lists the leaves without that axis.
    """
    if isinstance(out_axes, int) and out_axes == 0:
        return ys
    axes = spread_axes("out_axes", out_axes, ys, root)
    check_axes("out_axes", axes, ys, root)
    leaves, structure = jax.tree.flatten(ys)
    return jax.tree.unflatten(structure, [jnp.moveaxis(y, 0, axis or 0) for y, axis in zip(leaves, axes, strict=True)])


def spread_axes(option: str, axes: Axes, tree: PyTree, root: str, *, none: bool = False) -> LeafAxes:
    """One axis a leaf from a prefix tree, each an int (or None, where `none` allows it).

    Raises:
        Fault: for an `ArgumentError` if the prefix does not fit or holds anything else.
    """
    try:
        spread = broadcast_prefix(axes, tree, root)
    except PrefixMismatch as error:
        raise Fault(
            ArgumentError,
            f"{{verb}} over {{body}}: `{option}` is no prefix of {root}: {error}.",
            f"Give one int for all leaves, or a tree with the structure of {root} down to where one int holds for "
            "everything below.",
        ) from None
    _check_ints(option, spread, none=none)
    return tuple(None if axis is None else int(axis) for axis in spread)


def _is_int(axis: Any) -> bool:
    return hasattr(axis, "__index__") and not isinstance(axis, bool | jax.Array)


def static_axes(option: str, axes: Axes, *, none: bool = False) -> Prefix:
    """A prefix tree of axes in a form that can stand in a plan. Whether it fits is seen where it is used."""
    prefix = Prefix.of(axes)
    _check_ints(option, prefix.leaves, none=none)
    return prefix


def _check_ints(option: str, axes: Sequence[Any], *, none: bool) -> None:
    wrong = [axis for axis in axes if not (_is_int(axis) or (none and axis is None))]
    if wrong:
        allowed = "ints or None" if none else "ints"
        raise Fault(
            ArgumentTypeError,
            f"{{verb}} over {{body}}: `{option}` takes {allowed}, got {describe_argument(wrong[0])}.",
            "Give one for all leaves, or a prefix tree of them.",
        )


def check_axes(option: str, axes: LeafAxes, tree: PyTree, root: str) -> None:
    """Refuses axes that a leaf does not have, all leaves at once."""
    rows = []
    for (path, leaf), axis in zip(leaves_with_path(root, tree), axes, strict=True):
        rank = len(shape_of(leaf) or ())
        if axis is not None and not -rank <= axis < rank:
            rows.append(Row(path, f"{option} {axis}", describe_leaf(leaf), f"rank {rank}"))
    if rows:
        raise Fault(
            ArgumentError,
            f"{{verb}} over {{body}}: `{option}` names an axis that is not there.",
            "An axis counts from 0, or from the end if it is negative"
            + (", and None gives a leaf whole to every step." if option == "in_axes" else "."),
            header=("leaf", "axis", "is"),
            rows=rows,
        )
