"""Evaluates equations of a step, and single products, for many steps at once."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
from jax.core import eval_jaxpr

from ..._trace.equations import PRODUCTS, alone, values_of
from ..._trace.smooth import Unproven
from ..._types import Array
from ..written import has_one_device, written


def compute_early(program: Any, reads: list[Any], fed: list[Any]) -> list[Array]:
    """What an open jaxpr computes of each step, for all of them: `[C, ...]`.

    Args:
        program: (reads, feed) to a list of values in which steps differ.
        reads: what is the same in every step.
        fed: what each step is fed, `[C, ...]`.

    Raises:
        Unproven: if a result is not a stack of what a step computes.
    """
    values = dict(zip(program.invars, [*reads, *fed], strict=True))
    stacked = set(program.invars[len(reads) :])
    for equation in program.eqns:
        taken, one = alone(program, equation)
        differ = [not hasattr(atom, "val") and atom in stacked for atom in equation.invars]
        if not any(differ):
            out = eval_jaxpr(one, [], *(values[var] for var in taken))
        elif equation.primitive.name in PRODUCTS and not all(differ):
            operand = differ.index(False)
            operands = values_of(equation.invars, values)
            out = [product_of_steps(equation, operands[1 - operand], operands[operand], operand)]
        else:
            out = _of_each_step(one, [values[var] for var in taken], [0 if var in stacked else None for var in taken])
        if any(differ):
            stacked.update(equation.outvars)
        values.update(zip(equation.outvars, out, strict=True))
    computed = values_of(program.outvars, values)
    for value, var in zip(computed, program.outvars, strict=True):
        if value.shape[1:] != var.aval.shape or value.dtype != var.aval.dtype:
            raise Unproven(f"{value.shape} {value.dtype} is computed for steps of {var.aval}")
    return computed


def _of_each_step(one: Any, values: list[Any], axes: list[int | None]) -> list[Array]:
    """What an equation gives for each step: mapped by JAX, whose rule for it may fail.

    That of `clamp` does in JAX 0.10 where a bound of rank 0 is mapped, and its operand is not.
    """
    evaluate: Callable[..., list[Any]] = functools.partial(eval_jaxpr, one, [])
    try:
        return jax.vmap(evaluate, axes)(*values)
    except Exception as error:
        raise Unproven(f"{one.eqns[0].primitive.name} cannot be mapped") from error


def product_of_steps(equation: Any, stacked: Array, same: Array, operand: int) -> Array:
    """The products of all steps, `[C, ...]`.

    Args:
        equation: of one of them.
        stacked: the operand in which steps differ, `[C, ...]`.
        same: the other.
        operand: the place of that other.
    """
    if equation.primitive.name != "dot_general" or equation.params["dimension_numbers"][1][0]:

        def multiply(one: Array) -> Array:
            pair = (same, one) if operand == 0 else (one, same)
            return equation.primitive.bind(*pair, **equation.params)

        return jax.vmap(multiply)(stacked)
    contracted, _ = equation.params["dimension_numbers"]
    mine, its = contracted[1 - operand], contracted[operand]
    free = [axis for axis in range(stacked.ndim - 1) if axis not in mine]
    ordered = stacked.transpose(0, *(axis + 1 for axis in (*free, *mine)))
    outer, inner = ordered.shape[: 1 + len(free)], ordered.shape[1 + len(free) :]
    if has_one_device():
        # As one matrix: with several axes to add up over, XLA's CPU backend copies what the transposed product reads.
        ordered = ordered.reshape(math.prod(outer), *inner)
    product = jax.lax.dot_general(
        ordered,
        same,
        ((tuple(range(ordered.ndim - len(inner), ordered.ndim)), its), ((), ())),
        precision=equation.params["precision"],
        preferred_element_type=equation.params["preferred_element_type"],
    )
    product = product.reshape(*outer, *product.shape[ordered.ndim - len(inner) :])
    if operand == 1:
        return product
    return product.transpose(0, *range(len(outer), product.ndim), *range(1, len(outer)))


def entry_of(stack: Array, place: Array) -> Array:
    """One step's entry of a stack, `[C, ...]`."""
    return written(jax.lax.dynamic_index_in_dim(stack, place, keepdims=False))
