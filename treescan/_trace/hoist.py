"""Traces the body once, before the loop, which every rewriting of steps begins with: unchanged leaves leave the state.

Weights in the carry are an example. lax.scan turns a leaf that comes back unchanged into a constant. Behind a mask, a
branch or a checkpoint the same leaf is a new value per step, which the gradient would save T times. So unchanged leaves
are found in the trace of the body itself.

How lax.scan finds residuals that no step changes: https://github.com/jax-ml/jax/pull/1664.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import operator
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax

from .._avals import Leaves, PyTree, TreeDef, as_arrays, is_weak, same_type, varying_axes, with_shardings
from .._errors import BodyFault, speaking_of
from .._loop.feed import Consts, Feed, one_step
from .._loop.loop import Body, Loop, Step
from .._loop.run import checks_key_reuse, named_signature, settle, weak_types_settled
from .._loop.turns import Placed, share_traces
from .._tree import split
from .equations import inputs_of, named_axes
from .rewriting import is_rewriting
from .steps import Lifted, Shapes, Traced, Untraced, shapes_of
from .trace import Inputs, Trace, is_ref

if TYPE_CHECKING:
    from jax.extend.core import ClosedJaxpr, Var

# The loop of a trace.


def hoist(loop: Loop, changing: Sequence[bool] | None = None) -> Loop:
    """Traces the step, once and for all, and takes unchanged leaves out of the state.

    Args:
        loop: the loop.
        changing: for each leaf of the state whether something else than the step changes it, so that it stays.

    Returns:
        The loop with a `trace`. Its state is the list of the leaves that change, and its consts are `Consts`.
    """
    if loop.turns:
        return _hoist_turns(loop)
    (leaves, structure), feed = jax.tree.flatten(loop.state), one_step(loop.xs)
    jaxpr, (new, y) = _trace(loop, structure, (loop.consts, leaves, feed))
    leaves, changed = settle(leaves, new)
    if changed:  # a weakly typed init: as lax.scan does, once more from what it is promoted to
        with weak_types_settled():
            jaxpr, (new, y) = _trace(loop, structure, (loop.consts, leaves, feed))
    changing = (False,) * len(leaves) if changing is None else tuple(changing)
    given = Inputs(loop.consts, leaves, feed)
    inputs = inputs_of(jaxpr.jaxpr, given)
    fixed = _unchanged(jaxpr, inputs, changing)
    unchanged, state = split(fixed, leaves)
    trace = Trace(
        fixed,
        structure,
        y,
        jaxpr.out_avals[len(leaves) :],
        inputs._replace(unchanged=split(fixed, inputs.state)[0]),
        changing,
        named_axes(jaxpr),
        (jaxpr.jaxpr,),
    )
    step = Traced({shapes_of(jax.tree.leaves(given)): jaxpr}, fixed, jax.tree.structure(y))
    consts = Consts(unchanged=unchanged, inner=loop.consts)
    return loop.apart().having(step=step, consts=consts, state=state, trace=trace)


def whole_state(loop: Loop) -> Leaves:
    """The leaves of the whole state of a loop that `hoist` made, weak types settled."""
    return loop.hoisted.whole(loop.consts.unchanged, loop.state)


def restoring(loop: Loop) -> Callable[[Leaves], PyTree]:
    """What makes the whole state of those leaves that change, of a loop that `hoist` made."""
    return functools.partial(loop.hoisted.restore, loop.consts.unchanged)


# Loops that take turns.


def _hoist_turns(loop: Loop) -> Loop:
    """Traces each loop that takes turns. The leaves that none of them changes leave the state of all."""
    turns = _trace_turns(loop.each)
    each = [turn.hoisted for turn in turns]
    fixed = tuple(map(all, zip(*(one.fixed for one in each), strict=True)))
    unchanged, state = split(fixed, whole_state(turns[0]))
    trace = Trace(
        fixed,
        each[0].structure,
        tuple(one.y for one in each),
        list(itertools.chain(*(one.y_avals for one in each))),
        axes=frozenset[Hashable]().union(*(one.axes for one in each)),
        programs=tuple(itertools.chain(*(one.programs for one in each))),
    )
    return loop.apart().having(turns=tuple(turns), consts=Consts(unchanged=unchanged), state=state, trace=trace)


def _trace_turns(loops: Sequence[Loop]) -> list[Loop]:
    """Traces each loop's step, from a state whose weak types have settled. Equal steps of equal types share a trace."""
    if isinstance(loops[0].step, Placed):
        shared = share_traces([loop.step for loop in loops])
        loops = [loop.having(step=step) for loop, step in zip(loops, shared, strict=True)]
    state, each, known = loops[0].state, list[Loop](), dict[Hashable, Loop]()
    while len(each) < len(loops):
        loop, leaves = loops[len(each)].having(state=state), jax.tree.leaves(state)
        with speaking_of(loop.body.function):
            traced = hoist_once(loop, known)
        whole = whole_state(traced)
        if each and not all(map(same_type, leaves, whole)):
            each.clear()  # if a later body promotes a weakly typed leaf, earlier bodies must see that type
        else:
            each.append(traced)
        state = jax.tree.unflatten(traced.hoisted.structure, whole)
    return each


