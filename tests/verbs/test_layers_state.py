"""What each layer reads and writes: `state` of the verbs over layers, against a Python loop over the layers."""

import functools
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.testing as npt
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array, Float
from loops import array
from oracle import assert_close
from works import plain

import treescan
from treescan.carries import Window

WIDTH = 4
X = array(3, WIDTH)


class Cache(NamedTuple):
    sums: Float[Array, "*layers rows width"]
    seen: Float[Array, "*layers width"]


def stack_of(count, seed=0):
    return {"w": array(count, WIDTH, WIDTH, seed=seed) / 2}


def states_of(count, seed=5):
    return Cache(array(count, 3, WIDTH, seed=seed), array(count, WIDTH, seed=seed + 1))


def fold_block(layer, x, state):
    x = jnp.tanh(x @ layer["w"] + state.seen[None])
    return x, Cache(state.sums * 0.5 + x, state.seen + x.mean(0) * state.seen)


@pytest.mark.parametrize("reverse", [False, True])
def test_a_block_without_a_state_in_a_pattern(reverse):
    def without(layer, x, state):
        assert state is None
        return jnp.tanh(x @ layer["w"]), None

    given, state = ([without, fold_block], X, [stack_of(3), stack_of(2, 1)]), [None, states_of(2)]
    options = {"state": state, "reverse": reverse}
    assert_close(treescan.fold_layers(*given, **options), plain.fold_layers(*given, **options))


def test_keys_and_flags_and_static_leaves_are_states():
    kinds = []

    def block(layer, x, state):
        kinds.append(state.get("kind"))
        key, own = jax.random.split(state["key"])
        x = jnp.where(state["on"], x @ layer["w"] + jax.random.normal(own, x.shape), x)
        return x, state | {"key": key, "on": ~state["on"]}

    state = {"key": jax.random.split(jax.random.key(0), 3), "on": jnp.array([True, False, True])}
    x, new = treescan.fold_layers(block, X, stack_of(3), state=state | {"kind": "cache"})
    assert new.pop("kind") == kinds[0] == "cache"
    assert_close((x, new), plain.fold_layers(block, X, stack_of(3), state=state))


def test_custom_carries_are_states():
    """The last inputs of each layer: a window shows them, and is given the newest."""

    def block(layer, x, lags):
        return jnp.tanh(x @ layer["w"]) + lags.mean(0), x

    layers, state = stack_of(3), treescan.stack([Window(array(2, 3, WIDTH, seed=i)) for i in range(3)])
    x, new = treescan.fold_layers(block, X, layers, state=state)
    want, of_each = X, []
    for i in range(3):
        lags = state.values[i]
        of_each.append(jnp.concatenate([lags[1:], want[None]]))
        want, _ = block(treescan.layer_at(layers, i), want, lags)
    assert_close(x, want)
    assert isinstance(new, Window)
    npt.assert_allclose(new.values, jnp.stack(of_each), rtol=1e-6)


def test_annotations_of_states_hold():
    def block(layer: dict, x: Float[Array, "rows width"], state: Cache) -> tuple[Float[Array, "rows width"], Cache]:
        return fold_block(layer, x, state)

    treescan.fold_layers(block, X, stack_of(3), state=states_of(3))
    with pytest.raises(treescan.errors.SignatureError, match=r"state\.sums"):
        treescan.fold_layers(block, X, stack_of(3), state=Cache(jnp.zeros((3, 3, 5)), jnp.zeros((3, WIDTH))))


def test_a_decode_loop_carries_what_comes_back():
    """Lists stay lists: what comes back has the structure of what was given."""
    layers, states = [stack_of(2), stack_of(2, 1)], [states_of(2), states_of(2, 7)]

    def step(caches, x):
        x, caches = treescan.fold_layers([fold_block, fold_block], x, layers, state=caches)
        return caches, x

    treescan.scan(step, states, jnp.stack([X, X]))
    treescan.scan(step, states, jnp.stack([X, X]), length=2)


# What it costs.


def wide(n, size):
    return {"k": jnp.zeros((n, size, WIDTH)), "v": jnp.zeros((n, size, WIDTH))}


def cached(layer, x, cache, position):
    put = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=position, axis=0)
    cache = {"k": put(cache["k"], x @ layer["w"]), "v": put(cache["v"], x)}
    return x + jax.nn.softmax(x @ cache["k"].T) @ cache["v"], cache


def ours_of(x, layers, caches, position):
    blocks = [cached] * len(layers) if isinstance(layers, list) else cached
    return treescan.fold_layers(blocks, x, layers, state=caches, args=(position,))


