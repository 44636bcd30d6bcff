"""`chunk`: chunks without a valid step are not run.

The branch of each chunk is computed before the loop. The gradient saves the steps of a chunk, or recomputes the chunk
from the carry that it was given. A checkpoint encloses the branch: what a branch saves, weights included, would be
stacked once per chunk.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import jax

from .. import _faster
from .._avals import PyTree, is_key, promoted, types_of
from .._cpu import backend
from .._loop.feed import Feed
from .._loop.loop import Loop, Step, is_untraced
from .._loop.sizes import LARGEST, AroundChunk, Wish, chunk_size
from .._outputs.outputs import is_thinned
from .._remat.checkpoint import Checkpointed, checkpoint, chooses, depending_on, policy_of_chunk, relates, rolled
from .._trace.rewriting import is_rewriting
from .._transforms.refuse import refuse_symbolic, refuse_with_refs
from .._transforms.transform import Stage, Transform
from .axes import RowAxes, flags_given
from .fill import Idle
from .leaves import SCHEDULE, make_schedule, may_branch, schedule_of_lengths
from .run_or_leave import OnAllRows, on_live_rows, run_or_leave, scheduled

FEW = 8
"""The chunks of a loop on a GPU.

Measured on an H200, nine families: a forward pass of full rows takes 1.07 of a mask by hand with four chunks, and 1.12
with chunks of 16 steps; one of rows that are 90 % padding takes 0.40 and 0.36. Eight are between these.
"""


class ChunkRemat(enum.Enum):
    """What the gradient does with a chunk.

    `SAVES_STEPS` has a checkpoint too: what goes into it, weights included, is not stacked once per chunk. So has
    `SAVES_ALL`, for a step that chooses among values: nothing of it may be computed again.
    """

    NONE = enum.auto()
    RECOMPUTES = enum.auto()
    DECIDES_ONCE = enum.auto()
    SAVES_STEPS = enum.auto()
    SAVES_ALL = enum.auto()

    @property
    def recomputes(self) -> bool:
        """Whether the gradient computes the chunks once more."""
        return self in (ChunkRemat.RECOMPUTES, ChunkRemat.DECIDES_ONCE)


def _policy_of(remat: ChunkRemat, step: Step) -> Callable[..., Any] | None:
    """What is saved of a chunk that has a checkpoint."""
    if remat.recomputes:
        return policy_of_chunk(step, related=remat is ChunkRemat.DECIDES_ONCE)
    whole = jax.checkpoint_policies.everything_saveable
    return whole if remat is ChunkRemat.SAVES_ALL else _faster.save_all_but_cheap


@dataclass(frozen=True)
class RunLive:
    """The step that runs the part of a chunk that its schedule selects.

    Attributes:
        step: runs a whole chunk.
        tiers: the numbers of rows to choose from; only the last, all of them, where rows are not ordered.
        axes: where the rows are.
        idle: the outputs where nothing is run.
        remat: what the gradient does with the chunk.
        looped: whether this is the step of a loop.
        reads_again: whether the gradient computes the chunk or its steps again, from the arrays that they read.
    """

    step: Step
    tiers: tuple[int, ...]
    axes: RowAxes
    idle: Idle
    remat: ChunkRemat
    looped: bool
    reads_again: bool

    def __call__(self, consts: PyTree, state: PyTree, feed: Feed) -> tuple[PyTree, PyTree]:
        way, feed = scheduled(feed)
        step: Step = self._branch
        if self.remat is not ChunkRemat.NONE:
            step = Checkpointed(step, self.looped, _policy_of(self.remat, self.step))
        return step((way, consts), state, feed)

    def _branch(self, consts: PyTree, state: PyTree, feed: Feed) -> tuple[PyTree, PyTree]:
        way, consts = consts
        branches: list[Step] = [self._nothing, *on_live_rows(self.step, self.tiers, self.axes, self.idle)]
        if self.remat.recomputes and _may_nest((consts, state, feed)):
            # Otherwise the other branches would write zeros for all values that one of these saves.
            branches[1:] = [checkpoint(branch, prevent_cse=False) for branch in branches[1:]]
        leave, *ways = map(_depending, branches) if self.reads_again else branches
        return run_or_leave(way, ways, leave, consts, state, feed)

    def _nothing(self, consts: PyTree, state: PyTree, feed: Feed) -> tuple[PyTree, PyTree]:
        final, types = types_of(OnAllRows(self.step), consts, state, feed)
        # The branches must have the same types: an untraced, weakly typed init is promoted here as in the loop.
        state = jax.tree.map(lambda given, returned: promoted(given, returned)[0], state, final)
        return state, self.idle(state, types)


@dataclass(frozen=True)
class Skip(Transform):
    """`chunk` and `compact`: runs the chunks that hold a valid step, and of these the rows that do.

    Attributes:
        chunk: the steps of a chunk; None: to be chosen; 0: nothing is skipped but a loop without any valid step.
        compact: whether to order rows, or the numbers of rows to choose from.
    """

    chunk: int | None
    compact: bool | tuple[int, ...]
    stage: ClassVar[Stage] = Stage.SKIPPED

    def __call__(self, loop: Loop) -> Loop:
        if is_untraced(loop):
            return _run_unless_all_is_padding(loop)
        if loop.masked.all_valid:
            return self._recompute_chunks(loop)
        chunk, tiers = self._plan(loop)
        if not _has_schedule(loop):
            return loop
        for option, asked in (("chunk", chunk), ("compact", len(tiers) > 1)):
            if asked:
                refuse_symbolic(loop.length, option)
        trace, cut = loop.hoisted, chunk != 0 and isinstance(loop.length, int)
        size = min(chunk or _chunk_size(loop.length, tiers), loop.length) if cut else loop.length
        alone = trace.branches_on_devices or trace.axes  # JAX alone can differentiate it
        may_rule = is_rewriting() and not (trace.effects or trace.refs or trace.reverse_rule or alone)
        schedule = ScheduleChunks(tiers, self._remat(loop, tiers) if cut else ChunkRemat.NONE, rules=cut and may_rule)
        loop = _with_wish(loop, Wish(size, exact=bool(chunk), put=schedule, slots=(SCHEDULE,)))
        if not may_rule:
            return loop
        return _faster.write_in_place(loop, tiers, saves=self._is_chosen(loop, tiers))

    def _remat(self, loop: Loop, tiers: tuple[int, ...]) -> ChunkRemat:
        """What the gradient does with the chunks of a loop. It recomputes those that the user asked for.

        A branch that is not taken writes zeros for what the others save, so that the branches of `compact` recompute.
        Effects are repeated only where `remat` asks for it.
        """
        if loop.hoisted.effects and loop.remat is None:
            return ChunkRemat.NONE
        from .._remat.remat import is_large

        if not self._is_chosen(loop, tiers) or is_large(loop.hoisted, loop.length):
            return ChunkRemat.DECIDES_ONCE if relates(loop.hoisted.jaxpr) else ChunkRemat.RECOMPUTES
        return ChunkRemat.SAVES_ALL if chooses(loop.hoisted.jaxpr) else ChunkRemat.SAVES_STEPS

    def _is_chosen(self, loop: Loop, tiers: tuple[int, ...]) -> bool:
        """Whether the user left it to us what the gradient recomputes."""
        return self.chunk is None and len(tiers) == 1 and loop.remat is None and is_rewriting()

    def _recompute_chunks(self, loop: Loop) -> Loop:
        """A loop in which every step is valid: in chunks that the gradient recomputes, if the user asked for some.

        Nothing is skipped, so that chunks have no branch.
        """
        from .._remat.remat import choose_fastest, recompute_chunks

        if is_thinned(loop.keeps):
            refuse_symbolic(loop.length, "save")
        if self.chunk and loop.remat is None:
            refuse_symbolic(loop.length, "chunk")
            return recompute_chunks(loop, self.chunk)
        return choose_fastest(loop) if self.chunk is None and not loop.wishes else loop

    def _plan(self, loop: Loop) -> tuple[int | None, tuple[int, ...]]:
        """The steps of a chunk, and the numbers of rows that the body is made for; only one for all rows.

        JAX differentiates through mutable arrays that a body closes over in the plain loop alone.

        Raises:
            Fault: for an `ArgumentError` if such a body is to be run in branches, or computed a second time.
        """
        chunk, tiers = self.chunk, loop.masked.tiers
        if loop.hoisted.refs:
            asked = {"chunk": bool(chunk), "compact": len(tiers) > 1, "save": is_thinned(loop.keeps)}
            for option in (name for name, on in asked.items() if on):
                refuse_with_refs(option)
            return 0, tiers
        return (0 if chunk is None and not self.compact and not is_rewriting() else chunk), tiers


def _run_unless_all_is_padding(loop: Loop) -> Loop:
    """A loop whose steps were not traced: they run one by one, if any row is valid in any of them."""
    if not _has_schedule(loop):
        return loop
    put = ScheduleChunks((0,), ChunkRemat.NONE, rules=False)
    return _with_wish(loop, Wish(loop.length, put=put, slots=(SCHEDULE,)))


def _chunk_size(length: int, tiers: tuple[int, ...]) -> int:
    """The steps of a chunk that nobody has chosen. On a GPU each branch waits for the host: there are `FEW` of them."""
    few = not backend.on_cpu() and len(tiers) == 1
    return chunk_size(length, max(LARGEST, length // FEW)) if few else chunk_size(length)


def _has_schedule(loop: Loop) -> bool:
    """Whether there is anything to skip, and branches may depend on data here."""
    valid = loop.xs.valid
    return valid is not None and 0 not in valid.shape and may_branch()


def _with_wish(loop: Loop, wish: Wish) -> Loop:
    return loop.having(wishes=(wish, *loop.wishes))


@dataclass(frozen=True)
class ScheduleChunks:
    """Makes the schedule of the chunks, and what is put around them, once it is known how long they are.

    Attributes:
        tiers: the numbers of rows to choose from.
        remat: what the gradient does with the chunks.
        rules: whether they may have a rule for derivatives of their own.
    """

    tiers: tuple[int, ...]
    remat: ChunkRemat
    rules: bool

    def __call__(self, loop: Loop, size: int) -> tuple[Loop, AroundChunk]:
        rows, valid = loop.masked, loop.xs.valid
        rules = self.rules and loop.hoisted.products
        recomputed, only = loop.remat is not None, size == loop.length
        around = _AroundScheduled(rows.axes, self.tiers, rows.outputs.idle, self.remat, only, rules, recomputed)
        lengths = flags_given(loop).lengths if len(self.tiers) == 1 and isinstance(loop.length, int) else None
        if lengths is None:
            schedule = make_schedule(valid, size, self.tiers)
        else:
            schedule = schedule_of_lengths(lengths, loop.length, size)
        return loop.having(xs=SCHEDULE.put(loop.xs, schedule)), around


@dataclass(frozen=True)
class _AroundScheduled:
    """What is put around the step that runs a chunk; `only` if there is but one, `rules` if it may have a rule.

    With `recomputed`, the gradient computes its steps again.
    """

    axes: RowAxes
    tiers: tuple[int, ...]
    idle: Idle
    remat: ChunkRemat
    only: bool
    rules: bool
    recomputed: bool

    @property
    def recomputes(self) -> bool:
        """Whether the gradient computes the chunks once more."""
        return self.remat.recomputes

    def __call__(self, step: Step, looped: bool) -> Step:
        # A remainder does not justify more copies of the body.
        tiers = self.tiers if looped or self.only else self.tiers[-1:]
        step = rolled(step) if self.recomputes else step
        if self.rules:
            step = _faster.products_at_once(step)
        remat = self.remat if looped else ChunkRemat.NONE
        reads_again = self.recomputed or remat.recomputes
        return RunLive(step, tiers, self.axes, self.idle, remat, looped, reads_again)


def _depending(branch: Step) -> Step:
    return lambda consts, state, feed: branch(consts, depending_on(state, consts), feed)


def _may_nest(tree: PyTree) -> bool:
    """Whether a branch alone may be recomputed. Before 0.10, JAX could not split a branch with typed keys as inputs."""
    return jax.__version_info__ >= (0, 10) or not any(map(is_key, jax.tree.leaves(tree)))
