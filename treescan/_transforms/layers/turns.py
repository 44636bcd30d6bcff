"""Runs several blocks in turn over one state: a step of the first, one of the second, and so on."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..._avals import same_type
from ..._errors import speaking_of
from ..._loop.body import Body, Memo
from ..._loop.loop import Feed, Loop, Step
from ..._loop.run import is_jit_disabled, run
from ..._remat import Remat
from ..._trace.hoist import Hoisted, as_loop, is_untraced, merge
from ..._tree import Prefix
from ..._types import Array, PyTree
from ..checkpoint import checkpoint_step, checkpoint_steps
from ..nest import run_nested, run_planned
from ..outputs import (
    ALL,
    EVERYTHING,
    LAST,
    Keep,
    KeepOutputs,
    keep_afterwards,
    kept_leaves,
    spread_keeps,
    without_dropped,
)
from ..progress import ShowProgress
from ..refuse import refuse_to_repeat
from ..remat import Recompute, remat_wishes
from ..whole_state import KeepUnchanged
from .bar import LayersBar
from .fit import fit_turns
from .shared_traces import Traces, share_traces
from .state import CarryState

Remats = tuple[Remat | None, ...] | Remat | None
Saves = tuple[Prefix | None, ...]


@dataclass(frozen=True)
class Turns:
    """The step that runs one step of each of several loops. Its consts and its x are tuples, one item a loop.

    Attributes:
        steps: the steps of the loops.
        bodies: their bodies, of which errors speak.
        reverse: whether the last of them has the first turn.
    """

    steps: tuple[Step, ...]
    bodies: tuple[Body, ...]
    reverse: bool

    def __call__(self, consts: PyTree, state: PyTree, feed: Feed) -> tuple[PyTree, PyTree]:
        ys: list[PyTree] = [None] * len(self.steps)
        steps = share_traces(self.steps)
        for i in _order(len(steps), self.reverse):
            with speaking_of(self.bodies[i].function):
                state, ys[i] = steps[i](consts[i], state, feed.x[i])
        return state, tuple(ys)


def _order(count: int, reverse: bool) -> range:
    return range(count)[::-1] if reverse else range(count)


@dataclass(frozen=True)
class WithUnchanged:
    """A step on the leaves of the whole state, on those alone that some loop changes. Its consts: (others, inner)."""

    step: Step
    fixed: tuple[bool, ...]

    def __call__(self, consts: PyTree, state: list[Any], feed: Feed) -> tuple[list[Any], PyTree]:
        unchanged, inner = consts
        whole, y = self.step(inner, merge(self.fixed, unchanged, state), feed)
        return [leaf for leaf, fixed in zip(whole, self.fixed, strict=True) if not fixed], y


def run_turns(
    loops: Sequence[Loop], remat: Remats, saves: Saves, memo: Memo, shown: ShowProgress | None = None
) -> tuple[PyTree, list[PyTree]]:
    """Runs a step of each loop in turn. After the last common round, the loops with one more step run it, in order.

    Args:
        loops: loops over the same state. The first of them may have one step more than the others.
        remat: what the gradient recomputes: of all loops alike, or of the steps of each.
        saves: what is kept of the outputs of each.
        memo: keeps what is made for these loops together.
        shown: how they show their progress.

    Returns:
        The last state, and the outputs of each loop.
    """
    if shown is None or len(loops) == 1:
        return _run_turns(loops, remat, saves, memo, None, shown)
    bar = LayersBar.begin(shown, loops)
    state, ys = _run_turns(loops, remat, saves, memo, bar, None)
    bar.end(state)
    return state, ys


def _run_turns(
    loops: Sequence[Loop], remat: Remats, saves: Saves, memo: Memo, bar: LayersBar | None, shown: ShowProgress | None
) -> tuple[PyTree, list[PyTree]]:
    """The same, with a bar that has begun, or how a single loop shows its progress."""
    remat = None if is_untraced(loops[0]) else remat
    rounds = loops[-1].length
    rest = sum(loop.length > rounds for loop in loops)
    if len(loops) == 1 or not rounds:
        if len(loops) > 1 and isinstance(remat, Remat) and remat.budget is not None:
            remat = fit_turns(trace_turns(loops[:rest]), remat)
        return _run_in_order(loops, remat, saves, shown)
    if is_jit_disabled() or not (rest or remat or any(saves) or bar):
        wish = None if bar is None else bar.wish(lambda state: state)
        run_main = run if wish is None else lambda main: run_planned(dataclasses.replace(main, wishes=(wish,)))
        state, ys = _run_rounds(_Turn.of(loops), loops[0], rounds, rest, run_main, memo)
        pairs = zip(ys, saves, strict=True)
        return state, [y if s is None else keep_afterwards(y, s, reverse=loops[0].reverse) for y, s in pairs]
    return _run_traced(loops, remat, saves, rounds, rest, bar)


def _run_in_order(
    loops: Sequence[Loop], remat: Remats, saves: Saves, shown: ShowProgress | None
) -> tuple[PyTree, list[PyTree]]:
    """Loops with only one step each, which run one after the other."""
    state, ys, traces = loops[0].state, [None] * len(loops), Traces()
    for i in _order(len(loops), loops[0].reverse):
        loop = dataclasses.replace(loops[i], state=state)
        plan, save = remat[i] if isinstance(remat, tuple) else remat, saves[i]
        with speaking_of(loop.body.function):
            if (plan is not None or save is not None) and not is_untraced(loop):
                loop = as_loop(traces.hoist(loop))
            loop = loop if plan is None else Recompute(plan)(loop)
            loop = loop if save is None else KeepOutputs(save)(loop)
            loop = loop if shown is None else shown(loop)
            state, ys[i] = run_nested(loop)
    return state, ys


def _run_traced(
    loops: Sequence[Loop], remat: Remats, saves: Saves, rounds: int, rest: int, bar: LayersBar | None
) -> tuple[PyTree, list[PyTree]]:
    """Traces each step once, for the rounds and what is left after them, and has each recomputed by itself."""
    traced = trace_turns(loops)
    remat = fit_turns(traced, remat) if isinstance(remat, Remat) and remat.budget is not None else remat
    plans = remat if isinstance(remat, tuple) else (remat,) * len(loops)
    for loop, hoisted in zip(loops, traced, strict=True):
        with speaking_of(loop.body.function):
            if remat:
                refuse_to_repeat(hoisted)
    unchanged = tuple(map(all, zip(*(hoisted.fixed for hoisted in traced), strict=True)))
    keeps = [_keeps_of(loop, save, each) for loop, save, each in zip(loops, saves, traced, strict=True)]
    turns = [_on_whole_state(hoisted, plan, rounds) for hoisted, plan in zip(traced, plans, strict=True)]

    restore = functools.partial(jax.tree.unflatten, traced[0].structure)

    def run_main(main: Loop) -> tuple[PyTree, PyTree]:
        kept = [leaf for leaf, fixed in zip(main.state, unchanged, strict=True) if fixed]
        state = [leaf for leaf, fixed in zip(main.state, unchanged, strict=True) if not fixed]
        step = WithUnchanged(main.step, unchanged)
        every = tuple(keep for each in keeps for keep in each)
        wishes = tuple(remat_wishes(main.length, remat)) if isinstance(remat, Remat) else ()
        if bar is not None:
            wishes = (*wishes, bar.wish(lambda state: restore(merge(unchanged, kept, state))))
        state, ys = run_planned(
            dataclasses.replace(main, step=step, consts=(kept, main.consts), state=state, wishes=wishes, keeps=every)
        )
        left = iter(kept_leaves(ys, every))
        return merge(unchanged, kept, state), [[next(left) for _ in each] for each in keeps]

    def append(place: int, ys: list[Any], ends: PyTree) -> list[Any]:
        new = jax.tree.leaves(ends)
        flags = [_joins(keep, rounds) for keep in keeps[place]]
        joined = [_append(y, end) if on else y for y, end, on in zip(ys, new, flags, strict=True)]
        if loops[0].reverse:
            return joined
        return [end if keep == LAST else y for y, end, keep in zip(joined, new, keeps[place], strict=True)]

    first = dataclasses.replace(loops[0], state=traced[0].settled)
    state, each = _run_rounds(turns, first, rounds, rest, run_main, Memo(), append)
    triples = zip(each, traced, saves, strict=True)
    return restore(state), [without_dropped(y, jax.tree.structure(t.y), save or EVERYTHING) for y, t, save in triples]


def _keeps_of(loop: Loop, save: Prefix | None, hoisted: Hoisted) -> tuple[Keep, ...]:
    with speaking_of(loop.body.function):
        return spread_keeps(save or EVERYTHING, hoisted.y)


def _joins(keep: Keep, position: int) -> bool:
    """Whether the output at a position is stacked."""
    return keep is not None and keep >= ALL and (position + 1) % keep == 0


def trace_turns(loops: Sequence[Loop]) -> list[Hoisted]:
    """Traces each loop's step, equal ones once, from a state whose weak types have settled."""
    shared = share_traces([loop.step for loop in loops]) if isinstance(loops[0].step, CarryState) else None
    loops = loops if shared is None else [replace(loop, step=step) for loop, step in zip(loops, shared, strict=True)]
    state, traced, traces = loops[0].state, list[Hoisted](), Traces()
    while len(traced) < len(loops):
        loop, leaves = loops[len(traced)], jax.tree.leaves(state)
        with speaking_of(loop.body.function):
            hoisted = traces.hoist(dataclasses.replace(loop, state=state))
        if traced and not all(map(same_type, leaves, hoisted.settled)):
            traced.clear()  # if a later body promotes a weakly typed leaf, earlier bodies must see that type
        else:
            traced.append(hoisted)
        state = jax.tree.unflatten(hoisted.structure, hoisted.settled)
    return traced


