"""Finds sums of products in a step, which then need one tangent in all."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..._trace.equations import variables_of
from .products import Deferred

_ADDITIONS = frozenset({"add", "add_any"})


class Slot(NamedTuple):
    """Where a tangent enters a step that was computed for all steps at once.

    Attributes:
        equation: the number of the equation to whose result it is added.
        deferred: the deferred products of which it is the tangent.
        early: the early values of which it is.
    """

    equation: int
    deferred: tuple[int, ...]
    early: tuple[int, ...] = ()


def slots_of(rest: Any, early: Sequence[Any], deferred: Sequence[Deferred]) -> tuple[Slot, ...]:
    """One slot for each sum of such values, or for a product that is in none.

    Args:
        rest: the step, an open jaxpr.
        early: those of its inputs that were computed before.
        deferred: its products whose tangents wait.
    """
    sums = _Sums(rest)
    members: dict[Any, tuple[list[int], list[int]]] = {}
    for i, product in enumerate(deferred):
        total = sums.total(rest.eqns[product.equation].outvars[0])
        members.setdefault(total, ([], []))[0].append(i)
    for i, var in enumerate(early):
        total = sums.total(var)
        if total in members:
            members[total][1].append(i)
    return tuple(
        Slot(sums.made_by[total], tuple(products), tuple(values)) for total, (products, values) in members.items()
    )


class _Sums:
    """Which sum a value goes into.

    Attributes:
        made_by: the number of the equation that computes each variable.
    """

    def __init__(self, jaxpr: Any) -> None:
        self.made_by = {var: number for number, equation in enumerate(jaxpr.eqns) for var in equation.outvars}
        self._readers: dict[Any, list[Any]] = collections.defaultdict(list)
        for equation in jaxpr.eqns:
            for var in variables_of(equation.invars):
                self._readers[var].append(equation)
        for var in variables_of(jaxpr.outvars):
            self._readers[var].append(None)

    def total(self, var: Any) -> Any:
        """The sum of all that is added to a variable that nothing else reads, and that has its type.

        An addition of another type ends the sum: one of a number and an array broadcasts, and the tangent of the number
        is no tangent of the array.
        """
        while len(self._readers[var]) == 1:
            (reader,) = self._readers[var]
            if reader is None or not _adds_alike(reader, var.aval):
                break
            (var,) = reader.outvars
        return var


def _adds_alike(equation: Any, aval: Any) -> bool:
    """Whether an equation adds up values of one type, which its result has too."""
    if equation.primitive.name not in _ADDITIONS:
        return False
    return all(atom.aval == aval for atom in (*equation.invars, *equation.outvars))
