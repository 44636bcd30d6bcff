"""Proves of a trace that its derivative is finite wherever its inputs are, less overflow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from .dependence import dependent
from .equations import called, jaxprs_within

# fmt: off
_FINITE = frozenset(
    {
        "abs", "add", "add_any", "and", "argmax", "argmin", "atan", "broadcast_in_dim", "ceil", "clamp", "concatenate",
        "conv_general_dilated", "convert_element_type", "copy", "cos", "cumsum", "dot_general", "dynamic_slice",
        "dynamic_update_slice", "eq", "erf", "expand_dims", "floor", "gather", "ge", "gt", "iota", "is_finite", "le",
        "logistic", "lt", "max", "min", "mul", "ne", "neg", "not", "or", "pad", "reduce_and", "reduce_max",
        "reduce_min", "reduce_or", "reduce_sum", "reshape", "rev", "round", "select_n", "sign", "sin", "slice", "split",
        "square", "squeeze", "stop_gradient", "sub", "tanh", "transpose", "xor",
    }
)
# fmt: on
"""Primitives whose results and derivatives are finite for all finite numbers that do not overflow."""

_WIDE = frozenset({"bfloat16", "float32", "float64"})
"""Types of numbers that no step of a model overflows in earnest, as it may in float16."""


def has_finite_derivative(jaxpr: Any, given: Sequence[bool]) -> bool:
    """Whether the outputs of an open jaxpr and their derivatives are finite where the flagged inputs are.

    Args:
        jaxpr: the program.
        given: for each input whether it may be any finite number. The others are what they are.

    Returns:
        True if that is proven. False does not mean that it is not so.
    """
    varying = dependent(jaxpr, given)
    return all(
        _is_finite(equation, varying)
        for equation in jaxpr.eqns
        if not all(hasattr(atom, "val") or atom not in varying for atom in equation.invars)
    )


def _is_finite(equation: Any, varying: set[Any]) -> bool:
    name, atoms = equation.primitive.name, [*equation.invars, *equation.outvars]
    types = [atom.aval.dtype for atom in atoms if hasattr(atom.aval, "dtype")]
    if any(jnp.issubdtype(dtype, jnp.inexact) and dtype.name not in _WIDE for dtype in types):
        return False
    if name == "div":
        divisor = equation.invars[1]
        return hasattr(divisor, "val") or divisor not in varying
    if name == "integer_pow":
        return equation.params["y"] > 0
    if name == "jit":
        inner = called(equation)
        given = [not hasattr(atom, "val") and atom in varying for atom in equation.invars]
        return inner is not None and has_finite_derivative(inner[0], given)
    if name in ("cond", "scan"):
        return all(has_finite_derivative(inner, [True] * len(inner.invars)) for inner in jaxprs_within(equation))
    return name in _FINITE
