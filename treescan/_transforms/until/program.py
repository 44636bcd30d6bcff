"""Assembles `while_scan`: from its arguments to its results and their derivative."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..._avals import vary_over, varying_axes
from ..._errors import ArgumentError, Fault, explain
from ..._loop.body import Body
from ..._loop.loop import Feed, Loop, Step, Transform
from ..._loop.rewrite import is_rewriting
from ..._loop.run import as_arrays, is_jit_disabled, run
from ..._remat import Remat
from ..._trace.hoist import Hoisted, hoist, lift
from ..._trace.smooth import fill_in, instantiated, is_smooth, no_tangent, nonzero_part
from ..._tree import Prefix
from ..._types import Array, ArrayLike, PyTree
from ..count import count_from
from ..nest import finish
from ..outputs import EVERYTHING
from ..program import Arguments, Call, execute
from ..refuse import once_only, refuse_budget, refuse_offload
from ..remat import check_remat
from ..rows.lend import may_branch
from ..weights.branches import MappedLater
from .all_steps import run_all_steps
from .condition import CallCondition, Condition, trace_condition
from .early_exit import Chunks, Progress, Reads, StepOutputs, TakeStep, nested_sizes, plan_chunks, run_until
from .kept import Kept, keep_what_ran
from .step_by_step import Ended, run_step_by_step
from .tangents import FinishedLoop, Tangents, push_forward

_ZERO = Prefix.of(0)
_NO_GRADIENT = once_only(
    "the gradient computes each step again",
    "Take no gradient of the loop, or leave the callback out of what is differentiated",
)
_CUSTOM_VJP = "to a custom_vjp function"
"""What JAX says where it cannot differentiate one."""


def _no_forward_mode() -> Fault:
    return Fault(
        ArgumentError,
        "{verb} over {body}: the body calls a function with a `jax.custom_vjp`, which JAX differentiates in reverse "
        "mode alone. Forward mode was asked for, or the gradient of a `jax.vmap`, for which JAX needs it here.",
        "Take `jax.vmap` of `jax.grad` in place of `jax.grad` of `jax.vmap`. Or run the loop within "
        "`treescan.rewriting(False)`, where it runs all of its `max_length` steps.",
    )


class Bounds(NamedTuple):
    """The range of indices of a `fori` with traced bounds."""

    lower: ArrayLike
    upper: ArrayLike


def remat_of(remat: Any) -> Remat | None:
    """What the user said of `remat`, as far as a loop that ends early can do it.

    Raises:
        Fault: for an `ArgumentError` if it is no plan, has a budget, or moves carries to another memory.
    """
    plan = check_remat(remat)
    refuse_budget(plan, "a loop whose number of steps is not known")
    refuse_offload(plan)
    return plan


@dataclass(frozen=True)
class Until:
    """The program of a loop whose number of steps is known at run time.

    Attributes:
        call: how each step is run; its length is the most steps that are taken.
        cond: the condition, by its handle; None holds always.
        transforms: of the loop's arguments and results.
        remat: what the gradient recomputes beyond what it does unasked.
        save: a prefix of y: what is kept of the outputs; None: everything.
        fill: a prefix of y: what it is on steps that are not taken.
        spelled: the fill as text: 0.0 and -0.0 compare as equal.
    """

    call: Call
    cond: Body | None = None
    transforms: tuple[Transform, ...] = ()
    remat: Remat | None = None
    save: Prefix | None = None
    fill: Prefix = _ZERO
    spelled: str = ""
    moves = True

    def run(self, given: Arguments, bounds: Bounds | None = None) -> Ended:
        """Runs the loop; an eager call is one program, kept with the body and the condition together.

        Raises:
            Fault: for an `ArgumentError` if JAX refuses to differentiate a function with a rule for reverse mode alone.
        """
        programs = self.call.body.programs
        try:
            return execute(self, (given, bounds), programs if self.cond is None else programs.joint(self.cond.function))
        except TypeError as error:
            if _CUSTOM_VJP in str(error):
                raise _no_forward_mode() from None
            raise

    def __call__(self, given: tuple[Arguments, Bounds | None]) -> Ended:
        arguments, bounds = given
        length, name = self.call.length, self.call.names[0]
        call = None if self.cond is None else CallCondition(self.cond, name, self.call.frozen, bool(self.call.custom))
        with self.call.scope():
            limit = jnp.asarray(np.int32(length)) if bounds is None else _steps(bounds, length)
            loop = self._lay(arguments, bounds, limit)
            if not length:
                ended = _no_steps(loop, call, arguments.init)
            elif is_jit_disabled():
                ended = run_step_by_step(loop, call, arguments.init, limit, self.fill)
            else:
                ended = _run_traced(loop, call, arguments.init, limit, self)
            state, ys = ended.state, ended.ys
            if self.save is not None and (is_jit_disabled() or not length):
                ys = keep_what_ran(ys, self.save, self.fill, ended.steps, reverse=loop.reverse)
            state, ys = finish(loop, state, ys)
            return ended._replace(state=state, ys=ys)

    def _lay(self, given: Arguments, bounds: Bounds | None, limit: Array) -> Loop:
        """The loop, with xs that are as long as it is, and positions and indices in the state."""
        loop = self.call.lay(given)
        for transform in self.transforms:
            loop = transform(loop)
        xs = jax.tree.map(lambda x: jax.lax.slice_in_dim(x, 0, loop.length), loop.xs.x)
        loop = dataclasses.replace(loop, xs=Feed(xs))
        if given.key is not None:
            loop = count_from(loop, limit - 1 if loop.reverse else 0, "position")
        if bounds is not None:
            loop = count_from(loop, bounds.lower + limit - 1 if loop.reverse else bounds.lower)
        return loop


def _steps(bounds: Bounds, most: int) -> Array:
    """int32[]: upper - lower, between 0 and `most`."""
    lower, upper = (jnp.asarray(bound) for bound in bounds)
    wide = any(bound.dtype.itemsize > 4 for bound in (lower, upper))
    signed, unsigned = (jnp.int64, jnp.uint64) if wide else (jnp.int32, jnp.uint32)
    lower, upper = (jax.lax.convert_element_type(bound, signed) for bound in (lower, upper))
    apart = jax.lax.convert_element_type(upper - lower, unsigned)  # the difference may not fit the signed type
    within = jnp.minimum(apart, jnp.asarray(most, unsigned)).astype(jnp.int32)
    return jnp.where(upper > lower, within, jnp.zeros_like(within))


def _no_steps(loop: Loop, call: CallCondition | None, init: PyTree) -> Ended:
    """The result of a loop that may take no step; the types of ys are known from a trace alone."""
    state, ys = run(loop)
    holds = jnp.ones((), bool) if call is None else call(as_arrays(init))
    return Ended(state, ys, jnp.zeros((), jnp.int32), ~holds)


def _run_traced(loop: Loop, call: CallCondition | None, init: PyTree, limit: Array, program: Until) -> Ended:
    loop, condition, varying = _trace_condition(loop, call, init, limit)
    hoisted = hoist(loop)
    if hoisted.refs:
        raise Fault(
            ArgumentError,
            "{verb} over {body}: the body closes over a mutable array (a `Ref`), which no step that may not be taken "
            "can read or write.",
            "Carry its value instead.",
        )
    hoisted = lift(hoisted)
    if not condition.fits(hoisted.settled):
        leaves = hoisted.settled[len(hoisted.settled) - condition.count :]
        condition = trace_condition(call, jax.tree.unflatten(jax.tree.structure(init), leaves))
    holds = vary_over(condition(condition.closed, hoisted.settled), varying)
    most = hoisted.loop.length
    kept = Kept.of(hoisted, program.save or EVERYTHING)
    stride = kept.stride(most, reverse=loop.reverse)
    restricted, outputs = kept.restrict(hoisted, program.fill, varying, stride)
    early = _EarlyExit(
        _without_tracers(restricted),
        condition,
        outputs,
        plan_chunks(most, stride, program.remat),
        may_branch(),
        explain(_NO_GRADIENT, program.call.convention.verb, loop.body.function) if hoisted.effects else None,
    )
    loop, front = _padded(restricted.loop, early.length)
    given = _Operands(Reads(loop.consts, condition.closed, limit), holds, loop.state, loop.xs.x)
    progress, ys = early.differentiable()(given)
    ys = [y[front // every :] for y, every in zip(ys, outputs.every, strict=True)]
    leaves, ys = kept.assemble(progress.leaves, ys, outputs.every, most)
    return Ended(hoisted.restore(leaves), ys, progress.taken, ~progress.holds)


def _without_tracers(hoisted: Hoisted) -> Hoisted:
    """The same with the types of its arrays in their place: rules for derivatives may not hold tracers."""
    loop = hoisted.loop
    consts, state, xs = jax.tree.map(jax.typeof, (loop.consts, loop.state, loop.xs))
    return hoisted._replace(loop=dataclasses.replace(loop, consts=consts, state=state, xs=xs))


def _trace_condition(
    loop: Loop, call: CallCondition | None, init: PyTree, limit: Array
) -> tuple[Loop, Condition, frozenset[str]]:
    """The condition's trace, and the manual axes over which it varies: then all of the state varies over them."""
    condition = trace_condition(call, init)
    varying = varying_axes(jax.typeof(limit))
    if condition.jaxpr is not None:
        varying |= varying_axes(condition.jaxpr.out_avals[0])
    if varying:
        state = jax.tree.map(lambda leaf: vary_over(leaf, varying), as_arrays(loop.state))
        loop = dataclasses.replace(loop, state=state)
    return loop, condition, varying


