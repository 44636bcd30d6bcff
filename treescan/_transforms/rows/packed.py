"""Packed sequences: where each begins and ends, in which rows they are, and the carry that each ends with."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ..._avals import describe_leaf, on_automatic_axes, parts_of, vary_over, varying_axes
from ..._axes import LeafAxes
from ..._errors import Misuse
from ..._loop.loop import Feed, Loop, Step
from ..._types import Array, PyTree
from .axes import with_axes
from .leaves import may_branch, select

Spans = tuple[Array, Array, Array]
"""The row, the first step and the number of steps of each sequence, int32[N]."""


def refuse_split_rows(spans: Spans, valid: Array) -> None:
    """Refuses the rows of a single device in a `jax.shard_map`, because the index counts the rows of all devices."""
    if valid.ndim != 2:
        raise Misuse(
            f"{{call}}: the mask of the `Packed` must have two axes, steps and rows, but is {describe_leaf(valid)}.",
            "To map over several batches, stack all of their leaves: `jax.vmap(run)(batches)`. Or scan a single "
            "row, `mask_scan(step, init, data, mask=mask, resets=resets)`.",
        )
    split = varying_axes(jax.typeof(valid)) - varying_axes(jax.typeof(spans[0]))
    if not split and may_branch():
        return
    raise Misuse(
        "{call}: the rows of a `Packed` are sharded over devices, but its index counts the rows of all devices.",
        "In a `jax.shard_map`, leave `check_vma` on and give each device its own `Packed`, with its own index. Or call "
        "it outside of `jax.shard_map`, where JAX itself shards the rows. Or scan the rows themselves, which gives the "
        "carry of each row instead of each sequence: `mask_scan(step, init, packed.data, mask=packed.mask, "
        "resets=packed.resets)`.",
    )


def at_rows(leaf: Array, spans: Spans, axis: int | None) -> Array:
    """A leaf with an entry for each sequence instead of each row: the entry of the row of the sequence."""
    if axis is None:
        return leaf
    taken = functools.partial(jnp.take, axis=axis, mode="clip")
    return on_automatic_axes(taken, _without(parts_of(leaf), axis), leaf, spans[0])


def _without(parts: tuple[Any, ...], axis: int) -> tuple[Any, ...]:
    """How the axes of an array are sharded that has sequences in the place of rows: these are not."""
    return (*parts[:axis], None, *parts[axis + 1 :])


def ends_of(ys: Array, spans: Spans, axis: int, value: Array, some: Array, *, reverse: bool) -> Array:
    """The last output of each sequence, from the held outputs of all steps; `value` where `some` is not set."""
    ends = functools.partial(_ends_of, axis=axis, reverse=reverse)
    return on_automatic_axes(ends, _without(parts_of(ys)[1:], axis), ys, *spans, value, some)


def _ends_of(
    ys: Array, row: Array, start: Array, length: Array, value: Array, some: Array, *, axis: int, reverse: bool
) -> Array:
    step = jnp.where(length > 0, start if reverse else start + length - 1, ys.shape[0])
    picked = jnp.moveaxis(ys, axis + 1, 1).at[step, row].get(mode="clip") if ys.size else None
    wide = jnp.broadcast_to(value, (row.shape[0], *ys.shape[1 : axis + 1], *ys.shape[axis + 2 :]))
    some = some.reshape(-1, *(1 for _ in wide.shape[1:]))
    return jnp.moveaxis(wide if picked is None else jnp.where(some, picked, wide), 0, axis)


def are_valid(spans: Spans, valid: Array) -> Array:
    """bool[N]: whether any step of each sequence is."""

    def any_of_each(numbers: Array, valid: Array) -> Array:
        counts = jnp.zeros(spans[0].shape[0] + 1, jnp.int32)
        return counts.at[jnp.where(valid, numbers, 0)].add(1)[1:] > 0

    return on_automatic_axes(any_of_each, (), numbers_of(spans, valid.shape), valid)


def numbers_of(spans: Spans, shape: tuple[int, ...]) -> Array:
    """int32[T, R]: which sequence a step belongs to, counted from 1; 0: none."""
    row, start, length = spans
    begun = jnp.zeros(shape, jnp.int32)
    if 0 in shape:
        return begun
    counted = jnp.arange(1, row.shape[0] + 1, dtype=jnp.int32)
    begun = begun.at[jnp.where(length > 0, start, shape[0]), row].set(counted, mode="drop")
    steps = jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    last = jax.lax.cummax(jnp.where(begun > 0, steps, -1))
    number = jnp.where(last < 0, 0, jnp.take_along_axis(begun, jnp.maximum(last, 0), 0))
    ends = jnp.concatenate([jnp.zeros_like(start[:1]), start + length])
    return jnp.where(steps < ends[number], number, 0)


def turns(numbers: Array, valid: Array, *, later: bool) -> Array:
    """bool[T, R]: valid steps of a sequence whose neighbour is of another, or of none.

    The neighbour is the row's next valid step where `later` is set, else the one before.
    """
    if 0 in valid.shape:
        return valid
    return on_automatic_axes(functools.partial(_turns, later=later), parts_of(valid), numbers, valid)


def _turns(numbers: Array, valid: Array, *, later: bool) -> Array:
    count = valid.shape[0]
    steps = jax.lax.broadcasted_iota(jnp.int32, valid.shape, 0)
    if later:
        found = jax.lax.cummin(jnp.where(valid, steps, count), reverse=True)
        near = jnp.concatenate([found[1:], jnp.full_like(found[:1], count)])
    else:
        found = jax.lax.cummax(jnp.where(valid, steps, -1))
        near = jnp.concatenate([jnp.full_like(found[:1], -1), found[:-1]])
    other = jnp.take_along_axis(numbers, jnp.clip(near, 0, count - 1), 0)
    is_other = (near < 0) | (near >= count) | (numbers != other)
    return valid & is_other & (numbers > 0)


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
        places = select(feed.end > 0, feed.end - 1, self.count + rows)  # no two are the same
        pairs = [(leaf, axis) for leaf, axis in zip(jax.tree.leaves(inner), self.axes, strict=True) if axis is not None]
        ends = [_put(end, leaf, places, axis) for end, (leaf, axis) in zip(ends, pairs, strict=True)]
        return _join(ends, inner, held=self.held), y


def _put(end: Array, leaf: Array, places: Array, axis: int) -> Array:

    def put(end: Array, leaf: Array, places: Array) -> Array:
        at = (*(slice(None) for _ in range(axis)), places)
        return end.at[at].set(leaf, mode="drop", unique_indices=True)

    return on_automatic_axes(put, parts_of(end), end, leaf, places)


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
            xs=loop.xs._replace(end=_where_they_end(numbers, valid, reverse=loop.reverse)),
        )
        outputs = sum(loop.rows.outputs.held)
        loop = with_axes(loop, state=(*axes[:outputs], *(None,) * len(starts), *axes[outputs:]))

        def finish(state: PyTree) -> PyTree:
            ends, inner = _split(state, held=held)
            found = iter(ends)
            pairs = zip(jax.tree.leaves(inner), kept, strict=True)
            return jax.tree.unflatten(structure, [leaf if axis is None else next(found) for leaf, axis in pairs])

        return loop.finished(finish)


def _where_they_end(numbers: Array, valid: Array, *, reverse: bool) -> Array:
    """int32[T, R]: the number of the sequence that ends at a step; 0: none."""
    return select(turns(numbers, valid, later=not reverse), numbers, jnp.zeros_like(numbers))


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
