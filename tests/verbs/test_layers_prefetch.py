"""`prefetch`: the weights of the next layer are gathered while one is computed, in the gradient too."""

import functools
import gc
import re
import weakref

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hlo import Program
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from loops import array
from sharded_layers import FSDP, HIDDEN, LAYERS, WIDTH, X, assert_right, block, both, gathered, loss, mesh_of, on, stack

import treescan

LAYER_BYTES = 4 * (2 * WIDTH * HIDDEN + WIDTH)


def same(layer):
    return layer


@functools.cache
def compiled(kind, **options):
    """The gradient on eight devices, which leaves it where the stack is."""
    mesh = mesh_of(kind)
    layers, x = stack(on(mesh, FSDP)), jax.device_put(X, NamedSharding(mesh, P("d")))
    places = jax.tree.map(lambda leaf: leaf.sharding, (layers, x))
    with jax.set_mesh(mesh):
        auto = {"out_shardings": (None, places)} if kind is AxisType.Auto else {}
        step = jax.jit(lambda layers, x: both(layers, x, **options), **auto)
        return Program(step, layers, x), step(layers, x), layers


# The program


def ancestors(lines, name):
    """All instructions that one needs, within its computation."""
    needs, found, todo = {}, set(), [name]
    for line in lines:
        own, _, rest = line.strip().removeprefix("ROOT ").partition(" = ")
        needs[own] = re.findall(r"%[\w.\-]+", rest)
    while todo:
        for other in needs.get(todo.pop(), ()):
            if other in needs and other not in found:
                found.add(other)
                todo.append(other)
    return found


def of_kind(lines, program, *kinds):
    """The names of instructions of these kinds, by themselves or within what they call."""

    def text(line):
        return "\n".join([line, *map(program._text, program._called(line))])

    return {
        line.strip().removeprefix("ROOT ").partition(" = ")[0]
        for line in lines
        if " while(" not in line and any(re.search(rf" {kind}\(", text(line)) for kind in kinds)
    }


def bodies(program):
    """The lines of the body of each loop that gathers something."""
    found = [re.search(r"body=(%[\w.\-]+)", line) for line in program if " while(" in line]
    lines = [program._computations[match[1]] for match in found if match]
    return [body for body in lines if of_kind(body, program, "all-gather")]


def waits(program):
    """For each loop whether a gather waits for a product, and whether a product waits for a gather."""
    answers = []
    for body in bodies(program):
        gathers, products = of_kind(body, program, "all-gather"), of_kind(body, program, "dot")
        assert gathers
        assert products
        answers.append(
            (
                any(ancestors(body, gather) & products for gather in gathers),
                any(ancestors(body, product) & gathers for product in products),
            )
        )
    return answers


def gathered_layer(layer, x):
    whole = jax.tree.map(lambda leaf: jax.lax.with_sharding_constraint(leaf, P()), layer)
    return block(whole, x)


@pytest.mark.parametrize("kind", [AxisType.Auto, pytest.param(AxisType.Explicit, marks=pytest.mark.slow)], ids=str)
@pytest.mark.devices
def test_no_gather_waits_for_a_layer_and_no_layer_for_a_gather_of_its_round(kind):
    program, found, layers = compiled(kind, prefetch=1)
    assert waits(program) == [(False, False)] * 2  # forwards, and backwards
    assert_right(found, layers)


@pytest.mark.devices
def test_two_layers_are_gathered_at_a_time_and_no_stack():
    """One more than without it, where each layer waits for its gather."""
    ahead, _, _ = compiled(AxisType.Auto, prefetch=1)
    plain, _, _ = compiled(AxisType.Auto, block=gathered_layer, remat="step")
    assert waits(plain) == [(False, True)] * 2
    assert gathered(ahead)
    assert all(shape[0] != LAYERS for shape in gathered(ahead))
    assert ahead.temp_bytes - plain.temp_bytes <= 1.1 * LAYER_BYTES
    assert ahead.temp_bytes < LAYERS * LAYER_BYTES


@pytest.mark.devices
def test_under_shard_map_by_a_function():
    """FSDP by hand: what each device is given of a layer is gathered, and its gradient scattered."""
    mesh, specs = mesh_of(), {"up": P(None, "d"), "down": P(None, None, "d"), "scale": P()}

    def gather(layer):
        up = jax.lax.all_gather(layer["up"], "d", tiled=True)
        down = jax.lax.all_gather(layer["down"], "d", axis=1, tiled=True)
        return {**layer, "up": up, "down": down}

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(specs, P("d")), out_specs=P())
    def local_loss(layers, x):
        y = treescan.fold_layers(block, x, layers, prefetch=gather)
        return jax.lax.pmean(jnp.mean(y**2), "d")

    assert_right(jax.jit(jax.value_and_grad(local_loss, (0, 1)))(stack(), X))


# Values and gradients


