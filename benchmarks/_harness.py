"""Times a candidate against its peer in interleaved runs, and records the ratio of the two.

On a shared machine two programs timed one after the other differ by more than what is to be
measured. So both run in one process, in blocks of `A B B A` and `B A A B` by turns: each block
gives one ratio, `(a1 + a2) / (b1 + b2)`, in which a drift of the clock speed cancels. What is
reported is the median of these ratios, and their spread.
"""

import abc
import contextlib
import dataclasses
import datetime
import functools
import gc
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import chex
import jax
import numpy as np
from jax.experimental.compilation_cache import compilation_cache

Thunk = Callable[[], object]

PACKAGES = {name: name for name in ("treescan", "jax", "jaxlib", "numpy", "flax", "equinox", "torch", "tqdm")}
PACKAGES["jax_tqdm"] = "jax-tqdm"
PACKAGES["haiku"] = "dm-haiku"  # by the name of the import, that of the distribution
SETTLE = 0.02  # seconds; after its work a thread pool spins on for some ms, on the cores that the other process needs


class Elsewhere(abc.ABC):
    """A function that runs in another process, and is timed there."""

    @abc.abstractmethod
    def __call__(self) -> object:
        """Runs it and brings its result here; only the check of the results does so."""

    @abc.abstractmethod
    def seconds(self, calls: int) -> float:
        """Runs it `calls` times and leaves its results there.

        Returns:
            Seconds for all calls together, by that process's clock.
        """


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Two functions that do the same work.

    Attributes:
        name: what is compared; unique in its suite.
        against: what the peer is, in words.
        candidate: runs treescan. What it returns is waited for and must equal what `peer` returns.
        peer: runs what treescan is compared with.
        target: the largest acceptable median ratio; None if the comparison is for information.
        details: numbers that describe the data, written to the results as they are.
        blocks: how many to measure at most, one call a sample: for functions that take seconds. None leaves this to the
            `Effort`.
        peer_result: brings what `peer` returns into the form of what `candidate` returns, for the check alone.
        tolerance: by how much results may differ, as a part of the largest entry of each array.
        slack_seconds: how much longer than the peer, by the medians of a call, the candidate may take even where the
            ratio is above the target: for loops so short that a constant time per call decides the ratio.
    """

    name: str
    against: str
    candidate: Thunk
    peer: Thunk
    target: float | None = None
    details: Mapping[str, float] = dataclasses.field(default_factory=dict[str, float])
    blocks: int | None = None
    peer_result: Callable[[Any], object] = lambda result: result
    tolerance: float = 1e-4
    slack_seconds: float | None = None


@dataclasses.dataclass(frozen=True)
class Memory:
    """Two amounts of memory, or two counts. They are exact, so they are read once.

    Attributes:
        name: what is compared; unique in its suite.
        against: what the peer is, in words.
        candidate: gives the bytes that treescan needs, or another count.
        peer: gives those of what it is compared with.
        target: the largest acceptable ratio; None if it is for information.
        unit: "MB", in which bytes are shown, or "" for a count.
    """

    name: str
    against: str
    candidate: Callable[[], int]
    peer: Callable[[], int]
    target: float | None = None
    unit: str = "MB"


@dataclasses.dataclass(frozen=True, eq=False)
class Compiled:
    """A program on its inputs, compiled when first used.

    Attributes:
        jitted: the program, under `jax.jit`.
        inputs: what it is compiled for and called with.
    """

    jitted: Any
    inputs: tuple[Any, ...]

    def __call__(self) -> Any:
        """Runs it."""
        return self._executable(*self.inputs)

    def temporaries(self) -> int:
        """The bytes it allocates beside its inputs and results."""
        return self._executable.memory_analysis().temp_size_in_bytes

    def allocated(self) -> int:
        """The same, with its results."""
        return self.temporaries() + self._executable.memory_analysis().output_size_in_bytes

    @functools.cached_property
    def _executable(self) -> Any:
        return self.jitted.lower(*self.inputs).compile()


def compiling(make: Callable[[], Any], inputs: tuple[Any, ...]) -> Thunk:
    """Traces, lowers and compiles what `make` returns, a new function under `jax.jit` each time."""

    def compile_anew() -> None:
        make().lower(*inputs).compile()

    return compile_anew


@dataclasses.dataclass(frozen=True)
class Effort:
    """How long to measure.

    Attributes:
        seconds: spent on each comparison, about.
        sample_seconds: the least time of one sample; faster functions are called repeatedly.
        min_blocks: measured even where that takes longer than `seconds`.
        max_blocks: measured at most.
    """

    seconds: float = 8.0
    sample_seconds: float = 2e-3
    min_blocks: int = 15
    max_blocks: int = 300


QUICK = Effort(seconds=0.1, sample_seconds=0.0, min_blocks=2, max_blocks=2)


@dataclasses.dataclass(frozen=True)
class Spread:
    """The quantiles of a sample."""

    p10: float
    p25: float
    median: float
    p75: float
    p90: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread":
        """The quantiles of `values`."""
        return cls(*(float(q) for q in np.percentile(list(values), (10, 25, 50, 75, 90))))


@dataclasses.dataclass(frozen=True)
class Measurement:
    """What was measured for one `Comparison`.

    Attributes:
        name: see `Comparison`.
        against: see `Comparison`.
        target: see `Comparison`.
        details: see `Comparison`.
        passed: whether the median ratio is within the target or the difference within the slack; None without a target.
        ratio: the candidate's time over the peer's, one ratio a block.
        candidate_seconds: one call of the candidate.
        peer_seconds: one call of the peer.
        blocks: how many ratios were measured.
        calls_per_sample: how many calls were timed together; four samples make a block.
        slack_seconds: see `Comparison`.
    """

    name: str
    against: str
    target: float | None
    details: Mapping[str, float]
    passed: bool | None
    ratio: Spread
    candidate_seconds: Spread
    peer_seconds: Spread
    blocks: int
    calls_per_sample: int
    slack_seconds: float | None = None


@dataclasses.dataclass(frozen=True)
class MemoryMeasurement:
    """What was read for one `Memory`; the first four attributes are as in `Measurement`, the last as in `Memory`."""

    name: str
    against: str
    target: float | None
    passed: bool | None
    ratio: float
    candidate_bytes: int
    peer_bytes: int
    unit: str = "MB"


@dataclasses.dataclass(frozen=True)
class Distribution:
    """What many comparisons of one kind say together.

    Attributes:
        kind: what was compared.
        of: which of them.
        count: how many.
        median: of their ratios; of times, these are medians themselves.
        p90: the ratio that nine in ten do not exceed.
        worst: the largest ratio.
        worst_name: what it is a ratio of.
        over: how many ratios are above their target.
        missed: how many of these are outside of the slack too.
    """

    kind: str
    of: str
    count: int
    median: float
    p90: float
    worst: float
    worst_name: str
    over: int
    missed: int

    @classmethod
    def of_ratios(
        cls, kind: str, of: str, ratios: Mapping[str, float], *, over: int = 0, missed: int = 0
    ) -> "Distribution":
        """That of ratios by names."""
        spread, worst = Spread.of(ratios.values()), max(ratios, key=ratios.__getitem__)
        return cls(kind, of, len(ratios), spread.median, spread.p90, ratios[worst], worst, over, missed)


def ratio_of(measured: Measurement | MemoryMeasurement) -> float:
    """The ratio of what was measured; of times, the median."""
    return measured.ratio.median if isinstance(measured, Measurement) else measured.ratio


def measure(comparison: Comparison, effort: Effort) -> Measurement:
    """Times one comparison.

    Args:
        comparison: the two functions.
        effort: how long to measure.

    Returns:
        The ratios and times.

    Raises:
        AssertionError: the two functions return different values.
    """
    candidate, peer, target = comparison.candidate, comparison.peer, comparison.target
    assert_trees_agree(candidate(), comparison.peer_result(peer()), comparison.tolerance)  # also compiles both
    blocks, calls = _amount(comparison, effort)
    times: list[tuple[float, float]] = []
    with _garbage_apart():
        for block in range(blocks):
            times.append(_block(candidate, peer, calls, candidate_first=block % 2 == 0))
            gc.collect()
    ratio = Spread.of(a / b for a, b in times)
    candidate_seconds, peer_seconds = (Spread.of(seconds) for seconds in zip(*times, strict=True))
    slack = comparison.slack_seconds
    within = slack is not None and candidate_seconds.median - peer_seconds.median <= slack
    return Measurement(
        name=comparison.name,
        against=comparison.against,
        target=target,
        details=comparison.details,
        passed=None if target is None else ratio.median <= target or within,
        ratio=ratio,
        candidate_seconds=candidate_seconds,
        peer_seconds=peer_seconds,
        blocks=blocks,
        calls_per_sample=calls,
        slack_seconds=slack,
    )


def measure_memory(memory: Memory) -> MemoryMeasurement:
    """Reads two amounts of memory."""
    candidate, peer, target = memory.candidate(), memory.peer(), memory.target
    ratio = candidate / peer
    passed = None if target is None else ratio <= target
    return MemoryMeasurement(memory.name, memory.against, target, passed, ratio, candidate, peer, memory.unit)


def assert_trees_agree(candidate: object, peer: object, tolerance: float = 1e-4) -> None:
    """Raises AssertionError unless the leaves agree to 1e-3, or to 1e-4 (`tolerance`) of the largest value of the leaf.

    The second is for sums over many steps: what cancels there leaves a rounding error of the size of the terms.
    """
    chex.assert_trees_all_equal_structs(candidate, peer)
    for (path, ours), theirs in zip(jax.tree.leaves_with_path(candidate), jax.tree.leaves(peer), strict=True):
        largest = float(np.max(np.abs(theirs), initial=0))
        where = f"at {jax.tree_util.keystr(path)}"
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=tolerance * largest, err_msg=where)


def run_suite(
    name: str,
    comparisons: Iterable[Comparison | Memory],
    effort: Effort,
    results: Path | None,
    distribution: Callable[[Sequence[Measurement | MemoryMeasurement]], Sequence[Distribution]] = lambda measured: (),
) -> bool:
    """Measures a suite, prints a table and writes `<results>/<name>.json`, unless nothing can be measured here.

    Args:
        name: the suite's name.
        comparisons: drawn one at a time, so that the data of one need not outlive it.
        effort: how long to measure.
        results: the folder to write to; None writes nothing.
        distribution: what many comparisons say together, from all that was measured; printed and written after them.

    Returns:
        Whether every target was met.
    """
    print(f"\n{name}\n{_HEADER}\n{'-' * len(_HEADER)}")
    report = {"suite": name, **environment()}
    measurements: list[Measurement] = []
    memory: list[MemoryMeasurement] = []
    for comparison in comparisons:
        if isinstance(comparison, Memory):
            memory.append(measure_memory(comparison))
            print(_memory_row(memory[-1]), flush=True)
        else:
            measurements.append(measure(comparison, effort))
            print(_row(measurements[-1]), flush=True)
    distributions = distribution([*measurements, *memory])
    if distributions:
        print("\n" + "\n".join([_DISTRIBUTION_HEADER, *map(_distribution_row, distributions)]))
    if results is not None and (measurements or memory):
        report["comparisons"] = [dataclasses.asdict(m) for m in measurements]
        if memory:
            report["memory"] = [dataclasses.asdict(m) for m in memory]
        if distributions:
            report["distribution"] = [dataclasses.asdict(d) for d in distributions]
        results.mkdir(parents=True, exist_ok=True)
        (results / f"{name}.json").write_text(json.dumps(report, indent=2) + "\n")
    return all(m.passed is not False for m in (*measurements, *memory))


def off_disk() -> None:
    """Turns JAX's persistent cache off, where the user's environment turned it on."""
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # JAX looks at the setting once


def environment() -> dict[str, object]:
    """The date, hardware and versions that a result depends on."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "hardware": {
            "cpu": _cpu_model(),
            "cores": os.cpu_count(),
            "load_average": os.getloadavg()[0],  # other work on the machine, before the suite ran
            "device": f"{jax.default_backend()}: {jax.devices()[0].device_kind}",
        },
        "versions": {
            "python": platform.python_version(),
            **{package: _version(package) for name, package in PACKAGES.items() if importlib.util.find_spec(name)},
        },
    }


