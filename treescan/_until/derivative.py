"""A loop that ends early, as a function of its operands that has a derivative."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._avals import Array, PyTree, place_like, vary_over
from .._loop.chunk import run_chunked
from .._loop.feed import Feed
from .._loop.loop import Arrays, Plan, Step
from .._loop.sizes import AroundChunk
from .._rows.axes import Rows
from .._rows.mask import SOME_VALID, without_good
from .._trace.rewriting import is_rewriting
from .._trace.rules import with_rule
from .._trace.smooth import fill_in, instantiated, is_smooth, no_tangent, nonzero_part
from .._trace.steps import SILENT
from .._trace.trace import Trace
from .condition import Condition
from .early_exit import (
    ENDS,
    Chunks,
    Hook,
    MaskedStep,
    Progress,
    StepOutputs,
    TakeChunk,
    TakeStep,
    in_progress,
    nested_sizes,
)
from .tangents import jvp_of_chunks, ways_of


class Saved(NamedTuple):
    progress: Progress
    ys: PyTree
    starts: list[Any]


def is_forward_mode(error: TypeError) -> bool:
    """Whether JAX refuses to differentiate a `jax.custom_vjp` in forward mode."""
    return "to a custom_vjp function" in str(error)


@dataclass(frozen=True, eq=False)
class EarlyExit:
    """A loop that ends early, as a function of its operands that has a derivative.

    Attributes:
        plan: the loop.
        rows: where its rows are.
        trace: what the trace of its body told.
        fixed: for each leaf of the whole state whether no step changes it.
        fed: whether steps are fed anything.
        condition: whether another step is taken.
        outputs: the types of y, and what it is where no step is taken.
        chunks: the chunks of the derivative.
        branches: whether a branch may depend on data.
        refusal: what to raise where it is differentiated, which may be after the verb has returned.
        unbound: what to raise where it is differentiated outside of the `jax.vmap` that has an axis which it reads.
        reverse_only: what to raise where a rule for reverse mode alone would have to be differentiated in forward mode.
        own_values: whether rows that have stopped are shown their own values, unless something is differentiated.
        hook: is called as it goes on; None: nothing is.
    """

    plan: Plan
    rows: Rows
    trace: Trace
    fixed: tuple[bool, ...]
    fed: bool
    condition: Condition
    outputs: StepOutputs
    chunks: Chunks
    branches: bool
    refusal: Exception | None
    unbound: Exception | None
    reverse_only: Exception | None
    own_values: bool
    hook: Hook | None

    @property
    def length(self) -> int:
        """The steps of the whole chunks."""
        return self.chunks.size * self.chunks.number

    @property
    def front(self) -> int:
        """How many steps that are never taken lead the whole chunks."""
        return self.length - self.plan.length if self.plan.reverse else 0

    def _padded(self, xs: PyTree) -> PyTree:
        """What all steps are fed, and what those are fed which fill up the last chunk and are never taken."""
        more = self.length - self.plan.length

        def pad(leaf: Array) -> Array:
            parts = [leaf, jax.lax.slice_in_dim(leaf, 0, more)]
            return jnp.concatenate(parts[::-1] if self.plan.reverse else parts)

        return jax.tree.map(pad, xs) if more else xs

    def _run_chunks(self, given: Arrays, holds: Array, length: int, sizes: tuple[int, ...], *, save: bool) -> Saved:
        """Runs a loop while it goes on, in nested chunks of these sizes; with `save` of one at most."""
        outputs, hook, called, before = self.outputs, self.hook, 0, given.state
        take: Step = TakeStep(self._masked, outputs, self.rows.axes.y)
        ordered = len(self.rows.tiers) > 1
        if hook is not None:  # rows that are brought together for a chunk are not in their places within it
            stride = max(outputs.every, default=1)
            steps = () if ordered else range(1, 1 + (stride == 1))
            called = hook.size(length, (*steps, *sizes), stride)
            take = hook.around(None)(take, True) if called == 1 else take
        given = without_good(given) if self.own_values else given
        given = given._replace(consts=SOME_VALID.raised(given.consts, self.branches), state=self._first(before, holds))

        def around_chunk(step: Step, size: int) -> Step:
            tiers = self.rows.tiers if size == sizes[0] else self.rows.tiers[-1:]
            return TakeChunk(step, size, outputs, save, tiers, in_progress(self.rows.axes))

        def around(size: int) -> AroundChunk | None:
            own = (lambda step, looped: around_chunk(step, size)) if size in sizes else None
            return hook.around(own) if hook is not None and size == called else own

        further = () if called in (0, 1, *sizes) else (called,)
        levels = outputs.levels(length, (*sizes, *further), around)
        progress, ys = run_chunked(self.plan.having(step=take, length=length), levels, given)
        if not save:
            return Saved(progress, ys, [])
        if not any(level.size in sizes for level in levels if level.around is not None):
            return Saved(progress, ys, [leaf[None] for leaf in jax.tree.leaves(before)])
        return Saved(progress, *ys)

    def _first(self, state: PyTree, holds: Array) -> Progress:
        taken = place_like(jnp.zeros(holds.shape, jnp.int32), jax.typeof(holds))
        return Progress(holds, vary_over(taken, self.outputs.varying), state)

    @property
    def _masked(self) -> MaskedStep:
        return MaskedStep(self.plan.step, self.condition, self.fixed)

    def _primal(self, given: Arrays, holds: Array) -> tuple[Progress, PyTree]:
        length, sizes = self._sizes()
        if self._takes_places:
            ends = ENDS.read(given.consts)._replace(xs=given.xs)
            given = given._replace(consts=ENDS.put(given.consts, ends), xs=Feed(self._places(length)))
        else:
            given = given._replace(xs=self._padded(given.xs))
        progress, ys, _ = self._run_chunks(given, holds, length, sizes, save=False)
        return progress, ys

    @property
    def _takes_places(self) -> bool:
        """Whether a step takes its slice of xs by its place. A chunk that is fed slices has a copy of them.

        A chunk that runs on some rows alone takes these rows out of its slices.
        """
        return bool(self.branches and self.fed and len(self.rows.tiers) < 2)

    def _places(self, length: int) -> Array:
        """int32[length]: the place of each step in xs, of a loop that is made as long as this."""
        steps = self.plan.length
        lead = length - steps if self.plan.reverse else 0
        return jnp.clip(jnp.arange(length, dtype=jnp.int32) - lead, 0, steps - 1)

    def _sizes(self) -> tuple[int, tuple[int, ...]]:
        """How long the loop is made where nothing is saved, and the sizes of its chunks."""
        if self.outputs.avals or (self.fed and not self._takes_places):
            return self.length, ((self.chunks.size,) if self.branches else ())  # more than the state goes in or out
        if not self.branches:
            return self.plan.length, ()
        if len(self.rows.tiers) < 2:
            return nested_sizes(self.plan.length)
        length, sizes = nested_sizes(self.chunks.number)
        return length * self.chunks.size, tuple(size * self.chunks.size for size in (1, *sizes))

    def _all_steps(self, given: Arrays, holds: Array) -> tuple[Progress, PyTree]:
        """Runs all steps, and keeps nothing of those after the end."""
        given = given._replace(xs=self._padded(given.xs), state=self._first(given.state, holds))
        plan = self.plan.having(step=self._masked, length=self.length)
        return run_chunked(plan, self.outputs.levels(self.length, (), lambda size: None), given)

    def _saving(self, given: Arrays, holds: Array) -> Saved:
        given = given._replace(xs=self._padded(given.xs))
        return self._run_chunks(given, holds, self.length, (self.chunks.size,), save=True)

    def differentiable(self) -> Any:
        """The function from what the loop runs on, and whether the condition holds of that, to (progress, ys).

        A derivative is taken of the same that saves its chunks.
        """
        if not is_rewriting() or self.trace.branches_on_devices:
            return self._all_steps
        axes = self.trace.axes | self.condition.axes

        def saving_rule(primals: Any, tangents: Any) -> tuple[Saved, Saved]:
            try:
                saved = with_rule(self._saving, saving_rule, axes, without_good)(*primals)
                return saved, self._jvp(saved, primals[0], tangents[0])
            except NameError:
                if self.unbound is None:
                    raise
                raise copy.copy(self.unbound) from None
            except TypeError as error:
                if self.reverse_only is None or not is_forward_mode(error):
                    raise
                raise copy.copy(self.reverse_only) from None

        def primal_rule(primals: Any, tangents: Any) -> tuple[Any, Any]:
            saved, pushed = saving_rule(primals, tangents)
            return saved[:2], pushed[:2]

        return with_rule(self._primal, primal_rule, axes, without_good)

    def _jvp(self, saved: Saved, given: Arrays, d_given: Arrays) -> Saved:
        """The tangents of what `_saving` returns."""
        if self.refusal is not None:
            raise copy.copy(self.refusal)  # one that was raised holds the frames that it went through
        # A loop that is run once more asks no condition, and its callbacks were called.
        given, d_given = (each._replace(consts=ENDS.put(each.consts, None)) for each in (given, d_given))
        given = given._replace(consts=SILENT.raised(given.consts, self.trace.effects))
        consts_part, d_consts = nonzero_part(given.consts, d_given.consts)
        x_part, d_xs = nonzero_part(given.xs, d_given.xs)
        given, d_xs = given._replace(xs=self._padded(given.xs)), self._padded(d_xs)
        states = zip(jax.tree.leaves(given.state), jax.tree.leaves(d_given.state), strict=True)
        d_state = [instantiated(d, leaf) for leaf, d in states if is_smooth(leaf)]
        plan = self.plan.having(length=self.length)
        rules, taken = not (self.trace.effects or self.trace.reverse_rule), saved.progress.taken
        d_after, d_ys, d_starts = jvp_of_chunks(
            plan,
            given,
            saved.starts,
            (consts_part, x_part),
            Arrays(d_consts, d_state, d_xs),
            self.outputs,
            self.chunks.size,
            ways_of(plan, self.rows, taken, self.outputs, self.chunks, branches=self.branches, rules=rules),
            branches=self.trace.branches,
            axes=self.trace.axes,
        )
        progress = Progress(no_tangent(saved.progress.holds), no_tangent(taken), [])
        return Saved(
            progress._replace(state=fill_in(saved.progress.state, d_after)),
            fill_in(saved.ys, d_ys),
            fill_in(saved.starts, d_starts),
        )
