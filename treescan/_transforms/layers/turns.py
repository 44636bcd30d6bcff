"""Blocks that run in turn over one state: a step of the first, one of the second, and so on; their bar and traces."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from ..._avals import same_type, varying_axes
from ..._body.carry import StateAndY
from ..._errors import ArgumentError, Fault, speaking_of
from ..._loop.body import Body, Memo
from ..._loop.chunk import Wish
from ..._loop.loop import Feed, Loop, Step
from ..._loop.run import is_jit_disabled, run
from ..._remat import Remat
from ..._trace.hoist import Hoisted, as_loop, hoist, is_smooth, is_untraced, merge
from ..._trace.raw_keys import with_raw_keys
from ..._tree import Prefix
from ..._types import Array, ProgressLike, PyTree, TreeDef
from ..checkpoint import checkpoint_step, checkpoint_steps, warn_of_unknown_names
from ..nest import KeepUnchanged, run_nested, run_planned
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
from ..refuse import refuse_symbolic, refuse_to_repeat

if TYPE_CHECKING:
    from ..._loop.reports import Reporter
    from ..progress import Showing, ShowProgress


@dataclass(frozen=True)
class CarryState:
    """The step that takes its layer's state from a carried stack, and writes the new one there.

    Its state is (the inner state, for each loop the leaves of its stack, the number of the layer in its stack). Its x
    is (that number or None, the leaves of the inner x but for the state, which are the last of them). The inner y is
    (new state, y). Loops that take turns have their layers of one number after each other. The first of them is told
    the number, and the others read it: XLA frees more of what they slice where it sees that their numbers are one.

    Attributes:
        step: the inner step.
        structure: of its x.
        place: which of the stacks is this loop's.
    """

    step: Step
    structure: TreeDef
    place: int

    def __call__(self, consts: PyTree, state: PyTree, feed: Feed) -> tuple[PyTree, PyTree]:
        inner, stacks, number = state
        told, others = feed.x
        number = number if told is None else told
        own = [_read(stack, number) for stack in stacks[self.place]]
        x = jax.tree.unflatten(self.structure, [*others, *own])
        inner, (new, y) = self.step(consts, inner, feed._replace(x=x))
        triples = zip(stacks[self.place], own, jax.tree.leaves(new), strict=True)
        written = [stack if new is old else _write(stack, number, new) for stack, old, new in triples]
        return (inner, (*stacks[: self.place], written, *stacks[self.place + 1 :]), number), y


def _read(stack: Any, number: Any) -> Any:
    if not stack.shape[0]:  # a loop without steps is traced all the same
        return jax.lax.full_like(stack, 0, shape=stack.shape[1:])
    return jax.lax.dynamic_index_in_dim(stack, number, keepdims=False)


def _write(stack: Any, number: Any, new: Any) -> Any:
    return jax.lax.dynamic_update_index_in_dim(stack, new, number, 0) if stack.shape[0] else stack


def carry_states(loops: Sequence[Loop], counts: Sequence[int]) -> list[Loop]:
    """Loops that scan over stacks of states, as loops over one state that carry the stacks.

    Args:
        loops: loops over the same state, each with its stack last in its xs.
        counts: the number of leaves in each stack.
    """
    flat = [jax.tree.flatten(loop.xs.x) for loop in loops]
    firsts = [len(leaves) - count for (leaves, _), count in zip(flat, counts, strict=True)]
    stacks = tuple(leaves[first:] for (leaves, _), first in zip(flat, firsts, strict=True))
    numbers = jnp.arange(loops[0].length)
    last, reverse = len(loops) - 1, loops[0].reverse
    carried: list[Loop] = []
    for place, (loop, (leaves, structure), first) in enumerate(zip(loops, flat, firsts, strict=True)):
        step = CarryState(loop.step, structure, place)
        told = numbers[: loop.length] if place == (last if reverse else 0) else None
        xs = loop.xs._replace(x=(told, leaves[:first]))
        # In reverse the layers that are left over come first: they have the number to begin with.
        state = (loop.state, stacks, jnp.full((), loops[0].length - 1, numbers.dtype))
        carried.append(dataclasses.replace(loop, step=step, state=state, xs=xs))
    return carried


def cotangent_bytes(stack: PyTree) -> int:
    """The bytes of a cotangent of a stack of states: counts and flags have none."""
    types = [jax.typeof(leaf) for leaf in jax.tree.leaves(stack) if is_smooth(leaf)]
    return sum(math.prod(aval.shape) * aval.dtype.itemsize for aval in types)


def with_state(save: Prefix | None) -> Prefix | None:
    """What is kept of (new states, ys), where this is kept of ys."""
    return None if save is None else Prefix.of(StateAndY(ALL, save.tree))


def shape_states(stacks: Sequence[list[Any]], like: Sequence[PyTree]) -> tuple[PyTree, ...]:
    """Stacks of states from their leaves."""
    pairs = zip(stacks, like, strict=True)
    return tuple(jax.tree.unflatten(jax.tree.structure(tree), leaves) for leaves, tree in pairs)


def share_traces(steps: Sequence[Step]) -> list[Step]:
    """The steps, of which JAX traces equal ones once for each set of types that they are given.

    The equations of that trace are copied to each place, so the program is the one that a trace per place makes. A
    trace may hold values of the trace around it: what is returned is for one call of the step around it. Steps that
    carry states differ in their places; what they wrap is shared.
    """
    inner = [step.step if isinstance(step, CarryState) else step for step in steps]
    counts = collections.Counter(inner)
    shared = {step: jax.jit(_fresh(step), inline=True) for step, count in counts.items() if count > 1}
    pairs = [(step, shared.get(each, each)) for step, each in zip(steps, inner, strict=True)]
    return [dataclasses.replace(step, step=each) if isinstance(step, CarryState) else each for step, each in pairs]


def _fresh(step: Step) -> Step:
    """The step as a new function, by whose identity JAX keeps its traces."""

    def run(consts: PyTree, state: PyTree, feed: Feed, /) -> tuple[PyTree, PyTree]:
        return step(consts, state, feed)

    return run


class Traces:
    """Hoists the loops of one call: equal steps that are given the same types share one trace."""

    def __init__(self) -> None:
        self._made: dict[Hashable, Hoisted] = {}

    def hoist(self, loop: Loop) -> Hoisted:
        """What `hoist` makes of the loop."""
        known = self._made.get(_kind(loop))
        if known is not None:
            return _on_other_arrays(known, loop)
        hoisted = hoist(loop)
        settled = jax.tree.unflatten(hoisted.structure, hoisted.settled)
        self._made[_kind(dataclasses.replace(loop, state=settled))] = hoisted
        return hoisted


def _on_other_arrays(hoisted: Hoisted, loop: Loop) -> Hoisted:
    """The trace of one loop for another loop of the same kind, with that loop's arrays."""
    state = jax.tree.leaves(loop.state)
    unchanged = [leaf for leaf, fixed in zip(state, hoisted.fixed, strict=True) if fixed]
    changed = [leaf for leaf, fixed in zip(state, hoisted.fixed, strict=True) if not fixed]
    consts, step = (unchanged, loop.consts), hoisted.loop.step
    return hoisted._replace(loop=dataclasses.replace(loop, step=step, consts=consts, state=changed, memo=Memo()))


