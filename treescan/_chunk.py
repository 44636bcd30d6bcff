"""`run_chunked`, the one combinator over loops: a loop whose step runs a loop, plus the remainder; and its planner."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ._loop import Body, Feed, Loop, Memo, Step, run
from ._types import PyTree


@dataclass(frozen=True)
class Level:
    """One of the nested sizes into which a loop is cut.

    Attributes:
        size: the steps of a chunk.
        around: what is put around the step that runs a chunk: `around(step, looped)`, where `looped` tells whether
            that step is the step of a loop, or runs once, for the remainder. None: nothing.
        scheduled: whether the feed's schedule has one entry for each chunk of this level.
    """

    size: int
    around: Callable[[Step, bool], Step] | None = None
    scheduled: bool = False


@dataclass(frozen=True)
class RunChunk:
    """A step that runs `length` steps of another, over the stretch of xs that it is fed."""

    body: Body
    step: Step
    length: int
    levels: tuple[Level, ...]
    reverse: bool
    unroll: int | bool
    lowering: tuple[tuple[str, Any], ...]
    names: tuple[str, str]
    memo: Memo | None

    def __call__(self, consts: PyTree, state: PyTree, feed: Feed) -> tuple[PyTree, PyTree]:
        loop = Loop(
            self.body,
            self.step,
            consts,
            state,
            feed,
            self.length,
            self.reverse,
            self.unroll,
            self.lowering,
            self.names,
            self.memo,
        )
        return run_chunked(loop, self.levels)


def as_step(loop: Loop, levels: tuple[Level, ...] = ()) -> RunChunk:
    """A whole loop as the step of another."""
    return RunChunk(
        loop.body, loop.step, loop.length, levels, loop.reverse, loop.unroll, loop.lowering, loop.names, loop.memo
    )


def run_chunked(loop: Loop, levels: tuple[Level, ...]) -> tuple[PyTree, PyTree]:
    """Runs a loop in nested chunks; the results are those of `run`.

    Chunks lie at the multiples of each size, in reverse too; the remainder is at the highest positions. Main part,
    remainder and every level share the loop's own step, so that lax.scan traces it once.

    Args:
        loop: the loop.
        levels: ascending in size, each dividing the next. Those that hold the whole loop are left out, unless it is
            scheduled: then it is their remainder.
    """
    levels = tuple(level for level in levels if level.size < loop.length or level.scheduled)
    if not levels or not loop.length:
        return run(loop)
    left = loop.length if levels[-1].size >= loop.length else loop.length % levels[-1].size
    last = _around(levels[-1], as_step(dataclasses.replace(loop, length=left), levels[:-1]), looped=False)
    if left == loop.length:
        schedule = jax.tree.map(lambda leaf: leaf[0], loop.xs.schedule)
        return last(loop.consts, loop.state, loop.xs._replace(schedule=schedule))
    main, rest = _split(loop.xs, loop.length - left, levels)
    if not left:
        return _run_main(loop, main, levels)
    if loop.reverse:
        state, end = last(loop.consts, loop.state, rest)
        state, start = _run_main(dataclasses.replace(loop, state=state), main, levels)
    else:
        state, start = _run_main(loop, main, levels)
        state, end = last(loop.consts, state, rest)
    return state, jax.tree.map(lambda a, b: jnp.concatenate([a, b]), start, end)


def _around(level: Level, step: Step, *, looped: bool) -> Step:
    return step if level.around is None else level.around(step, looped)


def _split(xs: Feed, steps: int, levels: tuple[Level, ...]) -> tuple[Feed, Feed]:
    """The feed of all whole chunks of the last level, which hold the first `steps` steps, and that of the rest."""
    size = levels[-1].size
    unit = next((level.size for level in levels if level.scheduled), size)  # the steps that one entry stands for
    whole, schedule = xs._replace(schedule=None), xs.schedule
    main, rest = _group(whole, steps, size)
    main_schedule, rest_schedule = _group(schedule, steps // unit, size // unit)
    if levels[-1].scheduled:
        main_schedule = jax.tree.map(lambda leaf: leaf[:, 0], main_schedule)
        rest_schedule = jax.tree.map(lambda leaf: leaf[0], rest_schedule)
    return main._replace(schedule=main_schedule), rest._replace(schedule=rest_schedule)


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


class Wish(NamedTuple):
    """What one feature asks of the chunks: a boundary every `size` steps; exactly there, or about there."""

    size: int
    exact: bool = False


def plan_sizes(length: int, wishes: Iterable[Wish]) -> tuple[int, ...]:
    """One list of nested sizes for all wishes, so that no two features nest loops, and copies of the body, each.

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