def test_a_function_may_change_types():
    """Weights are kept as int8, with a scale that is trained; numbers among xs and states have no cotangent either."""

    def init(key):
        return {"w": jax.random.randint(key, (WIDTH, WIDTH), -99, 99, jnp.int8), "scale": jnp.full(WIDTH, 1e-3)}

    def unpacked(layer):
        return {**layer, "w": layer["w"].astype(jnp.float32) * layer["scale"][None]}

    def counting(layer, x, own, state):
        new = {"h": state["h"] + x.mean(0), "calls": state["calls"] + own["number"]}
        return jnp.tanh(x @ layer["w"]) + own["shift"][None] + state["h"][None], new

    layers = treescan.init_layers(init, jax.random.key(0), LAYERS)
    shift, h = array(LAYERS, WIDTH), array(LAYERS, WIDTH, seed=1)
    given = {"x": X, "scale": layers["scale"], "shift": shift, "h": h}

    def run(given, block, **options):
        own = {"shift": given["shift"], "number": jnp.arange(LAYERS)}
        state = {"h": given["h"], "calls": jnp.zeros(LAYERS, int)}
        stack = {**layers, "scale": given["scale"]}
        x, new = treescan.fold_layers(block, given["x"], stack, own, state=state, **options)
        return x.sum() + (new["h"] ** 2).sum(), new["calls"]

    derive = jax.value_and_grad(run, has_aux=True)
    ours = derive(given, counting, prefetch=unpacked)
    want = derive(given, lambda layer, *others: counting(unpacked(layer), *others))
    chex.assert_trees_all_close(ours, want, rtol=1e-4, atol=1e-6)


def test_what_all_layers_share_has_its_gradient():
    """Under `jax.grad` a Python number of the stack is an array without a layer axis."""

    def scaled(layer, x):
        return x + layer["gain"] * jnp.tanh(x @ layer["w"])

    layers = {"w": array(LAYERS, WIDTH, WIDTH) / 6, "gain": 0.5, "name": "mlp", "bias": 2}

    def run(numbers, **options):
        return treescan.fold_layers(scaled, X, {**layers, **numbers}, **options).sum()

    numbers = {"w": layers["w"], "gain": 0.5}
    ours = jax.grad(functools.partial(run, prefetch=lambda layer: {**layer, "gain": layer["gain"] * 1}))(numbers)
    chex.assert_trees_all_close(ours, jax.grad(run)(numbers), rtol=1e-4, atol=1e-5)


def test_a_single_layer():
    layers = jax.tree.map(lambda leaf: leaf[:1], stack())
    want = both(layers, X)
    chex.assert_trees_all_close(both(layers, X, prefetch=same), want, rtol=1e-5, atol=1e-7)
    one_block = treescan.fold_layers([block], X, [layers], prefetch=same, remat=["step"])
    np.testing.assert_allclose(jnp.mean(one_block**2), want[0], rtol=1e-5)


def test_under_disable_jit_each_layer_is_gathered_before_it_runs():
    seen = []

    def gather(layer):
        seen.append(type(layer["up"]))
        return layer

    with jax.disable_jit():
        y = treescan.fold_layers(block, X, stack(), prefetch=gather)
    assert len(seen) == LAYERS
    assert not any(issubclass(kind, jax.core.Tracer) for kind in seen)
    np.testing.assert_allclose(y, treescan.fold_layers(block, X, stack()), rtol=1e-5, atol=1e-6)


def test_forward_mode_of_a_gradient():
    layers = jax.tree.map(lambda leaf: leaf[:2], stack())
    ours, want = (
        jax.jvp(jax.grad(functools.partial(loss, layers, **more)), (X,), (jnp.cos(X),))
        for more in ({"prefetch": same}, {})
    )
    chex.assert_trees_all_close(ours, want, rtol=1e-4, atol=1e-6)


def test_an_eager_call_is_kept_and_goes_with_its_block():
    traces = []

    def counted(layer, x):
        traces.append(1)
        return block(layer, x)

    def gather(layer):
        return layer

    for _ in range(3):
        treescan.fold_layers(counted, X, stack(), prefetch=gather)
    jax.grad(functools.partial(loss, stack(), block=counted, prefetch=gather))(X)
    assert len(traces) <= 2
    refs = weakref.ref(counted), weakref.ref(gather)
    del counted, gather
    gc.collect()
    assert [ref() for ref in refs] == [None, None]


def gated(layer, h):
    """A block whose derivative compares each entry of the state with the largest."""
    z, r = jax.nn.sigmoid(h @ layer["v"] + 0.1), jax.nn.sigmoid(h @ layer["u"])
    h = (1 - z) * h + z * jnp.tanh(r * (h @ layer["w"]) + 0.3)
    return 2 * h / jnp.max(jnp.abs(h), axis=-1, keepdims=True)


@pytest.mark.devices
def test_the_gradient_decides_nothing_again():
    """In the backward loop, a layer and its derivative are one computation, which XLA may round in two ways."""
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    keys = jax.random.split(jax.random.key(0), 4)
    stack = {name: 0.3 * jax.random.normal(key, (LAYERS, 16, 16)) for name, key in zip("wvu", keys, strict=False)}
    stack = jax.device_put(stack, NamedSharding(mesh, P(None, "d")))
    x = jax.device_put(jax.random.normal(keys[3], (16, 16)), NamedSharding(mesh, P("d")))
    with jax.set_mesh(mesh):
        got, want = (
            jax.jit(jax.grad(functools.partial(loss, block=gated, **options), (0, 1)))(stack, x)
            for options in ({"prefetch": same}, {})
        )
    chex.assert_trees_all_close(got, want, rtol=1e-3, atol=1e-5)
