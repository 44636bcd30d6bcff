"""Cases of `test_errors.py` about `describe` and `measure_remat`."""

import dataclasses
import sys
from unittest import mock

import jax
import jax.numpy as jnp
from error_cases import case, without_body

from treescan import (
    ArgumentError,
    ArgumentTypeError,
    CarryError,
    Progress,
    describe,
    fold,
    fori,
    mask_scan,
    measure_remat,
    plan_remat,
    scan,
)

XS = jnp.arange(4.0)


def step(carry, x):
    return carry + x, x


@case(ArgumentError)
def describe_of_symbolic_steps(one):
    (steps,) = jax.export.symbolic_shape("t")
    return describe(scan, step, one, jax.ShapeDtypeStruct((steps,), jnp.float32))


@without_body(ArgumentError)
def describe_plot_without_matplotlib(one):
    with mock.patch.dict(sys.modules, {"matplotlib.pyplot": None}):
        return describe(scan, step, one, jnp.ones(20)).plot()


@without_body(ArgumentError)
def measure_within_where_memory_is_unknown(one):
    measured = measure_remat(scan, step, 1.0, XS, plans=[None], progress=False)
    plans = tuple(dataclasses.replace(plan, bytes=None) for plan in measured.plans)
    return dataclasses.replace(measured, plans=plans).within(100)


without_body(ArgumentError)(
    describe_of_no_verb=lambda one: describe(plan_remat, step, one, XS),
    describe_plot_without_a_gradient=lambda one: describe(fori, 0, 20, lambda i, total: total + i, 0).plot(),
)

case(ArgumentError)(
    describe_of_no_steps=lambda one: describe(scan, step, one, XS[:0]),
    describe_of_a_call_that_is_refused=lambda one: describe(mask_scan, step, one, XS),
)

case(CarryError)(
    describe_of_a_body_whose_carry_changes=lambda one: describe(
        fold, lambda carry, x: jnp.stack([carry, x]), jnp.float32(1) * one, XS
    )
)


@without_body(ArgumentError)
def measure_plot_without_matplotlib(one):
    with mock.patch.dict(sys.modules, {"matplotlib.pyplot": None}):
        return measure_remat(scan, step, 1.0, XS, plans=[None], progress=False).plot()


without_body(ArgumentError)(
    measure_best_of_none=lambda one: measure_remat(scan, step, 0, jnp.arange(4), progress=False).best,
    measure_of_no_verb=lambda one: measure_remat(plan_remat, step, 1.0, XS),
    measure_of_types=lambda one: measure_remat(
        scan, step, 1.0, jax.ShapeDtypeStruct((4,), jnp.float32), progress=False
    ),
    measure_of_traced_constants=lambda one: jax.eval_shape(
        lambda w: measure_remat(scan, lambda c, x: (c * w, x), 1.0, XS, progress=False), 2.0
    ),
    measure_with_details=lambda one: measure_remat(scan, step, 1.0, XS, progress=Progress(updates=3, backward=True)),
    measure_with_remat=lambda one: measure_remat(scan, step, 1.0, XS, remat="step"),
    measure_within_too_little=lambda one: measure_remat(scan, step, 1.0, XS, plans=[None], progress=False).within(-1),
)

without_body(ArgumentTypeError)(
    measure_plans_of_one=lambda one: measure_remat(scan, step, 1.0, XS, plans="step"),
    measure_for_no_time=lambda one: measure_remat(scan, step, 1.0, XS, seconds=0),
    measure_within_a_text=lambda one: measure_remat(scan, step, 1.0, XS, plans=[None], progress=False).within("1 GB"),
)
