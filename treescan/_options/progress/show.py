"""`progress`: reports after each chunk how far the loop has come, so that no step has a branch.

Reports are callbacks that JAX neither differentiates nor repeats, so the gradient has none (`meters.py`).
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from ..._avals import Array, PyTree, exact_int
from ..._errors import ArgumentError, Misuse, TypeMisuse, expect
from ..._loop.feed import Feed, Slot
from ..._loop.loop import Body, Loop, Step, is_untraced
from ..._loop.sizes import AroundChunk, Wish
from ..._program.nest import run_levels
from ..._rows.leaves import any_along, most_of_all, most_of_devices
from ..._trace.hoist import settled, traced
from ..._transforms.refuse import refuse_symbolic
from ..._transforms.transform import Stage, Transform
from ..._tree import Static
from .meters import (
    FEW,
    MOST,
    NEVER,
    AbstractProgressMeter,
    Progress,
    Reporter,
    Text,
    Tick,
    Tqdm,
    has_tqdm,
    probes_after,
    probes_of,
)
from .showing import SHOW, Showing, expect_field


def check_progress(progress: Any, body: Body, verb: str) -> Progress | None:
    """A `Progress` with a label and a meter; None: nothing is shown."""
    checked = check_settings(progress)
    if checked is None or checked.label is not None:
        return checked
    return dataclasses.replace(checked, label=label_of(body, verb))


def label_of(body: Body, verb: str) -> str:
    """The name of the body, or of the verb if it has none."""
    name = getattr(body.function, "__name__", "<")
    return verb if name.startswith("<") else name


def check_settings(progress: Any) -> Progress | None:
    """What the user said as a `Progress` with a meter; None: nothing is shown."""
    if progress is None or progress is False:
        return None
    if progress is True or isinstance(progress, str):
        progress = Progress(None if progress is True else progress)
    bars = (
        '`progress="train"` shows a bar with that label. `treescan.meters.Progress("train", updates=20)` sets how '
        "often it moves, and what is printed next to it."
    )
    kinds = "True, a label, a `treescan.meters.Progress` or None"
    expect(isinstance(progress, Progress), "progress", kinds, progress, bars)
    label, show, updates = progress.label, progress.show, exact_int(progress.updates)
    is_label, is_count = label is None or isinstance(label, str), updates is not None and updates >= 1
    expect_field(is_label, "label", "must be a string", label, "Without a label, the bar has the name of the body.")
    expect_field(show is None or callable(show), "show", "must be a function of the carry", show, SHOW)
    expect_field(
        progress.updates is None or is_count,
        "updates",
        "must be an int of at least 1",
        progress.updates,
        "The loop is cut into at most this many chunks. Without it, the bar moves five times a second at most. "
        "`progress=None` shows nothing.",
        ArgumentError,
    )
    return dataclasses.replace(progress, updates=updates, meter=_check_meter(progress.meter))


def _check_meter(meter: Any) -> AbstractProgressMeter:
    if meter is None:
        return Tqdm() if has_tqdm() else Text()
    cure = (
        f"Pass an instance: `meter={meter.__name__}()`."
        if isinstance(meter, type) and issubclass(meter, AbstractProgressMeter)
        else "`treescan.meters.Tqdm()` and `treescan.meters.Text()` are there. A class of your own has the methods "
        "`init`, `step` and `close`."
    )
    is_meter = isinstance(meter, AbstractProgressMeter)
    expect_field(is_meter, "meter", "must be a `treescan.meters.AbstractProgressMeter`", meter, cure)
    assert isinstance(meter, AbstractProgressMeter)
    try:
        hash(meter)
    except TypeError:
        raise TypeMisuse(
            f"{{call}}: the meter `{type(meter).__name__}` has no hash, but it is part of the program.",
            "Make its class a dataclass with `frozen=True`, and keep what belongs to a run in what `init` returns.",
        ) from None
    if isinstance(meter, Tqdm) and not has_tqdm():
        raise Misuse(
            "{call}: the meter is `Tqdm()`, but tqdm is not installed.",
            "`pip install 'treescan[progress]'` installs it. `treescan.meters.Text()` needs nothing.",
        )
    return meter


@dataclass(frozen=True)
class ShowProgress(Transform):
    """`progress`: shows how far the loop has come.

    Attributes:
        given: what the user said, a `Progress` with a label and a meter.
        custom: whether the state holds custom carries.
    """

    given: Static
    custom: bool = False
    stage: ClassVar[Stage] = Stage.SHOWN

    @classmethod
    def of(cls, progress: Any, body: Body, verb: str, *, custom: bool = False) -> ShowProgress | None:
        """What the user said: True, a label, a `Progress`, or None or False.

        Raises:
            Fault: for an `ArgumentError` if it is none of these, or a `Progress` that cannot be had.
        """
        checked = check_progress(progress, body, verb)
        return None if checked is None else cls(Static(checked), custom)

    @property
    def progress(self) -> Progress:
        """What the user said."""
        return self.given.value

    def __call__(self, loop: Loop) -> Loop:
        refuse_symbolic(loop.length, "progress")
        if loop.limit is not None:
            from .taken import show_taken

            return show_taken(loop, self.progress.updates, Showing(self.progress, loop, custom=self.custom))
        if loop.steps:
            loop = settled(loop) if is_untraced(loop) else traced(loop)
        showing, progress = Showing(self.progress, loop, custom=self.custom), self.progress
        reporter = Reporter(showing.site)
        done = _live_steps(loop)
        total = jnp.int32(loop.steps) if done is None or loop.turns else jnp.sum(done)
        more = bool(loop.turns) and loop.turns[0].length > loop.length and not (loop.length and loop.reverse)
        paced = progress.updates is None and not loop.turns
        begun = reporter.begin(total, probes_of(loop.state, loop.xs.x), paced=paced)
        run, due = begun if paced else (begun, None)
        if not loop.steps:
            reporter.end(run)
            return loop
        ticks = TellChunks(reporter, showing, run, total, done, more, due)
        size = -(-loop.length // (progress.updates or (MOST if paced else FEW)))
        wish = Wish(size, put=ticks, slots=(TICK,), outside=True)
        runner = RunTold(ticks) if paced or more else None
        wishes = (*loop.wishes, wish) if loop.length else loop.wishes
        return loop.having(wishes=wishes, runner=runner)


def _live_steps(loop: Loop) -> Array | None:
    """int32[T]: whether any row is valid in each step; None: all steps count."""
    valid = loop.xs.valid
    if loop.turns:
        return jnp.full(loop.length, len(loop.turns), jnp.int32)
    if loop.rows is None or valid is None or loop.masked.all_valid:
        return None
    return most_of_all(most_of_devices(any_along(valid, range(1, valid.ndim)).astype(jnp.int32)))


TICK: Slot[Any] = Slot("tick", of_chunks=True)
"""What is reported after a chunk."""


class Paced(NamedTuple):
    """The state of a loop over chunks whose reports are paced, outside of everything else that runs a chunk.

    Attributes:
        state: the state.
        due: int32[], the steps after which the next report is due; less than 0 before the first.
        run: int32[], the number of the run. No chunk changes it.
        total: int32[], the steps of the run. No chunk changes it.
    """

    state: PyTree
    due: Array
    run: Array
    total: Array


@dataclass(frozen=True, eq=False)
class TellChunks:
    """Makes what is reported after each chunk, once it is known how long these are.

    Attributes:
        reporter: reports it.
        showing: what is shown of the state.
        run: the number of the run.
        total: its steps.
        live: int32[T], for how many each step counts; None: for one.
        more: whether something runs after these steps, so that the run does not end with them.
        due: int32[], when the first report is due; None: each chunk makes one. It is known in the loop alone when the
            others are: the state of the chunks is `Paced`, and the end of the run is not reported by them.
    """

    reporter: Reporter
    showing: Showing
    run: Array
    total: Array
    live: Array | None
    more: bool = False
    due: Array | None = None

    def __call__(self, loop: Loop, size: int) -> tuple[Loop, AroundChunk]:
        starts = jnp.arange(0, loop.length, size, dtype=jnp.int32)
        ends = jnp.minimum(starts + size, loop.length)
        place, count = jnp.arange(starts.size), starts.size
        rest = loop.length > size and loop.length % size != 0
        led = rest and loop.reverse
        trailed = rest and not loop.reverse and not jax.tree.leaves(loop.state)
        if trailed:
            ends = ends.at[count - 2].set(loop.length)
        begins = place == (count - 1 if loop.reverse else 0)
        last = place == (0 if loop.reverse else count - 1 - trailed)
        first = place == count - 2 if led else begins
        if self.live is not None:  # how many steps count before each of them
            before = jnp.concatenate([jnp.zeros((1,), jnp.int32), jnp.cumsum(self.live, dtype=jnp.int32)])
            starts, ends = before[starts], before[ends]
        done = self.total - starts if loop.reverse else ends
        around = functools.partial(ReportingChunk, tell=self, led=led, trailed=trailed)
        if self.due is not None:
            state = Paced(loop.state, self.due, self.run, self.total)
            return loop.having(state=state, xs=TICK.put(loop.xs, done)), around
        run, total = (jnp.broadcast_to(number, done.shape) for number in (self.run, self.total))
        tick = Tick(run, total, done, first, last & (not self.more))
        return loop.having(xs=TICK.put(loop.xs, tick)), around


@dataclass(frozen=True, eq=False)
class RunTold:
    """Runs a loop, and reports its end, where its chunks do not: if reports are paced, or if steps follow the loop."""

    tell: TellChunks
    limit: ClassVar[None] = None

    def __call__(self, loop: Loop) -> tuple[PyTree, PyTree]:
        results, tell = run_levels(loop), self.tell
        if tell.more:
            false, (state, _) = jnp.zeros((), bool), results
            tick = Tick(tell.run, tell.total, tell.total, false, ~false)
            tell.reporter.step(tick, tell.showing(state), probes_after(state))
            return results
        (state, due, run, total), ys = results
        always = due >= -NEVER  # reads `due`, so that JAX keeps the last call
        tick = Tick(run, total, total, first=due < 0, last=always)
        tell.reporter.step(tick, tell.showing(state), probes_of(state))
        return state, ys


@dataclass(frozen=True, eq=False)
class ReportingChunk:
    """The step that runs a chunk, and reports that it is done.

    Attributes:
        step: runs the chunk.
        looped: whether it is one of the loop.
        tell: says what is reported.
        led: whether a remainder runs before the chunks: nothing makes its report come before theirs, so it has none.
        trailed: whether one runs after them, and reads nothing that they make: nothing makes its report come last.
    """

    step: Step
    looped: bool
    tell: TellChunks
    led: bool
    trailed: bool

    def __call__(self, consts: PyTree, state: PyTree, feed: Feed) -> tuple[PyTree, PyTree]:
        tell, (tick, inner) = self.tell, TICK.take(feed)
        silent = not self.looped and (self.led or self.trailed)
        if isinstance(state, Paced):  # this adds few operations: XLA runs more than a few in threads
            new, ys = self.step(consts, state.state, inner)
            if silent:
                return state._replace(state=new), ys
            shown, probes = tell.showing(new), probes_of(new)
            due = tell.reporter.step_if_due(state.run, state.total, tick, state.due, shown, probes)
            return state._replace(state=new, due=due), ys
        state, ys = self.step(consts, state, inner)
        if not silent:
            tell.reporter.step(tick, tell.showing(state), probes_of(state) if self.looped else probes_after(state))
        return state, ys
