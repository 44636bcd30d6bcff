"""Gives each layer its own state, from stacks that the loop carries and writes in place.

XLA copies a stack that is passed as xs and returned as ys, because it does not write outputs over inputs of a scan. As
a carry, one array is read and written, and the caller may donate it. If the gradient recomputes layers, it saves the
input of each layer, which would include the whole carried stack. So the loop then scans over the stack instead.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ..._body.state import StateAndY
from ..._loop.loop import Feed, Loop, Step
from ..._trace.smooth import is_smooth
from ..._tree import Prefix
from ..._types import PyTree, TreeDef
from ..outputs import ALL


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
