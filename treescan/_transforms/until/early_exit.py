"""Runs the steps of a loop that ends early, and branches past the others.

Each step, and each chunk of steps at every level, is a branch on whether the loop continues. Under `jax.vmap` and
inside a `shard_map`, all elements and devices share one predicate, so the branch stays a branch. Within it, elements
that have stopped keep their state.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from ..._avals import place_like, vary_over
from ..._loop.chunk import Around, Level, Wish, plan_sizes, run_chunked
from ..._loop.loop import Feed, Loop, Step
from ..._remat import Remat
from ..._trace.hoist import merge
from ..._tree import Prefix
from ..._types import Array, PyTree
from ..checkpoint import remat_sizes
from ..outputs import Thinned
from ..rows.fill import fill_leaves
from ..rows.leaves import any_of_all, choose_own, lend, lend_to_elements, select, select_valid, unless_alone
from ..rows.mask import GoodPair, Masked
from .condition import Condition

BRANCHING = 11
"""About how many chunks make one of the next level, where only the state leaves the loop."""


class Progress(NamedTuple):
    """How far a loop has come.

    Attributes:
        holds: bool[*batch], the condition of the state; [] but where each row stops by itself.
        taken: int32[*batch], the steps that were taken.
        leaves: the state, its leaves that change.
    """

    holds: Array
    taken: Array
    leaves: list[Any]


class Reads(NamedTuple):
    """What every step of such a loop reads.

    Attributes:
        inner: the consts of the step.
        closed: what the condition closes over, for each of its traces.
        limit: int32[], the most steps to take.
        run: int32[] each: the number of the run that is reported, and its steps, -1 where they are not known; or None.
    """

    inner: Any
    closed: list[list[Any]]
    limit: Array
    run: Any = None


@dataclass(frozen=True)
class StepOutputs:
    """The types of one step's y, a list, and what it is where no step is taken.

    Attributes:
        avals: its leaves as JAX has them in a trace.
        fill: a prefix of y.
        varying: further manual mesh axes over which the leaves vary.
        every: of each leaf one in so many steps leaves a chunk; the numbers above 1 are the same.
    """

    avals: tuple[Any, ...]
    fill: Prefix
    varying: frozenset[str]
    every: tuple[int, ...]

    def filled(self) -> list[Array]:
        """The leaves of y for a step that is not taken."""
        types = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in self.avals]
        return [
            vary_over(place_like(jnp.broadcast_to(value, aval.shape), aval), self.varying)
            for value, aval in zip(fill_leaves(self.fill, types), self.avals, strict=True)
        ]

    def filled_chunk(self, size: int) -> list[Array]:
        """The leaves of y for a chunk of steps that are not taken."""
        leaves = zip(self.filled(), self.every, strict=True)
        return [jnp.broadcast_to(leaf, (size // every, *leaf.shape)) for leaf, every in leaves]

    def levels(self, length: int, sizes: Sequence[int], around: Callable[[int], Any]) -> tuple[Level, ...]:
        """Levels of the given sizes, ascending, less those that the loop does not fill, and what they keep of y."""
        stride = max(self.every, default=1)
        levels = [Level(size, around(size)) for size in sizes if size < length]
        if stride == 1:
            return tuple(levels)
        thinned = Thinned(stride, self.every, innermost=True)
        if any(level.size == stride for level in levels):
            return tuple(
                dataclasses.replace(level, outputs=thinned) if level.size == stride else level for level in levels
            )
        return (Level(stride, outputs=thinned), *levels)

    def varied(self, y: PyTree) -> list[Array]:
        """The leaves of a y, which vary as those of `filled` do."""
        return [vary_over(leaf, self.varying) for leaf in jax.tree.leaves(y)]


def going_on(progress: Progress, reads: Reads) -> Array:
    """bool[*batch]: whether another step is to be taken."""
    return progress.holds & (progress.taken < reads.limit)


@dataclass(frozen=True)
class TakeStep:
    """The step that is only taken while the loop goes on. Its consts are `Reads`, its state is `Progress`.

    Attributes:
        step: the inner step, as `hoist` and `lift` make it.
        condition: of the next state.
        fixed: for each leaf of the whole state whether it is unchanged.
        outputs: y where no step is taken.
        branches: whether a branch may depend on data.
    """

    step: Step
    condition: Condition
    fixed: tuple[bool, ...]
    outputs: StepOutputs
    branches: bool

    def __call__(self, reads: Reads, progress: Progress, feed: Feed) -> tuple[Progress, PyTree]:
        going = going_on(progress, reads)
        if not self.branches:
            return self._take(going, reads, progress, feed)
        mine = unless_alone(going)
        return jax.lax.cond(any_of_all(going), self._take, self._leave, mine, reads, progress, feed)

    def _take(self, mine: Array, reads: Reads, progress: Progress, feed: Feed) -> tuple[Progress, PyTree]:
        new, y = self.step(reads.inner, progress.leaves, feed)
        unchanged, _ = reads.inner
        after = self.condition(reads.closed, merge(self.fixed, unchanged, new))
        kept = [
            after_ if after_ is old else select_valid(mine, after_, old, 0)
            for old, after_ in zip(progress.leaves, new, strict=True)
        ]
        filled = zip(self.outputs.varied(y), self.outputs.filled(), strict=True)
        progress = Progress(
            select(mine, after, progress.holds), progress.taken + mine.astype(progress.taken.dtype), kept
        )
        return progress, [select_valid(mine, ran, not_run, 0) for ran, not_run in filled]

    def _leave(self, mine: Array, reads: Reads, progress: Progress, feed: Feed) -> tuple[Progress, PyTree]:
        del mine, reads, feed
        return progress, self.outputs.filled()


@dataclass(frozen=True)
class TakeChunk:
    """The step that runs a chunk while the loop goes on; `saves`: also what the state was before, [1, ...]."""

    step: Step
    size: int
    outputs: StepOutputs
    branches: bool
    saves: bool

    def __call__(self, reads: Reads, progress: Progress, feed: Feed) -> tuple[Progress, PyTree]:
        before = [leaf[None] for leaf in progress.leaves] if self.saves else []
        if self.branches:
            any_going = any_of_all(going_on(progress, reads))
            progress, ys = jax.lax.cond(any_going, self.step, self._leave, reads, progress, feed)
        else:
            progress, ys = self.step(reads, progress, feed)
        return progress, ((ys, before) if self.saves else ys)

    def _leave(self, reads: Reads, progress: Progress, feed: Feed) -> tuple[Progress, PyTree]:
        del reads, feed
        return progress, self.outputs.filled_chunk(self.size)


@dataclass(frozen=True)
class _Around:
    size: int
    outputs: StepOutputs
    branches: bool
    saves: bool

    def __call__(self, step: Step, looped: bool) -> Step:
        del looped  # nothing remains
        return TakeChunk(step, self.size, self.outputs, self.branches, self.saves)


class Take(Step, Protocol):
    """The step of a loop that ends early, which is only taken while the loop goes on."""

    @property
    def outputs(self) -> StepOutputs:
        """Y where no step is taken."""
        ...

    @property
    def branches(self) -> bool:
        """Whether a branch may depend on data."""
        ...


class Report(Protocol):
    """Reports how far a loop has come, after each chunk of a size or after each step."""

    def size(self, length: int, sizes: Sequence[int], unit: int) -> int:
        """Which of the chunks it is, or a multiple of the largest of them, and of `unit`."""
        ...

    def around(self, inner: Around | None) -> Around:
        """What is put around chunks of that size: that, and a report outside of it."""
        ...

    def after_each(self, take: Take) -> Take:
        """The step of a loop, and a report after it."""
        ...


def run_until(
    loop: Loop,
    take: Take,
    sizes: tuple[int, ...],
    *,
    save: bool,
    innermost: Around | None = None,
    report: Report | None = None,
) -> tuple[Progress, PyTree, Any]:
    """Runs a loop while it goes on.

    Args:
        loop: consts `Reads`, state `Progress`; its length is a multiple of the sizes.
        take: its step.
        sizes: of nested chunks, each dividing the next; with `save` one at most.
        save: whether the state at the start of each chunk is returned too.
        innermost: what is put around chunks of the first size; None: what is put around those of the others.
        report: reports how far it has come; None: nothing does.

    Returns:
        How far it came, ys, and with `save` the leaves of the state at the start of each chunk, [N, ...].
    """
    outputs, reported = take.outputs, 0
    if report is not None:  # rows that are brought together for a chunk are not in their places within it
        stride = max(outputs.every, default=1)
        reported = report.size(loop.length, sizes if innermost else (*range(1, 1 + (stride == 1)), *sizes), stride)
        take = report.after_each(take) if reported == 1 else take
    loop = dataclasses.replace(loop, step=take)

    def around(size: int) -> Around | None:
        own = None
        if size in sizes:
            own = (innermost if size == sizes[0] else None) or _Around(size, outputs, take.branches, save)
        return report.around(own) if report is not None and size == reported else own

    further = () if reported in (0, 1, *sizes) else (reported,)
    levels = outputs.levels(loop.length, (*sizes, *further), around)
    progress, ys = run_chunked(loop, levels)
    if not save:
        return progress, ys, []
    if not any(level.size in sizes for level in levels if level.around is not None):
        return progress, ys, [leaf[None] for leaf in loop.state.leaves]
    ys, starts = ys
    return progress, ys, starts


class Chunks(NamedTuple):
    """The chunks of the derivative.

    Attributes:
        size: the steps of one.
        number: how many there are.
        inner: the sizes of chunks within, which are recomputed by themselves.
        remat: what is recomputed of a step; None: nothing.
    """

    size: int
    number: int
    inner: tuple[int, ...] = ()
    remat: Remat | None = None


def plan_chunks(length: int, stride: int, remat: Remat | None, chunk: int | None = None) -> Chunks:
    """Chunks for a loop of so many steps, with a boundary wherever one in `stride` outputs is kept.

    Args:
        length: the steps of the loop.
        stride: every how many steps outputs leave a chunk.
        remat: what the user said; its chunks are the ones that are taken.
        chunk: the size of a chunk else; None: to be chosen.
    """
    sizes = remat_sizes(length, remat)
    size, inner = (sizes[-1], sizes[:-1]) if sizes else (min(chunk or _chunk_of(length), length), ())
    if stride > 1:
        size = min(-(-size // stride), length // stride) * stride
        sizes = plan_sizes(size, [Wish(stride, exact=True), *map(Wish, inner)]) if inner else ()
        inner = tuple(other for other in sizes if other > stride)
    return Chunks(size, -(-length // size), inner, remat)


def _chunk_of(length: int) -> int:
    """The size of chunks, somewhat fewer than each has steps; without a remainder where that is near.

    A chunk that does not run still copies the state a few times. So fewer, larger chunks are faster if a loop stops
    early, and they take little more memory.
    """
    root = math.isqrt(3 * length // 2 - 1) + 1
    near = [size for size in range(max(1, root // 2), min(length, 2 * root) + 1) if length % size == 0]
    return min(near, key=lambda other: abs(math.log(other / root)), default=root)


def nested_sizes(length: int) -> tuple[int, tuple[int, ...]]:
    """For a loop of which only the state counts: how long it is made, and the sizes of its nested chunks."""
    depth = max(1, round(math.log(max(length, 2), BRANCHING)))
    ratio = 1
    while ratio**depth < length:
        ratio += 1
    return ratio**depth, tuple(ratio**i for i in range(1, depth) if ratio > 1)


@dataclass(frozen=True)
class _Unflagged:
    """The step that does not tell another which steps are taken."""

    step: Step

    def __call__(self, consts: Any, state: list[Any], feed: Feed) -> tuple[list[Any], Any]:
        return self.step(consts, state, feed._replace(valid=None))


def masked_step(loop: Loop, fill: Prefix) -> Step:
    """The step of a loop that knows which steps are taken, and shows the body good values in all others."""
    state, x = (len(jax.tree.leaves(tree)) for tree in (loop.state, loop.xs.x))
    unchanged, _ = loop.consts
    return Masked(_Unflagged(loop.step), (0,) * state, (None,) * len(unchanged), (0,) * x, Prefix.of(0), fill)


def good_pair(loop: Loop, have: Array, *, lifted: bool = True) -> tuple[GoodPair, Any, list[Array]]:
    """What elements that have stopped are shown: their first state and x; those that never start borrow them.

    Args:
        loop: the loop.
        have: bool[], whether any step is taken.
        lifted: whether its consts hold what the body closes over.

    Returns:
        The pair; the consts, borrowed as well; and for each of their leaves whether it is the element's own.
    """
    unchanged, _ = loop.consts
    first = -1 if loop.reverse else 0
    xs = [jax.lax.index_in_dim(leaf, first % loop.length, keepdims=False) for leaf in jax.tree.leaves(loop.xs.x)]
    pair = GoodPair(loop.state, [None] * len(unchanged), xs)
    unchanged, inner = loop.consts
    closed, inner = inner if lifted else ([], inner)
    (pair, *lent), own = lend(have, jax.lax.stop_gradient((pair, unchanged, inner)))
    own = own[len(jax.tree.leaves(pair)) :]
    lent_closed, own_closed = lend_to_elements(have, jax.lax.stop_gradient(closed))  # see `lend_closed`
    own = [*own[: len(unchanged)], *own_closed, *own[len(unchanged) :]]
    theirs = lent[0], (lent_closed, lent[1]) if lifted else lent[1]
    return jax.lax.stop_gradient(pair), choose_own(loop.consts, theirs, own), own


@dataclass(frozen=True)
class MaskedStep:
    """The step that is masked where the loop has ended. Its state is `Progress`.

    Its consts are `Reads`, in which the consts of the inner step are (GoodPair, consts).

    Attributes:
        masked: the inner step, which is told whether it is taken.
        condition: of the next state.
        fixed: for each leaf of the whole state whether it is unchanged.
    """

    masked: Step
    condition: Condition
    fixed: tuple[bool, ...]

    def __call__(self, reads: Reads, progress: Progress, feed: Feed) -> tuple[Progress, PyTree]:
        going = going_on(progress, reads)
        _, (unchanged, _) = reads.inner
        new, y = self.masked(reads.inner, progress.leaves, feed._replace(valid=going))
        after = self.condition(reads.closed, merge(self.fixed, unchanged, new))
        taken = progress.taken + going.astype(progress.taken.dtype)
        return Progress(select(going, after, progress.holds), taken, new), y


def run_all_steps(
    loop: Loop, reads: Reads, first: Progress, condition: Condition, fixed: tuple[bool, ...], outputs: StepOutputs
) -> tuple[Progress, Any]:
    """Runs all steps of a loop, and keeps nothing of those after its end.

    Args:
        loop: the loop, as `lift` makes it.
        reads: what every step reads; its consts are the loop's.
        first: the state before the first step.
        condition: whether another step is taken.
        fixed: for each leaf of the whole state whether it is unchanged.
        outputs: the types of y, and what it is where no step is taken.
    """
    good, consts, _ = good_pair(loop, going_on(first, reads))
    step = MaskedStep(masked_step(loop, outputs.fill), condition, fixed)
    loop = dataclasses.replace(loop, step=step, consts=reads._replace(inner=(good, consts)), state=first)
    return run_masked(loop, outputs)


def run_masked(loop: Loop, outputs: StepOutputs) -> tuple[Progress, Any]:
    """Runs all steps of a loop whose step is masked."""
    return run_chunked(loop, outputs.levels(loop.length, (), lambda size: None))
