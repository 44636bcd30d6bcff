"""`check_finite`: finds the first step whose carry became NaN or infinite, and the operation that caused it.

The loop carries one more int, the first bad step. If there is one, a branch after the loop runs the steps before it
again, and evaluates that step operation by operation.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.core import Tracer

from .._avals import describe_argument
from .._body.carries import read_carries
from .._errors import ArgumentError, ArgumentTypeError, Fault, NonFiniteError
from .._finite import NonFinite, note
from .._loop.body import Memo
from .._loop.loop import Feed, Loop, Step
from .._loop.run import as_arrays, is_jit_disabled, run
from .._trace.blame import INF, NAN, Blame, Operation, becomes_bad, is_checked, origin
from .._trace.hoist import Hoisted, Lifted, as_loop, flattened, hoist, lift, merge
from .._tree import leaves_with_path, thaw_static
from .._types import Array, PyTree, TreeDef
from .axes import MergeWhole

UNCHECKED = {"check_finite": "it cannot check its carry. `scan`, `fold`, `accumulate` and `fori` can."}
"""Why a verb has no `check_finite`."""

_CONSTANT = "a constant of the body"

_GOOD = -1
"""In place of a step's position: none went wrong."""


@dataclass(frozen=True, eq=False)
class CheckedStep:
    """A step after which its state is looked at. Its state is (the first bad position, the inner state).

    Attributes:
        step: the inner step.
        keyed: whether the inner step is fed its position too.
        watched: for each leaf of its state whether it is looked at: the body may change it.
    """

    step: Step
    keyed: bool
    watched: tuple[bool, ...]

    def __call__(self, consts: PyTree, state: tuple[Array, list[Array]], feed: Feed) -> tuple[PyTree, PyTree]:
        first, given = state
        position = feed.position
        assert position is not None
        new, y = self.step(consts, given, feed if self.keyed else feed._replace(position=None))
        bad = jnp.zeros((), bool)
        for old, leaf, watched in zip(given, jax.tree.leaves(new), self.watched, strict=True):
            if watched and is_checked(leaf):
                bad = bad | jnp.any(becomes_bad(old, leaf))
        return (jnp.where((first == _GOOD) & bad, position, first), new), y


@dataclass(frozen=True, eq=False)
class _Before:
    """A step that runs those before a position, and hands on the state from there. Its consts: (position, inner)."""

    step: Step
    reverse: bool
    keyed: bool

    def __call__(self, consts: Any, state: list[Array], feed: Feed) -> tuple[PyTree, PyTree]:
        end, inner = consts
        position = feed.position
        assert position is not None
        new, _ = self.step(inner, state, feed if self.keyed else feed._replace(position=None))
        goes_on = position > end if self.reverse else position < end
        return [jnp.where(goes_on, leaf, old) for old, leaf in zip(state, new, strict=True)], None


class Evidence(NamedTuple):
    """What is known of the first bad step, and what is static of it.

    Attributes:
        first: int32[], its position; -1: there is none, and all else is zeros.
        before: all leaves of the state before it.
        after: those after it.
        x: what it was fed beside the state.
        bits: int32[...], of each operation; see `Blame`.
    """

    first: Array
    before: list[Array]
    after: list[Array]
    x: PyTree
    bits: Array


class WithEvidence(NamedTuple):
    """The outputs of a checked loop, on their way to `deliver`.

    Attributes:
        ys: the outputs.
        evidence: what is known of the first bad step.
        told: what is static of that, a `Case`.
    """

    ys: PyTree
    evidence: Evidence
    told: Any


