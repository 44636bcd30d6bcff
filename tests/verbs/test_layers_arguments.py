"""What blocks are given: nothing in the place of xs, weights that all layers share, values that are no arrays."""

import jax
import jax.numpy as jnp
import numpy.testing as npt
import pytest
from loops import array

import treescan

WIDTH = 4
X = array(3, WIDTH)
WEIGHTS = {"w": array(WIDTH, WIDTH, seed=1) / 2}


def stack_of(count, seed=0):
    return {"w": array(count, WIDTH, WIDTH, seed=seed) / 2}


def attend(layer, x, cache):
    return jnp.tanh(x @ layer["w"] + (0.0 if cache is None else cache[None]))


@pytest.mark.parametrize("remat", [None, "step"])
def test_a_block_with_and_without_a_cache(remat):
    caches, layers = array(3, WIDTH, seed=2), stack_of(3)
    want = X
    for layer in treescan.unstack(layers):
        want = attend(layer, want, None)
    npt.assert_allclose(treescan.fold_layers(attend, X, layers, remat=remat), want, rtol=1e-5)
    npt.assert_allclose(treescan.fold_layers(attend, X, layers, None, remat=remat), want, rtol=1e-5)
    want = X
    for layer, cache in zip(treescan.unstack(layers), caches, strict=True):
        want = attend(layer, attend(layer, want, None), cache)
    pattern, stacks = [attend, attend], [layers, layers]
    npt.assert_allclose(treescan.fold_layers(pattern, X, stacks, [None, caches], remat=remat), want, rtol=1e-5)


@pytest.mark.parametrize("options", [{}, {"remat": "step"}, {"remat": "nested"}, {"key": jax.random.key(0)}], ids=str)
def test_layers_that_share_one_set_of_weights(options):
    """As in ALBERT."""

    def block(layer, x, weights, key=None):
        assert layer is None
        noise = 0.0 if key is None else jax.random.normal(key, x.shape)
        return jnp.tanh(x @ weights["w"]) + noise

    def ours(x, weights):
        return treescan.fold_layers(block, x, None, args=(weights,), length=9, **options).sum()

    def theirs(x, weights):
        for i in range(9):
            key = {"key": jax.random.fold_in(options["key"], i)} if "key" in options else {}
            x = block(None, x, weights, **key)
        return x.sum()

    for got, want in zip(*(jax.tree.leaves(jax.grad(f, (0, 1))(X, WEIGHTS)) for f in (ours, theirs)), strict=True):
        npt.assert_allclose(got, want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"remat": "step"}])
def test_a_window_that_is_branched_on_is_explained(options):
    def block(layer, x, window):
        return x if window else x + 1

    with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
        treescan.fold_layers(block, X, stack_of(3), jnp.array([0, 2, 2]), **options)
    assert any("use a pattern" in note for note in caught.value.__notes__)
    with pytest.raises(jax.errors.TracerIntegerConversionError) as caught:
        treescan.scan_layers(lambda layer, x: (x, jnp.zeros(range(9)[layer["n"]])), X, {"n": jnp.array([1, 2])})
    assert any("use a pattern" in note for note in caught.value.__notes__)