def _kind(loop: Loop) -> Hashable:
    """What the trace of a step depends on: the step, and the types of all that it is given."""
    leaves, structure = jax.tree.flatten((loop.consts, loop.state))
    layers, of_layers = jax.tree.flatten(loop.xs)
    of_one = tuple((shape[1:], *others) for shape, *others in map(_type, layers))
    return loop.step, structure, tuple(map(_type, leaves)), of_layers, of_one


def _type(leaf: Any) -> tuple[Any, ...]:
    aval = jax.typeof(leaf)
    others = (getattr(aval, name, None) for name in ("weak_type", "sharding", "memory_space"))
    return tuple(aval.shape), aval.dtype, varying_axes(aval), *others


@dataclass(frozen=True)
class ShowX:
    """Values of x, where the state is (x, stacks of the layers' own states, number of the layer)."""

    show: Callable[[Any], Mapping[str, Any]]

    def __call__(self, state: Any) -> Mapping[str, Any]:
        return self.show(state[0])


def of_x(shown: ShowProgress | None, x_of: Callable[[Any], Any]) -> ShowProgress | None:
    """What is shown of a loop whose x is made of its state by `x_of`."""
    if shown is None or shown.progress.show is None:
        return shown
    show = shown.progress.show
    progress = dataclasses.replace(shown.progress, show=lambda state: show(x_of(state)))
    return dataclasses.replace(shown, progress=progress)