@jtu.register_static
@dataclass(frozen=True, eq=False)
class Case:
    """What is static of the evidence of a loop: its operations, and what its leaves are called.

    Attributes:
        length: the steps of the loop.
        begin: the position of the step that runs first.
        operations: those of one step, inputs first.
        results: for each leaf of the state the operation that makes it.
        inputs: what each input is called.
        paths: what each leaf of the state is called.
        fixed: for each leaf of the state whether no step changes it.
        structure: of the state.
        check: the transform.
        name: of the carry.
    """

    length: int
    begin: int
    operations: tuple[Operation, ...]
    results: tuple[int | None, ...]
    inputs: tuple[str, ...]
    paths: tuple[str, ...]
    fixed: tuple[bool, ...]
    structure: TreeDef
    check: CheckFinite
    name: str

    def record(self, evidence: Evidence) -> NonFinite:
        """The record, of values that are known."""
        state = jax.tree.unflatten(self.structure, evidence.before)
        carry = thaw_static(state[1] if self.check.indexed else state)
        return NonFinite(
            **self._diagnosis(evidence),
            step=int(evidence.first),
            steps=self.length,
            was_finite=all(bool(np.isfinite(_numbers(leaf)).all()) for leaf in evidence.before if is_checked(leaf)),
            carry=read_carries(carry, self.name) if self.check.custom else carry,
            x=evidence.before[0] if self.check.indexed else thaw_static(evidence.x),
        )

    def _diagnosis(self, evidence: Evidence) -> dict[str, Any]:
        """What became NaN or infinite, and why, if the steps came out as they did in the loop."""
        worst = self._worst(evidence)
        if worst is None:
            return {"path": self.name, "kind": None, "rows": (), "operation": None, "place": None, "source": None}
        leaf, rows, is_nan = worst
        made, bits = self.results[leaf], np.asarray(evidence.bits).tolist()
        number = None if made is None else origin(self.operations, bits, made, NAN if is_nan else INF)
        found = Operation(None, None, ()) if number is None else self.operations[number]
        given = _CONSTANT if number is None else self.inputs[number] if found.name is None else None
        return {
            "path": self.paths[leaf],
            "kind": "NaN" if is_nan else "inf",
            "rows": rows,
            "operation": found.name,
            "place": found.place,
            "source": given,
        }

    def _worst(self, evidence: Evidence) -> tuple[int, tuple[int, ...], bool] | None:
        """The first leaf that is bad, its rows that are, and whether that is for NaN; None: no leaf became so here.

        The steps that ran again may be rounded otherwise than in the loop, and a callback may return something else.
        """
        leaves = zip(evidence.before, evidence.after, self.fixed, strict=True)
        watched = [(i, old, new) for i, (old, new, fixed) in enumerate(leaves) if not fixed and is_checked(new)]
        if int(evidence.first) != self.begin and any(np.isnan(_numbers(old)).any() for _, old, _ in watched):
            return None
        for i, old, new in watched:
            nan = np.isnan(_numbers(new))
            bad = nan if nan.any() else np.asarray(becomes_bad(old, new))
            if bad.any():
                rows = np.flatnonzero(bad.reshape(bad.shape[0], -1).any(axis=1)).tolist() if bad.ndim else []
                return i, tuple(rows), bool(nan.any())
        return None


def _numbers(leaf: Any) -> Any:
    """A leaf in a dtype that NumPy has functions for."""
    return np.asarray(leaf).astype(complex)


@dataclass(frozen=True)
class CheckFinite:
    """`check_finite`: notes the first step whose carry became NaN or infinite.

    Attributes:
        call: the verb and the body, as messages name them.
        indexed: whether x is an index that the state holds, as that of `fori` is.
        custom: whether the state holds custom carries.
    """

    call: str
    indexed: bool = False
    custom: bool = False
    moves = True

    def __call__(self, loop: Loop) -> Loop:
        if not loop.length:
            return loop
        _refuse_devices()
        keyed = loop.xs.position is not None
        loop = dataclasses.replace(loop, state=as_arrays(loop.state))
        with jax.disable_jit(False):
            hoisted = hoist(loop)
            _refuse_effects(hoisted)
            hoisted = lift(hoisted)
        changing = tuple(not fixed for fixed in hoisted.fixed)
        plain = flattened(loop) if is_jit_disabled() else as_loop(hoisted)
        watched = changing if is_jit_disabled() else (True,) * sum(changing)
        position = jnp.arange(loop.length, dtype=jnp.int32)
        checked = dataclasses.replace(
            plain,
            step=CheckedStep(plain.step, keyed, watched),
            state=(jnp.int32(_GOOD), plain.state),
            xs=plain.xs._replace(position=position),
            memo=Memo(),
            trace=None,
        )

        def ys_of(state: PyTree, ys: PyTree) -> PyTree:
            evidence, case = _gather(state[0], loop, hoisted, self)
            return WithEvidence(ys, evidence, case)

        return checked.finished(lambda state: state[1], ys_of)


def _gather(first: Array, loop: Loop, hoisted: Hoisted, check: CheckFinite) -> tuple[Evidence, Case]:
    """What is known of the first bad step, in a branch that is taken only if there is one. It has no derivative."""
    blames: list[Blame] = []
    loop, hoisted = _constant(loop), hoisted._replace(loop=_constant(hoisted.loop))

    def explain(first: Array) -> Evidence:
        blames.append(Blame())
        return _explain(first, loop, hoisted, blames[-1])

    with jax.disable_jit(False):
        shapes = jax.eval_shape(explain, first)
    case = _case(loop, hoisted, check, blames[0])
    nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    evidence = jax.lax.cond(first != _GOOD, explain, lambda first: nothing._replace(first=first), first)
    return jax.lax.stop_gradient(evidence), case


def _constant(loop: Loop) -> Loop:
    """The loop on values without tangents: else a derivative would run through the branch too."""
    consts, state, xs = jax.lax.stop_gradient((loop.consts, loop.state, loop.xs))
    return dataclasses.replace(loop, consts=consts, state=state, xs=xs)


