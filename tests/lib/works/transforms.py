"""JAX's transforms, each applied to an example, and to the same worth of plain steps.

`Example.run(given)` returns the leaves of what the verb returns. A transform calls it in its own way and returns
arrays; the plain steps are only evaluated and differentiated, one example after the other.
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from oracle import is_inexact

import treescan

from .example import Given

Run = Callable[[Given], list[jax.Array]]
Transform = Callable[[Run, Given], Any]


def loss(run: Run, given: Given) -> jax.Array:
    """A number in which every output counts, each with a slope of its own."""
    floats = [leaf for leaf in run(given) if is_inexact(leaf)]
    return sum((jnp.sum(jnp.sin((k + 2) * leaf)) for k, leaf in enumerate(floats)), start=jnp.float32(0))


def gradient(run: Run, given: Given) -> Any:
    return run(given), slopes(run, given)


def slopes(run: Run, given: Given) -> Any:
    return jax.grad(lambda numbers: loss(run, numbers))(given)


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
        of = slopes(run, numbers)
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


# With treescan: compiled, and run once.


def evaluated(run: Run, given: Given) -> Any:
    return run(given)


def in_jit(function: Transform, of: Callable[[Run], Run] = lambda run: run) -> Transform:
    """One of the functions above, of the leaves as another transform returns them."""
    return lambda run, given: jax.jit(functools.partial(function, of(run)))(given)


def of_two(function: Transform, of: Callable[[Run], Run] = lambda run: run) -> Transform:
    """The same over two examples."""
    return lambda run, given: in_jit(function, of)(run, both(given))


def _disable_jit(run: Run, given: Given) -> Any:
    with jax.disable_jit():
        return run(given)


def _over_devices(run: Run) -> Run:
    def one(numbers: Given) -> list[jax.Array]:
        return [leaf[None] for leaf in run(jax.tree.map(lambda leaf: leaf[0], numbers))]

    mesh, spec = Mesh(np.array(jax.devices()[:2]), ("d",)), PartitionSpec("d")
    return jax.shard_map(one, mesh=mesh, in_specs=spec, out_specs=spec)


def _in_a_scan(run: Run) -> Run:
    return lambda numbers: treescan.scan(lambda carry, one: (carry, run(one)), None, numbers)[1]


def _linear_transpose(linear: Callable[..., Any], numbers: Given) -> Any:
    return lambda cotangents: jax.linear_transpose(linear, numbers)(cotangents)[0]


def _donate(run: Run, given: Given) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        return jax.jit(run, donate_argnums=0)(jax.tree.map(jnp.copy, given))


# By hand.


def _plain_vjp(linear: Callable[..., Any], numbers: Given) -> Any:
    return lambda cotangents: jax.vjp(linear, numbers)[1](cotangents)[0]


def stacked(one: Transform) -> Transform:
    def twice(run: Run, given: Given) -> Any:
        return jax.tree.map(lambda a, b: jnp.stack([a, b]), one(run, given), one(run, second(given)))

    return twice


OF_JAX: dict[str, tuple[Transform, Transform]] = {
    "eager": (evaluated, evaluated),
    "jit": (in_jit(evaluated), evaluated),
    "disable_jit": (_disable_jit, evaluated),
    "vmap": (of_two(evaluated, jax.vmap), stacked(evaluated)),
    "grad": (in_jit(gradient), gradient),
    "jvp": (in_jit(tangent), tangent),
    "vmap of grad": (
        lambda run, given: jax.jit(jax.vmap(lambda numbers: gradient(run, numbers)[1]))(both(given)),
        stacked(slopes),
    ),
    "grad of vmap": (of_two(slopes, jax.vmap), stacked(slopes)),
    "grad of grad": (in_jit(curvature), curvature),
    "checkpoint": (in_jit(gradient, jax.checkpoint), gradient),
    "shard_map": (of_two(gradient, _over_devices), stacked(gradient)),
    "in a scan": (of_two(gradient, _in_a_scan), stacked(gradient)),
    "linear_transpose": (
        lambda run, given: transposed(run, given, _linear_transpose, jax.eval_shape),
        lambda run, given: transposed(run, given, _plain_vjp, lambda linear, numbers: linear(numbers)),
    ),
    "export": (lambda run, given: jax.export.export(jax.jit(run))(given).call(given), evaluated),
    "donate": (_donate, evaluated),
}
