"""Finds the axes of the batch in each leaf, from prefix trees, and checks them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from .._avals import Array, LeafAxes, PyTree, describe_leaf, describe_node
from .._body.carry import call_hook
from .._errors import Cure, Fault, Misuse, PluginError, PluginFault, Row
from .._loop.feed import Consts
from .._loop.loop import Loop
from .._trace.trace import Trace
from .._transforms.axes import spread_axes
from .._tree import KeyPath, Prefix, children, leaves_with_path, path_str, split
from ..carries._base import AbstractCarry, describe_class, is_carry

OF_CARRY, OF_X, OF_Y = (f'row_axes["{each}"]' for each in ("carry", "x", "y"))


class RowAxes(NamedTuple):
    """The axis where the batch shape starts in each leaf; None: the leaf has no rows.

    Attributes:
        consts: for each leaf of a loop's consts, in the same places; see `Consts.spread`.
        state: for each leaf of its state.
        x: for each leaf of one step's x.
        y: for each leaf of one step's y; empty where y is not known yet.
    """

    consts: Consts
    state: LeafAxes
    x: LeafAxes
    y: LeafAxes


Spans = tuple[Array, Array, Array]
"""The row, the first step and the number of steps of each sequence, int32[N]."""


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
    spans: Spans | None = None
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


class Segments(NamedTuple):
    """The segments of a masked loop, which were given with its mask. Options alone read them.

    Attributes:
        resets: bool[T, *batch], where a segment begins.
        begins: where segments begin, and from what; None: from `init`, where `resets` are set.
    """

    resets: Array
    begins: Begins | None = None


class Rows(NamedTuple):
    """Where the rows of a masked loop are, whose xs hold the mask. It holds no array, so rules may hold it.

    Attributes:
        axes: where they are in each leaf.
        y_axes: a prefix of y: where the batch shape starts; None: y has no rows.
        fixed: the same for the leaves that no step changes.
        unchanged: for each leaf of the state whether no step changes it; None: those have left the state, as they do
            unless a loop `is_untraced`.
        outputs: what is kept of ys; see `keep_rows.RowOutputs`.
        all_valid: whether every step of every row is known to be data: there are resets alone.
        was_fixed: for each leaf of the user's state whether it left the state, as no step changes it.
        tiers: the numbers of rows that the body was traced for; one where rows are not ordered.
        own_values: whether padded rows see their own values where nothing is differentiated.
    """

    axes: RowAxes
    y_axes: Prefix
    fixed: LeafAxes = ()
    unchanged: Callable[[], tuple[bool, ...]] | None = None
    outputs: Any = None
    all_valid: bool = False
    was_fixed: tuple[bool, ...] = ()
    tiers: tuple[int, ...] = (0,)
    own_values: bool = False


def flags_given(loop: Loop) -> RowFlags:
    """What the verb was given that says which steps of which rows are data."""
    assert loop.given is not None and loop.given.rows is not None
    return loop.given.rows


def with_axes(loop: Loop, **axes: Any) -> Loop:
    """The loop, with its rows on other axes."""
    return loop.having(rows=loop.masked._replace(axes=loop.masked.axes._replace(**axes)))


def spread_batch_axes(option: str, axes: Prefix, tree: PyTree, root: str, batch: tuple[int, ...]) -> LeafAxes:
    """One axis a leaf, counted from 0, and the batch shape must be there.

    Raises:
        Fault: for an `ArgumentError` that lists the leaves in which it does not.
    """
    return check_batch_axes(option, spread_axes(option, axes.tree, tree, root, none=True), tree, root, batch)


def check_batch_axes(option: str, axes: LeafAxes, tree: PyTree, root: str, batch: tuple[int, ...]) -> LeafAxes:
    """One axis a leaf, counted from 0, of axes that are spread already; the batch shape must be there."""
    bad, spread, scalars = list[tuple[int, int | None]](), [], True
    found: set[tuple[int, ...]] = set()
    for place, (leaf, axis) in enumerate(zip(jax.tree.leaves(tree), axes, strict=True)):
        shape = getattr(leaf, "shape", ())
        start = axis if axis is None or axis >= 0 else axis + len(shape)
        spread.append(start)
        stands = start is None or (0 <= start <= len(shape) - len(batch) and shape[start : start + len(batch)] == batch)
        if start is not None and len(shape) >= start + len(batch):
            found.add(shape[start : start + len(batch)])
        if not stands:
            scalars = scalars and not shape
            bad.append((place, axis))
    if bad:
        named = leaves_with_path(root, tree)
        about = [(*named[place], axis) for place, axis in bad]
        rows = [Row(path, f"{_shape(batch)} at axis {axis}", describe_leaf(leaf), "") for path, leaf, axis in about]
        other = _other_batch(option, root, found - {batch}) or (_each(option, batch) if scalars else "")
        raise Misuse(
            f"{{verb}} over {{body}}: the batch shape {_shape(batch)} of {{mask}} is not in every leaf.",
            *([other] if other else []),
            f"`{option}`{{of_axes}} says where the batch shape starts in each leaf of {root} (0: it leads), and None "
            "marks a leaf that all rows share.{all_rows}",
            header=("leaf", "batch shape", "is"),
            rows=rows,
        )
    return tuple(spread)


def _other_batch(option: str, root: str, found: set[tuple[int, ...]]) -> str:
    """The advice if all differing leaves may have one other batch shape."""
    if len(found) != 1:
        return ""
    batch = _shape(*found)
    if option == OF_CARRY:
        return f"If {batch} is the batch shape of {root}, {{rows_of_init}}"
    if option == OF_X:
        return f"If {batch} is the batch shape of the data, {{rows_of_x}}"
    return ""


def _each(option: str, batch: tuple[int, ...]) -> str:
    """The advice if all differing leaves are single values, where each row may need its own."""
    cures = {
        OF_CARRY: f"start from one for each row, of shape {_shape(batch)}.",
        OF_Y: "return one for each row: do not reduce over the rows.",
    }
    return f"If each row has its own value there, {cures[option]}" if option in cures else ""


def _shape(shape: Sequence[int]) -> str:
    return f"[{','.join(map(str, shape))}]"


def rows_of_x(
    xs: PyTree, prefix: Prefix, in_axes: LeafAxes | None, root: str, batch: tuple[int, ...]
) -> tuple[LeafAxes, LeafAxes]:
    """Where the batch shape starts in the leaves of one step's x: in those that are sliced, and in those given whole.

    A leaf that is given whole has rows where `row_axes["x"]` is a tree that says so: one int for all is of the slices.
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
    starts = spread_batch_axes(OF_X, prefix, jax.tree.unflatten(structure, step), root, batch)
    pairs = list(zip(starts, axes, strict=True))
    return tuple([s for s, axis in pairs if axis is not None]), tuple([s for s, axis in pairs if axis is None])


