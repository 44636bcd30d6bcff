"""The families of steps on a GPU: every fifth one of `families`, against the same peers.

All programs are compiled before anything is timed, many at once, so that the suite takes minutes: compilers of GPU
programs time kernels on the device. Products are computed in full precision, by all peers, since results are compared.
On a CPU this suite has no comparisons, and its results are left alone.
"""

import dataclasses
import functools
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import families
from benchmarks._harness import Comparison, Distribution, Effort, Measurement, Memory, MemoryMeasurement

EVERY = 5  # one family in so many
EFFORT = Effort(seconds=0.4, min_blocks=5, max_blocks=30)


def comparisons() -> Iterator[Comparison | Memory]:
    """The comparisons of this suite."""
    if jax.default_backend() != "cpu":
        yield from _compiled(itertools.islice(families.families_by_half(), 0, None, EVERY))


def smoke() -> Iterator[Comparison | Memory]:
    """One family, on any device."""
    yield from _compiled(itertools.islice(families.families_by_half(), 4, 5))


def distribution(measured: Sequence[Measurement | MemoryMeasurement]) -> list[Distribution]:
    """What all of these families say together."""
    return [each for each in families.distribution(measured) if each.of == "all"]


def _compiled(chosen: Iterable[tuple[families.Family, bool]]) -> Iterator[Comparison | Memory]:
    """The comparisons of some families, whose programs are compiled before the first of them is yielded."""
    with jax.default_matmul_precision("highest"):
        found = list(families.of(chosen))
        timed = (each for each in found if isinstance(each, Comparison))
        runs: list[Any] = [run for each in timed for run in (each.candidate, each.peer)]
        programs = {id(run.func): run for run in runs}
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for compiled in [pool.submit(run.func.prepare(*run.args)) for run in programs.values()]:
                compiled.result()
    for each in found:
        yield each
        if isinstance(each, Comparison) and each.against == families.WHERE and f", {families.FULL}, " in each.name:
            yield _mostly_padding(each)


def _mostly_padding(full: Comparison) -> Comparison:
    """The same programs on rows nine tenths of which are padding: for information."""

    def short(run: Any) -> functools.partial[Any]:
        *args, lengths = run.args
        return functools.partial(run.func, *args, jnp.maximum(lengths // 10, 1))

    name = full.name.replace(f", {families.FULL}, ", ", a tenth, ")
    return dataclasses.replace(
        full, name=name, target=None, candidate=short(full.candidate), peer=short(full.peer), slack_seconds=None
    )
