"""Traces the body once, before the loop, which every rewriting of steps begins with: unchanged leaves leave the state.

Weights in the carry are an example. lax.scan turns a leaf that comes back unchanged into a constant. Behind a mask, a
branch or a checkpoint the same leaf is a new value per step, which the gradient would save T times. So unchanged leaves
are found in the trace of the body itself.

How lax.scan finds residuals that no step changes: https://github.com/jax-ml/jax/pull/1664.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import operator
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import ShapedArray, eval_jaxpr
from jax.custom_derivatives import SymbolicZero, zero_from_primal

from .._avals import Array, PyTree, TreeDef, as_arrays, is_sharded, is_weak, place_like, same_type, varying_axes
from .._errors import BodyFault, speaking_of
from .._loop.feed import Consts, Feed, Flag
from .._loop.loop import Body, Loop, Step
from .._loop.run import checks_key_reuse, named_signature, settle, weak_types_settled
from .._loop.turns import CarryState, share_traces
from .._tree import Part, merge, split
from .equations import (
    NAMED_AXIS,
    PRODUCTS,
    branches_on_devices,
    called_without_rule,
    has_branches,
    has_reverse_rule,
    holds,
    named_axes,
    origins,
    with_jaxprs,
)
from .rewriting import is_rewriting


def silenced(jaxpr: Any) -> Any:
    """A jaxpr, closed or not, without the callbacks that return nothing, in its loops and branches too."""
    inner = getattr(jaxpr, "jaxpr", jaxpr)  # since JAX 0.12, an open jaxpr has itself there
    if inner is not jaxpr:
        return jaxpr.replace(jaxpr=silenced(inner))
    equations = [_silence_inner(eqn) for eqn in jaxpr.eqns if not _only_speaks(eqn)]
    kinds = {type(effect) for eqn in equations for effect in eqn.effects}
    return jaxpr.replace(eqns=equations, effects={effect for effect in jaxpr.effects if type(effect) in kinds})


def _only_speaks(eqn: Any) -> bool:
    """Whether an equation has effects and nothing else; one that writes to a mutable array has more."""
    return bool(eqn.effects) and not eqn.outvars and all(isinstance(var.aval, ShapedArray) for var in eqn.invars)


def _silence_inner(eqn: Any) -> Any:
    """An equation with the loops and branches that it holds silenced; the effects of others are their own."""
    left = list[Any]()

    def silence(jaxpr: Any) -> Any:
        left.append(silenced(jaxpr))
        return left[-1]

    params = with_jaxprs(eqn.params, silence) if eqn.effects else {}
    kinds = {type(effect) for jaxpr in left for effect in jaxpr.effects}
    kept = {effect for effect in eqn.effects if type(effect) in kinds}
    return eqn.replace(params=params, effects=kept) if left else eqn


_NAMED_AXIS = frozenset({NAMED_AXIS})

_REPEATED = _NAMED_AXIS | {"DebugEffect", "OrderedDebugEffect", "ErrorEffect"}  # the last: checkify
"""JAX refuses all other effects under `jax.checkpoint`; it repeats those of `jax.debug`."""

_WRITES = frozenset({"AccumEffect", "WriteEffect"})


def _effects_of(jaxpr: Any) -> set[str]:
    return {type(effect).__name__ for effect in jaxpr.effects}


def is_ref(var: Any) -> bool:
    """Whether a variable is a mutable array."""
    return not isinstance(var.aval, ShapedArray)


Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, eq=False)
class Traced:
    """A step that was traced already. Its state are the leaves that it changes.

    Attributes:
        jaxprs: the step, flat, for the shapes of its arguments: (`Consts.inner`, state, feed) to (state, y).
        fixed: for each leaf of the state whether it is unchanged.
        y: the structure of y.
    """

    jaxprs: dict[Shapes, Any]
    fixed: tuple[bool, ...]
    y: TreeDef

    def __call__(self, consts: Consts, state: list[Any], feed: Feed) -> tuple[list[Any], PyTree]:
        return self.evaluate(None, consts, state, feed)

    def evaluate(
        self, closed: list[Any] | None, consts: Consts, state: list[Any], feed: Feed
    ) -> tuple[list[Any], PyTree]:
        """Runs the trace; `closed` is what the body closes over; None: what it closed over in the trace."""
        leaves = self._leaves(consts, state, feed)
        jaxpr = self.jaxprs[_shapes(leaves)]
        closed = jaxpr.consts if closed is None else closed
        out = eval_jaxpr(jaxpr.jaxpr, closed, *leaves, propagate_source_info=True)
        out = list(map(array_of, out, jaxpr.out_avals))
        new, y = out[: len(self.fixed)], out[len(self.fixed) :]
        return split(self.fixed, new)[1], jax.tree.unflatten(self.y, y)

    def shapes(self, consts: Consts, state: list[Any], feed: Feed) -> Shapes:
        """Under which a trace is found."""
        return _shapes(self._leaves(consts, state, feed))

    def _leaves(self, consts: Consts, state: list[Any], feed: Feed) -> list[Any]:
        return jax.tree.leaves((consts.inner, merge(self.fixed, consts.unchanged, state), feed))


SILENT = Flag("silent")
"""Said to a traced step that runs once more: its callbacks have been called."""


@dataclass(frozen=True, eq=False)
class Lifted:
    """A traced step that is given what its body closes over, in its consts.

    Attributes:
        traced: the step.
        places: which of them its trace for arguments of certain shapes closes over; None: a mutable array, which the
            trace goes on to close over.
    """

    traced: Traced
    places: dict[Shapes, tuple[int | None, ...]]

    def __call__(self, consts: Consts, state: list[Any], feed: Feed) -> tuple[list[Any], PyTree]:
        traced = self.silenced().traced if SILENT.on(consts) else self.traced
        shapes, closed = traced.shapes(consts, state, feed), consts.closed or ()
        pairs = zip(self.places[shapes], traced.jaxprs[shapes].consts, strict=True)
        return traced.evaluate([ref if i is None else closed[i] for i, ref in pairs], consts, state, feed)

    @property
    def once_only(self) -> bool:
        """Whether it has effects that JAX refuses to repeat."""
        return any(not _effects_of(jaxpr) <= _REPEATED for jaxpr in self.traced.jaxprs.values())

    def silenced(self) -> Lifted:
        """The step without its callbacks, for a second run that must not report again."""
        jaxprs = {shapes: silenced(jaxpr) for shapes, jaxpr in self.traced.jaxprs.items()}
        return dataclasses.replace(self, traced=dataclasses.replace(self.traced, jaxprs=jaxprs))


@dataclass(frozen=True)
class Untraced:
    """A step in the same form that is not traced, for `jax.disable_jit`. Nothing leaves its state."""

    step: Step
    structure: TreeDef

    def __call__(self, consts: Consts, state: list[Any], feed: Feed) -> tuple[list[Any], PyTree]:
        new, y = as_arrays(self.step(consts.inner, jax.tree.unflatten(self.structure, state), feed))
        return jax.tree.leaves(new), y


class Inputs(NamedTuple):
    """What a traced step is given, with the variables of its jaxpr in place of arrays.

    Attributes:
        consts: what all steps read.
        state: the leaves of the whole state.
        feed: what a step is fed.
        unchanged: the leaves of the state that the step does not change.
    """

    consts: PyTree
    state: list[Any]
    feed: Feed
    unchanged: Sequence[Any] = ()


class Hoisted(NamedTuple):
    """A loop whose state is the list of leaves that change, and what else its trace told.

    Attributes:
        loop: the loop; its consts are `Consts`.
        fixed: for each leaf of the state of before whether it is unchanged.
        structure: of that state.
        y: the types of one step's y; None if nothing was traced.
        y_avals: the same for each leaf, as JAX has them in a trace.
        effects: whether the body has side effects, for example callbacks.
        once_only: whether any of that is something that JAX refuses to do once more in the gradient.
        refs: whether it reads or writes mutable arrays that it closes over.
        writes: whether it writes one that it closes over; those that it makes itself do not count.
        reverse_rule: whether anything in it has a rule for reverse mode alone.
        branches: whether it branches.
        products: whether it multiplies matrices.
        branches_on_devices: whether JAX alone may differentiate it; see the function of this name.
        axes: the named axes of `jax.vmap` over which it computes.
        jaxpr: one step, open; None if nothing was traced.
        inputs: the inputs of `jaxpr` by name.
        changing: for each leaf of the state of before whether something else than the step changes it.
    """

    loop: Loop
    fixed: tuple[bool, ...]
    structure: TreeDef
    y: PyTree
    y_avals: list[Any]
    effects: bool = False
    once_only: bool = False
    refs: bool = False
    writes: bool = False
    reverse_rule: bool = False
    branches: bool = False
    products: bool = False
    branches_on_devices: bool = False
    axes: frozenset[Hashable] = frozenset()
    jaxpr: Any = None
    inputs: Inputs = Inputs(None, [], Feed(None))
    changing: tuple[bool, ...] = ()

    @property
    def traced(self) -> Traced:
        """The step, where `hoist` made it and nothing was lifted yet."""
        assert isinstance(self.loop.step, Traced)
        return self.loop.step

    @property
    def closed(self) -> list[Any]:
        """What the step closes over, and is not lifted yet; see `lift`."""
        steps = (turn.step for turn in self.loop.each)
        jaxprs = itertools.chain(*(step.jaxprs.values() for step in steps if isinstance(step, Traced)))
        return [value for jaxpr in jaxprs for value in jaxpr.consts]

    @property
    def each(self) -> tuple[Hoisted, ...]:
        """The traces of the loops that take turns; of a loop without turns its own."""
        return tuple(turn.hoisted for turn in self.loop.turns) or (self,)

    @property
    def repeatable(self) -> Lifted:
        """The step, once `lift` was there: a derivative may compute it again."""
        assert isinstance(self.loop.step, Lifted)
        return self.loop.step

    @property
    def settled(self) -> list[Any]:
        """The leaves of the whole state, weak types settled."""
        return merge(self.fixed, self.loop.consts.unchanged, self.loop.state)

    @property
    def returned(self) -> tuple[bool, ...]:
        """For each leaf of the state of before whether the step returns it as it is.

        Such a leaf stays in the state without rewriting, and if a call returns it, as of a body under `jax.jit`.
        """
        found = origins(self.jaxpr, self.jaxpr.invars, called_without_rule)
        return tuple(a is b and not other for a, b, other in zip(self.inputs.state, found, self.changing, strict=False))

    @property
    def varying(self) -> tuple[bool, ...]:
        """For each input of `jaxpr` whether steps differ in it."""
        same = {*jax.tree.leaves(self.inputs.consts), *self.inputs.unchanged}
        return tuple(var not in same for var in self.jaxpr.invars)

    def bare(self) -> Hoisted:
        """The same without any array: what a rule for derivatives may hold."""
        return self._replace(loop=self.loop.plan)

    def restore(self, changed: list[Any]) -> PyTree:
        """The whole state."""
        return jax.tree.unflatten(self.structure, merge(self.fixed, self.loop.consts.unchanged, changed))


def hoist(loop: Loop, changing: Sequence[bool] | None = None) -> Hoisted:
    """Traces the step, once and for all, and takes unchanged leaves out of the state.

    Args:
        loop: the loop.
        changing: for each leaf of the state whether something else than the step changes it, so that it stays.
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
    given, types = jax.tree.flatten(Inputs(loop.consts, leaves, feed))
    inputs: Inputs = jax.tree.unflatten(types, jaxpr.jaxpr.invars)
    fixed = _unchanged(jaxpr, inputs, changing)
    unchanged, state = split(fixed, leaves)
    effects, refs = _effects_of(jaxpr), any(map(is_ref, jaxpr.jaxpr.constvars))
    traced = Traced({_shapes(given): jaxpr}, fixed, jax.tree.structure(y))
    consts = Consts(unchanged=unchanged, inner=loop.consts)
    hoisted = loop.having(step=traced, consts=consts, state=state, callee=loop.callee.apart())
    return Hoisted(
        hoisted,
        fixed,
        structure,
        y,
        jaxpr.out_avals[len(leaves) :],
        effects=not effects <= _NAMED_AXIS,
        once_only=not effects <= _REPEATED,
        refs=refs,
        writes=refs and not effects.isdisjoint(_WRITES),
        reverse_rule=has_reverse_rule(jaxpr.jaxpr),
        branches=has_branches(jaxpr.jaxpr),
        products=holds(jaxpr.jaxpr, PRODUCTS),
        branches_on_devices=branches_on_devices(jaxpr.jaxpr),
        axes=named_axes(jaxpr),
        jaxpr=jaxpr.jaxpr,
        inputs=inputs._replace(unchanged=split(fixed, inputs.state)[0]),
        changing=changing,
    )


