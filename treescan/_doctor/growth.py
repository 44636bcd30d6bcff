"""Loops that differ in only one thing, and the cost of one more of it."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from .._verbs.scan import scan
from .lines import Line, fit

STEPS, WIDTH = 1000, 64


@dataclass(frozen=True)
class Growth:
    """How loops grow with one thing.

    Attributes:
        name: the thing, of which there is one more.
        program: the loop with so many of it, as a function of one vector.
        numbers: how many of it are measured.
        per: how many times in a run each of it is paid for.
    """

    name: str
    program: Callable[[int], Callable[[Any], Any]]
    numbers: tuple[int, ...]
    per: int


@dataclass(frozen=True)
class Found:
    """What was found of it.

    Attributes:
        name: the thing.
        seconds: how the time of a run grows with it, each time that it is paid for.
        bytes: how the memory of a run grows with it, inputs left out, likewise.
    """

    name: str
    seconds: Line
    bytes: Line


def _steps(count: int) -> Callable[[Any], Any]:
    return lambda h: scan(lambda h, _: (h * 0.5 + 1, None), h, None, count)[0]


def _saved(count: int) -> Callable[[Any], Any]:
    return jax.grad(lambda h: jnp.sum(scan(lambda h, _: (jnp.sin(h), None), h, None, count)[0]))


def _leaves(count: int) -> Callable[[Any], Any]:
    def step(leaves: list[Any], _: None) -> tuple[list[Any], None]:
        return [leaf * 0.5 + 1 for leaf in leaves], None

    return lambda h: scan(step, [h + i for i in range(count)], None, STEPS)[0]


def _outputs(count: int) -> Callable[[Any], Any]:
    def step(h: Any, _: None) -> tuple[Any, list[Any]]:
        h = h * 0.5 + 1
        return h, [h * (i + 2) for i in range(count)]

    return lambda h: scan(step, h, None, STEPS)


def _branches(count: int) -> Callable[[Any], Any]:
    def step(h: Any, _: None) -> tuple[Any, None]:
        for i in range(count):
            h = jax.lax.cond(h[i] > 1.5, lambda h: h * 0.5, lambda h: h + 1, h)
        return h * 0.5 + 1, None

    return lambda h: scan(step, h, None, STEPS)[0]


GROWTHS = (
    Growth("a step", _steps, (1000, 4000, 16000), 1),
    Growth("a step, differentiated", _saved, (500, 1000, 2000), 1),
    Growth("a leaf of the carry, per step", _leaves, (1, 8, 16), STEPS),
    Growth("a stacked output, per step", _outputs, (0, 4, 8), STEPS),
    Growth("a branch, per step", _branches, (0, 2, 4), STEPS),
)


def measure(seconds: float, growths: Sequence[Growth] = GROWTHS, *, least: int = 4) -> list[Found]:
    """Measures all of them in turn, round by round, so that quiet moments are shared by all.

    Args:
        seconds: for how long, compiling left out.
        growths: what is measured.
        least: the fewest rounds.
    """
    given = jnp.linspace(0.0, 1.0, WIDTH)
    compiled = [[jax.jit(each.program(n)).lower(given).compile() for n in each.numbers] for each in growths]
    runs = [[_timed(program, given) for program in each] for each in compiled]
    rounds: list[list[list[float]]] = [[] for _ in growths]
    _round(runs)  # the first run of a program is another
    until = time.perf_counter() + seconds
    while len(rounds[0]) < least or time.perf_counter() < until:
        for found, values in zip(rounds, _round(runs), strict=True):
            found.append(values)
    triples = zip(growths, compiled, rounds, strict=True)
    return [_found(growth, programs, values) for growth, programs, values in triples]


def _round(runs: Sequence[Sequence[Callable[[], float]]]) -> list[list[float]]:
    gc.disable()
    try:
        return [[run() for run in each] for each in runs]
    finally:
        gc.enable()


def _timed(program: Any, given: Any) -> Callable[[], float]:
    def run() -> float:
        began = time.perf_counter()
        jax.block_until_ready(program(given))
        return time.perf_counter() - began

    return run


def _found(growth: Growth, programs: Sequence[Any], rounds: Sequence[Sequence[float]]) -> Found:
    places = [float(number) for number in growth.numbers]
    bytes_ = fit(places, [[float(_bytes_of(program)) for program in programs]])
    return Found(growth.name, _each(fit(places, rounds), growth.per), _each(bytes_, growth.per))


def _each(line: Line, per: int) -> Line:
    return Line(line.base, line.slope / per, line.low / per, line.high / per)


def _bytes_of(program: Any) -> int:
    """The bytes that a run needs beside its arguments."""
    memory = program.memory_analysis()
    return int(memory.temp_size_in_bytes + memory.output_size_in_bytes)
