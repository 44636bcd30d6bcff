"""States of the layers' own: the loop carries whole stacks of them, and each step reads and writes a slice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from .._avals import PyTree, TreeDef
from .._loop.feed import Feed
from .._loop.loop import Loop, Result
from .._loop.turns import Placed
from .._transforms.transform import Stage, Transform


@dataclass(frozen=True)
class CarryState(Placed):
    """The step that takes its layer's state from a carried stack, and writes the new one there.

    Its state is (the inner state, for each loop the leaves of its stack, the number of the layer in its stack). Its x
    is (that number or None, the leaves of the inner x but for the state, which are the last of them). The inner y is
    (new state, y), of which None is left in place of the state. Loops that take turns have their layers of one number
    after each other. The first of them is told the number, and the others read it: XLA frees more of what they slice
    where it sees that their numbers are one.

    Attributes:
        structure: of the inner step's x.
    """

    structure: TreeDef

    def __call__(self, consts: PyTree, state: PyTree, feed: Feed) -> tuple[PyTree, PyTree]:
        inner, stacks, number = state
        given_number, others = feed.x
        number = number if given_number is None else given_number
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


@dataclass(frozen=True)
class CarryStates(Transform):
    """Carries the stacks of states that a loop scans over, so that XLA updates them in place.

    Attributes:
        counts: for each loop that takes turns the number of leaves in its stack, which are the last of its xs.
    """

    counts: tuple[int, ...]
    stage: ClassVar[Stage] = Stage.JOINED

    @classmethod
    def of(cls, stacks: Sequence[PyTree]) -> CarryStates | None:
        """For each loop that takes turns its stack; None if they have none."""
        return cls(tuple(len(jax.tree.leaves(stack)) for stack in stacks)) if stacks else None

    def __call__(self, loop: Loop) -> Loop:
        turns = loop.each
        flat = [jax.tree.flatten(turn.xs.x) for turn in turns]
        firsts = [len(leaves) - count for (leaves, _), count in zip(flat, self.counts, strict=True)]
        stacks = tuple(leaves[first:] for (leaves, _), first in zip(flat, firsts, strict=True))
        numbers = jnp.arange(turns[0].length)
        # In reverse the layers that are left over come first: they have the number to begin with.
        state = (loop.state, stacks, jnp.full((), turns[0].length - 1, numbers.dtype))
        carried = list[Loop]()
        for place, (turn, (leaves, structure), first) in enumerate(zip(turns, flat, firsts, strict=True)):
            given_number = numbers[: turn.length] if place == (len(turns) - 1 if loop.reverse else 0) else None
            xs = turn.xs._replace(x=(given_number, leaves[:first]))
            step = CarryState(turn.step, place, structure)
            carried.append(turn.having(step=step, state=state, xs=xs, trace=None))

        def with_states(result: Result) -> PyTree:
            ys = result.ys if loop.turns else [result.ys]
            each = [y._replace(state=stack) for y, stack in zip(ys, result.state[1], strict=True)]
            return tuple(each) if loop.turns else each[0]

        return loop.with_turns(carried).finished(lambda state: state[0], with_states)
