"""The derivative of a masked loop that saves its steps: what they save is written in place, and read where it lies.

JAX differentiates a branch by returning from it what its derivative needs. In a loop over chunks this is copied out of
the branch, into the stack of the loop around, and back for the branch of the derivative. Measured, that takes up to
four times as long as a loop without branches. So here the loop carries arrays for all steps, and a step writes there
what its derivative needs. The derivative is a loop in reverse that reads it step by step, and skips the same chunks.

JAX cannot be told how to transpose a function but by `jax.lax.custom_linear_solve`: it takes a linear equation, how to
solve it, and how to solve the transposed one. The equation is `out - push(in) = b`, whose solution is the tangent. So
reverse mode runs our loop, and all other transformations are JAX's own, derivatives of derivatives too.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import eval_jaxpr

from ..._avals import Array, PyTree, is_sharded, varying_axes
from ..._loop.chunk import Level, as_step, run_chunked
from ..._loop.loop import Feed, Loop, Memo, Step
from ..._trace.dependence import dependent
from ..._trace.equations import called_without_rule, needed, origins, reshards, variables_of
from ..._trace.hoist import Unproven, array_of, fill_in, is_smooth, nonzero_part, one_step, zeros_like
from ..._tree import Part, merge, split
from ..remat import saves_steps
from .leaves import Schedule
from .writing import Result, write_chunks

Arrays = list[Any]


@dataclass(frozen=True, eq=False)
class Record:
    """A step that returns, after its outputs, what its derivative needs and no other step has.

    Attributes:
        jaxpr: (consts, state, feed) to (state, y, what is saved), open.
        consts: what it closes over.
        states: how many leaves the state has.
    """

    jaxpr: Any
    consts: Arrays
    states: int

    def __call__(self, consts: PyTree, state: PyTree, feed: Feed) -> tuple[Arrays, Arrays]:
        given = jax.tree.leaves((consts, state, feed))
        out = eval_jaxpr(self.jaxpr, self.consts, *given, propagate_source_info=True)
        out = [array_of(value, var.aval) for value, var in zip(out, self.jaxpr.outvars, strict=True)]
        return out[: self.states], out[self.states :]


class Where(NamedTuple):
    """Where a leaf of a step's derivative is: which of what is saved, fed, made of that, or the same in all steps."""

    kind: str
    place: int


@dataclass(frozen=True, eq=False)
class Push:
    """The tangent of one step: from those of consts, state and x to those of state and y.

    Attributes:
        structure: of the derivative, whose leaves are arrays.
        where: for each of these leaves where it is.
        making: an open jaxpr that selects, from what steps are fed, what the derivative reads and is not saved.
        takes: for each input of that where it is.
        consts: what that closes over.
    """

    structure: Any
    where: tuple[Where, ...]
    making: Any
    takes: tuple[Where, ...]
    consts: Arrays

    def at(self, same: Arrays, saved: Arrays, fed: Arrays) -> Any:
        """The tangent of a step, as a function of the tangents of consts, state and x, one after the other.

        Args:
            same: what it needs that is the same in all steps, the consts at the end.
            saved: what the step saved.
            fed: what it was fed.
        """
        found = {"saved": saved, "fed": fed, "same": same}
        given = [found[kind][place] for kind, place in self.takes]
        found["made"] = eval_jaxpr(self.making, self.consts, *given)
        return jax.tree.unflatten(self.structure, [found[kind][place] for kind, place in self.where])


class Linearized(NamedTuple):
    """A step, and its tangent.

    Attributes:
        record: the step that returns what its tangent needs.
        push: the tangent.
        same: what that needs and is the same in all steps.
        saved: the types of what it needs of each step.
        state: which leaves of the state have a tangent.
        y: which leaves of y have one.
    """

    record: Record
    push: Push
    same: Arrays
    saved: list[Any]
    state: tuple[bool, ...]
    y: tuple[bool, ...]


def linearize(loop: Loop, part: Part) -> Linearized:
    """The step of a loop and its tangent, where `part` of (consts, state, xs) has one.

    Raises:
        Unproven: if a key would have to be saved.
    """
    one = one_step(loop.xs)
    first = len(jax.tree.leaves(loop.consts))
    last = first + len(jax.tree.leaves(loop.state))
    given = jax.tree.map(
        lambda leaf: jax.typeof(leaf) if hasattr(leaf, "aval") else leaf, (loop.consts, loop.state, one)
    )
    step, types = jax.make_jaxpr(lambda *given: loop.step(*given))(*given), jax.tree.leaves(given)
    on, y_on = _settled(step.jaxpr, part.on, first, last)

    def recorded(*leaves: Any) -> tuple[Arrays, Any]:
        smooth, others = split(on, leaves)

        def of_smooth(*smooth: Any) -> tuple[Arrays, Arrays]:
            out = eval_jaxpr(step.jaxpr, step.consts, *merge(on, smooth, others), propagate_source_info=True)
            out = [array_of(value, var.aval) for value, var in zip(out, step.jaxpr.outvars, strict=True)]
            return split((*on[first:last], *y_on), out)[0], out

        _, push, out = jax.linearize(of_smooth, *smooth, has_aux=True)
        return out, push

    closed, (_, push) = jax.make_jaxpr(recorded, return_shape=True)(*types)
    return _parted(closed, jax.tree.structure(push), loop, (first, last), on, y_on)


