"""What is compiled for layers: one loop, of one size whatever the depth, with nothing kept or copied beyond need."""

import functools
import gc
import re
import weakref

import chex
import jax
import jax.numpy as jnp
import pytest
from hlo import Program
from jax import lax
from jaxprs import equations
from loops import array
from thin import parametrize
from traces import compilations

import treescan

WIDTH, HIDDEN, ROWS = 16, 64, 2


def block(layer, x):
    return x + jnp.tanh(x @ layer["up"]) @ layer["down"]


def stack_of(count):
    return {"up": array(count, WIDTH, HIDDEN, seed=1), "down": array(count, HIDDEN, WIDTH, seed=2)}


def size_of(tree):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


SLICE = size_of(stack_of(1))
X = array(ROWS, WIDTH)


def by_hand(x, layers):
    step = jax.checkpoint(block, prevent_cse=False)
    return lax.scan(lambda x, layer: (step(layer, x), None), x, layers)[0]


def gradient(run):
    return jax.grad(lambda x, layers: jnp.sum(run(x, layers) ** 2), (0, 1))


# One loop


def scaled(layer, x, scale, power):
    return block(layer, x) * scale[None] ** power


def with_own(layer, x, own):
    return block(layer, x), own


SCALE = array(WIDTH, seed=3)
VERBS = {
    "args": (
        lambda x, layers: treescan.fold_layers(scaled, x, layers, args=(SCALE, 2)),
        lambda x, layers: lax.scan(lambda x, layer: (scaled(layer, x, SCALE, 2), None), x, layers)[0],
    ),
    "xs": (
        lambda x, layers: treescan.scan_layers(with_own, x, layers, layers["up"]),
        lambda x, layers: lax.scan(lambda x, a: with_own(a[0], x, a[1]), x, (layers, layers["up"])),
    ),
}


@parametrize("runs", VERBS)
def test_the_program_is_that_of_lax_scan(runs):
    ours, theirs = (jax.make_jaxpr(run)(X, stack_of(3)).jaxpr for run in runs)
    assert [eqn.primitive.name for eqn in ours.eqns][-1] == "scan"
    (ours,), (theirs,) = (list(equations(jaxpr, "scan")) for jaxpr in (ours, theirs))
    of_ours, of_theirs = ([eqn.primitive.name for eqn in loop.params["jaxpr"].eqns] for loop in (ours, theirs))
    assert of_ours == of_theirs
    assert len(ours.outvars) == len(theirs.outvars)


@pytest.mark.parametrize(("more", "remat"), [((0,), "step"), ((1, 0), ("step", None))], ids=str)
def test_the_size_of_the_program_does_not_grow_with_depth(more, remat):
    def size(count):
        run = gradient(lambda x, stacks: treescan.fold_layers([block] * len(more), x, stacks, remat=remat))
        stacks = [stack_of(count + rest) for rest in more]
        return len(jax.jit(run).lower(X, stacks).compile().as_text().splitlines())

    assert size(4) == size(16)


# Memory


def test_memory_is_that_of_the_loop_by_hand():
    layers = stack_of(12)
    ours = Program(gradient(lambda x, layers: treescan.fold_layers(block, x, layers, remat="step")), X, layers)
    theirs = Program(gradient(by_hand), X, layers)
    assert ours.temp_bytes <= theirs.temp_bytes


@pytest.mark.parametrize(("period", "remat"), [(1, "step"), (3, None)])
def test_no_copy_of_a_stack_and_gradients_accumulate_in_place(period, remat):
    """Twice the depth needs the activations of twice as many layers, and not a slice of any stack more."""

    def temp(count):
        stacks = [stack_of(count) for _ in range(period)]
        run = gradient(lambda x, layers: treescan.fold_layers([block] * period, x, layers, remat=remat))
        return Program(run, X, stacks).temp_bytes

    activations = period * 10 * ROWS * (2 * HIDDEN + 3 * WIDTH) * 4
    assert temp(20) - temp(10) <= activations < SLICE * 10 * period / 4