@pytest.mark.parametrize("counts", [(8,), (8, 8), (8, 7)], ids=str)
def test_a_donated_cache_is_written_in_place(counts):
    size, layers = 2000, [stack_of(n) for n in counts]
    caches = [wide(n, size) for n in counts]
    if len(counts) == 1:
        (layers,), (caches,) = layers, caches
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(caches))
    compiled = jax.jit(ours_of, donate_argnums=2).lower(X, layers, caches, jnp.int32(3)).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= whole
    assert memory.temp_size_in_bytes < whole / 4
    shapes = "|".join(re.escape(f"f32[{n},{size},{WIDTH}]") for n in counts)
    assert not re.search(rf"= (?:{shapes})\S* copy\(", compiled.as_text())


def test_memory_of_a_pattern_is_that_of_the_loop_by_hand():
    """The layers of a period have one number among them, which XLA is to see."""
    places, n = 4, 6

    def hand(x, layers, caches, position):
        def step(carry, one):
            x, caches = carry
            i, layers = one
            for place in range(places):
                cache = jax.tree.map(lambda s: jax.lax.dynamic_index_in_dim(s, i, keepdims=False), caches[place])
                x, cache = cached(layers[place], x, cache, position)
                put = functools.partial(jax.lax.dynamic_update_index_in_dim, index=i, axis=0)
                caches = [*caches[:place], jax.tree.map(put, caches[place], cache), *caches[place + 1 :]]
            return (x, caches), None

        return jax.lax.scan(step, (x, caches), (jnp.arange(n), layers))[0]

    given = X, [stack_of(n, i) for i in range(places)], [wide(n, 2000)] * places, jnp.int32(3)
    runs = [jax.jit(f, donate_argnums=2) for f in (ours_of, hand)]
    found, by_hand = (run.lower(*given).compile().memory_analysis().temp_size_in_bytes for run in runs)
    assert found <= 1.05 * by_hand + 256
    assert_close(jax.jit(ours_of)(*given), jax.jit(hand)(*given))


def test_a_state_that_no_layer_changes_is_not_written():
    def block(layer, x, state):
        return x @ layer["w"] + state[None], state

    text = str(jax.make_jaxpr(lambda s: treescan.fold_layers(block, X, stack_of(3), state=s))(array(3, WIDTH)))
    assert "dynamic_update_slice" not in text


def test_recomputed_layers_save_no_stack_of_states_for_each():
    size, n = 512, 12
    given = X, stack_of(n), wide(n, size)

    def saved(remat):
        run = functools.partial(treescan.fold_layers, cached, remat=remat, args=(jnp.int32(2),))
        kept = jax.eval_shape(lambda *given: jax.vjp(lambda *a: run(*a[:2], state=a[2]), *given)[1], *given)
        return sum(np.prod(leaf.shape) for leaf in jax.tree.leaves(kept))

    whole = sum(leaf.size for leaf in jax.tree.leaves(given[2]))
    assert saved("step") < 1.5 * whole
    assert saved("nested") < 1.5 * whole


def attending(layer, x, state):
    x = jnp.tanh(x @ layer["w"]) + state
    return x, state + x


@pytest.mark.devices
@pytest.mark.parametrize(("axis_type", "remat"), [(AxisType.Auto, "step"), (AxisType.Explicit, None)])
def test_states_whose_rows_lie_on_several_devices(axis_type, remat):
    layers, x, state = stack_of(3), array(8, WIDTH), array(3, 8, WIDTH, seed=3)
    want = jax.jit(lambda *given: plain.fold_layers(attending, *given[:2], state=given[2]))(x, layers, state)
    mesh = jax.make_mesh((2,), ("rows",), axis_types=(axis_type,))
    with jax.set_mesh(mesh):
        find_rows = NamedSharding(mesh, PartitionSpec("rows")), NamedSharding(mesh, PartitionSpec(None, "rows"))
        x, state = jax.device_put(x, find_rows[0]), jax.device_put(state, find_rows[1])
        layers = jax.device_put(layers, NamedSharding(mesh, PartitionSpec()))
        run = jax.jit(lambda *given: treescan.fold_layers(attending, *given[:2], state=given[2], remat=remat))
        found = run(x, layers, state)
        assert "all-gather" not in run.lower(x, layers, state).compile().as_text()
    assert_close(found, want)
    assert found[1].sharding.is_equivalent_to(find_rows[1], 3)
