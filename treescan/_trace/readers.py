"""Finds which operations read a variable, through calls, loops, branches and what only changes its form."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .equations import called, jaxprs_within, loop_of

_FORMS = frozenset(
    {
        "broadcast_in_dim", "convert_element_type", "copy", "mesh_cast", "name", "optimization_barrier", "pcast",
        "pvary", "reduce_precision", "reshape", "reshard", "sharding_constraint", "slice", "squeeze", "transpose",
    }
)  # fmt: skip


def readers(jaxpr: Any, variable: Any) -> set[str]:
    """The names of the primitives that read a variable of an open jaxpr, in what it calls and runs too."""
    return {equation.primitive.name for equation in _reading(jaxpr, variable)}


def _reading(jaxpr: Any, variable: Any) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        places = [place for place, atom in enumerate(equation.invars) if atom is variable]
        if not places:
            continue
        if equation.primitive.name in _FORMS:
            yield from _reading(jaxpr, equation.outvars[0])
            continue
        inner = list(_within(equation))
        if not inner:
            yield equation
        for within, offset in inner:
            for place in places:
                if 0 <= place - offset < len(within.invars):
                    yield from _reading(within, within.invars[place - offset])


def _within(equation: Any) -> Iterator[tuple[Any, int]]:
    """The jaxprs that an equation runs, and how many of its operands they are not given."""
    name = equation.primitive.name
    if name == "cond":
        yield from ((branch.jaxpr, 1) for branch in equation.params["branches"])
    elif name == "while":
        yield equation.params["body_jaxpr"].jaxpr, equation.params["cond_nconsts"]
    elif name == "scan":
        yield loop_of(equation)[0], 0
    elif called(equation) is not None:
        yield called(equation)[0], 0  # type: ignore[index]


def unread_outputs(jaxpr: Any) -> Iterator[tuple[Any, Any]]:
    """The stacked outputs of loops in a jaxpr that nothing reads: the loop's equation, and the variable."""
    read = {atom for equation in jaxpr.eqns for atom in equation.invars if not hasattr(atom, "val")}
    read.update(atom for atom in jaxpr.outvars if not hasattr(atom, "val"))
    for equation in jaxpr.eqns:
        if equation.primitive.name == "scan":
            _, _, carried = loop_of(equation)
            yield from ((equation, var) for var in equation.outvars[carried:] if var not in read)
        for inner in jaxprs_within(equation):
            yield from unread_outputs(inner)
