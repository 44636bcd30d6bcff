"""Cases of `test_errors.py` about stacks of layers, and about blocks that run over them."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from error_cases import Given, collector
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from treescan import (
    ArgumentError,
    ArgumentTypeError,
    BodyError,
    CarryError,
    LayerError,
    SignatureError,
    TreescanError,
    fold_layers,
    init_layers,
    layer_at,
    layers_from_state_dict,
    layers_to_state_dict,
    scan_layers,
    set_layer,
    stack,
    unstack,
)
from treescan.carries import keys

CASES: list[Given] = []
case = collector(CASES)


def without_body(error: type[TreescanError], **options: Any) -> Any:
    return case(error, body=False, **options)


class Dense(NamedTuple):
    w: Any
    b: Any


@functools.partial(jax.tree_util.register_dataclass, data_fields=["w"], meta_fields=["heads"])
@dataclasses.dataclass(frozen=True)
class Attention:
    w: Any
    heads: int


def dense(one: Any, width: int = 4) -> Any:
    """The parameters of one layer, of which the biases lead with another size than the weights."""
    return {"w": one * jnp.ones((3, width)), "b": jnp.zeros(width)}


def denses(one: Any, n: int = 4) -> Any:
    """A stack of layers."""
    return {"w": one * jnp.ones((n, 3, 3)), "b": jnp.zeros((n, 3))}


def block(layer, x):
    return x @ layer["w"] + layer["b"], None


def block_alone(layer, x):
    return x @ layer["w"] + layer["b"]


def local(layer, x):
    return x @ layer["w"] + layer["b"], None


def with_cache(layer, x, cache):
    return x + cache, None


X = jnp.arange(3.0)
KEY = jax.random.key(0)  # made here, as whatever `jax.random` makes is traced where a case is


def on_mesh() -> contextlib.AbstractContextManager[Any]:
    return jax.set_mesh(jax.make_mesh((2,), ("rows",), axis_types=(AxisType.Explicit,)))


def two_devices() -> Any:
    return jax.make_mesh((2,), ("rows",), axis_types=(AxisType.Auto,))


def split(array: Any, *spec: str | None) -> Any:
    """An array that lies on two devices, by axes that are not a part of its type."""
    return jax.device_put(array, NamedSharding(two_devices(), PartitionSpec(*spec)))


# --- stacks -----------------------------------------------------------------------------------------------------------


@without_body(LayerError)
def stack_nothing(one):
    return stack([])


@without_body(LayerError)
def stack_types_differ(one):
    half = dense(one) | {"b": jnp.zeros(4, jnp.bfloat16)}
    return stack([dense(one), dense(one, 5), dense(one), half])


@without_body(LayerError)
def stack_structures_differ(one):
    return stack([dense(one), {"w": dense(one)["w"]}, dense(one) | {"scale": one}, dense(one) | {"b": None}])


@without_body(LayerError)
def stack_classes_differ(one):
    return stack([Dense(one, one), (one, one), dense(one)])


@without_body(LayerError)
def stack_static_leaves_differ(one):
    return stack([{"w": one, "activation": jax.nn.relu}, {"w": one, "activation": jax.nn.gelu}])


@without_body(LayerError)
def stack_numbers_differ(one):
    layers = [{"w": one, "scale": 0.5, "dropout": {"inference": False}} for _ in range(3)]
    layers[1] = {"w": one, "scale": 0.25, "dropout": {"inference": True}}
    layers[2] = layers[2] | {"scale": 1}
    return stack(layers)


@without_body(LayerError)
def stack_metadata_differ(one):
    return stack([Attention(one, 4), Attention(one, 8)])


@without_body(ArgumentTypeError)
def stack_a_dict_of_layers(one):
    return stack({"layer_0": dense(one), "layer_1": dense(one)})


@without_body(LayerError)
def unstack_a_list_of_layers(one):
    return unstack([dense(one), dense(one)])


@without_body(LayerError)
def unstack_leaf_without_axis(one):
    return unstack(denses(one) | {"scale": one, "norm": {"eps": 1e-6}})


@without_body(LayerError)
def unstack_static_leaves_alone(one):
    return unstack({"activation": jax.nn.relu, "bias": None})


@without_body(LayerError, context=on_mesh)
def unstack_split(one):
    return unstack({"w": jax.sharding.reshard(jnp.ones((4, 3)), PartitionSpec("rows")), "b": jnp.ones(4)})


@without_body(ArgumentTypeError)
def layer_at_float(one):
    return layer_at(denses(one), 1.0)


@without_body(ArgumentTypeError)
def layer_at_bool(one):
    return layer_at(denses(one), True)


@without_body(ArgumentTypeError)
def layer_at_slice(one):
    return layer_at(denses(one), slice(1, 3))


@without_body(ArgumentTypeError)
def layer_at_several(one):
    return layer_at(denses(one), np.array([0, 2]))


@without_body(ArgumentTypeError, less=("disable_jit",))
def layer_at_traced_float(one):
    return jax.jit(lambda i: layer_at(denses(one), i))(jnp.float32(1.0))


@without_body(LayerError)
def layer_at_out_of_range(one):
    return layer_at(denses(one), 4)


@without_body(LayerError)
def layer_at_out_of_range_from_the_end(one):
    return layer_at(denses(one), -5)


@without_body(LayerError)
def layer_at_of_no_layers(one):
    return layer_at(denses(one, 0), 0)


@without_body(LayerError)
def layer_at_of_a_list(one):
    return layer_at([dense(one), dense(one), dense(one)], 1)


@without_body(LayerError)
def set_layer_does_not_fit(one):
    return set_layer(denses(one), 1, {"w": one * jnp.ones((3, 4)), "scale": one})


@without_body(LayerError)
def set_layer_of_another_dtype(one):
    return set_layer(denses(one), 1, {"w": jnp.ones((3, 3), jnp.bfloat16), "b": jnp.zeros(3)})


@without_body(LayerError)
def set_layer_with_axis(one):
    return set_layer(denses(one), 1, denses(one, 1))


@without_body(LayerError)
def set_layer_of_another_activation(one):
    return set_layer({"w": one * X, "activation": jax.nn.relu}, 0, {"w": one, "activation": jax.nn.gelu})


@without_body(LayerError)
def set_layer_of_another_number(one):
    return set_layer({"w": one * X, "scale": 0.5, "eps": 1.0}, 0, {"w": one, "scale": 0.25, "eps": one})


@without_body(LayerError)
def set_layer_out_of_range(one):
    return set_layer(denses(one), 7, dense(one))


# --- names of axes in the metadata of flax ----------------------------------------------------------------------------


def boxed(one: Any, *names: str) -> Any:
    from flax.core import meta

    return {"w": meta.Partitioned(one * jnp.ones((4, 3, 3)[: len(names)]), names), "b": one * jnp.ones(4)}


@without_body(ArgumentTypeError)
def layer_axis_name_int(one):
    return stack([dense(one)], layer_axis_name=0)


@case(ArgumentTypeError)
def layer_axis_name_of_init_layers(one):
    return init_layers(init, KEY, 4, layer_axis_name=("layers",))


@without_body(LayerError)
def layer_axis_name_of_another_stack(one):
    return layer_at(boxed(one, "layers", "in", "out"), 0, layer_axis_name="blocks")


@without_body(LayerError)
def layer_axis_name_of_a_stack_that_has_none(one):
    stacked = boxed(one, "in", "out")
    stacked["w"] = stacked["w"].replace_boxed(jnp.ones((4, 3, 3)))
    return unstack(stacked, layer_axis_name="layers")


def box_without_axes() -> Any:
    from flax.core import meta

    @functools.partial(jax.tree_util.register_dataclass, data_fields=["value"], meta_fields=[])
    @dataclasses.dataclass
    class Scaled(meta.AxisMetadata[Any]):
        value: Any

        def unbox(self) -> Any:
            return self.value

        def replace_boxed(self, val: Any) -> Any:
            return Scaled(val)

        def add_axis(self, index: int, params: Any) -> Any:
            raise KeyError("scale_of_axis")

        remove_axis = add_axis

    return Scaled


@without_body(LayerError)
def box_that_takes_no_axis(one):
    return stack([{"w": box_without_axes()(one * X)}])


@case(LayerError)
def box_that_gives_up_no_axis(one):
    return fold_layers(block_alone, X, denses(one) | {"w": box_without_axes()(one * jnp.ones((4, 3, 3)))})


# --- init_layers ------------------------------------------------------------------------------------------------------


def init(key, width=4):
    return {"w": jax.random.normal(key, (width, 3)), "b": jnp.zeros(3)}


@without_body(BodyError)
def init_layers_key_first(one):
    return init_layers(jax.random.key(0), init, 4)


@case(ArgumentTypeError)
def init_layers_number_before_key(one):
    return init_layers(init, 4, KEY)


@case(ArgumentTypeError)
def init_layers_number_traced(one):
    return jax.vmap(lambda n: init_layers(init, jax.random.key(0), n))(jnp.arange(2, dtype=jnp.int32))


@case(ArgumentError)
def init_layers_none(one):
    return init_layers(init, jax.random.key(0), 0)


@case(ArgumentTypeError)
def init_layers_without_key(one):
    return init_layers(init, None, 4)


@case(ArgumentTypeError)
def init_layers_of_a_seed(one):
    return init_layers(init, 0, 4)


@case(LayerError)
def init_layers_shardings_no_prefix(one):
    return init_layers(init, jax.random.key(0), 4, shardings={"w": NamedSharding(two_devices(), PartitionSpec())})


@case(LayerError)
def init_layers_shardings_misfit(one):
    mesh = two_devices()
    shardings = {"w": NamedSharding(mesh, PartitionSpec(None, "rows")), "b": PartitionSpec(None, "rows")}
    return init_layers(init, jax.random.key(0), 4, shardings=shardings)


@case(LayerError)
def init_layers_shardings_by_name(one):
    return init_layers(init, jax.random.key(0), 4, shardings={"w": "rows", "b": None})


# --- the stacks of a block --------------------------------------------------------------------------------------------


@without_body(LayerError)
def layers_in_a_list(one):
    return scan_layers(block, X, [dense(one), dense(one), dense(one)])


@without_body(LayerError)
def layers_of_two_depths(one):
    return scan_layers(block, X, {"w": one * jnp.ones((4, 3, 3)), "b": jnp.zeros((5, 3))})


@without_body(LayerError)
def layers_with_scalar(one):
    return fold_layers(block_alone, X, denses(one) | {"norm": {"scale": one, "eps": 1e-6}})


@without_body(LayerError)
def layers_without_arrays(one):
    return scan_layers(block, X, None)


@without_body(LayerError)
def layers_none(one):
    return scan_layers(block, X, denses(one, 0))


@without_body(LayerError, context=on_mesh)
def layers_split(one):
    w = jax.sharding.reshard(jnp.ones((4, 3, 6)), PartitionSpec("rows", None, None))
    return scan_layers(block, X, {"w": w, "b": jnp.zeros((4, 6))})


@without_body(LayerError, less=("jit",))
def layers_split_and_committed(one):
    layers = {"w": split(np.ones((4, 3, 6)), "rows"), "b": split(np.zeros((4, 6)), "rows", None), "scale": jnp.ones(4)}
    return scan_layers(block, X, layers)


@without_body(LayerError)
def layers_and_xs_of_two_depths(one):
    cache = {"k": one * jnp.zeros((3, 8)), "v": jnp.zeros((4, 8)), "step": jnp.int32(0)}
    return scan_layers(with_cache, X, denses(one), cache)


@without_body(LayerError)
def layers_and_xs_of_two_depths_along_axes(one):
    cache = {"k": one * jnp.zeros((2, 8)), "table": X}
    return scan_layers(with_cache, X, denses(one), cache, in_axes={"k": 1, "table": None})


@without_body(LayerError, context=on_mesh)
def layers_with_split_xs(one):
    cache = jax.sharding.reshard(jnp.ones((4, 3)), PartitionSpec("rows", None))
    return scan_layers(with_cache, X, denses(one), {"cache": cache})


@case(ArgumentError)
def layers_in_axes_no_prefix(one):
    return scan_layers(with_cache, X, denses(one), {"k": one * X}, in_axes={"k": 0, "v": 0})


@case(ArgumentError)
def layers_out_axes_not_there(one):
    return scan_layers(lambda layer, x: (x, {"mean": x.mean()}), X, denses(one), out_axes=2)


# --- the options of a block -------------------------------------------------------------------------------------------


@case(LayerError)
def layers_length_of_another_stack(one):
    return scan_layers(block, X, denses(one), length=9)


@case(LayerError)
def layers_none_without_length(one):
    return fold_layers(lambda layer, x, weights: x * weights, X, None, args=(one,))


@case(ArgumentTypeError)
def layers_length_no_int(one):
    return fold_layers(block_alone, X, denses(one), length=4.0)


@case(ArgumentError)
def layers_out_axes_in_fold_layers(one):
    return fold_layers(block_alone, X, denses(one), out_axes=1)


@case(ArgumentError)
def layers_save_in_fold_layers(one):
    return fold_layers(block_alone, X, denses(one), save="last")


@case(ArgumentTypeError)
def layers_unknown_option(one):
    return scan_layers(block, X, denses(one), reversed=True)


@case(ArgumentError)
def layers_option_of_mask_scan(one):
    return scan_layers(block, X, denses(one), lengths=jnp.array([3]))


@case(ArgumentTypeError)
def layers_unroll_float(one):
    return scan_layers(block, X, denses(one), unroll=2.0)


@case(ArgumentTypeError)
def layers_key_seed(one):
    return scan_layers(block, X, denses(one), key=0)


@case(ArgumentError)
def layers_args_array(one):
    return scan_layers(block, X, denses(one), args=one)


@case(ArgumentError)
def layers_args_dict(one):
    return scan_layers(block, X, denses(one), args={"mask": one})


@case(ArgumentError)
def layers_remat_unknown(one):
    return scan_layers(block, X, denses(one), remat="layer")


@case(ArgumentError)
def layers_remat_sequence_for_one_block(one):
    return scan_layers(block, X, denses(one), remat=["step"])


def block_of_a_ref() -> Callable[[Any, Any], tuple[Any, Any]]:
    ref = (jax.new_ref if hasattr(jax, "new_ref") else jax.array_ref)(jnp.ones(()))

    def block(layer, x):
        return x + ref[...], None

    return block


@case(ArgumentError, less=("disable_jit", "vmap"))
def layers_remat_over_a_ref(one):
    return scan_layers(block_of_a_ref(), X, denses(one), remat="step")


@case(ArgumentError, less=("disable_jit", "vmap"))
def pattern_remat_over_a_ref(one):
    return scan_layers([local, block_of_a_ref()], X, [denses(one), denses(one)], remat=[None, "step"])


@case(ArgumentError)
def layers_prefetch_two(one):
    return fold_layers(block_alone, X, denses(one), prefetch=2)


@case(ArgumentError)
def layers_prefetch_without_a_mesh(one):
    return fold_layers(block_alone, X, denses(one), prefetch=1)


@case(ArgumentError)
def layers_prefetch_of_another_tree(one):
    return fold_layers(block_alone, X, denses(one), prefetch=jax.tree.leaves)


@case(ArgumentError)
def layers_prefetch_with_remat_nested(one):
    return fold_layers(block_alone, X, denses(one), prefetch=1, remat="nested")


@case(ArgumentError)
def layers_prefetch_of_a_pattern(one):
    return fold_layers([block_alone, block_alone], X, [denses(one), denses(one)], prefetch=1)


@case(ArgumentError)
def layers_prefetch_without_weights(one):
    return fold_layers(lambda layer, x, w: x * w, X, None, args=(one,), length=3, prefetch=1)


@case(ArgumentError, less=("disable_jit", "vmap"))
def layers_prefetch_over_a_ref(one):
    return scan_layers(block_of_a_ref(), X, denses(one), prefetch=lambda layer: layer)


@case(ArgumentError, less=("disable_jit", "vmap"))
def layers_prefetch_of_a_block_with_an_effect(one):
    def block(layer, x):
        jax.experimental.io_callback(lambda: None, None)
        return x

    return fold_layers(block, X, denses(one), prefetch=lambda layer: layer)


@case(ArgumentError, less=("disable_jit", "jit", "vmap", "grad"))
def layers_prefetch_in_forward_mode(one):
    return jax.jvp(lambda x: fold_layers(block_alone, x, denses(one), prefetch=lambda layer: layer), (X,), (X,))


@case(ArgumentError, less=("disable_jit", "vmap", "grad"))
def layers_prefetch_within_shard_map(one):
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec()
    run = jax.shard_map(
        lambda layers: fold_layers(block_alone, X, layers, prefetch=1), mesh=mesh, in_specs=spec, out_specs=spec
    )
    return run(denses(one))


# --- the parameters of a block ----------------------------------------------------------------------------------------


@case(BodyError)
def block_of_x_alone(one):
    def block(x):
        return x, None

    return scan_layers(block, X, denses(one))


@case(BodyError)
def block_without_x_layer(one):
    return scan_layers(block, X, denses(one), one * jnp.ones(4))


@case(BodyError)
def block_without_its_args(one):
    def block(layer, x, mask, scale):
        return x * mask * scale, None

    return scan_layers(block, X, denses(one))


@case(BodyError)
def block_with_one_arg_too_many(one):
    def block(layer, x, cache, mask):
        return x * mask, None

    return fold_layers(block, X, denses(one), one * jnp.ones(4), args=(True, one))


@case(BodyError)
def block_without_key(one):
    return scan_layers(block, X, denses(one), key=jax.random.key(0))


@case(BodyError)
def block_that_needs_key(one):
    def block(layer, x, *, key):
        return x, None

    return scan_layers(block, X, denses(one))


@case(BodyError)
def block_that_needs_a_keyword(one):
    def block(layer, x, *, heads):
        return x, None

    return scan_layers(block, X, denses(one))


@without_body(BodyError)
def block_not_callable(one):
    return scan_layers(denses(one), X, block)


# --- what a block returns ---------------------------------------------------------------------------------------------


@case(BodyError)
def block_returns_x_alone(one):
    return scan_layers(block_alone, one * X, denses(one))


@case(BodyError)
def block_returns_x_alone_of_two(one):
    def block(layer, x):
        return x[0] + 1, x[1]

    return scan_layers(block, (one, one), denses(one))


@case(BodyError)
def block_returns_nothing(one):
    def block(layer, x):
        x @ layer["w"]

    return scan_layers(block, X, denses(one))


@case(BodyError)
def block_returns_three(one):
    return scan_layers(lambda layer, x: (x, x, x), X, denses(one))


@case(CarryError)
def block_returns_swapped_pair(one):
    def block(layer, x):
        return x.mean(), x @ layer["w"]

    return scan_layers(block, one * X, denses(one))


@case(BodyError)
def block_of_fold_layers_returns_pair(one):
    return fold_layers(block, one * X, denses(one))


@case(BodyError)
def block_of_fold_layers_returns_swapped_pair(one):
    return fold_layers(lambda layer, x: (None, x @ layer["w"]), one * X, denses(one))


@case(CarryError)
def block_of_fold_layers_returns_nothing(one):
    def block(layer, x):
        x @ layer["w"]

    return fold_layers(block, one * X, denses(one))


@case(BodyError)
def block_changes_its_module(one):
    from flax import nnx

    class Module(nnx.Module):
        def __init__(self) -> None:
            self.w = nnx.Param(one * jnp.ones((4, 3)))
            self.mean = nnx.BatchStat(jnp.zeros(4))

    def block(module, x):
        module.mean[...] = x.mean()
        module.last = nnx.Intermediate(x)
        return x * module.w[...]

    return fold_layers(block, one * X, Module())


@case(BodyError)
def block_returns_static_y(one):
    return scan_layers(lambda layer, x: (x, {"mean": x.mean(), "kind": "dense"}), one * X, denses(one))


# --- x from layer to layer --------------------------------------------------------------------------------------------


@case(CarryError)
def x_dtype(one):
    def block(layer, x):
        return (x.astype(jnp.bfloat16) @ layer["w"].astype(jnp.bfloat16)), None

    return scan_layers(block, one * X, denses(one))


@case(CarryError)
def x_dtype_of_own_name(one):
    def block(layer, hidden):
        return {"h": hidden["h"].astype(jnp.bfloat16), "pos": hidden["pos"]}

    return fold_layers(block, {"h": one * X, "pos": 0}, denses(one))


@case(CarryError)
def x_shape(one):
    def block(layer, x):
        return x @ layer["w"], None

    return scan_layers(block, one * X, {"w": jnp.ones((4, 3, 8))})


@case(CarryError)
def x_rank(one):
    return fold_layers(lambda layer, x: x[None], one * X, denses(one))


@case(CarryError)
def x_grows(one):
    def block(layer, x):
        return jnp.append(x, 1.0), None

    return scan_layers(block, one * X, denses(one))


@case(CarryError)
def x_structure(one):
    def block(layer, x):
        return {"h": x["h"], "attention": x["h"]}, None

    return scan_layers(block, {"h": one * X, "mask": X}, denses(one))


@case(CarryError)
def x_classes(one):
    def block(layer, x):
        return {"a": (x["a"].w, x["a"].b), "b": Dense(*x["b"]), "c": [*x["c"]], "d": None, "e": X}, None

    x = {"a": Dense(one, one), "b": (one, one), "c": (one, one), "d": one, "e": None}
    return scan_layers(block, x, denses(one))


@case(CarryError)
def x_metadata(one):
    return fold_layers(lambda layer, x: Attention(x.w, x.heads + 1), Attention(one, 4), denses(one))


@case(CarryError)
def x_static(one):
    return fold_layers(lambda layer, x: (x[0], jax.nn.gelu, "done"), (one, jax.nn.relu, one), denses(one))


@case(CarryError)
def x_weak_type(one):
    def block(layer, x):
        return {"h": x["h"], "count": (x["count"] < 1).astype(jnp.int8)}, None

    with jax.numpy_dtype_promotion("standard"):
        return scan_layers(block, {"h": one, "count": 0.0}, denses(one))


@case(CarryError)
def x_key_data(one):
    return fold_layers(lambda layer, x: (jax.random.key_data(x[0]), one), (jax.random.key(0), one), denses(one))


@case(CarryError)
def x_key_impl(one):
    other = jax.random.key(0, impl="rbg")
    return fold_layers(lambda layer, x: (other, one), (jax.random.key(0), one), denses(one))


@case(CarryError, context=on_mesh)
def x_sharding(one):
    def block(layer, x):
        return {"h": jax.sharding.reshard(x["h"], PartitionSpec(None))}, None

    x = {"h": jax.sharding.reshard(jnp.ones(4), PartitionSpec("rows"))}
    return scan_layers(block, x, denses(one))


def over_devices(function: Callable[..., Any]) -> Any:
    whole = PartitionSpec()
    return jax.shard_map(function, mesh=two_devices(), in_specs=(whole,), out_specs=whole)


@case(CarryError)
def x_begins_to_vary(one):
    def block(layer, x):
        return {"h": x["h"] + jax.lax.axis_index("rows")}

    return over_devices(lambda w: jax.lax.psum(fold_layers(block, {"h": jnp.int32(0)}, w)["h"], "rows"))(X)


@case(CarryError)
def x_ceases_to_vary(one):
    def block(layer, x):
        return {"h": jax.lax.psum(x["h"], "rows")}

    return over_devices(lambda w: fold_layers(block, {"h": jax.lax.axis_index("rows")}, w)["h"])(X)


@case(ArgumentTypeError)
def x_of_a_function_that_makes_carries(one):
    return scan_layers(block, {"h": X, "rng": keys}, denses(one))


@case(SignatureError)
def block_signature(one):
    def block(layer: Float[Array, "n m"], x: Float[Array, " n"]) -> tuple[Float[Array, " n"], None]:
        return x, None

    return scan_layers(block, one * X, jnp.ones((4, 2, 3)))


# --- blocks by turns --------------------------------------------------------------------------------------------------


@without_body(LayerError)
def pattern_of_no_blocks(one):
    return scan_layers([], X, [])


@without_body(LayerError)
def pattern_with_one_stack(one):
    return scan_layers([local, block], X, denses(one))


@without_body(LayerError)
def pattern_with_a_named_tuple_of_stacks(one):
    return scan_layers([local, block], X, Dense(denses(one), denses(one)))


def decode(layer, x, cache):
    return x @ layer["w"], {"k": cache["k"] + x, "v": cache["v"]}


def caches(one: Any, n: int = 4) -> Any:
    return {"k": one * jnp.zeros((n, 3)), "v": jnp.zeros((n, 3))}


@without_body(LayerError)
def state_of_another_depth(one):
    return fold_layers(decode, X, denses(one), state=caches(one) | {"k": jnp.zeros((3, 3)), "step": jnp.int32(0)})


@without_body(LayerError)
def state_of_another_depth_in_a_pattern(one):
    return fold_layers([decode, decode], X, [denses(one), denses(one)], state=[caches(one), caches(one, 5)])


@without_body(LayerError)
def state_that_is_no_sequence_in_a_pattern(one):
    return fold_layers([decode, decode], X, [denses(one), denses(one)], state=caches(one))


@without_body(LayerError)
def state_with_too_few_stacks(one):
    return fold_layers([decode, decode], X, [denses(one), denses(one)], state=[caches(one)])


@case(BodyError)
def state_is_not_returned(one):
    def block(layer, x, cache):
        return decode(layer, x, cache)[0]

    return fold_layers(block, X, denses(one), state=caches(one))


@case(BodyError)
def state_is_not_returned_beside_y(one):
    def block(layer, x, cache):
        return decode(layer, x, cache)

    return scan_layers(block, X, denses(one), state=caches(one))


@case(BodyError)
def state_returned_with_a_y_in_fold_layers(one):
    def block(layer, x, cache):
        return (*decode(layer, x, cache), x)

    return fold_layers(block, X, denses(one), state=caches(one))


@case(CarryError)
def state_of_another_type_is_returned(one):
    def block(layer, x, cache):
        return x, {"k": cache["k"].astype(jnp.bfloat16), "v": jnp.concatenate([cache["v"], x[:1]])}

    return fold_layers(block, X, denses(one), state=caches(one))


@case(CarryError)
def state_of_another_structure_is_returned(one):
    def block(layer, x, cache):
        return x, {"k": cache["k"], "position": one}

    return fold_layers(block, X, denses(one), state=caches(one), remat="step")


@case(CarryError)
def state_and_x_are_swapped(one):
    def block(layer, x, cache):
        return cache, x

    return fold_layers(block, X, denses(one), state=caches(one))


@without_body(ArgumentError)
def state_beside_a_save_that_is_no_prefix(one):
    def block(layer, x, cache):
        return (*decode(layer, x, cache), {"mean": x.mean()})

    return scan_layers(block, X, denses(one), state=caches(one), remat="step", save={"sum": "last"})


@case(BodyError)
def state_is_not_taken(one):
    def block(layer, x):
        return x, None

    return fold_layers(block, X, denses(one), state=caches(one))


@without_body(LayerError, context=on_mesh)
def state_split(one):
    w = jax.sharding.reshard(jnp.ones((4, 3)), PartitionSpec("rows", None))
    return fold_layers(decode, X, denses(one), state=caches(one) | {"k": w})


@without_body(LayerError)
def pattern_with_too_few_stacks(one):
    return scan_layers([local, local, block], X, [denses(one), denses(one)])


@without_body(LayerError)
def pattern_with_one_xs(one):
    return scan_layers([with_cache, with_cache], X, [denses(one), denses(one)], {"k": one * jnp.ones((4, 3))})


@without_body(ArgumentError)
def pattern_with_too_many_in_axes(one):
    stacks = [denses(one), denses(one)]
    return scan_layers([local, block], X, stacks, [None, None], in_axes=(0, 0, None))


@without_body(LayerError)
def pattern_of_uneven_stacks(one):
    return scan_layers([local, local, block], X, [denses(one, 4), denses(one, 2), denses(one, 3)])


@without_body(LayerError)
def pattern_of_more_at_the_end(one):
    return scan_layers([local, block], X, [denses(one, 3), denses(one, 4)])


@without_body(LayerError)
def pattern_of_no_layers(one):
    return scan_layers([local, block], X, [denses(one, 0), denses(one, 0)])


@without_body(LayerError)
def pattern_of_lists_of_layers(one):
    return scan_layers([local, block], X, [denses(one), [dense(one), dense(one)]])


@without_body(LayerError)
def pattern_with_xs_of_two_depths(one):
    caches = [{"k": one * jnp.zeros((4, 3))}, {"k": one * jnp.zeros((3, 3))}]
    return scan_layers([with_cache, with_cache], X, [denses(one), denses(one)], caches)


@case(ArgumentError)
def pattern_in_axes_not_there(one):
    caches = [{"k": one * jnp.zeros((4, 3))}, {"k": one * jnp.zeros(4)}]
    return scan_layers([with_cache, with_cache], X, [denses(one), denses(one)], caches, in_axes=[0, {"k": 1}])


@without_body(BodyError)
def pattern_with_something_else_than_a_block(one):
    return scan_layers([local, None], X, [denses(one), denses(one)])


@case(BodyError)
def pattern_second_block_takes_too_much(one):
    def second(layer, x, mask, scale):
        return x * mask * scale, None

    return scan_layers([lambda layer, x: (x, None), second], X, [denses(one), denses(one)])


@case(BodyError)
def pattern_second_block_without_key(one):
    def first(layer, x, *, key):
        return x, None

    def second(layer, x):
        return x, None

    return scan_layers([first, second], X, [denses(one), denses(one)], key=jax.random.key(0))


@case(BodyError)
def pattern_second_block_returns_x_alone(one):
    def second(layer, x):
        return x

    return scan_layers([local, second], one * X, [denses(one), denses(one)])


def half(layer, h):
    return h.astype(jnp.bfloat16), None


@case(CarryError)
def pattern_second_block_computes_in_half(one):
    return scan_layers([local, half, local], one * X, [denses(one)] * 3)


@case(CarryError)
def pattern_second_block_computes_in_half_recomputed(one):
    return scan_layers([local, half, local], one * X, [denses(one)] * 3, remat=[None, "step", None])


@case(CarryError)
def pattern_second_block_computes_in_half_nested(one):
    return scan_layers([local, half, local], one * X, [denses(one)] * 3, remat="nested")


@case(CarryError)
def pattern_second_block_computes_in_half_once_each(one):
    return scan_layers([local, half], one * X, [denses(one, 1), denses(one, 0)])


@case(SignatureError)
def pattern_second_block_signature(one):
    def second(layer: Any, x: Float[Array, "rows features"]) -> Any:
        return x, None

    return scan_layers([local, second], one * X, [denses(one), denses(one)])


@without_body(ArgumentError)
def pattern_with_remat_of_another_length(one):
    return scan_layers([local, block], X, [denses(one), denses(one)], remat=["step"])


@without_body(ArgumentError)
def pattern_with_nested_in_a_sequence(one):
    return scan_layers([local, block], X, [denses(one), denses(one)], remat=["step", "nested"])


@case(ArgumentError)
def pattern_remat_unknown(one):
    return scan_layers([local, block], X, [denses(one), denses(one)], remat="layers")


@case(ArgumentError)
def pattern_out_axes_not_there(one):
    def second(layer, x):
        return x, x.mean()

    return scan_layers([local, second], X, [denses(one), denses(one)], out_axes=1)


# --- flat checkpoints -------------------------------------------------------------------------------------------------


def checkpoint(one: Any, n: int = 3, prefix: str = "model.layers") -> dict[str, Any]:
    w, b = one * jnp.ones((3, 4)), jnp.zeros(4)
    layers = {f"{prefix}.{i}.{name}": leaf for i in range(n) for name, leaf in (("q.weight", w), ("norm.weight", b))}
    return {"model.embed.weight": jnp.ones(2)} | layers


LIKE = {"q": jax.ShapeDtypeStruct((3, 4), jnp.float32), "norm": jax.ShapeDtypeStruct((4,), jnp.float32)}
NAMES = {"q": "q.weight", "norm": "norm.weight"}


@without_body(LayerError)
def checkpoint_of_another_prefix(one):
    return layers_from_state_dict(checkpoint(one) | checkpoint(one, 2, "model.decoder.layers"))


@without_body(LayerError)
def checkpoint_without_numbers(one):
    return layers_from_state_dict({"embed": one, "head": one})


@without_body(LayerError)
def checkpoint_of_nothing(one):
    return layers_from_state_dict({}, prefix="model.layers")


@without_body(LayerError)
def checkpoint_without_a_layer(one):
    state = {name: leaf for name, leaf in checkpoint(one, 4).items() if ".1." not in name}
    return layers_from_state_dict(state, prefix="model.layers")


@without_body(LayerError)
def checkpoint_of_other_names(one):
    return layers_from_state_dict(checkpoint(one, 2), LIKE, prefix="model.layers")


@without_body(LayerError)
def checkpoint_that_does_not_fit(one):
    like = LIKE | {"q": jax.ShapeDtypeStruct((4, 3), jnp.float32), "scale": one}
    return layers_from_state_dict(checkpoint(one, 2), like, prefix="model.layers", names=NAMES)


@without_body(LayerError)
def checkpoint_of_uneven_layers(one):
    state = checkpoint(one)
    del state["model.layers.1.q.weight"]
    state["model.layers.1.norm.weight"] = jnp.zeros(5)
    state["model.layers.2.norm.weight"] = jnp.zeros(4, jnp.bfloat16)
    state["model.layers.2.rotary"] = jnp.zeros(2)
    return layers_from_state_dict(state, prefix="model.layers")


@without_body(ArgumentTypeError)
def checkpoint_names_without_like(one):
    return layers_from_state_dict(checkpoint(one), prefix="model.layers", names=NAMES)


@without_body(LayerError)
def checkpoint_name_twice(one):
    names = NAMES | {"norm": "q.weight"}
    return layers_from_state_dict(checkpoint(one), LIKE, prefix="model.layers", names=names)


@without_body(LayerError)
def checkpoint_paths_alike(one):
    return layers_to_state_dict({"q": {"weight": one * X}, "q.weight": X})


TWO = [{"w": X}, {"w": X}]


def numbered(one: Any, n: int = 5) -> dict[str, Any]:
    return {f"layers.{i}.w": one * X for i in range(n)}


@without_body(LayerError)
def checkpoint_of_several_kinds_without_order(one):
    return layers_from_state_dict(numbered(one), TWO)


@without_body(ArgumentTypeError)
def checkpoint_order_of_another_text(one):
    return layers_from_state_dict(numbered(one), TWO, order="alternating")


@without_body(ArgumentTypeError)
def checkpoint_order_of_floats(one):
    return layers_to_state_dict([one * X, one * X], order=[0.0, 1.0])


@without_body(ArgumentTypeError)
def checkpoint_turns_without_like(one):
    return layers_from_state_dict(numbered(one), order="turns")


@without_body(LayerError)
def checkpoint_order_of_other_layers(one):
    return layers_from_state_dict(numbered(one), TWO, order=[0, 0, 1])


@without_body(LayerError)
def checkpoint_order_of_another_stack(one):
    return layers_from_state_dict(numbered(one), TWO, order=[0, 0, 1, 1, 2])


@without_body(LayerError)
def checkpoint_order_without_layers_for_a_stack(one):
    return layers_from_state_dict(numbered(one), TWO, order=[1, 1, 1, 1, 1])


@without_body(LayerError)
def checkpoint_order_for_a_single_stack(one):
    return layers_from_state_dict(numbered(one), {"w": X}, order="turns")


@without_body(LayerError)
def checkpoint_stacks_that_do_not_take_turns(one):
    return layers_to_state_dict([{"w": one * jnp.zeros((3, 2))}, {"w": jnp.zeros((5, 2))}], order="turns")


@without_body(LayerError)
def checkpoint_names_for_other_stacks(one):
    return layers_from_state_dict(numbered(one), TWO, order="turns", names=[{"w": "w"}])


@without_body(ArgumentTypeError)
def checkpoint_ignore_number(one):
    return layers_from_state_dict(numbered(one), ignore=3)


@without_body(LayerError)
def checkpoint_shardings_misfit(one):
    place = NamedSharding(two_devices(), PartitionSpec("rows"))
    return layers_from_state_dict(numbered(one), TWO, order="turns", shardings=[place, None])


@without_body(ArgumentTypeError)
def checkpoint_prefix_none(one):
    return layers_from_state_dict(checkpoint(one), prefix=None)


@without_body(ArgumentTypeError)
def checkpoint_names_list(one):
    return layers_to_state_dict(denses(one), names=["w", "b"])


@without_body(LayerError)
def checkpoint_to_of_a_list(one):
    return layers_to_state_dict([dense(one), dense(one)])


@without_body(ArgumentTypeError)
def state_dict_no_mapping(one):
    return layers_from_state_dict([one])


@without_body(LayerError)
def state_dict_of_texts(one):
    return layers_from_state_dict({"layers.0.w": one, "layers.0.name": "first"})


@without_body(LayerError)
def state_dict_names_that_are_not_there(one):
    return layers_to_state_dict({"w": one * X}, names={"v": "weight"})


@case(ArgumentError)
def layers_in_axes_without_xs(one):
    return scan_layers(block, X, denses(one), in_axes=1)


@case(ArgumentError)
def layers_with_mutable_arrays(one):
    ref = jax.new_ref(jnp.ones(4))
    return scan_layers(with_cache, X, denses(one), ref, args=(ref,))
