"""Estimates how many operations a jaxpr takes."""

from __future__ import annotations

import math
from typing import Any

from .equations import jaxprs_within

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
_PRODUCTS = ("conv_general_dilated", "dot_general")


def count_operations(jaxpr: Any, transcendental: int = _PER_TRANSCENDENTAL) -> int:
    """The operations of an open jaxpr; a transcendental function counts as a hundred.

    Loops whose number of rounds is not known count once, and of branches the dearest. A size that is a symbol counts
    as 1.

    Args:
        jaxpr: the jaxpr.
        transcendental: what such a function counts as, for each element.
    """
    return sum(_of_equation(equation, transcendental) for equation in jaxpr.eqns)


def count_saved_bytes(jaxpr: Any) -> int:
    """About how many bytes the gradient of an open jaxpr saves: the results of products and of dear functions.

    What else is saved is made from these by functions that cost next to nothing, or is an argument. Loops count as in
    `count_operations`.
    """
    return sum(map(_saved_of, jaxpr.eqns))


def _saved_of(equation: Any) -> int:
    name = equation.primitive.name
    inner = [count_saved_bytes(jaxpr) for jaxpr in jaxprs_within(equation)]
    if name == "scan":
        return int(equation.params["length"]) * sum(inner)
    if inner:
        return sum(inner)
    if name not in TRANSCENDENTAL and name not in _DECOMPOSITIONS and name not in _PRODUCTS:
        return 0
    return sum(_size(var.aval) * var.aval.dtype.itemsize for var in equation.outvars)


def _of_equation(equation: Any, transcendental: int) -> int:
    name, written = equation.primitive.name, sum(_size(var.aval) for var in equation.outvars)
    inner = [count_operations(jaxpr, transcendental) for jaxpr in jaxprs_within(equation)]
    if name == "scan":
        return int(equation.params["length"]) * sum(inner)
    if name == "cond":
        return max(inner, default=0)
    if inner:
        return sum(inner)
    if name == "dot_general":
        (contracted, _), _ = equation.params["dimension_numbers"]
        shape = equation.invars[0].aval.shape
        return 2 * written * _product(shape[axis] for axis in contracted)
    if name == "conv_general_dilated":
        kernel, numbers = equation.invars[1].aval, equation.params["dimension_numbers"]
        return 2 * written * _size(kernel) // max(1, _product([kernel.shape[numbers.rhs_spec[0]]]))
    if name in _DECOMPOSITIONS:
        return _PER_DECOMPOSITION * max(
            (_size(v.aval) * _product(v.aval.shape[-1:]) for v in equation.invars), default=0
        )
    return written * (transcendental if name in TRANSCENDENTAL else 1)


def _size(aval: Any) -> int:
    return _product(getattr(aval, "shape", ()))


def _product(sizes: Any) -> int:
    return math.prod(size if isinstance(size, int) else 1 for size in sizes)
