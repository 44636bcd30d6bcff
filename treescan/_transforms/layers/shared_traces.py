"""Traces a block once if several places of a pattern run it on the same types."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any

import jax

from ..._avals import varying_axes
from ..._loop.body import Memo
from ..._loop.loop import Feed, Loop, Step
from ..._trace.hoist import Hoisted, hoist
from ..._types import PyTree
from .state import CarryState


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
    """The same trace for a loop of the same kind."""
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
