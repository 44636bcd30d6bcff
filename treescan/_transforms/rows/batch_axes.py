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
        to: for each leaf of init what a reset puts back, a scalar or all rows of it, None for its init; None: all are
            put back to their init.
        spans: of a `Packed`: the row, the first step and the number of steps of each sequence, int32[N].
        inits: of a `Packed` whose sequences have inits: for each leaf of init those of all sequences, [N, ...], or None
            for its init.
    """

    lengths: Any = None
    mask: Any = None
    resets: Any = None
    to: Any = None
    spans: tuple[Array, Array, Array] | None = None
    inits: Any = None


class Begins(NamedTuple):
    """What segments begin from.

    Attributes:
        flags: bool[T, *batch], where a segment begins; or int32[T, R]: which sequence begins there, counted from 1, or
            0 for none.
        targets: for each leaf of the state what it begins from: a scalar, or all rows of it; where a table is, those of
            all sequences, [N, ...]. None for a leaf that is never reset.
        tables: for each leaf of the state whether there is a table.
    """

    flags: Array
    targets: list[Array | None]
    tables: tuple[bool, ...]


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
        given: what the verb was told of them.
        was_fixed: for each leaf of the user's state whether it left the state, as no step changes it.
        begins: where segments begin, and from what; None: from `init`, where `resets` are set.
        apart: whether the trace of the body proves that it treats rows independently.
        tiers: the numbers of rows that the body was traced for; one where rows are not ordered.
    """

    axes: RowAxes
    y_axes: Prefix
    fixed: LeafAxes = ()
    resets: Array | None = None
    unchanged: Callable[[], tuple[bool, ...]] | None = None
    outputs: Any = None
    all_valid: bool = False
    given: RowFlags = RowFlags()
    was_fixed: tuple[bool, ...] = ()
    begins: Begins | None = None
    apart: Callable[[], bool] = lambda: False
    tiers: tuple[int, ...] = (0,)


def without_arrays(rows: Rows) -> Rows:
    """Where the rows are, without arrays, because rules for derivatives must not contain tracers."""
    return rows._replace(resets=None, begins=None, given=RowFlags(), apart=Rows._field_defaults["apart"])


def with_axes(loop: Loop, **axes: LeafAxes) -> Loop:
    """The loop, with its rows on other axes."""
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
            f"{{verb}} over {{body}}: the batch shape {_shape(batch)} of {{mask}} is not in every leaf.",
            *([other] if other else []),
            f"`{option}` says where the batch shape starts in each leaf of {root} (0: it leads), and None marks a leaf "
            "that all rows share.{all_rows}",
            header=("leaf", "batch shape", "is"),
            rows=rows,
        )
    return tuple(spread)


def _other_batch(option: str, root: str, found: set[tuple[int, ...]]) -> str:
    """The advice if all differing leaves may have one other batch shape."""
    if len(found) != 1:
        return ""
    batch = _shape(*found)
    if option == "carry_axes":
        return f"If {batch} is the batch shape of {root}, {{rows_of_init}}"
    if option == "x_axes":
        return f"If {batch} is the batch shape of the data, {{rows_of_x}}"
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
