"""Cases of `test_errors.py` about memory and outputs: `remat`, `save`, `truncate`, and `plan_remat`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from error_cases import case, exported, named, with_ref
from jax.experimental import io_callback

from treescan import Remat, fold, fori, mask_scan, plan_remat, scan, scan_layers

XS = jnp.arange(8.0)
LENGTHS = np.array([3])

AT = jnp.array([1, 3])  # made here, so that no mode of the cases traces it


def step(carry, x):
    return carry + x, {"y": x, "count": 1}


def local(layer, x):
    return x + layer, x


def rows(one: Any, **options: Any) -> Any:
    def step(carry, x):
        return carry + x, {"y": x, "sum": carry + x}

    return mask_scan(step, one[None], XS[:, None], lengths=LENGTHS, **options)


def step_that_calls_out(carry, x):
    io_callback(lambda: None, None)
    return carry + x, x


@case(less=("disable_jit",))
def remat_budget_of_a_pattern_too_small(one):
    def block(layer, x):
        return jnp.sin(x) * layer, None

    return scan_layers([block, block], one * jnp.ones(256), [XS, XS], remat=Remat.fit(2000))


@jax.custom_vjp
def product(x, y):
    return x * y


def forward(x, y):
    raise NotImplementedError("no residuals are known")


product.defvjp(forward, lambda residuals, g: (g, g), symbolic_zeros=False)


def step_with_a_rule_in_a_branch(carry, x):
    rule = jax.custom_vjp(lambda x, y: x * y)
    rule.defvjp(lambda x, y: (x.value * y.value, None), lambda residuals, g: (g, g), symbolic_zeros=True)
    return jax.lax.cond(x > 0, rule, lambda x, y: x, carry, x), None


case()(
    # remat
    remat_class=lambda one: scan(step, one, XS, remat=Remat),
    remat_levels_zero=lambda one: scan(step, one, XS, remat=Remat(levels=0)),
    remat_levels_float=lambda one: scan(step, one, XS, remat=Remat(levels=2.0)),
    remat_segment=lambda one: Remat(segment=2),
    remat_chunk_of_one_step=lambda one: scan(step, one, XS, remat=Remat(chunk=1)),
    remat_chunk_in_one_level=lambda one: scan(step, one, XS, remat=Remat(levels=1, chunk=4)),
    remat_budget_zero=lambda one: Remat.fit(0),
    remat_budget_as_text=lambda one: Remat.fit("2GB"),
    remat_budget_and_levels=lambda one: scan(step, one, XS, remat=Remat(budget=100, levels=2)),
    remat_budget_of_a_masked_scan=lambda one: rows(one, remat=Remat.fit(2000)),
    plan_remat_of_layers_with_length=lambda one: plan_remat(local, one, layers=XS, length=8, remat=None),
    plan_remat_of_layers_with_a_plan_each=lambda one: plan_remat(
        [local, local], one, layers=[XS, XS], remat=("step", None)
    ),
    plan_remat_with_args_of_no_layers=lambda one: plan_remat(step, one, XS, args=(one,), remat=None),
    plan_of_states_without_layers=lambda one: plan_remat(step, one, XS, state=one, remat=None),
    remat_policy_unknown=lambda one: scan(step, one, XS, remat=Remat("dots")),
    remat_policy_that_takes_names=lambda one: scan(step, one, XS, remat=Remat("save_only_these_names")),
    remat_offload_unknown=lambda one: scan(step, one, XS, remat=Remat(offload="host")),
    remat_offload_of_a_masked_scan=lambda one: rows(one, remat=Remat(offload="pinned_host")),
    layers_remat_levels_zero=lambda one: scan_layers(local, one, XS, remat=Remat(levels=0)),
    pattern_remat_levels_for_a_block=lambda one: scan_layers(
        [local, local], one, [XS, XS], remat=["step", Remat(levels=2)]
    ),
    plan_remat_that_does_not_fit=lambda one: plan_remat(
        lambda c, x: (jnp.sin(c) * x, None), one * jnp.ones(256), XS, remat=Remat.fit(10)
    ),
    plan_remat_of_a_body_without_a_gradient=lambda one: plan_remat(
        lambda c, x: (product(c, x), None), one, XS, remat="nested"
    ),
    remat_budget_of_a_rule_with_symbolic_zeros=lambda one: scan(
        step_with_a_rule_in_a_branch, one, XS, remat=Remat.fit(2**20)
    ),
    plan_remat_with_save=lambda one: plan_remat(step, one, XS, remat="step", save="last"),  # type: ignore[call-arg]
    plan_remat_unknown=lambda one: plan_remat(step, one, XS, remat="all"),
    # save
    save_unknown=lambda one: scan(step, one, XS, save="first"),
    save_zero=lambda one: scan(step, one, XS, save=0),
    save_true=lambda one: scan(step, one, XS, save={"y": True, "count": "all"}),
    save_positions_in_a_list=lambda one: scan(step, one, XS, save=[1, 3]),
    save_positions_descending=lambda one: scan(step, one, XS, save=range(7, 0, -2)),
    save_positions_twice=lambda one: scan(step, one, XS, save={"y": np.array([1, 3, 3]), "count": "all"}),
    save_positions_negative=lambda one: scan(step, one, XS, save=np.array([-1])),
    save_positions_of_floats=lambda one: scan(step, one, XS, save=np.array([1.0, 3.0])),
    save_positions_of_two_axes=lambda one: scan(step, one, XS, save=np.array([[1, 3]])),
    save_positions_out_of_range=lambda one: scan(step, one, XS, save=np.array([1, 8])),
    save_positions_out_of_range_of_rows=lambda one: rows(one, save=range(7, 9)),
    save_positions_in_an_array_of_jax=lambda one: scan(step, one, XS, save=AT),
    save_is_no_prefix_of_rows=lambda one: rows(one, save=(2, "last")),
    pattern_with_save_of_another_length=lambda one: scan_layers([local, local], one, [XS, XS], save=["last"]),
    # truncate
    # offset
    offset_negative=lambda one: scan(step, one, XS, offset=-1),
    offset_float=lambda one: scan(step, one, XS, offset=1.5),
    offset_true=lambda one: scan(step, one, XS, offset=True),
    offset_of_rows=lambda one: scan(step, one, XS, offset=np.array([0, 3])),
    offset_too_far=lambda one: scan(step, one, XS, offset=2**31 - 1),
    offset_in_fori=lambda one: fori(0, 3, lambda i, h: h, one, offset=3),
    save_with_an_offset_between=lambda one: scan(step, one, XS, save=2, offset=3),
    save_with_an_offset_between_rounds=lambda one: scan_layers([local, local], one, [XS, XS], save=2, offset=2),
    save_positions_with_an_offset=lambda one: scan(step, one, XS, save=np.array([1, 2]), offset=3),
    truncate_with_an_offset_in_reverse=lambda one: scan(step, one, XS, truncate=2, offset=3, reverse=True),
    truncate_zero=lambda one: scan(step, one, XS, truncate=0),
    truncate_true=lambda one: scan(step, one, XS, truncate=True),
    truncate_in_layers=lambda one: scan_layers(local, one, XS, truncate=2),
    remat_policy_number=lambda one: scan(step, one, XS, remat=Remat(2)),
)

case(less=("disable_jit",))(
    remat_budget_of_symbolic_rows=lambda one: exported(
        lambda xs: fold(lambda c, x: c + x, one * jnp.zeros(xs.shape[1]), xs, remat=Remat.fit(2**20)), "8, b"
    ),
    save_positions_of_symbolic_steps=lambda one: exported(
        lambda xs: scan(step, one, xs, save=np.array([0, 2]))[0], "t"
    ),
    save_of_symbolic_steps=lambda one: exported(lambda xs: scan(step, one, xs, save=2)[0], "t"),
    remat_over_a_callback=lambda one: scan(step_that_calls_out, one, XS, remat="nested"),
    remat_budget_too_small=lambda one: scan(
        named("big", lambda carry, x: (jnp.sin(carry) * x, None)), one * jnp.ones(256), XS, remat=Remat.fit(2000)
    ),
)

case(less=("disable_jit", "vmap"))(
    save_over_a_ref=lambda one: with_ref(
        lambda ref: scan(named("step", lambda carry, x: (carry + ref[...], x)), one, XS, save=2)
    )
)
