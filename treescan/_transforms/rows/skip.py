"""`chunk`: chunks without a valid step are not run.

The branch of each chunk is computed before the loop. The gradient recomputes a chunk from the carry that it was given.
The checkpoint encloses the branch: what a branch saves, weights included, would be stacked once per chunk.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from ..._avals import is_key, promoted
from ..._loop.chunk import Level, run_chunked
from ..._loop.loop import Feed, Loop, Step
from ..._loop.rewrite import is_rewriting
from ..._loop.run import run
from ..._loop.sizes import Wish, chunk_size, plan_sizes
from ..._trace.hoist import is_untraced
from ..._types import PyTree
from ..checkpoint import Checkpointed, checkpoint
from ..nest import levels_for, levels_of, nearest
from ..outputs import boundaries, is_thinned
from ..refuse import refuse_symbolic, refuse_with_refs
from ..remat import choose_fastest, recompute_chunks
from ..thin import emitting, run_keeping
from ..weights.branches import with_safe_branches
from ..weights.in_bulk import in_bulk
from .batch_axes import RowAxes
from .compact import LiveRows, tiers_of
from .fill import Idle
from .in_place import InPlace
from .lend import may_branch
from .schedule import Schedule, make_schedule


@dataclass(frozen=True)
class RunLive:
    """The step that runs of a chunk what its schedule says.

    Attributes:
        step: runs a whole chunk.
        tiers: the numbers of rows to choose from; only the last, all of them, where rows are not ordered.
        axes: where the rows are.
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
class Skip:
    """`chunk` and `compact`: runs the chunks that hold a valid step, and of these the rows that do.

    Attributes:
        chunk: the steps of a chunk; None: to be chosen; 0: nothing is skipped but a loop without any valid step.
        compact: whether to order rows, or the numbers of rows to choose from.
    """

    chunk: int | None
    compact: bool | tuple[int, ...]
    moves = True

    def __call__(self, loop: Loop) -> Loop:
        return dataclasses.replace(loop, runner=run_unskipped if is_untraced(loop) else self.run)

    def run(self, loop: Loop) -> tuple[PyTree, list[Any]]:
        """Runs a masked loop, without the chunks in which no row is valid."""
        if loop.rows.all_valid:
            return self._run_all(loop)
        valid = loop.xs.valid
        assert valid is not None
        chunk, tiers = self._plan(loop)
        trace, outputs = loop.trace, loop.rows.outputs
        if 0 in valid.shape or not may_branch():
            return run_keeping(loop, levels_for(loop, loop.wishes, outputs.keeps), outputs.keeps)
        may_rule = is_rewriting() and not (trace.effects or trace.refs or trace.reverse_rule)
        size, levels = _levels(loop, chunk, tiers, may_rule=may_rule)
        recomputed = _is_cut(loop, chunk) and not trace.effects
        loop = dataclasses.replace(loop, xs=loop.xs._replace(schedule=make_schedule(valid, size, tiers)))
        in_place = InPlace(size, tiers, loop.rows.axes, outputs.idle)
        plain = len(levels) == 1 and size < loop.length and not loop.recomputed
        ruled = may_rule and recomputed
        if may_rule and plain and not is_thinned(outputs.keeps) and in_place.fits(loop):
            loop = dataclasses.replace(loop, step=emitting(loop.step, outputs.keeps))
            return in_place.run(loop, lambda loop: run_chunked(with_safe_branches(loop) if ruled else loop, levels))
        return run_keeping(with_safe_branches(loop) if ruled else loop, levels, outputs.keeps)

    def _run_all(self, loop: Loop) -> tuple[PyTree, list[Any]]:
        """Runs a loop in which every step is valid: in chunks that the gradient recomputes, if the user asked for some.

        Nothing is skipped, so that chunks have no branch.
        """
        keeps = loop.rows.outputs.keeps
        if is_thinned(keeps):
            refuse_symbolic(loop.length, "save")
        if self.chunk and not loop.recomputed:
            refuse_symbolic(loop.length, "chunk")
            loop = recompute_chunks(loop, self.chunk)
        elif self.chunk is None and not loop.wishes:
            loop = choose_fastest(loop)
        return run_keeping(loop, levels_for(loop, loop.wishes, keeps), keeps)

    def _plan(self, loop: Loop) -> tuple[int | None, tuple[int, ...]]:
        """The steps of a chunk, and the numbers of rows that the body is made for; only one for all rows.

        JAX differentiates through mutable arrays that a body closes over in the plain loop alone.

        Raises:
            Fault: for an `ArgumentError` if such a body is to be run in branches, or computed a second time.
        """
        valid, chunk = loop.xs.valid, self.chunk
        assert valid is not None
        tiers = tiers_of(self.compact, valid.shape[1:]) if self.compact else (0,)
        if loop.trace.refs:
            asked = {
                "chunk": bool(chunk),
                "compact": len(tiers) > 1,
                "save": is_thinned(loop.rows.outputs.keeps),
            }
            for option in (name for name, on in asked.items() if on):
                refuse_with_refs(option)
            return 0, tiers
        return (0 if chunk is None and not self.compact and not is_rewriting() else chunk), tiers


def _is_cut(loop: Loop, chunk: int | None) -> bool:
    """Whether there are chunks that may be skipped, and not all steps alone."""
    return chunk != 0 and isinstance(loop.length, int)


def _levels(loop: Loop, chunk: int | None, tiers: tuple[int, ...], *, may_rule: bool) -> tuple[int, tuple[Level, ...]]:
    """The size of the chunks that may be skipped, and all levels."""
    length, rows, remat = loop.length, loop.rows, loop.wishes
    for option, asked in (("chunk", chunk), ("compact", len(tiers) > 1)):
        if asked:
            refuse_symbolic(length, option)
    whole = not _is_cut(loop, chunk)
    size = length if whole else min(chunk or chunk_size(length), length)
    kept = boundaries(rows.outputs.keeps, length)
    if chunk:  # what does not fit the chunks that were asked for is kept in all steps, and cut afterwards
        kept = [wish for wish in kept if not (wish.size % size and size % wish.size)]
    own = [] if whole else [Wish(size, exact=bool(chunk) or not kept)]
    sizes = plan_sizes(length, [*own, *remat, *kept]) if own or remat or kept else ()
    size = size if whole or size == 1 else nearest((*sizes, length), size)
    recomputes = not (whole or loop.trace.effects)
    around = _Around(rows.axes, tiers, rows.outputs.idle, remat=recomputes, only=size == length, rules=may_rule)
    others = levels_of([other for other in sizes if other != size], remat)
    levels = [*others, Level(size, around, scheduled=True)]
    return size, tuple(sorted(levels, key=lambda level: level.size))


def run_unskipped(loop: Loop) -> tuple[PyTree, PyTree]:
    """Runs a masked loop step by step, unless nothing at all is valid: its steps were not traced."""
    valid = loop.xs.valid
    assert valid is not None
    if 0 in valid.shape or not may_branch():
        return run(loop)
    around = _Around(loop.rows.axes, (0,), loop.rows.outputs.idle, remat=False, only=True, rules=False)
    loop = dataclasses.replace(loop, xs=loop.xs._replace(schedule=make_schedule(valid, loop.length, (0,))))
    return run_chunked(loop, (Level(loop.length, around, scheduled=True),))


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