def _hoist_turns(loop: Loop) -> Hoisted:
    """Traces each loop that takes turns. The leaves that none of them changes leave the state of all."""
    each = _trace_turns(loop.each)
    fixed = tuple(map(all, zip(*(one.fixed for one in each), strict=True)))
    unchanged, state = split(fixed, each[0].settled)
    turns = tuple(dataclasses.replace(one.loop, trace=one) for one in each)
    flags: dict[str, Any] = {name: any(getattr(one, name) for one in each) for name in _FLAGS}
    return Hoisted(
        loop.having(turns=turns, consts=Consts(unchanged=unchanged), state=state, callee=loop.callee.apart()),
        fixed,
        each[0].structure,
        tuple(one.y for one in each),
        list(itertools.chain(*(one.y_avals for one in each))),
        **flags,
        axes=frozenset[Hashable]().union(*(one.axes for one in each)),
    )


_FLAGS = ("effects", "once_only", "refs", "writes", "reverse_rule", "branches", "products", "branches_on_devices")


def _trace_turns(loops: Sequence[Loop]) -> list[Hoisted]:
    """Traces each loop's step, from a state whose weak types have settled. Equal steps of equal types share a trace."""
    if isinstance(loops[0].step, CarryState):
        shared = share_traces([loop.step for loop in loops])
        loops = [dataclasses.replace(loop, step=step) for loop, step in zip(loops, shared, strict=True)]
    state, each, known = loops[0].state, list[Hoisted](), dict[Hashable, Hoisted]()
    while len(each) < len(loops):
        loop, leaves = dataclasses.replace(loops[len(each)], state=state), jax.tree.leaves(state)
        with speaking_of(loop.body.function):
            hoisted = hoist_once(loop, known)
        if each and not all(map(same_type, leaves, hoisted.settled)):
            each.clear()  # if a later body promotes a weakly typed leaf, earlier bodies must see that type
        else:
            each.append(hoisted)
        state = jax.tree.unflatten(hoisted.structure, hoisted.settled)
    return each


