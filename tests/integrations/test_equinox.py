"""Modules of equinox as layers and as carries: what is no array in them, Python's numbers and flags too, is a constant.

That a stack is that of `eqx.filter_vmap`, and runs as with `eqx.partition` and `jax.lax.scan`, is in the documentation.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import treescan

N, WIDTH = 3, 2
KEY = jax.random.key(0)
KEYS = jax.random.split(KEY, N)
X = jax.random.normal(KEY, (8, WIDTH))


class Block(eqx.Module):
    linear: eqx.nn.Linear
    dropout: eqx.nn.Dropout
    gain: jax.Array
    scale: float
    residual: bool

    def __init__(self, key: jax.Array) -> None:
        self.linear = eqx.nn.Linear(WIDTH, WIDTH, key=key)
        self.dropout = eqx.nn.Dropout(0.25)
        self.gain, self.scale, self.residual = jnp.array(1.0), 0.5, True

    def __call__(self, x: jax.Array, *, key: jax.Array) -> jax.Array:
        y = self.scale * self.gain * jax.nn.tanh(jax.vmap(self.linear)(x))
        y = self.dropout(y, key=key)
        return x + y if self.residual else y


def run(block: Block, x: jax.Array, *, key: jax.Array) -> jax.Array:
    return block(x, key=key)


@pytest.mark.parametrize("made", ["init_layers", "stack"])
def test_a_stack_is_that_of_filter_vmap(made: str) -> None:
    stacked = treescan.init_layers(Block, KEY, N) if made == "init_layers" else treescan.stack(list(map(Block, KEYS)))
    assert eqx.tree_equal(stacked, eqx.filter_vmap(Block)(KEYS), typematch=True)


def test_gradients_keep_the_constants_and_are_those_of_the_layers_one_by_one() -> None:
    @eqx.filter_jit
    @eqx.filter_value_and_grad
    def folded(blocks: Block) -> jax.Array:
        return jnp.sum(jnp.sin(treescan.fold_layers(run, X, blocks, key=KEY)))

    @eqx.filter_jit
    @eqx.filter_value_and_grad
    def one_by_one(blocks: Block) -> jax.Array:
        x = X
        for i, block in enumerate(treescan.unstack(blocks)):
            x = block(x, key=jax.random.fold_in(KEY, i))
        return jnp.sum(jnp.sin(x))

    blocks = treescan.init_layers(Block, KEY, N)
    value, gradient = folded(blocks)
    assert eqx.tree_equal((value, gradient), one_by_one(blocks), typematch=True, rtol=1e-5, atol=1e-6)
    assert (gradient.scale, gradient.residual, gradient.dropout.p) == (None, None, None)
    assert np.ptp(gradient.gain) > 0  # an array is a parameter, of each layer its own


def test_modules_are_carried_as_they_are() -> None:
    def train(model: Any, x: jax.Array) -> tuple[Any, jax.Array]:  # an MLP holds functions: they stay outside
        loss, gradient = eqx.filter_value_and_grad(lambda model: jnp.mean(jax.vmap(model)(x) ** 2))(model)
        return eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, gradient)), loss

    xs = jnp.stack([X, 2 * X, 3 * X])
    model = eqx.nn.MLP(WIDTH, WIDTH, 4, 1, key=KEY)
    final, losses = treescan.scan(train, model, xs)
    for x, loss in zip(xs, losses, strict=True):
        model, expected = train(model, x)
        np.testing.assert_allclose(loss, expected, atol=1e-5)
    assert final.activation is model.activation
    np.testing.assert_allclose(final.layers[0].weight, model.layers[0].weight, atol=1e-5)


def test_a_flag_of_a_module_that_is_carried_is_an_array_and_the_error_says_what_helps() -> None:
    def step(carry: tuple[Block, jax.Array], x: Any, *, key: jax.Array) -> tuple[tuple[Block, jax.Array], jax.Array]:
        block, h = carry
        return (block, block(h, key=key)), h

    block = Block(KEY)
    with pytest.raises(
        jax.errors.TracerBoolConversionError, match=r"argument carry\[0\]\.dropout\.inference\."
    ) as caught:
        treescan.scan(step, (block, X), length=3, key=KEY)
    assert any("eqx.partition(module, eqx.is_array)" in note for note in caught.value.__notes__)

    arrays, rest = eqx.partition(block, eqx.is_array)

    def combined(carry: tuple[Block, jax.Array], x: Any, *, key: jax.Array) -> Any:
        (_, h), y = step((eqx.combine(carry[0], rest), carry[1]), x, key=key)
        return (carry[0], h), y

    def closed(h: jax.Array, x: Any, *, key: jax.Array) -> Any:
        return step((block, h), x, key=key)[0][1], h

    ours = treescan.scan(combined, (arrays, X), length=3, key=KEY)
    np.testing.assert_allclose(ours[1], treescan.scan(closed, X, length=3, key=KEY)[1], rtol=1e-6)


def test_a_module_as_a_custom_carry() -> None:
    class Doubled(eqx.Module, treescan.carries.AbstractCarry[jax.Array, jax.Array]):  # type: ignore[misc, name-defined]
        value: jax.Array

        def read(self) -> jax.Array:
            return 2 * self.value

        def write(self, returned: jax.Array, valid: jax.Array | None) -> "Doubled":
            return Doubled(returned)

    final = treescan.fold(lambda seen, x: seen + x, Doubled(jnp.ones(())), jnp.ones(3))
    assert float(final.value) == 2 * (2 * (2 + 1) + 1) + 1