def hoist_once(loop: Loop, known: dict[Hashable, Loop], changing: Sequence[bool] | None = None) -> Loop:
    """What `hoist` makes of a loop, or has made of another of its kind, with this loop's arrays."""
    found = known.get(_kind(loop))
    if found is not None:
        unchanged, state = split(found.hoisted.fixed, jax.tree.leaves(loop.state))
        consts = Consts(unchanged=unchanged, inner=loop.consts)
        return loop.apart().having(step=found.step, consts=consts, state=state, trace=found.trace)
    traced = hoist(loop, changing)
    settled = jax.tree.unflatten(traced.hoisted.structure, whole_state(traced))
    known[_kind(loop.having(state=settled))] = traced
    return traced


def _kind(loop: Loop) -> Hashable:
    """What the trace of a step depends on: the step, and the types of all that it is given."""
    leaves, structure = jax.tree.flatten((loop.consts, loop.state))
    fed, of_feed = jax.tree.flatten(loop.xs)
    of_one = tuple((shape[1:], *others) for shape, *others in map(_type, fed))
    return loop.step, structure, tuple(map(_type, leaves)), of_feed, of_one


def _type(leaf: object) -> tuple[Any, ...]:
    aval = jax.typeof(leaf)
    others = (getattr(aval, name, None) for name in ("weak_type", "sharding", "memory_space"))
    return tuple(aval.shape), aval.dtype, varying_axes(aval), *others


# What transforms ask for.


def traced(loop: Loop) -> Loop:
    """The loop with its step traced, once and for all, and its unchanged leaves out of the state; see `Loop.trace`."""
    if loop.trace is not None:
        return loop
    if checks_key_reuse():
        from .raw_keys import with_raw_keys

        loop = with_raw_keys(loop)
    loop = hoist(loop)
    return loop.finished(restoring(loop))


def lifted(loop: Loop) -> Loop:
    """The traced loop with what its body closes over among its consts; see `lift`. Only then may transforms follow."""
    return lift(loop) if isinstance(loop.step, Traced) else loop


def wrapped(loop: Loop, step_of: Callable[[Step], Step] | None = None) -> Loop:
    """The traced loop with something around its step: it is lifted, and what its trace told holds of the whole.

    Args:
        loop: the loop.
        step_of: the step with what is put around it; None: the step itself.
    """
    loop = lifted(traced(loop))
    if step_of is None:
        return loop
    step = step_of(loop.step)
    jaxpr = jax.make_jaxpr(step)(loop.consts, loop.state, one_step(loop.xs))
    return loop.having(step=step, trace=loop.hoisted.around(jaxpr))


def flattened(loop: Loop) -> Loop:
    """The loop in the form of a traced one, but without a trace, if it `is_untraced`."""
    loop = flatten_only(loop.having(state=as_arrays(loop.state)))
    return loop.finished(restoring(loop))


def lift(loop: Loop) -> Loop:
    """A traced loop with what the body closes over among its consts, except mutable arrays.

    A rule for derivatives must not close over it, and under vmap one element may lend its own to another.
    """
    if loop.turns:
        return loop.having(turns=tuple(map(lift, loop.turns)))
    traced = loop.step
    assert isinstance(traced, Traced)
    closed, numbers = Leaves(), dict[int, int]()  # the traces for several shapes close over the same values

    def number_of(var: Var, value: object) -> int | None:
        if is_ref(var):
            return None
        if id(value) not in numbers:
            numbers[id(value)] = len(closed)
            closed.append(value)
        return numbers[id(value)]

    places, jaxprs = dict[Shapes, tuple[int | None, ...]](), dict[Shapes, "ClosedJaxpr"]()
    for shapes, jaxpr in traced.jaxprs.items():
        places[shapes] = tuple(map(number_of, jaxpr.jaxpr.constvars, jaxpr.consts))
        # A rule for derivatives may not hold tracers: there are types in place of what is lifted.
        pairs = zip(places[shapes], jaxpr.consts, strict=True)
        jaxprs[shapes] = jaxpr.replace(consts=[value if i is None else jax.typeof(value) for i, value in pairs])
    first = next(iter(traced.jaxprs.values()))
    avals = [aval for aval, fixed in zip(first.out_avals, traced.fixed, strict=False) if not fixed]
    state = [  # a branch that does nothing returns what the step does: no weak type where that returns none
        leaf if aval.weak_type or not is_weak(leaf) else jax.lax.convert_element_type(leaf, aval.dtype)
        for leaf, aval in zip(loop.state, avals, strict=True)
    ]
    step = Lifted(dataclasses.replace(traced, jaxprs=jaxprs), places)
    return loop.having(step=step, consts=loop.consts._replace(closed=closed), state=as_arrays(state))


