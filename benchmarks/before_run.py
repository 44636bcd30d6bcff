"""What happens before a program runs: how much work a `mask_scan` makes for JAX and XLA, against a `where` by hand.

Tracing and lowering are Python, so the calls of Python functions are counted. Compiling takes about as long as the
compiled program has instructions, so these are counted too. Both are exact. Beside them is the processor time of
tracing, lowering and compiling. The steps are every sixth of `families`, at the options that nobody chose.
"""

import dataclasses
import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

import treescan
from benchmarks._by_hand import where_scan
from benchmarks._harness import (
    Comparison,
    Distribution,
    Elsewhere,
    Measurement,
    Memory,
    MemoryMeasurement,
    off_disk,
    ratio_of,
)
from benchmarks.families import FORWARD, GRADIENT, WHERE, Family, families, gradient

EACH = 6  # of the families, one in so many
CALLS, INSTRUCTIONS, COMPILE = "calls", "instructions", "compile"


def comparisons() -> Iterator[Comparison | Memory]:
    """The comparisons of this suite."""
    yield from _of(itertools.islice(families(), EACH // 2, None, EACH))


def smoke() -> Iterator[Comparison | Memory]:
    """One step."""
    yield from _of(itertools.islice(families(), 1))


def _of(chosen: Iterator[Family]) -> Iterator[Comparison | Memory]:
    off_disk()
    for family in chosen:
        for kind in (FORWARD, GRADIENT):
            mine, by_hand = Anew(family, kind), Anew(family, kind, by_hand=True)
            name = f"{family.name}, {kind}"
            for program in (mine, by_hand):  # so that what JAX keeps of its small functions is warm for both
                program()
            yield Memory(f"{name}, {CALLS}", WHERE, mine.calls, by_hand.calls, unit="")
            yield Memory(f"{name}, {INSTRUCTIONS}", WHERE, mine.instructions, by_hand.instructions, unit="")
            yield Comparison(f"{name}, {COMPILE}", WHERE, mine, by_hand, blocks=1)


@dataclasses.dataclass(frozen=True)
class Anew(Elsewhere):
    """A program that is traced, lowered and compiled anew each time, and never run.

    Attributes:
        family: the step and its data.
        kind: forward or gradient.
        by_hand: whether it is a `where` by hand.
    """

    family: Family
    kind: str
    by_hand: bool = False

    def __call__(self) -> None:
        """Compiles it."""
        self.instructions()

    def seconds(self, calls: int) -> float:
        """The processor time of compiling it so often."""
        start = time.process_time()
        for _ in range(calls):
            self()
        return time.process_time() - start

    def calls(self) -> int:
        """How many Python functions tracing and lowering call."""
        count = 0

        def note(frame: object, event: str, argument: object) -> None:
            nonlocal count
            del frame, argument
            count += event == "call"

        sys.setprofile(note)
        try:
            self._lowered()
        finally:
            sys.setprofile(None)
        return count

    def instructions(self) -> int:
        """How many instructions the compiled program has."""
        lines = self._lowered().compile().as_text().splitlines()
        return sum(line.startswith("  ") and " = " in line for line in lines)

    def _lowered(self) -> Any:
        def scan(params: Any, init: Any, xs: Any, lengths: Array) -> Any:
            def body(carry: Any, x: Any) -> Any:
                return self.family.step(params, carry, x)

            if self.by_hand:
                return where_scan(body, init, xs, lengths)
            return treescan.mask_scan(body, init, xs, lengths=lengths)

        function = scan if self.kind == FORWARD else gradient(scan, inputs=self.family.inputs)
        full = jnp.full(self.family.rows, self.family.steps, jnp.int32)
        return jax.jit(lambda *args: function(*args)).lower(self.family.params, self.family.init, self.family.xs, full)


def distribution(measured: Sequence[Measurement | MemoryMeasurement]) -> list[Distribution]:
    """The ratios of all steps together, forward and in the gradient."""
    found: dict[str, dict[str, float]] = {}
    for each in measured:
        name, kind, what = each.name.rsplit(", ", 2)
        found.setdefault(f"{what}, {kind}", {})[name] = ratio_of(each)
    return [Distribution.of_ratios(kind, "all", found[kind]) for kind in sorted(found)]
