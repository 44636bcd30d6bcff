"""Loops in chunks: the nested sizes that serve all wishes, and `run_chunked`, which runs them."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._avals import PyTree
from .loop import Feed, Loop, Step
from .run import in_one_mesh, run


class Wish(NamedTuple):
    """The wish of one transform: a boundary every `size` steps, exactly or approximately.

    Attributes:
        size: the steps of a chunk.
        exact: whether the boundaries have to be there.
        around: what is put around the chunks that come nearest to it, as for `Level.around`; None: nothing.
        schedule: makes, from the loop and the size that was planned, the loop with a schedule for its chunks, and what
            is put around them. One transform at most has one. None: the chunks have no schedule.
        ticks: the same for what is reported after each chunk; no more chunks are made than were asked for, and these
            lie around all others that have something put around them.
    """

    size: int
    exact: bool = False
    around: Any = None
    schedule: Any = None
    ticks: Any = None


def plan_sizes(length: int, wishes: Iterable[Wish]) -> tuple[int, ...]:
    """One list of nested sizes for all wishes, so that features do not each nest loops and copies of the body.

    Exact wishes keep their boundaries: where they do not divide one another, their greatest common divisor has them
    all. The others are moved to the nearest size (in ratio) that divides the next larger exact one and is a multiple
    of the next smaller one, and two of them that lie within a factor of two become one.

    Returns:
        Ascending sizes, each dividing the next, all above 1 and below `length`.
    """
    wishes = list(wishes)
    chain = _divisor_chain({wish.size for wish in wishes if wish.exact})
    for size in sorted(wish.size for wish in wishes if not wish.exact):
        if not any(size / 2 < other < size * 2 for other in chain):
            chain = sorted({*chain, _fit(size, chain)})
    return tuple(size for size in chain if 1 < size < length)


def _divisor_chain(sizes: set[int]) -> list[int]:
    chain = sorted(sizes)
    if any(large % small for small, large in itertools.pairwise(chain)):
        return [math.gcd(*chain)]
    return chain


def _fit(size: int, chain: list[int]) -> int:
    """The size nearest to a wish that keeps every element of the chain dividing the next."""
    below = max((other for other in chain if other <= size), default=1)
    above = min((other for other in chain if other > size), default=None)
    if above is None:
        return max(1, round(size / below)) * below
    fits = [below * k for k in range(1, above // below + 1) if above % (below * k) == 0]
    return min(fits, key=lambda other: abs(math.log(other / size)))


LARGEST, SMALLEST, FEWEST = 16, 8, 4
"""Of the chunk that is chosen for the user: the most and the least steps, and of how many a short loop is made."""


def chunk_size(length: int, largest: int = LARGEST) -> int:
    """The steps of a chunk for a loop: 16, fewer for short loops, and near that a divisor, so that nothing remains."""
    size = min(largest, max(SMALLEST, length // FEWEST))
    near = [other for other in range(size // 2 + 1, size * 2) if length % other == 0 and other < length]
    return min(near, key=lambda other: abs(other - size), default=size)


Around = Callable[[Step, bool], Step]
"""What is put around the step that runs a chunk: `around(step, looped)`, where `looped` tells whether that step is the
step of a loop, or runs once, for the remainder."""


@dataclass(frozen=True)
class Level:
    """One of the nested sizes into which a loop is cut.

    Attributes:
        size: the steps of a chunk.
        around: what is put around the step that runs a chunk; None: nothing.
        scheduled: whether the feed's schedule has one entry for each chunk of this level.
        outputs: what runs a chunk, or the remainder, in place of the step that does so and keeps all of its outputs.
            What it returns leads with however many are kept of each.
        ticked: whether the feed's tick has one entry for each chunk of this level.
    """

    size: int
    around: Around | None = None
    scheduled: bool = False
    outputs: Callable[[RunChunk], Step] | None = None
    ticked: bool = False

    @property
    def counted(self) -> bool:
        """Whether the feed has entries for its chunks, so that a chunk which holds the whole loop is one too."""
        return self.scheduled or self.ticked


@dataclass(frozen=True)
class RunChunk:
    """A step that runs the steps of a loop, over the stretch of xs that it is fed.

    Attributes:
        bare: the loop, less its arrays.
        levels: how it is cut.
    """

    bare: Loop
    levels: tuple[Level, ...]

    def __call__(self, consts: PyTree, state: PyTree, feed: Feed) -> tuple[PyTree, PyTree]:
        return run_chunked(self.loop(consts, state, feed), self.levels)

    @property
    def length(self) -> int:
        """The number of steps."""
        return self.bare.length

    @property
    def is_loop(self) -> bool:
        """Whether XLA runs all of it as a loop. It puts a loop of one step into the program around it.

        `jax.lax.scan` does so with steps that are left over if it unrolls the others.
        """
        length, unroll = self.length, self.bare.unroll
        sizes = [level.size for level in self.levels if level.size < length]
        if sizes:
            return length // sizes[-1] > 1
        return unroll is not True and length > unroll and length % unroll == 0

    def rolled(self) -> RunChunk:
        """What runs the same steps as a loop, whatever `unroll` says, if there are several of them."""
        return self if self.is_loop else RunChunk(dataclasses.replace(self.bare, unroll=1), self.levels)

    def loop(self, consts: PyTree, state: PyTree, feed: Feed) -> Loop:
        """The loop that it is, on the given arrays."""
        return self.bare.having(consts=consts, state=state, xs=feed)


def as_step(loop: Loop, levels: tuple[Level, ...] = ()) -> RunChunk:
    """A whole loop as the step of another."""
    how = {name: getattr(loop, name) for name in ("reverse", "unroll", "lowering", "names", "memo")}
    return RunChunk(Loop(loop.body, loop.step, None, None, Feed(None), loop.length, **how), levels)


def run_chunked(loop: Loop, levels: tuple[Level, ...]) -> tuple[PyTree, PyTree]:
    """Runs a loop in nested chunks; the results are those of `run`.

    Chunks lie at the multiples of each size, in reverse too; the remainder is at the highest positions. Main part,
    remainder and every level share the loop's own step, so that lax.scan traces it once.

    Args:
        loop: the loop.
        levels: ascending in size, each dividing the next. Nothing is put around a chunk that holds the whole loop,
            unless the feed has an entry for it: then it is its remainder.
    """
    loop = in_one_mesh(loop) if levels else loop
    while levels and levels[-1].size >= loop.length and not levels[-1].counted:
        levels, outputs = levels[:-1], levels[-1].outputs
        if outputs is not None:
            return outputs(as_step(loop, levels))(loop.consts, loop.state, loop.xs)
    if not levels or not loop.length:
        return run(loop)
    left = loop.length if levels[-1].size >= loop.length else loop.length % levels[-1].size
    if left == 1 and _may_grow(levels[-1]):
        left += levels[-1].size
    last = _around(levels[-1], as_step(dataclasses.replace(loop, length=left), levels[:-1]), looped=False)
    if left == loop.length:
        return last(loop.consts, loop.state, _first_entries(loop.xs, levels[-1]))
    main, rest = _split(loop.xs, loop.length - left, levels)
    whole = dataclasses.replace(loop, length=loop.length - left)  # without xs, nothing else says how many these are
    if not left:
        return _run_main(whole, main, levels)
    if loop.reverse:
        state, end = last(loop.consts, loop.state, rest)
        state, start = _run_main(dataclasses.replace(whole, state=state), main, levels)
    else:
        state, start = _run_main(whole, main, levels)
        state, end = last(loop.consts, state, rest)
    return state, jax.tree.map(lambda a, b: jnp.concatenate([a, b]), start, end)


def _may_grow(level: Level) -> bool:
    """Whether a remainder of one step may be joined to the last chunk of a level.

    XLA puts a single step into the program around it. If the gradient recomputes that step, XLA may round it and its
    derivative in two ways, and what the step decides is lost.
    """
    return bool(getattr(level.around, "recomputes", False)) and level.outputs is None and not level.counted


def _around(level: Level, chunk: RunChunk, *, looped: bool) -> Step:
    step = chunk if level.outputs is None else level.outputs(chunk)
    return step if level.around is None else level.around(step, looped)


def _split(xs: Feed, steps: int, levels: tuple[Level, ...]) -> tuple[Feed, Feed]:
    """The feed of all whole chunks of the last level, which hold the first `steps` steps, and that of the rest."""
    size = levels[-1].size
    main, rest = _group(xs._replace(schedule=None, tick=None), steps, size)
    scheduled = _split_entries(xs.schedule, levels, [level.scheduled for level in levels], steps)
    ticks = _split_entries(xs.tick, levels, [level.ticked for level in levels], steps)
    return main._replace(schedule=scheduled[0], tick=ticks[0]), rest._replace(schedule=scheduled[1], tick=ticks[1])


def _split_entries(entries: PyTree, levels: tuple[Level, ...], has: list[bool], steps: int) -> tuple[PyTree, PyTree]:
    """The entries of whole chunks and of the rest, where one entry is for a chunk of the level that has them."""
    unit = next((level.size for level, own in zip(levels, has, strict=True) if own), 1)
    main, rest = _group(entries, steps // unit, levels[-1].size // unit)
    if has[-1]:
        main = jax.tree.map(lambda leaf: leaf[:, 0], main)
        rest = _first(rest)
    return main, rest


def _first(entries: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: leaf[0], entries)


def _first_entries(xs: Feed, level: Level) -> Feed:
    """The feed of a single chunk of a level."""
    xs = xs._replace(schedule=_first(xs.schedule)) if level.scheduled else xs
    return xs._replace(tick=_first(xs.tick)) if level.ticked else xs


def _group(tree: PyTree, steps: int, size: int) -> tuple[PyTree, PyTree]:
    """The first `steps` entries of each leaf in groups of `size`, and the others."""

    def group(leaf: Any) -> Any:
        head = leaf if leaf.shape[0] == steps else jax.lax.slice_in_dim(leaf, 0, steps)
        return head.reshape(steps // size, size, *leaf.shape[1:])

    if all(leaf.shape[0] == steps for leaf in jax.tree.leaves(tree)):
        return jax.tree.map(group, tree), tree
    return jax.tree.map(group, tree), jax.tree.map(lambda leaf: jax.lax.slice_in_dim(leaf, steps, None), tree)


def _run_main(loop: Loop, xs: Feed, levels: tuple[Level, ...]) -> tuple[PyTree, PyTree]:
    size = levels[-1].size
    step = _around(levels[-1], as_step(dataclasses.replace(loop, length=size), levels[:-1]), looped=True)
    state, ys = run(dataclasses.replace(loop, step=step, xs=xs, length=loop.length // size, unroll=1, lowering=()))
    return state, jax.tree.map(lambda y: y.reshape(y.shape[0] * y.shape[1], *y.shape[2:]), ys)
