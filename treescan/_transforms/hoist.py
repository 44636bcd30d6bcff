"""Leaves that all rows share and the body never changes, weights in the carry say, leave the state.

lax.scan turns a leaf that comes back as it went in into a constant. But a mask shows shared leaves as they began where
no row is valid: of a constant too, that would be a new value each step, which the gradient would save T times.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax.core import eval_jaxpr

from .._loop import Feed, Loop, settle, weak_types_settled
from .._types import PyTree, TreeDef
from .axes import LeafAxes


@dataclass(frozen=True, eq=False)
class Traced:
    """A step that was traced already. Its consts are (unchanged leaves, inner consts), its state the other leaves.

    Attributes:
        jaxpr: the step, flat: (inner consts, state leaves, feed) to (state leaves, y).
        fixed: for each leaf of the state whether it is unchanged.
        y: the structure of y.
    """

    jaxpr: Any
    fixed: tuple[bool, ...]
    y: TreeDef

    def __call__(self, consts: Any, state: list[Any], feed: Feed) -> tuple[list[Any], PyTree]:
        unchanged, inner = consts
        leaves = jax.tree.leaves((inner, merge(self.fixed, unchanged, state), feed))
        out = eval_jaxpr(self.jaxpr.jaxpr, self.jaxpr.consts, *leaves, propagate_source_info=True)
        new, y = out[: len(self.fixed)], out[len(self.fixed) :]
        changed = [leaf for leaf, fixed in zip(new, self.fixed, strict=True) if not fixed]
        return changed, jax.tree.unflatten(self.y, y)


class Hoisted(NamedTuple):
    """A loop whose state is the list of leaves that change, and how to put the others back."""

    loop: Loop
    fixed: tuple[bool, ...]
    unchanged: list[Any]
    structure: TreeDef

    def restore(self, changed: list[Any]) -> PyTree:
        """The whole state."""
        return jax.tree.unflatten(self.structure, merge(self.fixed, self.unchanged, changed))


def hoist_shared(loop: Loop, carry_axes: LeafAxes) -> Hoisted:
    """Traces the step, once and for all, and takes unchanged shared leaves (those without an axis) out of the state."""
    leaves, structure = jax.tree.flatten(loop.state)
    feed = jax.eval_shape(lambda xs: jax.tree.map(lambda x: jax.lax.index_in_dim(x, 0, keepdims=False), xs), loop.xs)

    def step(consts: PyTree, leaves: list[Any], feed: Feed) -> tuple[list[Any], PyTree]:
        state, y = loop.step(consts, jax.tree.unflatten(structure, leaves), feed)
        return jax.tree.leaves(state), y

    jaxpr, (new, y) = jax.make_jaxpr(step, return_shape=True)(loop.consts, leaves, feed)
    leaves, changed = settle(leaves, new)
    if changed:  # a weakly typed init: as lax.scan does, once more from what it is promoted to
        with weak_types_settled():
            jaxpr, (new, y) = jax.make_jaxpr(step, return_shape=True)(loop.consts, leaves, feed)
    first = len(jax.tree.leaves(loop.consts))
    given, returned = jaxpr.jaxpr.invars[first : first + len(leaves)], jaxpr.jaxpr.outvars[: len(leaves)]
    fixed = tuple(a is b and axis is None for a, b, axis in zip(given, returned, carry_axes, strict=True))
    unchanged = [leaf for leaf, is_fixed in zip(leaves, fixed, strict=True) if is_fixed]
    state = [leaf for leaf, is_fixed in zip(leaves, fixed, strict=True) if not is_fixed]
    traced = Traced(jaxpr, fixed, jax.tree.structure(y))
    hoisted = dataclasses.replace(loop, step=traced, consts=(unchanged, loop.consts), state=state, interned=False)
    return Hoisted(hoisted, fixed, unchanged, structure)


def merge(flags: tuple[bool, ...], on: list[Any], off: list[Any]) -> list[Any]:
    """One list of two, each flag telling which of them is next."""
    first, second = iter(on), iter(off)
    return [next(first if flag else second) for flag in flags]
