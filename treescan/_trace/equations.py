"""Evaluates and compares single equations of a jaxpr."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jax.core import eval_jaxpr

_CALLS = frozenset({"jit", "closed_call", "remat2"})
_REVERSE_RULES = frozenset({"custom_vjp_call", "custom_lin"})
_BRANCHES = frozenset({"cond"})
PRODUCTS = frozenset({"dot_general", "conv_general_dilated"})
_CALLS_WITH_RULES = frozenset({"custom_jvp_call", "custom_vjp_call"})


def variables_of(atoms: Sequence[Any]) -> Iterator[Any]:
    """The variables among variables and literals."""
    return (atom for atom in atoms if not hasattr(atom, "val"))


def called(equation: Any) -> tuple[Any, list[Any]] | None:
    """The jaxpr that an equation calls, and what that closes over; None if it calls none."""
    name = equation.primitive.name
    if name in _CALLS:
        inner = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
    elif name in _CALLS_WITH_RULES:
        inner = equation.params.get("call_jaxpr")
    else:
        return None
    if inner is None:
        return None
    return (inner.jaxpr, list(inner.consts)) if hasattr(inner, "jaxpr") else (inner, [])


def loop_of(equation: Any) -> tuple[Any, int, int]:
    """The jaxpr of a scan's step, how many constants it takes, and how many values it carries."""
    jaxpr = equation.params["jaxpr"].jaxpr
    carried = _alike(equation.outvars, jaxpr.outvars)  # ys lead with the steps
    return jaxpr, _alike(equation.invars, jaxpr.invars) - carried, carried


def _alike(outside: Sequence[Any], inside: Sequence[Any]) -> int:
    """How many of a scan's variables are of one type outside and inside: xs and ys are not."""
    return sum(len(a.aval.shape) == len(b.aval.shape) for a, b in zip(outside, inside, strict=True))


def origins(jaxpr: Any, given: Sequence[Any]) -> list[Any]:
    """For each output of an open jaxpr what is given for the input that it is; None for one that is computed."""
    known = dict(zip(jaxpr.invars, given, strict=True))
    for equation in jaxpr.eqns:
        inner = called(equation)
        if inner is not None:
            known.update(zip(equation.outvars, origins(inner[0], _looked_up(equation.invars, known)), strict=True))
    return _looked_up(jaxpr.outvars, known)


def _looked_up(atoms: Sequence[Any], known: dict[Any, Any]) -> list[Any]:
    return [None if hasattr(atom, "val") else known.get(atom) for atom in atoms]


def has_reverse_rule(jaxpr: Any) -> bool:
    """Whether anything in a jaxpr has a rule for reverse mode alone (`jax.custom_vjp`).

    In a rule of `jax.custom_jvp` it cannot be mapped any more: the gradient of a `jax.vmap` of it would fail.
    """
    return _holds(jaxpr, _REVERSE_RULES)


def has_symbolic_zeros(jaxpr: Any) -> bool:
    """Whether anything in a jaxpr has a rule for reverse mode that is told which of its inputs are perturbed."""
    return any(
        (equation.primitive.name in _REVERSE_RULES and bool(equation.params.get("symbolic_zeros")))
        or any(map(has_symbolic_zeros, jaxprs_within(equation)))
        for equation in jaxpr.eqns
    )


def has_branches(jaxpr: Any) -> bool:
    """Whether anything in a jaxpr is a branch."""
    return _holds(jaxpr, _BRANCHES)


def has_products(jaxpr: Any) -> bool:
    """Whether anything in a jaxpr multiplies matrices."""
    return _holds(jaxpr, PRODUCTS)


def has_large_products(jaxpr: Any, size: int) -> bool:
    """Whether anything in a jaxpr multiplies with an array of at least so many elements."""
    return any(
        (equation.primitive.name in PRODUCTS and any(_elements(atom.aval) >= size for atom in equation.invars))
        or any(has_large_products(inner, size) for inner in jaxprs_within(equation))
        for equation in jaxpr.eqns
    )


def _elements(aval: Any) -> int:
    return math.prod(n for n in aval.shape if isinstance(n, int))


def _holds(jaxpr: Any, names: frozenset[str]) -> bool:
    """Whether a jaxpr holds one of these primitives, in a loop or a function too."""
    return any(
        equation.primitive.name in names or any(_holds(inner, names) for inner in jaxprs_within(equation))
        for equation in jaxpr.eqns
    )


def jaxprs_within(equation: Any) -> Iterator[Any]:
    """The jaxprs among the parameters of an equation."""
    for value in equation.params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            jaxpr = getattr(item, "jaxpr", item)
            if hasattr(jaxpr, "eqns"):
                yield jaxpr


def alone(jaxpr: Any, equation: Any, outputs: Sequence[Any] | None = None) -> tuple[list[Any], Any]:
    """One equation of a jaxpr as a jaxpr: the variables that it takes, and it. It returns all outputs, or the given."""
    taken = list(dict.fromkeys(variables_of(equation.invars)))
    returned = list(equation.outvars) if outputs is None else list(outputs)
    return taken, jaxpr.replace(constvars=[], invars=taken, outvars=returned, eqns=[equation], effects=equation.effects)


def evaluate_inlined(
    jaxpr: Any, consts: Sequence[Any], given: Sequence[Any], into: Callable[[Any], tuple[Any, list[Any]] | None]
) -> list[Any]:
    """Evaluates an open jaxpr, with the equations of what it calls in place of the calls, where `into` gives them."""
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *given], strict=True))
    for equation in jaxpr.eqns:
        inner = into(equation)
        if inner is None:
            taken, program = alone(jaxpr, equation)
            results = eval_jaxpr(program, [], *(values[var] for var in taken))
        else:
            results = evaluate_inlined(*inner, values_of(equation.invars, values), into)
        values.update(zip(equation.outvars, results, strict=True))
    return values_of(jaxpr.outvars, values)


def values_of(atoms: Sequence[Any], values: dict[Any, Any]) -> list[Any]:
    """The values of variables and literals."""
    return [atom.val if hasattr(atom, "val") else values[atom] for atom in atoms]
