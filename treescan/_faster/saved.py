"""The derivative of a masked loop that saves its steps: what they save is written in place, and read where it lies.

JAX differentiates a branch by returning from it what its derivative needs. In a loop over chunks this is copied out of
the branch, into the stack of the loop around, and back for the branch of the derivative. Measured, the gradient of a
CRF, of CTC or of an average then takes 1.2 to 1.6 times as long. What is here does the same in three parts:

1. `linearize` splits a step in two: one that also returns what its derivative needs (`Record`), and its tangent, which
   reads that (`Push`). JAX does it for one step; which of that is worth saving is decided here.
2. The loop runs the first with arrays for all steps, in which each step writes what it saves.
3. The tangent of the loop is a loop of the second, which reads them step by step. Its transpose is that loop in
   reverse. Both skip the chunks that the loop has skipped.

For this file to go, JAX would have to offer one of two things: a branch whose derivative reads what the branch was
given where it lies, without copies; or a derivative of `jax.lax.scan` that is told where a step writes what it saves.
`_trace/transposed.py` says what it would have to offer for the third part alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import eval_jaxpr

from .._avals import Array, PyTree, is_sharded, varying_axes
from .._loop.chunk import Level, run_chunked
from .._loop.feed import Feed, one_step
from .._loop.loop import Arrays, Plan, Step
from .._remat.remat import saves_steps
from .._rows.leaves import SCHEDULE, Schedule
from .._rows.mask import without_good
from .._rows.run_or_leave import run_or_leave, scheduled
from .._trace.dependence import dependent
from .._trace.equations import called_without_rule, needed, origins, reshards, variables_of
from .._trace.rewriting import Unproven
from .._trace.rules import with_rule
from .._trace.smooth import fill_in, is_smooth, nonzero_part, zeros_like
from .._trace.steps import array_of
from .._trace.trace import Trace
from .._trace.transposed import push_plainly, with_transpose
from .._tree import Part, merge, split
from .writing import Result, write_chunks

Leaves = list[Any]


# One step, and its tangent.


@dataclass(frozen=True, eq=False)
class Record:
    """A step that returns, after its outputs, what its tangent needs and no other step has.

    Attributes:
        jaxpr: (consts, state, feed) to (state, y, what is saved), open.
        consts: what it closes over.
        states: how many leaves the state has.
    """

    jaxpr: Any
    consts: Leaves
    states: int

    def __call__(self, consts: PyTree, state: PyTree, feed: Feed) -> tuple[Leaves, Leaves]:
        given = jax.tree.leaves((consts, state, feed))
        out = eval_jaxpr(self.jaxpr, self.consts, *given, propagate_source_info=True)
        out = [array_of(value, var.aval) for value, var in zip(out, self.jaxpr.outvars, strict=True)]
        return out[: self.states], out[self.states :]


class Where(NamedTuple):
    """Where a leaf of a step's tangent is: the place among what is "same" in all steps, "saved", or "made" again."""

    kind: str
    place: int


@dataclass(frozen=True, eq=False)
class Push:
    """The tangent of one step: from those of consts, state and x to those of state and y.

    Attributes:
        structure: of the tangent, a function whose leaves are arrays.
        where: for each of these leaves where it is.
        making: an open jaxpr that makes some of them again, from the consts and the feed.
        consts: what that closes over.
    """

    structure: Any
    where: tuple[Where, ...]
    making: Any
    consts: Leaves

    def at(self, same: tuple[Leaves, Leaves], saved: Leaves, fed: Leaves) -> Any:
        """The tangent of a step, as a function of the tangents of consts, state and x, one after the other.

        Args:
            same: what is the same in all steps: what the tangent reads, and the consts that `making` does.
            saved: what the step saved.
            fed: what it was fed, of that what `making` reads.
        """
        found = {"same": same[0], "saved": saved, "made": eval_jaxpr(self.making, self.consts, *same[1], *fed)}
        return jax.tree.unflatten(self.structure, [found[kind][place] for kind, place in self.where])


class Linearized(NamedTuple):
    """A step, and its tangent.

    Attributes:
        record: the step that returns what its tangent needs.
        push: the tangent.
        same: what that reads and is the same in all steps, as `Push.at` takes it.
        saved: the types of what a step saves.
        fed: the leaves of the feed that it reads.
        state: which leaves of the state have a tangent.
        y: which leaves of y have one.
    """

    record: Record
    push: Push
    same: tuple[Leaves, Leaves]
    saved: list[Any]
    fed: list[int]
    state: tuple[bool, ...]
    y: tuple[bool, ...]


