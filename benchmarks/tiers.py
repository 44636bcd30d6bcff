"""How many tiers of rows `compact` should have for steps that are large to compile: compile time against run time.

The steps are rounds of those of `families`: each has more than 100 equations, from which on `compact=True` has few
tiers. Compiling is tracing, lowering and compiling, against a `where` by hand; it does not depend on the lengths.
Running is against seven tiers. Three kinds of lengths have the same longest row. Both are processor time, so that other
work on the machine counts little, and a program is compiled once: families differ more than repetitions. Six steps run
forward, and one of them in the gradient too, because its seven tiers take ten seconds or more to compile.
"""

import dataclasses
import functools
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import treescan
from benchmarks._by_hand import where_scan
from benchmarks._harness import Comparison, Elsewhere, off_disk
from benchmarks.families import FORWARD, GRADIENT, Family, families, gradient

STEPS, ROWS = 256, 64
WHERE, SEVEN = "where by hand", "seven tiers"
TIERS: dict[str, bool | tuple[int, ...]] = {  # the numbers of rows beside all of them
    "1 tier": False,
    "2 tiers": (ROWS // 4,),
    "3 tiers": (ROWS // 16, ROWS // 2),
    "3 tiers with a quarter": (ROWS // 16, ROWS // 4),
    "4 tiers": (ROWS // 16, ROWS // 4, ROWS // 2),
    "7 tiers": (1, 2, 4, 8, 16, 32),
}
ROUNDS = {  # how many of a family make a step, and whether its gradient is compiled too
    "GRU, two layers": (3, True),
    "CTC": (2, False),
    "RK4 of a network": (6, False),
    "weighted averages": (4, False),
    "Kalman filter, 4 states": (2, False),
    "8 leaves of many shapes": (2, False),
}
CHOSEN, MOST_COMPILING, MOST_RUNNING = "3 tiers", 5.0, 1.15  # targets of the default; the second but for Pareto
UNIFORM, LOGNORMAL, PARETO = "uniform", "lognormal", "pareto"
BLOCKS = 2


def comparisons() -> Iterator[Comparison]:
    """The comparisons of this suite."""
    yield from _of(ROUNDS, STEPS, tuple(TIERS))


def smoke() -> Iterator[Comparison]:
    """One step, with one tier and with two."""
    yield from _of({"GRU, two layers": (1, False)}, 4, ("1 tier", "2 tiers"))


def _of(chosen: dict[str, tuple[int, bool]], steps: int, sets: Sequence[str]) -> Iterator[Comparison]:
    off_disk()
    found = {family.name: family for family in families() if family.name in chosen}
    programs = [(name, FORWARD) for name in chosen] + [(name, GRADIENT) for name, (_, too) in chosen.items() if too]
    for name, kind in programs:
        family = on_rows(found[name], chosen[name][0], steps)
        yield from _compare(family, kind, sets, control=(name, kind) == programs[0])


def _compare(family: Family, kind: str, sets: Sequence[str], *, control: bool) -> Iterator[Comparison]:
    """One program: what its sets of tiers take to compile, and to run with each kind of lengths."""
    Compiled(family, kind, None)()  # so that what JAX keeps of its small functions is warm for all
    lengths = lengths_by_name(family.steps)
    by_hand = Compiled(family, kind, None)
    made = {name: Compiled(family, kind, TIERS[name]) for name in sets}
    for name, program in made.items():
        target = MOST_COMPILING if name == CHOSEN else None
        yield Comparison(f"{family.name}, {kind}, {name}, compile", WHERE, program, by_hand, target, blocks=1)
    seven = made[sets[-1]]
    for of_rows, values in lengths.items():
        peer = Running(seven, values)
        if control:
            yield Comparison(f"control, {of_rows}", "itself", peer, peer, blocks=BLOCKS)
        for name in sets[:-1]:
            target = MOST_RUNNING if name == CHOSEN and of_rows != PARETO else None
            mine = Running(made[name], values)
            yield Comparison(f"{family.name}, {kind}, {name}, {of_rows}", SEVEN, mine, peer, target, blocks=BLOCKS)


@dataclasses.dataclass(frozen=True)
class Compiled(Elsewhere):
    """A program that is compiled once. The clock tells how long that took.

    Attributes:
        family: the step and its data.
        kind: forward or gradient.
        tiers: `compact`, or None for a `where` by hand.
    """

    family: Family
    kind: str
    tiers: bool | tuple[int, ...] | None

    def __call__(self) -> None:
        """Compiles it, if that was not done before."""
        _ = self.executable

    def seconds(self, calls: int) -> float:
        """The processor time of compiling."""
        return self.executable[1] * calls

    @functools.cached_property
    def executable(self) -> tuple[Any, float]:
        """What runs it, and the seconds of processor time that compiling it took."""

        def scan(params: Any, init: Any, xs: Any, lengths: Array) -> Any:
            body = functools.partial(self.family.step, params)
            if self.tiers is None:
                return where_scan(body, init, xs, lengths)
            return treescan.mask_scan(body, init, xs, lengths=lengths, compact=self.tiers)

        function = scan if self.kind == FORWARD else gradient(scan, inputs=self.family.inputs)
        full = jnp.full(self.family.rows, self.family.steps, jnp.int32)
        args = self.family.params, self.family.init, self.family.xs, full
        start = time.process_time()
        compiled = jax.jit(function).lower(*args).compile()
        return compiled, time.process_time() - start


@dataclasses.dataclass(frozen=True)
class Running(Elsewhere):
    """A compiled program on some lengths, timed by processor time."""

    program: Compiled
    lengths: Array

    def __call__(self) -> Any:
        """Runs it."""
        family, (compiled, _) = self.program.family, self.program.executable
        return compiled(family.params, family.init, family.xs, self.lengths)

    def seconds(self, calls: int) -> float:
        """Runs it `calls` times."""
        start = time.process_time()
        for _ in range(calls):
            jax.block_until_ready(self())
        return time.process_time() - start


def on_rows(family: Family, rounds: int, steps: int) -> Family:
    """A step that is some rounds of another's, on `ROWS` rows, which repeat those of the family."""

    def step(params: Any, carry: Any, x: Any) -> tuple[Any, Any]:
        carry, y = family.step(params, carry, x)
        for _ in range(rounds - 1):
            carry, y = family.step(params, carry, x)
        return carry, y

    init = jax.tree.map(lambda leaf: _repeated(leaf, ROWS, 0), family.init)
    xs = jax.tree.map(lambda leaf: _repeated(_repeated(leaf, ROWS, 1), steps, 0), family.xs)
    return dataclasses.replace(family, step=step, init=init, xs=xs)


def _repeated(leaf: Array, count: int, axis: int) -> Array:
    return jnp.asarray(np.take(np.asarray(leaf), np.arange(count) % leaf.shape[axis], axis))


def lengths_by_name(steps: int) -> dict[str, Array]:
    """Of `ROWS` rows, the longest of which has all steps: the quantiles of each distribution, in an order by chance."""
    parts = (np.arange(ROWS) + 0.5) / ROWS
    normal = np.asarray([statistics.NormalDist().inv_cdf(part) for part in parts])
    drawn = {UNIFORM: parts, LOGNORMAL: np.exp(0.75 * normal), PARETO: (1 - parts) ** (-1 / 1.5)}
    order = np.random.default_rng(0).permutation(ROWS)
    return {name: jnp.asarray(np.ceil(sizes / sizes.max() * steps)[order], jnp.int32) for name, sizes in drawn.items()}
