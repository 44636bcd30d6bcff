"""Runs a transformed loop in its chunks, then undoes the transforms on the results."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from .._avals import PyTree
from .._loop.chunk import Around, Level, Wish, plan_sizes, run_chunked
from .._loop.loop import Feed, Loop, Memo, Result, Step, is_untraced
from .._loop.turns import Turns
from .._trace.hoist import Hoisted, traced
from .._tree import merge, split
from .checkpoint import Checkpointed
from .outputs import ALL, LAST, boundaries, is_thinned, last_chunk, run_keeping


def run_nested(loop: Loop) -> Any:
    """Runs a loop and finishes its results; see `finish`. Without wishes, this is only its `jax.lax.scan`."""
    loop = in_rounds(loop)
    results = run_levels(*plan(loop)) if loop.runner is None else loop.runner(loop)
    return finish(loop, *results) if loop.finish else results  # in the container that the body chose for its pair


def finish(loop: Loop, *results: Any) -> Any:
    """The results of a loop, with all transforms undone: a pair, or a `Result` if it has more."""
    result = Result(*results)
    for undo in reversed(loop.finish):
        result = result._replace(state=undo.state(result.state), ys=undo.ys(result), **undo.notes(result))
    return result.short


def run_levels(loop: Loop, levels: tuple[Level, ...]) -> tuple[PyTree, PyTree]:
    """Runs a loop in chunks that were planned, and the turns that are left beside it."""
    if loop.rest is None:
        return run_chunked(loop, levels) if loop.keeps is None else run_keeping(loop, levels, loop.keeps)
    (step, feed), whole = loop.rest, dataclasses.replace(loop, rest=None)
    if loop.reverse:
        state, last = step(loop.consts, loop.state, feed)
        state, ys = run_levels(dataclasses.replace(whole, state=state), levels)
    else:
        state, ys = run_levels(whole, levels)
        state, last = step(loop.consts, state, feed)
    return state, _append(loop, ys, last)


def _append(loop: Loop, ys: PyTree, last: PyTree) -> PyTree:
    """The outputs of a loop, with those of the turns that are left. These are of the first outputs."""
    keeps = loop.keeps or (ALL,) * len(jax.tree.leaves(ys))
    leaves, structure = jax.tree.flatten(ys)
    ends = [end for end, keep in zip(jax.tree.leaves(last), keeps, strict=False) if keep is not None]
    for i, (end, keep) in enumerate(zip(ends, (keep for keep in keeps if keep is not None), strict=False)):
        if keep == LAST:
            leaves[i] = leaves[i] if loop.reverse else end
        elif (loop.length + 1) % keep == 0:
            leaves[i] = jnp.concatenate([leaves[i], end[None]])
    return jax.tree.unflatten(structure, leaves)


def in_rounds(loop: Loop) -> Loop:
    """The loop whose step runs a step of each of those that take turns. A loop without turns comes back as it is.

    Where turns are left after the last round, each step is traced once for both.
    """
    if not loop.turns:
        return loop
    if loop.turns[0].length > loop.length and not is_untraced(loop):
        loop = traced(loop)
    turns, rounds = loop.turns, loop.length
    count = sum(turn.length > rounds for turn in turns)
    left = tuple(jax.tree.map(lambda leaf: leaf[rounds], turn.xs) for turn in turns[:count])
    whole = [jax.tree.map(lambda leaf: jax.lax.slice_in_dim(leaf, 0, rounds), turn.xs) for turn in turns[:count]]
    xs = (*whole, *(turn.xs for turn in turns[count:]))
    steps, consts = tuple(turn.step for turn in turns), tuple(turn.consts for turn in turns)
    # Outside of a loop, XLA could merge what is recomputed with the first computation.
    alone = tuple(dataclasses.replace(s, looped=False) if isinstance(s, Checkpointed) else s for s in steps[:count])
    if loop.trace is not None:
        fixed = [trace.fixed for trace in loop.trace.each]
        steps, alone = (tuple(map(KeepUnchanged, each, fixed)) for each in (steps, alone))
        consts = tuple(inner for _, inner in consts)
    bodies = tuple(turn.body for turn in turns)
    step: Step = Turns(steps, bodies, loop.reverse)
    rest: Step = Turns(alone, bodies[:count], loop.reverse)
    if loop.trace is not None:
        step, rest = (WithUnchanged(each, loop.trace.fixed) for each in (step, rest))
        consts = (loop.consts[0], consts)
    end = (rest, Feed(left)) if count else None
    return dataclasses.replace(loop, step=step, consts=consts, xs=loop.xs._replace(x=xs), turns=(), rest=end)


def plan(loop: Loop) -> tuple[Loop, tuple[Level, ...]]:
    """One list of nested chunks for all wishes and for the outputs that are not kept, and the loop that runs in them.

    What a wish puts around its chunks goes to the size that comes nearest to it. A schedule is made for the size that
    was planned, and so is what is reported after each chunk.
    """
    if not (loop.wishes or loop.keeps):
        return loop, ()
    reports = next((wish for wish in loop.wishes if wish.ticks is not None), None)
    if reports is None:
        return _plan(loop, loop.wishes)
    others = tuple(wish for wish in loop.wishes if wish is not reports)
    planned, levels = _plan(loop, (*others, Wish(reports.size)))
    size = _size_of_reports(levels, reports.size)
    if size is None:
        planned, levels = _plan(loop, others)
        outermost = max((level.size for level in levels if level.size < loop.length), default=1)
        size = -(-reports.size // outermost) * outermost
    loop, around = reports.ticks(planned, size)
    return loop, _with_reports(levels, size, around)


def _size_of_reports(levels: Sequence[Level], least: int) -> int | None:
    """The smallest size that gives no more reports than were asked for, outside of all that is put around chunks."""
    inner = max((level.size for level in levels if level.around is not None), default=1)
    return min((level.size for level in levels if level.size >= max(inner, least)), default=None)


def _with_reports(levels: Sequence[Level], size: int, around: Around) -> tuple[Level, ...]:
    """The levels, with one of this size that reports."""
    own = next((level for level in levels if level.size == size), Level(size))
    reporting = dataclasses.replace(own, around=Outside(own.around, around), ticked=True)
    others = [level for level in levels if level is not own]
    return tuple(sorted([*others, reporting], key=lambda level: level.size))


@dataclass(frozen=True)
class Outside:
    """What is put around chunks: something, and something else around that."""

    inner: Around | None
    outer: Around

    @property
    def recomputes(self) -> bool:
        """Whether what it puts around chunks has the gradient compute them once more."""
        return recomputes(self.inner)

    def __call__(self, step: Step, looped: bool) -> Step:
        step = step if self.inner is None else self.inner(step, looped)
        return self.outer(step, looped)


def recomputes(around: Around | None) -> bool:
    """Whether what is put around chunks has the gradient compute them once more."""
    return bool(getattr(around, "recomputes", False))


def _plan(loop: Loop, wishes: tuple[Wish, ...]) -> tuple[Loop, tuple[Level, ...]]:
    scheduled = next((wish for wish in wishes if wish.schedule is not None), None)
    others = [wish for wish in wishes if wish is not scheduled]
    if scheduled is None:
        return loop, _levels_of(_sizes(loop, others), others)
    whole = scheduled.size == loop.length  # which may be symbolic
    sizes = _sizes(loop, others if whole else wishes)
    size = scheduled.size if whole or scheduled.size == 1 else _nearest((*sizes, loop.length), scheduled.size)
    loop, around = scheduled.schedule(loop, size)
    levels = [*_levels_of([other for other in sizes if other != size], others), Level(size, around, scheduled=True)]
    return loop, tuple(sorted(levels, key=lambda level: level.size))


def _sizes(loop: Loop, wishes: Sequence[Wish]) -> tuple[int, ...]:
    """The sizes of nested chunks.

    An output that is not kept as often as an exact wish allows is kept in all steps, and cut afterwards. A schedule
    gives way to such outputs alone.
    """
    keeps = loop.keeps or ()
    asked = [wish.size for wish in wishes if wish.exact]
    thinned = boundaries(keeps, loop.length)
    kept = [wish for wish in thinned if not any(wish.size % size and size % wish.size for size in asked)]
    wishes = [wish._replace(exact=wish.exact or (wish.schedule is not None and not kept)) for wish in wishes]
    sizes = plan_sizes(loop.length, [*wishes, *kept]) if wishes or kept else ()
    may_cut = not any(wish.schedule is not None for wish in loop.wishes)
    return last_chunk(loop) if not sizes and is_thinned(keeps) and may_cut else sizes


def _levels_of(sizes: Sequence[int], wishes: Sequence[Wish]) -> tuple[Level, ...]:
    if not sizes:
        return ()
    around = {_nearest(sizes, wish.size): wish.around for wish in wishes if wish.around is not None}
    return tuple(Level(size, around.get(size)) for size in sizes)


def _nearest(sizes: Sequence[int], wish: int) -> int:
    """The size with the smallest ratio to the requested one."""
    return min(sizes, key=lambda size: max(size / wish, wish / size))


@dataclass(frozen=True)
class KeepUnchanged:
    """A step that was traced already, on the leaves of the whole state: those that it does not change go past it."""

    step: Step
    fixed: tuple[bool, ...]

    def __call__(self, consts: PyTree, state: list[Any], feed: Feed) -> tuple[list[Any], PyTree]:
        unchanged, changed = split(self.fixed, state)
        changed, y = self.step((unchanged, consts), changed, feed)
        return merge(self.fixed, unchanged, changed), y


@dataclass(frozen=True)
class WithUnchanged:
    """A step on the leaves of the whole state, on those alone that some loop changes. Its consts: (others, inner)."""

    step: Step
    fixed: tuple[bool, ...]

    def __call__(self, consts: PyTree, state: list[Any], feed: Feed) -> tuple[list[Any], PyTree]:
        unchanged, inner = consts
        whole, y = self.step(inner, merge(self.fixed, unchanged, state), feed)
        return split(self.fixed, whole)[1], y


def in_whole_state(hoisted: Hoisted) -> Loop:
    """The loop that `hoist` made, with all leaves in its state."""
    turns, state = list[Loop](), hoisted.each[0].settled
    for one in hoisted.each:
        step, (_, inner) = KeepUnchanged(one.loop.step, one.fixed), one.loop.consts
        turns.append(dataclasses.replace(one.loop, step=step, consts=inner, state=state, memo=Memo()))
    loop = hoisted.loop.with_turns(turns)
    return loop.finished(lambda leaves: jax.tree.unflatten(hoisted.structure, leaves))
