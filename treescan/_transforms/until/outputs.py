"""`save` and `progress` in a loop that ends early."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..._avals import is_key, place_like, vary_over
from ..._axes import LeafAxes
from ..._loop.chunk import Around
from ..._loop.loop import Feed, Loop, Step
from ..._loop.reports import Reporter, Tick, probes_of
from ..._progress import MOST, Progress as Settings
from ..._trace.hoist import Hoisted, Repeatable, merge
from ..._tree import Prefix
from ..._types import Array, PyTree
from ..outputs import ALL, LAST, Keep, kept_leaves, spread_keeps, without_dropped
from ..progress import Showing
from ..rows.axes import spread_batch_axes, with_axes
from ..rows.fill import fill_leaves
from ..rows.leaves import most_of_all, most_of_devices, pick_steps, select_valid
from .early_exit import Chunks, Progress, Reads, StepOutputs, Take


@dataclass(frozen=True, eq=False)
class Keeping:
    """The step that puts some outputs into the state, before its own leaves, and returns the others that are kept."""

    step: Repeatable
    last: tuple[int, ...]
    stacked: tuple[int, ...]

    def __call__(self, consts: Any, state: list[Any], feed: Feed) -> tuple[list[Any], list[Any]]:
        state, y = self.step(consts, state[len(self.last) :], feed)
        leaves = jax.tree.leaves(y)
        return [*(_strong(leaves[i]) for i in self.last), *state], [leaves[i] for i in self.stacked]

    @property
    def once_only(self) -> bool:
        """Whether it has effects that JAX refuses to repeat."""
        return self.step.once_only

    def silenced(self) -> Keeping:
        """The step without the callbacks of the body, for a second run that must not report again."""
        return dataclasses.replace(self, step=self.step.silenced())


def _strong(leaf: Any) -> Array:
    """The leaf, whose type does not give way to others."""
    return leaf if is_key(leaf) else jax.lax.convert_element_type(leaf, jax.typeof(leaf).dtype)


class Kept(NamedTuple):
    """Which outputs of a loop are kept.

    Attributes:
        keeps: for each leaf of y.
        structure: of y.
        save: what the user said.
    """

    keeps: tuple[Keep, ...]
    structure: Any
    save: Prefix

    @classmethod
    def of(cls, hoisted: Hoisted, save: Prefix) -> Kept:
        """Which outputs of a traced loop `save` keeps."""
        return cls(spread_keeps(save, hoisted.y), jax.tree.structure(hoisted.y), save)

    @property
    def last(self) -> tuple[int, ...]:
        """The leaves of y of which the last one is kept."""
        return tuple(i for i, keep in enumerate(self.keeps) if keep == LAST)

    @property
    def stacked(self) -> tuple[int, ...]:
        """The leaves of y that are stacked."""
        return tuple(i for i, keep in enumerate(self.keeps) if keep not in (LAST, None))

    def stride(self, length: int, *, reverse: bool) -> int:
        """Every how many steps outputs leave a chunk where they are not all kept.

        In reverse the steps that fill up the last chunk come first: all are kept where these would shift the others.
        """
        stride = math.gcd(*(keep for keep in self.keeps if keep and 1 < keep <= length)) or 1
        return 1 if reverse and length % stride else stride

    def restrict(
        self, hoisted: Hoisted, fill: Prefix, varying: frozenset[str], stride: int
    ) -> tuple[Hoisted, StepOutputs]:
        """The loop with these outputs, as a list, and their types. `fill` is what the user said of y."""
        fills = fill.spread(hoisted.y, "y")
        values = fill_leaves(fill, hoisted.y)
        avals = [hoisted.y_avals[i] for i in self.last]
        first = [
            vary_over(place_like(jnp.broadcast_to(values[i], aval.shape), aval), varying)
            for i, aval in zip(self.last, avals, strict=True)
        ]
        step = Keeping(hoisted.repeatable, self.last, self.stacked)
        loop = dataclasses.replace(hoisted.loop, step=step, state=[*first, *hoisted.loop.state])
        if loop.rows is not None:
            axes = loop.rows.axes.y
            loop = with_outputs(loop, tuple(axes[i] for i in self.last), tuple(axes[i] for i in self.stacked))
        types = tuple(hoisted.y_avals[i] for i in self.stacked)
        every = tuple(1 if self.keeps[i] == ALL else stride for i in self.stacked)
        outputs = StepOutputs(types, Prefix.of([fills[i] for i in self.stacked]), varying, every)
        return hoisted._replace(loop=loop, fixed=(*(False for _ in first), *hoisted.fixed)), outputs

    def assemble(
        self, leaves: list[Any], ys: list[Any], every: tuple[int, ...], length: int
    ) -> tuple[list[Any], PyTree]:
        """The leaves of the state without outputs, and the tree of ys.

        Args:
            leaves: the leaves of the last state.
            ys: the outputs that were stacked, one in `every` so many steps of each.
            every: see `StepOutputs`.
            length: the most steps.
        """
        held, leaves = leaves[: len(self.last)], leaves[len(self.last) :]
        thinned = [
            _thin(y[: length // n], self.keeps[i] or ALL, n) for y, i, n in zip(ys, self.stacked, every, strict=True)
        ]
        whole = dict(zip((*self.last, *self.stacked), (*held, *thinned), strict=True))
        kept = kept_leaves([whole[i] for i in sorted(whole)], self.keeps)
        return leaves, without_dropped(kept, self.structure, self.save)


def _thin(ys: Array, keep: int, every: int) -> Array:
    if keep == every:
        return ys
    stride = keep // every
    return ys[stride - 1 :: stride]


def with_outputs(loop: Loop, held: LeafAxes, stacked: LeafAxes) -> Loop:
    """The loop whose state is led by outputs, and which stacks others; and where their rows are."""
    axes = loop.rows.axes
    rows = loop.rows._replace(y_axes=Prefix.of(list(stacked)))
    return with_axes(dataclasses.replace(loop, rows=rows), state=(*held, *axes.state), y=stacked)


def axes_of_outputs(loop: Loop, ys: PyTree) -> LeafAxes:
    """Where the rows are in each leaf of one step's y, from the outputs of all steps."""
    assert loop.xs.valid is not None
    one = jax.tree.map(lambda y: jax.ShapeDtypeStruct(y.shape[1:], y.dtype), ys)
    return spread_batch_axes("y_axes", loop.rows.y_axes, one, "y", loop.xs.valid.shape[1:])


