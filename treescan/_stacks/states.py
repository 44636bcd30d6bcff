"""States of the layers' own: the loop carries whole stacks of them, and each step reads and writes a slice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp

from .._avals import PyTree
from .._loop.loop import Loop, Result
from .._loop.turns import CarryState
from .._transforms.transform import Stage, Transform


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
            told = numbers[: turn.length] if place == (len(turns) - 1 if loop.reverse else 0) else None
            xs = turn.xs._replace(x=(told, leaves[:first]))
            step = CarryState(turn.step, structure, place)
            carried.append(turn.having(step=step, state=state, xs=xs, trace=None))

        def with_states(result: Result) -> PyTree:
            ys = result.ys if loop.turns else [result.ys]
            each = [y._replace(state=stack) for y, stack in zip(ys, result.state[1], strict=True)]
            return tuple(each) if loop.turns else each[0]

        return loop.with_turns(carried).finished(lambda state: state[0], with_states)