class _Turn(NamedTuple):
    """A loop less its state, whose turn it is once a round.

    Attributes:
        body: its body.
        step: its step.
        last: the same for the turn that is left when all rounds are over, outside of any loop.
        consts: what all its steps read.
        xs: what it scans over.
    """

    body: Body
    step: Step
    last: Step
    consts: PyTree
    xs: Feed

    @classmethod
    def of(cls, loops: Sequence[Loop]) -> list[_Turn]:
        return [cls(loop.body, loop.step, loop.step, loop.consts, loop.xs) for loop in loops]


def _on_whole_state(hoisted: Hoisted, remat: Remat | None, rounds: int) -> _Turn:
    """The turn of a loop that was traced, over the leaves of the whole state, in so many rounds."""
    loop = hoisted.loop
    _, inner = loop.consts
    steps = (loop.step,) * 2
    if remat is not None:
        steps = (
            checkpoint_steps(replace(loop, length=rounds), remat).step,
            checkpoint_step(loop.step, remat, looped=False),
        )
    main, last = (KeepUnchanged(step, hoisted.fixed) for step in steps)
    return _Turn(loop.body, main, last, inner, loop.xs)


def _run_rounds(
    turns: Sequence[_Turn],
    first: Loop,
    rounds: int,
    rest: int,
    run_main: Callable[[Loop], tuple[PyTree, PyTree]],
    memo: Memo,
    append: Callable[[int, PyTree, PyTree], PyTree] | None = None,
) -> tuple[PyTree, list[PyTree]]:
    """All rounds, in which everyone has a turn, and after them, or in reverse before, the turns that are left.

    Args:
        turns: whose turns these are.
        first: the first loop, with the state to begin with; it says how all are run.
        rounds: how many rounds there are.
        rest: how many have one turn more.
        run_main: runs the loop of the rounds.
        memo: keeps what is made for that loop.
        append: appends to the outputs of the rounds, at a place among the loops, those of the turn that is left.
    """
    join = append or _append_all
    state, ends = first.state, ()
    leading = turns[:rest]
    left = Feed(tuple(jax.tree.map(lambda leaf: leaf[rounds], turn.xs) for turn in leading))
    bodies = tuple(turn.body for turn in turns)
    consts = tuple(turn.consts for turn in turns)
    last = Turns(tuple(turn.last for turn in leading), bodies[:rest], first.reverse)
    if rest and first.reverse:
        state, ends = last(consts[:rest], state, left)
    xs = Feed(tuple(_head(turn.xs, rounds) if i < rest else turn.xs for i, turn in enumerate(turns)))
    step = Turns(tuple(turn.step for turn in turns), bodies, first.reverse)
    main = dataclasses.replace(first, step=step, consts=consts, state=state, xs=xs, length=rounds, memo=memo)
    state, ys = run_main(main)
    if rest and not first.reverse:
        state, ends = last(consts[:rest], state, left)
    return state, [join(i, y, ends[i]) if i < rest else y for i, y in enumerate(ys)]


def _head(xs: Feed, count: int) -> Feed:
    return jax.tree.map(lambda leaf: jax.lax.slice_in_dim(leaf, 0, count), xs)


def _append_all(place: int, ys: PyTree, y: PyTree) -> PyTree:
    del place
    return jax.tree.map(_append, ys, y)


def _append(ys: Array, y: Array) -> Array:
    return jnp.concatenate([ys, y[None]])
