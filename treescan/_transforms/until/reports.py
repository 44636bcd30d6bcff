"""`progress` of a loop that ends early: its number of steps is not known, so it reports those that were taken."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ..._loop.chunk import Around
from ..._loop.loop import Feed, Loop, Step
from ..._loop.reports import Reporter, Tick, probes_of
from ..._progress import MOST, Progress as Settings
from ..._trace.hoist import Hoisted, merge
from ..._types import Array, PyTree
from ..progress import Showing
from ..rows.lend import most_of_all, most_of_devices
from .early_exit import Chunks, Progress, Reads, StepOutputs, Take


class Reports:
    """What one run of a loop that ends early reports.

    Args:
        settings: what the user said, with a label and a meter.
        loop: the loop, as its steps are run one by one.
        custom: whether its state holds custom carries.
        total: int32[], the number of steps, where it is known.
    """

    def __init__(self, settings: Settings, loop: Loop, total: Array | None, *, custom: bool) -> None:
        self.showing, self.each = Showing(settings, loop, custom=custom), settings.batched
        self.reporter, self.updates = Reporter(self.showing.site, self.each), settings.updates or MOST
        self.total = jnp.full((), -1, jnp.int32) if total is None else _largest(total, each=self.each)
        self._loop = loop
        self._run: Array | None = None

    @property
    def run(self) -> Array:
        """The number of the run."""
        return self.begin() if self._run is None else self._run

    def begin(self, *others: PyTree) -> Array:
        """Begins the run. With `batched` the others are what the loop reads beside its state and xs."""
        loop = self._loop
        probes = probes_of(*jax.tree.leaves((loop.consts, loop.state, loop.xs, others))) if self.each else None
        run = self.reporter.begin(self.total, probes_of(loop.state, loop.xs.x) if probes is None else probes)
        self._run = run
        return run

    def end(self, steps: Array, carry: PyTree) -> None:
        """The loop has ended, with this carry."""
        self._tell(steps, self.showing.of_carry(carry), probes_of(carry), last=True)

    def step(self, steps: Array, state: PyTree) -> None:
        """Reports the steps that were taken, where they run one by one, and the state that they led to."""
        self._tell(steps, self.showing(state), [])

    def _tell(self, steps: Array, shown: list[Array], probes: list[Array], *, last: bool = False) -> None:
        false = jnp.zeros((), bool)
        tick = Tick(self.run, self.total, _largest(steps, each=self.each), false, ~false if last else false)
        self.reporter.step(tick, shown, probes)

    def fit(self, chunks: Chunks) -> Chunks:
        """As many chunks that several of them together report, if there are too many for a report each."""
        together = -(-chunks.number // self.updates)
        return chunks._replace(number=-(-chunks.number // together) * together)

    def in_chunks(self, hoisted: Hoisted, loop: Loop, held: int) -> ReportTaken:
        """What reports from within the compiled loop.

        Args:
            hoisted: the loop, its state led by outputs.
            loop: the loop as it was laid.
            held: how many outputs lead the state.
        """
        rows = loop.rows is not None
        bare = dataclasses.replace(loop, consts=None, state=None, xs=Feed(None), trace=None, rows=None)
        bare = dataclasses.replace(bare, finish=()) if rows else bare
        return ReportTaken(
            self.reporter, self.showing, self.updates, hoisted.fixed, hoisted.structure, held, bare, rows
        )


def _largest(steps: Array, *, each: bool) -> Array:
    """int32[]: the most steps of all rows and devices, and of all elements of a vmap unless each counts for itself."""
    steps = jnp.max(steps) if steps.ndim else steps
    steps = most_of_devices(steps.astype(jnp.int32))
    return steps if each else most_of_all(steps)


@dataclass(frozen=True, eq=False)
class ReportTaken:
    """Reports, from within a loop that ends early, how many steps were taken. It holds no array.

    Attributes:
        reporter: reports it.
        showing: what is shown of the carry.
        updates: the most reports.
        fixed: for each leaf of the whole state whether it is unchanged.
        structure: of the state, less the outputs that lead it.
        held: how many these are.
        loop: whose state it is.
        rows: whether each row stops by itself.
    """

    reporter: Reporter
    showing: Showing
    updates: int
    fixed: tuple[bool, ...]
    structure: Any
    held: int
    loop: Loop
    rows: bool

    def size(self, length: int, sizes: Sequence[int], unit: int) -> int:
        """The smallest of these chunks of which there are not too many, else chunks of the largest of them.

        A remainder is made of steps alone: there is none of chunks.
        """
        outer, least = max((unit, *sizes)), -(-length // self.updates)
        fitting = [size for size in sizes if size >= least]
        if fitting or outer == unit:
            return min(fitting, default=-(-least // outer) * outer)
        return min(size for size in range(outer, length + 1, outer) if length % size == 0 and size >= least)

    def __call__(self, reads: Reads, progress: Progress) -> None:
        """Reports how far the loop has come."""
        run, total = reads.run
        false = jnp.zeros((), bool)
        tick = Tick(run, total, _largest(progress.taken, each=self.reporter.batched), false, false)
        self.reporter.step(tick, self._shown(reads, progress), probes_of(progress.leaves))

    def _shown(self, reads: Reads, progress: Progress) -> list[Array]:
        if not self.showing.site.shown:
            return []
        unchanged, _ = reads.inner[1] if self.rows else reads.inner
        whole = merge(self.fixed, unchanged, progress.leaves)[self.held :]
        return self.showing.of_carry(self.loop.carry_of(jax.tree.unflatten(self.structure, whole)))

    def around(self, inner: Around | None) -> Around:
        """What is put around chunks: that, and a report outside of it."""

        def report_after(step: Step, looped: bool) -> Step:
            return _ReportAfter(step if inner is None else inner(step, looped), self)

        return report_after

    def after_each(self, take: Take) -> Take:
        """The step of a loop, and a report after it."""
        return _TakeAndReport(take, self)


@dataclass(frozen=True)
class _ReportAfter:
    """The step that runs a chunk, and reports how far the loop has come."""

    step: Step
    report: ReportTaken

    def __call__(self, reads: Reads, progress: Progress, feed: Feed) -> tuple[Progress, PyTree]:
        progress, ys = self.step(reads, progress, feed)
        self.report(reads, progress)
        return progress, ys


@dataclass(frozen=True)
class _TakeAndReport(_ReportAfter):
    """The same for a single step."""

    step: Take

    @property
    def outputs(self) -> StepOutputs:
        """Y where no step is taken."""
        return self.step.outputs

    @property
    def branches(self) -> bool:
        """Whether a branch may depend on data."""
        return self.step.branches
