"""Runs a transformed loop in its chunks, then undoes the transforms on the results."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from .._avals import PyTree
from .._loop.chunk import Level, run_chunked
from .._loop.feed import Consts, Feed
from .._loop.loop import Loop, Result, Step, is_untraced
from .._loop.turns import Turns
from .._outputs.outputs import ALL, LAST, run_keeping
from .._remat.checkpoint import Checkpointed
from .._trace.hoist import traced, whole_state
from .._tree import merge, split
from .plan import plan


def run_nested(loop: Loop) -> Any:
    """Runs a loop and finishes its results; see `finish`. Without wishes, this is only its `jax.lax.scan`."""
    loop = ready(loop)
    results = run_levels(loop) if loop.runner is None else loop.runner(loop)
    return finish(loop, *results) if loop.finish else results  # in the container that the body chose for its pair


def finish(loop: Loop, *results: Any) -> Any:
    """The results of a loop, with all transforms undone: a pair, or a `Result` if it has more."""
    result = Result(*results)
    for undo in reversed(loop.finish):
        state, ys = undo.state(result.state), undo.ys(result)
        result = undo.notes(result)._replace(state=state, ys=ys)
    return result.short


def run_levels(loop: Loop) -> tuple[PyTree, PyTree]:
    """Runs a loop in its chunks, and the turns that are left after the last of them, in reverse before the first."""
    whole, left = in_rounds(loop)
    whole, levels = plan(whole)
    if left is None:
        return _run_planned(whole, levels)
    step, feed = left
    if loop.reverse:
        state, last = step(whole.consts, whole.state, feed)
        state, ys = _run_planned(whole.having(state=state), levels)
    else:
        state, ys = _run_planned(whole, levels)
        state, last = step(whole.consts, state, feed)
    return state, _append(loop, ys, last)


def _run_planned(loop: Loop, levels: tuple[Level, ...]) -> tuple[PyTree, PyTree]:
    if loop.keeps is None:
        return run_chunked(loop.plan, levels, loop.arrays)
    return run_keeping(loop.plan, levels, loop.arrays, loop.keeps)


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
    # Outside of a loop, XLA could merge what is recomputed with the first computation. Recomputation is outermost here:
    # verbs whose bodies take turns refuse options around it.
    alone = tuple(dataclasses.replace(s, looped=False) if isinstance(s, Checkpointed) else s for s in steps[:count])
    if loop.trace is not None:
        fixed = [turn.hoisted.fixed for turn in turns]
        steps, alone = (tuple(map(KeepUnchanged, each, fixed)) for each in (steps, alone))
        consts = tuple(each._replace(unchanged=()) for each in consts)
    bodies = tuple(turn.body for turn in turns)
    step: Step = Turns(steps, bodies, loop.reverse)
    rest: Step = Turns(alone, bodies[:count], loop.reverse)
    if loop.trace is not None:
        step, rest = (WithUnchanged(each, loop.hoisted.fixed) for each in (step, rest))
        consts = loop.consts._replace(inner=consts)
    end = (rest, Feed(left)) if count else None
    return loop.having(step=step, consts=consts, xs=loop.xs._replace(x=xs), turns=()), end


@dataclass(frozen=True)
class KeepUnchanged:
    """A step that was traced already, on the leaves of the whole state: those that it does not change go past it."""

    step: Step
    fixed: tuple[bool, ...]

    def __call__(self, consts: Consts, state: list[Any], feed: Feed) -> tuple[list[Any], PyTree]:
        unchanged, changed = split(self.fixed, state)
        changed, y = self.step(consts._replace(unchanged=unchanged), changed, feed)
        return merge(self.fixed, unchanged, changed), y


@dataclass(frozen=True)
class WithUnchanged:
    """A step on the leaves of the whole state, on those alone that some loop changes."""

    step: Step
    fixed: tuple[bool, ...]

    def __call__(self, consts: Consts, state: list[Any], feed: Feed) -> tuple[list[Any], PyTree]:
        whole, y = self.step(consts.inner, merge(self.fixed, consts.unchanged, state), feed)
        return split(self.fixed, whole)[1], y


def in_whole_state(loop: Loop) -> Loop:
    """The loop with turns that `hoist` made, with all leaves in its state."""
    turns, state, structure = list[Loop](), whole_state(loop.turns[0]), loop.hoisted.structure
    for turn in loop.turns:
        step, consts = KeepUnchanged(turn.step, turn.hoisted.fixed), turn.consts._replace(unchanged=())
        turns.append(turn.apart().having(step=step, consts=consts, state=state, trace=None))
    return loop.with_turns(turns).having(trace=None).finished(functools.partial(jax.tree.unflatten, structure))
