"""The transforms of a masked scan, in their order."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._avals import vary_over, varying_axes
from .._loop import Loop, Transform, as_arrays, debugs_nans, is_jit_disabled
from .._remat import Remat
from .._rewrite import is_rewriting
from .._tree import Prefix
from .._types import Array, PyTree
from .axes import LeafAxes, scan_over_axes
from .batch_axes import RowAxes, RowLoop, rows_of_x, spread_batch_axes
from .call import Arguments, Call
from .carries import refuse_shared_keys, spread_carry_axes
from .compact import refuse_tiers, tiers_of, trace_tiers
from .fill import HOLD, Idle, fill_leaves, hold, hold_afterwards, without_hold
from .hoist import Hoisted, fixed_leaves, flatten_only, hoist, lift
from .mask import lend_rows, mask
from .nest import finish
from .outputs import (
    EVERYTHING,
    LAST,
    Keep,
    is_thinned,
    keep_afterwards,
    kept_leaves,
    one_of,
    spread_keeps,
    without_dropped,
)
from .refuse import refuse_budget, refuse_offload, refuse_to_repeat
from .resets import reset_rows
from .rows import mask_of_lengths, select_valid
from .skip import RowOutputs, SkipPlan, run_skipping, run_unskipped, without_branches
from .smooth import is_smooth
from .truncate import truncate_rows


@dataclass(frozen=True)
class MaskPlan:
    """What `mask_scan` is told beside the mask.

    Attributes:
        carry_axes: a prefix of the carry: where the batch shape starts; None: shared by all rows.
        x_axes: the same for one step's x.
        y_axes: the same for one step's y.
        fill: a prefix of y: what it is on steps that are not valid.
        spelled: the fill as text: 0.0 and -0.0 compare as equal.
        time_axis: where the steps stand in the mask and the resets.
        chunk: the steps of a chunk; None: to be chosen; 0: all of them.
        compact: whether to order rows, or the numbers of rows to choose from.
    """

    carry_axes: Prefix
    x_axes: Prefix
    y_axes: Prefix
    fill: Prefix
    spelled: str
    time_axis: int
    chunk: int | None
    compact: bool | tuple[int, ...]


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


@dataclass(frozen=True)
class MemoryPlan:
    """What a masked scan was told of memory and outputs.

    Attributes:
        remat: what the gradient recomputes; None: nothing beyond what it does unasked.
        save: a prefix of y: what is kept of the outputs; None: everything.
        truncate: the steps between which the gradient is cut; None: it is not.
    """

    remat: Remat | None = None
    save: Prefix | None = None
    truncate: int | None = None


@dataclass(frozen=True)
class Masked:
    """The program of a scan over padded rows.

    Attributes:
        call: how each step is run.
        rows: the axes, the fill, and how work is saved.
        memory: what the gradient saves, where it is cut, and what is kept of the outputs.
        in_axes: for each leaf of xs the axis scanned over, or None; None as a whole: axis 0 for all.
        outer: the transforms of the results.
    """

    call: Call
    rows: MaskPlan
    memory: MemoryPlan
    in_axes: LeafAxes | None
    outer: tuple[Transform, ...]
    moves = True

    def __call__(self, given: Arguments) -> tuple[PyTree, PyTree]:
        loop = self.call.lay(given)
        with self.call.scope():
            valid, resets = self._flags(given.rows)
            for transform in self.outer:
                loop = transform(loop)
            state, ys = run_masked(loop, valid, resets, self.rows, self.memory, self.in_axes)
            return finish(loop, state, ys)

    def _flags(self, flags: RowFlags) -> tuple[Array, Array | None]:
        """bool[T, *batch]: which steps of which rows are data, and which begin a segment."""
        axis = self.rows.time_axis
        resets = None if flags.resets is None else jnp.moveaxis(jnp.asarray(flags.resets), axis, 0)
        if flags.lengths is not None:
            return mask_of_lengths(flags.lengths, self.call.length), resets
        if flags.mask is not None:
            return jnp.moveaxis(jnp.asarray(flags.mask), axis, 0), resets
        assert resets is not None
        return jnp.ones_like(resets), resets


def run_masked(
    loop: Loop,
    valid: Array,
    resets: Array | None,
    plan: MaskPlan,
    chunks: MemoryPlan,
    in_axes: LeafAxes | None,
) -> tuple[PyTree, PyTree]:
    """Runs a loop on padded rows.

    Args:
        loop: the loop, its xs as the user gave them.
        valid: bool[T, *batch].
        resets: bool[T, *batch], or None.
        plan: the axes, the fill, and how work is saved.
        chunks: what the gradient saves, where it is cut, and what is kept of the outputs.
        in_axes: for each leaf of xs the axis scanned over, or None; None as a whole: axis 0 for all.
    """
    refuse_budget(chunks.remat, "a masked scan")
    refuse_offload(chunks.remat)
    given = _with_rows(loop, valid, plan, loop.names, in_axes)
    tiers = tiers_of(plan.compact, valid.shape[1:]) if plan.compact else (0,)
    refuse_tiers(tiers, given.loop)
    if is_jit_disabled() or not loop.length:
        return _run_untraced(given, resets, plan, chunks)
    given = given._replace(loop=_without_false_alarms(given))
    hoisted = hoist(given.loop)
    given = _with_outputs(given, hoisted.y, plan)
    trace_tiers(hoisted, given, tiers)
    if chunks.remat:
        refuse_to_repeat(hoisted)
    hoisted = lift(hoisted)
    keeps = spread_keeps(chunks.save or EVERYTHING, hoisted.y)
    rows = _transformed(_hoisted_rows(hoisted, given), plan, plan.fill, resets, chunks)
    rows, outputs = _hold(rows, keeps, plan.fill, hoisted)
    may_rule = is_rewriting() and not (hoisted.effects or hoisted.refs or hoisted.reverse_rule)
    chunk = 0 if plan.chunk is None and not plan.compact and not is_rewriting() else plan.chunk
    skip = SkipPlan(chunk, tiers, chunks.remat, hoisted.effects, may_rule, hoisted.branches)
    if hoisted.refs:
        skip = without_branches(skip, thinned=is_thinned(outputs.keeps))
    state, left = run_skipping(rows, skip, outputs)
    last = iter(())
    if any(outputs.held):
        held, state = state
        last = iter(leaf for leaf, keep in zip(held, _of(keeps, outputs.held), strict=True) if keep == LAST)
    ys = kept_leaves(left, outputs.keeps)
    ys = [next(last) if keep == LAST else y for y, keep in zip(ys, keeps, strict=True)]
    return hoisted.restore(state), without_dropped(ys, jax.tree.structure(hoisted.y), chunks.save or EVERYTHING)


def _transformed(
    hoisted: tuple[LeafAxes, RowLoop],
    plan: MaskPlan,
    fill: Prefix,
    resets: Array | None,
    chunks: MemoryPlan,
    fixed: tuple[bool, ...] | None = None,
) -> RowLoop:
    """The loop with its steps masked, its rows reset, and its gradient cut."""
    fixed_axes, rows = hoisted
    rows = mask(rows, fixed_axes, plan.y_axes, fill)
    if resets is not None:
        rows = reset_rows(rows, resets)
    return truncate_rows(rows, chunks.truncate, fixed) if chunks.truncate and rows.loop.length else rows


def _of(values: Sequence[Any], flags: Sequence[bool]) -> list[Any]:
    return [value for value, flag in zip(values, flags, strict=True) if flag]


def _hold(rows: RowLoop, keeps: tuple[Keep, ...], fill: Prefix, hoisted: Hoisted) -> tuple[RowLoop, RowOutputs]:
    """Holds the outputs whose fill says so, and those of which each row's last one is kept: they are not stacked."""
    start = fill_leaves(fill, hoisted.y)
    fills = fill.spread(hoisted.y, "y")
    held = tuple(k == LAST or (k is not None and fill == HOLD) for k, fill in zip(keeps, fills, strict=True))
    rows = hold(rows, held, start, hoisted.y_avals)
    stacked = tuple(None if keep == LAST else keep for keep in keeps)
    left = [keep is not None for keep in stacked]
    numbers = iter(range(sum(held)))
    slots = _of([next(numbers) if on else None for on in held], left)
    idle = Idle(Prefix.of(_of(fills, left)), tuple(slots))
    rows = rows._replace(axes=rows.axes._replace(y=tuple(_of(rows.axes.y, left))))
    return rows, RowOutputs(stacked, idle, held)