def _padded(loop: Loop, length: int) -> tuple[Loop, int]:
    """The loop with further steps behind its last one, which are never taken; and how many lead xs, in reverse."""
    more = length - loop.length
    front = more if loop.reverse else 0

    def pad(leaf: Array) -> Array:
        parts = [jax.lax.slice_in_dim(leaf, 0, more), leaf] if loop.reverse else [leaf, leaf[:more]]
        return jnp.concatenate(parts)

    xs = jax.tree.map(pad, loop.xs) if more else loop.xs
    return dataclasses.replace(loop, xs=xs, length=length), front


class _Operands(NamedTuple):
    """All values that such a loop reads: a rule for its derivative may close over none.

    Attributes:
        reads: the consts.
        holds: bool[], whether the condition of the first state holds.
        state: the leaves of the state that change.
        xs: what is scanned over.
    """

    reads: Reads
    holds: Array
    state: list[Any]
    xs: PyTree


class _Saved(NamedTuple):
    progress: Progress
    ys: PyTree
    starts: list[Any]


@dataclass(frozen=True, eq=False)
class _EarlyExit:
    """A loop that ends early, as a function of its operands that has a derivative.

    Attributes:
        hoisted: the loop.
        condition: whether another step is taken.
        outputs: the types of y, and what it is where no step is taken.
        chunks: the chunks of the derivative.
        branches: whether a branch may depend on data.
        refusal: what to raise where it is differentiated, which may be after the verb has returned.
    """

    hoisted: Hoisted
    condition: Condition
    outputs: StepOutputs
    chunks: Chunks
    branches: bool
    refusal: Exception | None

    @functools.cached_property
    def _silent(self) -> Step:
        """The step as the derivative computes it again: what it says, it has said."""
        step = self.hoisted.repeatable
        silent = step.silenced() if self.hoisted.effects else step
        if self.refusal is not None and silent.once_only:
            raise self.refusal
        return MappedLater(silent) if self.hoisted.branches else silent

    @property
    def _only_state(self) -> bool:
        return not self.outputs.avals and not jax.tree.leaves(self.hoisted.loop.xs.x)

    @property
    def length(self) -> int:
        """The steps of the whole chunks."""
        return self.chunks.size * self.chunks.number

    def _run(self, given: _Operands, length: int, sizes: tuple[int, ...], *, save: bool) -> _Saved:
        first = Progress(given.holds, vary_over(jnp.zeros((), jnp.int32), self.outputs.varying), given.state)
        take = TakeStep(
            self.hoisted.loop.step, self.condition, self.hoisted.fixed, self.outputs, branches=self.branches
        )
        loop = self._loop(given, length)
        loop = dataclasses.replace(loop, consts=given.reads, state=first)
        return _Saved(*run_until(loop, take, sizes, save=save))

    def _loop(self, given: _Operands, length: int) -> Loop:
        return dataclasses.replace(
            self.hoisted.loop, consts=given.reads.inner, state=given.state, xs=Feed(given.xs), length=length
        )

    def _primal(self, given: _Operands) -> tuple[Progress, PyTree]:
        length, sizes = (
            (self.length, (self.chunks.size,)) if not self._only_state else nested_sizes(self.hoisted.loop.length)
        )
        if not self.branches:
            length, sizes = self.length if not self._only_state else self.hoisted.loop.length, ()
        progress, ys, _ = self._run(given, length, sizes, save=False)
        return progress, ys

    def _all_steps(self, given: _Operands) -> tuple[Progress, PyTree]:
        first = Progress(given.holds, vary_over(jnp.zeros((), jnp.int32), self.outputs.varying), given.state)
        loop = self._loop(given, self.length)
        return run_all_steps(loop, given.reads, first, self.condition, self.hoisted.fixed, self.outputs)

    def _saving(self, given: _Operands) -> _Saved:
        return self._run(given, self.length, (self.chunks.size,), save=True)

    def differentiable(self) -> Any:
        """The function from operands to (progress, ys). A derivative is taken of the same that saves its chunks."""
        if not is_rewriting():
            return self._all_steps
        saving = jax.custom_jvp(self._saving)
        primal = jax.custom_jvp(self._primal)

        def saving_rule(primals: Any, tangents: Any) -> tuple[_Saved, _Saved]:
            saved = saving(*primals)
            return saved, self._push_forward(saved, *primals, *tangents)

        def primal_rule(primals: Any, tangents: Any) -> tuple[Any, Any]:
            saved = saving(*primals)
            pushed = self._push_forward(saved, *primals, *tangents)
            return saved[:2], pushed[:2]

        saving.defjvp(saving_rule, symbolic_zeros=True)
        primal.defjvp(primal_rule, symbolic_zeros=True)
        return primal

    def _push_forward(self, saved: _Saved, given: _Operands, d_given: _Operands) -> _Saved:
        """The tangents of what `_saving` returns."""
        consts_part, d_consts = nonzero_part(given.reads.inner, d_given.reads.inner)
        x_part, d_xs = nonzero_part(given.xs, d_given.xs)
        d_state = [instantiated(d, leaf) for leaf, d in zip(given.state, d_given.state, strict=True) if is_smooth(leaf)]
        loop = dataclasses.replace(self._loop(given, self.length), step=self._silent)
        d_after, d_ys, d_starts = push_forward(
            FinishedLoop(loop, saved.starts, saved.progress.taken),
            (consts_part, x_part),
            Tangents(d_consts, d_state, d_xs),
            self.outputs,
            self.chunks,
            branches=self.branches,
        )
        progress = Progress(no_tangent(saved.progress.holds), no_tangent(saved.progress.taken), [])
        return _Saved(
            progress._replace(leaves=fill_in(saved.progress.leaves, d_after)),
            fill_in(saved.ys, d_ys),
            fill_in(saved.starts, d_starts),
        )
