"""`Measurements`, what `measure_remat` returns: the time and the memory of a gradient under several plans."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.core import Tracer

from ..._avals import PyTree, describe_argument
from ..._errors import Fault, Misuse, TreescanError, TypeMisuse, verb as keeps_its_frame
from ..._options.progress.meters import NOBODY, RUNS, Progress, Report, Site
from ..._program.program import Taken
from ..._remat.budget import describe_bytes
from ..._text import Section, page, wrap
from ..._types import Remat, RematLike
from .description import axes_of, section_text, spelled
from .plans import OTHERS, Refused, gradient_of, reason_of

PLANS: tuple[RematLike | None, ...] = (*OTHERS, Remat("everything_saveable", levels=2))
"""The plans that are measured if the user names none."""

LEAST = 0.01
"""The seconds that a measurement takes at least: a short gradient runs several times in each."""

ROUNDS = 15
"""How often each plan is measured at most."""

OF_MEASURE = "`measure_remat` of {verb} over {body}:"
"""How messages about a call begin."""


@dataclass(frozen=True)
class Measured:
    """What was measured of one plan.

    Attributes:
        remat: the plan.
        seconds: the median time of one gradient; None: it was not measured.
        fastest: the shortest time that was measured, in seconds.
        slowest: the longest time, in seconds.
        bytes: what the compiled gradient needs beside its arguments and results; None: the backend does not say.
        compile_seconds: how long the gradient took to trace and to compile.
        rounds: how often it was measured.
        refusal: why it was not measured.
    """

    remat: RematLike | None
    seconds: float | None = None
    fastest: float = 0.0
    slowest: float = 0.0
    bytes: int | None = None
    compile_seconds: float = 0.0
    rounds: int = 0
    refusal: str | None = None


@dataclass(frozen=True, repr=False)
class Measurements:
    """The gradient of a call, measured under several plans: what `treescan.measure_remat` returns. Print it.

    Attributes:
        call: the verb and the body, with its file and line.
        device: what ran it.
        plans: what was measured of each plan, in the order in which they were asked for. A plan has `remat`, the
            median time in `seconds`, the `fastest` and the `slowest` time, `bytes`, `compile_seconds`, `rounds`, and,
            where it was not measured, a `refusal`.
    """

    call: str
    device: str
    plans: tuple[Measured, ...]

    @property
    @keeps_its_frame
    def best(self) -> RematLike | None:
        """The plan whose gradient takes the least time, for the option `remat`.

        Raises:
            ArgumentError: if no plan was measured.
        """
        return _fastest(self._ran)

    @keeps_its_frame
    def within(self, budget: int) -> RematLike | None:
        """The fastest plan whose gradient needs at most so many bytes, for the option `remat`.

        Args:
            budget: the number of bytes.

        Raises:
            ArgumentError: if no plan that was measured fits.
            ArgumentTypeError: if `budget` is no number.
        """
        if isinstance(budget, bool) or not isinstance(budget, (int, float)):
            says = f"{{verb}} takes a number of bytes, got {describe_argument(budget)}."
            raise TypeMisuse(says, "`within(100_000_000)` is 100 MB. `best` is the fastest plan of all.")
        known = [(plan.bytes, plan) for plan in self._ran if plan.bytes is not None]
        fit = [plan for needed, plan in known if needed <= budget]
        if known and not fit:
            least = min(needed for needed, _ in known)
            says = f"{{verb}}: the least that a measured plan needs is {least:,} bytes ({describe_bytes(least)})."
            raise Misuse(says, "Measure others: `plans=[treescan.Remat(levels=3), ...]`.")
        if self._ran and not known:
            says = "{verb}: the device does not say what memory a program needs."
            raise Misuse(says, "`treescan.plan_remat` estimates it.")
        return _fastest(fit)

    @property
    def _ran(self) -> list[Measured]:
        return [plan for plan in self.plans if plan.seconds is not None]

    def __str__(self) -> str:
        return f"{wrap(self._headline)}\n\n{section_text(self._section)}"

    def __repr__(self) -> str:
        return f"<Measurements of {self.call}: {len(self._ran)} of {len(self.plans)} plans>"

    def _repr_html_(self) -> str:
        return page(self._headline, [self._section])

    @property
    def _headline(self) -> str:
        return f"The gradient of {self.call}, on {self.device}"

    @property
    def _section(self) -> Section:
        rows = [
            (
                _time(plan.seconds or 0.0),
                f"{_time(plan.fastest)} to {_time(plan.slowest)}",
                "?" if plan.bytes is None else describe_bytes(plan.bytes),
                f"{plan.compile_seconds:.1f} s",
                spelled(plan.remat),
            )
            for plan in self._ran
        ]
        refused = dict[str, list[str]]()
        for plan in self.plans:
            if plan.refusal is not None:
                refused.setdefault(plan.refusal, []).append(spelled(plan.remat))
        notes = list[str]()
        if rows:
            rounds = min(plan.rounds for plan in self._ran)
            many = f"{rounds} rounds" if rounds > 1 else "one round"
            notes.append(f"The fastest: `remat={spelled(self.best)}`. Times are medians of {many}.")
        notes += [f"Not measured: {', '.join(plans)}. {reason}" for reason, plans in refused.items()]
        return Section("", ("time", "range", "memory", "to compile", "remat"), rows, notes)

    @keeps_its_frame
    def plot(self, ax: Any = None) -> Any:
        """Draws the memory of each plan against its time, with matplotlib.

        Args:
            ax: matplotlib's axes to draw in; None: new ones.

        Returns:
            The axes.

        Raises:
            ArgumentError: if matplotlib is not installed.
        """
        ax = axes_of(ax, 4.0)
        for plan in self._ran:
            if plan.bytes is not None:
                at = 1e3 * (plan.seconds or 0.0), plan.bytes / 2**20
                ax.scatter(*at)
                ax.annotate(spelled(plan.remat), at, xytext=(4, 4), textcoords="offset points")
        ax.set_xlabel("milliseconds")
        ax.set_ylabel("MiB, without arguments and results")
        ax.set_title(self.call)
        return ax


def _fastest(plans: Sequence[Measured]) -> RematLike | None:
    if not plans:
        raise Misuse("{verb}: no plan was measured.", "Print the measurements: they say why.")
    return min(plans, key=lambda plan: plan.seconds or 0.0).remat


def _time(seconds: float) -> str:
    """A time, in a suitable unit."""
    unit, scale = ("s", 1.0) if seconds >= 1 else ("ms", 1e3) if seconds >= 1e-3 else ("us", 1e6)
    return f"{seconds * scale:.3g} {unit}"


@dataclass
class _Run:
    """A compiled gradient, and how long it took.

    Attributes:
        call: runs it, and waits for its results.
        bytes: what it needs.
        compile_seconds: how long it took to trace and to compile.
        devices: where its results are.
        count: how often it runs in each measurement.
        times: in seconds, of one run.
    """

    call: Callable[[], object]
    bytes: int | None
    compile_seconds: float
    devices: list[Any]
    count: int = 1
    times: list[float] = field(default_factory=list[float])

    def measure(self) -> None:
        """Measures it once more."""
        began = time.perf_counter()
        for _ in range(self.count):
            self.call()
        self.times.append((time.perf_counter() - began) / self.count)

    def as_measured(self, remat: RematLike | None) -> Measured:
        """What was measured, for a plan that makes this program."""
        middle, least, most = statistics.median(self.times), min(self.times), max(self.times)
        return Measured(remat, middle, least, most, self.bytes, self.compile_seconds, len(self.times))


def measure(
    call: str,
    retake: Callable[[RematLike | None], Taken],
    explained: Callable[[Exception], Exception],
    plans: Sequence[RematLike | None],
    seconds: float,
    progress: Progress | None,
) -> Measurements:
    """Compiles the gradient of a call under each plan, and runs them in turn.

    Args:
        call: the verb and its body.
        retake: the call with a `remat`.
        explained: an error of the call, in the words of its verb.
        plans: the plans. Those that make one program share its measurements.
        seconds: after two thirds of them no gradient is compiled, and after all none is run that was measured before.
        progress: how it is shown; None: it is not.
    """
    began, found, known = time.perf_counter(), list[_Run | str](), dict[str, _Run]()
    site = None if progress is None or progress.meter is None else Site(progress.label or "", progress.meter)
    bar = NOBODY if site is None else RUNS.begin(site, len(plans))  # a meter that fails is shown no further
    faults = list[Exception]()
    try:
        for number, remat in enumerate(plans):
            late = number > 0 and time.perf_counter() - began >= seconds * 2 / 3
            try:
                found.append("the time was over. `seconds=` allows more." if late else _compiled(retake, remat, known))
            except Refused as error:
                found.append(f"There is no gradient: {error}.")
            except Exception as error:  # the verb or JAX does not take this plan, or the device has too little memory
                faults += [error] if isinstance(error, (Fault, TreescanError)) else []
                found.append(reason_of(explained(error)))
            if site is not None:
                RUNS.step(site, bar, Report(len(plans), number + 1, first=False, last=False), {})
        for each in range(ROUNDS):
            for run in known.values():
                if each == 0 or time.perf_counter() - began < seconds:
                    run.measure()
    finally:
        RUNS.end(bar)
    if len(faults) == len(plans):  # it is the call that is wrong
        raise faults[0]
    measured = [
        Measured(remat, refusal=run) if isinstance(run, str) else run.as_measured(remat)
        for remat, run in zip(plans, found, strict=True)
    ]
    devices = next((run.devices for run in known.values()), jax.devices()[:1])
    return Measurements(call, f"{len(devices)} x {devices[0].device_kind}", tuple(measured))


def _compiled(retake: Callable[[RematLike | None], Taken], remat: RematLike | None, known: dict[str, _Run]) -> _Run:
    """The compiled gradient of a call under a plan, run once."""
    began, taken = time.perf_counter(), retake(remat)
    function, *arrays = gradient_of(taken.program, taken.given)
    _check_arrays(arrays)
    lowered = jax.jit(function).lower(*arrays)
    text = lowered.as_text()
    if text not in known:
        compiled = lowered.compile()
        took, needs = time.perf_counter() - began, compiled.memory_analysis()
        call = lambda: jax.block_until_ready(compiled(*arrays))  # noqa: E731
        devices = list(call()[0].devices())
        began = time.perf_counter()
        call()
        count = max(1, round(LEAST / max(time.perf_counter() - began, 1e-9)))
        known[text] = _Run(call, None if needs is None else needs.temp_size_in_bytes, took, devices, count)
    return known[text]


def _check_arrays(arrays: PyTree) -> None:
    """Refuses types and traced arrays, also those that the body closes over."""
    for leaf in jax.tree.leaves(arrays):
        if isinstance(leaf, Tracer):
            raise Misuse(OF_MEASURE + " it runs the gradient, but arrays are traced.", "Call it outside of `jax.jit`.")
        if isinstance(leaf, jax.ShapeDtypeStruct):
            cure = "`treescan.plan_remat` and `treescan.describe` estimate the memory from types."
            raise Misuse(OF_MEASURE + " it runs the gradient, so types will not do for arrays.", cure)
