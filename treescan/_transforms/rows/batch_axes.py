"""Finds the axes of the batch in each leaf, from prefix trees, and checks them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from ..._avals import describe_leaf, shape_of
from ..._axes import LeafAxes, spread_axes
from ..._errors import ArgumentError, Fault, Row
from ..._loop.loop import Loop
from ..._tree import Prefix, leaves_with_path
from ..._types import Array, PyTree


class RowAxes(NamedTuple):
    """The axis where the batch shape starts in each leaf; None: the leaf has no rows.

    Attributes:
        consts: for each leaf of a loop's consts.
        state: for each leaf of its state.
        x: for each leaf of one step's x.
        y: for each leaf of one step's y; empty where y is not known yet.
    """

    consts: LeafAxes
    state: LeafAxes
    x: LeafAxes
    y: LeafAxes


class RowFlags(NamedTuple):
    """Which steps of which rows are data, and which begin a segment.

    Attributes:
        lengths: int[*batch], or None.
        mask: bool[T, *batch], or None; the steps along the time axis.
        resets: the same.
    """

    lengths: Any = None
    mask: Any = None
    resets: Any = None


class Rows(NamedTuple):
    """The rows of a masked loop, whose xs hold the mask.

    Attributes:
        axes: where they are in each leaf.
        y_axes: a prefix of y: where the batch shape starts; None: y has no rows.
        fixed: the same for the leaves that no step changes.
        resets: bool[T, *batch], where a segment begins; None: nowhere.
        unchanged: for each leaf of the state whether no step changes it; None: those have left the state.
        outputs: what is kept of ys; see `keep_rows.RowOutputs`.
        all_valid: whether every step of every row is known to be data: there are resets alone.
    """

    axes: RowAxes
    y_axes: Prefix
    fixed: LeafAxes = ()
    resets: Array | None = None
    unchanged: Callable[[], tuple[bool, ...]] | None = None
    outputs: Any = None
    all_valid: bool = False


def with_axes(loop: Loop, **axes: LeafAxes) -> Loop:
    """The loop, with its rows elsewhere."""
    return dataclasses.replace(loop, rows=loop.rows._replace(axes=loop.rows.axes._replace(**axes)))


def spread_batch_axes(option: str, axes: Prefix, tree: PyTree, root: str, batch: tuple[int, ...]) -> LeafAxes:
    """One axis a leaf, counted from 0, and the batch shape must be there.

    Raises:
        Fault: for an `ArgumentError` that lists the leaves in which it does not.
    """
    return check_batch_axes(option, spread_axes(option, axes.tree, tree, root, none=True), tree, root, batch)


def check_batch_axes(option: str, axes: LeafAxes, tree: PyTree, root: str, batch: tuple[int, ...]) -> LeafAxes:
    """The same for axes that are spread already."""
    rows, spread = [], []
    found: set[tuple[int, ...]] = set()
    for (path, leaf), axis in zip(leaves_with_path(root, tree), axes, strict=True):
        shape = shape_of(leaf) or ()
        start = axis if axis is None or axis >= 0 else axis + len(shape)
        spread.append(start)
        stands = start is None or (0 <= start <= len(shape) - len(batch) and shape[start : start + len(batch)] == batch)
        if start is not None and len(shape) >= start + len(batch):
            found.add(shape[start : start + len(batch)])
        if not stands:
            rows.append(Row(path, f"{_shape(batch)} at axis {axis}", describe_leaf(leaf), ""))
    if rows:
        other = _other_batch(option, root, found - {batch})
        raise Fault(
            ArgumentError,
            f"{{verb}} over {{body}}: the batch shape {_shape(batch)} of the mask is not in every leaf.",
            *([other] if other else []),
            f"`{option}` says where the batch shape starts in each leaf of {root} (0: it leads), and None marks a leaf "
            "that all rows share.",
            header=("leaf", "batch shape", "is"),
            rows=rows,
        )
    return tuple(spread)


def _other_batch(option: str, root: str, found: set[tuple[int, ...]]) -> str:
    """What to say where the leaves that differ may have one other batch shape."""
    if len(found) != 1:
        return ""
    batch = _shape(*found)
    if option == "carry_axes":
        return (
            f"If {batch} is the batch shape of {root}, there are other rows than in the mask. `init` has one entry for "
            "each row of the batch (`packed.rows` of them for a `Packed`), and the lengths or the mask are of the same "
            "rows."
        )
    if option == "x_axes":
        return (
            f"If {batch} is the batch shape of the data, pass the lengths or the mask of just these rows. If the data "
            "lead with the batch instead of time, pass `time_axis=1`."
        )
    return ""


def _shape(shape: Sequence[int]) -> str:
    return f"[{','.join(map(str, shape))}]"


def rows_of_x(
    xs: PyTree, prefix: Prefix, in_axes: LeafAxes | None, root: str, batch: tuple[int, ...]
) -> tuple[LeafAxes, LeafAxes]:
    """Where the batch shape starts in the leaves of one step's x: in those that are sliced, and in those given whole.

    A leaf that is given whole has rows where `x_axes` is a tree that says so: one int for all speaks of the slices.
    """
    leaves, structure = jax.tree.flatten(xs)
    axes = in_axes or (0,) * len(leaves)
    step = [
        jax.ShapeDtypeStruct(shape if axis is None else shape[:axis] + shape[axis + 1 :], jax.typeof(leaf).dtype)
        for leaf, axis in zip(leaves, axes, strict=True)
        for shape in (jax.typeof(leaf).shape,)
    ]
    if isinstance(prefix.tree, int):
        prefix = Prefix.of(jax.tree.unflatten(structure, [None if a is None else prefix.tree for a in axes]))
    starts = spread_batch_axes("x_axes", prefix, jax.tree.unflatten(structure, step), root, batch)
    pairs = list(zip(starts, axes, strict=True))
    return tuple(s for s, axis in pairs if axis is not None), tuple(s for s, axis in pairs if axis is None)
