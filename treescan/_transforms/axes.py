"""`in_axes` and `out_axes`: prefix trees of axes, where leaves are scanned over and stacked; numbers of steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from .._avals import Array, ArrayLike, LeafAxes, PyTree, TreeDef, describe_leaf, exact_int, shape_of
from .._errors import ArgumentError, Fault, Misuse, Row, TreescanError, TypeMisuse, expect
from .._loop.feed import Consts, Feed, Slot
from .._loop.loop import Loop, Step
from .._tree import Prefix, PrefixMismatch, Root, broadcast_prefix, map_leaves, merge, path_str, split
from .._types import Axes
from .transform import Stage, Transform

WHOLE: Slot[list[Any]] = Slot("whole")
"""The leaves of xs that every step is given whole."""


@dataclass(frozen=True)
class MergeWhole:
    """The step that merges the leaves without an axis into the slices of a step.

    Its x is the list of sliced leaves.
    """

    step: Step
    axes: LeafAxes
    structure: TreeDef

    def __call__(self, consts: Consts, state: PyTree, feed: Feed) -> tuple[PyTree, PyTree]:
        whole, consts = WHOLE.take(consts)
        leaves = merge([axis is None for axis in self.axes], whole, feed.x)
        return self.step(consts, state, feed._replace(x=jtu.tree_unflatten(self.structure, leaves)))


@dataclass(frozen=True)
class OverAxes(Transform):
    """`in_axes`: scans each leaf of xs over its own axis. Every step receives leaves without an axis whole.

    Attributes:
        each: the axes, for each of the loops that take turns; None: axis 0 for all leaves.
    """

    each: tuple[LeafAxes | None, ...]
    stage: ClassVar[Stage] = Stage.FED

    def __call__(self, loop: Loop) -> Loop:
        pairs = zip(loop.each, self.each, strict=True)
        return loop.with_turns([turn if axes is None else scan_over_axes(turn, axes) for turn, axes in pairs])


def scan_over_axes(loop: Loop, axes: LeafAxes) -> Loop:
    """Moves each leaf's axis to the front, and turns leaves without one into constants of the loop.

    A leaf that is scanned over axis 0 is not changed. Other leaves are transposed once, before the loop: indexing
    them inside of the loop would cost the gradient a zero array of the whole leaf each step.
    """
    leaves, structure = jax.tree.flatten(loop.xs.x)
    moved = [
        leaf if axis in (0, None) else jnp.moveaxis(leaf, axis, 0) for leaf, axis in zip(leaves, axes, strict=True)
    ]
    if None not in axes:
        return loop.having(xs=loop.xs._replace(x=jax.tree.unflatten(structure, moved)))
    whole, sliced = split([axis is None for axis in axes], moved)
    return loop.having(
        step=MergeWhole(loop.step, axes, structure),
        consts=WHOLE.put(loop.consts or Consts(), whole),
        xs=loop.xs._replace(x=sliced),
    )


def move_outputs(ys: PyTree, out_axes: Axes, root: str = "y", stacked: Sequence[bool] | None = None) -> PyTree:
    """Moves the stacked axis of every output from the front to the axis in `out_axes`.

    Args:
        ys: the outputs.
        out_axes: one axis, or a prefix tree of axes.
        root: what the user calls a step's output.
        stacked: for each leaf whether it has that axis; None: all have.

    Raises:
        Fault: for an `ArgumentError` that lists the leaves without that axis.
    """
    if isinstance(out_axes, int) and out_axes == 0:
        return ys
    axes = spread_axes("{out_axes}", out_axes, ys, root)
    axes = axes if stacked is None else tuple(axis if on else None for axis, on in zip(axes, stacked, strict=True))
    check_axes("{out_axes}", axes, ys, root)
    return map_leaves(lambda y, axis: jnp.moveaxis(y, 0, axis) if axis else y, ys, axes)


@dataclass(frozen=True)
class Counted:
    """The step that feeds its index to another. Its state is (index, the inner state).

    Attributes:
        step: the inner step.
        stride: 1, or -1 in reverse.
        place: where in the feed the index is.
    """

    step: Step
    stride: int
    place: Literal["x", "position"]

    def __call__(self, consts: PyTree, state: tuple[Array, PyTree], feed: Feed) -> tuple[PyTree, PyTree]:
        index, inner = state
        fed = feed._replace(x=index) if self.place == "x" else feed._replace(position=index)
        inner, y = self.step(consts, inner, fed)
        return (index + self.stride, inner), y


@dataclass(frozen=True)
class Count(Transform):
    """`fori`: feeds the positions of a loop as x, from `lower` up.

    The index starts as a Python int. So it has a weak type, and adopts the type of the values it is combined with.
    """

    lower: int
    stage: ClassVar[Stage] = Stage.FED

    def __call__(self, loop: Loop) -> Loop:
        return count_from(loop, self.lower + loop.length - 1 if loop.reverse else self.lower)


def count_from(loop: Loop, first: ArrayLike, place: Literal["x", "position"] = "x") -> Loop:
    """Feeds indices as x, or as positions from which keys are folded; the first step is given `first`."""
    step = Counted(loop.step, -1 if loop.reverse else 1, place)
    loop = loop.having(step=step, state=(first, loop.state))
    return loop.finished(lambda state: state[1])


def spread_axes(option: str, axes: Axes, tree: PyTree, root: str, *, none: bool = False) -> LeafAxes:
    """One axis a leaf from a prefix tree, each an int (or None, where `none` allows it).

    Raises:
        Fault: for an `ArgumentError` if the prefix does not fit or holds anything else.
    """
    cure = f"Give one int for all leaves, or a prefix tree of {root}, in which one int may cover a whole subtree."
    spread = spread_prefix(f"`{option}`", axes, tree, root, cure)
    _check_ints(option, spread, none=none)
    return tuple([None if axis is None else int(axis) for axis in spread])


def spread_prefix(
    option: str,
    prefix: PyTree,
    tree: PyTree,
    root: str,
    cure: str,
    *,
    whole: str | None = None,
    error: type[TreescanError] = ArgumentError,
) -> list[Any]:
    """One value of a prefix tree for each leaf of a tree.

    Args:
        option: what messages call the prefix.
        prefix: the prefix tree.
        tree: the tree.
        root: what the user calls the tree where a path in it begins.
        cure: what the user may do about a prefix that does not fit.
        whole: what messages call the tree, if not as its root.
        error: the public exception.
    """
    if prefix is None or jtu.all_leaves([prefix]):  # one value for all leaves, as most prefixes are
        return [prefix] * len(jax.tree.leaves(tree))
    try:
        return broadcast_prefix(prefix, tree, root)
    except PrefixMismatch as off:
        raise Fault(error, f"{{call}}: {option} is not a prefix of {whole or root}: {off}.", cure) from None


def by_part(option: str, given: Any, parts: Sequence[str]) -> dict[str, Axes]:
    """What an option says of each part: one int says it of all, and a mapping of some; of the others, 0.

    Raises:
        Fault: for an `ArgumentTypeError` if it is neither, or names anything else.
    """
    if type(given) is int:
        return dict.fromkeys(parts, given)
    named = ", ".join(f'"{part}"' for part in parts)
    cure = f'To set one alone, write `{option}={{"{parts[0]}": ...}}`.'
    if isinstance(given, Mapping):
        for key in (key for key in given if key not in parts):
            raise TypeMisuse(f"{{call}}: `{option}` has the key {key!r}. Its keys are {named}.", cure)
        return {part: given.get(part, 0) for part in parts}
    number = exact_int(given)
    expect(number is not None, option, f"an int, or a mapping with any of the keys {named}", given, cure)
    return dict.fromkeys(parts, number)


def static_axes(option: str, axes: Axes, *, none: bool = False) -> Prefix:
    """A prefix tree of axes as a static value. Whether it fits a tree is checked where it is used."""
    prefix = Prefix.of(axes)
    if type(axes) is not int:
        _check_ints(option, prefix.leaves, none=none)
    return prefix


def _check_ints(option: str, axes: Sequence[Any], *, none: bool) -> None:
    for axis in axes:
        if (hasattr(axis, "__index__") and not isinstance(axis, bool | jax.Array)) or (none and axis is None):
            continue
        allowed = "ints or None" if none else "ints"
        cure = "Give one for all leaves, or a prefix tree of them."
        expect(False, option, allowed, axis, cure)


def check_axes(option: str, axes: LeafAxes, tree: PyTree, root: str) -> None:
    """Refuses axes that a leaf does not have, all leaves at once."""
    rows, options = [], set()
    for (path, leaf), axis in zip(jtu.tree_flatten_with_path(tree)[0], axes, strict=True):
        rank = len(shape_of(leaf) or ())
        if axis is not None and not -rank <= axis < rank:
            name = next((key.axes for key in path if isinstance(key, Root) and key.axes), option)
            options.add(name)
            rows.append(Row(path_str(root, path), f"{name} {axis}", describe_leaf(leaf), f"rank {rank}"))
    if rows:
        names = " and ".join(f"`{name}`" for name in sorted(options))
        raise Misuse(
            f"{{call}}: {names} {'name' if len(options) > 1 else 'names'} an axis that is not there.",
            "Axes count from 0, and negative axes count from the end"
            + (". {axis_none}." if "{in_axes}" in options else "."),
            header=("leaf", "axis", "is"),
            rows=rows,
        )
