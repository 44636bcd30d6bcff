"""Chunks in which no row is valid are not run.

Which branch each chunk takes is computed for all chunks before the loop. The gradient recomputes a chunk from the
carry that went in: the checkpoint encloses the branch, because what a branch would save, closed-over weights among it,
is stacked once a chunk.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from .._avals import is_key, promoted
from .._chunk import Level, run_chunked
from .._loop import Feed, Loop, Step, run
from .._remat import Remat
from .._sizes import Wish, plan_sizes
from .._tree import Prefix
from .._types import PyTree
from .batch_axes import RowAxes, RowLoop
from .branches import MappedLater
from .checkpoint import Checkpointed, checkpoint, checkpoint_steps
from .compact import LiveRows
from .fill import Idle
from .in_bulk import in_bulk
from .in_place import InPlace
from .lend import may_branch
from .nest import levels_for, levels_of, nearest
from .outputs import Keep, boundaries, is_thinned
from .refuse import refuse_symbolic, refuse_with_refs
from .remat import remat_wishes
from .schedule import Schedule, make_schedule
from .thin import emitting, run_keeping

LARGEST, SMALLEST, FEWEST = 16, 8, 4
"""Of the chunk that is chosen for the user: the most and the least steps, and of how many a short loop is made."""


@dataclass(frozen=True)
class RunLive:
    """The step that runs of a chunk what its schedule says.

    Attributes:
        step: runs a whole chunk.
        tiers: the numbers of rows to choose from; only the last, all of them, where rows are not ordered.
        axes: where the rows stand.
        idle: the outputs where nothing is run.
        remat: whether the gradient recomputes the chunk.
        looped: whether this is the step of a loop.
    """

    step: Step
    tiers: tuple[int, ...]
    axes: RowAxes
    idle: Idle
    remat: bool
    looped: bool

    def __call__(self, consts: PyTree, state: PyTree, feed: Feed) -> tuple[PyTree, PyTree]:
        schedule: Schedule = feed.schedule
        feed = feed._replace(schedule=schedule.order)
        return (Checkpointed(self.branch, self.looped) if self.remat else self.branch)(
            (schedule.branch, consts), state, feed
        )

    def branch(self, consts: PyTree, state: PyTree, feed: Feed) -> tuple[PyTree, PyTree]:
        """One of the branches, by the number that leads the consts."""
        index, consts = consts
        some = [LiveRows(self.step, tier, self.axes, self.idle) for tier in self.tiers[:-1]]
        taken: list[Callable[..., Any]] = [*some, self._everything]
        if self.remat and _may_nest(
            (consts, state, feed)
        ):  # else the branches that are not taken would write zeros for all that these save
            taken = [checkpoint(branch, prevent_cse=False) for branch in taken]
        return jax.lax.switch(index, [self._nothing, *taken], consts, state, feed)

    def _everything(self, consts: PyTree, state: PyTree, feed: Feed) -> tuple[PyTree, PyTree]:
        return self.step(consts, state, feed._replace(schedule=None))

    def _nothing(self, consts: PyTree, state: PyTree, feed: Feed) -> tuple[PyTree, PyTree]:
        final, types = jax.eval_shape(self._everything, consts, state, feed)
        # The branches must agree: a weakly typed init that no trace has settled is promoted as it is by the loop.
        state = jax.tree.map(lambda given, returned: promoted(given, returned)[0], state, final)
        return state, self.idle(state, types)


@dataclass(frozen=True)
class SkipPlan:
    """How `mask_scan` saves work and memory.

    Attributes:
        chunk: the steps of a chunk; None: to be chosen; 0: nothing is skipped but a loop without any valid step.
        tiers: the numbers of rows that the body is made for; only one for all rows.
        remat: what the gradient recomputes.
        effects: whether the body has effects, which no gradient may repeat unasked.
        may_rule: whether the loop may be run by a function that has a rule for its derivative.
        branches: whether the body branches.
    """

    chunk: int | None
    tiers: tuple[int, ...]
    remat: Remat | None
    effects: bool = False
    may_rule: bool = False
    branches: bool = False


def without_branches(plan: SkipPlan, *, thinned: bool) -> SkipPlan:
    """The plan for a body that closes over mutable arrays: JAX differentiates through them in the plain loop alone.

    Raises:
        Fault: for an `ArgumentError` if the plan asks for what needs branches or a second computation.
    """
    asked = {
        "chunk": bool(plan.chunk),
        "compact": len(plan.tiers) > 1,
        "remat": plan.remat is not None,
        "save": thinned,
    }
    for option in (name for name, on in asked.items() if on):
        refuse_with_refs(option)
    return dataclasses.replace(plan, chunk=0)


def chunk_size(length: int) -> int:
    """The steps of a chunk for a loop: 16, fewer for short loops, and near that a divisor, so that nothing remains."""
    size = min(LARGEST, max(SMALLEST, length // FEWEST))
    near = [other for other in range(size // 2 + 1, size * 2) if length % other == 0 and other < length]
    return min(near, key=lambda other: abs(other - size), default=size)


def run_skipping(rows: RowLoop, plan: SkipPlan, outputs: RowOutputs) -> tuple[PyTree, list[Any]]:
    """Runs a masked loop, without the chunks in which no row is valid.

    Args:
        rows: the loop, and where its rows stand.
        plan: how large chunks are, and what the gradient saves.
        outputs: what is kept of them.
    """
    loop, valid = rows.loop, rows.loop.xs.valid
    assert valid is not None
    if plan.remat:
        loop = checkpoint_steps(loop, plan.remat)
    if 0 in valid.shape or not may_branch():
        levels = levels_for(loop, remat_wishes(loop.length, plan.remat), outputs.keeps)
    else:
        size, levels = _levels(rows, plan, outputs)
        loop = dataclasses.replace(loop, xs=loop.xs._replace(schedule=make_schedule(valid, size, plan.tiers)))
        in_place = InPlace(size, plan.tiers, rows.axes, outputs.idle)
        plain = len(levels) == 1 and size < loop.length and not plan.remat
        ruled = plan.may_rule and plan.branches and any(_is_recomputed(level) for level in levels)
        if plan.may_rule and plain and not is_thinned(outputs.keeps) and in_place.fits(loop):
            loop = dataclasses.replace(loop, step=emitting(loop.step, outputs.keeps))
            return in_place.run(loop, lambda loop: run_chunked(_mapped_later(loop) if ruled else loop, levels))
        loop = _mapped_later(loop) if ruled else loop
    return run_keeping(loop, levels, outputs.keeps)


def _mapped_later(loop: Loop) -> Loop:
    return dataclasses.replace(loop, step=MappedLater(loop.step))


def _is_recomputed(level: Level) -> bool:
    return isinstance(level.around, _Around) and level.around.remat


def _levels(rows: RowLoop, plan: SkipPlan, outputs: RowOutputs) -> tuple[int, tuple[Level, ...]]:
    """The size of the chunks that may be skipped, and all levels."""
    length = rows.loop.length
    for option, asked in (("chunk", plan.chunk), ("compact", len(plan.tiers) > 1)):
        if asked:
            refuse_symbolic(length, option)
    whole = plan.chunk == 0 or not isinstance(length, int)
    size = length if whole else min(plan.chunk or chunk_size(length), length)
    remat, kept = remat_wishes(length, plan.remat), boundaries(outputs.keeps, length)
    if plan.chunk:  # what does not fit the chunks that were asked for is kept in all steps, and cut afterwards
        kept = [wish for wish in kept if not (wish.size % size and size % wish.size)]
    own = [] if whole else [Wish(size, exact=bool(plan.chunk) or not kept)]
    sizes = plan_sizes(length, [*own, *remat, *kept]) if own or remat or kept else ()
    size = size if whole or size == 1 else nearest((*sizes, length), size)
    around = _Around(
        rows.axes, plan.tiers, outputs.idle, remat=not (whole or plan.effects), only=size == length, rules=plan.may_rule
    )
    others = levels_of([other for other in sizes if other != size], remat)
    levels = [*others, Level(size, around, scheduled=True)]
    return size, tuple(sorted(levels, key=lambda level: level.size))


def run_unskipped(rows: RowLoop, fill: Prefix) -> tuple[PyTree, PyTree]:
    """Runs a masked loop step by step, unless nothing at all is valid: its steps were not traced."""
    loop, valid = rows.loop, rows.loop.xs.valid
    assert valid is not None
    if 0 in valid.shape or not may_branch():
        return run(loop)
    around = _Around(rows.axes, (0,), Idle(fill), remat=False, only=True, rules=False)
    loop = dataclasses.replace(loop, xs=loop.xs._replace(schedule=make_schedule(valid, loop.length, (0,))))
    return run_chunked(loop, (Level(loop.length, around, scheduled=True),))


class RowOutputs(NamedTuple):
    """What is kept of the outputs of a masked loop.

    Attributes:
        keeps: for each leaf of y.
        idle: the outputs that are kept where nothing is run.
        held: for each leaf of y whether the state holds it.
    """

    keeps: tuple[Keep, ...]
    idle: Idle
    held: tuple[bool, ...]


@dataclass(frozen=True)
class _Around:
    """What is put around the step that runs a chunk; `only` if there is but one, `rules` if it may have a rule."""

    axes: RowAxes
    tiers: tuple[int, ...]
    idle: Idle
    remat: bool
    only: bool
    rules: bool

    def __call__(self, step: Step, looped: bool) -> Step:
        # A remainder is not worth further copies of the body.
        tiers = self.tiers if looped or self.only else self.tiers[-1:]
        step = in_bulk(step) if self.remat and self.rules else step
        return RunLive(step, tiers, self.axes, self.idle, self.remat and looped, looped)


def _may_nest(tree: PyTree) -> bool:
    """Whether a branch may be recomputed by itself: before 0.10, JAX does not split one that typed keys enter."""
    return jax.__version_info__ >= (0, 10) or not any(map(is_key, jax.tree.leaves(tree)))
