"""Cases of `test_errors.py` about `lift`."""

import jax
import jax.numpy as jnp
from error_cases import Given, collector
from jax.sharding import AxisType, PartitionSpec
from jaxtyping import Array, Float

from treescan import ArgumentError, ArgumentTypeError, BodyError, CarryError, In, Out, SignatureError, lift
from treescan.carries import keys

CASES: list[Given] = []
case = collector(CASES)
XS = jnp.arange(3.0)
W = {"w": jnp.ones(2)}


def step(variables, rngs, carry, x):
    return (carry, x), {}


def updating(updates, **roles):
    """A lifted function whose steps return these collections, made of (variables, carry, x)."""
    return lift(lambda variables, rngs, carry, x: ((carry, x), updates(variables, carry, x)), **roles)


@case(BodyError, body=False)
def lift_of_no_function(one):
    return lift("step")({}, {}, one, XS)


@case(ArgumentTypeError)
def lift_filter_number(one):
    return lift(step, variable_broadcast=3)({}, {}, one, XS)


@case(ArgumentTypeError)
def lift_filter_of_numbers(one):
    return lift(step, variable_carry=["a", 1])({}, {}, one, XS)


@case(ArgumentTypeError)
def lift_axes_not_a_mapping(one):
    return lift(step, variable_axes="params")({}, {}, one, XS)


@case(ArgumentTypeError)
def lift_axis_none(one):
    return lift(step, variable_axes={"params": None})({}, {}, one, XS)


@case(ArgumentTypeError)
def lift_split_not_a_mapping(one):
    return lift(step, split_rngs="dropout")({}, {}, one, XS)


@case(ArgumentTypeError)
def lift_hook_not_callable(one):
    return lift(step, data_transform=3)({}, {}, one, XS)


@case(ArgumentError)
def lift_collection_without_role(one):
    return lift(step, variable_axes={"params": 0})({"batch_stats": W, "cache": W}, {}, one, XS)


@case(ArgumentError)
def lift_stream_without_role(one):
    return lift(step, split_rngs={"params": False})({}, {"dropout": jax.random.key(0)}, one, XS)


@case(ArgumentTypeError)
def lift_variables_not_a_dict(one):
    return lift(step)([W], {}, one, XS)


@case(ArgumentTypeError)
def lift_called_without_rngs(one):
    return lift(step)({}, one, XS)


@case(BodyError)
def lift_returns_no_updates(one):
    return lift(lambda variables, rngs, carry, x: (carry, x))({}, {}, one, XS)


@case(BodyError)
def lift_returns_collection_without_role(one):
    return updating(lambda variables, carry, x: {"cache": {"k": x}}, variable_broadcast="params")({}, {}, one, XS)


@case(BodyError)
def lift_broadcast_of_x(one):
    def updates(variables, carry, x):
        return {"params": {"scale": x * 2, "fixed": jnp.ones(2), "one": jnp.float32(1)}, "stats": {"mean": carry + 1}}

    return updating(updates, variable_broadcast=True)({}, {}, one, XS)


@case(BodyError)
def lift_broadcast_output(one):
    return lift(step, out_axes=None)({}, {}, one, XS)


@case(BodyError)
def lift_carried_collection_made_inside(one):
    return updating(lambda variables, carry, x: {"stats": {"n": x}}, variable_carry="stats")({}, {}, one, XS)


@case(CarryError)
def lift_carry_changes(one):
    return lift(lambda variables, rngs, carry, x: ((carry[None], x), {}))({}, {}, one, XS)


@case(CarryError)
def lift_carried_collection_changes(one):
    def updates(variables, carry, x):
        return {"stats": {"n": variables["stats"]["n"].astype(jnp.float16)}}

    return updating(updates, variable_carry="stats")({"stats": {"n": jnp.ones(2)}}, {}, one, XS)


@case(ArgumentTypeError)
def lift_of_a_function_that_makes_carries(one):
    return lift(step, variable_carry="rng")({"rng": {"seed": keys}}, {}, one, XS)