def spread_carry_axes(prefix: Prefix, state: PyTree, root: str, batch: tuple[int, ...]) -> LeafAxes:
    """Where the batch shape starts in each leaf of a carry: as its custom carries say, and the option of the rest.

    Raises:
        Fault: for an `ArgumentError` if the batch shape is not there, or a `PluginError` if `rows` of a custom
            carry says something that does not fit it.
    """
    if not any(map(is_carry, jax.tree.leaves(state, is_leaf=is_carry))):
        axes = spread_axes(OF_CARRY, prefix.tree, state, root, none=True)
        return check_batch_axes(OF_CARRY, axes, state, root, batch)
    axes = _axes_within(state, root, prefix.tree)
    own = sorted({path for path, node in leaves_with_path(root, state, is_leaf=is_carry) if is_carry(node)})
    try:
        return check_batch_axes(OF_CARRY, axes, state, root, batch)
    except Fault as fault:
        if any(row.leaf.startswith(path) for row in fault.rows for path in own):
            fault.cures = (*fault.cures, Cure(_ROWS))
        raise


_ROWS = (
    "The method `rows` of a custom carry says where its rows are. Start the carry from arrays that have the batch "
    'shape there. If all rows share it, give None in `row_axes["carry"]`, and let `write` leave out the rows that '
    "are not valid; or create it with `shared=True` if it has that option."
)