def flatten_only(loop: Loop) -> Loop:
    """A loop in the form that `hoist` returns, without a trace: under `jax.disable_jit` the body must see values."""
    leaves, structure = jax.tree.flatten(loop.state)
    turns = [
        turn.having(step=Untraced(turn.step, structure), consts=Consts(inner=turn.consts), state=leaves)
        for turn in loop.each
    ]
    flat = loop.with_turns(turns)
    flat = flat if not loop.turns else flat.having(consts=Consts())
    return flat.having(trace=Trace((False,) * len(leaves), structure))


def fixed_leaves(loop: Loop, changing: Sequence[bool] | None = None) -> tuple[bool, ...]:
    """For each leaf of a loop's state whether no step changes it, under `jax.disable_jit` too; see `hoist`."""
    with jax.disable_jit(False):
        return hoist(loop.having(state=as_arrays(loop.state)), changing).hoisted.returned


def settled(loop: Loop) -> Loop:
    """A loop that is not traced, its weak types settled, which a trace tells."""
    with jax.disable_jit(False):
        leaves = whole_state(hoist(loop.having(state=as_arrays(loop.state))))
    return loop.apart().having(state=jax.tree.unflatten(jax.tree.structure(loop.state), leaves))


def trace_also(traced: Loop, loop: Loop, given: tuple[PyTree, Leaves, Feed], y_shapes: Shapes) -> ClosedJaxpr:
    """The trace of the step for other shapes of its arguments as well, on which it must do the same.

    Args:
        traced: what `hoist` made of the loop.
        loop: the loop before.
        given: the types of (consts, state leaves, feed).
        y_shapes: the shapes that y must have then.
    """
    trace, step, shapes = traced.hoisted, traced.step, shapes_of(jax.tree.leaves(given))
    assert isinstance(step, Traced)
    if shapes in step.jaxprs:
        return step.jaxprs[shapes]
    with weak_types_settled():
        jaxpr, (_, y) = _trace(loop, trace.structure, given)
    fixed = _unchanged(jaxpr, inputs_of(jaxpr.jaxpr, Inputs(*given)), trace.changing)
    now, before = ([leaf.dtype for leaf in jax.tree.leaves(tree)] for tree in (y, trace.y))
    found = fixed, jax.tree.structure(y), now, shapes_of(jax.tree.leaves(y))
    if found != (step.fixed, step.y, before, y_shapes):
        raise BodyFault(
            "{body} behaved differently",
            "The body must compute each row independently of the others, for any number of rows. If it cannot, "
            'leave `compact` out. `row_axes["y"]` says where the rows are in its outputs.',
        )
    step.jaxprs[shapes] = jaxpr
    return jaxpr


# One trace.


@dataclass(frozen=True, eq=False)
class _Flat:
    """A step as it is traced, its results as lists. Looks like the body to JAX, whose messages then name the body."""

    body: Body
    step: Step
    __signature__: inspect.Signature

    __wrapped__ = property(operator.attrgetter("body.function"))

    def __call__(self, consts: PyTree, state: PyTree, feed: Feed) -> tuple[Leaves, PyTree]:
        state, y = self.step(consts, state, feed)
        return jax.tree.leaves(state), y


def _trace(
    loop: Loop, structure: TreeDef, given: tuple[PyTree, Leaves, Feed]
) -> tuple[ClosedJaxpr, tuple[Leaves, PyTree]]:
    consts, leaves, feed = given
    flat = _Flat(loop.body, loop.step, named_signature("consts", *loop.names))
    jaxpr, types = jax.make_jaxpr(flat, return_shape=True)(consts, jax.tree.unflatten(structure, leaves), feed)
    return jaxpr, with_shardings(types, jaxpr.out_avals)


def _unchanged(jaxpr: ClosedJaxpr, inputs: Inputs, changing: tuple[bool, ...]) -> tuple[bool, ...]:
    """Which leaves of the state come back in their own place, and change nowhere else."""
    returned, may = jaxpr.jaxpr.outvars[: len(inputs.state)], is_rewriting()
    pairs = zip(inputs.state, returned, changing, strict=True)
    return tuple([may and a is b and not other for a, b, other in pairs])