@case(CarryError)
def lift_carry_begins_to_vary(one):
    def step(variables, rngs, carry, x):
        return ({"h": carry["h"] + jax.lax.axis_index("devices")}, None), {}

    def sums(xs):
        (carry, _), _ = lift(step)({}, {}, {"h": jnp.int32(0)}, xs)
        return jax.lax.psum(carry["h"], "devices")

    mesh = jax.make_mesh((2,), ("devices",), axis_types=(AxisType.Auto,))
    return jax.shard_map(sums, mesh=mesh, in_specs=(PartitionSpec(),), out_specs=PartitionSpec())(XS)


@case(ArgumentError)
def lift_lengths_differ(one):
    return lift(step, variable_axes={"params": 0})({"params": W}, {}, one, XS)


@case(ArgumentError)
def lift_without_length(one):
    return lift(step)({}, {}, one, None)


@case(ArgumentError)
def lift_all_whole(one):
    return lift(step, in_axes=None)({}, {}, one, XS)


@case(ArgumentError)
def lift_axis_not_there(one):
    return lift(step, in_axes=1)({}, {}, one, XS)


@case(ArgumentError)
def lift_save_with_broadcast_output(one):
    return lift(step, out_axes=None, save="last")({}, {}, one, XS)


@case(ArgumentError)
def lift_axis_of_a_collection_not_there(one):
    return lift(step, variable_axes={"params": 2})({"params": W}, {}, one, XS)


@case(ArgumentError)
def lift_axis_of_an_update_not_there(one):
    return updating(lambda variables, carry, x: {"cache": {"k": x}}, variable_axes={"cache": Out(2)})({}, {}, one, XS)


@case(BodyError)
def lift_broadcast_of_no_array(one):
    return updating(lambda variables, carry, x: {"params": {"kind": "dense"}}, variable_broadcast="params")(
        {}, {}, one, XS
    )


@case(BodyError)
def lift_updates_without_names(one):
    return updating(lambda variables, carry, x: {0: {"k": x}}, variable_axes={True: 0})({}, {}, one, XS)


@case(ArgumentError)
def lift_out_axes_no_prefix(one):
    return lift(lambda variables, rngs, carry, x: ((carry, (x, x)), {}), out_axes=(None, 0, 0))({}, {}, one, XS)


@case(ArgumentError)
def lift_in_axes_no_prefix(one):
    return lift(step, in_axes=(0, 0))({}, {}, one, XS)


@case(BodyError)
def lift_data_transform_returns_one(one):
    return lift(step, data_transform=lambda variables, rngs: variables)({}, {}, one, XS)


@case(ArgumentTypeError)
def lift_metadata_fn_returns_none(one):
    run = lift(step, variable_axes={"params": 0}, metadata_fn=lambda tree, axis, added: None)
    return run({"params": {"w": jnp.ones((3, 2))}}, {}, one, XS)


@case(BodyError)
def lift_returns_what_is_only_read(one):
    run = lift(lambda variables, rngs, carry, x: ((carry, x), variables), variable_axes={"params": In(0)})
    return run({"params": {"w": jnp.ones((3, 2))}}, {}, one, XS)


@case(ArgumentTypeError)
def lift_seed_for_a_key(one):
    return lift(step, split_rngs={"noise": False})({}, {"noise": 0}, one, XS)


@case(ArgumentTypeError)
def lift_keys_to_split(one):
    keys = jax.random.split(jax.random.key(0), 3)
    return lift(step, split_rngs={"noise": True})({}, {"noise": keys}, one, XS)


@case(SignatureError)
def lift_annotations(one):
    def annotated(
        variables: dict[str, dict[str, Float[Array, "f h"]]], rngs, h: Float[Array, " h"], x: Float[Array, " f"]
    ) -> tuple[tuple[Float[Array, " h"], Float[Array, " f"]], dict[str, dict[str, Float[Array, " h"]]]]:
        h = jnp.tanh(x @ variables["params"]["w"] + h)
        return (h, h), {"stats": {"n": x}}

    run = lift(annotated, variable_broadcast="params", variable_axes={"stats": 0})
    return run({"params": {"w": jnp.ones((3, 4))}}, {}, jnp.ones(4), jnp.ones((5, 3)))