def hoist_once(loop: Loop, known: dict[Hashable, Hoisted], changing: Sequence[bool] | None = None) -> Hoisted:
    """What `hoist` makes of a loop, or has made of another of its kind, with this loop's arrays."""
    found = known.get(_kind(loop))
    if found is not None:
        unchanged, state = split(found.fixed, jax.tree.leaves(loop.state))
        step, consts = found.loop.step, Consts(unchanged=unchanged, inner=loop.consts)
        return found._replace(loop=loop.having(step=step, consts=consts, state=state, callee=loop.callee.apart()))
    hoisted = hoist(loop, changing)
    settled = jax.tree.unflatten(hoisted.structure, hoisted.settled)
    known[_kind(dataclasses.replace(loop, state=settled))] = hoisted
    return hoisted


def _kind(loop: Loop) -> Hashable:
    """What the trace of a step depends on: the step, and the types of all that it is given."""
    leaves, structure = jax.tree.flatten((loop.consts, loop.state))
    layers, of_layers = jax.tree.flatten(loop.xs)
    of_one = tuple((shape[1:], *others) for shape, *others in map(_type, layers))
    return loop.step, structure, tuple(map(_type, leaves)), of_layers, of_one


def _type(leaf: Any) -> tuple[Any, ...]:
    aval = jax.typeof(leaf)
    others = (getattr(aval, name, None) for name in ("weak_type", "sharding", "memory_space"))
    return tuple(aval.shape), aval.dtype, varying_axes(aval), *others