def _amount(comparison: Comparison, effort: Effort) -> tuple[int, int]:
    """How many blocks to measure, and how many calls in each of their samples."""
    if comparison.blocks is not None:
        return min(comparison.blocks, effort.max_blocks), 1
    slowest = max(_seconds(function, 3) for function in (comparison.candidate, comparison.peer))
    calls = max(1, math.ceil(effort.sample_seconds / slowest))
    blocks = round(effort.seconds / (4 * calls * slowest))
    return min(max(blocks, effort.min_blocks), effort.max_blocks), calls


def _block(candidate: Thunk, peer: Thunk, calls: int, *, candidate_first: bool) -> tuple[float, float]:
    """Seconds a call of the candidate and of the peer, from one block of four samples."""
    first, second = (candidate, peer) if candidate_first else (peer, candidate)
    f1, s1, s2, f2 = (_seconds(function, calls) for function in (first, second, second, first))
    outer, inner = (f1 + f2) / 2, (s1 + s2) / 2
    return (outer, inner) if candidate_first else (inner, outer)


def _seconds(function: Thunk, calls: int) -> float:
    """Seconds a call, until its result is there."""
    if isinstance(function, Elsewhere):
        time.sleep(SETTLE)
        seconds = function.seconds(calls) / calls
        time.sleep(SETTLE)
        return seconds
    start = time.perf_counter()
    for _ in range(calls):
        jax.block_until_ready(function())
    return (time.perf_counter() - start) / calls


