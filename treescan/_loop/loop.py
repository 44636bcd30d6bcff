"""The Loop, the input of one step, and what transforms may change."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, cast

from .._types import Array, PyTree
from .body import Body, Memo


class Feed(NamedTuple):
    """What one step is fed: its slice of xs and, where an option asks for them, further arrays; else None.

    Attributes:
        x: the slice of xs.
        position: the step's position in xs.
        valid: which rows are data in this step.
        reset: which rows begin a segment before this step.
        cut: whether the gradient is cut before this step.
        cut_shared: bool[], the same for leaves that all rows share.
        end: which packed sequence of each row ends with this step, counted from 1; 0: none.
        schedule: of a chunk, not of a step: what of it is to be run.
        tick: of a chunk, not of a step: what is reported after it.
    """

    x: PyTree
    position: Any = None
    valid: Any = None
    reset: Any = None
    cut: Any = None
    cut_shared: Any = None
    end: Any = None
    schedule: PyTree = None
    tick: PyTree = None


class Paced(NamedTuple):
    """The state of a loop over chunks whose reports are paced, outside of everything else that runs a chunk.

    Attributes:
        state: the state.
        due: int32[], the steps after which the next report is due; less than 0 before the first.
        run: int32[], the number of the run. No chunk changes it.
        total: int32[], the steps of the run. No chunk changes it.
    """

    state: PyTree
    due: Array
    run: Array
    total: Array


class Step(Protocol):
    """One step of a loop: static, hashable and equal by value. Arrays come in as `consts`, never by closure."""

    def __call__(self, consts: PyTree, state: PyTree, feed: Feed, /) -> tuple[PyTree, PyTree]:
        """Maps (consts, state, feed) to (state, y)."""
        ...


def within(step: Step, kind: type[Any], change: Callable[[Any], Step]) -> Step:
    """A step around others, of which the one of a kind is changed; each has the inner one as its `step`."""
    if isinstance(step, kind):
        return change(step)
    inner: Step = getattr(step, "step")  # noqa: B009, not all steps have one
    return dataclasses.replace(cast(Any, step), step=within(inner, kind, change))


class Result(NamedTuple):
    """What a loop returns.

    Attributes:
        state: the last state.
        ys: the outputs.
        steps: int32[*batch], how many steps were taken, if the loop may end early; None: all of them.
        stopped: bool[*batch], whether the condition no longer held; None: there is none.
        once: y with the outputs that are the same in every step, and None in place of the others; None: none are.
        evidence: what `check_finite` knows of the first bad step, and what is static of it, for each body that may
            have run it; None: nothing is looked at.
    """

    state: PyTree
    ys: PyTree
    steps: Array | None = None
    stopped: Array | None = None
    once: PyTree = None
    evidence: PyTree = None

    @property
    def short(self) -> Any:
        """The state and ys alone, if there is nothing more."""
        return self[:2] if all(more is None for more in self[2:]) else self


def _same(state: PyTree) -> PyTree:
    return state


def _same_ys(result: Result) -> PyTree:
    return result.ys


def _no_notes(result: Result) -> dict[str, PyTree]:
    return {}


class Finish(NamedTuple):
    """A loop's results in the terms of the loop that a transform was given.

    Attributes:
        state: of the state, the last one or that between two chunks.
        ys: of ys, from the result. They may be in its state, which is not undone yet.
        notes: other fields of the result, by name, from the result.
    """

    state: Callable[[PyTree], PyTree] = _same
    ys: Callable[[Result], PyTree] = _same_ys
    notes: Callable[[Result], dict[str, PyTree]] = _no_notes


@dataclass(frozen=True)
class Loop:
    """A scan that has not run yet. Transforms map a Loop to a Loop; `run` runs it.

    Attributes:
        body: the user's function, by its handle.
        step: what runs each step.
        consts: arrays that every step reads and none changes.
        state: what is carried from step to step.
        xs: what is scanned over; every leaf leads with `length`.
        length: the number of steps.
        reverse: whether to run from the last position to the first.
        unroll: as for `jax.lax.scan`.
        lowering: further keyword arguments of `jax.lax.scan`, forwarded as they came.
        names: what the body calls its carry and its x, for messages.
        memo: keeps what is made for the step: the body's own memo, which outlives the call, unless the step holds a
            trace, and with it values of an outer one.
        trace: what was read off a trace of the step, if it was traced ahead of the loop; see `hoist.traced`.
        remat: what the gradient recomputes of each step, as the user asked; of turns a tuple. None: the user did not.
        wishes: the chunks that transforms ask for, and what they put around them; see `nest.run_nested`.
        keeps: for each leaf of one step's y how often it is kept; None: ys are stacked whole.
        rows: what a masked scan was told of its rows, and from `over_rows.OverRows` on where they are.
        going: what the verb was told of a range that is known at run time, and from `EndEarly` on what ends the loop.
        runner: what runs the loop in place of `nest.run_planned`.
        turns: loops over this state, in order, of which each iteration runs a step: layers of several blocks. Until
            `nest.in_rounds` joins them, the step, the consts and the xs are theirs. The first may have one step more
            than there are iterations. None: the loop runs its own step.
        rest: a step on the same consts and state, and what it is fed: the turns that are left after the last
            iteration, in reverse before the first.
        finish: what each transform does to the loop's results, in the order of the transforms.
    """

    body: Body
    step: Step
    consts: PyTree
    state: PyTree
    xs: Feed
    length: int
    reverse: bool = False
    unroll: int | bool = 1
    lowering: tuple[tuple[str, Any], ...] = ()
    names: tuple[str, str] = ("carry", "x")
    memo: Memo | None = None
    trace: Any = None
    remat: Any = None
    wishes: tuple[Any, ...] = ()
    keeps: tuple[int | None, ...] | None = None
    rows: Any = None
    going: Any = None
    runner: Callable[[Loop], tuple[Any, ...]] | None = None
    turns: tuple[Loop, ...] = ()
    rest: tuple[Step, Feed] | None = None
    finish: tuple[Finish, ...] = ()

    @property
    def each(self) -> tuple[Loop, ...]:
        """The loops that take turns, with the state of this one. A loop without turns is its own."""
        return tuple(dataclasses.replace(turn, state=self.state) for turn in self.turns) or (self,)

    @property
    def steps(self) -> int:
        """How many steps all of its loops have together."""
        return sum(turn.length for turn in self.turns) if self.turns else self.length

    def having(self, **changes: Any) -> Loop:
        """`dataclasses.replace`, ten times as fast: each loop is changed twenty times on its way to its trace."""
        assert changes.keys() <= self.__dict__.keys()
        loop = object.__new__(Loop)
        loop.__dict__.update(self.__dict__, **changes)
        return loop

    def with_turns(self, turns: Sequence[Loop]) -> Loop:
        """The loop with others in the places of those in `each`. They have the same state."""
        return dataclasses.replace(self, turns=tuple(turns), state=turns[0].state) if self.turns else turns[0]

    def finished(
        self,
        state: Callable[[PyTree], PyTree] = _same,
        ys: Callable[[Result], PyTree] = _same_ys,
        notes: Callable[[Result], dict[str, PyTree]] = _no_notes,
    ) -> Loop:
        """The loop, with one more thing to do to its results; see `Finish`."""
        return self.having(finish=(*self.finish, Finish(state, ys, notes)))

    def carry_of(self, state: PyTree) -> PyTree:
        """A state of this loop in the terms of the loop before any transform."""
        for undo in reversed(self.finish):
            state = undo.state(state)
        return state


def in_turn(loops: Sequence[Loop], memo: Memo | None = None) -> Loop:
    """One loop of several over one state, an iteration of which runs a step of each. The last has no more steps."""
    if len(loops) == 1:
        return loops[0]
    bare = dataclasses.replace(loops[0], consts=None, xs=Feed(None), length=loops[-1].length, memo=memo or Memo())
    return dataclasses.replace(bare, turns=tuple(loops))


class Transform(Protocol):
    """One option of a verb: static, hashable and equal by value. It maps a loop to another."""

    @property
    def moves(self) -> bool:
        """Whether there is work around the loop, which an eager call compiles together with it."""
        ...

    def __call__(self, loop: Loop, /) -> Loop:
        """The transformed loop; what undoes the transform in its results goes to `Loop.finish`."""
        ...
