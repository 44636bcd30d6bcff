"""Cases of `test_errors.py` about layers in flat checkpoints."""

from typing import Any

import jax
import jax.numpy as jnp
from error_cases import XS as X, case, mesh_of
from jax.sharding import NamedSharding, PartitionSpec

from treescan.state_dict import layers_from_state_dict, layers_to_state_dict


def checkpoint(one: Any, n: int = 3, prefix: str = "model.layers") -> dict[str, Any]:
    w, b = one * jnp.ones((3, 4)), jnp.zeros(4)
    layers = {f"{prefix}.{i}.{name}": leaf for i in range(n) for name, leaf in (("q.weight", w), ("norm.weight", b))}
    return {"model.embed.weight": jnp.ones(2)} | layers


LIKE = {"q": jax.ShapeDtypeStruct((3, 4), jnp.float32), "norm": jax.ShapeDtypeStruct((4,), jnp.float32)}
NAMES = {"q": "q.weight", "norm": "norm.weight"}


@case()
def checkpoint_that_does_not_fit(one):
    like = LIKE | {"q": jax.ShapeDtypeStruct((4, 3), jnp.float32), "scale": one}
    return layers_from_state_dict(checkpoint(one, 2), like, prefix="model.layers", names=NAMES)


@case()
def checkpoint_of_uneven_layers(one):
    state = checkpoint(one)
    del state["model.layers.1.q.weight"]
    state["model.layers.1.norm.weight"] = jnp.zeros(5)
    state["model.layers.2.norm.weight"] = jnp.zeros(4, jnp.bfloat16)
    state["model.layers.2.rotary"] = jnp.zeros(2)
    return layers_from_state_dict(state, prefix="model.layers")


class Half:
    """An array of a type that NumPy does not know, as torch's bfloat16."""

    shape = (3,)

    def __array__(self, *args: Any, **options: Any) -> Any:
        raise TypeError("Got unsupported ScalarType BFloat16")


@case()
def checkpoint_that_numpy_cannot_convert(one):
    return layers_from_state_dict({"layers.0.w": one, "layers.1.w": Half()})


@case()
def checkpoint_of_numbers_with_zeros(one):
    return layers_from_state_dict({f"layers.{i:02d}.w": one for i in range(12)})


TWO = [{"w": X}, {"w": X}]


def numbered(one: Any, n: int = 5) -> dict[str, Any]:
    return {f"layers.{i}.w": one * X for i in range(n)}


@case(devices=True)
def checkpoint_shardings_misfit(one):
    place = NamedSharding(mesh_of(2, "rows"), PartitionSpec("rows"))
    return layers_from_state_dict(numbered(one), TWO, order="turns", shardings=[place, None])


case()(
    checkpoint_of_another_prefix=lambda one: layers_from_state_dict(
        checkpoint(one) | checkpoint(one, 2, "model.decoder.layers")
    ),
    checkpoint_without_numbers=lambda one: layers_from_state_dict({"embed": one, "head": one}),
    checkpoint_without_a_layer=lambda one: layers_from_state_dict(
        {name: leaf for name, leaf in checkpoint(one, 4).items() if ".1." not in name}, prefix="model.layers"
    ),
    checkpoint_name_twice=lambda one: layers_from_state_dict(
        checkpoint(one), LIKE, prefix="model.layers", names=(NAMES | {"norm": "q.weight"})
    ),
    checkpoint_paths_alike=lambda one: layers_to_state_dict({"q": {"weight": one * X}, "q.weight": X}),
    checkpoint_of_several_kinds_without_order=lambda one: layers_from_state_dict(numbered(one), TWO),
    checkpoint_order_of_other_layers=lambda one: layers_from_state_dict(numbered(one), TWO, order=[0, 0, 1]),
    checkpoint_order_of_another_stack=lambda one: layers_from_state_dict(numbered(one), TWO, order=[0, 0, 1, 1, 2]),
    checkpoint_order_without_layers_for_a_stack=lambda one: layers_from_state_dict(
        numbered(one), TWO, order=[1, 1, 1, 1, 1]
    ),
    checkpoint_order_for_a_single_stack=lambda one: layers_from_state_dict(numbered(one), {"w": X}, order="turns"),
    checkpoint_stacks_that_do_not_take_turns=lambda one: layers_to_state_dict(
        [{"w": one * jnp.zeros((3, 2))}, {"w": jnp.zeros((5, 2))}], order="turns"
    ),
    checkpoint_names_for_other_stacks=lambda one: layers_from_state_dict(
        numbered(one), TWO, order="turns", names=[{"w": "w"}]
    ),
    state_dict_of_texts=lambda one: layers_from_state_dict({"layers.0.w": one, "layers.0.name": "first"}),
    state_dict_names_that_are_not_there=lambda one: layers_to_state_dict({"w": one * X}, names={"v": "weight"}),
    checkpoint_names_without_like=lambda one: layers_from_state_dict(
        checkpoint(one), prefix="model.layers", names=NAMES
    ),
    checkpoint_order_of_another_text=lambda one: layers_from_state_dict(numbered(one), TWO, order="alternating"),
    checkpoint_order_of_floats=lambda one: layers_to_state_dict([one * X, one * X], order=[0.0, 1.0]),
    checkpoint_turns_without_like=lambda one: layers_from_state_dict(numbered(one), order="turns"),
    checkpoint_ignore_number=lambda one: layers_from_state_dict(numbered(one), ignore=3),
    checkpoint_prefix_none=lambda one: layers_from_state_dict(checkpoint(one), prefix=None),
    state_dict_no_mapping=lambda one: layers_from_state_dict([one]),
)
