"""Modules of flax.nnx as layers: what a block changes in them is returned, or is an error."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import treescan
import treescan.integrations.nnx
from treescan.errors import BodyError

N, D = 3, 2
KEY = jax.random.key(0)
H = jax.random.normal(KEY, (4, D))


class Layer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(D, D, rngs=rngs)
        self.norm = nnx.BatchNorm(D, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.dropout(nnx.relu(self.norm(self.linear(x))))


def make(key: jax.Array) -> Layer:
    return Layer(nnx.Rngs(key))


def stacked(*, training: bool = True) -> Layer:
    layers = treescan.init_layers(make, KEY, N)
    layers.train() if training else layers.eval()
    return layers


def one_by_one(layers: Layer) -> tuple[jax.Array, jax.Array]:
    """The layers in a Python loop: the last x, and the means that their norms hold then."""
    x, means = H, []
    for layer in treescan.unstack(layers):
        x = layer(x)
        means.append(layer.norm.mean[...])
    return x, jnp.stack(means)


def run(layer: Layer, x: jax.Array) -> jax.Array:
    return layer(x)


def with_y(layer: Layer, x: jax.Array) -> Any:
    return layer(x), x.mean()


def shared(layer: Any, x: jax.Array, module: Layer) -> jax.Array:
    return module(x) + layer


def noisy(layer: Any, x: jax.Array, rngs: nnx.Rngs) -> jax.Array:
    return x + jax.random.normal(rngs(), x.shape)


def making(layer: Layer, x: jax.Array) -> jax.Array:
    layer.mean = nnx.Intermediate(x.mean())
    return x


def in_remat(layer: Layer, x: jax.Array) -> jax.Array:
    return nnx.remat(run)(layer, x)


def in_both(layer: Layer, x: jax.Array) -> jax.Array:
    return nnx.jit(in_remat)(layer, x)


CHANGED = {"norm.mean": "BatchStat", "norm.var": "BatchStat", "dropout.rngs.count": "RngCount"}
VERBS = {
    "fold_layers": lambda: treescan.fold_layers(run, H, stacked()),
    "scan_layers": lambda: treescan.scan_layers(with_y, H, stacked()),
    "pattern": lambda: treescan.fold_layers([run, run], H, [stacked(training=False), stacked()]),
    "jit": lambda: nnx.jit(lambda layers: treescan.fold_layers(run, H, layers))(stacked()),
    "grad": lambda: nnx.grad(lambda layers: treescan.fold_layers(run, H, layers).sum())(stacked()),
    "scan": lambda: treescan.scan(lambda x, layer: (layer(x), None), H, stacked()),
    "both in the block": lambda: treescan.fold_layers(in_both, H, stacked()),
}


@pytest.mark.parametrize(
    ("call", "disable"), [pytest.param(call, name.startswith("scan"), id=name) for name, call in VERBS.items()]
)
def test_changes_that_would_be_lost_are_refused(call: Any, disable: bool) -> None:
    with jax.disable_jit(disable), pytest.raises(BodyError) as caught:
        call()
    text = str(caught.value)
    for path, kind in CHANGED.items():
        assert re.search(rf"^  layer\.{path} +{kind} +changed$", text, re.MULTILINE), text
    assert "linear" not in text
    assert "`treescan.integrations.nnx.scan`" in text


def test_modules_that_all_layers_share() -> None:
    zeros = jnp.zeros((N, 1, D))
    with pytest.raises(BodyError, match=r"module\.norm\.mean +BatchStat +changed"):
        treescan.fold_layers(shared, H, zeros, args=(make(KEY),))
    with pytest.raises(BodyError, match=r"rngs.*count +RngCount +changed"):
        treescan.fold_layers(noisy, H, zeros, args=(nnx.Rngs(0),))
    with pytest.raises(BodyError, match=r"module\.norm\.mean +BatchStat +changed"):
        treescan.fold_layers(shared, H, zeros, stacked())


def test_variables_that_a_block_makes() -> None:
    with pytest.raises(BodyError, match=r"layer\.mean +Intermediate +new"):
        treescan.fold_layers(making, H, stacked(training=False))


@pytest.mark.parametrize(("block", "options"), [(run, {"unroll": 2}), (in_both, {"remat": "step"})])
def test_a_block_that_changes_nothing_runs(block: Any, options: Any) -> None:
    """Transforms of nnx write each variable anew, which is no change."""
    layers = stacked(training=False)
    expected, _ = one_by_one(layers)
    np.testing.assert_allclose(treescan.fold_layers(block, H, layers, **options), expected, rtol=1e-5)


def test_changes_that_are_returned_are_the_users() -> None:
    def block(layer: Layer, x: jax.Array) -> Any:
        x = layer(x)
        return x, nnx.state(layer, (nnx.BatchStat, nnx.RngCount))

    x, state = treescan.scan_layers(block, H, stacked())
    expected, means = one_by_one(stacked())
    np.testing.assert_allclose(x, expected, rtol=1e-5)
    np.testing.assert_allclose(state["norm"]["mean"][...], means, rtol=1e-5)


def test_a_carry_of_a_module_beside_modules() -> None:
    def block(layer: Layer, carry: Any) -> Any:
        x, counter = carry
        counter[...] += 1
        return in_remat(layer, x), counter

    _, counter = treescan.fold_layers(block, (H, nnx.Variable(jnp.int32(0))), stacked(training=False))
    assert int(counter[...]) == N


def test_a_module_is_traced_once_where_nothing_is_to_be_told() -> None:
    calls = []

    def block(layer: Layer, x: jax.Array) -> jax.Array:
        calls.append(1)
        return layer(x)

    treescan.fold_layers(block, H, stacked(training=False))
    assert len(calls) == 1