def linearize(step_of: Step, loop: Arrays, part: Part) -> Linearized:
    """The step of a loop and its tangent, where `part` of (consts, state, xs) has one.

    The step is traced once, and again as `recorded`, which `jax.linearize` splits within the trace. What its tangent
    reads are then outputs of that trace, variables, and `_kinds` decides of each whether steps have to save it.

    Raises:
        Unproven: if a key would have to be saved, or if it is not known what the tangent reads.
    """
    first = len(jax.tree.leaves(loop.consts))
    last = first + len(jax.tree.leaves(loop.state))
    given = (*jax.tree.map(jax.typeof, (loop.consts, loop.state)), one_step(loop.xs))
    step, types = jax.make_jaxpr(lambda *given: step_of(*given))(*given), jax.tree.leaves(given)
    on, y_on = _on_in_steps(step.jaxpr, part.on, first, last)

    def recorded(*leaves: Any) -> tuple[Leaves, Any]:
        smooth, others = split(on, leaves)

        def of_smooth(*smooth: Any) -> tuple[Leaves, Leaves]:
            out = eval_jaxpr(step.jaxpr, step.consts, *merge(on, smooth, others), propagate_source_info=True)
            out = [array_of(value, var.aval) for value, var in zip(out, step.jaxpr.outvars, strict=True)]
            return split((*on[first:last], *y_on), out)[0], out

        _, push, out = jax.linearize(of_smooth, *smooth, has_aux=True)
        if not isinstance(push, jax.tree_util.Partial):  # a function with its arrays as leaves, in every release so far
            raise Unproven("this release of JAX does not say what a tangent reads")
        return out, push

    closed, (_, push) = jax.make_jaxpr(recorded, return_shape=True)(*types)
    jaxpr, count = closed.jaxpr, last - first + len(y_on)
    same, saved, made, where = list[Any](), dict[Any, int](), dict[Any, int](), list[Where]()
    for var, kind in _kinds(jaxpr, count, first, last):
        if kind == "same":
            where.append(Where(kind, len(same)))
            same.append(var)
        else:
            places = saved if kind == "saved" else made
            where.append(Where(kind, places.setdefault(var, len(places))))
    if any(jnp.issubdtype(var.aval.dtype, jax.dtypes.extended) for var in saved):
        raise Unproven("an array of zeros cannot hold keys")
    consts = jax.tree.leaves(loop.consts)
    sharing, at = _part_for(same, jaxpr)
    shared = eval_jaxpr(sharing, closed.consts, *(consts[place] for place in at))
    shared = [array_of(value, var.aval) for value, var in zip(shared, same, strict=True)]
    making, at = _part_for(list(made), jaxpr)
    return Linearized(
        Record(jaxpr.replace(outvars=[*jaxpr.outvars[:count], *saved]), list(closed.consts), last - first),
        Push(jax.tree.structure(push), tuple(where), making, list(closed.consts)),
        (shared, [consts[place] for place in at if place < first]),
        [var.aval for var in saved],
        [place - last for place in at if place >= last],
        on[first:last],
        y_on,
    )


def _on_in_steps(jaxpr: Any, on: tuple[bool, ...], first: int, last: int) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
    """Which inputs of a step have a tangent in some step, and which leaves of y then have.

    A leaf of the state without one may get one in a step. It then has one in the next, so this is asked until it stays.
    """
    given = list(on)
    while True:
        found = dependent(jaxpr, given)
        has = [not hasattr(var, "val") and var in found and is_smooth(var.aval) for var in jaxpr.outvars]
        state = [a or b for a, b in zip(given[first:last], has[: last - first], strict=True)]
        if state == given[first:last]:
            return tuple(given), tuple(has[last - first :])
        given[first:last] = state


_SELECTIONS = frozenset({"and", "broadcast_in_dim", "not", "or", "reshape", "select_n", "squeeze"})
"""What the mask around a step adds to it, which is made again. What the body itself selects may come with it."""


def _kinds(jaxpr: Any, count: int, first: int, last: int) -> list[tuple[Any, str]]:
    """The variable of each leaf of a tangent, and where it had better be, as `Where` has it.

    A leaf is often an input handed on, through calls too: then it is that input, which need not be saved again.

    What is but selected from the consts and the feed is the same at any time, and cheaper to make again than to save.

    Args:
        jaxpr: from consts, state and feed to outputs, then these leaves.
        count: how many outputs there are.
        first: where the state begins.
        last: where the feed begins.
    """
    varying, selected = set(jaxpr.invars[first:]), {*jaxpr.constvars, *jaxpr.invars[:first], *jaxpr.invars[last:]}
    for equation in jaxpr.eqns:
        read = set(variables_of(equation.invars))
        if not varying.isdisjoint(read):
            varying.update(equation.outvars)
        if equation.primitive.name in _SELECTIONS and selected >= read:
            selected.update(equation.outvars)

    def kind(var: Any) -> str:
        if hasattr(var, "val") or var not in varying:
            return "same"
        return "made" if var in selected else "saved"

    known = zip(origins(jaxpr, jaxpr.invars, called_without_rule)[count:], jaxpr.outvars[count:], strict=True)
    return [(var, kind(var)) for var in (var if origin is None else origin for origin, var in known)]


