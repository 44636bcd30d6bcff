"""The derivative of a loop that ends early, in both modes, at the cost of the steps that were taken.

Once the loop has run, it is known how many steps it took, and what the state was at the start of each chunk. The
tangent is then a loop over chunks of which each is computed once more from there: chunks that were not run are left
out, chunks that were run to their end are plain loops, and in the one in which the loop ended each step is a branch.

Backwards a chunk saves nothing but what goes in. Two checkpoints see to it: the outer one encloses the branch, the
inner ones what is taken, because what a branch would save is written, as zeros, for chunks that are left out too.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..._avals import is_key, vary_over
from ..._loop.body import Memo
from ..._loop.chunk import as_step
from ..._loop.loop import Feed, Loop, Step
from ..._loop.run import run
from ..._remat import Remat
from ..._trace.smooth import Part, instantiated, smooth_part, zeros_like
from ..._tree import Prefix
from ..._types import Array
from ..checkpoint import RematChunk, checkpoint, checkpoint_steps, is_remat3, save_costly
from ..rows.good_pairs import GoodPair
from ..rows.leaves import select
from ..rows.lend import choose_own, lend, lend_to_elements, most_of_all, most_of_devices
from ..rows.mask import Masked
from .early_exit import Chunks, StepOutputs

RUN_NONE, RUN_SOME, RUN_ALL = 0, 1, 2
"""What of a chunk is run: no step of any element, some, or every step of all of them."""


_Keys = tuple[Any, ...]


def _as_bits(tree: Any) -> tuple[Any, _Keys]:
    """A tree with the bits of its typed keys in their place, and for each leaf how to make a key of it, or None."""
    leaves, structure = jax.tree.flatten(tree)
    kinds = tuple(jax.random.key_impl(leaf) if is_key(leaf) else None for leaf in leaves)
    bits = [leaf if kind is None else jax.random.key_data(leaf) for leaf, kind in zip(leaves, kinds, strict=True)]
    return jax.tree.unflatten(structure, bits), kinds


def _of_bits(tree: Any, kinds: _Keys) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    typed = [
        leaf if kind is None else jax.random.wrap_key_data(leaf, impl=kind)
        for leaf, kind in zip(leaves, kinds, strict=True)
    ]
    return jax.tree.unflatten(structure, typed)


@dataclass(frozen=True)
class _RunLive:
    """The step that runs another where any element is valid, as its schedule says, and saves what goes in alone."""

    step: Step
    outputs: StepOutputs

    def __call__(self, consts: Any, state: list[Any], feed: Feed) -> tuple[list[Any], Any]:
        live = feed.schedule
        feed = feed._replace(schedule=None)
        return checkpoint(self._branch, prevent_cse=False)(live, consts, state, feed)

    def _branch(self, live: Array, consts: Any, state: list[Any], feed: Feed) -> tuple[list[Any], Any]:
        return jax.lax.cond(live, self._varied, self._leave, consts, state, feed)

    def _varied(self, consts: Any, state: list[Any], feed: Feed) -> tuple[list[Any], Any]:
        state, y = self.step(consts, state, feed)
        return state, self.outputs.varied(y)

    def _leave(self, consts: Any, state: list[Any], feed: Feed) -> tuple[list[Any], Any]:
        del consts, feed
        return state, self.outputs.filled()


class _Chunk(NamedTuple):
    """What the tangent of one chunk is computed from.

    Attributes:
        start: the leaves of the state at its start.
        x: its stretch of xs, the leaves that have a tangent and the others.
        d_x: the tangents of the former.
        valid: bool[C], the steps that were taken.
        live: bool[C], those that any element took.
        branch: int32[]: nothing, some or all.
    """

    start: list[Any]
    x: tuple[list[Any], list[Any]]
    d_x: list[Any]
    valid: Array
    live: Array
    branch: Array


class _Reads(NamedTuple):
    good: GoodPair
    consts: tuple[list[Any], list[Any]]
    d_consts: list[Any]


class Tangents(NamedTuple):
    """Tangents of the consts and the xs, for the leaves of a `Part`, and of all leaves of the state that have one."""

    consts: list[Any]
    state: list[Any]
    xs: list[Any]


@dataclass(frozen=True)
class TangentOfChunk:
    """The step of the loop over chunks: its state is the tangent of the state, its y the tangents of the chunk's ys.

    Attributes:
        plain: runs a chunk.
        masked: the same where some steps were not taken; its consts are (GoodPair, consts).
        consts: which leaves of the consts have a tangent.
        state: the same of the state, xs and y.
        xs: the same.
        y: the same.
        outputs: the types of y.
        size: the steps of a chunk.
        branches: whether a branch may depend on data.
    """

    plain: Step
    masked: Step
    consts: Part
    state: Part
    xs: Part
    y: Part
    outputs: StepOutputs
    size: int
    branches: bool

    def __call__(self, reads: _Reads, d_state: list[Array], feed: Feed) -> tuple[list[Array], Any]:
        chunk: _Chunk = feed.x
        given = Tangents(reads.d_consts, d_state, chunk.d_x)
        after, d_ys = self._linear()(given, reads._replace(d_consts=[]), chunk._replace(d_x=[]))
        return after, (d_ys, d_state)

    def _linear(self) -> Any:
        """The tangent of a chunk, as a function of tangents: itself the derivative of one that computes nothing."""

        def nothing(given: Tangents, reads: _Reads, chunk: _Chunk) -> tuple[list[Array], list[Array]]:
            return self._nothing(reads, given.state, chunk)

        def rule(primals: Any, tangents: Any) -> tuple[Any, Any]:
            given, reads, chunk = primals
            d_given = jax.tree.map(instantiated, tangents[0], given)
            reads, chunk = reads._replace(d_consts=d_given.consts), chunk._replace(d_x=d_given.xs)
            # As bits: what a branch saves may not be typed keys in JAX 0.8.
            bits, keys = _as_bits((reads, d_given.state, chunk))
            run_branch = _recomputed(functools.partial(self._choose, keys))
            return linear(*primals), run_branch(chunk.branch, bits)

        linear = jax.custom_jvp(nothing)
        linear.defjvp(rule, symbolic_zeros=True)
        return linear

    def _choose(self, keys: _Keys, branch: Array, bits: Any) -> tuple[list[Array], list[Array]]:
        def typed(part: Callable[..., Any]) -> Callable[..., Any]:
            return lambda bits: part(*_of_bits(bits, keys))

        some = _recomputed(typed(self._some))
        if not self.branches:
            return some(bits)
        every = _recomputed(typed(self._all))
        return jax.lax.switch(branch, [typed(self._nothing), some, every], bits)

    def _nothing(self, reads: _Reads, d_state: list[Array], chunk: _Chunk) -> tuple[list[Array], list[Array]]:
        del reads, chunk
        zeros = dataclasses.replace(self.outputs, fill=Prefix.of(0)).filled_chunk(self.size)
        return d_state, self.y.split(zeros)[0]

    def _some(self, reads: _Reads, d_state: list[Array], chunk: _Chunk) -> tuple[list[Array], list[Array]]:
        def run_masked(consts: Any, state: list[Any], x: Any) -> tuple[list[Any], Any]:
            return self.masked((reads.good, consts), state, Feed(x, valid=chunk.valid, schedule=live))

        live = chunk.live if self.branches else None
        return self._tangent(run_masked, reads, d_state, chunk)

    def _all(self, reads: _Reads, d_state: list[Array], chunk: _Chunk) -> tuple[list[Array], list[Array]]:
        def run_plain(consts: Any, state: list[Any], x: Any) -> tuple[list[Any], Any]:
            return self.plain(consts, state, Feed(x))

        return self._tangent(run_plain, reads, d_state, chunk)

    def _tangent(
        self, runs: Callable[..., Any], reads: _Reads, d_state: list[Array], chunk: _Chunk
    ) -> tuple[list[Array], list[Array]]:
        (consts, other_consts), (x, other_x) = reads.consts, chunk.x
        start, other_start = self.state.split(chunk.start)

        def smooth(consts: list[Any], start: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
            whole = self.consts.join(consts, other_consts), self.state.join(start, other_start)
            state, ys = runs(*whole, self.xs.join(x, other_x))
            return self.state.split(state)[0], self.y.split(self.outputs.varied(ys))[0]

        given, d_given = (consts, start, x), (reads.d_consts, d_state, chunk.d_x)
        if is_remat3():
            _, push = jax.linearize(smooth, *given)
            return push(*d_given)
        _, tangents = jax.jvp(smooth, given, d_given)
        return tangents


def _recomputed(linear: Callable[..., Any]) -> Callable[..., Any]:
    """A linear function that saves nothing; under `jax_remat3` a checkpoint cannot be transposed, and there is none."""
    return linear if is_remat3() else jax.checkpoint(linear, prevent_cse=False)


class FinishedLoop(NamedTuple):
    """A loop that has run, for its tangent.

    Attributes:
        loop: the loop, as it was before: its consts, its state, its xs of a length that the chunks divide.
        starts: the leaves of the state at the start of each chunk, [N, ...].
        taken: int32[], the steps that were taken.
    """

    loop: Loop
    starts: list[Any]
    taken: Array


def push_forward(
    ran: FinishedLoop, parts: tuple[Part, Part], given: Tangents, outputs: StepOutputs, plan: Chunks, *, branches: bool
) -> tuple[list[Array], list[Array], list[Array]]:
    """The tangents of the last state, of ys, and of the state at the start of each chunk, of leaves that have any.

    Args:
        ran: the loop, and what is known of how it ran.
        parts: which leaves of the consts and of xs have a tangent.
        given: their tangents, and that of the state.
        outputs: the types of y.
        plan: the chunks, and what is recomputed within them.
        branches: whether a branch may depend on data.
    """
    loop, (consts_part, x_part), size = ran.loop, parts, plan.size
    good, consts, d_consts = _good_for_all(ran, consts_part, given.consts)
    step = TangentOfChunk(
        plain=_plain(loop, outputs, plan),
        masked=as_step(
            dataclasses.replace(loop, step=_masked(loop, outputs, branches), length=size, unroll=1),
            outputs.levels(size, (), _plain_level),
        ),
        consts=consts_part,
        state=smooth_part(loop.state),
        xs=x_part,
        y=Part(None, tuple(bool(jnp.issubdtype(aval.dtype, jnp.inexact)) for aval in outputs.avals)),
        outputs=outputs,
        size=size,
        branches=branches,
    )
    chunks = _chunks(ran, x_part, size)
    given = given._replace(
        state=[vary_over(leaf, outputs.varying) for leaf in given.state],
        consts=d_consts,
        xs=[_group(leaf, size) for leaf in given.xs],
    )

    def push(given: Tangents) -> tuple[list[Array], Any]:
        over = dataclasses.replace(
            loop,
            step=step,
            consts=_Reads(good, consts_part.split(consts), given.consts),
            state=given.state,
            xs=Feed(chunks._replace(d_x=given.xs)),
            length=loop.length // size,
            unroll=1,
            memo=Memo(),
        )
        return run(over)

    # That the loop is linear is written into it where JAX takes its derivative: JAX 0.8 transposes it only then.
    _, (after, (d_ys, d_starts)) = jax.jvp(push, (jax.tree.map(zeros_like, given),), (given,))
    return after, [y.reshape(y.shape[0] * y.shape[1], *y.shape[2:]) for y in d_ys], d_starts


def _plain(loop: Loop, outputs: StepOutputs, plan: Chunks) -> Step:
    """What runs a whole chunk."""
    loop = dataclasses.replace(loop, length=plan.size)
    loop = checkpoint_steps(loop, plan.remat or Remat(policy=save_costly))
    return as_step(loop, outputs.levels(plan.size, plan.inner, lambda size: RematChunk()))


def _plain_level(size: int) -> None:
    del size


def _group(leaf: Array, size: int) -> Array:
    """The steps of a leaf, [T, ...], in chunks."""
    return leaf.reshape(leaf.shape[0] // size, size, *leaf.shape[1:])


def _masked(loop: Loop, outputs: StepOutputs, branches: bool) -> Step:
    zero = Prefix.of(0)
    masked = masked_step(loop, zero)
    return _RunLive(masked, dataclasses.replace(outputs, fill=zero)) if branches else masked


@dataclass(frozen=True)
class _Unflagged:
    """The step that does not tell another which steps are taken."""

    step: Step

    def __call__(self, consts: Any, state: list[Any], feed: Feed) -> tuple[list[Any], Any]:
        return self.step(consts, state, feed._replace(valid=None))


def masked_step(loop: Loop, fill: Prefix) -> Step:
    """The step of a loop that is told which steps are taken, and shows the body good values on all others."""
    state, x = (len(jax.tree.leaves(tree)) for tree in (loop.state, loop.xs.x))
    unchanged, _ = loop.consts
    return Masked(_Unflagged(loop.step), (0,) * state, (None,) * len(unchanged), (0,) * x, Prefix.of(0), fill)


def good_pair(loop: Loop, have: Array, *, lifted: bool = True) -> tuple[GoodPair, Any, list[Array]]:
    """What elements that have stopped are shown: their first state and x; those that never start borrow them.

    Args:
        loop: the loop.
        have: bool[], whether any step is taken.
        lifted: whether its consts hold what the body closes over.

    Returns:
        The pair; the consts, borrowed as well; and for each of their leaves whether it is the element's own.
    """
    unchanged, _ = loop.consts
    first = -1 if loop.reverse else 0
    xs = [jax.lax.index_in_dim(leaf, first % loop.length, keepdims=False) for leaf in jax.tree.leaves(loop.xs.x)]
    pair = GoodPair(loop.state, [None] * len(unchanged), xs)
    unchanged, inner = loop.consts
    closed, inner = inner if lifted else ([], inner)
    (pair, *lent), own = lend(have, jax.lax.stop_gradient((pair, unchanged, inner)))
    own = own[len(jax.tree.leaves(pair)) :]
    lent_closed, own_closed = lend_to_elements(have, jax.lax.stop_gradient(closed))  # see `lend_closed`
    own = [*own[: len(unchanged)], *own_closed, *own[len(unchanged) :]]
    theirs = lent[0], (lent_closed, lent[1]) if lifted else lent[1]
    return jax.lax.stop_gradient(pair), choose_own(loop.consts, theirs, own), own


def _good_for_all(ran: FinishedLoop, part: Part, d_consts: list[Array]) -> tuple[GoodPair, Any, list[Array]]:
    """The good pair, the consts, and their tangents: zero for an element that borrows them."""
    pair, consts, own = good_pair(ran.loop, ran.taken > 0)
    flags, _ = part.split(own)
    zeroed = [select(flag, d, jnp.zeros_like(d)) for flag, d in zip(flags, d_consts, strict=True)]
    return pair, consts, zeroed


def _chunks(ran: FinishedLoop, x_part: Part, size: int) -> _Chunk:
    """What each chunk is computed from, and what of it is run: the same for all elements and devices."""
    loop, taken = ran.loop, ran.taken
    order = jnp.arange(loop.length, dtype=taken.dtype)
    order = _group(order[::-1] if loop.reverse else order, size)
    most = most_of_all(most_of_devices(taken))
    least = -most_of_all(most_of_devices(-taken))
    first, last = jnp.min(order, axis=1), jnp.max(order, axis=1)
    branch = jnp.where(first >= most, RUN_NONE, jnp.where(last < least, RUN_ALL, RUN_SOME))
    on, off = x_part.split(loop.xs.x)
    grouped = [_group(leaf, size) for leaf in on], [_group(leaf, size) for leaf in off]
    return _Chunk(ran.starts, grouped, [], order < taken, order < most, branch)
