"""Cases of `test_errors.py` about memory and outputs: `remat`, `save`, `truncate`, and `plan_remat`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from error_cases import Given, collector
from jax.experimental import io_callback

from treescan import ArgumentError, ArgumentTypeError, Remat, fold, mask_scan, plan_remat, scan, scan_layers

CASES: list[Given] = []
case = collector(CASES)

XS = jnp.arange(8.0)
LENGTHS = np.array([3])


def step(carry, x):
    return carry + x, {"y": x, "count": 1}


def local(layer, x):
    return x + layer, x


def rows(one: Any, **options: Any) -> Any:
    def step(carry, x):
        return carry + x, {"y": x, "sum": carry + x}

    return mask_scan(step, one[None], XS[:, None], lengths=LENGTHS, **options)


def step_of_a_ref() -> Any:
    ref = (jax.new_ref if hasattr(jax, "new_ref") else jax.array_ref)(jnp.ones(()))

    def step(carry, x):
        return carry + ref[...], x

    return step


# --- remat ------------------------------------------------------------------------------------------------------------


@case(ArgumentError)
def remat_true(one):
    return scan(step, one, XS, remat=True)


@case(ArgumentError)
def remat_class(one):
    return scan(step, one, XS, remat=Remat)


def step_that_calls_out(carry, x):
    io_callback(lambda: None, None)
    return carry + x, x


@case(ArgumentError, less=("disable_jit",))
def remat_over_a_callback(one):
    return scan(step_that_calls_out, one, XS, remat="nested")


def save_nothing(prim, *args, **params):
    return False


@case(ArgumentError)
def remat_policy_alone(one):
    return scan(step, one, XS, remat=save_nothing)


@case(ArgumentError)
def remat_levels_zero(one):
    return scan(step, one, XS, remat=Remat(levels=0))


@case(ArgumentError)
def remat_levels_float(one):
    return scan(step, one, XS, remat=Remat(levels=2.0))


@case(ArgumentError)
def remat_segment_of_one_step(one):
    return scan(step, one, XS, remat=Remat(segment=1))


@case(ArgumentError)
def remat_segment_in_one_level(one):
    return scan(step, one, XS, remat=Remat(levels=1, segment=4))


@case(ArgumentError)
def remat_budget_zero(one):
    return scan(step, one, XS, remat=Remat.fit(0))


@case(ArgumentError)
def remat_budget_as_text(one):
    return scan(step, one, XS, remat=Remat.fit("1GB"))


@case(ArgumentError)
def remat_budget_and_levels(one):
    return scan(step, one, XS, remat=Remat(budget=100, levels=2))


@case(ArgumentError, less=("disable_jit",))
def remat_budget_too_small(one):
    def big(carry, x):
        return jnp.sin(carry) * x, None

    return scan(big, one * jnp.ones(256), XS, remat=Remat.fit(2000))


@case(ArgumentError)
def remat_budget_of_a_masked_scan(one):
    return rows(one, remat=Remat.fit(2000))


@case(ArgumentError, less=("disable_jit",))
def remat_budget_of_a_pattern_too_small(one):
    def block(layer, x):
        return jnp.sin(x) * layer, None

    return scan_layers([block, block], one * jnp.ones(256), [XS, XS], remat=Remat.fit(2000))


@case(ArgumentError)
def plan_remat_of_layers_with_length(one):
    return plan_remat(local, one, layers=XS, length=8, remat=None)


@case(ArgumentError)
def plan_remat_of_layers_with_a_plan_each(one):
    return plan_remat([local, local], one, layers=[XS, XS], remat=("step", None))


@case(ArgumentError)
def plan_remat_with_args_of_no_layers(one):
    return plan_remat(step, one, XS, args=(one,), remat=None)


@case(ArgumentError)
def plan_of_states_without_layers(one):
    return plan_remat(step, one, XS, state=one, remat=None)


@case(ArgumentError)
def remat_policy_unknown(one):
    return scan(step, one, XS, remat=Remat("dots"))


@case(ArgumentError)
def remat_policy_that_takes_names(one):
    return scan(step, one, XS, remat=Remat("save_only_these_names"))


@case(ArgumentTypeError)
def remat_policy_number(one):
    return scan(step, one, XS, remat=Remat(2))


@case(ArgumentError)
def remat_offload_unknown(one):
    return scan(step, one, XS, remat=Remat(offload="host"))


@case(ArgumentError)
def remat_offload_of_a_masked_scan(one):
    return rows(one, remat=Remat(offload="pinned_host"))


@case(ArgumentError)
def fold_remat_levels_zero(one):
    return fold(lambda carry, x: carry + x, one, XS, remat=Remat(levels=0))


@case(ArgumentError)
def layers_remat_levels_zero(one):
    return scan_layers(local, one, XS, remat=Remat(levels=0))


@case(ArgumentError)
def pattern_remat_levels_for_a_block(one):
    return scan_layers([local, local], one, [XS, XS], remat=["step", Remat(levels=2)])


@case(ArgumentError)
def plan_remat_that_does_not_fit(one):
    return plan_remat(lambda c, x: (jnp.sin(c) * x, None), one * jnp.ones(256), XS, remat=Remat.fit(10))


@jax.custom_vjp
def product(x, y):
    return x * y


def forward(x, y):
    raise NotImplementedError("no residuals are known")


product.defvjp(forward, lambda residuals, g: (g, g), symbolic_zeros=False)


@case(ArgumentError)
def plan_remat_of_a_body_without_a_gradient(one):
    return plan_remat(lambda c, x: (product(c, x), None), one, XS, remat="nested")


def step_with_a_rule_in_a_branch(carry, x):
    rule = jax.custom_vjp(lambda x, y: x * y)
    rule.defvjp(lambda x, y: (x.value * y.value, None), lambda residuals, g: (g, g), symbolic_zeros=True)
    return jax.lax.cond(x > 0, rule, lambda x, y: x, carry, x), None


@case(ArgumentError)
def remat_budget_of_a_rule_with_symbolic_zeros(one):
    return scan(step_with_a_rule_in_a_branch, one, XS, remat=Remat.fit(2**20))


@case(ArgumentError, less=("disable_jit",))
def remat_budget_of_symbolic_rows(one):
    rows = jax.ShapeDtypeStruct((8, jax.export.symbolic_shape("b")[0]), jnp.float32)
    run = jax.jit(lambda xs: fold(lambda c, x: c + x, one * jnp.zeros(xs.shape[1]), xs, remat=Remat.fit(2**20)))
    return jax.export.export(run)(rows)


@case(ArgumentError)
def plan_remat_unknown(one):
    return plan_remat(step, one, XS, remat="all")


# --- save -------------------------------------------------------------------------------------------------------------


@case(ArgumentError)
def save_unknown(one):
    return scan(step, one, XS, save="first")


@case(ArgumentError)
def save_zero(one):
    return scan(step, one, XS, save=0)


@case(ArgumentError)
def save_true(one):
    return scan(step, one, XS, save={"y": True, "count": "all"})


@case(ArgumentError)
def save_float(one):
    return scan(step, one, XS, save=2.0)


@case(ArgumentError)
def save_positions(one):
    return scan(step, one, XS, save=np.array([1, 3]))


@case(ArgumentError)
def save_is_no_prefix(one):
    return scan(step, one, XS, save={"y": 2})


@case(ArgumentError)
def save_is_no_prefix_of_rows(one):
    return rows(one, save=(2, "last"))


@case(ArgumentError)
def save_in_fold(one):
    return fold(lambda carry, x: carry + x, one, XS, save="last")


@case(ArgumentError)
def layers_save_is_no_prefix(one):
    return scan_layers(local, one, XS, save=[1, "last"])


@case(ArgumentError)
def pattern_with_save_of_another_length(one):
    return scan_layers([local, local], one, [XS, XS], save=["last"])


@case(ArgumentError, less=("disable_jit", "vmap"))
def save_over_a_ref(one):
    return scan(step_of_a_ref(), one, XS, save=2)


@case(ArgumentError, less=("disable_jit",))
def save_of_symbolic_steps(one):
    steps = jax.ShapeDtypeStruct((jax.export.symbolic_shape("t")[0],), jnp.float32)
    return jax.export.export(jax.jit(lambda xs: scan(step, one, xs, save=2)[0]))(steps)


# --- truncate ---------------------------------------------------------------------------------------------------------


@case(ArgumentError)
def truncate_zero(one):
    return scan(step, one, XS, truncate=0)


@case(ArgumentError)
def truncate_true(one):
    return scan(step, one, XS, truncate=True)


@case(ArgumentError)
def truncate_float(one):
    return rows(one, truncate=8.0)


@case(ArgumentTypeError)
def truncate_in_layers(one):
    return scan_layers(local, one, XS, truncate=2)
