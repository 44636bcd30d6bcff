"""`save`: outputs that are not kept are not stacked, and not computed if nothing else needs them.

If every k-th output is kept, a chunk of k steps runs k - 1 of them without the output, and one with it. The compiler
removes the operations that only the output needs from the former. So one entry per chunk is stacked.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from .._avals import is_weak, place_like
from .._loop.chunk import Level, RunChunk, run_chunked
from .._loop.loop import Feed, Loop, Paced, Step
from .._loop.run import as_arrays, run
from .._trace.hoist import one_step
from .._types import Array, PyTree
from .outputs import ALL, LAST, Keep, is_thinned


@dataclass(frozen=True)
class Emit:
    """A step that returns some leaves of y, as a list."""

    step: Step
    flags: tuple[bool, ...]

    def __call__(self, consts: PyTree, state: PyTree, feed: Feed) -> tuple[PyTree, list[Array]]:
        state, y = self.step(consts, state, feed)
        return state, [leaf for leaf, flag in zip(jax.tree.leaves(y), self.flags, strict=True) if flag]


def emitting(step: Step, keeps: Sequence[Keep]) -> Emit:
    """A step that returns the leaves of y of which anything is kept."""
    return Emit(step, tuple(keep is not None for keep in keeps))


@dataclass(frozen=True)
class Called:
    """A step as one function of the program, which all that run it call."""

    function: Callable[..., tuple[PyTree, PyTree]]

    def __call__(self, consts: PyTree, state: PyTree, feed: Feed) -> tuple[PyTree, PyTree]:
        return self.function(consts, state, feed)


@dataclass(frozen=True)
class Thinned:
    """What a level keeps of its chunks.

    Attributes:
        size: the steps of a chunk.
        keeps: for each leaf of y.
        innermost: whether the steps of its chunks are run one by one.
    """

    size: int
    keeps: tuple[Keep, ...]
    innermost: bool

    def __call__(self, chunk: RunChunk) -> Step:
        return (_QuietSteps if self.innermost else _LastOfChunks)(chunk, self)

    @property
    def emitted(self) -> list[int]:
        """The leaves of y of which anything is kept."""
        return [i for i, keep in enumerate(self.keeps) if keep is not None]


@dataclass(frozen=True)
class _LastOfChunks:
    """Runs chunks, each of which kept something, and keeps of that the last, for the outputs that ask for no more."""

    chunk: RunChunk
    level: Thinned

    def __call__(self, consts: PyTree, state: PyTree, feed: Feed) -> tuple[PyTree, list[Array]]:
        state, ys = self.chunk(consts, state, feed)
        kept = zip(self.level.emitted, ys, strict=True)
        return state, [self._last(self.level.keeps[i], y) for i, y in kept]

    def _last(self, keep: Keep, ys: Array) -> Array:
        if keep == LAST:
            return ys[:1] if self.chunk.reverse else ys[-1:]
        if keep == self.level.size:
            return ys[-1:] if self.chunk.length == self.level.size else ys[:0]
        return ys


@dataclass(frozen=True)
class _QuietSteps:
    """Runs the steps of a chunk: those whose outputs are kept by themselves, the others in loops without these."""

    chunk: RunChunk
    level: Thinned

    def __call__(self, consts: PyTree, state: PyTree, feed: Feed) -> tuple[PyTree, list[Array]]:
        loop, loud = self.chunk.loop(consts, state, feed), self._loud_steps()
        always = tuple(keep == ALL for keep in self.level.keeps)
        everything = tuple(keep is not None for keep in self.level.keeps)
        parts: list[tuple[int, int]] = []
        start = 0
        for at in (*sorted(loud), loop.length):
            parts.extend([(start, at)] if start < at else [])
            parts.extend([(at, at + 1)] if at < loop.length else [])
            start = at + 1
        ys: dict[int, list[Array]] = {i: [] for i in self.level.emitted}
        for start, stop in parts[::-1] if loop.reverse else parts:
            flags = everything if start in loud else always
            state, new = _run_part(dataclasses.replace(loop, state=state), start, stop, flags, alone=start in loud)
            kept = [i for i, flag in enumerate(flags) if flag]
            if not all(always[i] or i in loud[start] for i in kept):
                new = jax.lax.optimization_barrier(new)  # all single steps are the same, so they share one program
            for i, y in zip(kept, new, strict=True):
                if always[i] or i in loud[start]:
                    ys[i].append(y)
        if not all(ys.values()):
            self._put_none(loop, ys)
        return state, [_join(pieces[::-1] if loop.reverse else pieces) for pieces in ys.values()]

    def _loud_steps(self) -> dict[int, list[int]]:
        """The steps that keep more than all steps do, and the leaves that they keep."""
        loud: dict[int, list[int]] = {}
        for i, keep in enumerate(self.level.keeps):
            if keep == LAST:
                loud.setdefault(0 if self.chunk.reverse else self.chunk.length - 1, []).append(i)
            elif keep not in (ALL, None) and self.chunk.length == self.level.size:
                loud.setdefault(self.chunk.length - 1, []).append(i)
        return loud

    def _put_none(self, loop: Loop, ys: dict[int, list[Array]]) -> None:
        """Empty stacks for the outputs that no step of this chunk keeps."""
        _, y = jax.eval_shape(loop.step, loop.consts, loop.state, one_step(loop.xs))
        for i, (leaf, pieces) in enumerate(
            zip(jax.tree.leaves(y), map(ys.get, range(len(self.level.keeps))), strict=True)
        ):
            if pieces == []:
                ys[i] = [place_like(jax.lax.full((0, *leaf.shape), 0, leaf.dtype), leaf)]


def _join(pieces: list[Array]) -> Array:
    return pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces)


def _run_part(loop: Loop, start: int, stop: int, flags: tuple[bool, ...], *, alone: bool) -> tuple[PyTree, list[Array]]:
    step = _as_function(loop, Emit(loop.step, flags))
    if alone:
        feed = jax.tree.map(lambda leaf: jax.lax.index_in_dim(leaf, start, keepdims=False), loop.xs)
        state, ys = as_arrays(step(loop.consts, loop.state, feed))  # a call returns a constant as a number
        return state, [y[None] for y in ys]
    whole = (start, stop) == (0, loop.length)
    xs = loop.xs if whole else jax.tree.map(lambda leaf: jax.lax.slice_in_dim(leaf, start, stop), loop.xs)
    return run(dataclasses.replace(loop, step=step, xs=xs, length=stop - start))


_FEW = 8


def last_chunk(loop: Loop) -> tuple[int, ...]:
    """Where outputs of the last step alone are kept: a few large chunks that leave no remainder.

    The steps before the last are run without them, and to part them from it cuts in two what the steps read and save.
    In chunks, that copies one chunk at a time.
    """
    length = loop.length
    if not jax.tree.leaves(loop.xs):
        return ()
    dividing = [size for size in range(2, length // 2 + 1) if length % size == 0]
    few = [size for size in dividing if size * _FEW <= length]
    return tuple(few[-1:] or dividing[:1])


def keep_levels(levels: Sequence[Level], keeps: tuple[Keep, ...]) -> tuple[Level, ...]:
    """The levels, ascending, with what each keeps."""

    def thinned(level: Level, *, innermost: bool) -> Level:
        needed = innermost or LAST in keeps or level.size in keeps
        return dataclasses.replace(level, outputs=Thinned(level.size, keeps, innermost)) if needed else level

    return tuple(thinned(level, innermost=place == 0) for place, level in enumerate(levels))


def run_keeping(loop: Loop, levels: Sequence[Level], keeps: tuple[Keep, ...]) -> tuple[PyTree, list[Any]]:
    """Runs a loop in chunks, and keeps of its outputs what is asked for.

    Args:
        loop: the loop.
        levels: ascending in size, with a boundary wherever `boundaries` wants one.
        keeps: for each leaf of y what is kept.

    Returns:
        The last state, and the leaves of ys that are left; see `kept_leaves`.
    """
    sizes = [level.size for level in levels] or [loop.length]
    often = tuple(_within_chunks(keep, sizes[0]) for keep in keeps)
    if is_thinned(often):
        loop = dataclasses.replace(loop, step=_as_function(loop, loop.step), state=_settled(loop))
        chunks = keep_levels(levels or (Level(loop.length),), often)
        state, ys = run_chunked(loop, chunks)
    else:
        state, ys = run_chunked(dataclasses.replace(loop, step=emitting(loop.step, keeps)), tuple(levels))
    pairs = [(keep, kept) for keep, kept in zip(keeps, often, strict=True) if keep is not None]
    return state, [_finish(y, keep, kept, loop, sizes) for y, (keep, kept) in zip(ys, pairs, strict=True)]


def _as_function(loop: Loop, step: Step) -> Step:
    """A step as one function of the program, kept with what was made for the loop."""

    def make() -> Called:
        def body(consts: PyTree, state: PyTree, feed: Feed) -> tuple[PyTree, PyTree]:
            return step(consts, state, feed)

        return Called(jax.jit(body))

    return (loop.memo or loop.body.memo)((Called, step), make)


def _settled(loop: Loop) -> PyTree:
    """The state, its weak types those that a step returns: the first step is the same program as the others."""
    if isinstance(loop.state, Paced):  # those of a loop that shows its progress have settled
        return loop.state
    state, _ = jax.eval_shape(loop.step, loop.consts, loop.state, one_step(loop.xs._replace(schedule=None, tick=None)))
    return jax.tree.map(
        lambda leaf, after: leaf if after.weak_type or not is_weak(leaf) else leaf.astype(after.dtype),
        as_arrays(loop.state),
        state,
    )


def _within_chunks(keep: Keep, finest: int) -> Keep:
    """How often an output is kept in the loop: in all steps where the chunks have no boundary where it should be."""
    return ALL if keep and keep % finest else keep


def _finish(ys: Array, keep: int, kept: Keep, loop: Loop, sizes: Sequence[int]) -> Array:
    """What is asked for of an output that was kept as often as the chunks allowed."""
    if keep == LAST:
        return ys[0] if loop.reverse else ys[-1]
    if keep == ALL or (kept == keep and keep in sizes):
        return ys
    stride = keep if kept == ALL else keep // sizes[0]
    return ys[stride - 1 :: stride]