def traced(loop: Loop) -> Loop:
    """The loop with its step traced, once and for all, and its unchanged leaves out of the state; see `Loop.trace`."""
    if loop.trace is not None:
        return loop
    if checks_key_reuse():
        from .raw_keys import with_raw_keys

        loop = with_raw_keys(loop)
    return as_loop(hoist(loop))


def lifted(loop: Loop) -> Loop:
    """The traced loop with what its body closes over among its consts; see `lift`. Only then may transforms follow."""
    assert loop.trace is not None
    if not isinstance(loop.hoisted.loop.step, Traced):  # it was lifted before
        return loop
    assert loop.step is loop.hoisted.loop.step
    hoisted = lift(loop.trace)
    step, consts, state = hoisted.loop.step, hoisted.loop.consts, hoisted.loop.state
    return dataclasses.replace(loop, step=step, consts=consts, state=state, trace=hoisted)


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
    hoisted, effects = loop.hoisted, _effects_of(jaxpr)
    hoisted = hoisted._replace(
        effects=hoisted.effects or not effects <= _NAMED_AXIS,
        once_only=hoisted.once_only or not effects <= _REPEATED,
        reverse_rule=hoisted.reverse_rule or has_reverse_rule(jaxpr.jaxpr),
        branches=hoisted.branches or has_branches(jaxpr.jaxpr),
        products=hoisted.products or holds(jaxpr.jaxpr, PRODUCTS),
        branches_on_devices=hoisted.branches_on_devices or branches_on_devices(jaxpr.jaxpr),
        axes=hoisted.axes | named_axes(jaxpr),
    )
    return loop.having(step=step, trace=hoisted)