def _run_untraced(given: RowLoop, resets: Array | None, plan: MaskPlan, chunks: MemoryPlan) -> tuple[PyTree, PyTree]:
    """On values, step by step; what is held, and what is not kept, is seen to afterwards."""
    loop, valid = given.loop, given.loop.xs.valid
    assert valid is not None
    hoisted, fill = flatten_only(loop), without_hold(plan.fill)
    fixed = fixed_leaves(loop) if chunks.truncate and loop.length else None
    rows = _transformed(_hoisted_rows(hoisted, given), plan, fill, resets, chunks, fixed)
    state, ys = run_unskipped(rows, fill)
    starts, fills = fill_leaves(plan.fill, ys), plan.fill.spread(ys, "y")
    keeps = spread_keeps(chunks.save or EVERYTHING, one_of(ys))
    if loop.length:
        first = jax.tree.map(lambda y: y[0], ys)
        y_axes = spread_batch_axes("y_axes", plan.y_axes, first, "y", valid.shape[1:])
        held = [keep == LAST or fill == HOLD for keep, fill in zip(keeps, fills, strict=True)]
        ys = hold_afterwards(ys, valid, held, starts, y_axes, reverse=loop.reverse)
    elif LAST in keeps:
        leaves = [
            jnp.broadcast_to(value, (1, *y.shape[1:])) for value, y in zip(starts, jax.tree.leaves(ys), strict=True)
        ]
        none = [leaf if keep == LAST else y for leaf, y, keep in zip(leaves, jax.tree.leaves(ys), keeps, strict=True)]
        ys = jax.tree.unflatten(jax.tree.structure(ys), none)
    if chunks.save is not None:
        ys = keep_afterwards(ys, chunks.save, reverse=loop.reverse)
    return hoisted.restore(state), ys


