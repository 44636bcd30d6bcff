"""Error cases of `pipeline`; see `error_cases.py`. Devices have one layer each, a matrix of ones."""

from typing import Any

import jax
import jax.numpy as jnp
from error_cases import case
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import treescan
from treescan import from_stages, pipeline, to_stages

HOLDS, WHOLE = P("stage"), P()
XS, STACK = jnp.ones((4, 2, 3)), {"w": jnp.ones((4, 3, 3))}


def stage(params, x, first_layer):
    return treescan.fold_layers(lambda layer, x: x @ layer["w"], x, params)


def call(
    one: Any,
    stage: Any = stage,
    xs: Any = XS,
    stack: Any = STACK,
    split: Any = HOLDS,
    of_xs: Any = WHOLE,
    on: Any = None,
    kind: Any = AxisType.Auto,
    **options: Any,
) -> Any:
    """A pipeline on two devices, each of which has another half of the stack."""
    mesh = jax.make_mesh((2, 2), ("data", "stage"), axis_types=(kind, kind))
    xs = jax.tree.map(lambda x: x * one.astype(x.dtype), xs)
    options = {"axis_name": "stage", **options}

    def run(stack: Any, xs: Any, one: Any) -> Any:
        own = stage(one) if getattr(stage, "__name__", "") == "of_one" else stage
        return pipeline(own, stack, xs, **options)

    axes = {} if on is None else {"axis_names": on}
    over = jax.shard_map(run, mesh=mesh, in_specs=(split, of_xs, P()), out_specs=P(), check_vma=on is None, **axes)
    return (jax.jit(over)(stack, xs, one),)


def narrow(params, x, first_layer):
    return stage(params, x, first_layer).astype(jnp.bfloat16)


def wider(params, x, first_layer):
    return {**x, "h": jnp.concatenate([x["h"], x["h"]], axis=-1)}


def averaged(params, x, first_layer):
    return x - jax.lax.pmean(stage(params, x, first_layer), "stage")


def shifted(params, x, first_layer):
    return x + jax.lax.ppermute(stage(params, x, first_layer), "data", [(0, 1), (1, 0)])


def recurrent(params, x, first_layer):
    return treescan.linear_scan(x[..., :1], x, axis_name="data")


def keyed(params, x, first_layer, *, key):
    return x


def of_four(params, x, first_layer, table):
    return x


def of_one(scale):
    def scaled(params, x, first_layer):
        return scale * stage(params, x, first_layer)

    return scaled


def masked(params, x, first_layer):
    steps = jnp.stack([x["h"] @ params["w"][0]] * 3)
    h, _ = treescan.mask_scan(lambda h, x: (h + x, None), x["h"], steps, lengths=x["lengths"])
    return {**x, "h": h}


def of_two(params, x):
    return stage(params, x, 0)


PAIR = {"h": XS, "lengths": jnp.ones((4, 2), jnp.int32)}

case()(
    pipeline_outside=lambda one: pipeline(stage, STACK, XS * one, axis_name="stage"),
    pipeline_axis_none=lambda one: pipeline(stage, STACK, XS * one, axis_name=None),
    pipeline_without_axis=lambda one: pipeline(stage, STACK, XS * one),
    pipeline_stages_text=lambda one: to_stages(jax.tree.map(lambda w: w * one, STACK), "4"),
    pipeline_stages_zero=lambda one: from_stages(jax.tree.map(lambda w: w * one, STACK), 0),
    pipeline_layers_left_over=lambda one: to_stages(jax.tree.map(lambda w: w * one, STACK), 2, rounds=3),
)
case(devices=True)(
    pipeline_other_axis=lambda one: call(one, axis_name="model"),
    pipeline_rounds_zero=lambda one: call(one, rounds=0),
    pipeline_rounds_of_layers=lambda one: call(one, rounds=3, stack={"w": jnp.ones((4, 3, 3)), "b": jnp.ones((4, 3))}),
    pipeline_micro_batches_left_over=lambda one: call(one, xs=XS[:3], rounds=2),
    pipeline_no_micro_batches=lambda one: call(one, xs={"h": XS[:0]}),
    pipeline_scalar_in_xs=lambda one: call(one, xs={"h": XS, "scale": jnp.ones(())}),
    pipeline_sizes_of_xs=lambda one: call(one, xs={"h": XS, "mask": jnp.ones(3)}),
    pipeline_of_the_same_layers=lambda one: call(one, split=P()),
    pipeline_of_other_micro_batches=lambda one: call(one, xs={"h": XS}, of_xs=P("stage")),
    pipeline_of_no_layers=lambda one: call(one, stack={}),
    pipeline_x_dtype=lambda one: call(one, narrow),
    pipeline_x_shape=lambda one: call(one, wider, PAIR),
    pipeline_x_pair=lambda one: call(one, lambda params, x, first_layer: (x, None)),
    pipeline_over_its_axis=lambda one: call(one, averaged),
    pipeline_that_shifts=lambda one: call(one, shifted),
    pipeline_in_a_linear_scan=lambda one: call(one, recurrent),
    pipeline_masked=lambda one: call(one, masked, PAIR),
    pipeline_closes_over=lambda one: call(one, of_one),
    pipeline_args_list=lambda one: call(one, args=[1.0]),
    pipeline_stage_of_two=lambda one: call(one, of_two),
    pipeline_stage_of_four=lambda one: call(one, of_four),
    pipeline_needs_a_key=lambda one: call(one, keyed),
    pipeline_not_callable=lambda one: call(one, STACK),
    pipeline_remat=lambda one: call(one, remat="step"),
    pipeline_with_a_key=lambda one: call(one, key=jax.random.key(0)),
)


@case(devices=True, less=("disable_jit",))
def pipeline_axis_not_manual(one):
    return call(one, on={"data"}, split=P())


@case(devices=True, less=("disable_jit", "vmap"))
def pipeline_micro_batches_split(one):
    mesh = jax.make_mesh((2, 2), ("data", "stage"), axis_types=(AxisType.Explicit,) * 2)
    xs = jax.device_put(XS, NamedSharding(mesh, P("data")))
    stack = jax.device_put(STACK, NamedSharding(mesh, HOLDS))
    return call(one, xs=xs, stack=stack, on={"stage"}, kind=AxisType.Explicit)
