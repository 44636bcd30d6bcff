"""Assembles `while_scan`: from its arguments to its results and their derivative."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..._avals import vary_over, varying_axes
from ..._errors import ArgumentError, Fault, explain
from ..._loop.body import Body
from ..._loop.chunk import chunk_size
from ..._loop.loop import Feed, Loop, Transform
from ..._loop.run import as_arrays, is_jit_disabled, run
from ..._progress import Progress as Settings
from ..._remat import Remat
from ..._trace.hoist import Hoisted, flatten_only, hoist, lift
from ..._tree import Prefix
from ..._types import Array, ArrayLike, PyTree
from ..axes import count_from
from ..checkpoint import warn_of_unknown_names
from ..finite.backward import CheckCotangents, no_forward_mode_early
from ..finite.check import CheckFinite
from ..nest import finish
from ..outputs import EVERYTHING
from ..program import Arguments, Call, execute
from ..refuse import once_only, refuse_budget, refuse_offload, refuse_refs_in_skipped_steps
from ..remat import check_remat
from ..rows.fill import fill_leaves
from ..rows.leaves import any_of_all, may_branch
from .condition import CallCondition, Condition, trace_condition, with_rows
from .derivative import EarlyExit, Operands, padded, without_tracers
from .early_exit import Chunks, Reads, good_pair, masked_step, plan_chunks
from .outputs import Kept, Reports, axes_of_outputs, keep_what_ran
from .rows import axes_of_carry, mask_rows, trace_for_tiers


class Ended(NamedTuple):
    """A loop that has ended.

    Attributes:
        state: its last state.
        ys: the outputs, filled where no step was taken.
        steps: int32[*batch], the steps that were taken.
        stopped: bool[*batch], whether the condition no longer held.
    """

    state: PyTree
    ys: PyTree
    steps: Array
    stopped: Array


def run_step_by_step(
    loop: Loop,
    call: CallCondition | None,
    init: PyTree,
    holds: Array,
    limit: Array,
    fill: Prefix,
    reports: Reports | None = None,
) -> Ended:
    """Runs a loop while its condition holds, `limit` steps at most.

    Args:
        loop: the loop; as `OverRows` left it where each row stops by itself.
        call: its condition; None holds always.
        init: the user's part of its state, which is last in it.
        holds: bool[*batch], the condition of the first state.
        limit: int32[].
        fill: a prefix of y: what it is where no step is taken.
        reports: reports how far it has come; None: nothing does.
    """
    every = -(-loop.length // reports.updates) if reports else 0
    structure, count = jax.tree.structure(init), len(jax.tree.leaves(init))

    def holds_of(leaves: list[Any]) -> Array:
        if call is None:
            return jnp.ones((), bool)
        return call(jax.tree.unflatten(structure, leaves[len(leaves) - count :]))

    whole = jax.tree.structure(loop.state)
    flat, leaves = _masked(loop, holds & (limit > 0), fill)
    steps, ran = jnp.zeros(holds.shape, jnp.int32), list[PyTree]()
    while len(ran) < loop.length and any_of_all(going := holds & (steps < limit)):
        place = loop.length - 1 - len(ran) if loop.reverse else len(ran)
        x = jax.tree.map(lambda leaf, at=place: jax.lax.slice_in_dim(leaf, at, at + 1), flat.xs)
        one = dataclasses.replace(flat, state=leaves, xs=x._replace(valid=going[None]), length=1)
        leaves, y = run(one)
        ran.append(y)
        steps = steps + going.astype(steps.dtype)
        holds = jnp.where(going, holds_of(leaves), holds)
        if reports and len(ran) % every == 0:
            reports.step(steps, jax.tree.unflatten(whole, leaves))
    ys = _stack(loop, ran, fill)
    return Ended(jax.tree.unflatten(whole, leaves), ys, steps, ~holds)


def _masked(loop: Loop, going: Array, fill: Prefix) -> tuple[Loop, list[Array]]:
    """The loop whose step is told what is taken, and the leaves of its state."""
    if loop.rows is not None:
        return mask_rows(loop, going, fill), loop.state
    hoisted = flatten_only(dataclasses.replace(loop, state=as_arrays(loop.state), xs=as_arrays(loop.xs)))
    flat = hoisted.loop
    pair, consts, _ = good_pair(flat, going, lifted=False)
    return dataclasses.replace(flat, step=masked_step(flat, fill), consts=(pair, consts)), flat.state


def _stack(loop: Loop, ran: list[PyTree], fill: Prefix) -> PyTree:
    """Ys of all steps, from those of the steps that were taken, in their order."""
    if not ran:
        nothing = jax.tree.map(lambda leaf: jax.lax.slice_in_dim(jnp.asarray(leaf), 0, 0), loop.xs)
        _, ran = run(dataclasses.replace(loop, xs=nothing, length=0))
        ran = [ran]
        left = loop.length
    else:
        left = loop.length - len(ran)
    filled = [
        jnp.broadcast_to(value, (left, *leaf.shape[1:]))
        for value, leaf in zip(fill_leaves(fill, ran[0]), jax.tree.leaves(ran[0]), strict=True)
    ]
    parts = [*ran, jax.tree.unflatten(jax.tree.structure(ran[0]), filled)]
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *(parts[::-1] if loop.reverse else parts))


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
        "{verb} over {body}: the body calls a function with a `jax.custom_vjp`, which JAX differentiates only in "
        "reverse mode. But this is forward mode, or the gradient of a `jax.vmap`, which needs forward mode here.",
        "Use `jax.vmap` of `jax.grad` instead of `jax.grad` of `jax.vmap`. Or run the loop under "
        "`treescan.rewriting(False)`, where it always runs `max_length` steps.",
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
        lays: lays the loop's arguments; None: there is nothing to do.
        check: looks at the carry after each step, or at its cotangents; None: nothing does.
        moves_outputs: moves the axes of its outputs; None: they stay where they are.
        remat: what the gradient recomputes beyond what it does unasked.
        save: a prefix of y: what is kept of the outputs; None: everything.
        fill: a prefix of y: what it is on steps that are not taken.
        spelled: the fill as text: 0.0 and -0.0 compare as equal.
        progress: how it shows its progress, with a label and a meter; None: it does not.
    """

    call: Call
    cond: Body | None = None
    lays: Transform | None = None
    check: CheckFinite | CheckCotangents | None = None
    moves_outputs: Transform | None = None
    remat: Remat | None = None
    save: Prefix | None = None
    fill: Prefix = _ZERO
    spelled: str = ""
    progress: Settings | None = None
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
                looks_backward = isinstance(self.check, CheckCotangents)
                raise (no_forward_mode_early if looks_backward else _no_forward_mode)() from None
            raise

    def __call__(self, given: tuple[Arguments, Bounds | None]) -> Ended:
        arguments, bounds = given
        length, call = self.call.length, self._condition
        with self.call.scope():
            loop, limit, asked = self._laid(arguments, bounds)
            reports = self._reports(loop, None if bounds is None else limit)
            if not length:
                ended = _no_steps(loop, asked.holds)
            elif asked.condition is None:
                ended = run_step_by_step(loop, call, arguments.init, asked.holds, limit, self.fill, reports)
            else:
                ended = _run_traced(loop, call, asked, arguments.init, limit, self, reports)
            state, ys = ended.state, ended.ys
            if self.save is not None and asked.condition is None:
                y_axes = () if loop.rows is None else axes_of_outputs(loop, ys)
                ys = keep_what_ran(ys, self.save, self.fill, ended.steps, y_axes, reverse=loop.reverse)
            state, ys = finish(loop, state, ys)
            if reports is not None:
                reports.end(ended.steps, state)
            return ended._replace(state=state, ys=ys)

    @property
    def _condition(self) -> CallCondition | None:
        name = self.call.names[0]
        return None if self.cond is None else CallCondition(self.cond, name, self.call.frozen, bool(self.call.custom))

    def lay(self, given: tuple[Arguments, Bounds | None]) -> Loop:
        """The loop of all steps, before it is cut into chunks; of rows that stop, already traced."""
        return self._laid(*given)[0]

    def chunks(self, hoisted: Hoisted, tiers: tuple[int, ...]) -> Chunks:
        """The chunks of the derivative."""
        most = self.call.length
        stride = Kept.of(hoisted, self.save or EVERYTHING).stride(most, reverse=hoisted.loop.reverse)
        return plan_chunks(most, stride, self.remat, chunk_size(most) if len(tiers) > 1 else None)

    def _laid(self, arguments: Arguments, bounds: Bounds | None) -> tuple[Loop, Array, _Asked]:
        """The loop, the most steps that it takes, and what its condition says of the first state."""
        length = self.call.length
        limit = jnp.asarray(np.int32(length)) if bounds is None else _steps(bounds, length)
        asked = _ask(self._condition, arguments.init, traced=bool(length) and not is_jit_disabled())
        return self._lay(arguments, bounds, limit, asked), limit, asked

    def _reports(self, loop: Loop, total: Array | None) -> Reports | None:
        if self.progress is None:
            return None
        return Reports(self.progress, loop, total, custom=bool(self.call.custom))

    def _lay(self, given: Arguments, bounds: Bounds | None, limit: Array, asked: _Asked) -> Loop:
        """The loop, with xs that are as long as it is, and positions and indices in the state."""
        loop = self.call.lay(given)
        loop = with_rows(loop, asked.holds) if asked.batch else loop
        loop = loop if self.lays is None else self.lays(loop)
        if not asked.batch:
            loop = self._number(loop, given.key is not None, bounds, limit)
        loop = loop if self.check is None else self.check(loop, limit - 1)
        return loop if self.moves_outputs is None else self.moves_outputs(loop)

    @staticmethod
    def _number(loop: Loop, keyed: bool, bounds: Bounds | None, limit: Array) -> Loop:
        """The loop with positions and indices in the state: it may have no xs at all."""
        loop = dataclasses.replace(loop, xs=Feed(loop.xs.x))
        if keyed:
            loop = count_from(loop, limit - 1 if loop.reverse else 0, "position")
        if bounds is not None:
            loop = count_from(loop, bounds.lower + limit - 1 if loop.reverse else bounds.lower)
        return loop


