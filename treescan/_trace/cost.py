"""Estimates of a jaxpr: how many operations it takes, and how many bytes its gradient saves."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from .._avals import elements
from .equations import PRODUCTS, jaxprs_within

TRANSCENDENTAL = frozenset(
    {
        "atan2", "cos", "cosh", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "log", "log1p", "logistic", "pow",
        "sin", "sinh", "tan", "tanh",
    }
)  # fmt: skip
"""Primitives that take a processor many operations for each element."""

_PER_TRANSCENDENTAL = 100
_DECOMPOSITIONS = ("cholesky", "eig", "eigh", "lu", "qr", "schur", "svd", "triangular_solve")
_PER_DECOMPOSITION = 20


def count_operations(jaxpr: Any, transcendental: int = _PER_TRANSCENDENTAL) -> int:
    """The operations of an open jaxpr; a transcendental function counts as a hundred.

    Loops whose number of rounds is not known count once, and of branches the dearest. A size that is a symbol counts
    as 1.

    Args:
        jaxpr: the jaxpr.
        transcendental: what such a function counts as, for each element.
    """

    def of_equation(equation: Any) -> int:
        name, written = equation.primitive.name, sum(elements(var.aval) for var in equation.outvars)
        if name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            shape = equation.invars[0].aval.shape
            return 2 * written * _product(shape[axis] for axis in contracted)
        if name == "conv_general_dilated":
            kernel, numbers = equation.invars[1].aval, equation.params["dimension_numbers"]
            return 2 * written * elements(kernel) // max(1, _product([kernel.shape[numbers.rhs_spec[0]]]))
        if name in _DECOMPOSITIONS:
            sizes = (elements(v.aval) * _product(v.aval.shape[-1:]) for v in equation.invars)
            return _PER_DECOMPOSITION * max(sizes, default=0)
        return written * (transcendental if name in TRANSCENDENTAL else 1)

    return _count(jaxpr, of_equation, max)


def count_saved_bytes(jaxpr: Any) -> int:
    """About how many bytes the gradient of an open jaxpr saves: the results of products and of dear functions.

    What else is saved is made from these by functions that cost next to nothing, or is an argument. Loops count as in
    `count_operations`.
    """
    dear = TRANSCENDENTAL | PRODUCTS | {"conv_general_dilated", *_DECOMPOSITIONS}

    def of_equation(equation: Any) -> int:
        outputs = equation.outvars if equation.primitive.name in dear else ()
        return sum(elements(var.aval) * var.aval.dtype.itemsize for var in outputs)

    return _count(jaxpr, of_equation, sum)


def _count(jaxpr: Any, of_equation: Callable[[Any], int], of_branches: Callable[[list[int]], int]) -> int:
    """A sum over the equations of a jaxpr, in its loops, branches and functions too."""
    total = 0
    for equation in jaxpr.eqns:
        name, inner = equation.primitive.name, [_count(e, of_equation, of_branches) for e in jaxprs_within(equation)]
        times = int(equation.params["length"]) if name == "scan" else 1
        counted = of_branches(inner) if inner and name == "cond" else times * sum(inner)
        total += counted if inner else of_equation(equation)
    return total


def _product(sizes: Iterable[Any]) -> int:
    return math.prod(size for size in sizes if isinstance(size, int))