def _settled(jaxpr: Any, on: tuple[bool, ...], first: int, last: int) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
    """Which inputs of a step have a tangent once those of the state have settled, and which leaves of y then have."""
    given = list(on)
    while True:
        found = dependent(jaxpr, given)
        has = [not hasattr(var, "val") and var in found and is_smooth(var.aval) for var in jaxpr.outvars]
        state = [a or b for a, b in zip(given[first:last], has[: last - first], strict=True)]
        if state == given[first:last]:
            return tuple(given), tuple(has[last - first :])
        given[first:last] = state


def _parted(
    closed: Any,
    structure: Any,
    loop: Loop,
    bounds: tuple[int, int],
    on: tuple[bool, ...],
    y_on: tuple[bool, ...],
) -> Linearized:
    jaxpr, (first, last) = closed.jaxpr, bounds
    count = last - first + len(y_on)
    varying = set(jaxpr.invars[first:])
    for equation in jaxpr.eqns:
        if not varying.isdisjoint(variables_of(equation.invars)):
            varying.update(equation.outvars)
    fed = {var: i for i, var in enumerate(jaxpr.invars[last:])}
    selected = _selected(jaxpr, (*range(first), *range(last, len(jaxpr.invars))))
    saved, made, same, where = dict[Any, int](), dict[Any, int](), list[Any](), list[Where]()
    known = zip(origins(jaxpr, jaxpr.invars, called_without_rule)[count:], jaxpr.outvars[count:], strict=True)
    read = [var if origin is None else origin for origin, var in known]
    for var in read:
        if hasattr(var, "val") or var not in varying:
            same.append(var)
            where.append(Where("same", len(same) - 1))
        elif var in fed:
            where.append(Where("fed", fed[var]))
        elif var in selected:
            where.append(Where("made", made.setdefault(var, len(made))))
        else:
            where.append(Where("saved", saved.setdefault(var, len(saved))))
    if any(jnp.issubdtype(var.aval.dtype, jax.dtypes.extended) for var in saved):
        raise Unproven("an array of zeros cannot hold keys")
    record = Record(jaxpr.replace(outvars=[*jaxpr.outvars[:count], *saved]), list(closed.consts), last - first)
    consts = jax.tree.leaves(loop.consts)
    making, at = _part_for(list(made), jaxpr)
    takes = [Where("fed", place - last) if place >= last else Where("same", len(same) + place) for place in at]
    sharing, at = _part_for(same, jaxpr)
    shared = eval_jaxpr(sharing, closed.consts, *(consts[place] for place in at))
    return Linearized(
        record,
        Push(structure, tuple(where), making, tuple(takes), list(closed.consts)),
        [*map(jnp.asarray, shared), *consts],
        [var.aval for var in saved],
        on[first:last],
        y_on,
    )


_SELECTIONS = frozenset({"and", "broadcast_in_dim", "not", "or", "reshape", "select_n", "squeeze"})


def _selected(jaxpr: Any, places: Sequence[int]) -> set[Any]:
    """The variables that are but selected from some inputs: the same at any time, and cheaper to make than to save."""
    selected = {jaxpr.invars[place] for place in places} | set(jaxpr.constvars)
    for equation in jaxpr.eqns:
        if equation.primitive.name in _SELECTIONS and selected.issuperset(variables_of(equation.invars)):
            selected.update(equation.outvars)
    return selected


def _part_for(outputs: list[Any], jaxpr: Any) -> tuple[Any, list[int]]:
    """The part of an open jaxpr that computes these outputs, and the places of the inputs that it takes."""
    equations = needed(jaxpr.eqns, outputs)
    read = set(variables_of([*outputs, *(atom for each in equations for atom in each.invars)]))
    at = [place for place, var in enumerate(jaxpr.invars) if var in read]
    return jaxpr.replace(invars=[jaxpr.invars[place] for place in at], outvars=outputs, eqns=equations), at


@dataclass(frozen=True)
class _Unless:
    """The step that runs a chunk, if its schedule says so. Its x is (what it is fed, the outputs if it is not run)."""

    step: Step

    def __call__(self, consts: Any, state: Any, feed: Feed) -> tuple[Any, Arrays]:
        def leave(consts: Any, state: Any, feed: Feed) -> tuple[Any, Arrays]:
            del consts
            return state, feed.x[1]

        rest = feed._replace(schedule=None)
        return jax.lax.cond(jax.lax.gt(feed.schedule.branch, np.int32(0)), self.step, leave, consts, state, rest)