class _Asked(NamedTuple):
    """The condition of the first state.

    Attributes:
        batch: the shape of its bools: [] but where each row stops by itself.
        holds: bool[*batch], whether it holds; None: not asked yet.
        condition: its trace; None where steps run on values, or not at all.
    """

    batch: tuple[int, ...]
    holds: Any
    condition: Condition | None


def _ask(call: CallCondition | None, init: PyTree, *, traced: bool) -> _Asked:
    leaves = as_arrays(init)
    if not traced:
        now = jnp.ones((), bool) if call is None else call(leaves)
        return _Asked(now.shape, now, None)
    condition = trace_condition(call, init)
    holds = condition(condition.closed, jax.tree.leaves(leaves)) if condition.batch else None
    return _Asked(condition.batch, holds, condition)


def _steps(bounds: Bounds, most: int) -> Array:
    """int32[]: upper - lower, between 0 and `most`."""
    lower, upper = (jnp.asarray(bound) for bound in bounds)
    wide = any(bound.dtype.itemsize > 4 for bound in (lower, upper))
    signed, unsigned = (jnp.int64, jnp.uint64) if wide else (jnp.int32, jnp.uint32)
    lower, upper = (jax.lax.convert_element_type(bound, signed) for bound in (lower, upper))
    apart = jax.lax.convert_element_type(upper - lower, unsigned)  # the difference may not fit the signed type
    within = jnp.minimum(apart, jnp.asarray(most, unsigned)).astype(jnp.int32)
    return jnp.where(upper > lower, within, jnp.zeros_like(within))


