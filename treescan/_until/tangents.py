"""The derivative of a loop that ends early, in both modes, at the cost of the steps that were taken.

Once the loop has run, the number of steps is known, and the state at the start of each chunk. The tangent is then a
loop over chunks, and each chunk is computed again from its start. Chunks that were not run are left out.

In the backward pass, a chunk saves only its input. Two checkpoints ensure that. The outer one encloses the branch. The
inner one encloses the taken side, because what a branch saves is also written, as zeros, for chunks that are left out.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .. import _faster
from .._avals import Array, PyTree, vary_over
from .._loop.chunk import Level, RunChunk, run_chunked
from .._loop.feed import Consts, Feed, Flag, Slot
from .._loop.loop import Arrays, Plan, Step
from .._remat.checkpoint import (
    RematChunk,
    SaveDecisions,
    checkpoint,
    checkpoint_step,
    depending_on,
    divide,
    is_remat3,
    stays_a_loop,
)
from .._rows.axes import Rows
from .._rows.leaves import ORDER, make_schedule, mask_of_lengths, most_of_all, most_of_devices, numbers_of_steps
from .._rows.mask import ALL_VALID
from .._rows.run_or_leave import on_live_rows, run_or_leave
from .._trace.raw_keys import Impls, as_numbers, impls_of, keys_of
from .._trace.rewriting import is_rewriting
from .._trace.rules import with_rule
from .._trace.smooth import instantiated, smooth_part, zeros_like
from .._trace.transposed import mapped_later
from .._tree import Part
from .._types import Remat
from .early_exit import Chunks, StepOutputs


class Ways(NamedTuple):
    """How the chunks of a loop that has run are computed again.

    Attributes:
        runners: what may run a chunk: steps with the consts of the loop.
        branch: int32[N]: 0: the chunk is not run; i: runners[i - 1] runs it. None: no branch may depend on data, and
            the first one runs every chunk.
        valid: bool[N, C, *batch], the steps that were taken.
        others: what else the runners are fed, [N, ...].
    """

    runners: tuple[Step, ...]
    branch: Array | None
    valid: Array
    others: Any


_OTHERS: Slot[Any] = Slot("others", of_chunks=True)
"""What else the runner of a chunk is fed."""

_LIVE: Slot[Array] = Slot("live", rows=False)
"""bool[]: whether a step is taken by any element or row."""


class _Chunk(NamedTuple):
    """What the tangent of one chunk is computed from.

    Attributes:
        start: the leaves of the state at its start.
        x: its stretch of xs, the leaves that have a tangent and the others.
        d_x: the tangents of the former.
        valid: bool[C, *batch], the steps that were taken.
        others: what else its runner is fed.
        branch: int32[], or None: see `Ways`.
    """

    start: list[Any]
    x: tuple[list[Any], list[Any]]
    d_x: list[Any]
    valid: Array
    others: Any
    branch: Array | None


class _Reads(NamedTuple):
    consts: tuple[list[Any], list[Any]]
    d_consts: list[Any]


@dataclass(frozen=True)
class TangentOfChunk:
    """The step of the loop over chunks: its state is the tangent of the state, its y the tangents of the chunk's ys.

    Attributes:
        runners: see `Ways`.
        consts: which leaves of the consts have a tangent.
        state: the same of the state, xs and y.
        xs: the same.
        y: the same.
        outputs: the types of y.
        size: the steps of a chunk.
        axes: the named axes over which the body computes.
    """

    runners: tuple[Step, ...]
    consts: Part
    state: Part
    xs: Part
    y: Part
    outputs: StepOutputs
    size: int
    axes: frozenset[Hashable]

    def __call__(self, reads: _Reads, d_state: list[Array], feed: Feed) -> tuple[list[Array], Any]:
        chunk: _Chunk = feed.x
        given = Arrays(reads.d_consts, d_state, chunk.d_x)
        after, d_ys = self._linear()(given, reads._replace(d_consts=[]), chunk._replace(d_x=[]))
        return after, (d_ys, d_state)

    def _linear(self) -> Any:
        """The function whose derivative is the tangent of a chunk. It computes nothing itself.

        So the loop over chunks is linear where JAX differentiates it, and the rule is asked for the tangents of all
        that goes in together: the chunk is chosen, and run again, once. A derivative of the derivative differentiates
        that run, not this function.
        """

        def nothing(given: Arrays, reads: _Reads, chunk: _Chunk) -> tuple[list[Array], list[Array]]:
            return self.nothing(reads, given.state, chunk)

        def rule(primals: Any, tangents: Any) -> tuple[Any, Any]:
            given, reads, chunk = primals
            d_given = jax.tree.map(instantiated, tangents[0], given)
            reads, chunk = reads._replace(d_consts=d_given.consts), chunk._replace(d_x=d_given.xs)
            # As bits: what a branch saves may not be typed keys in JAX 0.8.
            typed = reads, d_given.state, chunk
            impls, bits = impls_of(typed), as_numbers(typed)
            run_branch = _recomputed(functools.partial(self._choose, impls))
            return linear(*primals), run_branch(chunk.branch, bits)

        linear = with_rule(nothing, rule, self.axes)
        return linear

    def _choose(self, keys: Impls, branch: Array | None, bits: Any) -> tuple[list[Array], list[Array]]:
        def typed(part: Callable[..., Any]) -> Callable[..., Any]:
            return _depending(lambda *bits: part(*keys_of(bits, keys)))

        taken = [_recomputed(typed(functools.partial(self._tangent, runner))) for runner in self.runners]
        return run_or_leave(branch, taken, typed(self.nothing), *bits)

    def nothing(self, reads: _Reads, d_state: list[Array], chunk: _Chunk) -> tuple[list[Array], list[Array]]:
        """The result for a chunk that is not run."""
        del reads, chunk
        zeros = self.outputs.zero().filled_chunk(self.size)
        return d_state, self.y.split(zeros)[0]

    def _tangent(
        self, runner: Step, reads: _Reads, d_state: list[Array], chunk: _Chunk
    ) -> tuple[list[Array], list[Array]]:
        (consts, other_consts), (x, other_x) = reads.consts, chunk.x
        start, other_start = self.state.split(chunk.start)

        def smooth(consts: list[Any], start: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
            feed = _OTHERS.put(self.xs.join(x, other_x)._replace(valid=chunk.valid), chunk.others)
            state, ys = runner(self.consts.join(consts, other_consts), self.state.join(start, other_start), feed)
            return self.state.split(state)[0], self.y.split(self.outputs.varied(ys))[0]

        given, d_given = (consts, start, x), (reads.d_consts, d_state, chunk.d_x)
        if is_remat3():
            _, push = jax.linearize(smooth, *given)
            return push(*d_given)
        _, tangents = jax.jvp(smooth, given, d_given)
        return tangents


def _depending(branch: Callable[..., Any]) -> Callable[..., Any]:
    return lambda reads, d_state, rest: branch(reads, depending_on(d_state, reads.consts), rest)


def _recomputed(linear: Callable[..., Any]) -> Callable[..., Any]:
    """A linear function that saves nothing; under `jax_remat3` a checkpoint cannot be transposed, and there is none."""
    return linear if is_remat3() else jax.checkpoint(linear, prevent_cse=False)


def jvp_of_chunks(
    plan: Plan,
    loop: Arrays,
    starts: list[Any],
    parts: tuple[Part, Part],
    given: Arrays,
    outputs: StepOutputs,
    size: int,
    ways: Ways,
    *,
    branches: bool,
    axes: Collection[Hashable],
) -> tuple[list[Array], list[Array], list[Array]]:
    """The tangents of the last state, of ys, and of the state at the start of each chunk, of leaves that have any.

    Args:
        plan: the loop that has run, of a length that the chunks divide.
        loop: what it ran on.
        starts: the leaves of the state at the start of each chunk, [N, ...].
        parts: which leaves of the consts and of xs have a tangent.
        given: the tangents of the consts, the state and xs.
        outputs: the types of y.
        size: the steps of a chunk.
        ways: how the chunks are computed again.
        branches: whether the body branches.
        axes: the named axes over which it computes.
    """
    consts_part, x_part = parts
    step = TangentOfChunk(
        runners=ways.runners,
        consts=consts_part,
        state=smooth_part(loop.state),
        xs=x_part,
        y=Part(None, tuple(bool(jnp.issubdtype(aval.dtype, jnp.inexact)) for aval in outputs.avals)),
        outputs=outputs,
        size=size,
        axes=frozenset(axes),
    )
    rolled = dataclasses.replace(plan.lowering, unroll=1)
    over = plan.apart().having(step=step, length=plan.length // size, lowering=rolled)
    on, off = x_part.split(loop.xs)
    grouped = [group(leaf, size) for leaf in on], [group(leaf, size) for leaf in off]
    chunks = _Chunk(starts, grouped, [], ways.valid, ways.others, ways.branch)
    given = given._replace(
        state=[vary_over(leaf, outputs.varying) for leaf in given.state],
        xs=[group(leaf, size) for leaf in given.xs],
    )

    def push(given: Arrays) -> tuple[list[Array], Any]:
        reads = _Reads(consts_part.split(loop.consts), given.consts)
        of_chunks = Arrays(reads, given.state, Feed(chunks._replace(d_x=given.xs)))
        levels = () if ways.branch is None else _levels_of_chunks(over.length, step)
        return run_chunked(over, levels, of_chunks)

    # That the loop is linear is written into it where JAX takes its derivative: JAX 0.8 transposes it only then.
    def linear(given: Arrays) -> tuple[list[Array], Any]:
        return jax.jvp(push, (jax.tree.map(zeros_like, given),), (given,))[1]

    after, (d_ys, d_starts) = mapped_later(linear, given) if branches else linear(given)
    return after, [y.reshape(y.shape[0] * y.shape[1], *y.shape[2:]) for y in d_ys], d_starts


@dataclass(frozen=True)
class _SkipChunks:
    """The step that runs several chunks, unless none of them is run."""

    step: Step
    one: TangentOfChunk

    def __call__(self, reads: _Reads, d_state: list[Array], feed: Feed) -> tuple[list[Array], Any]:
        return _recomputed(self._branch)(reads, d_state, feed)

    def _branch(self, reads: _Reads, d_state: list[Array], feed: Feed) -> tuple[list[Array], Any]:
        run, leave = _depending(self.step), _depending(self._leave)
        return run_or_leave(jnp.any(feed.x.branch > 0), (run,), leave, reads, d_state, feed)

    def _leave(self, reads: _Reads, d_state: list[Array], feed: Feed) -> tuple[list[Array], Any]:
        _, d_ys = self.one.nothing(reads, d_state, feed.x)
        number = feed.x.branch.shape[0]
        return d_state, jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (number, *leaf.shape)), (d_ys, d_state))


def _levels_of_chunks(number: int, step: TangentOfChunk) -> tuple[Level, ...]:
    """Several chunks are left out together where there are many more of them than steps in each.

    A chunk that is left out by itself still costs some copies of the state.
    """
    if number <= 2 * step.size:
        return ()
    return tuple(Level(size, lambda chunks, looped: _SkipChunks(chunks, step)) for size in divide(number, 2))


def group(leaf: Array, size: int) -> Array:
    """The steps of a leaf, [T, ...], in chunks."""
    return leaf.reshape(leaf.shape[0] // size, size, *leaf.shape[1:])


@dataclass(frozen=True)
class StepByStep:
    """The step that runs another where any element or row is valid, as `_LIVE` says, and saves what goes in."""

    step: Step
    outputs: StepOutputs

    def __call__(self, consts: Any, state: list[Any], feed: Feed) -> tuple[list[Any], Any]:
        live, feed = _LIVE.take(feed)
        return checkpoint(self._branch, prevent_cse=False, policy=SaveDecisions())(live, consts, state, feed)

    def _branch(self, live: Array, consts: Any, state: list[Any], feed: Feed) -> tuple[list[Any], Any]:
        return run_or_leave(live, (self._varied,), self._leave, consts, state, feed)

    def _varied(self, consts: Any, state: list[Any], feed: Feed) -> tuple[list[Any], Any]:
        state, y = self.step(consts, state, feed)
        return state, self.outputs.varied(y)

    def _leave(self, consts: Any, state: list[Any], feed: Feed) -> tuple[list[Any], Any]:
        del consts, feed
        return state, self.outputs.filled()


@dataclass(frozen=True)
class _Fed:
    """A step that is fed one of the other things, in its slot, or none; `says` is said to it."""

    step: Step
    part: int = 0
    slot: Slot[Any] | None = None
    says: Flag | None = None

    def __call__(self, consts: Consts, state: PyTree, feed: Feed) -> tuple[PyTree, Any]:
        others, feed = _OTHERS.take(feed)
        consts = consts if self.says is None else self.says.raised(consts)
        return self.step(consts, state, feed if self.slot is None else self.slot.put(feed, others[self.part]))


def ways_of(
    loop: Plan, rows: Rows, taken: Array, outputs: StepOutputs, chunks: Chunks, *, branches: bool, rules: bool
) -> Ways:
    """How to compute the chunks of a loop whose rows stop independently, or of one that stops as a whole.

    Args:
        loop: the loop that has run, as for `jvp_of_chunks`.
        rows: where its rows are.
        taken: int32[*batch], the steps that were taken.
        outputs: the types of y.
        chunks: the chunks, and what is recomputed within them.
        branches: whether a branch may depend on data.
        rules: whether a chunk may have a rule for derivatives of its own.
    """
    size, tiers = chunks.size, rows.tiers
    order = numbers_of_steps(loop.length, reverse=loop.reverse)
    first = mask_of_lengths(taken, loop.length)
    valid = first[::-1] if loop.reverse else first
    # Without rows, all of a chunk is masked, or nothing.
    says = None if taken.ndim or not branches else ALL_VALID
    recomputes = chunks.remat is not None or chunks.inner or not rules or not taken.ndim
    every: Step
    if recomputes:
        every = recomputed_chunk(loop, outputs, chunks)
    else:
        every = run_chunk(loop, outputs, size)
        if is_rewriting():
            every = _faster.products_at_once(every)
    if not branches:
        return Ways((_Fed(every),), None, group(valid, size), None)
    schedule = make_schedule(valid, size, tiers)
    most = most_of_all(most_of_devices(jnp.max(taken, initial=0)))
    least = most if taken.ndim else -most_of_all(most_of_devices(-taken))
    ends = jnp.max(group(order, size), axis=1) >= least
    by_step = loop.having(step=StepByStep(loop.step, outputs.zero()))
    ways = on_live_rows(every, tiers, rows.axes, outputs.zero().idle)
    *some, whole = (_Fed(step, 0, ORDER, says) for step in ways)
    runners = (*some, _Fed(run_chunk(by_step, outputs, size), 1, _LIVE), whole)
    branch = jnp.where((schedule.branch == len(tiers)) & ~ends, len(runners), schedule.branch)
    return Ways(runners, branch, group(valid, size), (schedule.order, group(order < most, size)))


def recomputed_chunk(loop: Plan, outputs: StepOutputs, chunks: Chunks) -> Step:
    """What runs a whole chunk, and saves of it what the user said, or what is not had for next to nothing."""
    loop = loop.having(length=chunks.size)
    step = checkpoint_step(loop.step, chunks.remat or Remat(policy=save_costly), looped=stays_a_loop(loop), trace=None)
    levels = outputs.levels(chunks.size, chunks.inner, lambda size: RematChunk())
    return RunChunk(loop.having(step=step), levels).rolled()


def run_chunk(loop: Plan, outputs: StepOutputs, size: int) -> Step:
    """What runs a chunk, and saves all of it."""
    return RunChunk(
        loop.having(length=size, lowering=dataclasses.replace(loop.lowering, unroll=1)),
        outputs.levels(size, (), lambda size: None),
    )


_PRODUCTS = frozenset({"mul", "square", "integer_pow"})
_OF_ONE_ARRAY = frozenset({"add", "sub", "neg", "broadcast_in_dim", "reshape", "squeeze", "transpose"})


def save_costly(prim: Any, *avals: Any, **params: Any) -> bool:
    """The default policy of recomputed chunks: it saves everything that is not cheap to compute again.

    Products are not saved, as their derivative needs their factors, nor are cheap functions of one array: as many
    arrays are saved as without, or fewer. Of `tanh` that is its result, and not one minus it as well.
    """
    del params
    arrays = sum(aval.ndim > 0 for aval in avals)
    return prim.name not in _PRODUCTS and not (prim.name in _OF_ONE_ARRAY and arrays == 1)
