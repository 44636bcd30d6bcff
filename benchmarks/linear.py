"""A linear recurrence, `h = a * h + x`, as a scan, as `linear_scan` and as `jax.lax.associative_scan`.

A scan takes the steps one after the other. `associative_scan` combines pairs of steps, in about 2 log2(T) rounds that
each work on many steps at once. It needs an associative operation, and holds all states at once.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

import treescan
from benchmarks._harness import Comparison, Compiled, Memory, compiling
from benchmarks._lstm import normal

STEPS, FEW_STEPS = 4_096, 8
WIDTHS = (1, 64, 4_096)
COMPILE_BLOCKS = 4
ASSOCIATIVE, SCAN = "associative_scan", "accumulate"
METHODS = ("sequential", "chunked", "parallel")
FORWARD, GRADIENT = "forward", "gradient"

Program = Callable[[Array, Array], Array]  # decays and inputs [T, N] to states [T, N]


def comparisons() -> Iterator[Comparison | Memory]:
    """The comparisons of this suite."""
    yield from _all(STEPS, WIDTHS, COMPILE_BLOCKS)


def smoke() -> Iterator[Comparison | Memory]:
    """The same with few steps."""
    yield from _all(FEW_STEPS, WIDTHS[:1], 1)


def _all(steps: int, widths: tuple[int, ...], blocks: int) -> Iterator[Comparison | Memory]:
    for width in widths:
        given = jax.nn.sigmoid(normal(0, (steps, width))), normal(1, (steps, width))
        for kind in (FORWARD, GRADIENT):
            ours, peer = Compiled(_jit(kind, _scan), given), Compiled(_jit(kind, _associative), given)
            if width == widths[0]:
                yield Comparison(f"control, {kind}", "itself", ours, ours)
                mine, its = (compiling(functools.partial(_jit, kind, each), given) for each in (_scan, _associative))
                yield Comparison(f"compile, {kind}", ASSOCIATIVE, mine, its, blocks=blocks)
            for method in METHODS:
                own = Compiled(_jit(kind, functools.partial(_linear, method)), given)
                yield Comparison(f"{width:,} wide, {kind}, linear_scan, {method}", SCAN, own, ours)
                name = f"{width:,} wide, memory, {kind}, linear_scan, {method}"
                yield Memory(name, SCAN, own.temporaries, ours.temporaries)
            yield Comparison(f"{width:,} wide, {kind}", ASSOCIATIVE, ours, peer, details={"steps": float(steps)})
            yield Memory(f"{width:,} wide, memory, {kind}", ASSOCIATIVE, ours.temporaries, peer.temporaries)


def _scan(decays: Array, xs: Array) -> Array:
    def step(state: Array, inputs: tuple[Array, Array]) -> Array:
        decay, x = inputs
        return decay * state + x

    return treescan.accumulate(step, jnp.zeros_like(xs[0]), (decays, xs))


def _linear(method: Any, decays: Array, xs: Array) -> Array:
    return treescan.linear_scan(decays, xs, method=method)[1]


def _associative(decays: Array, xs: Array) -> Array:
    def combine(one: tuple[Array, Array], two: tuple[Array, Array]) -> tuple[Array, Array]:
        (a, x), (b, y) = one, two
        return a * b, b * x + y

    return jax.lax.associative_scan(combine, (decays, xs))[1]


def _jit(kind: str, program: Program) -> Any:
    """A new function: the states, or the gradient of the sum of their squares."""

    def loss(decays: Array, xs: Array) -> Array:
        return jnp.sum(program(decays, xs) ** 2)

    return jax.jit((lambda *given: program(*given)) if kind == FORWARD else jax.grad(loss, argnums=(0, 1)))
