"""Runs a transformed loop in its chunks, then undoes the transforms on the results."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from .._avals import PyTree
from .._loop.chunk import Level, run_chunked
from .._loop.feed import Feed
from .._loop.loop import Loop, Result, Step, is_untraced
from .._loop.sizes import Wish, plan_sizes
from .._loop.turns import Turns
from .._outputs.outputs import ALL, LAST, boundaries, is_thinned, last_chunk, run_keeping
from .._remat.checkpoint import Checkpointed
from .._trace.hoist import Hoisted, traced
from .._tree import merge, split


def run_nested(loop: Loop) -> Any:
    """Runs a loop and finishes its results; see `finish`. Without wishes, this is only its `jax.lax.scan`."""
    loop = ready(loop)
    results = run_levels(loop) if loop.runner is None else loop.runner(loop)
    return finish(loop, *results) if loop.finish else results  # in the container that the body chose for its pair


def finish(loop: Loop, *results: Any) -> Any:
    """The results of a loop, with all transforms undone: a pair, or a `Result` if it has more."""
    result = Result(*results)
    for undo in reversed(loop.finish):
        result = result._replace(state=undo.state(result.state), ys=undo.ys(result), **undo.notes(result))
    return result.short


def run_levels(loop: Loop) -> tuple[PyTree, PyTree]:
    """Runs a loop in its chunks, and the turns that are left after the last of them, in reverse before the first."""
    whole, left = in_rounds(loop)
    whole, levels = plan(whole)
    if left is None:
        return _run(whole, levels)
    step, feed = left
    if loop.reverse:
        state, last = step(whole.consts, whole.state, feed)
        state, ys = _run(whole.having(state=state), levels)
    else:
        state, ys = _run(whole, levels)
        state, last = step(whole.consts, state, feed)
    return state, _append(loop, ys, last)


def _run(loop: Loop, levels: tuple[Level, ...]) -> tuple[PyTree, PyTree]:
    return run_chunked(loop, levels) if loop.keeps is None else run_keeping(loop, levels, loop.keeps)


def _append(loop: Loop, ys: PyTree, last: PyTree) -> PyTree:
    """The outputs of a loop, with the last entries of those bodies that take one turn more: the first in the list."""
    keeps = loop.keeps or (ALL,) * len(jax.tree.leaves(ys))
    leaves, structure = jax.tree.flatten(ys)
    ends = [end for end, keep in zip(jax.tree.leaves(last), keeps, strict=False) if keep is not None]
    for i, (end, keep) in enumerate(zip(ends, (keep for keep in keeps if keep is not None), strict=False)):
        if keep == LAST:
            leaves[i] = leaves[i] if loop.reverse else end
        elif (loop.length + 1) % keep == 0:
            leaves[i] = jnp.concatenate([leaves[i], end[None]])
    return jax.tree.unflatten(structure, leaves)


def ready(loop: Loop) -> Loop:
    """The loop, traced if turns are left after the last round, so that each step is traced once for both."""
    left = bool(loop.turns) and loop.turns[0].length > loop.length
    return traced(loop) if left and not is_untraced(loop) else loop


def in_rounds(loop: Loop) -> tuple[Loop, tuple[Step, Feed] | None]:
    """The loop whose step runs a step of each of those that take turns. A loop without turns comes back unchanged.

    The step that runs the turns that are left after the last round comes beside the loop, with what it is fed. Its
    consts and state are those of the loop.
    """
    if not loop.turns:
        return loop, None
    turns, rounds = loop.turns, loop.length
    count = sum(turn.length > rounds for turn in turns)
    left = tuple(jax.tree.map(lambda leaf: leaf[rounds], turn.xs) for turn in turns[:count])
    whole = [jax.tree.map(lambda leaf: jax.lax.slice_in_dim(leaf, 0, rounds), turn.xs) for turn in turns[:count]]
    xs = (*whole, *(turn.xs for turn in turns[count:]))
    steps, consts = tuple(turn.step for turn in turns), tuple(turn.consts for turn in turns)
    # Outside of a loop, XLA could merge what is recomputed with the first computation.
    alone = tuple(dataclasses.replace(s, looped=False) if isinstance(s, Checkpointed) else s for s in steps[:count])
    if loop.trace is not None:
        fixed = [trace.fixed for trace in loop.hoisted.each]
        steps, alone = (tuple(map(KeepUnchanged, each, fixed)) for each in (steps, alone))
        consts = tuple(inner for _, inner in consts)
    bodies = tuple(turn.body for turn in turns)
    step: Step = Turns(steps, bodies, loop.reverse)
    rest: Step = Turns(alone, bodies[:count], loop.reverse)
    if loop.trace is not None:
        step, rest = (WithUnchanged(each, loop.hoisted.fixed) for each in (step, rest))
        consts = (loop.consts[0], consts)
    end = (rest, Feed(left)) if count else None
    return dataclasses.replace(loop, step=step, consts=consts, xs=loop.xs._replace(x=xs), turns=()), end


def plan(loop: Loop) -> tuple[Loop, tuple[Level, ...]]:
    """One list of nested chunks for all wishes and for the outputs that are not kept, and the loop that runs in them.

    First it is decided which wishes have which size. Then each puts something around its chunks, from the innermost
    to the outermost. There are three kinds of wishes:

    - with slots (`counted`, one at most): what it feeds was made for chunks of some size, so it has chunks of its own;
    - outside: it goes around all others, at the smallest size that this leaves;
    - all others, for example recomputation: each takes the size that comes nearest. Of two at one size, the last is
      taken, as one recomputation of a chunk is enough.
    """
    if not (loop.wishes or loop.keeps):
        return loop, ()
    inner = [wish for wish in loop.wishes if not wish.outside]
    places = _places(loop, inner)
    for wish in (wish for wish in loop.wishes if wish.outside):
        places = _with_outer(loop, inner, places, wish)
    levels = list[Level]()
    for size, wishes in sorted(places.items(), key=lambda place: place[0]):
        level = Level(size)
        for put, slots in [(wish.put, wish.slots) for wish in wishes]:
            if put is not None:
                loop, around = put(loop, size)
                level = level.inside(around, slots)
        levels.append(level)
    return loop, tuple(levels)


_Places: TypeAlias = dict[int, list[Wish]]
"""The sizes of nested chunks, and for each the wishes that put something around its chunks, innermost first."""


def _with_outer(loop: Loop, inner: list[Wish], places: _Places, wish: Wish) -> _Places:
    """The places with that of one more wish, at the smallest size that is outside of all others."""
    planned = _places(loop, [*inner, Wish(wish.size)])
    taken = max((size for size, wishes in planned.items() if wishes), default=1)
    size = min((size for size in planned if size >= max(taken, wish.size)), default=None)
    if size is None:
        planned = places
        outermost = max((size for size in planned if size < loop.length), default=1)
        size = -(-wish.size // outermost) * outermost
    return planned | {size: [*planned.get(size, ()), wish]}


def _places(loop: Loop, wishes: list[Wish]) -> _Places:
    counted = next((wish for wish in wishes if wish.slots), None)
    others = [wish for wish in wishes if wish is not counted]
    if counted is None:
        return _nearest_places(_sizes(loop, others), others)
    # A chunk that is the whole loop, whose length may be symbolic, or a single step cuts nothing.
    whole = counted.size == loop.length
    sizes = _sizes(loop, others if whole else wishes)
    size = counted.size if whole or counted.size == 1 else _nearest((*sizes, loop.length), counted.size)
    return _nearest_places([other for other in sizes if other != size], others) | {size: [counted]}


def _nearest_places(sizes: Sequence[int], wishes: list[Wish]) -> _Places:
    """Each wish at the size that comes nearest to its own; the last one of those that have the same."""
    places: _Places = {size: [] for size in sizes}
    for wish in wishes:
        if sizes and wish.put is not None:
            places[_nearest(sizes, wish.size)] = [wish]
    return places


def _sizes(loop: Loop, wishes: Sequence[Wish]) -> tuple[int, ...]:
    """The sizes of nested chunks.

    An output that is not kept as often as an exact wish allows is kept in all steps, and cut afterwards.
    """
    keeps = loop.keeps or ()
    asked = [wish.size for wish in wishes if wish.exact]
    thinned = boundaries(keeps, loop.length)
    kept = [wish for wish in thinned if not any(wish.size % size and size % wish.size for size in asked)]
    wishes = [wish._replace(exact=wish.exact or (bool(wish.slots) and not kept)) for wish in wishes]
    sizes = plan_sizes(loop.length, [*wishes, *kept]) if wishes or kept else ()
    may_cut = not any(wish.slots and not wish.outside for wish in loop.wishes)
    return last_chunk(loop) if not sizes and is_thinned(keeps) and may_cut else sizes


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
        turns.append(one.loop.having(step=step, consts=inner, state=state, callee=one.loop.callee.apart()))
    loop = hoisted.loop.with_turns(turns)
    return loop.finished(lambda leaves: jax.tree.unflatten(hoisted.structure, leaves))
