"""Modules of equinox as layers: what is no array in them, Python's numbers and flags too, is a constant."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import treescan

N, WIDTH = 4, 3
KEY = jax.random.key(0)
KEYS = jax.random.split(KEY, N)
X, Y = jax.random.normal(KEY, (2, 8, WIDTH))


class Block(eqx.Module):
    linear: eqx.nn.Linear
    dropout: eqx.nn.Dropout
    norm: eqx.nn.LayerNorm
    gain: jax.Array
    scale: float = 0.5
    residual: bool = True

    def __init__(self, key: jax.Array) -> None:
        self.linear = eqx.nn.Linear(WIDTH, WIDTH, key=key)
        self.dropout = eqx.nn.Dropout(0.25)
        self.norm = eqx.nn.LayerNorm(WIDTH)
        self.gain = jnp.array(1.0)

    def __call__(self, x: jax.Array, *, key: jax.Array) -> jax.Array:
        y = self.scale * self.gain * jax.nn.tanh(jax.vmap(self.linear)(jax.vmap(self.norm)(x)))
        y = self.dropout(y, key=key)
        return x + y if self.residual else y


def stacks() -> dict[str, Block]:
    return {
        "init_layers": treescan.init_layers(Block, KEY, N),
        "stack": treescan.stack([Block(key) for key in KEYS]),
        "filter_vmap": eqx.filter_vmap(Block)(KEYS),
    }


def run(block: Block, x: jax.Array, *, key: jax.Array) -> jax.Array:
    return block(x, key=key)


def folded(blocks: Block, x: jax.Array, key: jax.Array) -> jax.Array:
    return treescan.fold_layers(run, x, blocks, key=key)


def scanned(blocks: Block, x: jax.Array, key: jax.Array) -> jax.Array:
    """As equinox's documentation has it."""
    arrays, static = eqx.partition(blocks, eqx.is_array)

    def step(x: jax.Array, layer: Any) -> tuple[jax.Array, None]:
        arrays, i = layer
        return eqx.combine(arrays, static)(x, key=jax.random.fold_in(key, i)), None

    return jax.lax.scan(step, x, (arrays, jnp.arange(N)))[0]


def train(forward: Any, blocks: Block) -> tuple[Block, list[jax.Array]]:
    optimizer = optax.adamw(1e-2)
    state = optimizer.init(eqx.filter(blocks, eqx.is_inexact_array))

    @eqx.filter_jit
    def update(blocks: Block, state: Any, key: jax.Array) -> tuple[Block, Any, jax.Array]:
        @eqx.filter_value_and_grad
        def loss(blocks: Block) -> jax.Array:
            return jnp.mean((forward(blocks, X, key) - Y) ** 2)

        value, gradient = loss(blocks)
        updates, state = optimizer.update(gradient, state, eqx.filter(blocks, eqx.is_inexact_array))
        return eqx.apply_updates(blocks, updates), state, value

    losses = []
    for i in range(10):
        blocks, state, value = update(blocks, state, jax.random.key(i))
        losses.append(value)
    return blocks, losses


@pytest.mark.parametrize("made", ["init_layers", "stack"])
def test_a_stack_is_that_of_filter_vmap(made: str) -> None:
    assert eqx.tree_equal(stacks()[made], stacks()["filter_vmap"], typematch=True)


@pytest.mark.slow
def test_training_keeps_the_constants_and_is_filter_vmap_and_lax_scan_bit_for_bit() -> None:
    with jax.numpy_dtype_promotion("standard"):  # for optax
        blocks, losses = train(folded, stacks()["init_layers"])
        expected, expected_losses = train(scanned, stacks()["filter_vmap"])
    assert (blocks.scale, blocks.residual, blocks.norm.eps) == (0.5, True, 1e-5)
    assert (blocks.dropout.p, blocks.dropout.inference) == (0.25, False)
    assert losses[-1] < losses[0]
    assert np.asarray(losses).tobytes() == np.asarray(expected_losses).tobytes()
    assert eqx.tree_equal(blocks, expected, typematch=True)
    assert np.ptp(blocks.gain) > 0  # an array is a parameter, of each layer its own


def test_inference_mode_is_a_flag_of_the_program() -> None:
    blocks = eqx.nn.inference_mode(stacks()["stack"])
    y = folded(blocks, X, KEY)
    np.testing.assert_array_equal(y, folded(blocks, X, jax.random.key(1)))
    x = X
    for block in treescan.unstack(blocks):
        assert block.dropout.inference is True
        x = block(x, key=KEY)
    np.testing.assert_allclose(y, x, rtol=1e-5)


def test_patterns_and_stacks_that_lead() -> None:
    blocks = [stacks()["filter_vmap"], treescan.stack([Block(key) for key in KEYS[:3]])]
    x, sums = treescan.scan_layers([lambda b, x, *, key: (b(x, key=key), x.sum())] * 2, X, blocks, key=KEY)
    assert (x.shape, [y.shape for y in sums]) == (X.shape, [(4,), (3,)])
