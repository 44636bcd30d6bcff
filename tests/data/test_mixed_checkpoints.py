"""Checkpoints of layers of several kinds, under the names and in the order in which models are published.

Names are those of the models' files; weights are made up.
"""

import functools
import warnings
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import treescan
from treescan import state_dict

WIDTH, HEADS, HIDDEN, EXPERTS = 4, 6, 10, 3


def weights(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def published(kinds: list[dict[str, tuple[int, ...]]], order: list[int], prefix: str) -> dict[str, np.ndarray]:
    """A checkpoint in which layer i is of kind `order[i]`."""
    state = {"model.embed_tokens.weight": np.ones((8, WIDTH), np.float32)}
    for i, kind in enumerate(order):
        state |= {f"{prefix}.{i}.{name}": leaf for name, leaf in weights(kinds[kind], i).items()}
    return state


# Names as in DeepSeek-V3 and Jamba.
SHARED = {"self_attn.q_proj.weight": (HEADS, WIDTH), "input_layernorm.weight": (WIDTH,)}
DENSE = SHARED | {"mlp.gate_proj.weight": (HIDDEN, WIDTH), "mlp.down_proj.weight": (WIDTH, HIDDEN)}
MIXTURE = (
    SHARED
    | {"mlp.gate.weight": (EXPERTS, WIDTH), "mlp.gate.e_score_correction_bias": (EXPERTS,)}
    | {f"mlp.experts.{i}.up_proj.weight": (HIDDEN, WIDTH) for i in range(EXPERTS)}
)
MAMBA = {"mamba.A_log": (HIDDEN, 2), "mamba.conv1d.weight": (HIDDEN, 1, 4), "mamba.conv1d.bias": (HIDDEN,)}
MODELS = {
    "one kind after the other": ([DENSE, MIXTURE], [0] * 3 + [1] * 4),
    "several kinds mixed": ([MAMBA, MIXTURE, DENSE], [2 if i % 8 == 4 else i % 2 for i in range(16)]),
    "by turns": ([MAMBA, MIXTURE, DENSE], [i % 3 for i in range(8)]),
    "one kind by turns": ([DENSE] * 6, [i % 6 for i in range(26)]),
}


def like_of(kind: dict[str, tuple[int, ...]]) -> Any:
    """A nested dict of a layer's types."""
    tree: dict[str, Any] = {}
    for name, shape in kind.items():
        *parents, last = name.split(".")
        at = tree
        for parent in parents:
            at = at.setdefault(parent, {})
        at[last] = jax.ShapeDtypeStruct(shape, jnp.float32)
    return tree


@pytest.mark.parametrize(
    ("model", "turns"),
    [*((model, False) for model in MODELS), *((model, True) for model in MODELS if "turns" in model)],
)
def test_a_mixed_checkpoint_comes_back(model, turns, tmp_path):
    safetensors = pytest.importorskip("safetensors.numpy")
    kinds, places = MODELS[model]
    order = "turns" if turns else places
    safetensors.save_file(published(kinds, places, "model.layers"), tmp_path / "model.safetensors")
    state = safetensors.load_file(tmp_path / "model.safetensors")
    likes = list(map(like_of, kinds))
    stacks = state_dict.layers_from_state_dict(state, likes, prefix="model.layers", order=order)
    assert isinstance(stacks, list)
    for i, stack in enumerate(stacks):
        numbers = [number for number, place in enumerate(places) if place == i]
        for row, number in enumerate(numbers):
            of_layer = {
                f"model.layers.{number}." + jax.tree_util.keystr(path, simple=True, separator="."): leaf[row]
                for path, leaf in jax.tree.leaves_with_path(stack)
            }
            chex.assert_trees_all_equal(of_layer, {name: state[name] for name in of_layer})
    back = state_dict.layers_to_state_dict(stacks, prefix="model.layers", order=order)
    safetensors.save_file(back, tmp_path / "again.safetensors")
    again = safetensors.load_file(tmp_path / "again.safetensors")
    chex.assert_trees_all_equal(again, {name: leaf for name, leaf in state.items() if "layers" in name})


def test_layers_of_a_pattern_are_numbered_as_they_run():
    """What the verbs run is what the checkpoint's numbers say, with a period that is not full."""
    rng = np.random.default_rng(0)
    state = {f"layers.{i}.w": rng.normal(size=(3, 3)).astype(np.float32) for i in range(8)}
    like = {"w": jax.ShapeDtypeStruct((3, 3), jnp.float32)}
    stacks = state_dict.layers_from_state_dict(state, [like] * 3, order="turns")
    assert [len(stack["w"]) for stack in stacks] == [3, 3, 2]
    x = jnp.ones((2, 3))
    found = treescan.fold_layers([lambda layer, x: jnp.tanh(x @ layer["w"])] * 3, x, stacks)
    want = functools.reduce(lambda x, i: jnp.tanh(x @ state[f"layers.{i}.w"]), range(8), x)
    np.testing.assert_allclose(found, want, rtol=1e-5)


class Dense(NamedTuple):
    up: Any
    down: Any


class Experts(NamedTuple):
    router: Any
    up: Any


def mixed() -> dict[str, np.ndarray]:
    dense = {"mlp.up.weight": (5, 4), "mlp.down.weight": (4, 5)}
    return published([dense, {"moe.router": (2, 4), "moe.up": (2, 5, 4)}], [0, 1, 0, 1, 1], "h")


LIKES = (
    Dense(jax.ShapeDtypeStruct((5, 4), jnp.float32), jax.ShapeDtypeStruct((4, 5), jnp.float32)),
    Experts(jax.ShapeDtypeStruct((2, 4), jnp.float32), jax.ShapeDtypeStruct((2, 5, 4), jnp.float32)),
)
NAMES = [{"up": "mlp.up.weight", "down": "mlp.down.weight"}, {"router": "moe.router", "up": "moe.up"}]
ORDER = [0, 1, 0, 1, 1]


def test_names_for_each_stack_or_for_all():
    state = mixed()
    dense, experts = state_dict.layers_from_state_dict(state, LIKES, prefix="h", names=NAMES, order=np.array(ORDER))
    assert (type(dense), type(experts)) == (Dense, Experts)
    np.testing.assert_array_equal(dense.up[1], state["h.2.mlp.up.weight"])
    np.testing.assert_array_equal(experts.up[2], state["h.4.moe.up"])
    back = state_dict.layers_to_state_dict([dense, experts], prefix="h", names=NAMES, order=ORDER)
    chex.assert_trees_all_equal(back, {name: leaf for name, leaf in state.items() if name.startswith("h.")})
    for_all = {"router": "gate", "down": "out"}
    back = state_dict.layers_to_state_dict([dense, experts], names=for_all, order=ORDER)
    assert sorted(name for name in back if ".0." in name or ".1." in name) == [
        "layers.0.out", "layers.0.up", "layers.1.gate", "layers.1.up",
    ]  # fmt: skip
    again = state_dict.layers_from_state_dict(back, LIKES, names=for_all, order=ORDER)
    chex.assert_trees_all_equal(again, (dense, experts))


def test_dicts_of_several_stacks():
    state = mixed()
    stacks = state_dict.layers_from_state_dict(state, prefix="h", order=ORDER)
    assert [{name: leaf.shape for name, leaf in stack.items()} for stack in stacks] == [
        {"mlp.up.weight": (2, 5, 4), "mlp.down.weight": (2, 4, 5)},
        {"moe.router": (3, 2, 4), "moe.up": (3, 2, 5, 4)},
    ]
    back = state_dict.layers_to_state_dict(stacks, prefix="h", order=ORDER)
    chex.assert_trees_all_equal(back, {name: leaf for name, leaf in state.items() if name.startswith("h.")})


@pytest.mark.parametrize(
    "ignore",
    ["*.inv_freq", ["*.inv_freq"], ("*.rotary_emb.*", "*.none"), lambda name: name.endswith("inv_freq")],
    ids=["pattern", "list", "tuple", "function"],
)
def test_buffers_are_ignored(ignore):
    """Also those of a layer beyond the last, as DeepSeek-V3 has one which predicts a further token."""
    state = {f"layers.{i}.w": np.full(2, i, np.float32) for i in range(3)}
    buffers = {f"layers.{i}.self_attn.rotary_emb.inv_freq": np.ones(3) for i in range(4)}
    like = {"w": jax.ShapeDtypeStruct((2,), jnp.float32)}
    for likes in ((), (like,)):
        found = state_dict.layers_from_state_dict(state | buffers, *likes, ignore=ignore)
        chex.assert_trees_all_equal(found, state_dict.layers_from_state_dict(state, like))


def test_another_dtype_is_said_once():
    state = {f"layers.{i}.{name}": jnp.ones(2, jnp.bfloat16) for i in range(2) for name in "abcde"}
    like = dict.fromkeys("abcde", jax.ShapeDtypeStruct((2,), jnp.float32))
    with pytest.warns(UserWarning) as record:
        found = state_dict.layers_from_state_dict(state, like)
    text = " ".join(str(record[0].message).split())
    assert len(record) == 1
    assert "layers.0.a is bfloat16, not float32" in text
    assert "and 2 more" in text
    assert found["a"].dtype == jnp.bfloat16
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state_dict.layers_from_state_dict({"layers.0.a": np.ones(2)}, {"a": np.ones(2)})


@pytest.mark.devices
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_each_leaf_is_put_where_shardings_say(axis_type):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(axis_type,))
    rows = NamedSharding(mesh, PartitionSpec(None, "data"))
    state, shardings = mixed(), [rows, Experts(None, NamedSharding(mesh, PartitionSpec("data")))]
    dense, experts = state_dict.layers_from_state_dict(
        state, LIKES, prefix="h", names=NAMES, order=ORDER, shardings=[Dense(rows, None), shardings[1]]
    )
    assert dense.up.sharding.is_equivalent_to(NamedSharding(mesh, PartitionSpec(None, None, "data")), 3)
    assert isinstance(dense.down, np.ndarray)
    assert experts.up.sharding.is_equivalent_to(NamedSharding(mesh, PartitionSpec(None, "data")), 4)
    np.testing.assert_array_equal(dense.up[1], state["h.2.mlp.up.weight"])
    single = {f"layers.{i}.w": np.full((2, 4), i, np.float32) for i in range(3)}
    with jax.set_mesh(mesh):
        found = state_dict.layers_from_state_dict(single, shardings=PartitionSpec("data"))
    assert found["w"].sharding.is_equivalent_to(NamedSharding(mesh, PartitionSpec(None, "data")), 3)
    found = state_dict.layers_from_state_dict(single, shardings=rows)
    assert found["w"].sharding.is_equivalent_to(NamedSharding(mesh, PartitionSpec(None, None, "data")), 3)


def test_several_stacks_under_jit():
    state = {f"layers.{i}": jnp.full(2, float(i)) for i in range(5)}
    stacks = jax.jit(lambda state: state_dict.layers_from_state_dict(state, order=[0, 1, 0, 1, 0]))(state)
    np.testing.assert_array_equal(stacks[0], [[0, 0], [2, 2], [4, 4]])
    back = jax.jit(lambda stacks: state_dict.layers_to_state_dict(stacks, order="turns"))(stacks)
    chex.assert_trees_all_equal(back, state)