@contextlib.contextmanager
def _garbage_apart() -> Generator[None]:
    """Turns the garbage collector off; freezing what is alive makes `gc.collect` cheap."""
    enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if enabled:
            gc.enable()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "from a source tree"  # importable, but not installed


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


_HEADER = f"{'comparison':<38} {'against':<28} {'treescan':>10} {'peer':>10} {'ratio':>7} {'p10':>6} {'p90':>6} target"


def _row(m: Measurement) -> str:
    details = "".join(f"  {name} {value:.4g}" for name, value in m.details.items())
    return (
        f"{m.name:<38} {m.against:<28} {_milliseconds(m.candidate_seconds):>10}"
        f" {_milliseconds(m.peer_seconds):>10} {m.ratio.median:>7.3f} {m.ratio.p10:>6.3f}"
        f" {m.ratio.p90:>6.3f} {_target(m):<12}{details}"
    ).rstrip()


def _memory_row(m: MemoryMeasurement) -> str:
    ours, its = (_amount_of(count, m.unit) for count in (m.candidate_bytes, m.peer_bytes))
    return (f"{m.name:<38} {m.against:<28} {ours:>10} {its:>10} {m.ratio:>7.3f} {'':>6} {'':>6} {_target(m)}").rstrip()


_DISTRIBUTION_HEADER = (
    f"{'distribution':<28} {'of':<10} {'count':>6} {'median':>7} {'p90':>7} {'worst':>7} {'over':>5} {'missed':>6}"
)


def _distribution_row(d: Distribution) -> str:
    return (
        f"{d.kind:<28} {d.of:<10} {d.count:>6} {d.median:>7.3f} {d.p90:>7.3f} {d.worst:>7.3f} {d.over:>5}"
        f" {d.missed:>6}  {d.worst_name}"
    )


def _target(m: Measurement | MemoryMeasurement) -> str:
    return "" if m.target is None else f"{m.target:.3f} {'ok' if m.passed else 'MISSED'}"


def _milliseconds(seconds: Spread) -> str:
    return f"{seconds.median * 1e3:.3f} ms"


def _amount_of(count: int, unit: str) -> str:
    return f"{count / 1e6:.2f} {unit}" if unit else f"{count:,}"
