"""The gradient of a maximum under `jax.checkpoint` alone, and under `remat`.

The derivative of a maximum compares each entry with the maximum. The backward
pass computes the entries again. XLA computes them twice, in two fusions that
round differently, so that no entry is equal to the maximum.
See https://github.com/jax-ml/jax/issues/40564.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

import treescan

Scan = Callable[[Callable[..., Any]], Any]


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


weights = {name: 0.3 * normal(i, 16, 16) for i, name in enumerate("wvu")}
h0, xs = normal(3, 8, 16), normal(4, 64, 8, 16)


def gradient(scan: Scan) -> dict[str, jax.Array]:
    def loss(weights: dict[str, jax.Array]) -> jax.Array:
        # a GRU, and the largest entry of its state
        def step(h: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            z = jax.nn.sigmoid(h @ weights["v"] + x)
            r = jax.nn.sigmoid(h @ weights["u"] + x)
            new = jnp.tanh(r * (h @ weights["w"]) + x)
            h = (1 - z) * h + z * new
            return h, jnp.max(jnp.abs(h), axis=-1)

        return jnp.sum(jnp.sin(scan(step)[1]))

    return jax.jit(jax.grad(loss))(weights)


def errors() -> Iterator[tuple[str, float]]:
    """How far gradients are from that of `jax.lax.scan`."""
    exact = gradient(lambda step: jax.lax.scan(step, h0, xs))
    ways: dict[str, Scan] = {
        "jax.checkpoint": lambda step: jax.lax.scan(
            jax.checkpoint(step), h0, xs
        ),
        'remat="step"': lambda step: treescan.scan(
            step, h0, xs, remat="step"
        ),
    }
    for name, scan in ways.items():
        apart = jax.tree.map(
            lambda a, b: jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b)),
            gradient(scan),
            exact,
        )
        yield name, float(max(jax.tree.leaves(apart)))


if __name__ == "__main__":
    for name, error in errors():
        print(f"{name}: off by {error:.0e} of the largest entry")
