"""Cases of `test_errors.py` about `describe`."""

import sys
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from error_cases import Given, collector

from treescan import ArgumentError, CarryError, describe, fold, fori, mask_scan, plan_remat, scan

CASES: list[Given] = []
case = collector(CASES)

XS = jnp.arange(4.0)


def step(carry, x):
    return carry + x, x


@case(ArgumentError, body=False)
def describe_of_no_verb(one: Any) -> Any:
    return describe(plan_remat, step, one, XS)


@case(ArgumentError, body=False)
def describe_of_a_body(one: Any) -> Any:
    return describe(step, one, XS)


@case(ArgumentError)
def describe_of_no_steps(one: Any) -> Any:
    return describe(scan, step, one, XS[:0])


@case(ArgumentError)
def describe_of_symbolic_steps(one: Any) -> Any:
    (steps,) = jax.export.symbolic_shape("t")
    return describe(scan, step, one, jax.ShapeDtypeStruct((steps,), jnp.float32))


@case(ArgumentError)
def describe_of_a_call_that_is_refused(one: Any) -> Any:
    return describe(mask_scan, step, one, XS)


@case(CarryError)
def describe_of_a_body_whose_carry_changes(one: Any) -> Any:
    return describe(fold, lambda carry, x: jnp.stack([carry, x]), jnp.float32(1) * one, XS)


@case(ArgumentError, body=False)
def describe_plot_without_a_gradient(one: Any) -> Any:
    return describe(fori, 0, 20, lambda i, total: total + i, 0).plot()


@case(ArgumentError, body=False)
def describe_plot_without_matplotlib(one: Any) -> Any:
    with mock.patch.dict(sys.modules, {"matplotlib.pyplot": None}):
        return describe(scan, step, one, jnp.ones(20)).plot()
