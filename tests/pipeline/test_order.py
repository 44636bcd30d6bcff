"""The order in which devices hold the layers of a stack."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from treescan import from_stages, to_stages


@pytest.mark.parametrize(("stages", "rounds"), [(2, 3), (4, 1), (1, 4), (2, 2), (12, 1), (3, 4)])
def test_each_device_holds_the_layers_of_its_rounds_in_turn(stages, rounds):
    stack = {"w": jnp.arange(24.0).reshape(12, 2), "key": jax.random.split(jax.random.key(0), 12), "act": jnp.tanh}
    held = to_stages(stack, stages, rounds)
    per = 12 // (stages * rounds)
    order = [
        (number * stages + device) * per + i for device in range(stages) for number in range(rounds) for i in range(per)
    ]
    np.testing.assert_array_equal(held["w"], stack["w"][np.array(order)])
    assert held["act"] is jnp.tanh
    back = from_stages(held, stages, rounds)
    np.testing.assert_array_equal(back["w"], stack["w"])
    assert (back["key"] == stack["key"]).all()


def test_numpy_stays_numpy():
    held = to_stages({"w": np.arange(8)}, 2, rounds=2)["w"]
    assert isinstance(held, np.ndarray)
    np.testing.assert_array_equal(held, [0, 1, 4, 5, 2, 3, 6, 7])


def test_a_gradient_comes_back():
    weights = jnp.arange(8.0)
    found = jax.jit(jax.grad(lambda stack: jnp.sum(to_stages(stack, 2, 2) * weights)))(weights)
    np.testing.assert_array_equal(found, from_stages(weights, 2, 2))
