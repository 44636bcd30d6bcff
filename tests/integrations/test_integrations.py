"""Modules of flax.nnx as carries: a plugin of treescan."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jaxprs import equations, num_consts

import treescan
from scripts import printed
from treescan.carries import cast, stop_gradient
from treescan.integrations.nnx import ModuleCarry
from treescan.testing import check_carry

XS = jnp.asarray(np.random.default_rng(0).normal(size=(7, 4, 3)), jnp.float32)


class Tied(nnx.Module):
    """A layer under two names, a statistic, a counter and dropout."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(3, 3, rngs=rngs)
        self.second = self.first
        self.norm = nnx.BatchNorm(3, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.calls[...] += 1
        return self.dropout(self.norm(self.second(self.first(x))))


def step(module: Tied, x: jax.Array) -> tuple[Tied, jax.Array]:
    y = module(x)
    return module, y


def loop(module: Tied) -> tuple[Tied, jax.Array]:
    ys = [module(x) for x in XS]
    return module, jnp.stack(ys)


def leaves(tree: Any) -> list[np.ndarray]:
    arrays = jax.tree.leaves(nnx.state(tree))
    keys = (jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in arrays)
    return [np.asarray(x) for x in keys]


@pytest.mark.parametrize(("options", "jit"), [({}, False), ({"remat": "nested"}, True)], ids=["plain", "nested"])
def test_a_module_is_what_it_is_in_a_loop(options: dict[str, Any], jit: bool) -> None:
    def run(module: Tied) -> tuple[Tied, jax.Array]:
        return treescan.scan(step, module, XS, **options)

    final, ys = (nnx.jit(run) if jit else run)(Tied(nnx.Rngs(0)))
    expected, expected_ys = loop(Tied(nnx.Rngs(0)))
    np.testing.assert_allclose(ys, expected_ys, atol=1e-5)
    for a, b in zip(leaves(final), leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("wrap", [None, cast, stop_gradient])
def test_what_is_tied_stays_tied_and_the_caller_keeps_his_own(wrap: Any) -> None:
    def shift(module: Tied, _: jax.Array) -> tuple[Tied, jax.Array]:
        module.first.bias[...] += 1.0
        return module, module.second.bias[...]

    own = Tied(nnx.Rngs(0))
    final, biases = treescan.scan(shift, own if wrap is None else wrap(own), XS)
    np.testing.assert_array_equal(biases[:, 0], np.arange(1.0, 8.0))
    module = final if wrap is None else final.read()
    assert type(module) is Tied and module.first is module.second
    assert not own.first.bias[...].any()


def test_training_steps_in_a_scan() -> None:
    def train(carry: tuple[nnx.Linear, nnx.Optimizer], x: jax.Array) -> tuple[Any, jax.Array]:
        model, optimizer = carry
        loss, gradient = nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)
        optimizer.update(model, gradient)
        return (model, optimizer), loss

    def fresh() -> tuple[nnx.Linear, nnx.Optimizer]:
        model = nnx.Linear(3, 3, rngs=nnx.Rngs(1))
        return model, nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)

    (model, optimizer), losses = treescan.scan(train, fresh(), XS)
    carry, expected = fresh(), []
    for x in XS:
        carry, loss = train(carry, x)
        expected.append(loss)
    np.testing.assert_allclose(losses, jnp.stack(expected), atol=1e-5)
    np.testing.assert_allclose(model.kernel[...], carry[0].kernel[...], atol=1e-5)
    assert int(optimizer.step[...]) == 7


def test_parameters_are_constants_of_the_loop() -> None:
    def apply(carry: tuple[nnx.Linear, jax.Array], _: None) -> tuple[Any, None]:
        model, h = carry
        return (model, jnp.tanh(model(h))), None

    model, h = nnx.Linear(3, 3, rngs=nnx.Rngs(0)), jnp.ones((2, 3))
    jaxpr = jax.make_jaxpr(lambda h: treescan.scan(apply, (model, h), length=3)[0][1])(h)
    (scan,) = equations(jaxpr.jaxpr, "scan")
    assert num_consts(scan) == 2


def test_a_module_is_shared_by_all_rows() -> None:
    def normalise(module: nnx.BatchNorm, x: jax.Array) -> tuple[nnx.BatchNorm, jax.Array]:
        y = module(x)
        return module, y

    final, _ = treescan.mask_scan(normalise, nnx.BatchNorm(3, rngs=nnx.Rngs(0)), XS, lengths=jnp.full(4, 3))
    module = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    for x in XS[:3]:
        module(x)
    np.testing.assert_allclose(final.mean[...], module.mean[...], atol=1e-6)


@pytest.mark.slow
def test_a_module_keeps_the_laws_of_carries() -> None:
    graph, state = nnx.split(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
    modules = nnx.vmap(lambda key: nnx.Linear(2, 2, rngs=nnx.Rngs(key)))(jax.random.split(jax.random.key(0), 4))
    check_carry(ModuleCarry(state, graph), modules)


def test_a_module_of_another_structure() -> None:
    def grow(module: nnx.Linear, x: jax.Array) -> tuple[nnx.Linear, None]:
        module.extra = nnx.Param(x)
        return module, None

    with pytest.raises(treescan.errors.PluginError, match="Create all of them before the scan"):
        treescan.scan(grow, nnx.Linear(3, 3, rngs=nnx.Rngs(0)), XS)
    with pytest.raises(treescan.errors.PluginError, match="instead of the module that it was given"):
        treescan.scan(lambda module, x: (x, None), nnx.Linear(3, 3, rngs=nnx.Rngs(0)), XS)


@pytest.mark.parametrize("name", ["flax", "nnx"])
def test_without_flax_it_says_how_to_install_it(name: str) -> None:
    tried = f"try: import treescan.integrations.{name}\nexcept ImportError as error: print(error)"
    found = printed("-c", f"import sys; sys.modules['flax'] = None\n{tried}")
    assert "needs flax, which is not installed. `pip install 'treescan[flax]'` installs it." in found