def keep_what_ran(ys: PyTree, save: Prefix, fill: Prefix, steps: Array, y_axes: LeafAxes, *, reverse: bool) -> PyTree:
    """What is kept, from the outputs of all steps; those after the last one that was taken are filled.

    `steps` is int32[*batch], and `y_axes` says where the rows are in one step's y, if there are any.
    """
    leaves, structure = jax.tree.flatten(ys)
    keeps = spread_keeps(save, ys)

    def last_of(leaf: Array, value: Array, axis: int | None) -> Array:
        if not leaf.shape[0]:
            return jnp.broadcast_to(value, leaf.shape[1:])
        own, axis = (jnp.max(steps), 0) if axis is None else (steps, axis)
        at = jnp.clip(leaf.shape[0] - own if reverse else own - 1, 0, leaf.shape[0] - 1)
        picked = pick_steps(leaf, at, axis)
        return select_valid(own > 0, picked, jnp.broadcast_to(value, picked.shape), axis)

    def kept(leaf: Array, keep: Keep, value: Array, axis: int | None) -> Array | None:
        if keep is None:
            return None
        return last_of(leaf, value, axis) if keep == LAST else leaf[keep - 1 :: keep]

    given = zip(leaves, keeps, fill_leaves(fill, ys), y_axes or (None,) * len(leaves), strict=True)
    return without_dropped([kept(*each) for each in given], structure, save)


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

    def in_chunks(self, hoisted: Hoisted, loop: Loop) -> ReportTaken:
        """What reports from within the compiled loop.

        Args:
            hoisted: the loop, its state led by what options add to it.
            loop: the loop as it was laid.
        """
        rows = loop.rows is not None
        bare = dataclasses.replace(loop, consts=None, state=None, xs=Feed(None), trace=None, rows=None)
        bare = dataclasses.replace(bare, finish=()) if rows else bare
        return ReportTaken(self.reporter, self.showing, self.updates, hoisted.fixed, hoisted.structure, bare, rows)


def _largest(steps: Array, *, each: bool) -> Array:
    """int32[]: the most steps of all rows and devices, and of all elements of a vmap unless each counts for itself."""
    steps = jnp.max(steps, initial=None if steps.size else 0) if steps.ndim else steps
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
        structure: of the state, less what options add to it: outputs, and what `check_finite` notes, lead it.
        loop: whose state it is.
        rows: whether each row stops by itself.
    """

    reporter: Reporter
    showing: Showing
    updates: int
    fixed: tuple[bool, ...]
    structure: Any
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
        whole = merge(self.fixed, unchanged, progress.leaves)
        own = whole[len(whole) - self.structure.num_leaves :]
        return self.showing.of_carry(self.loop.carry_of(jax.tree.unflatten(self.structure, own)))

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
    """The step that takes one step, and reports how far the loop has come."""

    step: Take

    @property
    def outputs(self) -> StepOutputs:
        """Y where no step is taken."""
        return self.step.outputs

    @property
    def branches(self) -> bool:
        """Whether a branch may depend on data."""
        return self.step.branches