def _axes_within(state: PyTree, root: str, prefix: PyTree) -> LeafAxes:
    """One axis a leaf from a prefix that knows the custom carries of a tree as leaves only."""
    named, outer = leaves_with_path(root, state, is_leaf=is_carry), jax.tree.structure(state, is_leaf=is_carry)
    places = [type(node) if is_carry(node) else node for _, node in named]  # a carry counts as one leaf
    above = spread_axes(OF_CARRY, prefix, jax.tree.unflatten(outer, places), root, none=True)
    axes: list[int | None] = []
    for (path, node), axis in zip(named, above, strict=True):
        if not is_carry(node):
            axes.extend([axis] * len(jax.tree.leaves(node)))
        elif axis is None:
            axes.extend([None] * len(jax.tree.leaves(node)))
        elif axis != 0:
            raise Misuse(
                f"{{verb}} over {{body}}: `{OF_CARRY}` is {axis} for {path}, a custom carry "
                f"(`{type(node).__name__}`), whose own method `rows` says where its rows are.",
                "Give a tree with an entry for each part of the carry: 0 for this one, or None if all rows share it.",
            )
        else:
            axes.extend(row_axes(node, path))
    return tuple(axes)


def row_axes(node: AbstractCarry[Any, Any], path: str) -> tuple[int | None, ...]:
    """What `rows` of a custom carry says, for each of its leaves.

    Raises:
        Fault: for a `PluginError` if it does not fit the carry.
    """
    rows = call_hook(node, path, 0, "rows", node.rows)
    fields = children(node) or []
    names = [path_str("", key).removeprefix(".") for key, _ in fields]
    if isinstance(rows, Mapping):
        wrong = [repr(name) for name in rows if name not in names]
        if wrong:
            raise _bad_rows(node, path, f"names {', '.join(wrong)}, but its fields are {', '.join(names) or 'none'}")
        by_field = [rows.get(name, 0) for name in names]
    elif rows is None or type(rows) is int:
        by_field = [rows] * len(names)
    else:
        raise _bad_rows(
            node, path, f"returned {describe_node(rows)}, not an axis, None or a mapping from fields to these"
        )
    return tuple(
        axis
        for (key, child), given in zip(fields, by_field, strict=True)
        for axis in _field_axes(node, path, key, child, given)
    )


def _field_axes(node: AbstractCarry[Any, Any], path: str, key: KeyPath, child: PyTree, given: PyTree) -> LeafAxes:
    try:
        return _axes_within(child, path_str(path, key), given)
    except Fault as fault:
        if fault.error is PluginError:
            raise
        name = path_str("", key).removeprefix(".")
        says = f"returned {given!r} for the field `{name}`, which does not fit {describe_node(child)}"
        raise _bad_rows(node, path, says) from None


def _bad_rows(node: AbstractCarry[Any, Any], path: str, says: str) -> Fault:
    name = type(node).__name__
    return PluginFault(
        f"{{verb}} over {{body}}: `{name}.rows` of the custom carry at {path} {says}.",
        "Return the axis where the batch shape starts in all leaves (0: it leads), None if all rows share them, or "
        "a mapping from the names of fields to these. A field that holds a tree may have a prefix tree of them. A "
        "field that holds a custom carry has 0 or None.",
        describe_class(type(node)),
    )


def rows_after_trace(trace: Trace, axes: RowAxes, y_axes: Prefix) -> Rows:
    """Where the rows are in the leaves of the loop that is left, and in those that are unchanged."""
    fixed, state = map(tuple, split(trace.fixed, axes.state))
    return Rows(axes._replace(consts=axes.consts._replace(unchanged=fixed), state=state), y_axes, fixed)