def beside_states(shown: ShowProgress | None) -> ShowProgress | None:
    """What is shown of a loop that carries the layers' own states beside x."""
    if shown is None or shown.progress.show is None:
        return shown
    return dataclasses.replace(shown, progress=dataclasses.replace(shown.progress, show=ShowX(shown.progress.show)))


@dataclass(frozen=True, eq=False)
class LayersBar:
    """The bar of several loops that take turns.

    Attributes:
        reporter: reports.
        showing: what is shown of the state of all loops.
        updates: the most reports of the rounds.
        run: the number of the run.
        total: how many layers there are.
        rounds: how many rounds there are.
        blocks: how many layers a round has.
        left: whether layers are left after the rounds.
    """

    reporter: Reporter
    showing: Showing
    updates: int
    run: Array
    total: Array
    rounds: int
    blocks: int
    left: bool

    @classmethod
    def begin(cls, shown: ShowProgress, loops: Sequence[Loop]) -> LayersBar:
        """A new run."""
        from ..._loop.reports import Reporter, probes_of
        from ..._progress import FEW
        from ..progress import Showing

        first, progress = loops[0], shown.progress
        refuse_symbolic(first.length, "progress", "layers")
        showing = Showing(progress, first, custom=shown.custom)
        reporter = Reporter(showing.site, progress.batched)
        given = [(loop.consts, loop.xs.x) for loop in loops]
        probes = probes_of(*jax.tree.leaves((first.state, given))) if progress.batched else probes_of(first.state)
        total = jnp.int32(sum(loop.length for loop in loops))
        rounds = loops[-1].length
        left = not rounds or (first.length > rounds and not first.reverse)
        run = reporter.begin(total, probes)
        return cls(reporter, showing, progress.updates or FEW, run, total, rounds, len(loops), left)

    def wish(self, restore: Callable[[PyTree], PyTree]) -> Wish:
        """What is wished of the loop of rounds; `restore` makes the state of all loops from its own."""
        from ..progress import TellChunks

        live = jnp.full(self.rounds, self.blocks, jnp.int32)
        showing = self.showing.through(restore)
        tell = TellChunks(self.reporter, None, showing, self.run, self.total, live, more=self.left)
        return Wish(-(-self.rounds // self.updates), ticks=tell)

    def end(self, state: PyTree) -> None:
        """The last layer has run. It may have been the last of the rounds, which then said so."""
        if not self.left:
            return
        from ..._loop.reports import Tick, probes_after

        false = jnp.zeros((), bool)
        tick = Tick(self.run, self.total, self.total, false, ~false)
        self.reporter.step(tick, self.showing(state), probes_after(state))


def check_shown(
    progress: ProgressLike, bodies: Sequence[Body], verb: str, *, custom: bool, ahead: bool
) -> ShowProgress | None:
    """How a verb over layers shows its progress, named as its first block is; None: it does not.

    Raises:
        Fault: for an `ArgumentError` if weights are gathered ahead, or if several blocks are to have a bar backwards.
    """
    if progress is None or progress is False:
        return None
    from ..progress import ShowProgress

    shown, blocks = ShowProgress.of(progress, bodies[0], verb, custom=custom), len(bodies)
    if shown is not None and ahead:
        raise Fault(
            ArgumentError,
            "{call}: a loop with `prefetch` shows no `progress`: it is not cut into chunks.",
            "Leave out one of the two.",
        )
    if shown is not None and shown.progress.backward and blocks > 1:
        raise Fault(
            ArgumentError,
            f"{{call}}: `backward=True` of a `Progress` is for one block, and these are {blocks} that take turns.",
            "Leave it out.",
        )
    return shown


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
    """Runs loops in turn, with a bar that has begun, or with the progress of a single loop."""
    remat = None if is_untraced(loops[0]) else remat
    rounds = loops[-1].length
    rest = sum(loop.length > rounds for loop in loops)
    if len(loops) == 1 or not rounds:
        if len(loops) > 1:
            remat = _fitted(remat, lambda: trace_turns(loops[:rest]))
        return _run_in_order(loops, remat, saves, shown)
    if is_jit_disabled() or not (rest or remat or any(saves) or bar):
        wish = None if bar is None else bar.wish(lambda state: state)
        run_main = run if wish is None else lambda main: run_planned(dataclasses.replace(main, wishes=(wish,)))
        state, ys = _run_rounds(_Turn.of(loops), loops[0], rounds, rest, run_main, memo)
        pairs = zip(ys, saves, strict=True)
        return state, [y if s is None else keep_afterwards(y, s, reverse=loops[0].reverse) for y, s in pairs]
    return _run_traced(loops, remat, saves, rounds, rest, bar)


def _fitted(remat: Remats, traced: Callable[[], list[Hoisted]]) -> Remats:
    """What the gradient recomputes; a plan that fits where that is a budget for all loops."""
    if not isinstance(remat, Remat) or remat.budget is None:
        return remat
    from ..budget import fit_turns

    return fit_turns(traced(), remat)


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
                loop = as_loop(traces.hoist(with_raw_keys(loop)))
            if plan is not None:
                from ..remat import Recompute

                loop = Recompute(plan, checks_names=len(loops) == 1)(loop)
            loop = loop if save is None else KeepOutputs(save)(loop)
            loop = loop if shown is None else shown(loop)
            state, ys[i] = run_nested(loop)
    return state, ys


def _run_traced(
    loops: Sequence[Loop], remat: Remats, saves: Saves, rounds: int, rest: int, bar: LayersBar | None
) -> tuple[PyTree, list[PyTree]]:
    """Traces each step once, for the rounds and what is left after them, and has each recomputed by itself."""
    traced = trace_turns(loops)
    remat = _fitted(remat, lambda: traced)
    plans = remat if isinstance(remat, tuple) else (remat,) * len(loops)
    for loop, hoisted in zip(loops, traced, strict=True):
        with speaking_of(loop.body.function):
            if remat:
                refuse_to_repeat(hoisted)
    warn_of_unknown_names(plans, traced)
    unchanged = tuple(map(all, zip(*(hoisted.fixed for hoisted in traced), strict=True)))
    keeps = [_keeps_of(loop, save, each) for loop, save, each in zip(loops, saves, traced, strict=True)]
    turns = [_on_whole_state(hoisted, plan, rounds) for hoisted, plan in zip(traced, plans, strict=True)]

    restore = functools.partial(jax.tree.unflatten, traced[0].structure)

    def run_main(main: Loop) -> tuple[PyTree, PyTree]:
        kept = [leaf for leaf, fixed in zip(main.state, unchanged, strict=True) if fixed]
        state = [leaf for leaf, fixed in zip(main.state, unchanged, strict=True) if not fixed]
        step = WithUnchanged(main.step, unchanged)
        every = tuple(keep for each in keeps for keep in each)
        wishes: tuple[Wish, ...] = ()
        if isinstance(remat, Remat):
            from ..remat import remat_wishes

            wishes = tuple(remat_wishes(main.length, remat))
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
            checkpoint_steps(replace(loop, length=rounds, trace=hoisted), remat).step,
            checkpoint_step(loop.step, remat, looped=False, trace=hoisted),
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