def flattened(loop: Loop) -> Loop:
    """The loop in the form of a traced one, but without a trace, if it `is_untraced`."""
    return as_loop(flatten_only(dataclasses.replace(loop, state=as_arrays(loop.state))))


def as_loop(hoisted: Hoisted) -> Loop:
    """The loop that `hoist` made, which finishes with the whole state."""
    loop = dataclasses.replace(hoisted.loop, trace=hoisted)
    return loop.finished(hoisted.restore)


def lift(hoisted: Hoisted) -> Hoisted:
    """A traced loop with what the body closes over among its consts, except mutable arrays.

    A rule for derivatives must not close over it, and under vmap one element may lend its own to another.
    """
    if hoisted.loop.turns:
        turns = (dataclasses.replace(one.loop, trace=one) for one in map(lift, hoisted.each))
        return hoisted._replace(loop=dataclasses.replace(hoisted.loop, turns=tuple(turns)))
    traced = hoisted.traced
    found = [pair for jaxpr in traced.jaxprs.values() for pair in zip(jaxpr.jaxpr.constvars, jaxpr.consts, strict=True)]
    closed = list({id(value): value for var, value in found if not is_ref(var)}.values())
    numbers = {id(value): i for i, value in enumerate(closed)}
    places = {key: tuple(numbers.get(id(value)) for value in jaxpr.consts) for key, jaxpr in traced.jaxprs.items()}
    consts = hoisted.loop.consts._replace(closed=closed)
    first = next(iter(traced.jaxprs.values()))
    avals = [aval for aval, fixed in zip(first.out_avals, hoisted.fixed, strict=False) if not fixed]
    state = [  # a branch that does nothing returns what the step does: no weak type where that returns none
        leaf if aval.weak_type or not is_weak(leaf) else jax.lax.convert_element_type(leaf, aval.dtype)
        for leaf, aval in zip(hoisted.loop.state, avals, strict=True)
    ]
    # A rule for derivatives may not hold tracers: there are types in place of what is lifted.
    jaxprs = {
        key: jaxpr.replace(consts=[value if i is None else jax.typeof(value) for i, value in pairs])
        for key, jaxpr in traced.jaxprs.items()
        for pairs in (zip(places[key], jaxpr.consts, strict=True),)
    }
    step = Lifted(dataclasses.replace(traced, jaxprs=jaxprs), places)
    loop = hoisted.loop.having(step=step, consts=consts, state=as_arrays(state))
    return hoisted._replace(loop=loop)