def test_a_remainder_costs_one_copy_of_the_leading_stacks():
    def temp(first, second):
        stacks = [stack_of(first), stack_of(second)]
        return Program(lambda x, layers: treescan.fold_layers([block, block], x, layers), X, stacks).temp_bytes

    assert temp(20, 20) < 3 * SLICE
    assert 20 * SLICE <= temp(21, 20) < 24 * SLICE


@pytest.mark.parametrize("counts", [(4, 4), (2, 1)], ids=str)
def test_rematerialised_blocks_save_their_inputs_alone(counts):
    """Those that are left after the rounds, too."""

    def saved(*remat):
        """How many arrays of hidden units."""
        run = functools.partial(treescan.fold_layers, [block] * 2, X, remat=remat)
        leaves = jax.tree.leaves(jax.vjp(run, [stack_of(count) for count in counts])[1])
        return sum(leaf.size // (ROWS * HIDDEN) for leaf in leaves if leaf.shape[-2:] == (ROWS, HIDDEN))

    assert saved(None, None) >= sum(counts)
    assert saved("step", None) == saved(None, None) * counts[1] // sum(counts)
    assert saved("step", "step") == 0


# Stacks


def test_stacking_under_jit_copies_once():
    layers = treescan.unstack(stack_of(4))
    for program in (
        Program(treescan.stack, layers),
        Program(treescan.unstack, stack_of(4)),
        Program(treescan.layer_at, stack_of(4), 2),
        Program(treescan.set_layer, stack_of(4), 2, layers[0]),
    ):
        assert program.temp_bytes == 0
    compiled = jax.jit(treescan.stack).lower(layers).compile()
    assert compiled.memory_analysis().output_size_in_bytes < 4 * SLICE + 128
    assert len(re.findall(r"\bconcatenate\(|dynamic-update-slice\(", compiled.as_text())) <= 2 * 4


def test_an_eager_call_is_one_program_and_is_kept():
    stacked = stack_of(5)
    layers = treescan.unstack(stacked)
    calls = {
        "stack": lambda: treescan.stack(layers),
        "unstack": lambda: treescan.unstack(stacked),
        "set_layer": lambda: treescan.set_layer(stacked, 3, layers[0]),
    }
    jax.clear_caches()
    jnp.zeros(())  # whether there is a trace is asked of an array
    for name, call in calls.items():
        assert sum("backend_compile" in event for event in compilations(call)) == 1, name
        assert compilations(call) == [], name
    treescan.layer_at(stacked, 0)
    assert compilations(lambda: treescan.layer_at(stacked, 3)) == []


def test_init_is_traced_once_and_an_eager_call_is_kept():
    calls = []

    def init(key, width):
        calls.append(width)
        return {"w": jax.random.normal(key, (width, width))}

    for seed, count in ((0, 7), (1, 7), (2, 3)):
        treescan.init_layers(init, jax.random.key(seed), count, 4)
    assert calls == [4, 4]  # for 7 layers, and for 3
    assert compilations(lambda: treescan.init_layers(init, jax.random.key(5), 3, 4)) == []


@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg", "threefry2x32"])
def test_layers_are_those_of_a_loop_for_keys_of_each_kind(impl):
    """Of rbg, `jax.vmap` draws other numbers."""
    traces = []

    def init(key):
        traces.append(key)
        first, second = jax.random.split(key)
        return {"w": jax.random.normal(first, (3, 2)), "b": jax.random.uniform(second), "width": 3}

    key = jax.random.key(0, impl=impl)
    made = treescan.init_layers(init, key, 4)
    assert len(traces) == 1
    one_by_one = treescan.stack([init(each) for each in jax.random.split(key, 4)])
    chex.assert_trees_all_equal(made, one_by_one)
    chex.assert_trees_all_equal(jax.jit(lambda key: treescan.init_layers(init, key, 4)["w"])(key), made["w"])
    assert jax.eval_shape(lambda key: treescan.init_layers(init, key, 4)["w"], key).shape == (4, 3, 2)
    with jax.disable_jit():
        chex.assert_trees_all_close(treescan.init_layers(init, key, 4), made, rtol=1e-6)


@pytest.mark.devices
def test_init_with_shardings_is_traced_for_its_types_and_once_more():
    calls = []

    def init(key):
        calls.append(key)
        return jax.random.normal(key, (8,))

    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))
    for _ in range(3):
        treescan.init_layers(init, jax.random.key(0), 2, shardings=sharding)
    assert len(calls) == 2


