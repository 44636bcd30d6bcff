"""A traced step as equations: which of its outputs are the same in every step, and what computes them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import eval_jaxpr

from .._avals import place_like
from .dependence import dependent
from .equations import alone, called, evaluate_inlined, variables_of
from .hoist import Hoisted, merge


class Once(NamedTuple):
    """Outputs that were computed before the loop, and by which equations.

    Attributes:
        values: the outputs.
        equations: the equations that need not be run again, by number.
        variables: what these compute and others need.
        early: their values.
    """

    values: list[Any]
    equations: frozenset[int]
    variables: list[Any]
    early: list[Any]


def _any_value(aval: Any) -> Any:
    """A value of this type, of which nothing that is needed depends."""
    return place_like(jnp.zeros(aval.shape, aval.dtype), aval)


@dataclass(frozen=True, eq=False)
class StepProgram:
    """A traced step as equations.

    Attributes:
        jaxpr: the open jaxpr.
        consts: what it closes over.
        given: for each of its inputs the value, None where steps differ in it.
        varying: for each of its inputs whether steps differ in it.
    """

    jaxpr: Any
    consts: list[Any]
    given: list[Any]
    varying: tuple[bool, ...]

    @classmethod
    def of(cls, hoisted: Hoisted) -> StepProgram:
        """The program of a loop's step."""
        traced = hoisted.traced
        (closed,) = traced.jaxprs.values()
        unchanged, inner = hoisted.loop.consts
        known = [*jax.tree.leaves(inner), *merge(traced.fixed, unchanged, [None] * len(hoisted.loop.state))]
        fed = len(closed.jaxpr.invars) - len(known)
        varying = (*(False for _ in jax.tree.leaves(inner)), *(not fixed for fixed in traced.fixed), *(True,) * fed)
        return cls(closed.jaxpr, list(closed.consts), [*known, *[None] * fed], varying)

    def inlined(self) -> StepProgram:
        """The same with the equations of what it calls in place of the calls."""
        avals = [jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in self.jaxpr.invars]
        closed = jax.make_jaxpr(lambda *given: evaluate_inlined(self.jaxpr, self.consts, given, called))(*avals)
        return StepProgram(closed.jaxpr, list(closed.consts), self.given, self.varying)

    def vary(self) -> set[Any]:
        """The variables in which steps differ, or may."""
        return dependent(self.jaxpr, self.varying)

    def compute(self, places: Sequence[int]) -> Once | None:
        """The outputs in these places, or None if one of them varies."""
        wanted, vary = [self.jaxpr.outvars[place] for place in places], self.vary()
        if not vary.isdisjoint(variables_of(wanted)):
            return None
        needed, parts, equations = set(variables_of(wanted)), set[int](), set[int]()
        for number, equation in reversed(list(enumerate(self.jaxpr.eqns))):
            if not needed.isdisjoint(equation.outvars):
                (equations if vary.isdisjoint(equation.outvars) else parts).add(number)
                needed.update(var for var in variables_of(equation.invars) if var not in vary)
        later = self._read_later(equations)
        values = self._evaluate(sorted(equations | parts), needed)
        outputs = [atom.val if hasattr(atom, "val") else values[atom] for atom in wanted]
        outputs = [value if isinstance(value, jax.Array) else jnp.asarray(value) for value in outputs]
        return Once(outputs, frozenset(equations), later, [values[var] for var in later])

    def _evaluate(self, equations: Sequence[int], needed: set[Any]) -> dict[Any, Any]:
        """The results of these equations. Of an equation that computes too much (a loop), only the needed part."""
        known = zip([*self.jaxpr.constvars, *self.jaxpr.invars], [*self.consts, *self.given], strict=True)
        varies = dict(zip(self.jaxpr.invars, self.varying, strict=True))
        values = {var: value for var, value in known if not varies.get(var, False)}
        for number in equations:
            equation = self.jaxpr.eqns[number]
            out = [var for var in equation.outvars if var in needed]
            own, program = alone(self.jaxpr, equation, out)
            given = [values[var] if var in values else _any_value(var.aval) for var in own]
            evaluate: Callable[..., list[Any]] = functools.partial(eval_jaxpr, program, [])
            if not all(var in values for var in own):
                evaluate = jax.jit(evaluate)
            values.update(zip(out, evaluate(*given), strict=True))
        return values

    def _read_later(self, equations: set[int]) -> list[Any]:
        """What these equations compute that others read, or that leaves the step."""
        made = {var: None for number in sorted(equations) for var in self.jaxpr.eqns[number].outvars}
        others = (equation for number, equation in enumerate(self.jaxpr.eqns) if number not in equations)
        read = {var for equation in others for var in variables_of(equation.invars)}
        read.update(variables_of(self.jaxpr.outvars))
        return [var for var in made if var in read]

    def without(self, once: Once, places: Sequence[int]) -> Any:
        """What is left of the jaxpr: it is given what was computed before the loop first."""
        outputs = [var for place, var in enumerate(self.jaxpr.outvars) if place not in set(places)]
        needed, equations = set(variables_of(outputs)), list[Any]()
        for number, equation in reversed(list(enumerate(self.jaxpr.eqns))):
            if number not in once.equations and (equation.effects or not needed.isdisjoint(equation.outvars)):
                equations.append(equation)
                needed.update(variables_of(equation.invars))
        return self.jaxpr.replace(invars=[*once.variables, *self.jaxpr.invars], outvars=outputs, eqns=equations[::-1])
