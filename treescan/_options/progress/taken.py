"""Reports, from within a loop that ends early, how many steps were taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp

from ..._avals import Array, PyTree
from ..._loop.feed import Consts, Feed
from ..._loop.loop import Loop, Step
from ..._loop.sizes import AroundChunk
from ..._rows.leaves import most_of_all, most_of_devices
from ..._until.condition import Condition
from ..._until.early_exit import ENDS, Chunks, Progress, all_fixed, whole_state
from ..._until.run import Going
from .meters import MOST, Reporter, Tick, probes_of
from .showing import Showing


def show_taken(loop: Loop, updates: int | None, showing: Showing) -> Loop:
    """The loop, which shows the steps that were taken.

    Args:
        loop: the loop.
        updates: the most reports, if the user said that.
        showing: what is shown of the carry.
    """
    going, reporter = loop.runner, Reporter(showing.site)
    assert isinstance(going, Going)
    total = jnp.full((), -1, jnp.int32) if going.total is None else _largest(going.total)
    run = reporter.begin(total, probes_of(loop.state, loop.xs.x))
    tell = TellTaken(reporter, showing, updates or MOST, going.condition, all_fixed(loop))
    return loop.having(runner=going._replace(hook=tell, of_hook=(run, total)))


def _largest(steps: Array) -> Array:
    """int32[]: the most steps of all rows and devices, and of all elements of a vmap."""
    steps = jnp.max(steps, initial=None if steps.size else 0) if steps.ndim else steps
    return most_of_all(most_of_devices(steps.astype(jnp.int32)))


@dataclass(frozen=True, eq=False)
class TellTaken:
    """Reports, from within a loop that ends early, how many steps were taken. It holds no array.

    Attributes:
        reporter: reports it.
        showing: what is shown of the carry.
        most: the most reports.
        condition: knows the user's carry in the state.
        fixed: for each leaf of the whole state whether it is unchanged.
    """

    reporter: Reporter
    showing: Showing
    most: int
    condition: Condition
    fixed: tuple[bool, ...]

    def fit(self, chunks: Chunks) -> Chunks:
        """As many chunks that several of them together report, if there are too many for a report each."""
        together = -(-chunks.number // self.most)
        return chunks._replace(number=-(-chunks.number // together) * together)

    def size(self, length: int, sizes: Sequence[int], unit: int) -> int:
        """The smallest of these chunks of which there are not too many, else chunks of the largest of them.

        A remainder is made of steps alone: there is none of chunks.
        """
        outer, least = max((unit, *sizes)), -(-length // self.most)
        fitting = [size for size in sizes if size >= least]
        if fitting or outer == unit:
            return min(fitting, default=-(-least // outer) * outer)
        return min(size for size in range(outer, length + 1, outer) if length % size == 0 and size >= least)

    def __call__(self, consts: Consts, progress: Progress, *, last: bool = False) -> None:
        """Reports how far the loop has come; `last`: that it has ended."""
        run, total = ENDS.read(consts).hook
        carry = self.condition.state_of(whole_state(self.fixed, consts, progress.state))
        shown, false = self.showing.of_carry(carry), jnp.zeros((), bool)
        tick = Tick(run, total, _largest(progress.taken), false, ~false if last else false)
        self.reporter.step(tick, shown, probes_of(carry if last else progress.state))

    def around(self, inner: AroundChunk | None) -> AroundChunk:
        """What is put around chunks: that, and a report outside of it."""
        return lambda step, looped: ReportAfter(step if inner is None else inner(step, looped), self)


@dataclass(frozen=True)
class ReportAfter:
    """The step that runs a chunk or takes a step, and reports how far the loop has come."""

    step: Step
    tell: TellTaken

    def __call__(self, consts: Consts, progress: Progress, feed: Feed) -> tuple[Progress, PyTree]:
        progress, ys = self.step(consts, progress, feed)
        self.tell(consts, progress)
        return progress, ys