def _part_for(outputs: list[Any], jaxpr: Any) -> tuple[Any, list[int]]:
    """The part of an open jaxpr that computes these outputs, and the places of the inputs that it takes."""
    equations = needed(jaxpr.eqns, outputs)
    read = set(variables_of([*outputs, *(atom for each in equations for atom in each.invars)]))
    at = [place for place, var in enumerate(jaxpr.invars) if var in read]
    return jaxpr.replace(invars=[jaxpr.invars[place] for place in at], outvars=outputs, eqns=equations), at


# The loop, and its tangent.


@dataclass(frozen=True)
class _Unless:
    """The step that runs a chunk, if its schedule says so. Its x is (what it is fed, the outputs if it is not run)."""

    step: Step

    def __call__(self, consts: Any, state: Any, feed: Feed) -> tuple[Any, Leaves]:
        def leave(consts: Any, state: Any, feed: Feed) -> tuple[Any, Leaves]:
            del consts
            return state, feed.x[1]

        way, feed = scheduled(feed)
        return run_or_leave(way, (self.step,), leave, consts, state, feed)


def stack_chunks(plan: Plan, given: Arrays, size: int, outputs: Leaves) -> Result:
    """`write_chunks` in the form that JAX differentiates."""
    inner = plan.step

    def step(consts: Any, state: Any, feed: Feed) -> tuple[Any, Leaves]:
        return inner(consts, state, feed.x[0])

    schedule, fed = SCHEDULE.take(given.xs)
    xs = SCHEDULE.put(Feed((fed, outputs)), schedule)
    level = Level(size, lambda step, looped: _Unless(step), slots=(SCHEDULE,))
    return run_chunked(plan.having(step=step), (level,), given._replace(xs=xs))


def push_forward(plan: Plan, trace: Trace, size: int, idle: Leaves, given: Arrays, d_given: Arrays) -> tuple[Any, Any]:
    """The results of a loop and their tangents. What these need of each step is saved.

    Args:
        plan: the loop, whose step returns its outputs as a list.
        trace: what was read off the trace of its step.
        size: the steps of a chunk.
        idle: the outputs of steps that are not run, `[T, ...]`.
        given: what it runs on.
        d_given: the tangents of that.

    Raises:
        Unproven: if it is better to compute chunks again, or if the steps cannot be saved.
    """
    schedule, fed = SCHEDULE.take(given.xs)
    given = given._replace(xs=fed)
    if not saves_steps(trace, plan, given):
        raise Unproven("it is better to compute chunks again, or their products at once")
    spread = any(is_sharded(leaf) or varying_axes(jax.typeof(leaf)) for leaf in jax.tree.leaves(given))
    if spread or reshards(trace.jaxpr):  # `_zeros` makes arrays for what steps save, which are not spread
        raise Unproven("arrays are spread over devices")
    part, d_on = nonzero_part(given, d_given._replace(xs=SCHEDULE.put(d_given.xs, None)))
    found = linearize(plan.step, given, part)
    # JAX keeps the rule below with the trace of what calls it: it may hold no tracers, and no memo (as `run_split`).
    # What `record` closes over are none: hoisting has made consts of all arrays that a body closes over.
    recording, branches = plan.apart().having(step=found.record), trace.branches

    def saving(given: Arrays, outputs: Leaves, schedule: Schedule) -> Result:
        return write_chunks(recording, given._replace(xs=SCHEDULE.put(given.xs, schedule)), size, outputs)

    def rule(primals: Any, tangents: Any) -> tuple[Result, Result]:
        # Asked for by a derivative of this derivative alone: JAX differentiates the loop that stacks.
        schedule = primals[-1]

        def stacked(both: tuple[Arrays, Leaves]) -> Result:
            given, outputs = both
            return stack_chunks(recording, given._replace(xs=SCHEDULE.put(given.xs, schedule)), size, outputs)

        return push_plainly(stacked, primals[:-1], tangents[:-1], branches=branches)

    empty, count = [_zeros(plan, aval) for aval in found.saved], len(idle)
    of_leaves = given._replace(state=jax.tree.leaves(given.state))
    leaves, written = with_rule(saving, rule, sources=without_good)(of_leaves, [*idle, *empty], schedule)
    state, ys = jax.tree.unflatten(jax.tree.structure(given.state), leaves), written[:count]
    going_in, fed_leaves = _going_in(given, found, part, d_on), jax.tree.leaves(fed)
    read = written[count:], [fed_leaves[place] for place in found.fed]
    d_state, d_ys = _push_all(recording, found, going_in, read, schedule, size)
    return (state, ys), (_filled(state, found.state, d_state), _filled(ys, found.y, d_ys))


