"""Finds which outputs of a jaxpr depend on which inputs, through calls, loops and branches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .equations import called, loop_of

Flags = list[bool]


def dependent(jaxpr: Any, given: Sequence[bool]) -> set[Any]:
    """The variables of an open jaxpr that depend on the flagged ones of its inputs."""
    found = {var for var, flag in zip(jaxpr.invars, given, strict=True) if flag}
    for equation in jaxpr.eqns:
        flags = [not hasattr(atom, "val") and atom in found for atom in equation.invars]
        found.update(var for var, flag in zip(equation.outvars, _of_equation(equation, flags), strict=True) if flag)
    return found


def _of_equation(equation: Any, given: Flags) -> Flags:
    """For each output of an equation whether it depends on the flagged inputs; one with effects always may."""
    if equation.effects:
        return [True] * len(equation.outvars)
    if not any(given):
        return [False] * len(equation.outvars)
    rule = _RULES.get(equation.primitive.name)
    try:
        if rule is not None:
            return rule(equation, given)
        inner = called(equation)
        if inner is not None:
            return _outputs(inner[0], given)
    except (AttributeError, KeyError, ValueError):  # a release of JAX in which it looks otherwise
        pass
    return [True] * len(equation.outvars)


def _outputs(jaxpr: Any, given: Sequence[bool]) -> Flags:
    found = dependent(jaxpr, given)
    return [not hasattr(atom, "val") and atom in found for atom in jaxpr.outvars]


def _settled(carry: Flags, step: Callable[[Flags], Flags]) -> Flags:
    """What depends after any number of steps, if before the first it is so."""
    while True:
        wider = [old or new for old, new in zip(carry, step(carry), strict=True)]
        if wider == carry:
            return carry
        carry = wider


def _of_scan(equation: Any, given: Flags) -> Flags:
    jaxpr, start, carried = loop_of(equation)
    consts, carry, xs = given[:start], given[start : start + carried], given[start + carried :]
    carry = _settled(carry, lambda carry: _outputs(jaxpr, [*consts, *carry, *xs])[:carried])
    return [*carry, *_outputs(jaxpr, [*consts, *carry, *xs])[carried:]]


def _of_while(equation: Any, given: Flags) -> Flags:
    params = equation.params
    of_condition, of_body = params["cond_nconsts"], params["body_nconsts"]
    condition, body = given[:of_condition], given[of_condition : of_condition + of_body]
    carry = given[of_condition + of_body :]
    carry = _settled(carry, lambda carry: _outputs(params["body_jaxpr"].jaxpr, [*body, *carry]))
    stops = _outputs(params["cond_jaxpr"].jaxpr, [*condition, *carry])
    return [True] * len(carry) if any(stops) else carry


def _of_branches(equation: Any, given: Flags) -> Flags:
    which, *rest = given
    if which:
        return [True] * len(equation.outvars)
    branches = [_outputs(branch.jaxpr, rest) for branch in equation.params["branches"]]
    return [any(flags) for flags in zip(*branches, strict=True)]


_RULES: dict[str, Callable[[Any, Flags], Flags]] = {"scan": _of_scan, "while": _of_while, "cond": _of_branches}
