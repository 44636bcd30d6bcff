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

from .._avals import Array, LeafAxes, PyTree, is_sharded, place_like, vary_over
from .._loop.chunk import Level
from .._loop.feed import Consts, Feed, Slot
from .._loop.loop import Loop, Step
from .._loop.sizes import AroundChunk, Wish, chunk_size, plan_sizes
from .._outputs.outputs import Thinned
from .._remat.checkpoint import remat_sizes
from .._rows.axes import RowAxes
from .._rows.fill import Idle, fill_leaves
from .._rows.leaves import ORDER, any_of_all, at_step, make_schedule, select, unless_alone
from .._rows.mask import SOME_VALID
from .._rows.run_or_leave import on_live_rows, run_or_leave
from .._tree import Prefix, merge
from .._types import Remat
from .condition import Condition

BRANCHING = 11
"""About how many chunks make one of the next level, where only the state leaves the loop."""


class Progress(NamedTuple):
    """How far a loop has come: the state of a loop that ends early.

    Attributes:
        holds: bool[*batch], the condition of the state; [] but where each row stops by itself.
        taken: int32[*batch], the steps that were taken.
        state: the state, its leaves that change.
    """

    holds: Array
    taken: Array
    state: PyTree


class Ends(NamedTuple):
    """What every step of such a loop reads beside the consts of its inner step.

    Attributes:
        closed: what the condition closes over, for each of its traces.
        limit: int32[], the most steps to take.
        hook: what a `Hook` reads, if there is one.
        xs: what all steps are fed, where each is fed its place in there alone; else None.
    """

    closed: list[list[Any]]
    limit: Array
    hook: PyTree = None
    xs: Feed | None = None


ENDS: Slot[Ends] = Slot("ends")


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

    def zero(self) -> StepOutputs:
        """The types, and zeros where no step is taken."""
        return dataclasses.replace(self, fill=Prefix.of(0))

    @property
    def idle(self) -> Idle:
        """The outputs of rows on which nothing is run."""
        return Idle(self.fill)

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


def going_on(progress: Progress, consts: Consts) -> Array:
    """bool[*batch]: whether another step is to be taken."""
    return progress.holds & (progress.taken < ENDS.read(consts).limit)


@dataclass(frozen=True)
class MaskedStep:
    """The step that is masked where the loop has ended. Its state is `Progress`.

    Attributes:
        step: the inner step, which is told which rows take it.
        condition: of the next state.
        fixed: for each leaf of the whole state whether it is unchanged.
    """

    step: Step
    condition: Condition
    fixed: tuple[bool, ...]

    def __call__(self, consts: Consts, progress: Progress, feed: Feed) -> tuple[Progress, PyTree]:
        ends, inner = ENDS.take(consts)
        going = going_on(progress, consts)
        valid = unless_alone(going) if SOME_VALID.on(consts) and not going.ndim else going
        new, y = self.step(inner, progress.state, feed._replace(valid=valid))
        after = self.condition(ends.closed, whole_state(self.fixed, consts, new))
        taken = progress.taken + valid.astype(progress.taken.dtype)
        return Progress(select(valid, after, progress.holds), taken, new), y


def whole_state(fixed: tuple[bool, ...], consts: Consts, state: PyTree) -> list[Any]:
    """The leaves of the whole state, those included that no step changes."""
    return merge(fixed, consts.unchanged, jax.tree.leaves(state))


def all_fixed(loop: Loop) -> tuple[bool, ...]:
    """For each leaf of the whole state whether no step changes it. What options add to the state leads it."""
    fixed: tuple[bool, ...] = loop.masked.was_fixed
    return (*(False for _ in range(len(jax.tree.leaves(loop.state)) - fixed.count(False))), *fixed)


@dataclass(frozen=True)
class TakeStep:
    """The step that is only taken while any row goes on. Its state is `Progress`.

    Attributes:
        step: takes it.
        outputs: y where no step is taken.
        y_axes: where the rows are in y.
    """

    step: MaskedStep
    outputs: StepOutputs
    y_axes: LeafAxes

    def __call__(self, consts: Consts, progress: Progress, feed: Feed) -> tuple[Progress, PyTree]:
        way = any_of_all(going_on(progress, consts)) if SOME_VALID.on(consts) else None
        return run_or_leave(way, (self._take,), self._leave, consts, progress, feed)

    def _take(self, consts: Consts, progress: Progress, feed: Feed) -> tuple[Progress, PyTree]:
        xs = ENDS.read(consts).xs
        if xs is not None:
            feed = jax.tree.map(lambda leaf: at_step(leaf, feed.x), xs)
        progress, y = self.step(consts, progress, feed)
        return progress, self.outputs.varied(y)

    def _leave(self, consts: Consts, progress: Progress, feed: Feed) -> tuple[Progress, PyTree]:
        del consts, feed
        filled = zip(self.outputs.filled(), self.y_axes, strict=True)
        return progress, [_first(leaf, progress.holds.shape[:1], axis) for leaf, axis in filled]