def stack_chunks(loop: Loop, size: int, outputs: Arrays) -> Result:
    """`write_chunks` in the form that JAX differentiates."""
    inner = loop.step

    def step(consts: Any, state: Any, feed: Feed) -> tuple[Any, Arrays]:
        return inner(consts, state, feed.x[0])

    xs = Feed((loop.xs._replace(schedule=None), outputs), schedule=loop.xs.schedule)
    level = Level(size, lambda step, looped: _Unless(step), scheduled=True)
    return run_chunked(dataclasses.replace(loop, step=step, xs=xs), (level,))


def push_forward(loop: Loop, size: int, idle: Arrays, tangents: Any) -> tuple[Any, Any]:
    """The results of a loop and their tangents. What these need of each step is saved.

    Args:
        loop: the loop, whose step returns its outputs as a list.
        size: the steps of a chunk.
        idle: the outputs of steps that are not run, `[T, ...]`.
        tangents: those of (consts, state, xs).

    Raises:
        Unproven: if it is better to compute chunks again, or if the steps cannot be saved.
    """
    schedule, fed = loop.xs.schedule, loop.xs._replace(schedule=None)
    if not saves_steps(dataclasses.replace(loop, xs=fed)):
        raise Unproven("it is better to compute chunks again, or their products at once")
    given = loop.consts, loop.state, fed
    spread = any(is_sharded(leaf) or varying_axes(jax.typeof(leaf)) for leaf in jax.tree.leaves(given))
    if spread or reshards(loop.trace.jaxpr):
        raise Unproven("arrays are spread over devices")
    d_consts, d_state, d_fed = tangents
    part, d_on = nonzero_part(given, (d_consts, d_state, d_fed._replace(schedule=None)))
    found = linearize(dataclasses.replace(loop, xs=fed), part)
    bare, record = dataclasses.replace(as_step(loop).bare, memo=Memo()), found.record  # a rule may not hold tracers

    def recording(consts: Any, state: Arrays, fed: Feed, schedule: Schedule) -> Loop:
        xs = fed._replace(schedule=schedule)
        return dataclasses.replace(bare, step=record, consts=consts, state=state, xs=xs)

    @jax.custom_jvp
    def saving(consts: Any, state: Arrays, fed: Feed, outputs: Arrays, schedule: Schedule) -> Result:
        return write_chunks(recording(consts, state, fed, schedule), size, outputs)

    @saving.defjvp
    def _(primals: Any, tangents: Any) -> tuple[Result, Result]:
        schedule = primals[-1]

        def stacked(consts: Any, state: Arrays, fed: Feed, outputs: Arrays) -> Result:
            loop = recording(consts, state, fed, schedule)
            return stack_chunks(loop, size, outputs)

        return jax.jvp(stacked, primals[:-1], tangents[:-1])

    empty, count = [_zeros(loop, aval) for aval in found.saved], len(idle)
    leaves, written = saving(loop.consts, jax.tree.leaves(loop.state), fed, [*idle, *empty], schedule)
    state, ys = jax.tree.unflatten(jax.tree.structure(loop.state), leaves), written[:count]
    going_in = _tangents(given, found, part, d_on)
    d_state, d_ys = _solve(bare, found, going_in, (written[count:], jax.tree.leaves(fed)), schedule, size)
    return (state, ys), (_filled(state, found.state, d_state), _filled(ys, found.y, d_ys))


def _zeros(loop: Loop, aval: Any) -> Array:
    return jnp.zeros((loop.length, *aval.shape), aval.dtype)


def _filled(tree: PyTree, on: Sequence[bool], tangents: Arrays) -> PyTree:
    """The tangents of a tree, zero where none is known."""
    of_all, leaves = iter(tangents), zip(jax.tree.leaves(tree), on, strict=True)
    return fill_in(tree, [next(of_all) if is_on else zeros_like(leaf) for leaf, is_on in leaves if is_smooth(leaf)])


class _In(NamedTuple):
    consts: Arrays
    state: Arrays
    xs: Arrays


class _Out(NamedTuple):
    state: Arrays
    ys: Arrays


def _tangents(given: tuple[PyTree, ...], found: Linearized, part: Part, d_on: Arrays) -> _In:
    """The tangents that go in, those of the state for all leaves that get one."""
    groups = list(map(jax.tree.leaves, given))
    leaves, of_all = iter([leaf for group in groups for leaf in group]), iter(d_on)
    d_leaves = iter([(next(of_all) if is_on else None) for is_on in part.on])
    consts, state, xs = ([(next(leaves), next(d_leaves)) for _ in group] for group in groups)
    settled = [
        zeros_like(leaf) if d is None else d for (leaf, d), is_on in zip(state, found.state, strict=True) if is_on
    ]
    return _In([d for _, d in consts if d is not None], settled, [d for _, d in xs if d is not None])