def flatten_only(loop: Loop) -> Hoisted:
    """A loop in the form that `hoist` returns, without a trace: under `jax.disable_jit` the body must see values."""
    leaves, structure = jax.tree.flatten(loop.state)
    flat = loop.with_turns(
        [
            turn.having(step=Untraced(turn.step, structure), consts=Consts(inner=turn.consts), state=leaves)
            for turn in loop.each
        ]
    )
    flat = flat if not loop.turns else flat.having(consts=Consts())
    return Hoisted(flat, (False,) * len(leaves), structure, None, [])


def fixed_leaves(loop: Loop, changing: Sequence[bool] | None = None) -> tuple[bool, ...]:
    """For each leaf of a loop's state whether no step changes it, under `jax.disable_jit` too; see `hoist`."""
    with jax.disable_jit(False):
        return hoist(dataclasses.replace(loop, state=as_arrays(loop.state)), changing).returned


def settled(loop: Loop) -> Loop:
    """A loop that is not traced, its weak types settled, which a trace tells."""
    with jax.disable_jit(False):
        leaves = hoist(dataclasses.replace(loop, state=as_arrays(loop.state))).settled
    return dataclasses.replace(
        loop, state=jax.tree.unflatten(jax.tree.structure(loop.state), leaves), callee=loop.callee.apart()
    )


def trace_also(hoisted: Hoisted, loop: Loop, given: tuple[PyTree, list[Any], Feed], y_shapes: Shapes) -> Any:
    """The trace of the step for other shapes of its arguments as well, on which it must do the same.

    Args:
        hoisted: what `hoist` made of the loop.
        loop: the loop before.
        given: the types of (consts, state leaves, feed).
        y_shapes: the shapes that y must have then.
    """
    traced = hoisted.traced
    shapes = _shapes(jax.tree.leaves(given))
    if shapes in traced.jaxprs:
        return traced.jaxprs[shapes]
    with weak_types_settled():
        jaxpr, (_, y) = _trace(loop, hoisted.structure, given)
    inputs: Inputs = jax.tree.unflatten(jax.tree.structure(Inputs(*given)), jaxpr.jaxpr.invars)
    fixed = _unchanged(jaxpr, inputs, hoisted.changing)
    now, before = ([leaf.dtype for leaf in jax.tree.leaves(tree)] for tree in (y, hoisted.y))
    found = fixed, jax.tree.structure(y), now, _shapes(jax.tree.leaves(y))
    if found != (traced.fixed, traced.y, before, y_shapes):
        raise BodyFault(
            "{body} behaved differently",
            "The body must compute each row independently of the others, for any number of rows. If it cannot, "
            'leave `compact` out. `row_axes["y"]` says where the rows are in its outputs.',
        )
    traced.jaxprs[shapes] = jaxpr
    return jaxpr


def one_step(xs: Feed) -> Feed:
    """The types of what one step is fed."""

    def entry(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype, weak_type=is_weak(leaf))

    if not [leaf for leaf in jax.tree.leaves(xs) if is_sharded(leaf) or varying_axes(jax.typeof(leaf))]:
        return jax.tree.map(entry, xs)  # a trace of the indexing would say the same, and takes longer
    return jax.eval_shape(lambda xs: jax.tree.map(lambda x: jax.lax.index_in_dim(x, 0, keepdims=False), xs), xs)


