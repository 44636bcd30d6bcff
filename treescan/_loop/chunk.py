"""`run_chunked` runs a loop in chunks: a loop over chunks whose step is a loop, and the remainder."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from .._types import PyTree
from .body import Body, Memo
from .loop import Feed, Loop, Step
from .run import run

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
        return run_chunked(self.loop(consts, state, feed), self.levels)

    def loop(self, consts: PyTree, state: PyTree, feed: Feed) -> Loop:
        """The loop that it is, on the given arrays."""
        return Loop(
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
        levels: ascending in size, each dividing the next. Nothing is put around a chunk that holds the whole loop,
            unless the feed has an entry for it: then it is its remainder.
    """
    while levels and levels[-1].size >= loop.length and not levels[-1].counted:
        levels, outputs = levels[:-1], levels[-1].outputs
        if outputs is not None:
            return outputs(as_step(loop, levels))(loop.consts, loop.state, loop.xs)
    if not levels or not loop.length:
        return run(loop)
    left = loop.length if levels[-1].size >= loop.length else loop.length % levels[-1].size
    last = _around(levels[-1], as_step(dataclasses.replace(loop, length=left), levels[:-1]), looped=False)
    if left == loop.length:
        return last(loop.consts, loop.state, _first_entries(loop.xs, levels[-1]))
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
    """The same for entries of which each is for a chunk of the level that has them."""
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
