"""`progress`: reports after each chunk how far the loop has come, so that no step has a branch.

Reports are callbacks that JAX neither differentiates nor repeats: the gradient has none, see `reports`.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._body.carries import read_carries
from .._loop.body import Body, Memo
from .._loop.chunk import Around
from .._loop.loop import Feed, Loop, Paced, Step
from .._loop.pace import NEVER
from .._loop.reports import Reporter, Site, Tick, probes_of
from .._loop.run import as_arrays
from .._loop.sizes import Wish
from .._progress import FEW, MOST, Progress
from .._trace.hoist import hoist, is_untraced, traced
from .._tree import thaw_static
from .._types import Array, PyTree
from .backward import Backward, RunBackward
from .nest import plan, run_levels
from .progress_arguments import check_progress, check_shown
from .refuse import refuse_symbolic
from .rows.lend import most_of_all, most_of_devices


@dataclass(frozen=True)
class ShowProgress:
    """`progress`: shows how far the loop has come.

    Attributes:
        progress: what the user said, with a label and a meter.
        custom: whether the state holds custom carries.
    """

    progress: Progress
    custom: bool = False
    moves = True

    @classmethod
    def of(cls, progress: Any, body: Body, verb: str, *, custom: bool = False) -> ShowProgress | None:
        """What the user said: True, a label, a `Progress`, or None or False.

        Raises:
            Fault: for an `ArgumentError` if it is none of these, or a `Progress` that cannot be had.
        """
        checked = check_progress(progress, body, verb)
        return None if checked is None else cls(checked, custom)

    def __call__(self, loop: Loop) -> Loop:
        refuse_symbolic(loop.length, "progress")
        if loop.length:
            loop = _settled(loop) if is_untraced(loop) else traced(loop)
        showing, progress = Showing(self.progress, loop, custom=self.custom), self.progress
        reporter = Reporter(showing.site, progress.batched)
        done = _live_steps(loop, each=progress.batched)
        total = jnp.int32(loop.length) if done is None else jnp.sum(done)
        probes = _all_probes(loop) if progress.batched else probes_of(loop.state, loop.xs.x)
        paced = progress.updates is None and not (progress.backward or progress.batched)
        begun = reporter.begin(total, probes, kept=progress.backward, paced=paced)
        run, due = begun if paced else (begun, None)
        if not loop.length:
            reporter.end(run)
            return loop
        back = Backward(Reporter(showing.backward_site, progress.batched)) if progress.backward else None
        ticks = TellChunks(reporter, back, showing, run, total, done, due=due)
        wish = Wish(-(-loop.length // (progress.updates or (MOST if paced else FEW))), ticks=ticks)
        runner = RunPaced(ticks) if paced else None if back is None else RunBackward(back, ticks.ending)
        return dataclasses.replace(loop, wishes=(*loop.wishes, wish), runner=runner)


def _settled(loop: Loop) -> Loop:
    """A loop that is not traced, its weak types settled: a chunk is not run a second time for them."""
    with jax.disable_jit(False):
        settled = hoist(dataclasses.replace(loop, state=as_arrays(loop.state))).settled
    return dataclasses.replace(loop, state=jax.tree.unflatten(jax.tree.structure(loop.state), settled), memo=Memo())


def _all_probes(loop: Loop) -> list[Array]:
    """Numbers of all that the loop reads: they are mapped if anything is that differs between its runs."""
    closed = [] if loop.trace is None else loop.trace.closed
    return probes_of(*jax.tree.leaves((loop.consts, loop.state, loop.xs, closed)))


def _live_steps(loop: Loop, *, each: bool) -> Array | None:
    """int32[T]: whether any row is valid in each step; None: all steps count.

    Args:
        loop: the loop.
        each: whether the elements of a vmap count for themselves.
    """
    valid = loop.xs.valid
    if loop.rows is None or valid is None or loop.rows.all_valid:
        return None
    live = jnp.any(valid.reshape(valid.shape[0], -1), axis=1).astype(jnp.int32)
    live = most_of_devices(live)
    return live if each else most_of_all(live)


@dataclass(frozen=True, eq=False)
class TellChunks:
    """Makes what is reported after each chunk, once it is known how long these are.

    Attributes:
        reporter: reports it.
        back: reports the backward pass; None: nothing does.
        showing: what is shown of the state.
        run: the number of the run.
        total: its steps.
        live: int32[T], for how many each step counts; None: for one.
        more: whether something runs after these steps, so that the run does not end with them.
        due: int32[], when the first report is due; None: each chunk makes one. It is known in the loop alone when the
            others are: the state of the chunks is `Paced`, and the end of the run is not reported by them.
    """

    reporter: Reporter
    back: Backward | None
    showing: Showing
    run: Array
    total: Array
    live: Array | None
    more: bool = False
    due: Array | None = None

    def __call__(self, loop: Loop, size: int) -> tuple[Loop, Around]:
        starts = jnp.arange(0, loop.length, size, dtype=jnp.int32)
        ends = jnp.minimum(starts + size, loop.length)
        led = loop.reverse and loop.length > size and loop.length % size != 0
        place, count = jnp.arange(starts.size), starts.size
        begins, last = place == (count - 1 if loop.reverse else 0), place == (0 if loop.reverse else count - 1)
        first = place == count - 2 if led else begins
        if self.live is not None:  # how many steps count before each of them
            before = jnp.concatenate([jnp.zeros((1,), jnp.int32), jnp.cumsum(self.live, dtype=jnp.int32)])
            starts, ends = before[starts], before[ends]
        done, left = (self.total - starts, ends) if loop.reverse else (ends, self.total - starts)
        around = _Around(self.reporter, self.back, self.showing, led, alone=count == 1)
        if self.due is not None:
            state = Paced(loop.state, self.due, self.run, self.total)
            return dataclasses.replace(loop, state=state, xs=loop.xs._replace(tick=done)), around
        run, total = (jnp.broadcast_to(number, done.shape) for number in (self.run, self.total))
        tick = Tick(run, total, done, first, last & (not self.more))
        ticks = Ticks(tick, None if self.back is None else tick.backward(left, begins))
        return dataclasses.replace(loop, xs=loop.xs._replace(tick=ticks)), around

    @property
    def ending(self) -> Tick:
        """What the backward pass reports when it begins."""
        false = jnp.zeros((), bool)
        return Tick(self.run, self.total, self.total, false, false).backward(jnp.zeros_like(self.total), false)


@dataclass(frozen=True, eq=False)
class RunPaced:
    """Runs a loop whose reports are paced, and reports its end."""

    tell: TellChunks

    def __call__(self, loop: Loop) -> tuple[PyTree, PyTree]:
        paced, ys = run_levels(*plan(loop))
        state, due, run, total = paced
        always = due >= -NEVER  # reads `due`, so that JAX keeps the last call
        tick = Tick(run, total, total, first=due < 0, last=always)
        self.tell.reporter.step(tick, self.tell.showing(state), probes_of(state))
        return state, ys


class Ticks(NamedTuple):
    """What is reported of a chunk, forwards and backwards."""

    forward: Tick
    backward: Tick | None


@dataclass(frozen=True, eq=False)
class _Around:
    """What is put around a chunk.

    Attributes:
        reporter: reports it.
        back: reports its backward pass.
        showing: what is shown of the state.
        led: whether a remainder runs before the chunks: nothing makes its report come before theirs, so it has none.
        alone: whether there is one chunk alone.
    """

    reporter: Reporter
    back: Backward | None
    showing: Showing
    led: bool
    alone: bool

    def __call__(self, step: Step, looped: bool) -> Step:
        leads = not looped and (self.led or self.alone)
        return ReportingChunk(step, self.reporter, self.back, self.showing, silent=self.led and leads, leads=leads)


@dataclass(frozen=True, eq=False)
class ReportingChunk:
    """The step that runs a chunk, and reports that it is done, unless it is silent.

    Attributes:
        step: runs the chunk.
        reporter: reports it.
        back: reports its backward pass.
        showing: what is shown of the state.
        silent: whether nothing is reported.
        leads: whether it runs before all others, and outside of their loop.
    """

    step: Step
    reporter: Reporter
    back: Backward | None
    showing: Showing
    silent: bool
    leads: bool

    def __call__(self, consts: PyTree, state: PyTree, feed: Feed) -> tuple[PyTree, PyTree]:
        if isinstance(state, Paced):
            return self._run_paced(consts, state, feed)
        ticks: Ticks = feed.tick
        step = self.step
        if self.back is not None and ticks.backward is not None:
            step = self.back.around(step, ticks.backward, leads=self.leads)
        state, ys = step(consts, state, feed._replace(tick=None))
        if self.silent:
            return state, ys
        self.reporter.step(ticks.forward, self.showing(state), probes_of(state))
        return state, ys

    def _run_paced(self, consts: PyTree, paced: Paced, feed: Feed) -> tuple[PyTree, PyTree]:
        """The same, with as little beside the chunk as can be: XLA runs a few operations at once, more in threads."""
        state, ys = self.step(consts, paced.state, feed._replace(tick=None))
        if self.silent:
            return paced._replace(state=state), ys
        shown, probes = self.showing(state), probes_of(state)
        due = self.reporter.step_if_due(paced.run, paced.total, feed.tick, paced.due, shown, probes)
        return paced._replace(state=state, due=due), ys


class Showing:
    """What is shown of a state beside the bar.

    Args:
        progress: what the user said.
        loop: whose state it is.
        custom: whether it holds custom carries.
    """

    def __init__(self, progress: Progress, loop: Loop, *, custom: bool) -> None:
        assert progress.label is not None and progress.meter is not None
        self._show, self._custom, self._carry_name = progress.show, custom, loop.names[0]
        self._carry_of = loop.carry_of
        names: list[str] = []
        if progress.show is not None:
            jax.eval_shape(lambda: names.extend(check_shown(self._shown(self._carry_of(as_arrays(loop.state))))))
        self.site = Site(progress.label, progress.meter, tuple(names))
        self.backward_site = Site(f"{progress.label} (backward)", progress.meter)

    def through(self, restore: Callable[[PyTree], PyTree]) -> Showing:
        """The same of what is made of a state that it has in another form."""
        other, carry_of = copy.copy(self), self._carry_of
        other._carry_of = lambda state: carry_of(restore(state))
        return other

    def __call__(self, state: PyTree) -> list[Array]:
        """The values."""
        return [] if self._show is None else self.of_carry(self._carry_of(as_arrays(state)))

    def of_carry(self, carry: PyTree) -> list[Array]:
        """The same of the user's carry."""
        if self._show is None:
            return []
        shown = self._shown(carry)
        return [jax.lax.stop_gradient(jnp.asarray(shown[name])) for name in self.site.shown]

    def _shown(self, carry: PyTree) -> Any:
        assert self._show is not None
        carry = thaw_static(carry)
        return self._show(read_carries(carry, self._carry_name) if self._custom else carry)