def _explain(first: Array, loop: Loop, hoisted: Hoisted, blame: Blame) -> Evidence:
    """Runs the steps before the bad one again, and that one operation by operation."""
    step = hoisted.repeatable.silenced()
    assert isinstance(step, Lifted)
    inner = dataclasses.replace(
        hoisted.loop, memo=Memo(), trace=None, finish=(), wishes=(), unroll=1, lowering=(), runner=None
    )
    again = dataclasses.replace(
        inner,
        step=_Before(step, loop.reverse, loop.xs.position is not None),
        consts=(first, inner.consts),
        xs=inner.xs._replace(position=jnp.arange(loop.length, dtype=jnp.int32)),
    )
    state, _ = run(again)
    feed = jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, first, keepdims=False), inner.xs)
    unchanged, (closed, consts) = inner.consts
    before = merge(hoisted.fixed, unchanged, state)
    ((places, jaxpr),) = zip(step.places.values(), step.traced.jaxprs.values(), strict=True)
    held = [closed[i] for i in places if i is not None]
    opened = jaxpr.jaxpr.replace(constvars=[], invars=[*jaxpr.jaxpr.constvars, *jaxpr.jaxpr.invars])
    results = blame.evaluate(opened, [*held, *jax.tree.leaves((consts, before, feed))])
    after = [jnp.asarray(new, old.dtype) for old, new in zip(before, results, strict=False)]
    return Evidence(first, before, after, _x_of(loop, feed.x), jnp.stack(blame.bits))


def _case(loop: Loop, hoisted: Hoisted, check: CheckFinite, blame: Blame) -> Case:
    names: dict[int, str] = {}
    count = len(hoisted.fixed)
    ids = jax.tree.unflatten(hoisted.structure, range(count))
    for path, place in leaves_with_path(loop.names[0], loop.carry_of(ids)):
        names[place] = path
    paths = tuple(names.get(i, loop.names[1]) for i in range(count))
    constants = len(jax.tree.leaves(hoisted.loop.consts[1]))
    xs = [path for path, _ in leaves_with_path(loop.names[1], _x_of(loop, loop.xs.x))]
    inputs = (*([_CONSTANT] * constants), *paths, *xs)
    inputs = (*inputs, *(["the position"] * (len(blame.bits) - len(inputs))))
    return Case(
        loop.length,
        loop.length - 1 if loop.reverse else 0,
        tuple(blame.operations),
        tuple(blame.results[:count]),
        inputs,
        paths,
        hoisted.fixed,
        hoisted.structure,
        check,
        loop.names[0],
    )


def _x_of(loop: Loop, x: PyTree) -> PyTree:
    """The user's x, of one that the loop is fed."""
    if not isinstance(loop.step, MergeWhole):
        return x
    whole, sliced = iter(loop.consts[0]), iter(x)
    leaves = [next(whole if axis is None else sliced) for axis in loop.step.axes]
    return jax.tree.unflatten(loop.step.structure, leaves)


def deliver(ys: PyTree) -> PyTree:
    """The outputs of a loop, once its evidence was read.

    Raises:
        NonFiniteError: if a step went wrong, and that is known here: under a trace JAX raises a runtime error.
    """
    if not isinstance(ys, WithEvidence):
        return ys
    evidence, case = ys.evidence, ys.told

    def tell(evidence: Evidence) -> None:
        if int(evidence.first) != _GOOD:
            record = case.record(jax.tree.map(np.asarray, evidence))
            note(record)
            raise NonFiniteError(f"{case.check.call}: {record}.")

    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(evidence)):
        jax.lax.cond(evidence.first != _GOOD, lambda told: jax.debug.callback(tell, told), lambda told: None, evidence)
    elif int(evidence.first) != _GOOD:
        record = case.record(evidence)
        note(record)
        raise Fault(NonFiniteError, f"{{call}}: {record}.", "`treescan.last_nonfinite()` has the carry and x.")
    return ys.ys


def check_finite_of(value: Any) -> bool:
    """Whether to check.

    Raises:
        Fault: for an `ArgumentTypeError` if it is neither True nor False.
    """
    if isinstance(value, bool):
        return value
    raise Fault(
        ArgumentTypeError,
        f"{{verb}} over {{body}}: `check_finite` must be True or False, got {describe_argument(value)}.",
        "True checks the carry after each step, but not cotangents. `jax.debug_nans` finds a NaN of the gradient.",
    )


def refuse_rows(checks: bool) -> None:
    """Refuses to look at rows of unequal length."""
    if checks:
        raise Fault(
            ArgumentError,
            "{verb} over {body}: `check_finite` does not support `lengths`.",
            "Leave out one of the two.",
        )


def _refuse_effects(hoisted: Hoisted) -> None:
    if hoisted.refs or hoisted.once_only:
        why = "closes over a mutable array (a `Ref`)" if hoisted.refs else "has an effect that JAX refuses to repeat"
        raise Fault(
            ArgumentError,
            f"{{verb}} over {{body}}: `check_finite` runs steps again to find out what went wrong, but the body {why}.",
            "Leave it out. `jax.debug_nans` stops at the operation.",
        )


def _refuse_devices() -> None:
    if jax.sharding.get_abstract_mesh().manual_axes:
        raise Fault(
            ArgumentError,
            "{verb} over {body}: `check_finite` does not work within `jax.shard_map`.",
            "Check a loop outside of it, on one device.",
        )
