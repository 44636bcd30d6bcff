"""Which leaves of a loop have a tangent in some step, and tangents for these leaves of its state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import jax
from jax.custom_derivatives import SymbolicZero

from .._avals import PyTree
from .._loop.feed import one_step
from .._loop.loop import Arrays, Step
from .dependence import dependent
from .smooth import is_smooth, nonzero_part, zeros_like
from .ties import tie

if TYPE_CHECKING:
    from jax.extend.core import Jaxpr

Flags = Sequence[bool]


class On(NamedTuple):
    """For each leaf whether it has a tangent, in any step."""

    consts: Flags
    state: Flags
    xs: Flags
    y: Flags


def on_before(given: Arrays, d_given: Arrays) -> Arrays:
    """For each leaf of what a loop runs on whether it has a tangent before the first step."""
    return Arrays(*(nonzero_part(*each)[0].on for each in zip(given, d_given, strict=True)))


def on_in_steps(jaxpr: Jaxpr, given: Arrays) -> On:
    """Which inputs of a step, and leaves of y, have a tangent in some step, if before the first step these have.

    A leaf of the state without one may get one in a step. It then has one in the next, so this is asked until it stays.
    """
    consts, state, xs = map(list, given)
    while True:
        found = dependent(jaxpr, [*consts, *state, *xs])
        has = [not hasattr(var, "val") and var in found and is_smooth(var.aval) for var in jaxpr.outvars]
        new = [a or b for a, b in zip(state, has, strict=False)]
        if new == state:
            return On(consts, state, xs, has[len(state) :])
        state = new


def state_in_steps(step: Step, given: Arrays, d_given: Arrays) -> PyTree:
    """The tangents of the state of a loop, with arrays of zeros for leaves that get one in some step.

    JAX would find out which these are by differentiating the loop, with all that is in it, once more for each round. A
    zero is tied to the other tangents: what is known to be zero is left out where a tangent is computed later, and JAX
    would then find out the same once more.

    Args:
        step: the loop's, whose state keeps its structure.
        given: what it runs on.
        d_given: the tangents of that.
    """
    types = (*jax.tree.map(jax.typeof, (given.consts, given.state)), one_step(given.xs))
    jaxpr = jax.make_jaxpr(lambda *given: step(*given))(*types).jaxpr
    before = on_before(given, d_given)
    state, structure = jax.tree.flatten(given.state)
    d_state = jax.tree.leaves(d_given.state)
    gets = [a and not b for a, b in zip(on_in_steps(jaxpr, before).state, before.state, strict=True)]
    if not any(gets):
        return d_given.state
    known = [leaf for leaf in jax.tree.leaves(d_given) if not isinstance(leaf, SymbolicZero)]
    zeros = iter(tie([zeros_like(leaf) for leaf, new in zip(state, gets, strict=True) if new], known))
    filled = [next(zeros) if new else d for d, new in zip(d_state, gets, strict=True)]
    return jax.tree.unflatten(structure, filled)
