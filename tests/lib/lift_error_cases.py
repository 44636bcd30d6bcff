"""Cases of `test_errors.py` about `lift`."""

import jax
import jax.numpy as jnp
from error_cases import XS, case, named
from jaxtyping import Array, Float

from treescan.carries import keys
from treescan.lifting import In, Out, lift

W = {"w": jnp.ones(2)}


def step(variables, rngs, carry, x):
    return (carry, x), {}


def lifted(one, variables=None, **roles):
    return lift(step, **roles)(variables or {}, {}, one, XS)


def updating(one, updates, variables=None, **roles):
    """A lifted function whose steps return these collections, made of (variables, carry, x)."""
    run = lift(lambda variables, rngs, carry, x: ((carry, x), updates(variables, carry, x)), **roles)
    return run(variables or {}, {}, one, XS)


@case()
def lift_metadata_fn_returns_none(one):
    run = lift(step, variable_axes={"params": 0}, metadata_fn=lambda tree, axis, added: None)
    return run({"params": {"w": jnp.ones((3, 2))}}, {}, one, XS)


@case()
def lift_returns_what_is_only_read(one):
    run = lift(lambda variables, rngs, carry, x: ((carry, x), variables), variable_axes={"params": In(0)})
    return run({"params": {"w": jnp.ones((3, 2))}}, {}, one, XS)


@case()
def lift_annotations(one):
    def annotated(
        variables: dict[str, dict[str, Float[Array, "f h"]]], rngs, h: Float[Array, " h"], x: Float[Array, " f"]
    ) -> tuple[tuple[Float[Array, " h"], Float[Array, " f"]], dict[str, dict[str, Float[Array, " h"]]]]:
        h = jnp.tanh(x @ variables["params"]["w"] + h)
        return (h, h), {"stats": {"n": x}}

    run = lift(annotated, variable_broadcast="params", variable_axes={"stats": 0})
    return run({"params": {"w": jnp.ones((3, 4))}}, {}, jnp.ones(4), jnp.ones((5, 3)))


case()(
    lift_of_no_function=lambda one: lift("step")({}, {}, one, XS),
    lift_filter_number=lambda one: lifted(one, variable_broadcast=3),
    lift_filter_of_numbers=lambda one: lifted(one, variable_carry=["a", 1]),
    lift_axes_not_a_mapping=lambda one: lifted(one, variable_axes="params"),
    lift_axis_none=lambda one: lifted(one, variable_axes={"params": None}),
    lift_split_not_a_mapping=lambda one: lifted(one, split_rngs="dropout"),
    lift_hook_not_callable=lambda one: lifted(one, data_transform=3),
    lift_called_without_a_carry=lambda one: lift(step)({}, {}),
    lift_called_by_keyword=lambda one: lift(step)({}, {}, one, x=XS),
    lift_variables_not_a_dict=lambda one: lift(step)([W], {}, one, XS),
    lift_called_without_rngs=lambda one: lift(step)({}, one, XS),
    lift_of_a_function_that_makes_carries=lambda one: lifted(one, {"rng": {"seed": keys}}, variable_carry="rng"),
    lift_seed_for_a_key=lambda one: lift(step, split_rngs={"noise": False})({}, {"noise": 0}, one, XS),
    lift_keys_to_split=lambda one: lift(step, split_rngs={"noise": True})(
        {}, {"noise": jax.random.split(jax.random.key(0), 3)}, one, XS
    ),
    lift_collection_without_role=lambda one: lifted(one, {"batch_stats": W, "cache": W}, variable_axes={"params": 0}),
    lift_stream_without_role=lambda one: lift(step, split_rngs={"params": False})(
        {}, {"dropout": jax.random.key(0)}, one, XS
    ),
    lift_lengths_differ=lambda one: lifted(one, {"params": W}, variable_axes={"params": 0}),
    lift_without_length=lambda one: lift(step)({}, {}, one, None),
    lift_all_whole=lambda one: lifted(one, in_axes=None),
    lift_axis_not_there=lambda one: lifted(one, in_axes=1),
    lift_save_with_broadcast_output=lambda one: lifted(one, out_axes=None, save="last"),
    lift_axis_of_an_update_not_there=lambda one: updating(
        one, lambda variables, carry, x: {"cache": {"k": x}}, variable_axes={"cache": Out(2)}
    ),
    lift_out_axes_no_prefix=lambda one: lift(
        lambda variables, rngs, carry, x: ((carry, (x, x)), {}), out_axes=(None, 0, 0)
    )({}, {}, one, XS),
    lift_in_axes_no_prefix=lambda one: lifted(one, in_axes=(0, 0)),
    lift_returns_no_updates=lambda one: lift(lambda variables, rngs, carry, x: (carry, x))({}, {}, one, XS),
    lift_returns_collection_without_role=lambda one: updating(
        one, lambda variables, carry, x: {"cache": {"k": x}}, variable_broadcast="params"
    ),
    lift_carried_collection_made_inside=lambda one: updating(
        one, lambda variables, carry, x: {"stats": {"n": x}}, variable_carry="stats"
    ),
    lift_broadcast_of_no_array=lambda one: updating(
        one, lambda variables, carry, x: {"params": {"kind": "dense"}}, variable_broadcast="params"
    ),
    lift_updates_without_names=lambda one: updating(
        one, lambda variables, carry, x: {0: {"k": x}}, variable_axes={True: 0}
    ),
    lift_data_transform_returns_one=lambda one: lifted(one, {}, data_transform=lambda variables, rngs: variables),
    lift_broadcast_of_x=lambda one: updating(
        one,
        named(
            "updates",
            lambda variables, carry, x: {
                "params": {"scale": x * 2, "fixed": jnp.ones(2), "one": jnp.float32(1)},
                "stats": {"mean": carry + 1},
            },
        ),
        variable_broadcast=True,
    ),
    lift_carried_collection_changes=lambda one: updating(
        one,
        named("updates", lambda variables, carry, x: {"stats": {"n": variables["stats"]["n"].astype(jnp.float16)}}),
        {"stats": {"n": jnp.ones(2)}},
        variable_carry="stats",
    ),
)
