"""Steps of several loops over one state, which take turns: an iteration runs one step of each."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from .._avals import PyTree, TreeDef
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
class CarryState:
    """The step that takes its layer's state from a carried stack, and writes the new one there.

    Its state is (the inner state, for each loop the leaves of its stack, the number of the layer in its stack). Its x
    is (that number or None, the leaves of the inner x but for the state, which are the last of them). The inner y is
    (new state, y), of which None is left in place of the state. Loops that take turns have their layers of one number
    after each other. The first of them is told the number, and the others read it: XLA frees more of what they slice
    where it sees that their numbers are one.

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
        inner, y = self.step(consts, inner, feed._replace(x=x))
        triples = zip(stacks[self.place], own, jax.tree.leaves(y.state), strict=True)
        written = [stack if new is old else _write(stack, number, new) for stack, old, new in triples]
        stacks = (*stacks[: self.place], written, *stacks[self.place + 1 :])
        return (inner, stacks, number), y._replace(state=None)


def _read(stack: Any, number: Any) -> Any:
    if not stack.shape[0]:  # a loop without steps is traced all the same
        return jax.lax.full_like(stack, 0, shape=stack.shape[1:])
    return jax.lax.dynamic_index_in_dim(stack, number, keepdims=False)


def _write(stack: Any, number: Any, new: Any) -> Any:
    return jax.lax.dynamic_update_index_in_dim(stack, new, number, 0) if stack.shape[0] else stack


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