def _with_rows(loop: Loop, valid: Array, plan: MaskPlan, names: tuple[str, str], in_axes: LeafAxes | None) -> RowLoop:
    """The loop with its mask, and where its rows stand."""
    carry, x = names
    batch = valid.shape[1:]
    carry_axes = spread_carry_axes(plan.carry_axes, loop.state, carry, batch)
    if plan.compact:
        refuse_shared_keys(loop.state, carry_axes, carry)
    x_axes, whole_axes = rows_of_x(loop.xs.x, plan.x_axes, in_axes, x, batch)
    varying = varying_axes(jax.typeof(valid))
    state = jax.tree.map(lambda leaf: vary_over(leaf, varying), as_arrays(loop.state))
    loop = dataclasses.replace(loop, state=state, xs=loop.xs._replace(valid=valid))
    if in_axes is not None:
        loop = scan_over_axes(loop, in_axes)
    if whole_axes:
        whole, inner = loop.consts
        loop = dataclasses.replace(loop, consts=(lend_rows(whole, whole_axes, valid), inner))
    others = len(jax.tree.leaves(loop.consts)) - len(whole_axes)
    return RowLoop(loop, RowAxes((*whole_axes, *(None,) * others), carry_axes, x_axes, ()))


def _without_false_alarms(rows: RowLoop) -> Loop:
    """Under `jax_debug_nans` the loop without padding: no step reads it, but the gradient may save it with the rest."""
    loop, axes = rows.loop, rows.axes.x
    if not debugs_nans() or not loop.length:
        return loop

    def cleaned(leaf: Array, axis: int | None) -> Array:
        if axis is None or not is_smooth(leaf):
            return leaf
        zero = jnp.zeros((), leaf.dtype)
        return jax.vmap(lambda valid, x: select_valid(valid, x, zero, axis))(loop.xs.valid, leaf)

    leaves, structure = jax.tree.flatten(loop.xs.x)
    x = jax.tree.unflatten(structure, [cleaned(*each) for each in zip(leaves, axes, strict=True)])
    return dataclasses.replace(loop, xs=loop.xs._replace(x=x))


def _hoisted_rows(hoisted: Hoisted, before: RowLoop) -> tuple[LeafAxes, RowLoop]:
    """Where the rows stand in the leaves that are unchanged, and in those of the loop that is left."""
    axes, pairs = before.axes, list(zip(before.axes.state, hoisted.fixed, strict=True))
    fixed = tuple(axis for axis, is_fixed in pairs if is_fixed)
    state = tuple(axis for axis, is_fixed in pairs if not is_fixed)
    closed = (None,) * (len(jax.tree.leaves(hoisted.loop.consts)) - len(fixed) - len(axes.consts))
    return fixed, RowLoop(hoisted.loop, axes._replace(consts=(*fixed, *closed, *axes.consts), state=state))


def _with_outputs(rows: RowLoop, y: PyTree, plan: MaskPlan) -> RowLoop:
    valid = rows.loop.xs.valid
    assert valid is not None
    y_axes = spread_batch_axes("y_axes", plan.y_axes, y, "y", valid.shape[1:])
    return rows._replace(axes=rows.axes._replace(y=y_axes))
