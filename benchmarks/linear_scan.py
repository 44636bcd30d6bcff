"""`linear_scan` against the other ways to write a linear recurrence, over a grid of shapes.

A cell of the grid is a kind of numbers, a number of steps, of rows and a width, forward or the gradient. What counts is
how many times as long `linear_scan` takes as the best of three: `jax.lax.scan`, `jax.lax.associative_scan`, and
`treescan.mask_scan`, the latter against `linear_scan` with the same lengths. Every other cell is held back: nothing was
tuned on it. The order is drawn once, so that the first minutes are a sample of the grid.
"""

import functools
import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

import treescan
from benchmarks._harness import Comparison, Compiled, Distribution, Effort, Measurement, Memory, MemoryMeasurement
from benchmarks._lstm import normal

EFFORT = Effort(seconds=0.5, min_blocks=5, max_blocks=40)
MINUTES = 8
"""How long cells are drawn."""

KINDS = ("real", "complex", "matrix")
STEPS, ROWS, WIDTHS = (64, 512, 4_096, 65_536), (1, 8, 64), (1, 16, 256, 4_096)
LARGEST = 2**21
"""Cells of more numbers are left out: `associative_scan` holds tens of copies of them."""

SIDE = 4
"""A matrix has so many rows."""

TARGET = 1.05
PASSES = ("forward", "gradient")
Program = Callable[..., Array]  # factors, what is added, and lengths, to states


def comparisons() -> Iterator[Comparison]:
    """The comparisons of this suite."""
    grid = itertools.product(KINDS, STEPS, ROWS, WIDTHS, PASSES)
    cells = [cell for cell in grid if cell[1] * cell[2] * cell[3] * (SIDE if cell[0] == "matrix" else 1) <= LARGEST]
    random.Random(0).shuffle(cells)
    end = time.monotonic() + 60 * MINUTES
    for number, cell in enumerate(cells):
        if time.monotonic() < end:
            yield from _of_cell(number, *cell)


def smoke() -> Iterator[Comparison | Memory]:
    """A few small cells."""
    for number, kind in enumerate(KINDS):
        yield from _of_cell(number, kind, 8, 2, 4, PASSES[number % 2])


def distribution(measured: Sequence[Measurement | MemoryMeasurement]) -> list[Distribution]:
    """Ratios to the best of the three, of the cells that were tuned on and of those that were held back."""
    cells: dict[str, list[Measurement]] = {}
    for each in measured:
        if isinstance(each, Measurement):
            cells.setdefault(each.name, []).append(each)
    found = list[Distribution]()
    for half in ("tuned", "held back"):
        worst = [max(of_cell, key=lambda each: each.ratio.median) for name, of_cell in cells.items() if half in name]
        ratios = sorted((each.ratio.median, each.name) for each in worst)
        if not ratios:
            continue
        over, count = sum(ratio > TARGET for ratio, _ in ratios), len(ratios)
        median, p90 = (ratios[int(part * (count - 1))][0] for part in (0.5, 0.9))
        found.append(Distribution("linear_scan / best", half, count, median, p90, *ratios[-1], over, over))
    return found


def _of_cell(number: int, kind: str, steps: int, rows: int, width: int, of: str) -> Iterator[Comparison]:
    shape = (steps, rows, width)
    a, b = jax.nn.sigmoid(normal(0, shape)), normal(1, shape)
    if kind == "complex":
        a, b = a * jnp.exp(1j * normal(2, shape)), b + 1j * normal(3, shape)
    if kind == "matrix":
        a, b = 0.5 * normal(0, (*shape, SIDE, SIDE)), normal(1, (*shape, SIDE))
    own = functools.partial(treescan.linear_scan, matrix=kind == "matrix")
    times = _matrix_times if kind == "matrix" else jnp.multiply
    name = f"{'held back' if number % 2 else 'tuned'}, {kind}, {steps} x {rows} x {width}, {of}"

    def step(h: Array, x: tuple[Array, Array]) -> tuple[Array, Array]:
        h = times(x[0], h) + x[1]
        return h, h

    def associative(a: Array, b: Array) -> Array:
        def combine(one: tuple[Array, Array], two: tuple[Array, Array]) -> tuple[Array, Array]:
            together = jnp.einsum("...ij,...jk->...ik", two[0], one[0]) if kind == "matrix" else two[0] * one[0]
            return together, times(two[0], one[1]) + two[1]

        return jax.lax.associative_scan(combine, (a, b))[1]

    lengths = jnp.full(rows, steps)
    for peer_name, ours, peer in (
        ("lax.scan", own, lambda a, b: jax.lax.scan(step, jnp.zeros_like(b[0]), (a, b))),
        ("associative_scan", own, lambda a, b: (None, associative(a, b))),
        (
            "mask_scan",
            functools.partial(own, lengths=lengths),
            lambda a, b: treescan.mask_scan(step, jnp.zeros_like(b[0]), (a, b), lengths=lengths),
        ),
    ):
        mine, its = (Compiled(_jit(of, each), (a, b)) for each in (ours, peer))
        yield Comparison(name, peer_name, mine, its, tolerance=1e-3)


def _matrix_times(a: Array, h: Array) -> Array:
    return jnp.sum(a * h[..., None, :], axis=-1)


def _jit(of: str, program: Any) -> Any:
    """A new function: the states, or the gradient of the sum of their squares."""

    def loss(a: Array, b: Array) -> Array:
        return jnp.sum(jnp.abs(program(a, b)[1]) ** 2)

    return jax.jit((lambda a, b: program(a, b)[1]) if of == "forward" else jax.grad(loss, (0, 1)))
