"""Which outputs of a jaxpr depend on which inputs, and which outputs are constant."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import eval_jaxpr

from .._avals import Leaves
from .._loop.loop import Loop
from .equations import alone, aval_of, called_without_rule, inlined, loop_of, values_of, variables_of
from .smooth import zeros_like
from .steps import Traced

if TYPE_CHECKING:
    from jax.extend.core import Jaxpr, JaxprEqn, Var

Flags = list[bool]


def dependent(jaxpr: Jaxpr, given: Sequence[bool]) -> set[Var]:
    """The variables of an open jaxpr that depend on the flagged ones of its inputs."""
    found = {var for var, flag in zip(jaxpr.invars, given, strict=True) if flag}
    for equation in jaxpr.eqns:
        flags = [not hasattr(atom, "val") and atom in found for atom in equation.invars]
        flags = _of_equation(equation, flags)
        found.update(itertools.compress(equation.outvars, flags))
    return found


def _of_equation(equation: JaxprEqn, given: Flags) -> Flags:
    """For each output of an equation whether it depends on the flagged inputs; one with effects always may."""
    if equation.effects:
        return [True] * len(equation.outvars)
    if not any(given):
        return [False] * len(equation.outvars)
    rule = _RULES.get(equation.primitive.name)
    try:
        if rule is not None:
            return rule(equation, given)
        inner = called_without_rule(equation)  # one with a rule may have derivatives of inputs that its values ignore
        if inner is not None:
            return _outputs(inner[0], given)
    except (AttributeError, KeyError, ValueError):  # a release of JAX in which it looks otherwise
        pass
    return [True] * len(equation.outvars)


def _outputs(jaxpr: Jaxpr, given: Sequence[bool]) -> Flags:
    found = dependent(jaxpr, given)
    return [not hasattr(atom, "val") and atom in found for atom in jaxpr.outvars]


def _settled(carry: Flags, step: Callable[[Flags], Flags]) -> Flags:
    """What depends after any number of steps, if before the first it is so."""
    while True:
        wider = [old or new for old, new in zip(carry, step(carry), strict=True)]
        if wider == carry:
            return carry
        carry = wider


def _of_scan(equation: JaxprEqn, given: Flags) -> Flags:
    jaxpr, start, carried = loop_of(equation)
    consts, carry, xs = given[:start], given[start : start + carried], given[start + carried :]
    carry = _settled(carry, lambda carry: _outputs(jaxpr, [*consts, *carry, *xs])[:carried])
    return [*carry, *_outputs(jaxpr, [*consts, *carry, *xs])[carried:]]


def _of_while(equation: JaxprEqn, given: Flags) -> Flags:
    params = equation.params
    of_condition, of_body = params["cond_nconsts"], params["body_nconsts"]
    condition, body = given[:of_condition], given[of_condition : of_condition + of_body]
    carry = given[of_condition + of_body :]
    carry = _settled(carry, lambda carry: _outputs(params["body_jaxpr"].jaxpr, [*body, *carry]))
    stops = _outputs(params["cond_jaxpr"].jaxpr, [*condition, *carry])
    return [True] * len(carry) if any(stops) else carry


def _of_branches(equation: JaxprEqn, given: Flags) -> Flags:
    which, *rest = given
    if which:
        return [True] * len(equation.outvars)
    branches = [_outputs(branch.jaxpr, rest) for branch in equation.params["branches"]]
    return [any(flags) for flags in zip(*branches, strict=True)]


_RULES: dict[str, Callable[[JaxprEqn, Flags], Flags]] = {"scan": _of_scan, "while": _of_while, "cond": _of_branches}


class Once(NamedTuple):
    """Outputs that were computed before the loop, and by which equations.

    Attributes:
        values: the outputs.
        equations: the equations that need not be run again, by number.
        variables: what these compute and others need.
        early: their values.
    """

    values: Leaves
    equations: frozenset[int]
    variables: list[Var]
    early: Leaves


@dataclass(frozen=True, eq=False)
class StepProgram:
    """A traced step as equations.

    Attributes:
        jaxpr: the open jaxpr.
        consts: what it closes over.
        given: for each of its inputs the value, None where steps differ in it.
        varying: for each of its inputs whether steps differ in it.
    """

    jaxpr: Jaxpr
    consts: Leaves
    given: Leaves
    varying: tuple[bool, ...]

    @classmethod
    def of(cls, loop: Loop) -> StepProgram:
        """The program of the step of a loop that `hoist` made."""
        assert isinstance(loop.step, Traced)
        (closed,) = loop.step.jaxprs.values()
        consts, inputs = loop.consts, loop.hoisted.inputs
        same = [*jax.tree.leaves(inputs.consts), *inputs.unchanged]
        known = dict(zip(same, [*jax.tree.leaves(consts.inner), *consts.unchanged], strict=True))
        given = [known.get(var) for var in closed.jaxpr.invars]
        return cls(closed.jaxpr, list(closed.consts), given, loop.hoisted.varying)

    def inlined(self) -> StepProgram:
        """The step with the equations of the functions that it calls in place of the calls."""
        types = map(aval_of, self.jaxpr.invars)
        avals = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in types]
        closed = inlined(self.jaxpr, self.consts, avals)
        return StepProgram(closed.jaxpr, list(closed.consts), self.given, self.varying)

    def vary(self) -> set[Var]:
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
        # What these equations compute that others read, or that leaves the step.
        made = {var: None for number in sorted(equations) for var in self.jaxpr.eqns[number].outvars}
        others = (equation for number, equation in enumerate(self.jaxpr.eqns) if number not in equations)
        read = set(variables_of([*self.jaxpr.outvars, *(atom for each in others for atom in each.invars)]))
        later = [var for var in made if var in read]
        values = self._evaluate(sorted(equations | parts), needed)
        outputs = [value if isinstance(value, jax.Array) else jnp.asarray(value) for value in values_of(wanted, values)]
        return Once(outputs, frozenset(equations), later, [values[var] for var in later])

    def _evaluate(self, equations: Sequence[int], needed: set[Var]) -> dict[Var, Any]:
        """The results of these equations. Of an equation that computes too much (a loop), only the needed part."""
        values = dict(zip(self.jaxpr.constvars, self.consts, strict=True))
        known = zip(self.jaxpr.invars, self.given, self.varying, strict=True)
        values.update((var, value) for var, value, varies in known if not varies)
        for number in equations:
            equation = self.jaxpr.eqns[number]
            out = [var for var in equation.outvars if var in needed]
            own, program = alone(self.jaxpr, equation, out)
            # Nothing depends on those that are not known.
            given = [values[var] if var in values else zeros_like(aval_of(var)) for var in own]
            evaluate: Callable[..., Leaves] = functools.partial(eval_jaxpr, program, [])
            if not all(var in values for var in own):
                evaluate = jax.jit(evaluate)
            values.update(zip(out, evaluate(*given), strict=True))
        return values

    def without(self, once: Once, places: Sequence[int]) -> Jaxpr:
        """What is left of the jaxpr: it is given what was computed before the loop first."""
        outputs = [var for place, var in enumerate(self.jaxpr.outvars) if place not in set(places)]
        needed, equations = set(variables_of(outputs)), list["JaxprEqn"]()
        for number, equation in reversed(list(enumerate(self.jaxpr.eqns))):
            if number not in once.equations and (equation.effects or not needed.isdisjoint(equation.outvars)):
                equations.append(equation)
                needed.update(variables_of(equation.invars))
        return self.jaxpr.replace(invars=[*once.variables, *self.jaxpr.invars], outvars=outputs, eqns=equations[::-1])
