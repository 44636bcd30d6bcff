"""Outputs of rows: `fill` where a step is not valid, and `save="last"` for each row."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from .._avals import (
    Array,
    LeafAxes,
    PyTree,
    describe_argument,
    describe_leaf,
    holds,
    is_key,
    place_like,
    vary_over,
    varying_axes,
)
from .._errors import Misuse, TypeMisuse
from .._loop.feed import Feed
from .._loop.loop import Loop, Result, Step, is_untraced
from .._outputs.outputs import (
    EVERYTHING,
    LAST,
    Keep,
    keep_afterwards,
    kept_leaves,
    one_of,
    refuse_parts_of_keeps,
    spread_keeps,
    without_dropped,
)
from .._transforms.axes import spread_prefix
from .._transforms.call import Arguments, Call
from .._transforms.transform import Stage, Transform
from .._tree import Prefix, leaves_with_path, map_leaves
from .axes import OF_Y, flags_given, spread_batch_axes, with_axes
from .leaves import mask_of_lengths, pick_steps, select_valid

HOLD = "hold"


@dataclass(frozen=True)
class Hold:
    """The step that holds outputs. Its state is (held outputs, the inner state), the held ones 0 to begin with.

    Attributes:
        step: the inner step.
        held: for each leaf of y whether it is held.
        y_axes: for each leaf of y the axis where the batch shape starts, or None.
    """

    step: Step
    held: tuple[bool, ...]
    y_axes: LeafAxes

    def __call__(self, consts: PyTree, state: tuple[list[Array], PyTree], feed: Feed) -> tuple[PyTree, PyTree]:
        before, inner = state
        inner, y = self.step(consts, inner, feed)
        leaves, structure = jax.tree.flatten(y)
        old, now = iter(before), []
        for i, (is_held, axis) in enumerate(zip(self.held, self.y_axes, strict=True)):
            if is_held:
                leaves[i] = select_valid(feed.valid, leaves[i], next(old), axis)
                now.append(leaves[i])
        return (now, inner), jax.tree.unflatten(structure, leaves)


def hold(loop: Loop, held: tuple[bool, ...], start: Sequence[Array], avals: Sequence[Any]) -> Loop:
    """Holds outputs: from then on, the state is (the held ones, the state of before).

    Args:
        loop: the loop.
        held: for each leaf of y whether it is held.
        start: for each leaf of y what is held before there is a valid one, a scalar.
        avals: the type of each leaf, with what it says of shardings.
    """
    axes = loop.masked.axes
    if not any(held):
        return loop
    leaves = [(a, value) for a, value, on in zip(avals, start, held, strict=True) if on]
    first = [place_like(jnp.broadcast_to(value, a.shape), a) for a, value in leaves]
    first = [vary_over(leaf, varying_axes(jax.typeof(loop.xs.valid))) for leaf in first]
    held_axes = [axis for axis, on in zip(axes.y, held, strict=True) if on]
    loop = loop.having(step=Hold(loop.step, held, axes.y), state=(first, loop.state))
    return with_axes(loop, state=(*held_axes, *axes.state))


@dataclass(frozen=True)
class Idle:
    """The outputs of a chunk in which nothing is run.

    Attributes:
        fill: what each leaf that the chunk returns is filled with.
        held: which of the held outputs is in each leaf; None: it is filled. None as a whole: all are.
    """

    fill: Prefix
    held: tuple[int | None, ...] | None = None

    def __call__(self, state: PyTree, types: PyTree) -> PyTree:
        """Outputs of the given types, [steps, ...], after the state."""
        values = fill_leaves(self.fill, types)

        def filled(leaf: Any, value: Array, slot: int | None) -> Array:
            return place_like(jnp.broadcast_to(value if slot is None else state[0][slot], leaf.shape), leaf)

        return map_leaves(filled, types, values, self.held or (None,) * len(values))


def hold_afterwards(
    ys: PyTree, valid: Array, held: Sequence[slice | None], start: Sequence[Array], y_axes: LeafAxes, *, reverse: bool
) -> PyTree:
    """Holds the last valid outputs, from those of all steps that ran one by one on concrete values.

    `held` says for each leaf in which steps; None: it is not held.
    """
    order = jnp.arange(valid.shape[0]).reshape(-1, *(1 for _ in valid.shape[1:]))
    if reverse:
        last = jax.lax.cummin(jnp.where(valid, order, valid.shape[0]), reverse=True)
    else:
        last = jax.lax.cummax(jnp.where(valid, order, -1))

    def hold_leaf(leaf: Array, part: slice | None, value: Array, axis: int | None) -> Array:
        if part is None:
            return leaf
        steps, at = last, axis or 0
        if axis is None:
            reduce, none = (jnp.min, valid.shape[0]) if reverse else (jnp.max, -1)  # of no rows, too
            steps = reduce(last, axis=tuple(range(1, last.ndim)), initial=none)
        steps = steps[part]
        picked = jnp.stack([pick_steps(leaf, jnp.clip(step, 0, valid.shape[0] - 1), at) for step in steps])
        ever = (steps >= 0) & (steps < valid.shape[0])
        shape = (ever.shape[0], *(1 for _ in range(at)), *ever.shape[1:])
        return jnp.where(
            ever.reshape(shape + (1,) * (leaf.ndim - len(shape))), picked, jnp.broadcast_to(value, picked.shape)
        )

    return map_leaves(hold_leaf, ys, held, start, y_axes)


def without_hold(fill: Prefix) -> Prefix:
    """The fill of what is to be held afterwards."""
    return Prefix(tuple(0 if isinstance(value, str) else value for value in fill.leaves), fill.structure)


def is_held(fill: Prefix, y: PyTree) -> tuple[bool, ...]:
    """For each leaf of y whether its fill is "hold"."""
    return tuple(isinstance(value, str) for value in _spread(fill, y))


def fill_leaves(fill: Prefix, tree: PyTree) -> list[Array]:
    """The fill of each leaf, a scalar of the leaf's dtype; typed keys, and what is held, are filled with zero bits.

    Raises:
        Fault: for an `ArgumentError` if the prefix does not fit or a fill cannot be represented in a leaf's dtype.
    """
    pairs = zip(_spread(fill, tree), jax.tree.leaves(tree), strict=True)
    return [_cast(value, leaf, tree, place) for place, (value, leaf) in enumerate(pairs)]


def _spread(fill: Prefix, tree: PyTree) -> list[Any]:
    cure = "Give one scalar for all of y, or a prefix tree of y with scalars."
    return spread_prefix("`fill`", fill.tree, tree, "y", cure)


def _cast(value: Any, leaf: Any, tree: PyTree, place: int) -> Array:
    dtype = leaf.dtype if isinstance(leaf, jax.ShapeDtypeStruct) else jax.typeof(leaf).dtype
    if is_key(leaf) or isinstance(value, str):
        return jax.lax.full((), 0, dtype)
    if not holds(dtype, value):
        path, _ = leaves_with_path("y", tree)[place]
        raise Misuse(
            f"{{verb}} over {{body}}: {path} is {describe_leaf(leaf)}, which cannot hold the fill {value!r}.",
            "Give a `fill` that fits, or one for each leaf of y.",
        )
    with np.errstate(over="ignore"):  # a number beyond a floating-point dtype rounds to infinity
        return jnp.asarray(value, dtype)


def check_fill(fill: PyTree, *, may_hold: bool = True) -> PyTree:
    """The fill with Python scalars as leaves.

    Args:
        fill: what the user gave.
        may_hold: whether "hold" is one of the values that it may have.
    """
    others = '"hold" for the last valid y, ' if may_hold else ""

    def scalar(value: Any) -> Any:
        if isinstance(value, str) and value == HOLD:
            return HOLD
        if isinstance(value, Tracer) or np.ndim(value) or not isinstance(value, _SCALARS):
            raise TypeMisuse(
                f"{{verb}} over {{body}}: `fill` must be a number, got {describe_argument(value)}.",
                f"Give a Python or NumPy scalar, {others}or a prefix tree of them.",
            )
        return value.item() if isinstance(value, np.generic | np.ndarray | jax.Array) else value

    return jax.tree.map(scalar, fill, is_leaf=lambda leaf: leaf is None)


_SCALARS = (bool, int, float, complex, np.generic, np.ndarray, jax.Array)


class RowOutputs(NamedTuple):
    """What a masked loop does with its outputs.

    Attributes:
        idle: the outputs that are kept where nothing is run.
        held: for each leaf of y whether the state holds it.
        lasts: for each leaf that the state holds whether its last value is what is kept.
    """

    idle: Idle
    held: tuple[bool, ...]
    lasts: tuple[bool, ...] = ()


@dataclass(frozen=True)
class KeepRows(Transform):
    """Applies `save` to the outputs, for each row separately, and holds outputs whose fill is "hold".

    Attributes:
        save: a prefix of y: what is kept; None: everything.
        fill: a prefix of y: what it is on padded steps.
    """

    save: Prefix | None
    fill: Prefix
    stage: ClassVar[Stage] = Stage.HELD

    @classmethod
    def of(cls, save: Prefix | None, fill: PyTree) -> KeepRows:
        """With the fill as `check_fill` returns it."""
        return cls(save, Prefix.of(fill))

    def refuse_part(self, call: Call, given: Arguments) -> None:
        if HOLD in self.fill.leaves:
            raise Misuse(
                '{call}: `fill="hold"` cannot be combined with `offset`: the last y of a row may be in another part.',
                "Give a number, and hold the value in the carry.",
            )
        if self.save is not None:
            refuse_parts_of_keeps(self.save, call, given)

    def __call__(self, loop: Loop) -> Loop:
        if is_untraced(loop):
            outputs = RowOutputs(Idle(without_hold(self.fill)), ())
            kept = loop.having(rows=loop.masked._replace(outputs=outputs))
            return kept.finished(ys=lambda result: self._afterwards(loop, result))
        y, save = loop.hoisted.y, self.save or EVERYTHING
        keeps = spread_keeps(save, y)
        loop, stacked, outputs = self._hold(loop, keeps)
        loop = loop.having(keeps=stacked, rows=loop.masked._replace(outputs=outputs))

        def finish(result: Result) -> PyTree:
            ys = kept_leaves(result.ys, stacked)
            if any(outputs.held):
                kept = zip(result.state[0], _of(keeps, outputs.held), strict=True)
                last = iter(leaf for leaf, keep in kept if keep == LAST)
                ys = [next(last) if keep == LAST else y for y, keep in zip(ys, keeps, strict=True)]
            return without_dropped(ys, jax.tree.structure(y), save)

        return loop.finished(lambda state: state[1] if any(outputs.held) else state, finish)

    def _hold(self, loop: Loop, keeps: tuple[Keep, ...]) -> tuple[Loop, tuple[Keep, ...], RowOutputs]:
        """Holds the outputs whose fill says so, and those of which each row's last one is kept: none is stacked.

        Returns:
            The loop, what it keeps of the outputs that it stacks, and what it makes of them.
        """
        y, fill = loop.hoisted.y, self.fill
        start, fills = fill_leaves(fill, y), fill.spread(y, "y")
        if loop.masked.all_valid:  # nothing is filled, and the last y of all rows is that of the last step
            none = (False,) * len(keeps)
            left = _of(loop.masked.axes.y, [keep is not None for keep in keeps])
            return with_axes(loop, y=tuple(left)), keeps, RowOutputs(Idle(Prefix.of([])), none)
        held = tuple([k == LAST or (k is not None and fill == HOLD) for k, fill in zip(keeps, fills, strict=True)])
        loop = hold(loop, held, start, loop.hoisted.y_avals)
        stacked = tuple([None if keep == LAST else keep for keep in keeps])
        left = [keep is not None for keep in stacked]
        numbers = iter(range(sum(held)))
        slots = _of([next(numbers) if on else None for on in held], left)
        idle = Idle(Prefix.of(_of(fills, left)), tuple(slots))
        lasts = tuple(keep == LAST for keep in _of(keeps, held))
        return with_axes(loop, y=tuple(_of(loop.masked.axes.y, left))), stacked, RowOutputs(idle, held, lasts)

    def _afterwards(self, loop: Loop, result: Result) -> PyTree:
        """Each row's last valid y, from the outputs of all steps, if steps ran one by one or there is none."""
        ys = result.ys
        starts, fills = fill_leaves(self.fill, ys), self.fill.spread(ys, "y")
        keeps, valid = spread_keeps(self.save or EVERYTHING, one_of(ys)), loop.xs.valid
        if result.steps is not None:
            ran = mask_of_lengths(result.steps, loop.length)
            valid = ran[::-1] if loop.reverse else ran
        y_axes = spread_batch_axes(OF_Y, loop.masked.y_axes, one_of(ys), "y", valid.shape[1:])
        if loop.length:
            end = slice(None) if flags_given(loop).spans else slice(1) if loop.reverse else slice(-1, None)
            held = [
                end if keep == LAST else slice(None) if fill == HOLD else None
                for keep, fill in zip(keeps, fills, strict=True)
            ]
            ys = hold_afterwards(ys, valid, held, starts, y_axes, reverse=loop.reverse)
        elif LAST in keeps:
            leaves = jax.tree.leaves(ys)
            wide = [jnp.broadcast_to(value, (1, *y.shape[1:])) for value, y in zip(starts, leaves, strict=True)]
            ys = map_leaves(lambda y, leaf, keep: leaf if keep == LAST else y, ys, wide, keeps)
        if flags_given(loop).spans is not None:
            ys = _of_sequences(
                loop, ys, [axis if keep == LAST else None for axis, keep in zip(y_axes, keeps, strict=True)], starts
            )
        return ys if self.save is None else keep_afterwards(ys, self.save, reverse=loop.reverse)


def _of_sequences(loop: Loop, ys: PyTree, axes: Sequence[int | None], starts: Sequence[Array]) -> PyTree:
    """The outputs, those of which the last is kept with what the sequences ended with, as if of a single step."""
    from .spans import are_valid, ends_of

    spans = flags_given(loop).spans
    assert spans is not None
    some = are_valid(spans, loop.xs.valid)

    def ended(y: Array, axis: int | None, start: Array) -> Array:
        return y if axis is None else ends_of(y, spans, axis, start, some, reverse=loop.reverse)[None]

    return map_leaves(ended, ys, axes, starts)


def _of(values: Sequence[Any], flags: Sequence[bool]) -> list[Any]:
    return list(itertools.compress(values, flags))
