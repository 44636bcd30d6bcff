"""Rows that stop independently.

The loop ends when the last row has stopped. A row that has stopped keeps its state, and the body receives a good pair
in its place, as in a masked scan. With `compact`, each chunk of steps runs on the rows that continue, and on some
others to fill the tier.

Once the loop has run, the steps of each row are known. The chunks are then those of a masked scan, for the derivative.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ..._avals import is_sharded
from ..._axes import LeafAxes
from ..._errors import BodyError, Fault, speaking_of
from ..._loop.chunk import Around
from ..._loop.loop import Feed, Loop, Step
from ..._trace.hoist import Part, merge
from ..._tree import Prefix
from ..._types import Array, PyTree
from ..rows.axes import RowAxes
from ..rows.compact import LiveRows, failed_with_fewer_rows, take_rows
from ..rows.fill import Idle
from ..rows.leaves import mask_of_lengths, most_of_all, most_of_devices
from ..rows.mask import mask
from ..rows.schedule import make_schedule
from ..weights.in_bulk import in_bulk
from .condition import CallCondition, Condition, trace_condition
from .early_exit import Chunks, MaskedStep, Progress, Reads, StepOutputs, any_of_all, going_on
from .tangents import ZERO, FinishedLoop, StepByStep, Ways, group, order_of_steps, recomputed_chunk, run_chunk


def mask_rows(loop: Loop, going: Array, fill: Prefix) -> Loop:
    """The loop, its step masked; rows that have stopped are shown the first pair of their own or of another row.

    Args:
        loop: the loop.
        going: bool[*batch], the rows that take the first step.
        fill: a prefix of y: what it is for rows that have stopped.
    """
    first = -1 % loop.length if loop.reverse else 0
    xs = jax.tree.map(lambda leaf: jax.lax.slice_in_dim(leaf, first, first + 1), loop.xs)
    one = dataclasses.replace(loop, xs=xs._replace(valid=going[None]), length=1)
    return dataclasses.replace(mask(one, fill), xs=loop.xs, length=loop.length)


def trace_for_tiers(
    condition: Condition, call: CallCondition, init: PyTree, axes: LeafAxes, tiers: tuple[int, ...]
) -> Condition:
    """The condition, traced for each number of rows; `axes` says where these are in each leaf of `init`."""
    traces = list(condition.jaxprs)
    for tier in tiers[:-1]:
        given = jax.eval_shape(lambda tree, tier=tier: take_rows(tree, axes, jnp.arange(tier)), init)
        try:
            traced = trace_condition(call, given)
        except Fault:
            raise
        except Exception as error:
            with speaking_of(call.body.function):
                raise failed_with_fewer_rows(error, "{body}, the condition,", tier, max(tiers), _ONE_EACH) from None
        if traced.batch != (tier, *condition.batch[1:]):
            with speaking_of(call.body.function):
                raise _of_other_rows(traced.batch, tier, max(tiers))
        traces.extend(traced.jaxprs)
    return dataclasses.replace(condition, jaxprs=tuple(traces))


_ONE_EACH = (
    "It must return one bool for each row of the carry that it receives. `compact` cannot select the rows of an array "
    "that the condition closes over: pass such an array through the carry."
)


def _of_other_rows(batch: tuple[int, ...], tier: int, rows: int) -> Fault:
    shape = ",".join(map(str, batch))
    return Fault(
        BodyError,
        f"{{body}}, the condition, returned bool[{shape}] when `compact` called it with {tier} of the {rows} rows.",
        _ONE_EACH,
    )


def axes_of_carry(loop: Loop, fixed: tuple[bool, ...], count: int) -> LeafAxes:
    """Where the rows are in the last `count` leaves of the whole state, those included that no step changes."""
    return tuple(merge(fixed, loop.rows.fixed, loop.rows.axes.state)[len(fixed) - count :])


@dataclass(frozen=True)
class TakeRows:
    """The step of rows that stop, which is only taken while any of them goes on. Its consts are `Reads`.

    Attributes:
        step: takes it.
        outputs: y where no step is taken.
        y_axes: where the rows are in y.
        branches: whether a branch may depend on data.
    """

    step: MaskedStep
    outputs: StepOutputs
    y_axes: LeafAxes
    branches: bool

    def __call__(self, reads: Reads, progress: Progress, feed: Feed) -> tuple[Progress, PyTree]:
        if not self.branches:
            return self._take(reads, progress, feed)
        return jax.lax.cond(any_of_all(going_on(progress, reads)), self._take, self._leave, reads, progress, feed)

    def _take(self, reads: Reads, progress: Progress, feed: Feed) -> tuple[Progress, PyTree]:
        progress, y = self.step(reads, progress, feed)
        return progress, self.outputs.varied(y)

    def _leave(self, reads: Reads, progress: Progress, feed: Feed) -> tuple[Progress, PyTree]:
        del reads, feed
        rows = progress.holds.shape[0]
        filled = zip(self.outputs.filled(), self.y_axes, strict=True)
        return progress, [_first(leaf, rows, axis) for leaf, axis in filled]


def _first(leaf: Array, rows: int, axis: int | None) -> Array:
    whole = axis is None or leaf.shape[axis] == rows or is_sharded(leaf)
    return leaf if whole or axis is None else jax.lax.slice_in_dim(leaf, 0, rows, axis=axis)


@dataclass(frozen=True)
class TakeLiveRows:
    """The step that runs a chunk on the rows that go on; `saves`: also what the state was before, [1, ...].

    Attributes:
        step: runs a chunk.
        size: its steps.
        outputs: y where no step is taken.
        tiers: the numbers of rows to choose from.
        axes: where the rows are, in `Reads` and `Progress` too.
        saves: whether it returns the state of before.
    """

    step: Step
    size: int
    outputs: StepOutputs
    tiers: tuple[int, ...]
    axes: RowAxes
    saves: bool

    def __call__(self, reads: Reads, progress: Progress, feed: Feed) -> tuple[Progress, PyTree]:
        before = [leaf[None] for leaf in progress.leaves] if self.saves else []
        schedule = make_schedule(going_on(progress, reads)[None], 1, self.tiers)
        assert schedule.order is not None
        idle = Idle(self.outputs.fill)
        some = [LiveRows(self.step, tier, self.axes, idle) for tier in self.tiers[:-1]]
        feed = feed._replace(schedule=schedule.order[0])
        ways: list[Callable[..., Any]] = [self._leave, *some, self._everything]
        progress, ys = jax.lax.switch(schedule.branch[0], ways, reads, progress, feed)
        return progress, ((ys, before) if self.saves else ys)

    def _everything(self, reads: Reads, progress: Progress, feed: Feed) -> tuple[Progress, PyTree]:
        return self.step(reads, progress, feed._replace(schedule=None))

    def _leave(self, reads: Reads, progress: Progress, feed: Feed) -> tuple[Progress, PyTree]:
        del reads, feed
        return progress, self.outputs.filled_chunk(self.size)


@dataclass(frozen=True)
class _AroundLiveRows:
    size: int
    outputs: StepOutputs
    tiers: tuple[int, ...]
    axes: RowAxes
    saves: bool

    def __call__(self, step: Step, looped: bool) -> Step:
        del looped  # nothing remains
        return TakeLiveRows(step, self.size, self.outputs, self.tiers, self.axes, self.saves)


def around_live_rows(
    loop: Loop, outputs: StepOutputs, size: int, tiers: tuple[int, ...], *, save: bool
) -> Around | None:
    """What is put around chunks of so many steps; None where rows are not ordered.

    Args:
        loop: consts `Reads`, state `Progress`; its rows are those of the masked loop.
        outputs: y where no step is taken.
        size: the steps of a chunk.
        tiers: the numbers of rows to choose from.
        save: whether the state at the start of each chunk is returned too.
    """
    if len(tiers) < 2:
        return None
    axes: RowAxes = loop.rows.axes
    others = len(jax.tree.leaves(loop.consts)) - len(axes.consts)
    axes = axes._replace(consts=(*axes.consts, *(None,) * others), state=(0, 0, *axes.state))
    return _AroundLiveRows(size, outputs, tiers, axes, save)


@dataclass(frozen=True)
class _Fed:
    """A step that is fed one part of its schedule, or none."""

    step: Step
    part: int | None

    def __call__(self, consts: Any, state: list[Any], feed: Feed) -> tuple[list[Any], Any]:
        return self.step(consts, state, feed._replace(schedule=None if self.part is None else feed.schedule[self.part]))


def ways_of_rows(
    ran: FinishedLoop,
    part: Part,
    d_consts: list[Array],
    outputs: StepOutputs,
    plan: Chunks,
    tiers: tuple[int, ...],
    *,
    branches: bool,
    rules: bool,
) -> Ways:
    """How to compute the chunks of a loop whose rows stop independently.

    Args:
        ran: the loop, not yet masked, and what is known of how it ran.
        part: which leaves of the consts have a tangent.
        d_consts: these tangents.
        outputs: the types of y.
        plan: the chunks, and what is recomputed within them.
        tiers: the numbers of rows to choose from.
        branches: whether a branch may depend on data.
        rules: whether a chunk may have a rule for derivatives of its own.
    """
    loop, taken, size = ran.loop, ran.taken, plan.size
    masked, d_consts = _masked(loop, taken > 0, part, d_consts)
    good, consts = masked.consts
    order = order_of_steps(loop)
    first = mask_of_lengths(taken, loop.length)
    valid = first[::-1] if loop.reverse else first
    keeps = plan.remat is not None or plan.inner or not rules
    every = recomputed_chunk(masked, outputs, plan) if keeps else in_bulk(run_chunk(masked, outputs, size))
    if not branches:
        none = jnp.zeros(loop.length // size, jnp.int32)
        return Ways(good, consts, d_consts, (_Fed(every, None),), none, group(valid, size), None)
    schedule = make_schedule(valid, size, tiers)
    most = most_of_all(most_of_devices(jnp.max(taken)))
    ends = jnp.max(group(order, size), axis=1) >= most
    by_step = dataclasses.replace(masked, step=StepByStep(masked.step, dataclasses.replace(outputs, fill=ZERO)))
    some = [_Fed(LiveRows(every, tier, masked.rows.axes, Idle(ZERO)), 0) for tier in tiers[:-1]]
    runners = (*some, _Fed(run_chunk(by_step, outputs, size), 1), _Fed(every, None))
    branch = jnp.where((schedule.branch == len(tiers)) & ~ends, len(runners), schedule.branch)
    fed = schedule.order, group(order < most, size)
    return Ways(good, consts, d_consts, runners, branch, group(valid, size), fed)


def _masked(loop: Loop, going: Array, part: Part, d_consts: list[Array]) -> tuple[Loop, list[Array]]:
    """The masked loop, and the tangents of its consts: some rows borrow those of others."""
    on, off = part.split(loop.consts)

    def shown(on: list[Array]) -> tuple[list[Array], Any]:
        masked = mask_rows(dataclasses.replace(loop, consts=part.join(on, off)), going, ZERO)
        return part.split(masked.consts[1])[0], masked.consts

    _, d_consts, consts = jax.jvp(shown, (on,), (d_consts,), has_aux=True)
    masked = mask_rows(loop, going, ZERO)
    return dataclasses.replace(masked, consts=consts), d_consts
