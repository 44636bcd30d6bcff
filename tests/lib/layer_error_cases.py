"""Cases of `test_errors.py` about stacks of layers, and about blocks that run over them."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from error_cases import XS as X, case, mesh_of, named, on_mesh, with_ref
from jax.sharding import NamedSharding, PartitionSpec

from treescan import fold_layers, init_layers, layer_at, scan_layers, set_layer, stack, unstack
from treescan.carries import keys
from treescan.state_dict import layers_to_state_dict


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


def two(one: Any) -> list[Any]:
    return [denses(one), denses(one)]


def scanned(one: Any, body: Any = block, *, x: Any = X, **options: Any) -> Any:
    return scan_layers(body, x, denses(one), **options)


def folded(one: Any, body: Any = block_alone, *, x: Any = X, **options: Any) -> Any:
    return fold_layers(body, x, denses(one), **options)


def with_cache(layer, x, cache):
    return x + cache, None


KEY = jax.random.key(0)  # made here, as whatever `jax.random` makes is traced where a case is


def on_rows(*shape: int) -> Any:
    """An array whose first axis is split, as its type says."""
    return jax.sharding.reshard(jnp.ones(shape), PartitionSpec("rows"))


def split(array: Any, *spec: str | None) -> Any:
    """An array that lies on two devices, by axes that are not a part of its type."""
    return jax.device_put(array, NamedSharding(mesh_of(2, "rows"), PartitionSpec(*spec)))


@case()
def stack_numbers_differ(one):
    layers = [{"w": one, "scale": 0.5, "dropout": {"inference": False}} for _ in range(3)]
    layers[1] = {"w": one, "scale": 0.25, "dropout": {"inference": True}}
    layers[2] = layers[2] | {"scale": 1}
    return stack(layers)


def boxed(one: Any, *names: str) -> Any:
    from flax.core import meta

    return {"w": meta.Partitioned(one * jnp.ones((4, 3, 3)[: len(names)]), names), "b": one * jnp.ones(4)}


@case()
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


def init(key, width=4):
    return {"w": jax.random.normal(key, (width, 3)), "b": jnp.zeros(3)}


@case(devices=True)
def init_layers_shardings_misfit(one):
    mesh = mesh_of(2, "rows")
    shardings = {"w": NamedSharding(mesh, PartitionSpec(None, "rows")), "b": PartitionSpec(None, "rows")}
    return init_layers(init, jax.random.key(0), 4, shardings=shardings)


@case()
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


@case()
def x_classes(one):
    def block(layer, x):
        return {"a": (x["a"].w, x["a"].b), "b": Dense(*x["b"]), "c": [*x["c"]], "d": None, "e": X}, None

    x = {"a": Dense(one, one), "b": (one, one), "c": (one, one), "d": one, "e": None}
    return scanned(one, block, x=x)


on_mesh()(
    unstack_split=lambda one: unstack({"w": on_rows(4, 3), "b": jnp.ones(4)}),
    layers_split=lambda one: scan_layers(block, X, {"w": on_rows(4, 3, 6), "b": jnp.zeros((4, 6))}),
    layers_with_split_xs=lambda one: scanned(one, with_cache, xs={"cache": on_rows(4, 3)}),
)

case()(
    # stacks
    checkpoint_to_of_a_list=lambda one: layers_to_state_dict([dense(one), dense(one)]),
    stack_nothing=lambda one: stack([]),
    stack_types_differ=lambda one: stack(
        [dense(one), dense(one, 5), dense(one), (dense(one) | {"b": jnp.zeros(4, jnp.bfloat16)})]
    ),
    stack_structures_differ=lambda one: stack(
        [dense(one), {"w": dense(one)["w"]}, dense(one) | {"scale": one}, dense(one) | {"b": None}]
    ),
    stack_static_leaves_differ=lambda one: stack(
        [{"w": one, "activation": jax.nn.relu}, {"w": one, "activation": jax.nn.gelu}]
    ),
    stack_metadata_differ=lambda one: stack([Attention(one, 4), Attention(one, 8)]),
    unstack_leaf_without_axis=lambda one: unstack(denses(one) | {"scale": one, "norm": {"eps": 1e-6}}),
    unstack_static_leaves_alone=lambda one: unstack({"activation": jax.nn.relu, "bias": None}),
    layer_at_out_of_range=lambda one: layer_at(denses(one), 4),
    layer_at_out_of_range_from_the_end=lambda one: layer_at(denses(one), -5),
    layer_at_of_no_layers=lambda one: layer_at(denses(one, 0), 0),
    layer_at_of_a_list=lambda one: layer_at([dense(one), dense(one), dense(one)], 1),
    set_layer_does_not_fit=lambda one: set_layer(denses(one), 1, {"w": one * jnp.ones((3, 4)), "scale": one}),
    set_layer_of_another_dtype=lambda one: set_layer(
        denses(one), 1, {"w": jnp.ones((3, 3), jnp.bfloat16), "b": jnp.zeros(3)}
    ),
    set_layer_of_another_activation=lambda one: set_layer(
        {"w": one * X, "activation": jax.nn.relu}, 0, {"w": one, "activation": jax.nn.gelu}
    ),
    set_layer_of_another_number=lambda one: set_layer(
        {"w": one * X, "scale": 0.5, "eps": 1.0}, 0, {"w": one, "scale": 0.25, "eps": one}
    ),
    set_layer_out_of_range=lambda one: set_layer(denses(one), 7, dense(one)),
    checkpoint_names_list=lambda one: layers_to_state_dict(denses(one), names=["w", "b"]),
    stack_a_dict_of_layers=lambda one: stack({"layer_0": dense(one), "layer_1": dense(one)}),
    layer_at_float=lambda one: layer_at(denses(one), 1.0),
    layer_at_bool=lambda one: layer_at(denses(one), True),
    layer_axis_name_int=lambda one: stack([dense(one)], layer_axis_name=0),
    # Names of axes in the metadata of flax.
    layer_axis_name_of_another_stack=lambda one: layer_at(
        boxed(one, "layers", "in", "out"), 0, layer_axis_name="blocks"
    ),
    box_that_takes_no_axis=lambda one: stack([{"w": box_without_axes()(one * X)}]),
    # init_layers
    init_layers_number_before_key=lambda one: init_layers(init, 4, KEY),
    init_layers_without_key=lambda one: init_layers(init, None, 4),
    init_layers_of_a_seed=lambda one: init_layers(init, 0, 4),
    layer_axis_name_of_init_layers=lambda one: init_layers(init, KEY, 4, layer_axis_name=("layers",)),
    init_layers_shardings_no_prefix=lambda one: init_layers(
        init, jax.random.key(0), 4, shardings={"w": NamedSharding(mesh_of(1), PartitionSpec())}
    ),
    init_layers_shardings_by_name=lambda one: init_layers(
        init, jax.random.key(0), 4, shardings={"w": "rows", "b": None}
    ),
    box_that_gives_up_no_axis=lambda one: fold_layers(
        block_alone, X, denses(one) | {"w": box_without_axes()(one * jnp.ones((4, 3, 3)))}
    ),
    # The stacks of a block.
    layers_in_a_list=lambda one: scan_layers(block, X, [dense(one), dense(one), dense(one)]),
    block_that_takes_x_first=lambda one: fold_layers(lambda x, layer: block_alone(layer, x), X, denses(one)),
    layers_of_two_depths=lambda one: scan_layers(block, X, {"w": one * jnp.ones((4, 3, 3)), "b": jnp.zeros((5, 3))}),
    layers_without_arrays=lambda one: scan_layers(block, X, None),
    layers_and_xs_of_two_depths=lambda one: scanned(
        one, with_cache, xs={"k": one * jnp.zeros((3, 8)), "v": jnp.zeros((4, 8)), "step": jnp.int32(0)}
    ),
    layers_in_axes_without_xs=lambda one: scanned(one, in_axes=1),
    pattern_remat_unknown=lambda one: scan_layers([local, block], X, two(one), remat="layers"),
    layers_out_axes_not_there=lambda one: scanned(one, lambda layer, x: (x, {"mean": x.mean()}), out_axes=2),
    init_layers_none=lambda one: init_layers(init, jax.random.key(0), 0),
    # The options of a block.
    layers_length_of_another_stack=lambda one: scanned(one, length=9),
    layers_length_no_int=lambda one: folded(one, length=4.0),
    layers_unroll_float=lambda one: scanned(one, unroll=2.0),
    layers_key_seed=lambda one: scanned(one, key=0),
    x_of_a_function_that_makes_carries=lambda one: scanned(one, x={"h": X, "rng": keys}),
    layers_out_axes_in_fold_layers=lambda one: folded(one, out_axes=1),
    x_and_layers_exchanged_beside_a_state=lambda one: fold_layers(
        with_cache, one * jnp.ones((24, 4, 4)), jnp.ones((2, 4)), state=jnp.zeros((24, 2))
    ),
    forgotten_stack_of_states=lambda one: fold_layers(
        with_cache, one * X, jnp.ones((24, 4, 4)), state=[{"k": jnp.zeros(2), "v": jnp.zeros(2)}] * 24
    ),
    layers_with_a_cache_as_xs=lambda one: fold_layers(
        lambda layer, x, cache: (x * one, cache), X, jnp.ones((24, 4, 4)), {"k": jnp.zeros((24, 2))}
    ),
    layers_option_of_mask_scan=lambda one: scanned(one, lengths=jnp.array([3])),
    layers_args_array=lambda one: scanned(one, args=one),
    layers_remat_sequence_for_one_block=lambda one: scanned(one, remat=["step"]),
    # The parameters of a block.
    block_without_its_args=lambda one: scanned(
        one, named("block", lambda layer, x, mask, scale: (x * mask * scale, None))
    ),
    block_without_its_one_arg=lambda one: scanned(one, named("block", lambda layer, x, mask: (x, None))),
    block_with_a_state_without_its_args=lambda one: fold_layers(
        named("block", lambda layer, x, cache, start: (x, cache)), X, denses(one), state=one * jnp.ones(4)
    ),
    block_with_one_arg_too_many=lambda one: folded(
        one, named("block", lambda layer, x, cache, mask: (x * mask, None)), xs=one * jnp.ones(4), args=(True, one)
    ),
    block_that_needs_key=lambda one: scanned(one, named("block", lambda layer, x, *, key: (x, None))),
    block_that_needs_a_keyword=lambda one: scanned(one, named("block", lambda layer, x, *, heads: (x, None))),
    block_not_callable=lambda one: scan_layers(denses(one), X, block),
    init_layers_key_first=lambda one: init_layers(jax.random.key(0), init, 4),
    # What a block returns.
    block_returns_nothing=lambda one: scanned(one, named("block", lambda layer, x: None)),
    block_returns_x_alone=lambda one: scanned(one, block_alone),
    block_of_fold_layers_returns_pair=lambda one: folded(one, block),
    block_of_fold_layers_returns_swapped_pair=lambda one: folded(one, lambda layer, x: (None, x @ layer["w"])),
    block_returns_static_y=lambda one: scanned(one, lambda layer, x: (x, {"mean": x.mean(), "kind": "dense"})),
    block_returns_x_alone_of_two=lambda one: scanned(
        one, named("block", lambda layer, x: (x[0] + 1, x[1])), x=(one, one)
    ),
    # X from layer to layer.
    x_static=lambda one: folded(one, lambda layer, x: (x[0], jax.nn.gelu, "done"), x=(one, jax.nn.relu, one)),
    x_dtype=lambda one: scanned(
        one, named("block", lambda layer, x: (x.astype(jnp.bfloat16) @ layer["w"].astype(jnp.bfloat16), None))
    ),
    x_structure=lambda one: scanned(
        one, named("block", lambda layer, x: ({"h": x["h"], "attention": x["h"]}, None)), x={"h": one * X, "mask": X}
    ),
)

case(less=("disable_jit",))(
    layer_at_traced_float=lambda one: jax.jit(lambda i: layer_at(denses(one), i))(jnp.float32(1.0))
)

case(less=("jit",), devices=True)(
    layers_split_and_committed=lambda one: scan_layers(
        block,
        X,
        {"w": split(np.ones((4, 3, 6)), "rows"), "b": split(np.zeros((4, 6)), "rows", None), "scale": jnp.ones(4)},
    )
)

case(less=("disable_jit", "vmap"))(
    pattern_remat_over_a_ref=lambda one: with_ref(
        lambda ref: scan_layers(
            [local, named("block", lambda layer, x: (x + ref[...], None))], X, two(one), remat=[None, "step"]
        )
    ),
)
