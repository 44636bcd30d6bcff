"""Counts the bytes that one step of a loop adds to what its gradient needs, from traces of the step alone."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._loop.loop import Feed, Step
from .._trace.dependence import dependent
from .._trace.equations import called, evaluate_inlined, variables_of
from .._trace.hoist import Hoisted, one_step
from .._trace.smooth import is_smooth

AHEAD = 0.6
"""The part of the other blocks' saved values that is in memory during the gradient of one block: XLA computes a
block again as early as possible, not as late as possible."""


@dataclass(frozen=True)
class Footprint:
    """The bytes of one step. The step of a pattern is one period of it.

    Attributes:
        carry: of the leaves of the carry that change from step to step.
        kept: what is saved of a step that is recomputed: the carry before each block of it.
        whole: what is saved of a step where nothing is recomputed, its carry included.
        working: what the gradient computes once more, and holds at one time.
        xs: of the slice of xs.
        d_xs: of its gradient.
        leaf: of the largest array of that slice.
        d_ys: of the gradient of its output.
        weights: of the gradients of what all steps share.
        once: what is copied for the whole loop, however it is cut.
    """

    carry: int
    kept: int
    whole: int
    working: int
    xs: int
    d_xs: int
    leaf: int
    d_ys: int
    weights: int
    once: int = 0

    @property
    def at_one_level(self) -> int:
        """The bytes per step that a level copies and adds up when it slices out a chunk."""
        return self.xs + self.d_xs + self.d_ys


def footprint_of(hoisted: Hoisted) -> Footprint:
    """The bytes of one step of a loop."""
    return footprint_of_turns([hoisted])


def footprint_of_turns(loops: Sequence[Hoisted]) -> Footprint:
    """The same for several loops over one state of which each runs one step in turn."""
    carries = [carry_bytes(hoisted) for hoisted in loops]
    steps = [bytes_of_step(hoisted, hoisted.loop.step) for hoisted in loops]
    slices = [jax.tree.leaves(one_step(hoisted.loop.xs)) for hoisted in loops]
    shared = {id(leaf): leaf for hoisted in loops for leaf in _shared(hoisted)}
    return Footprint(
        carry=max(carries),
        kept=sum(carries),
        whole=sum(steps),
        working=round(max(steps) + AHEAD * (sum(steps) - max(steps))),
        xs=_sum(itertools.chain(*slices)),
        d_xs=_sum(filter(is_smooth, itertools.chain(*slices))),
        leaf=max(map(_bytes_of, itertools.chain(*slices)), default=0),
        d_ys=_sum(aval for hoisted in loops for aval in hoisted.y_avals if _is_float(aval)),
        weights=_sum(filter(is_smooth, shared.values())),
    )


def _shared(hoisted: Hoisted) -> list[Any]:
    """What all steps read: the arguments of the loop, what no step changes, and what the body closes over."""
    return [leaf for leaf in (*jax.tree.leaves(hoisted.loop.consts), *hoisted.closed) if hasattr(leaf, "dtype")]


def carry_bytes(hoisted: Hoisted) -> int:
    """Of the leaves of the carry that change from step to step."""
    return _sum(map(jnp.asarray, hoisted.loop.state))


def _sum(values: Iterable[Any]) -> int:
    return sum(map(_bytes_of, values))


def _bytes_of(value: Any) -> int:
    aval = value if hasattr(value, "shape") and not isinstance(value, jax.Array) else jax.typeof(value)
    if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return 16 * math.prod(aval.shape)
    return math.prod(aval.shape) * aval.dtype.itemsize


def _is_float(aval: Any) -> bool:
    return bool(jnp.issubdtype(aval.dtype, jnp.inexact))


def bytes_of_step(hoisted: Hoisted, step: Step) -> int:
    """The bytes that the gradient saves of a step: what its derivative reads and the step itself computes.

    What depends on nothing that changes from step to step is not saved in each, nor is what JAX's linearization keeps
    without reading it.
    """
    return _sum(residual.aval for residual in residuals_of_step(hoisted, step)) + carry_bytes(hoisted)


class Residual(NamedTuple):
    """A value that the gradient saves of each step: its type, and the equation that computes it."""

    aval: Any
    equation: Any


def residuals_of_step(hoisted: Hoisted, step: Step) -> list[Residual]:
    """What the gradient saves of a step beside its carry; see `bytes_of_step`."""
    loop, read = hoisted.loop, list[bool]()

    def residuals(consts: Any, state: list[Any], feed: Feed) -> list[Any]:
        leaves, structure = jax.tree.flatten((consts, state, feed))
        floats = list(map(is_smooth, leaves))

        def of_floats(*given: Any) -> list[Any]:
            mine = iter(given)
            whole = [next(mine) if is_float else leaf for leaf, is_float in zip(leaves, floats, strict=True)]
            new, y = step(*jax.tree.unflatten(structure, whole))
            return [leaf for leaf in jax.tree.leaves((new, y)) if is_smooth(leaf)]

        given = [leaf for leaf, is_float in zip(leaves, floats, strict=True) if is_float]
        returned, pullback = jax.vjp(of_floats, *given)
        kept, derivative = jax.tree.flatten(pullback)
        read.extend(_read(lambda kept, given: jax.tree.unflatten(derivative, kept)(given), kept, returned))
        return kept

    jaxpr = jax.make_jaxpr(residuals)(loop.consts, loop.state, one_step(loop.xs)).jaxpr
    shared = len(jax.tree.leaves(loop.consts))
    changing = dependent(jaxpr, [place >= shared for place in range(len(jaxpr.invars))]) - set(jaxpr.invars)
    kept = [var for var, is_read in zip(jaxpr.outvars, read, strict=True) if is_read and not hasattr(var, "val")]
    computed = {var: equation for equation in jaxpr.eqns for var in equation.outvars}
    return [Residual(var.aval, computed[var]) for var in dict.fromkeys(kept) if var in changing]


def _read(function: Any, leaves: list[Any], *others: Any) -> list[bool]:
    """The input leaves that a function reads or returns, also inside calls."""
    outer = jax.make_jaxpr(function)(leaves, *others)
    given = jax.tree.leaves((leaves, others))
    inlined = jax.make_jaxpr(lambda *given: evaluate_inlined(outer.jaxpr, outer.consts, given, called))(*given).jaxpr
    used = set(variables_of([*inlined.outvars, *(atom for each in inlined.eqns for atom in each.invars)]))
    return [var in used for var in inlined.invars[: len(leaves)]]