def _zeros(loop: Plan, aval: Any) -> Array:
    return jnp.zeros((loop.length, *aval.shape), aval.dtype)


def _filled(tree: PyTree, on: Sequence[bool], tangents: Leaves) -> PyTree:
    """The tangents of a tree, zero where none is known."""
    of_all, leaves = iter(tangents), zip(jax.tree.leaves(tree), on, strict=True)
    return fill_in(tree, [next(of_all) if is_on else zeros_like(leaf) for leaf, is_on in leaves if is_smooth(leaf)])


class _Out(NamedTuple):
    state: Leaves
    ys: Leaves


def _going_in(given: Arrays, found: Linearized, part: Part, d_on: Leaves) -> Arrays:
    """The tangents that go into the loop, those of the state for all leaves that get one in some step."""
    first, state, left = len(jax.tree.leaves(given.consts)), jax.tree.leaves(given.state), iter(d_on)
    d_consts = [next(left) for is_on in part.on[:first] if is_on]
    both = zip(state, part.on[first : first + len(state)], found.state, strict=True)
    d_state = [next(left) if is_on else zeros_like(leaf) for leaf, is_on, settled in both if settled]
    return Arrays(d_consts, d_state, list(left))


def _push_all(
    plan: Plan, found: Linearized, given: Arrays, read: tuple[Leaves, Leaves], schedule: Schedule, size: int
) -> _Out:
    """The tangents that come out of a loop. `read` is what its steps have saved, and what they were fed."""
    same, push = found.same, found.push  # a step may not hold tracers
    outputs = found.record.jaxpr.outvars[len(found.state) : len(found.state) + len(found.y)]
    zeros = [_zeros(plan, var.aval) for var in split(found.y, outputs)[0]]

    def push_steps(given: Arrays) -> _Out:
        def step(consts: Any, state: Leaves, feed: Feed) -> tuple[Leaves, Leaves]:
            (same, d_consts), (saved, fed, d_x) = consts, feed.x
            out = push.at(same, saved, fed)(*d_consts, *state, *d_x)
            return out[: len(state)], out[len(state) :]

        xs = SCHEDULE.put(Feed((*read, given.xs)), schedule)
        return _Out(*stack_chunks(plan.having(step=step), Arrays((same, given.consts), given.state, xs), size, zeros))

    def pull_steps(cotangents: _Out) -> Arrays:
        """The transpose of `push_steps`: the loop in reverse, of the transposes of its steps.

        A step takes the tangents of (consts, state, x) to those of (state, y), so its transpose takes cotangents of the
        latter to those of the former. Those of the state go on to the step before. Those of the consts are summed over
        all steps, so they are carried too. A chunk that was not run changes neither, and its x has zeros.

        JAX's own transpose of `push_steps` is equal, as a test holds. It takes 1.4 to 2.7 times the memory, since what
        a branch of it reads is copied.
        """
        c, s = len(given.consts), len(given.state)
        one_x = [jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype) for leaf in given.xs]
        types = [*map(jax.typeof, (*given.consts, *given.state)), *one_x]

        def step(same: Any, carried: Any, feed: Feed) -> tuple[Any, Leaves]:
            (d_consts, d_state), (saved, fed, d_y) = carried, feed.x
            back = jax.linear_transpose(push.at(same, saved, fed), *types)([*d_state, *d_y])
            more, d_state, d_x = (list(back[i:j]) for i, j in ((0, c), (c, c + s), (c + s, None)))
            return ([jax.lax.add(*pair) for pair in zip(d_consts, more, strict=True)], d_state), d_x

        state = [zeros_like(leaf) for leaf in given.consts], cotangents.state
        xs = SCHEDULE.put(Feed((*read, cotangents.ys)), schedule)
        back = plan.having(step=step, lowering=dataclasses.replace(plan.lowering, reverse=not plan.reverse))
        zeros = [zeros_like(leaf) for leaf in given.xs]
        (d_consts, d_state), d_xs = write_chunks(back, Arrays(same, state, xs), size, zeros)
        return Arrays(d_consts, d_state, d_xs)

    like = _Out([zeros_like(leaf) for leaf in given.state], zeros)
    return with_transpose(push_steps, pull_steps, given, like)