def _solve(
    bare: Loop, found: Linearized, tangents: _In, read: tuple[Arrays, Arrays], schedule: Schedule, size: int
) -> _Out:
    """What goes out of a linear loop, given what goes in. `read` is what its steps have saved, and were fed."""
    same, (saved, fed) = found.same, read
    # JAX fails on the tangent of what a linear loop is given and does not read.
    used = {*found.push.where, *found.push.takes}
    same = [leaf if Where("same", place) in used else None for place, leaf in enumerate(same)]
    read = saved, [leaf if Where("fed", place) in used else None for place, leaf in enumerate(fed)]
    found = found._replace(same=[])  # a step may not hold tracers
    outputs = found.record.jaxpr.outvars[len(found.state) : len(found.state) + len(found.y)]
    zeros = [_zeros(bare, var.aval) for var in split(found.y, outputs)[0]]

    def run_push(given: _In) -> _Out:
        def step(consts: Any, state: Arrays, feed: Feed) -> tuple[Arrays, Arrays]:
            (same, d_consts), (saved, fed, d_x) = consts, feed.x
            out = found.push.at(same, saved, fed)(*d_consts, *state, *d_x)
            return out[: len(state)], out[len(state) :]

        xs, consts = Feed((*read, given.xs), schedule=schedule), (same, given.consts)
        loop = dataclasses.replace(bare, step=step, consts=consts, state=given.state, xs=xs)
        return _Out(*stack_chunks(loop, size, zeros))

    def pull(cotangents: _Out) -> _In:
        def step(same: Arrays, carried: Any, feed: Feed) -> tuple[Any, Arrays]:
            (d_consts, d_state), (saved, fed, d_y) = carried, feed.x
            back = jax.linear_transpose(found.push.at(same, saved, fed), *types)([*d_state, *d_y])
            more, d_state, d_x = (list(back[i:j]) for i, j in ((0, c), (c, c + s), (c + s, None)))
            return ([jax.lax.add(*pair) for pair in zip(d_consts, more, strict=True)], d_state), d_x

        c, s = len(tangents.consts), len(tangents.state)
        one_x = [jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype) for leaf in tangents.xs]
        types = [*map(jax.typeof, (*tangents.consts, *tangents.state)), *one_x]
        loop = dataclasses.replace(
            bare,
            step=step,
            consts=same,
            state=([zeros_like(leaf) for leaf in tangents.consts], cotangents.state),
            xs=Feed((*read, cotangents.ys), schedule=schedule),
            reverse=not bare.reverse,
        )
        (d_consts, d_state), d_xs = write_chunks(loop, size, [zeros_like(leaf) for leaf in tangents.xs])
        return _In(d_consts, d_state, d_xs)

    def equation(both: tuple[_In, _Out]) -> tuple[_In, _Out]:
        given, out = _all_linear(both)  # so that each leaf of the transpose depends on every other too
        # That the loop is linear is written into it where JAX takes its derivative: JAX 0.8 transposes it only then.
        _, pushed = jax.jvp(run_push, (jax.tree.map(zeros_like, given),), (given,))
        return _all_linear((given, jax.tree.map(jax.lax.sub, out, pushed)))

    def solve(_: Any, both: tuple[_In, _Out]) -> tuple[_In, _Out]:
        given, out = both
        return given, jax.tree.map(jax.lax.add, out, run_push(given))

    def solve_transposed(_: Any, both: tuple[_In, _Out]) -> tuple[_In, _Out]:
        given, out = both
        return jax.tree.map(jax.lax.add, given, pull(out)), out

    nothing = _Out([zeros_like(leaf) for leaf in tangents.state], zeros)
    both = jax.lax.custom_linear_solve(equation, _all_linear((tangents, nothing)), solve, solve_transposed)
    return _all_linear(both)[1]  # so that no part of the solution has a tangent of zero alone


def _all_linear(tree: PyTree) -> PyTree:
    """The tree itself, each leaf of which depends on every other: JAX transposes a solution only if all are unknown."""
    leaves, structure = jax.tree.flatten(tree)
    true = np.ones((), np.bool_)
    total = functools.reduce(jax.lax.add, [jnp.real(jnp.sum(leaf)).astype(jnp.float32) for leaf in leaves])
    return jax.tree.unflatten(
        structure,
        [jax.lax.select_n(true, jnp.broadcast_to(total.astype(leaf.dtype), leaf.shape), leaf) for leaf in leaves],
    )