def _no_steps(loop: Loop, holds: Array) -> Ended:
    """The result of a loop that may take no step; the types of ys are known from a trace alone."""
    state, ys = run(loop)
    return Ended(state, ys, jnp.zeros(holds.shape, jnp.int32), ~holds)


def _run_traced(
    loop: Loop,
    call: CallCondition | None,
    asked: _Asked,
    init: PyTree,
    limit: Array,
    program: Until,
    reports: Reports | None,
) -> Ended:
    condition, laid = asked.condition, loop
    assert condition is not None
    loop, hoisted, varying = _hoist_rows(loop) if condition.batch else _hoist(loop, condition, limit)
    refuse_refs_in_skipped_steps(hoisted)
    warn_of_unknown_names([program.remat], [hoisted])
    count, tiers = condition.count, (loop.rows.tiers if condition.batch else ())
    init = jax.tree.unflatten(jax.tree.structure(init), hoisted.settled[len(hoisted.settled) - count :])
    if not condition.fits(hoisted.settled):
        condition = trace_condition(call, init)
    if call is not None and len(tiers) > 1:
        condition = trace_for_tiers(condition, call, init, axes_of_carry(loop, hoisted.fixed, count), tiers)
    holds = condition(condition.closed, hoisted.settled) if asked.holds is None else asked.holds
    most = loop.length
    kept = Kept.of(hoisted, program.save or EVERYTHING)
    restricted, outputs = kept.restrict(hoisted, program.fill, varying, kept.stride(most, reverse=loop.reverse))
    chunks = program.chunks(hoisted, tiers)
    early = EarlyExit(
        without_tracers(restricted),
        condition,
        outputs,
        chunks if reports is None else reports.fit(chunks),
        may_branch(),
        explain(_NO_GRADIENT, program.call.convention.verb, loop.body.function) if hoisted.effects else None,
        tiers,
        bool(condition.batch) and loop.rows.apart(),
        None if reports is None else reports.in_chunks(restricted, laid),
    )
    lengthened, front = padded(restricted.loop, early.length)
    run = None if reports is None else (reports.begin(lengthened.consts, condition.closed), reports.total)
    reads = Reads(lengthened.consts, condition.closed, limit, run)
    given = Operands(reads, vary_over(holds, varying), lengthened.state, lengthened.xs)
    progress, ys = early.differentiable()(given)
    ys = [y[front // every :] for y, every in zip(ys, outputs.every, strict=True)]
    leaves, ys = kept.assemble(progress.leaves, ys, outputs.every, most)
    return Ended(leaves if condition.batch else hoisted.restore(leaves), ys, progress.taken, ~progress.holds)


def _hoist_rows(loop: Loop) -> tuple[Loop, Hoisted, frozenset[str]]:
    """The loop as `OverRows` left it, less its mask; its trace; and the manual axes over which it varies."""
    assert loop.xs.valid is not None
    varying = varying_axes(jax.typeof(loop.xs.valid))
    bare = dataclasses.replace(loop, xs=loop.xs._replace(valid=None))
    return bare, loop.trace._replace(loop=bare), varying


def _hoist(loop: Loop, condition: Condition, limit: Array) -> tuple[Loop, Hoisted, frozenset[str]]:
    """The loop, its trace and its manual axes, if the condition is one bool: if it varies, all of the state does."""
    varying = varying_axes(jax.typeof(limit))
    for aval in condition.avals:
        varying |= varying_axes(aval)
    if varying:
        state = jax.tree.map(lambda leaf: vary_over(leaf, varying), as_arrays(loop.state))
        loop = dataclasses.replace(loop, state=state)
    return loop, lift(hoist(loop)), varying