@dataclass(frozen=True, eq=False)
class _Flat:
    """A step as it is traced, its results as lists. Looks like the body to JAX, whose messages then name the body."""

    body: Body
    step: Step
    __signature__: inspect.Signature

    __wrapped__ = property(operator.attrgetter("body.function"))

    def __call__(self, consts: PyTree, state: PyTree, feed: Feed) -> tuple[list[Any], PyTree]:
        state, y = self.step(consts, state, feed)
        return jax.tree.leaves(state), y


def _trace(loop: Loop, structure: TreeDef, given: tuple[PyTree, list[Any], Feed]) -> tuple[Any, Any]:
    consts, leaves, feed = given
    flat = _Flat(loop.body, loop.step, named_signature("consts", *loop.names))
    return jax.make_jaxpr(flat, return_shape=True)(consts, jax.tree.unflatten(structure, leaves), feed)


def _unchanged(jaxpr: Any, inputs: Inputs, changing: tuple[bool, ...]) -> tuple[bool, ...]:
    """Which leaves of the state come back in their own place, and change nowhere else."""
    returned, may = jaxpr.jaxpr.outvars[: len(inputs.state)], is_rewriting()
    pairs = zip(inputs.state, returned, changing, strict=True)
    return tuple([may and a is b and not other for a, b, other in pairs])


def array_of(value: Any, aval: Any) -> Any:
    """A constant that a step returns comes out of its jaxpr as a plain number."""
    if isinstance(value, jax.Array):
        return value
    return jnp.asarray(value) if aval.weak_type else jnp.asarray(value, aval.dtype)


def _shapes(leaves: Sequence[Any]) -> Shapes:
    return tuple([tuple(leaf.shape) if hasattr(leaf, "shape") else jax.typeof(leaf).shape for leaf in leaves])


def is_smooth(leaf: Any) -> bool:
    """Whether a value has a tangent, or values of a type have."""
    return bool(jnp.issubdtype(leaf.dtype if hasattr(leaf, "dtype") else jax.typeof(leaf).dtype, jnp.inexact))


def smooth_part(tree: Any) -> Part:
    """All leaves of a tree that can have a tangent."""
    leaves, structure = jax.tree.flatten(tree)
    return Part(structure, tuple(map(is_smooth, leaves)))


def nonzero_part(tree: PyTree, tangents: PyTree) -> tuple[Part, list[Any]]:
    """Which leaves have a tangent that is not known to be zero, and these tangents."""
    leaves, structure = jax.tree.flatten(tree)
    d_leaves = jax.tree.leaves(tangents)
    on = tuple(is_smooth(leaf) and not isinstance(d, SymbolicZero) for leaf, d in zip(leaves, d_leaves, strict=True))
    return Part(structure, on), [d for d, is_on in zip(d_leaves, on, strict=True) if is_on]


def zeros_like(leaf: Any) -> Array:
    """A tangent of zero, of the type of a leaf, or of this type."""
    aval = leaf if isinstance(leaf, ShapedArray) else jax.typeof(leaf)
    return place_like(jnp.zeros(aval.shape, aval.dtype), aval)


def instantiated(tangent: Any, like: Array) -> Array:
    """A tangent as an array, zero or not."""
    return zeros_like(like) if isinstance(tangent, SymbolicZero) else tangent


def no_tangent(leaf: Any) -> Any:
    """What represents the tangent of a leaf that has none."""
    return zero_from_primal(leaf, symbolic_zeros=True)


def fill_in(tree: PyTree, tangents: list[Array]) -> PyTree:
    """The tangent of a tree, from those of the leaves that have any."""
    part = smooth_part(tree)
    return part.join(tangents, [no_tangent(leaf) for leaf in part.split(tree)[1]])
