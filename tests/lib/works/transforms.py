"""JAX's transforms, each applied to an example, and to the same worth of plain steps.

`Example.run(given)` returns the leaves of what the verb returns. A transform calls it in its own way and returns
arrays; the plain steps are only evaluated and differentiated, one example after the other.
"""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

import treescan

from .example import Given

Run = Callable[[Given], list[jax.Array]]


def compiled(function: Callable[..., Any], *given: Any, **options: Any) -> Any:
    """The program, run once."""
    return jax.jit(function, **options)(*given)


def is_inexact(leaf: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)


def loss(run: Run, given: Given) -> jax.Array:
    """A number in which every output counts, each with a slope of its own."""
    floats = [leaf for leaf in run(given) if is_inexact(leaf)]
    return sum((jnp.sum(jnp.sin((k + 2) * leaf)) for k, leaf in enumerate(floats)), start=jnp.float32(0))


def gradient(run: Run, given: Given) -> Any:
    return run(given), jax.grad(lambda numbers: loss(run, numbers))(given)


def direction(given: Given) -> Given:
    return jax.tree.map(jnp.cos, given)


def second(given: Given) -> Given:
    """Another example, for what maps over two."""
    return jax.tree.map(lambda leaf: -0.7 * leaf, given)


def both(given: Given) -> Given:
    return jax.tree.map(lambda a, b: jnp.stack([a, b]), given, second(given))


def tangent(run: Run, given: Given) -> Any:
    return jax.jvp(lambda numbers: [leaf for leaf in run(numbers) if is_inexact(leaf)], (given,), (direction(given),))


def curvature(run: Run, given: Given) -> Any:
    def slope(numbers: Given) -> jax.Array:
        of = jax.grad(lambda inner: loss(run, inner))(numbers)
        return sum(jnp.sum(jnp.cos(of[name]) * direction(given)[name]) for name in of)

    return jax.grad(slope)(given)


def _split(given: Given) -> tuple[Given, Given]:
    """The weights, which a linear step keeps, and what it is linear in."""
    weights = {name: leaf for name, leaf in given.items() if name in ("w", "ws")}
    return weights, {name: leaf for name, leaf in given.items() if name not in weights}


def transposed(run: Run, given: Given, transpose: Callable[..., Any], shapes: Callable[..., Any]) -> Any:
    weights, numbers = _split(given)

    def linear(moved: Given) -> list[jax.Array]:
        return [leaf for leaf in run({**weights, **moved}) if is_inexact(leaf)]

    cotangents = [jnp.cos(jnp.ones(leaf.shape)) * (k + 1) for k, leaf in enumerate(shapes(linear, numbers))]
    return transpose(linear, numbers)(cotangents)


# With treescan.


def _eager(run: Run, given: Given) -> Any:
    return run(given)


def _jit(run: Run, given: Given) -> Any:
    return compiled(run, given)


def _disable_jit(run: Run, given: Given) -> Any:
    with jax.disable_jit():
        return run(given)


def _vmap(run: Run, given: Given) -> Any:
    return compiled(jax.vmap(run), both(given))


def _grad(run: Run, given: Given) -> Any:
    return compiled(lambda numbers: gradient(run, numbers), given)


def _jvp(run: Run, given: Given) -> Any:
    return compiled(lambda numbers: tangent(run, numbers), given)


def _vmap_of_grad(run: Run, given: Given) -> Any:
    return compiled(jax.vmap(lambda numbers: gradient(run, numbers)[1]), both(given))


def _grad_of_vmap(run: Run, given: Given) -> Any:
    def total(numbers: Given) -> jax.Array:
        leaves = [leaf for leaf in jax.vmap(run)(numbers) if is_inexact(leaf)]
        return sum((jnp.sum(jnp.sin((k + 2) * leaf)) for k, leaf in enumerate(leaves)), start=jnp.float32(0))

    return compiled(jax.grad(total), both(given))


def _grad_of_grad(run: Run, given: Given) -> Any:
    return compiled(lambda numbers: curvature(run, numbers), given)


def _checkpoint(run: Run, given: Given) -> Any:
    return compiled(lambda numbers: gradient(jax.checkpoint(run), numbers), given)


def _shard_map(run: Run, given: Given) -> Any:
    mesh = Mesh(np.array(jax.devices()[:2]), ("d",))
    spec = PartitionSpec("d")

    def one(numbers: Given) -> list[jax.Array]:
        return [leaf[None] for leaf in run(jax.tree.map(lambda leaf: leaf[0], numbers))]

    return compiled(
        lambda numbers: gradient(jax.shard_map(one, mesh=mesh, in_specs=spec, out_specs=spec), numbers), both(given)
    )


def _in_a_scan(run: Run, given: Given) -> Any:
    def outer(numbers: Given) -> list[jax.Array]:
        return treescan.scan(lambda carry, one: (carry, run(one)), None, numbers)[1]

    return compiled(lambda numbers: gradient(outer, numbers), both(given))


def _linear_transpose(run: Run, given: Given) -> Any:
    def transpose(linear: Callable[..., Any], numbers: Given) -> Any:
        return lambda cotangents: jax.linear_transpose(linear, numbers)(cotangents)[0]

    return transposed(run, given, transpose, jax.eval_shape)


def _export(run: Run, given: Given) -> Any:
    return jax.export.export(jax.jit(run))(given).call(given)


def _donate(run: Run, given: Given) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        return compiled(run, jax.tree.map(jnp.copy, given), donate_argnums=0)


# By hand.


def _plain_values(run: Run, given: Given) -> Any:
    return run(given)


def _plain_vjp(linear: Callable[..., Any], numbers: Given) -> Any:
    return lambda cotangents: jax.vjp(linear, numbers)[1](cotangents)[0]


def _stacked(one: Callable[[Run, Given], Any]) -> Callable[[Run, Given], Any]:
    def twice(run: Run, given: Given) -> Any:
        return jax.tree.map(lambda a, b: jnp.stack([a, b]), one(run, given), one(run, second(given)))

    return twice


def _plain_gradient(run: Run, given: Given) -> Any:
    return gradient(run, given)[1]


def _plain_transposed(run: Run, given: Given) -> Any:
    return transposed(run, given, _plain_vjp, lambda linear, numbers: linear(numbers))


OF_JAX: dict[str, tuple[Callable[[Run, Given], Any], Callable[[Run, Given], Any]]] = {
    "eager": (_eager, _plain_values),
    "jit": (_jit, _plain_values),
    "disable_jit": (_disable_jit, _plain_values),
    "vmap": (_vmap, _stacked(_plain_values)),
    "grad": (_grad, gradient),
    "jvp": (_jvp, tangent),
    "vmap of grad": (_vmap_of_grad, _stacked(_plain_gradient)),
    "grad of vmap": (_grad_of_vmap, _stacked(_plain_gradient)),
    "grad of grad": (_grad_of_grad, curvature),
    "checkpoint": (_checkpoint, gradient),
    "shard_map": (_shard_map, _stacked(gradient)),
    "in a scan": (_in_a_scan, _stacked(gradient)),
    "linear_transpose": (_linear_transpose, _plain_transposed),
    "export": (_export, _plain_values),
    "donate": (_donate, _plain_values),
}