def _first(leaf: Array, rows: tuple[int, ...], axis: int | None) -> Array:
    """The first rows of a leaf, where a chunk runs on some of them alone."""
    if axis is None or not rows or leaf.shape[axis] == rows[0] or is_sharded(leaf):
        return leaf
    return jax.lax.slice_in_dim(leaf, 0, rows[0], axis=axis)


@dataclass(frozen=True)
class TakeChunk:
    """The step that runs a chunk while the loop goes on, on the rows that do if there are tiers of them.

    Attributes:
        step: runs a chunk.
        size: its steps.
        outputs: y where no step is taken.
        saves: whether it returns the state of before, too, [1, ...].
        tiers: the numbers of rows to choose from; one for all of them.
        axes: where the rows are, in `Progress` too.
    """

    step: Step
    size: int
    outputs: StepOutputs
    saves: bool
    tiers: tuple[int, ...]
    axes: RowAxes

    def __call__(self, consts: Consts, progress: Progress, feed: Feed) -> tuple[Progress, PyTree]:
        before = [leaf[None] for leaf in jax.tree.leaves(progress.state)] if self.saves else []
        ways = on_live_rows(self.step, self.tiers, self.axes, self.outputs.idle)
        way, feed = self._way(consts, progress, feed)
        progress, ys = run_or_leave(way, ways, self._leave, consts, progress, feed)
        return progress, ((ys, before) if self.saves else ys)

    def _way(self, consts: Consts, progress: Progress, feed: Feed) -> tuple[Array | None, Feed]:
        if not SOME_VALID.on(consts):
            return None, feed
        going = going_on(progress, consts)
        if len(self.tiers) == 1:
            return any_of_all(going), feed
        schedule = make_schedule(going[None], 1, self.tiers)
        assert schedule.order is not None
        return schedule.branch[0], ORDER.put(feed, schedule.order[0])

    def _leave(self, consts: Consts, progress: Progress, feed: Feed) -> tuple[Progress, PyTree]:
        del consts, feed
        return progress, self.outputs.filled_chunk(self.size)


def in_progress(axes: RowAxes) -> RowAxes:
    """Where the rows are in a loop whose state is `Progress`."""
    return axes._replace(state=(0, 0, *axes.state))


class Hook(Protocol):
    """Is called from within a loop that ends early, with how far it has come. It holds no array."""

    @property
    def most(self) -> int:
        """The most calls."""
        ...

    def fit(self, chunks: Chunks) -> Chunks:
        """The chunks, of which several together have one call if there are too many."""
        ...

    def size(self, length: int, sizes: Sequence[int], unit: int) -> int:
        """Of chunks of these sizes, which have a call each."""
        ...

    def around(self, inner: AroundChunk | None) -> AroundChunk:
        """What is put around chunks: that, and a call."""
        ...

    def __call__(self, consts: Consts, progress: Progress, *, last: bool = False) -> None:
        """A call; `last`: the loop has ended."""
        ...


class Chunks(NamedTuple):
    """The chunks of the derivative.

    Attributes:
        size: the steps of one.
        number: how many there are.
        stride: every how many steps outputs leave a chunk, where they are not all kept.
        inner: the sizes of chunks within, which are recomputed by themselves.
        remat: what is recomputed of a step; None: nothing.
    """

    size: int
    number: int
    stride: int
    inner: tuple[int, ...]
    remat: Remat | None


def plan_chunks(loop: Loop) -> Chunks:
    """Chunks for a loop, with a boundary wherever an output is kept of those that are not all kept.

    In reverse, the steps that fill up the last chunk come first: all are kept where these would shift the others. The
    chunks that the user asked for in `remat` are the ones that are taken.
    """
    length, keeps = loop.length, loop.keeps or ()
    stride = math.gcd(*(keep for keep in keeps if keep and 1 < keep <= length)) or 1
    stride = 1 if loop.reverse and length % stride else stride
    assert not isinstance(loop.remat, tuple)  # which is of turns
    sizes, ordered = remat_sizes(length, loop.remat), len(loop.masked.tiers) > 1
    chosen = min(chunk_size(length) if ordered else _chunk_of(length), length)
    size, inner = (sizes[-1], sizes[:-1]) if sizes else (chosen, ())
    if stride > 1:
        size = min(-(-size // stride), length // stride) * stride
        sizes = plan_sizes(size, [Wish(stride, exact=True), *map(Wish, inner)])
        inner = tuple(other for other in sizes if other > stride)
    return Chunks(size, -(-length // size), stride, inner, loop.remat)


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
