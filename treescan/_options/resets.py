"""`resets` and packed sequences: where segments begin and end, from what they begin, and the carry that each ends with.

A row starts again where a segment begins, from its init or from `reset_to`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from .._avals import (
    Array,
    LeafAxes,
    PyTree,
    on_automatic_axes,
    parts_of,
    vary_over,
    varying_axes,
)
from .._errors import Misuse
from .._loop.feed import Consts, Feed, Slot
from .._loop.loop import Loop, Step
from .._rows.axes import Begins, Spans, flags_given, with_axes
from .._rows.leaves import expand, first_valid, pick_steps, select
from .._rows.spans import at_rows, numbers_of, refuse_split_rows, turns
from .._transforms.call import Arguments, Call
from .._transforms.transform import Stage, Transform
from .reset_to import check_settled

BEGINS_FROM: Slot[list[Array | None]] = Slot("begins from")
"""What segments begin from, for each leaf of the state; see `Reset`."""

RESET: Slot[Array] = Slot("reset", rows=True)
"""Which rows begin a segment before this step."""

END: Slot[Array] = Slot("end", rows=True)
"""Which packed sequence of each row ends with this step, counted from 1; 0: none."""


@dataclass(frozen=True)
class KeepEnds:
    """The step that stores the final values of the sequences that end in it.

    Its state is (ends, the inner state); where outputs are held, (held outputs, (ends, the inner state)). The ends are
    of the leaves that have rows, with an entry for each sequence in the place of one for each row. The feed says which
    sequences end, counted from 1.

    Attributes:
        step: the inner step.
        axes: for each leaf of the inner step's state the axis of the rows; None: no ends of it are kept.
        held: whether outputs are held.
        count: the number of sequences.
    """

    step: Step
    axes: LeafAxes
    held: bool
    count: int

    def __call__(self, consts: PyTree, state: Any, feed: Feed) -> tuple[PyTree, PyTree]:
        ends, inner = _without_ends(state, held=self.held)
        ending, feed = END.take(feed)
        inner, y = self.step(consts, inner, feed)
        rows = jnp.arange(ending.shape[0], dtype=jnp.int32)
        places = select(ending > 0, ending - 1, self.count + rows)  # no two are the same
        pairs = [(leaf, axis) for leaf, axis in zip(jax.tree.leaves(inner), self.axes, strict=True) if axis is not None]
        ends = [_put(end, leaf, places, axis) for end, (leaf, axis) in zip(ends, pairs, strict=True)]
        return _with_ends(ends, inner, held=self.held), y


def _put(end: Array, leaf: Array, places: Array, axis: int) -> Array:

    def put(end: Array, leaf: Array, places: Array) -> Array:
        at = (*(slice(None) for _ in range(axis)), places)
        return end.at[at].set(leaf, mode="drop", unique_indices=True)

    return on_automatic_axes(put, parts_of(end), end, leaf, places)


def _without_ends(state: Any, *, held: bool) -> tuple[list[Array], PyTree]:
    """The ends, and the state of before."""
    if not held:
        return state
    outputs, (ends, inner) = state
    return ends, (outputs, inner)


def _with_ends(ends: list[Array], inner: Any, *, held: bool) -> PyTree:
    if not held:
        return ends, inner
    outputs, inner = inner
    return outputs, (ends, inner)


@dataclass(frozen=True)
class EndsOfSequences(Transform):
    """A `Packed`: the final carry is that of each sequence, and so is what `save="last"` keeps."""

    stage: ClassVar[Stage] = Stage.ENDED

    def __call__(self, loop: Loop) -> Loop:
        spans, valid, axes = flags_given(loop).spans, loop.xs.valid, loop.masked.axes.state
        if spans is None:
            return loop
        refuse_split_rows(spans, valid)
        held = any(loop.masked.outputs.held)
        leaves, structure = jax.tree.flatten(loop.state)
        lasts = loop.masked.outputs.lasts  # the ends of an output that is held, and is not kept, are of no use
        kept = (*(axis if last else None for last, axis in zip(lasts, axes, strict=False)), *axes[len(lasts) :])
        starts = [_start(loop, i, leaf, kept[i], spans) for i, leaf in enumerate(leaves) if kept[i] is not None]
        numbers = numbers_of(spans, valid.shape)
        ending = select(turns(numbers, valid, later=not loop.reverse), numbers, jnp.zeros_like(numbers))
        step = KeepEnds(loop.step, kept, held, spans[0].shape[0])
        loop = loop.having(
            step=step,
            state=_with_ends(starts, loop.state, held=held),
            xs=END.put(loop.xs, ending),
        )
        outputs = sum(loop.masked.outputs.held)
        loop = with_axes(loop, state=(*axes[:outputs], *(None,) * len(starts), *axes[outputs:]))

        def finish(state: PyTree) -> PyTree:
            ends, inner = _without_ends(state, held=held)
            found = iter(ends)
            pairs = zip(jax.tree.leaves(inner), kept, strict=True)
            return jax.tree.unflatten(structure, [leaf if axis is None else next(found) for leaf, axis in pairs])

        return loop.finished(finish)


def _start(loop: Loop, number: int, leaf: Array, axis: int | None, spans: Spans) -> Array:
    """The initial ends of a leaf: the values that the sequences begin from. Sequences of 0 steps end with these."""
    assert axis is not None
    begins = None if loop.segments is None else loop.segments.begins
    of_state = number - len(loop.masked.outputs.lasts)
    target = None if begins is None or of_state < 0 else begins.targets[of_state]
    target = leaf if target is None else target
    if begins is not None and of_state >= 0 and begins.tables[of_state]:
        start = jnp.moveaxis(target, 0, axis)
    else:
        start = at_rows(jnp.broadcast_to(target, leaf.shape), spans, axis)
    start = start if start.dtype == leaf.dtype else start.astype(leaf.dtype)
    return vary_over(start, varying_axes(jax.typeof(leaf)))


@dataclass(frozen=True)
class Reset:
    """The step that begins segments first. Its state is a list of leaves.

    A target is what a leaf begins from, in the leaf's shape or a scalar; or a table of that, with an entry for each
    sequence. The feed's flags then are the numbers of the sequences that begin, counted from 1.

    Attributes:
        step: the inner step.
        carry_axes: for each leaf of the state, the axis where the batch shape starts; None: shared by all rows, and
            never reset.
        tables: for each leaf of the state whether its target is a table.
    """

    step: Step
    carry_axes: LeafAxes
    tables: tuple[bool, ...]

    def __call__(self, consts: Consts, state: list[Array], feed: Feed) -> tuple[PyTree, PyTree]:
        targets, consts = BEGINS_FROM.take(consts)
        flags, feed = RESET.take(feed)
        return self.step(consts, begin(flags, state, targets, self.carry_axes, self.tables), feed)


def begin(
    flags: Array, state: list[Array], targets: list[Array | None], axes: LeafAxes, tables: tuple[bool, ...]
) -> list[Array]:
    """The state, with the rows that are flagged at what they begin from; flags are bool[*batch] or numbers, int[R]."""
    begins = flags if flags.dtype == jnp.bool_ else flags > 0

    def of_leaf(leaf: Array, target: Array | None, axis: int | None, is_table: bool) -> Array:
        if axis is None or target is None:
            return leaf
        new = _entries_of(target, flags, axis, leaf) if is_table else target
        return select(expand(begins, leaf, axis), new if new.dtype == leaf.dtype else new.astype(leaf.dtype), leaf)

    return [of_leaf(*each) for each in zip(state, targets, axes, tables, strict=True)]


def _entries_of(table: Array, numbers: Array, axis: int, leaf: Array) -> Array:
    """For each row of a leaf the entry of its number, counted from 1; of a row that has none any entry."""

    def entries(table: Array, numbers: Array) -> Array:
        return jnp.moveaxis(jnp.take(table, jnp.maximum(numbers - 1, 0), 0, mode="clip"), 0, axis)

    return on_automatic_axes(entries, parts_of(leaf), table, numbers)


@dataclass(frozen=True)
class BeginSegments(Transform):
    """`reset_to`, and packed sequences with an init each: what segments begin from, and so each row's first valid step.

    A row whose first valid step is flagged is never shown its init. So its loop starts from what it begins from, which
    is what its padding is shown.
    """

    stage: ClassVar[Stage] = Stage.BEGUN

    def __call__(self, loop: Loop) -> Loop:
        begins, valid, axes = self._begins(loop), loop.xs.valid, loop.masked.axes.state
        state = loop.state
        if not (loop.masked.all_valid or 0 in valid.shape):
            have, first = first_valid(valid, reverse=loop.reverse)
            flags = pick_steps(begins.flags, first, 0)
            flags = flags & have if flags.dtype == jnp.bool_ else select(have, flags, jnp.zeros_like(flags))
            state = begin(flags, state, begins.targets, axes, begins.tables)
        assert loop.segments is not None
        return loop.having(state=state, segments=loop.segments._replace(begins=begins))

    def _begins(self, loop: Loop) -> Begins:
        rows, valid, given = loop.masked, loop.xs.valid, flags_given(loop)
        varying = varying_axes(jax.typeof(valid))
        values = given.to if given.inits is None else given.inits
        own = [value for value, is_fixed in zip(values, rows.was_fixed, strict=True) if not is_fixed]
        check_settled(loop, own)
        tables = tuple(given.inits is not None and value is not None for value in own)
        targets = [
            None if axis is None else leaf if value is None else vary_over(value, varying)
            for leaf, value, axis in zip(loop.state, own, rows.axes.state, strict=True)
        ]
        flags = flags_of(loop, reverse=loop.reverse)
        if given.inits is not None:
            assert given.spans is not None
            numbers = numbers_of(given.spans, valid.shape)
            flags = select(flags, numbers, jnp.zeros_like(numbers))
        return Begins(flags, targets, tables)


@dataclass(frozen=True)
class ResetRows(Transform):
    """`resets`: before each step that begins a segment, restores the state that the segment begins from."""

    stage: ClassVar[Stage] = Stage.RESET

    def refuse_part(self, call: Call, given: Arguments) -> None:
        assert given.rows is not None
        if given.rows.spans is not None:
            raise Misuse(
                "{call}: xs is a `Packed`, whose sequences begin and end in it, so it is no part of a longer run.",
                "Leave `offset` out. Or scan over its `data`, with its `mask` and `resets`, and give `reset_to`.",
            )
        if given.rows.to is None:
            raise Misuse(
                "{call}: with `offset`, `init` is the carry of the part before, and `resets` would restore that.",
                "Say by `reset_to` what they restore.",
            )
        if call.reverse:
            raise Misuse(
                "{call}: `resets` and `offset` cannot be combined in reverse: where the last segment of a part ends is "
                "known to the part after it.",
                "Run the whole loop at once, or run it forward.",
            )

    def __call__(self, loop: Loop) -> Loop:
        if loop.segments is None:
            return loop
        axes, begins = loop.masked.axes, begins_of(loop, loop.state)
        pairs = zip(begins.targets, begins.tables, axes.state, strict=True)
        own = [None if is_table or not target.ndim else axis for target, is_table, axis in pairs if target is not None]
        loop = loop.having(
            step=Reset(loop.step, axes.state, begins.tables),
            consts=BEGINS_FROM.put(loop.consts, begins.targets),
            xs=RESET.put(loop.xs, begins.flags),
        )
        return with_axes(loop, consts=BEGINS_FROM.note(axes.consts, own))


def begins_of(loop: Loop, state: list[Array]) -> Begins:
    """What segments begin from, in the leaves of a state: what was said, or that state."""
    if loop.segments is not None and loop.segments.begins is not None:
        return loop.segments.begins
    inits = [leaf if axis is not None else None for leaf, axis in zip(state, loop.masked.axes.state, strict=True)]
    return Begins(flags_of(loop, reverse=loop.reverse), inits, (False,) * len(inits))


def flags_of(loop: Loop, *, reverse: bool) -> Array:
    """bool[T, *batch]: before which steps a segment begins, in a direction.

    For a `Packed`, also sequences whose first step is not valid begin there.
    """
    assert loop.segments is not None
    resets = loop.segments.resets
    if loop.masked.all_valid:
        # In reverse, a segment begins one step before each flag, in time.
        return jnp.concatenate([resets[1:], jnp.zeros_like(resets[:1])]) if reverse else resets
    return begins_at(resets, loop.xs.valid, flags_given(loop).spans, reverse=reverse)


def begins_at(resets: Array, valid: Array, spans: Spans | None, *, reverse: bool) -> Array:
    """bool[T, *batch]: where a segment or a packed sequence begins, in a direction."""
    flags = beginnings(resets, valid, reverse=reverse)
    if spans is None:
        return flags
    refuse_split_rows(spans, valid)
    return flags | turns(numbers_of(spans, valid.shape), valid, later=reverse)


def beginnings(resets: Array, valid: Array, *, reverse: bool) -> Array:
    """bool[T, *batch]: where a segment begins. In reverse, that is its last valid step.

    Flags at invalid steps are ignored.
    """
    resets = resets & valid
    if not reverse or not valid.shape[0]:
        return resets
    steps = jnp.arange(valid.shape[0]).reshape(-1, *(1 for _ in valid.shape[1:]))
    valid_from = jax.lax.cummin(jnp.where(valid, steps, valid.shape[0]), reverse=True)  # the first valid step >= t
    flag_from = jax.lax.cummin(jnp.where(resets, steps, valid.shape[0]), reverse=True)
    end = jnp.full_like(valid_from[:1], valid.shape[0])
    next_valid = jnp.concatenate([valid_from[1:], end])
    next_flag = jnp.concatenate([flag_from[1:], end])
    return valid & (next_valid == next_flag) & (next_valid < valid.shape[0])