class Function:
    """Equal to another with the same number, and changeable."""

    def __init__(self, number):
        self.number = number

    def __eq__(self, other):
        return isinstance(other, Function) and self.number == other.number

    def __hash__(self):
        return self.number


def test_a_stack_has_its_own_static_leaves():
    first, second = ({"w": X, "f": Function(1)} for _ in range(2))
    for layer in (first, second):
        stacked = treescan.stack([layer, layer])
        assert stacked["f"] is layer["f"]
        assert treescan.unstack(stacked)[1]["f"] is layer["f"]
        assert treescan.layer_at(stacked, 0)["f"] is layer["f"]
        assert treescan.set_layer(stacked, 0, layer)["f"] is layer["f"]


# Options that say how the loop is run


@pytest.mark.parametrize("counts", [(4,), (4, 4), (5, 4)], ids=str)
def test_unroll_reaches_the_loop(counts):
    def run(x, stacks):
        return treescan.fold_layers([block] * len(counts), x, stacks, unroll=2)

    stacks = [stack_of(count) for count in counts]
    (loop,) = equations(jax.make_jaxpr(run)(X, stacks).jaxpr, "scan")
    assert loop.params["unroll"] == 2


def test_what_no_block_changes_is_no_part_of_the_state():
    big = array(1000)

    def keeps(layer, x):
        return {"h": block(layer, x["h"]) + x["big"].mean(), "big": x["big"]}

    def loss(h, big, stacks):
        return jnp.sum(treescan.fold_layers([keeps, keeps], {"h": h, "big": big}, stacks, remat="step")["h"])

    program = Program(jax.grad(loss, (0, 1)), X, big, [stack_of(9), stack_of(8)])
    without = Program(jax.grad(loss, (0, 1)), X, big[:1], [stack_of(9), stack_of(8)])
    assert program.temp_bytes - without.temp_bytes < 3 * big.nbytes


@pytest.mark.parametrize("count", [32, 36])
def test_nested_remat_copies_a_chunk_and_not_the_stack(count):
    layers = stack_of(count)
    run = gradient(lambda x, layers: treescan.fold_layers(block, x, layers, remat="nested"))
    assert Program(run, X, layers).temp_bytes < 0.6 * size_of(layers)


# Nothing leaks


def test_what_was_compiled_for_a_pattern_goes_with_its_last_block():
    from treescan._loop.loop import Body

    def first(layer, x):
        return x

    stacks = [stack_of(2), stack_of(2)]
    made = [Body.of(first).memo, Body.of(first).programs]
    for _ in range(3):
        treescan.fold_layers([first, lambda layer, x: x], X, stacks)
    gc.collect()
    assert [len(memo._joint) for memo in made] == [0, 0]


def test_static_leaves_of_a_stack_are_freed():
    def use():
        held = Function(jnp.ones(4096).size)
        stacked = treescan.stack([{"w": X, "f": held}] * 2)
        treescan.set_layer(stacked, 0, treescan.layer_at(treescan.stack(treescan.unstack(stacked)), 1))
        return weakref.ref(held)

    reference = use()
    gc.collect()
    assert reference() is None


@pytest.mark.parametrize("counts", [(1,), (2, 1)], ids=str)
def test_a_stack_of_one_layer_is_recomputed_too(counts):
    """XLA removes a loop of one step: without a barrier the second computation is merged with the first."""

    def block(layer, x):
        return x + jnp.sin(jnp.tanh(x @ layer["up"])) @ layer["down"]

    blocks = [block, lambda layer, x: block(layer, x) * 2][: len(counts)]
    stacks = [{"up": jnp.ones((n, 8, 64)), "down": jnp.ones((n, 64, 8))} for n in counts]

    def tanhs(remat):
        def loss(stacks):
            x = jnp.ones((32, 8))
            return jnp.sin(treescan.fold_layers(blocks, x, stacks, remat=remat)).sum()

        text = jax.jit(jax.grad(loss)).lower(stacks).compile().as_text()
        return len(re.findall(r" tanh\(", text))

    assert tanhs("step") > tanhs(None)
