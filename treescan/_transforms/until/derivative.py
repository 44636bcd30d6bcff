"""A loop that ends early, as a function of its operands that has a derivative."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..._avals import place_like, vary_over
from ..._loop.loop import Feed, Loop, Step
from ..._loop.rewrite import is_rewriting
from ..._loop.run import debugs_nans
from ..._trace.hoist import Hoisted, Part, fill_in, instantiated, is_smooth, no_tangent, nonzero_part
from ..._types import Array, PyTree
from ..rows.axes import without_arrays
from ..rows.mask import in_branches, without_stand_ins
from ..weights.in_bulk import MappedLater
from .condition import Condition
from .early_exit import (
    Chunks,
    MaskedStep,
    Progress,
    Reads,
    Report,
    StepOutputs,
    TakeStep,
    going_on,
    nested_sizes,
    run_all_steps,
    run_masked,
    run_until,
)
from .rows import TakeRows, around_live_rows, mask_rows, ways_of_rows
from .tangents import FinishedLoop, Tangents, Ways, push_forward, ways_of


def without_tracers(hoisted: Hoisted) -> Hoisted:
    """A traced loop with types instead of arrays, because rules for derivatives must not contain tracers."""
    loop = hoisted.loop
    consts, state, xs = jax.tree.map(jax.typeof, (loop.consts, loop.state, loop.xs))
    rows = None if loop.rows is None else without_arrays(loop.rows)
    bare = dataclasses.replace(loop, consts=consts, state=state, xs=xs, trace=None, finish=(), rows=rows)
    return hoisted._replace(loop=bare)


def padded(loop: Loop, length: int) -> tuple[Loop, int]:
    """The loop with further steps behind its last one, which are never taken; and how many lead xs, in reverse."""
    more = length - loop.length
    front = more if loop.reverse else 0

    def pad(leaf: Array) -> Array:
        parts = [jax.lax.slice_in_dim(leaf, 0, more), leaf] if loop.reverse else [leaf, leaf[:more]]
        return jnp.concatenate(parts)

    xs = jax.tree.map(pad, loop.xs) if more else loop.xs
    return dataclasses.replace(loop, xs=xs, length=length), front


class Operands(NamedTuple):
    """All values that such a loop reads. A rule for its derivative must not close over any.

    Attributes:
        reads: the consts.
        holds: bool[*batch], whether the condition of the first state holds.
        state: the leaves of the state that change.
        xs: what each step is fed.
    """

    reads: Reads
    holds: Array
    state: list[Any]
    xs: Feed


class Saved(NamedTuple):
    progress: Progress
    ys: PyTree
    starts: list[Any]


@dataclass(frozen=True, eq=False)
class EarlyExit:
    """A loop that ends early, as a function of its operands that has a derivative.

    Attributes:
        hoisted: the loop.
        condition: whether another step is taken.
        outputs: the types of y, and what it is where no step is taken.
        chunks: the chunks of the derivative.
        branches: whether a branch may depend on data.
        refusal: what to raise where it is differentiated, which may be after the verb has returned.
        tiers: where rows stop each by itself, the numbers of rows to choose from; else empty.
        apart: whether the body is known to treat these rows independently.
        report: reports how far the loop has come; None: nothing does.
    """

    hoisted: Hoisted
    condition: Condition
    outputs: StepOutputs
    chunks: Chunks
    branches: bool
    refusal: Exception | None
    tiers: tuple[int, ...] = ()
    apart: bool = False
    report: Report | None = None

    @functools.cached_property
    def _silent(self) -> Step:
        """The step that the derivative computes again, without its callbacks."""
        step = self.hoisted.repeatable
        silent = step.silenced() if self.hoisted.effects else step
        if self.refusal is not None and silent.once_only:
            raise self.refusal
        return MappedLater(silent) if self.hoisted.branches else silent

    @property
    def _only_state(self) -> bool:
        return not self.outputs.avals and not jax.tree.leaves(self.hoisted.loop.xs)

    @property
    def length(self) -> int:
        """The steps of the whole chunks."""
        return self.chunks.size * self.chunks.number

    def _run(self, given: Operands, length: int, sizes: tuple[int, ...], *, save: bool) -> Saved:
        first, loop, step = self._first(given), self._loop(given, length), self.hoisted.loop.step
        if not self.tiers:
            take = TakeStep(step, self.condition, self.hoisted.fixed, self.outputs, branches=self.branches)
            loop = dataclasses.replace(loop, consts=given.reads, state=first)
            return Saved(*run_until(loop, take, sizes, save=save, report=self.report))
        loop, masked = self._lay_rows(given, first, length)
        masked = dataclasses.replace(masked, masked=self._undifferentiated(masked.masked))
        rows = TakeRows(masked, self.outputs, loop.rows.axes.y, self.branches)
        around = around_live_rows(loop, self.outputs, sizes[0], self.tiers, save=save) if sizes else None
        return Saved(*run_until(loop, rows, sizes, save=save, innermost=around, report=self.report))

    def _undifferentiated(self, step: Step) -> Step:
        """A masked step that is not differentiated, and runs only if some row takes it."""
        step = without_stand_ins(step) if self.apart and not debugs_nans() else step
        return in_branches(step) if self.branches else step

    def _lay_rows(self, given: Operands, first: Progress, length: int) -> tuple[Loop, MaskedStep]:
        """The loop of rows that stop, and its step."""
        loop = mask_rows(self._loop(given, length), going_on(first, given.reads), self.outputs.fill)
        step = MaskedStep(loop.step, self.condition, self.hoisted.fixed)
        reads = given.reads._replace(inner=loop.consts)
        return dataclasses.replace(loop, step=step, consts=reads, state=first), step

    def _first(self, given: Operands) -> Progress:
        taken = place_like(jnp.zeros(given.holds.shape, jnp.int32), jax.typeof(given.holds))
        return Progress(given.holds, vary_over(taken, self.outputs.varying), given.state)

    def _loop(self, given: Operands, length: int) -> Loop:
        return dataclasses.replace(
            self.hoisted.loop, consts=given.reads.inner, state=given.state, xs=given.xs, length=length
        )

    def _primal(self, given: Operands) -> tuple[Progress, PyTree]:
        length, sizes = self._sizes()
        progress, ys, _ = self._run(given, length, sizes, save=False)
        return progress, ys

    def _sizes(self) -> tuple[int, tuple[int, ...]]:
        """How long the loop is made where nothing is saved, and the sizes of its chunks."""
        if not self._only_state:
            return self.length, ((self.chunks.size,) if self.branches else ())
        if not self.branches:
            return self.hoisted.loop.length, ()
        if len(self.tiers) < 2:
            return nested_sizes(self.hoisted.loop.length)
        length, sizes = nested_sizes(self.chunks.number)
        return length * self.chunks.size, tuple(size * self.chunks.size for size in (1, *sizes))

    def _all_steps(self, given: Operands) -> tuple[Progress, PyTree]:
        first, loop = self._first(given), self._loop(given, self.length)
        if not self.tiers:
            return run_all_steps(loop, given.reads, first, self.condition, self.hoisted.fixed, self.outputs)
        loop, _ = self._lay_rows(given, first, self.length)
        return run_masked(loop, self.outputs)

    def _saving(self, given: Operands) -> Saved:
        return self._run(given, self.length, (self.chunks.size,), save=True)

    def differentiable(self) -> Any:
        """The function from operands to (progress, ys). A derivative is taken of the same that saves its chunks."""
        if not is_rewriting():
            return self._all_steps
        saving = jax.custom_jvp(self._saving)
        primal = jax.custom_jvp(self._primal)

        def saving_rule(primals: Any, tangents: Any) -> tuple[Saved, Saved]:
            saved = saving(*primals)
            return saved, self._push_forward(saved, *primals, *tangents)

        def primal_rule(primals: Any, tangents: Any) -> tuple[Any, Any]:
            saved = saving(*primals)
            pushed = self._push_forward(saved, *primals, *tangents)
            return saved[:2], pushed[:2]

        saving.defjvp(saving_rule, symbolic_zeros=True)
        primal.defjvp(primal_rule, symbolic_zeros=True)
        return primal

    def _push_forward(self, saved: Saved, given: Operands, d_given: Operands) -> Saved:
        """The tangents of what `_saving` returns."""
        consts_part, d_consts = nonzero_part(given.reads.inner, d_given.reads.inner)
        x_part, d_xs = nonzero_part(given.xs, d_given.xs)
        d_state = [instantiated(d, leaf) for leaf, d in zip(given.state, d_given.state, strict=True) if is_smooth(leaf)]
        loop = dataclasses.replace(self._loop(given, self.length), step=self._silent)
        ran = FinishedLoop(loop, saved.starts, saved.progress.taken)
        d_after, d_ys, d_starts = push_forward(
            ran,
            (consts_part, x_part),
            Tangents(d_consts, d_state, d_xs),
            self.outputs,
            self.chunks.size,
            self._ways(ran, consts_part, d_consts),
        )
        progress = Progress(no_tangent(saved.progress.holds), no_tangent(saved.progress.taken), [])
        return Saved(
            progress._replace(leaves=fill_in(saved.progress.leaves, d_after)),
            fill_in(saved.ys, d_ys),
            fill_in(saved.starts, d_starts),
        )

    def _ways(self, ran: FinishedLoop, part: Part, d_consts: list[Array]) -> Ways:
        given = ran, part, d_consts, self.outputs, self.chunks
        if not self.tiers:
            return ways_of(*given, branches=self.branches)
        rules = not (self.hoisted.effects or self.hoisted.reverse_rule)
        return ways_of_rows(*given, self.tiers, branches=self.branches, rules=rules)
