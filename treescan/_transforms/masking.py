"""The transforms of a masked scan, in their order."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import jax

from .._avals import vary_over, varying_axes
from .._loop import Loop, as_arrays, is_jit_disabled
from .._tree import Prefix
from .._types import Array, PyTree, Remat
from .axes import LeafAxes, scan_over_axes
from .batch_axes import RowAxes, RowLoop, rows_of_x, spread_batch_axes
from .carries import refuse_shared_keys, spread_carry_axes
from .compact import refuse_tiers, tiers_of, trace_tiers
from .fill import hold, hold_afterwards, is_held, without_hold
from .hoist import Hoisted, flatten_only, hoist
from .mask import lend_rows, mask
from .resets import reset_rows
from .skip import SkipPlan, run_skipping, without_branches


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
        remat: as for `treescan.scan`.
    """

    carry_axes: Prefix
    x_axes: Prefix
    y_axes: Prefix
    fill: Prefix
    spelled: str
    time_axis: int
    chunk: int | None
    compact: bool | tuple[int, ...]
    remat: Remat | None


def run_masked(
    loop: Loop, valid: Array, resets: Array | None, plan: MaskPlan, names: tuple[str, str], in_axes: LeafAxes | None
) -> tuple[PyTree, PyTree]:
    """Runs a loop on padded rows.

    Args:
        loop: the loop, its xs as the user gave them.
        valid: bool[T, *batch].
        resets: bool[T, *batch], or None.
        plan: the axes, the fill, and how work is saved.
        names: the body's own names for its carry and its x.
        in_axes: for each leaf of xs the axis scanned over, or None; None as a whole: axis 0 for all.
    """
    given = _with_rows(loop, valid, plan, names, in_axes)
    tiers = tiers_of(plan.compact, valid.shape[1:]) if plan.compact else (0,)
    refuse_tiers(tiers, given.loop)
    untraced = is_jit_disabled() or not loop.length
    hoisted = flatten_only(given.loop) if untraced else hoist(given.loop)
    if not untraced:
        given = _with_outputs(given, hoisted.y, plan)
        trace_tiers(hoisted, given, tiers)
    fixed_axes, rows = _hoisted_rows(hoisted, given)
    fill = without_hold(plan.fill) if untraced else plan.fill
    rows = mask(rows, fixed_axes, plan.y_axes, fill)
    if resets is not None:
        rows = reset_rows(rows, resets)
    if not untraced:
        rows = hold(rows, fill, hoisted.y, hoisted.y_avals)
    skip = SkipPlan(plan.chunk, tiers, plan.remat, hoisted.effects)
    state, ys = run_skipping(rows, without_branches(skip) if hoisted.refs else skip, fill)
    if untraced:
        ys = _hold_outputs(ys, valid, plan, reverse=loop.reverse)
    elif any(is_held(plan.fill, hoisted.y)):
        _, state = state
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


def _hoisted_rows(hoisted: Hoisted, before: RowLoop) -> tuple[LeafAxes, RowLoop]:
    """Where the rows stand in the leaves that are unchanged, and in those of the loop that is left."""
    axes, pairs = before.axes, list(zip(before.axes.state, hoisted.fixed, strict=True))
    fixed = tuple(axis for axis, is_fixed in pairs if is_fixed)
    state = tuple(axis for axis, is_fixed in pairs if not is_fixed)
    return fixed, RowLoop(hoisted.loop, axes._replace(consts=(*fixed, *axes.consts), state=state))


def _with_outputs(rows: RowLoop, y: PyTree, plan: MaskPlan) -> RowLoop:
    valid = rows.loop.xs.valid
    assert valid is not None
    y_axes = spread_batch_axes("y_axes", plan.y_axes, y, "y", valid.shape[1:])
    return rows._replace(axes=rows.axes._replace(y=y_axes))


def _hold_outputs(ys: PyTree, valid: Array, plan: MaskPlan, *, reverse: bool) -> PyTree:
    if not valid.shape[0] or not any(is_held(plan.fill, ys)):
        return ys
    first = jax.tree.map(lambda y: y[0], ys)
    y_axes = spread_batch_axes("y_axes", plan.y_axes, first, "y", valid.shape[1:])
    return hold_afterwards(ys, valid, plan.fill, y_axes, reverse=reverse)
