"""Loops that end early: steps that are not taken are not run, and their cost grows as the logarithm of their number.

Each step, and each chunk of steps at every level, is a branch on whether the loop still goes on. Under `jax.vmap` and
inside of a `shard_map` that is one question for all elements and devices, so that the branch stays a branch; within
it, the elements that have stopped keep their state.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from .._avals import place_like, vary_over, varying_axes
from .._chunk import Level, run_chunked
from .._loop import Feed, Loop, Step
from .._tree import Prefix
from .._types import Array, PyTree, TreeDef
from .condition import Condition
from .fill import fill_leaves
from .hoist import merge
from .lend import most_of_all, most_of_devices
from .rows import select_valid

BRANCHING = 11
"""About how many chunks make one of the next level, where only the state leaves the loop."""


class Progress(NamedTuple):
    """How far a loop has come.

    Attributes:
        holds: bool[], the condition of the state.
        taken: int32[], the steps that were taken.
        leaves: the state, its leaves that change.
    """

    holds: Array
    taken: Array
    leaves: list[Any]


class Reads(NamedTuple):
    """What every step of such a loop reads.

    Attributes:
        inner: the consts of the step.
        closed: what the condition closes over.
        limit: int32[], the most steps to take.
    """

    inner: Any
    closed: list[Any]
    limit: Array


@dataclass(frozen=True)
class Outputs:
    """The types of one step's y, and what it is where no step is taken.

    Attributes:
        structure: its structure.
        avals: its leaves as JAX has them in a trace.
        fill: a prefix of y.
        varying: further manual mesh axes over which the leaves vary.
    """

    structure: TreeDef
    avals: tuple[Any, ...]
    fill: Prefix
    varying: frozenset[str]

    def filled(self, *steps: int) -> list[Array]:
        """The leaves of y for steps that are not taken."""
        types = jax.tree.unflatten(self.structure, [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in self.avals])
        one = [
            vary_over(place_like(jnp.broadcast_to(value, aval.shape), aval), self.varying)
            for value, aval in zip(fill_leaves(self.fill, types), self.avals, strict=True)
        ]
        return [jnp.broadcast_to(leaf, (*steps, *leaf.shape)) for leaf in one]

    def tree(self, leaves: list[Array]) -> PyTree:
        """A y of such leaves."""
        return jax.tree.unflatten(self.structure, leaves)

    def varied(self, y: PyTree) -> list[Array]:
        """The leaves of a y, which vary as those of `filled` do."""
        return [vary_over(leaf, self.varying) for leaf in jax.tree.leaves(y)]


@custom_vmap
def _unless_alone(going: Array) -> Array:
    """True; under vmap `going` itself: a single element takes no branch unless it is its own."""
    return jnp.ones_like(going)


@_unless_alone.def_vmap
def _unless_alone_rule(axis_size: int, in_batched: list[bool], going: Array) -> tuple[Array, bool]:
    del axis_size
    return (going, True) if in_batched[0] else (_unless_alone(going), False)


def any_of_all(flags: Array) -> Array:
    """Whether a flag is set in any element of a vmap, on any device: the same for all."""
    return most_of_all(most_of_devices(flags.astype(jnp.int32))) > 0


def going_on(progress: Progress, reads: Reads) -> Array:
    """Whether another step is to be taken."""
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
    outputs: Outputs
    branches: bool

    def __call__(self, reads: Reads, progress: Progress, feed: Feed) -> tuple[Progress, PyTree]:
        going = going_on(progress, reads)
        if not self.branches:
            return self._take(going, reads, progress, feed)
        mine = going if varying_axes(jax.typeof(going)) else _unless_alone(going)
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
            jnp.where(mine, after, progress.holds), progress.taken + mine.astype(progress.taken.dtype), kept
        )
        return progress, self.outputs.tree([select_valid(mine, ran, not_run, 0) for ran, not_run in filled])

    def _leave(self, mine: Array, reads: Reads, progress: Progress, feed: Feed) -> tuple[Progress, PyTree]:
        del mine, reads, feed
        return progress, self.outputs.tree(self.outputs.filled())


@dataclass(frozen=True)
class TakeChunk:
    """The step that runs a chunk while the loop goes on; `saves`: also what the state was before, [1, ...]."""

    step: Step
    size: int
    outputs: Outputs
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
        return progress, self.outputs.tree(self.outputs.filled(self.size))


@dataclass(frozen=True)
class _Around:
    size: int
    outputs: Outputs
    branches: bool
    saves: bool

    def __call__(self, step: Step, looped: bool) -> Step:
        del looped  # nothing remains
        return TakeChunk(step, self.size, self.outputs, self.branches, self.saves)


def run_until(loop: Loop, take: TakeStep, sizes: tuple[int, ...], *, save: bool) -> tuple[Progress, PyTree, Any]:
    """Runs a loop while it goes on.

    Args:
        loop: consts `Reads`, state `Progress`; its length is a multiple of the sizes.
        take: its step.
        sizes: of nested chunks, each dividing the next; with `save` one at most.
        save: whether the state at the start of each chunk is returned too.

    Returns:
        How far it came, ys, and with `save` the leaves of the state at the start of each chunk, [N, ...].
    """
    loop = dataclasses.replace(loop, step=take)
    levels = [Level(size, _Around(size, take.outputs, take.branches, save)) for size in sizes if size < loop.length]
    progress, ys = run_chunked(loop, tuple(levels))
    if not save:
        return progress, ys, []
    if not levels:
        return progress, ys, [leaf[None] for leaf in loop.state.leaves]
    ys, starts = ys
    return progress, ys, starts


def square_chunks(length: int) -> tuple[int, int]:
    """The size and the number of chunks, about as many as each has steps; without a remainder where that is near."""
    root = math.isqrt(length - 1) + 1
    near = [size for size in range(max(1, root // 2), min(length, 2 * root) + 1) if length % size == 0]
    size = min(near, key=lambda other: abs(math.log(other / root)), default=root)
    return size, -(-length // size)


def nested_sizes(length: int) -> tuple[int, tuple[int, ...]]:
    """For a loop of which only the state counts: how long it is made, and the sizes of its nested chunks."""
    depth = max(1, round(math.log(max(length, 2), BRANCHING)))
    ratio = 1
    while ratio**depth < length:
        ratio += 1
    return ratio**depth, tuple(ratio**i for i in range(1, depth) if ratio > 1)
