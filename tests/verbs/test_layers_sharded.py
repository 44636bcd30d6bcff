"""Stacks on many devices: each step fetches one layer, and no device ever holds more of a stack than its part."""

import contextlib
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hlo import Program
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from sharded_layers import (
    DEVICES,
    FSDP,
    HIDDEN,
    LAYERS,
    TENSOR,
    WIDTH,
    X,
    assert_right,
    block,
    gathered,
    init,
    loss,
    mesh_of,
    on,
    stack,
)

import treescan

pytestmark = pytest.mark.devices


# Initialisation


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        (AxisType.Explicit, "eager"),
        (AxisType.Auto, "disable_jit"),
        (AxisType.Auto, "specs under jit"),
        (AxisType.Explicit, "specs"),
    ],
    ids=str,
)
def test_init_layers_puts_each_leaf_in_its_place(kind, how):
    """Specs speak of the mesh that is set."""
    mesh, specs = mesh_of(kind), how.startswith("specs")
    make = functools.partial(treescan.init_layers, init, n=LAYERS, shardings=FSDP if specs else on(mesh, FSDP))
    with jax.set_mesh(mesh) if specs else contextlib.nullcontext(), jax.disable_jit(how == "disable_jit"):
        made = (jax.jit(make) if how.endswith("under jit") else make)(jax.random.key(0))
    chex.assert_trees_all_equal(jax.device_get(made), jax.device_get(stack()))
    assert made["up"].sharding.shard_shape(made["up"].shape) == (LAYERS, WIDTH // DEVICES, HIDDEN)
    assert made["down"].sharding.shard_shape(made["down"].shape) == (LAYERS, HIDDEN, WIDTH // DEVICES)
    assert made["scale"].sharding.is_fully_replicated


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_no_device_ever_holds_the_whole(kind):
    def wide(key):
        return jax.random.normal(key, (256, 256))

    def make(key, shardings):
        return treescan.init_layers(wide, key, LAYERS, shardings=shardings)

    mesh = mesh_of(kind)
    whole = LAYERS * 256 * 256 * 4
    alone = Program(functools.partial(make, shardings=None), jax.random.key(0))
    with jax.set_mesh(mesh):
        program = Program(functools.partial(make, shardings=P("d")), jax.random.key(0))
    assert alone.temp_bytes > whole  # random bits, and what is made of them
    assert program.temp_bytes < alone.temp_bytes / DEVICES * 1.1 < whole


# Loops


@pytest.mark.parametrize(
    ("specs", "remat"), [(FSDP, "step"), (FSDP, None), (TENSOR, "step")], ids=["fsdp", "saved", "tensor"]
)
def test_each_step_gathers_one_layer_at_most(specs, remat):
    mesh = mesh_of()
    layers = stack(on(mesh, specs))
    x = jax.device_put(X, NamedSharding(mesh, P("d") if specs is FSDP else P()))
    shardings = jax.tree.map(lambda leaf: leaf.sharding, layers)

    @functools.partial(jax.jit, out_shardings=(None, shardings))
    def step(layers, x):
        return jax.value_and_grad(loss)(layers, x, remat=remat)

    program = Program(step, layers, x)
    shapes = gathered(program)
    assert all(shape[0] != LAYERS for shape in shapes), shapes
    if specs is FSDP:
        assert shapes  # weights are fetched, and within the loop
        assert any("all-gather" in text for text in program.loops())
        sliced = {(WIDTH, HIDDEN), (HIDDEN, WIDTH)}
        assert {tuple(size for size in shape if size != 1) for shape in shapes} <= sliced
    stack_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(layers))
    assert program.temp_bytes < stack_bytes  # of which each device keeps an eighth
    assert_right(step(layers, x), layers)


def test_explicit_axes():
    mesh = mesh_of(AxisType.Explicit)
    layers = stack(on(mesh, FSDP))

    def replicated(layer, x):
        whole = jax.tree.map(lambda leaf: jax.sharding.reshard(leaf, P()), layer)
        assert "d" in str(jax.typeof(layer["up"]))
        assert "d" not in str(jax.typeof(whole["up"]))
        return block(whole, x)

    with jax.set_mesh(mesh):
        x = jax.device_put(X, NamedSharding(mesh, P()))
        run = jax.value_and_grad(functools.partial(loss, block=replicated, remat="step"))
        program = Program(run, layers, x)
        found = jax.jit(run)(layers, x)
    assert all(shape[0] != LAYERS for shape in gathered(program))
    assert_right(found, layers)
    assert jax.tree.map(jax.typeof, found[1]) == jax.tree.map(jax.typeof, layers)


def test_stacks_made_of_sharded_layers_are_sharded():
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = mesh_of(kind)
        layers = [jax.tree.map(jax.device_put, init(k), on(mesh, FSDP)) for k in jax.random.split(jax.random.key(0), 3)]
        stacked = treescan.stack(layers)
        assert stacked["up"].sharding.shard_shape((3, WIDTH, HIDDEN)) == (3, WIDTH // DEVICES, HIDDEN)
        for layer in (treescan.unstack(stacked)[1], treescan.layer_at(stacked, 1)):
            assert layer["up"].sharding.shard_shape((WIDTH, HIDDEN)) == (WIDTH // DEVICES, HIDDEN)
        changed = treescan.set_layer(stacked, 1, layers[0])
        assert changed["up"].sharding.shard_shape((3, WIDTH, HIDDEN)) == (3, WIDTH // DEVICES, HIDDEN)
        np.testing.assert_array_equal(np.asarray(changed["up"][1]), np.asarray(layers[0]["up"]))


def test_a_stack_that_is_split_over_its_layers_can_be_taken_apart():
    split = jax.device_put(jnp.ones((8, 3)), NamedSharding(mesh_of(), P("d")))
    assert len(treescan.unstack(split)) == 8


def test_a_step_that_gathers_takes_the_memory_of_one_by_hand():
    mesh = mesh_of()
    layers = jax.ShapeDtypeStruct((16, 256, 256), "f4", sharding=NamedSharding(mesh, P(None, "d")))
    x = jax.ShapeDtypeStruct((64, 256), "f4", sharding=NamedSharding(mesh, P("d")))

    def gathering(w, x):
        return x + jnp.tanh(x @ jax.lax.with_sharding_constraint(w, NamedSharding(mesh, P())))

    def by_hand(x, layers):
        return jax.lax.scan(lambda x, w: (jax.checkpoint(gathering)(w, x), None), x, layers)[0]

    def ours(x, layers):
        return treescan.fold_layers(gathering, x, layers, remat="step")

    got, want = (
        Program(jax.grad(lambda layers, x, run=run: jnp.mean(run(x, layers) ** 2)), layers, x).temp_bytes
        for run in (ours, by_hand)
    )
    assert got <= want


# A pattern with a remainder


@pytest.mark.parametrize("remat", [None, pytest.param("step", marks=pytest.mark.slow)])
def test_a_remainder_gathers_as_often_as_by_hand(remat):
    mesh = mesh_of()
    stacks = [
        {
            name: jax.ShapeDtypeStruct((count, *leaf.shape[1:]), leaf.dtype, sharding=NamedSharding(mesh, P(None, "d")))
            for name, leaf in stack().items()
        }
        for count in (LAYERS, LAYERS - 1)
    ]
    x = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=NamedSharding(mesh, P("d")))

    def by_hand(x, stacks):
        step = block if remat is None else jax.checkpoint(block, prevent_cse=False)
        last = block if remat is None else jax.checkpoint(block)
        heads = [jax.tree.map(lambda leaf: leaf[: LAYERS - 1], stack) for stack in stacks]
        x, _ = jax.lax.scan(lambda x, layers: (step(layers[1], step(layers[0], x)), None), x, heads)
        return last(jax.tree.map(lambda leaf: leaf[LAYERS - 1], stacks[0]), x)

    def ours(x, stacks):
        return treescan.fold_layers([block, block], x, stacks, remat=remat)

    got, want = (
        Program(jax.grad(lambda x, stacks, run=run: jnp.mean(run(x, stacks) ** 2), (0, 1)), x, stacks)
        for run in (ours, by_hand)
    )
    assert got.collectives() == want.collectives()
    assert got.temp_bytes <= 1.02 * want.temp_bytes
