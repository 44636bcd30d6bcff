"""Layers run one after the other: a Python loop over them is the oracle, for values and every gradient."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy.testing as npt
import pytest
from loops import array
from oracle import assert_close
from works import plain

import treescan

WIDTH = 4
X = array(3, WIDTH, seed=9)


def make_stack(count: int, seed: int = 0) -> Any:
    shapes = {"scale": (4,), "attention": {"q": (4, 3), "out": (3, 4)}, "mlp": (4, 4)}
    is_shape = lambda node: isinstance(node, tuple)  # noqa: E731
    return jax.tree.map(lambda shape: array(count, *shape, seed=seed), shapes, is_leaf=is_shape)


def mix(layer, x):
    h = jnp.tanh(x * (1 + layer["scale"][None] / 4)) @ layer["attention"]["q"] @ layer["attention"]["out"]
    return x + h / 4


def block(layer, x, *others, key=None):
    """What a block of any call here does: all that it is given counts."""
    x = mix(layer, x)
    for other in others:
        x = x + jnp.sin(x * other)
    if key is not None:
        x = x + jax.random.uniform(key, x.shape) / 8
    return x, {"mean": x.mean(-1), "mlp": x @ layer["mlp"]}


def other_block(layer, x, *others, key=None):
    """Another, whose outputs have other types."""
    x = jnp.cos(x) + sum((other.sum() / 8 for other in others), start=jnp.float32(0))
    return (x, (x @ layer["mlp"]).sum()) if key is None else (x + jax.random.normal(key, (WIDTH,))[None] / 8, x.sum())


def test_outputs_of_an_empty_stack_have_their_types():
    stacks = (make_stack(1), make_stack(0))
    _, (first, second) = treescan.scan_layers([block, other_block], X, stacks)
    assert [leaf.shape for leaf in jax.tree.leaves(first)] == [(1, 3), (1, 3, 4)]
    assert second.shape == (0,)


# What goes in and out


@pytest.mark.parametrize("options", [{}, {"reverse": True}, {"remat": "step"}, {"key": jax.random.key(0)}], ids=str)
def test_no_layers_return_x(options):
    layers, state = make_stack(0), jnp.zeros((0, 2))

    def folded(layer, x, *state, key=None):
        x, _ = block(layer, x, key=key)
        return (x, *state) if state else x

    def loss(x, layers):
        last, ys = treescan.scan_layers(block, x, layers, **options)
        return (last**2).sum() + sum(y.sum() for y in jax.tree.leaves(ys))

    for blocks, stacks in ((folded, layers), ([folded] * 2, [layers] * 2)):
        npt.assert_array_equal(treescan.fold_layers(blocks, X, stacks, **options), X)
    last, caches = treescan.fold_layers(folded, X, layers, state=state, **options)
    npt.assert_array_equal(last, X)
    assert caches.shape == (0, 2)
    _, ys = treescan.scan_layers(block, X, layers, **options)
    assert jax.tree.map(jnp.shape, ys) == {"mean": (0, 3), "mlp": (0, 3, 4)}
    npt.assert_array_equal(jax.grad(loss)(X, layers), 2 * X)


def test_args_that_are_no_arrays_stay_what_they_are():
    seen = []

    def step(layer, x, causal, power, name, scale, options):
        seen.append((causal, power, name, options["depth"]))
        return mix(layer, x) * scale**power if causal else x

    args = (True, 2, "attention", jnp.float32(0.5), {"depth": 3.0})
    x = treescan.fold_layers(step, X, make_stack(2), args=args)
    assert seen == [(True, 2, "attention", 3.0)]
    npt.assert_allclose(x, plain.fold_layers(step, X, make_stack(2), args=args), rtol=1e-5)


def test_other_args_are_another_program_and_equal_ones_are_not():
    calls = []

    def step(layer, x, factor):
        calls.append(factor)
        return x * factor

    for factor in (1.0, 2.0, 1, 0.0, -0.0, 1.0, math.nan):
        y = treescan.fold_layers(step, X, make_stack(2), args=(factor,))
        npt.assert_array_equal(y, X * factor * factor)
    assert repr(calls) == "[1.0, 2.0, 1, 0.0, -0.0, nan]"


def test_axes_in_a_pattern():
    stacks, own = (make_stack(3), make_stack(2, 1)), (array(3, 3, WIDTH, seed=5), array(2, 3, WIDTH, seed=6))
    x, each = plain.scan_layers([block, block], X, stacks, own)
    moved = jax.tree.map(lambda y: jnp.moveaxis(y, 0, 1), each[0])
    given = [block, block], X, stacks, (own[0], jnp.moveaxis(own[1], 0, -1))
    for out_axes in ((1, 0), [1, 0]):
        assert_close(treescan.scan_layers(*given, in_axes=(0, -1), out_axes=out_axes), (x, (moved, each[1])))


@pytest.mark.parametrize("remat", [None, "step"])
def test_weak_types_settle_in_every_block(remat):
    """The last block of a period makes floats of what another, or it itself before, hands on as it was."""

    def keeps(layer, x):
        return x

    def floats(layer, x):
        return x * layer

    for blocks, counts in (([keeps, floats], (2, 2)), ([keeps, floats], (3, 2)), ([floats, floats], (1, 1))):
        x = treescan.fold_layers(blocks, 1, [jnp.full(count, 2.0) for count in counts], remat=remat)
        assert (x, x.dtype) == (4, jnp.float32)


# What blocks are given in the place of xs, of layers, and of numbers


def test_none_in_the_place_of_xs():
    """In a pattern; alone as a default, as a block for decoding has it that is also used without a cache."""

    def attend(layer, x, cache=None):
        return mix(layer, x) + (0.0 if cache is None else cache[None])

    layers, zeros, caches = make_stack(3), jnp.zeros((3, WIDTH)), array(3, WIDTH, seed=2)
    run = functools.partial(treescan.fold_layers, remat="step")
    for nothing in ((), (None,)):
        assert_close(run(attend, X, layers, *nothing), run(attend, X, layers, zeros))
    pattern = [lambda layer, x, cache: attend(layer, x, cache)] * 2, X, [layers, layers]
    assert_close(run(*pattern, [None, caches]), run(*pattern, [zeros, caches]))


@pytest.mark.parametrize("options", [{"remat": "nested"}, {"key": jax.random.key(0)}], ids=["nested", "key"])
def test_layers_that_share_one_set_of_weights(options):
    """As in ALBERT: with `length`, layers are None."""
    seen = []

    def block(layer, x, weights, key=None):
        seen.append(layer)
        return jnp.tanh(x @ weights) + (0.0 if key is None else jax.random.normal(key, x.shape))

    def run(x, weights, layers, **more):
        return treescan.fold_layers(block, x, layers, args=(weights,), **more, **options).sum()

    derive, weights = jax.value_and_grad(run, (0, 1)), array(WIDTH, WIDTH, seed=1) / 2
    assert_close(derive(X, weights, None, length=9), derive(X, weights, jnp.zeros(9)))
    assert seen[0] is None


@pytest.mark.parametrize("options", [{}, {"remat": "step"}])
def test_a_window_that_is_branched_on_is_explained(options):
    def block(layer, x, window):
        return x if window else x + 1

    with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
        treescan.fold_layers(block, X, make_stack(3), jnp.array([0, 2, 2]), **options)
    assert any("use a pattern" in note for note in caught.value.__notes__)
    with pytest.raises(jax.errors.TracerIntegerConversionError) as caught:
        treescan.scan_layers(lambda layer, x: (x, jnp.zeros(range(9)[layer["n"]])), X, {"n": jnp.array([1, 2])})
    assert any("use a pattern" in note for note in caught.value.__notes__)
