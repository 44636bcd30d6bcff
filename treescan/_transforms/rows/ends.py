"""The end of each packed sequence: its final carry, and its last outputs."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ..._avals import vary_over, varying_axes
from ..._axes import LeafAxes
from ..._loop.loop import Feed, Loop, Step
from ..._types import Array, PyTree
from .batch_axes import with_axes
from .packed import Spans, at_rows, numbers_of, refuse_split_rows, turns


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
        ends, inner = _split(state, held=self.held)
        inner, y = self.step(consts, inner, feed._replace(end=None))
        assert feed.end is not None
        rows = jnp.arange(feed.end.shape[0], dtype=jnp.int32)
        places = jnp.where(feed.end > 0, feed.end - 1, self.count + rows)  # no two are the same
        pairs = [(leaf, axis) for leaf, axis in zip(jax.tree.leaves(inner), self.axes, strict=True) if axis is not None]
        ends = [_put(end, leaf, places, axis) for end, (leaf, axis) in zip(ends, pairs, strict=True)]
        return _join(ends, inner, held=self.held), y


def _put(end: Array, leaf: Array, places: Array, axis: int) -> Array:
    at = (*(slice(None) for _ in range(axis)), places)
    return end.at[at].set(leaf, mode="drop", unique_indices=True)


def _split(state: Any, *, held: bool) -> tuple[list[Array], PyTree]:
    """The ends, and the state of before."""
    if not held:
        return state
    outputs, (ends, inner) = state
    return ends, (outputs, inner)


def _join(ends: list[Array], inner: Any, *, held: bool) -> PyTree:
    if not held:
        return ends, inner
    outputs, inner = inner
    return outputs, (ends, inner)


@dataclass(frozen=True)
class EndsOfSequences:
    """A `Packed`: the final carry is that of each sequence, and so is what `save="last"` keeps."""

    moves = True

    def __call__(self, loop: Loop) -> Loop:
        spans, valid, axes = loop.rows.given.spans, loop.xs.valid, loop.rows.axes.state
        if spans is None:
            return loop
        assert valid is not None
        refuse_split_rows(spans, valid)
        held = any(loop.rows.outputs.held)
        leaves, structure = jax.tree.flatten(loop.state)
        kept = tuple(None if idle else axis for idle, axis in zip(_unkept(loop, len(leaves)), axes, strict=True))
        starts = [_start(loop, i, leaf, kept[i], spans) for i, leaf in enumerate(leaves) if kept[i] is not None]
        numbers = numbers_of(spans, valid.shape)
        step = KeepEnds(loop.step, kept, held, spans[0].shape[0])
        loop = dataclasses.replace(
            loop,
            step=step,
            state=_join(starts, loop.state, held=held),
            xs=loop.xs._replace(end=jnp.where(turns(numbers, valid, later=not loop.reverse), numbers, 0)),
        )
        outputs = sum(loop.rows.outputs.held)
        loop = with_axes(loop, state=(*axes[:outputs], *(None,) * len(starts), *axes[outputs:]))

        def finish(state: PyTree) -> PyTree:
            ends, inner = _split(state, held=held)
            found = iter(ends)
            pairs = zip(jax.tree.leaves(inner), kept, strict=True)
            return jax.tree.unflatten(structure, [leaf if axis is None else next(found) for leaf, axis in pairs])

        return loop.finished(finish)


def _unkept(loop: Loop, count: int) -> list[bool]:
    """For each leaf of the state whether its ends are of no use: it is an output that is held and not kept."""
    lasts = loop.rows.outputs.lasts
    return [not last for last in lasts] + [False] * (count - len(lasts))


def _start(loop: Loop, number: int, leaf: Array, axis: int | None, spans: Spans) -> Array:
    """The initial ends of a leaf: the values that the sequences begin from. Sequences of 0 steps end with these."""
    assert axis is not None
    begins, of_state = loop.rows.begins, number - len(loop.rows.outputs.lasts)
    target = None if begins is None or of_state < 0 else begins.targets[of_state]
    target = leaf if target is None else target
    if begins is not None and of_state >= 0 and begins.tables[of_state]:
        start = jnp.moveaxis(target, 0, axis)
    else:
        start = at_rows(jnp.broadcast_to(target, leaf.shape), spans, axis)
    start = start if start.dtype == leaf.dtype else start.astype(leaf.dtype)
    return vary_over(start, varying_axes(jax.typeof(leaf)))
