"""Traces the bodies of a program: what they are given, and what they return."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.core import Tracer

from .._axes import LeafAxes
from .._body.conventions import Convention
from .._errors import describe_body
from .._loop.body import Body
from .._loop.loop import Loop
from .._trace.hoist import Hoisted, lifted, one_step, traced
from .._transforms.axes import OverAxes
from .._transforms.count import Count
from .._transforms.layers.pattern import Pattern
from .._transforms.layers.turns import trace_turns
from .._transforms.program import Arguments, Call, Transformed
from .._transforms.rows.over_rows import OverRows
from .._transforms.until.program import Until
from .._transforms.until.stop_rows import StopRows
from .._tree import leaves_with_path
from .._types import Array
from .constants import named_constants


@dataclass(frozen=True, eq=False)
class Named:
    """A value that a body is given: its path, and the value as the verb was given it."""

    path: str
    value: Any


@dataclass(frozen=True, eq=False)
class TracedBody:
    """A body with the trace of its step.

    Attributes:
        body: the body.
        hoisted: the step, what it closes over among its consts.
        carry: the leaves of the carry.
        fixed: for each of them whether no step changes it.
        x: what is scanned over.
        constants: the values that all steps share, and what the body closes over, in the order of the loop's consts.
    """

    body: Body
    hoisted: Hoisted
    carry: list[Named]
    fixed: list[bool]
    x: list[Named]
    constants: list[Named]

    @property
    def name(self) -> str:
        """The body, with its file and line."""
        return describe_body(self.body.function)

    @functools.cached_property
    def jaxpr(self) -> Any:
        """One step, on (consts, state, feed)."""
        loop = self.hoisted.loop
        return jax.make_jaxpr(loop.step)(loop.consts, loop.state, one_step(loop.xs)).jaxpr

    @property
    def batch(self) -> tuple[int, ...]:
        """The shape of the rows of a masked loop; () for others."""
        valid = self.hoisted.loop.xs.valid
        return () if valid is None else valid.shape[1:]

    @property
    def counts(self) -> tuple[int, int]:
        """How many consts and leaves of the state that change lead the inputs of the jaxpr."""
        loop = self.hoisted.loop
        return len(jax.tree.leaves(loop.consts)), len(loop.state)

    @property
    def closed_vars(self) -> list[Any]:
        """The inputs of the jaxpr that are its constants."""
        unchanged = sum(self.hoisted.fixed)
        return list(self.jaxpr.invars[unchanged : unchanged + len(self.constants)])

    @property
    def x_vars(self) -> list[Any]:
        """The inputs of the jaxpr that are scanned over."""
        start = sum(self.counts)
        return list(self.jaxpr.invars[start : start + len(self.x)])

    @property
    def y_vars(self) -> list[tuple[str, Any]]:
        """The outputs of the jaxpr with their paths."""
        outputs = self.jaxpr.outvars[len(self.hoisted.loop.state) :]
        return [(path, var) for (path, _), var in zip(leaves_with_path("y", self.hoisted.y), outputs, strict=True)]


def trace_bodies(program: Any, outer: Any, given: Any) -> list[TracedBody]:
    """The bodies of a program, traced for all rows alone; several take turns.

    Args:
        program: the program of a verb.
        outer: the arrays that the verb was given.
        given: the same as they are traced now.
    """
    return _TRACERS[type(program)](program, outer, given)


def _of_transformed(program: Transformed, outer: Arguments, given: Arguments) -> list[TracedBody]:
    loop, axes = program.call.lay(given), None
    for transform in program.transforms:
        if isinstance(transform, OverRows):
            loop, axes = dataclasses.replace(transform, compact=False)(loop), transform.in_axes
        elif isinstance(transform, OverAxes | Count):
            loop, axes = transform(loop), getattr(transform, "axes", None)
    return [_traced(program.call, loop, outer, axes)]


def _of_until(program: Until, outer: Any, given: Any) -> list[TracedBody]:
    stops = program.lays if isinstance(program.lays, StopRows) else None
    lays = program.lays if stops is None else dataclasses.replace(stops, compact=False)
    loop = dataclasses.replace(program, lays=lays, check=None).lay(given)
    return [_traced(program.call, loop, outer[0], None if stops is None else stops.in_axes)]


def _of_pattern(program: Pattern, outer: Arguments, given: Arguments) -> list[TracedBody]:
    loops = program.lay(given)
    if len(loops) > 1:
        loops = [_as_loop(hoisted) for hoisted in trace_turns(loops)]
    each = zip(program.blocks, loops, program.axes, range(len(loops)), strict=True)
    return [_traced(call, loop, outer._replace(xs=outer.xs[i]), axes) for call, loop, axes, i in each]


def _as_loop(hoisted: Hoisted) -> Loop:
    return dataclasses.replace(hoisted.loop, trace=hoisted)


_TRACERS: dict[type, Callable[[Any, Any, Any], list[TracedBody]]] = {
    Transformed: _of_transformed,
    Until: _of_until,
    Pattern: _of_pattern,
}


def _traced(call: Call, loop: Loop, outer: Arguments, axes: LeafAxes | None) -> TracedBody:
    loop = traced(loop)
    loop = lifted(loop) if loop.step is loop.trace.loop.step and loop.rows is None else loop
    hoisted: Hoisted = loop.trace
    carry_name, x_name = call.names
    carry = [Named(*pair) for pair in leaves_with_path(carry_name, outer.init)]
    counted = len(hoisted.fixed) - len(carry)  # the index of `fori` and the position of a key lead the state
    scanned = [Named(*pair) for pair in named_x(call.convention, x_name, outer.xs)]
    places = axes or (0,) * len(scanned)
    whole = [leaf for leaf, axis in zip(scanned, places, strict=True) if axis is None]
    shared = [Named(path, leaf) for path, leaf in _named_shared(outer)]
    _, (closed, _) = hoisted.loop.consts
    outside = named_constants(call.body.function, closed)
    return TracedBody(
        call.body,
        hoisted,
        carry,
        list(hoisted.fixed[counted:]),
        [leaf for leaf, axis in zip(scanned, places, strict=True) if axis is not None],
        [*map(Named, outside, closed), *whole, *shared],
    )


def named_x(convention: Convention, name: str, xs: Any) -> list[tuple[str, Any]]:
    """What is scanned over. Of layers it is a tuple: the layer, and what else it has of its own."""
    if not convention.spread:
        return leaves_with_path(name, xs)
    names = [convention.takes[0], *(["x_layer"] if len(xs) > 1 + convention.stateful else [])]
    names += ["state"] if convention.stateful else []
    return [pair for part, own in zip(names, xs, strict=False) for pair in leaves_with_path(part, own)]


def _named_shared(given: Arguments) -> list[tuple[str, Array]]:
    key = [] if given.key is None else [("key", given.key)]
    return [*key, *leaves_with_path("args", given.args)]


def sharding_of(value: Any) -> str | None:
    """How an array is spread over devices; None where it is on one, or that is not known."""
    spec = spec_of(value)
    return None if not any(part is not None for part in spec) else f"P({', '.join(map(_shown, spec))})"


def _shown(part: Any) -> str:
    return repr(part)


def spec_of(value: Any) -> Sequence[Any]:
    """For each axis of an array the mesh axes over which it is spread."""
    sharding = getattr(jax.typeof(value), "sharding", None) if isinstance(value, Tracer) else None
    sharding = sharding or getattr(value, "sharding", None)
    spec = getattr(sharding, "spec", None)
    return () if spec is None else tuple(getattr(spec, "partitions", spec))
