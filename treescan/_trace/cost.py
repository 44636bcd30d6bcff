"""Estimates of a jaxpr: how many operations it takes, and how many bytes its gradient saves."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from .._avals import bytes_of, elements
from .dependence import dependent
from .equations import PRODUCTS, aval_of, jaxprs_within, variables_of

if TYPE_CHECKING:
    from jax.extend.core import Jaxpr, JaxprEqn, Var

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


def count_operations(jaxpr: Jaxpr, transcendental: int = _PER_TRANSCENDENTAL) -> int:
    """The operations of an open jaxpr; a transcendental function counts as a hundred.

    Loops whose number of rounds is not known count once, and of branches the dearest. A size that is a symbol counts
    as 1.

    Args:
        jaxpr: the jaxpr.
        transcendental: what such a function counts as, for each element.
    """
    total = 0
    for equation in jaxpr.eqns:
        inner = [count_operations(each, transcendental) for each in jaxprs_within(equation)]
        if not inner:
            total += _of_equation(equation, transcendental)
        else:
            total += max(inner) if equation.primitive.name == "cond" else _times(equation) * sum(inner)
    return total


def _of_equation(equation: JaxprEqn, transcendental: int) -> int:
    """The operations of an equation that holds no others."""
    name, written = equation.primitive.name, sum(elements(aval_of(var)) for var in equation.outvars)
    if name == "dot_general":
        (contracted, _), _ = equation.params["dimension_numbers"]
        shape = aval_of(equation.invars[0]).shape
        return 2 * written * _product(shape[axis] for axis in contracted)
    if name == "conv_general_dilated":
        kernel, numbers = aval_of(equation.invars[1]), equation.params["dimension_numbers"]
        return 2 * written * elements(kernel) // max(1, _product([kernel.shape[numbers.rhs_spec[0]]]))
    if name in _DECOMPOSITIONS:
        sizes = (elements(aval_of(v)) * _product(aval_of(v).shape[-1:]) for v in equation.invars)
        return _PER_DECOMPOSITION * max(sizes, default=0)
    return written * (transcendental if name in TRANSCENDENTAL else 1)


_PRODUCTS = PRODUCTS | {"atan2", "conv_general_dilated", "div", "mul", "pow"}
_BY_RESULT = TRANSCENDENTAL - {"atan2", "pow"} | {"integer_pow", "rsqrt", "sqrt", "square"}


def count_saved_bytes(jaxpr: Jaxpr, varying: Sequence[bool]) -> int:
    """About how many bytes of each step the gradient of a loop saves.

    These are the operands of products, and the results of functions whose derivative is made of them. Loops count as in
    `count_operations`.

    Args:
        jaxpr: the step, open.
        varying: for each of its inputs whether steps differ in it. What is the same in all is not saved.
    """
    found, total = dependent(jaxpr, varying), 0
    saved = set["Var"]()
    for equation in jaxpr.eqns:
        name, given = equation.primitive.name, [var for var in variables_of(equation.invars) if var in found]
        inner = jaxprs_within(equation)
        if inner and given:
            flags = [not hasattr(atom, "val") and atom in found for atom in equation.invars]
            whole = [flags if len(flags) == len(each.invars) else [True] * len(each.invars) for each in inner]
            counts = list(map(count_saved_bytes, inner, whole))
            total += max(counts) if name == "cond" else sum(counts) * _times(equation)
        elif given and (name in _BY_RESULT or name in _DECOMPOSITIONS):
            saved.update(equation.outvars)
        elif name in _PRODUCTS:
            saved.update(given if len(given) > 1 or name in PRODUCTS else [])
    return total + sum([bytes_of(aval_of(var)) for var in saved if jnp.issubdtype(aval_of(var).dtype, jnp.inexact)])


def _times(equation: JaxprEqn) -> int:
    """How often a loop runs its step; 1 if that is a symbol, or if it is no loop of a known length."""
    length = equation.params.get("length")
    return length if isinstance(length, int) else 1


def _product(sizes: Iterable[Any]) -> int:
    return math.prod(size for size in sizes if isinstance(size, int))
