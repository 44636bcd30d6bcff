"""Steps of several loops over one state, which take turns: an iteration runs one step of each."""

from __future__ import annotations

import collections
import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import jax

from .._avals import PyTree
from .._errors import speaking_of
from .feed import Feed
from .loop import Body, Step


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
        steps, order = share_traces(self.steps), range(len(self.steps))
        for i in order[::-1] if self.reverse else order:
            with speaking_of(self.bodies[i].function):
                state, ys[i] = steps[i](consts[i], state, feed.x[i])
        return state, tuple(ys)


@dataclass(frozen=True)
class Placed(ABC):
    """A step that knows its place among those that take turns, around one that does not.

    Attributes:
        step: the inner step.
        place: which of the loops is this step's.
    """

    step: Step
    place: int

    @abstractmethod
    def __call__(self, consts: PyTree, state: PyTree, feed: Feed, /) -> tuple[PyTree, PyTree]:
        """Maps (consts, state, feed) to (state, y)."""


def share_traces(steps: Sequence[Step]) -> list[Step]:
    """The steps, of which JAX traces equal ones once for each set of types that they are given.

    The equations of that trace are copied to each place, so the program is the one that a trace per place makes. A
    trace may hold values of the trace around it: what is returned is for one call of the step around it. Steps that
    are `Placed` differ; what they wrap is shared.
    """
    inner = [step.step if isinstance(step, Placed) else step for step in steps]
    counts = collections.Counter(inner)
    shared = {step: jax.jit(_fresh(step), inline=True) for step, count in counts.items() if count > 1}
    pairs = [(step, shared.get(each, each)) for step, each in zip(steps, inner, strict=True)]
    return [dataclasses.replace(step, step=each) if isinstance(step, Placed) else each for step, each in pairs]


def _fresh(step: Step) -> Step:
    """The step as a new function, by whose identity JAX keeps its traces."""

    def run(consts: PyTree, state: PyTree, feed: Feed, /) -> tuple[PyTree, PyTree]:
        return step(consts, state, feed)

    return run
