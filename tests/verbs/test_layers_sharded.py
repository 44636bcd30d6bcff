"""Stacks on many devices: each step fetches one layer, and no device ever holds more of a stack than its part."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hlo import Program
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from loops import array

import treescan

pytestmark = pytest.mark.devices

DEVICES, LAYERS, WIDTH, HIDDEN, ROWS = 8, 6, 16, 64, 8
FSDP = {"up": P("d"), "down": P(None, "d"), "scale": None}  # each weight over one of its own axes
TENSOR = {"up": P(None, "d"), "down": P("d"), "scale": None}  # the hidden axis


def mesh_of(kind=AxisType.Auto):
    return jax.make_mesh((DEVICES,), ("d",), axis_types=(kind,))


def init(key):
    up, down = jax.random.split(key)
    return {
        "up": jax.random.normal(up, (WIDTH, HIDDEN)) / 4,
        "down": jax.random.normal(down, (HIDDEN, WIDTH)) / 8,
        "scale": jnp.ones(WIDTH),
    }


def block(layer, x):
    return x + jnp.tanh((x * layer["scale"][None]) @ layer["up"]) @ layer["down"]


def plain_stack():
    return treescan.init_layers(init, jax.random.key(0), LAYERS)


def on(mesh, specs):
    return {name: NamedSharding(mesh, P() if spec is None else spec) for name, spec in specs.items()}


def loss(layers, x, **options):
    return jnp.mean(treescan.fold_layers(block, x, layers, **options) ** 2)


X = array(ROWS, WIDTH)


# Initialisation


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_init_layers_puts_each_leaf_in_its_place(kind):
    mesh = mesh_of(kind)
    made = treescan.init_layers(init, jax.random.key(0), LAYERS, shardings=on(mesh, FSDP))
    chex.assert_trees_all_equal(jax.device_get(made), jax.device_get(plain_stack()))
    assert made["up"].sharding.shard_shape(made["up"].shape) == (LAYERS, WIDTH // DEVICES, HIDDEN)
    assert made["down"].sharding.shard_shape(made["down"].shape) == (LAYERS, HIDDEN, WIDTH // DEVICES)
    assert made["scale"].sharding.is_fully_replicated


@pytest.mark.parametrize(("kind", "outer"), [(AxisType.Auto, True), (AxisType.Explicit, False)], ids=str)
def test_specs_speak_of_the_mesh_that_is_set(kind, outer):
    make = functools.partial(treescan.init_layers, init, n=LAYERS, shardings=FSDP)
    with jax.set_mesh(mesh_of(kind)):
        made = (jax.jit(make) if outer else make)(jax.random.key(0))
    assert made["up"].sharding.shard_shape(made["up"].shape) == (LAYERS, WIDTH // DEVICES, HIDDEN)
    chex.assert_trees_all_equal(jax.device_get(made), jax.device_get(plain_stack()))


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


def test_shardings_hold_under_disable_jit():
    with jax.disable_jit():
        made = treescan.init_layers(init, jax.random.key(0), LAYERS, shardings=on(mesh_of(), FSDP))
    assert made["up"].sharding.shard_shape(made["up"].shape) == (LAYERS, WIDTH // DEVICES, HIDDEN)
    chex.assert_trees_all_equal(jax.device_get(made), jax.device_get(plain_stack()))


# Loops


def gathered(program):
    """The shapes that all-gathers give."""
    return {
        tuple(map(int, shape.split(",")))
        for shape in re.findall(r"= \(?\w+\[([\d,]+)\]\S* all-gather", "\n".join(program))
    }


@pytest.mark.parametrize(
    ("specs", "remat"), [(FSDP, "step"), (FSDP, None), (TENSOR, "step")], ids=["fsdp", "saved", "tensor"]
)
def test_each_step_gathers_one_layer_at_most(specs, remat):
    mesh = mesh_of()
    layers = treescan.init_layers(init, jax.random.key(0), LAYERS, shardings=on(mesh, specs))
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
    value, gradient = step(layers, x)
    expected, expected_gradient = jax.value_and_grad(loss)(plain_stack(), X)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    chex.assert_trees_all_close(jax.device_get(gradient), jax.device_get(expected_gradient), rtol=1e-4, atol=1e-6)
    assert jax.tree.map(lambda leaf: leaf.sharding, gradient) == shardings


@pytest.mark.parametrize("specs", [FSDP, TENSOR], ids=["fsdp", "tensor"])
def test_explicit_axes(specs):
    mesh = mesh_of(AxisType.Explicit)
    layers = treescan.init_layers(init, jax.random.key(0), LAYERS, shardings=on(mesh, specs))

    def replicated(layer, x):
        whole = jax.tree.map(lambda leaf: jax.sharding.reshard(leaf, P()), layer)
        assert "d" in str(jax.typeof(layer["up"]))
        assert "d" not in str(jax.typeof(whole["up"]))
        return block(whole, x)

    with jax.set_mesh(mesh):
        x = jax.device_put(X, NamedSharding(mesh, P()))

        def run(layers, x):
            return jnp.mean(treescan.fold_layers(replicated, x, layers, remat="step") ** 2)

        program = Program(jax.value_and_grad(run), layers, x)
        value, gradient = jax.jit(jax.value_and_grad(run))(layers, x)
    assert all(shape[0] != LAYERS for shape in gathered(program))
    expected, expected_gradient = jax.value_and_grad(loss)(plain_stack(), X)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    chex.assert_trees_all_close(jax.device_get(gradient), jax.device_get(expected_gradient), rtol=1e-4, atol=1e-6)
    assert jax.tree.map(jax.typeof, gradient) == jax.tree.map(jax.typeof, layers)


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


def test_layers_on_different_devices_are_refused():
    stack = {"w": jnp.ones((8, 3, 3)), "b": jnp.ones((8, 3))}
    split = jax.device_put(stack, NamedSharding(mesh_of(), P("d")))
    with pytest.raises(treescan.LayerError, match=r'layers\["b"\] +0, split over \'d\''):
        treescan.fold_layers(lambda layer, x: x @ layer["w"] + layer["b"][None], X[:, :3], split)
    assert len(treescan.unstack(split)) == 8  # that they can be taken apart is no harm


# A pattern with a remainder


@pytest.mark.parametrize("remat", [None, pytest.param("step", marks=pytest.mark.slow)])
def test_a_remainder_gathers_as_often_as_by_hand(remat):
    mesh = mesh_of()
    stacks = [
        {
            name: jax.ShapeDtypeStruct((count, *leaf.shape[1:]), leaf.dtype, sharding=NamedSharding(mesh, P(None, "d")))
            for name, leaf in plain_stack().items()
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
