"""`run` runs a loop by `jax.lax.scan`, which `replaced.py` calls."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
import itertools
import operator
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer

from .._avals import PyTree, as_arrays, in_mesh, is_sharded, mesh_of, names_no_mesh, promoted, set_mesh, types_of
from .._errors import Fault, is_package_frame, walk_traceback
from .feed import Feed
from .loop import Arrays, Body, Plan, Step, is_jit_disabled
from .replaced import in_step, lax_scan, own_scan


@dataclass(frozen=True, eq=False)
class _Lowered:
    """A step in the form that `jax.lax.scan` calls. Looks like the body to JAX, whose messages then name the body.

    Attributes:
        packed: whether its carry holds consts.
        mesh: the one that is named by all that it returns; None: what it returns stays as it is.
    """

    body: Body
    step: Step
    packed: bool
    __signature__: inspect.Signature
    mesh: Any

    __wrapped__ = property(operator.attrgetter("body.function"))

    def __call__(self, carry: PyTree, x: PyTree) -> tuple[PyTree, PyTree]:
        with in_step():
            if not self.packed:
                return self._named(carry, self.step(None, carry, Feed(x)))
            consts, given = carry
            state, y = self._named(given, self.step(consts, given, x))
            return (consts, state), y

    def _named(self, given: PyTree, pair: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
        if self.mesh is None:
            return pair
        leaves, structure = jax.tree.flatten(as_arrays(pair))
        sharded = [is_sharded(leaf) for leaf in jax.tree.leaves(given)]
        named = itertools.zip_longest(leaves, sharded[: len(leaves)], fillvalue=False)
        return jax.tree.unflatten(structure, [leaf if other else in_mesh(leaf, self.mesh) for leaf, other in named])


debugs_nans: Callable[[], bool] = functools.partial(getattr, jax.config, "jax_debug_nans", False)
"""Whether the user turned on `jax.debug_nans`. JAX does not trace functions again for this flag."""

checks_key_reuse: Callable[[], bool] = functools.partial(getattr, jax.config, "jax_debug_key_reuse", False)
"""Whether the user turned on `jax_debug_key_reuse`."""


def run(plan: Plan, given: Arrays) -> tuple[PyTree, PyTree]:
    """Runs a loop: its last state, and its outputs stacked along axis 0.

    Consts travel in lax.scan's carry. A carry leaf that a step hands on unchanged is turned into a constant of the
    loop by lax.scan itself, so that this costs nothing, and a step needs no closure.
    """
    mesh = _mesh_to_name(plan, given)
    try:
        return _run_in(plan, given, mesh)
    except Fault as fault:
        if mesh is None or not any(map(names_no_mesh, jax.tree.leaves(given.state))):
            raise
        try:  # as lax.scan would: an init that names no mesh takes the sharding of what the step returns
            return _run_in(plan, given, None)
        except Fault:
            raise
        except Exception:
            raise fault from None


def _run_in(plan: Plan, given: Arrays, mesh: Any) -> tuple[PyTree, PyTree]:
    packed = given.consts is not None or bool(jax.tree.leaves(given.xs[1:]))
    function = (plan.callee.memo or plan.body.memo)(
        (_Lowered, plan.step, packed, mesh),
        lambda: _Lowered(plan.body, plan.step, packed, named_signature(*plan.names), mesh),
    )
    consts, state, feed = given if mesh is None else in_one_mesh(plan, given)
    carry, xs = ((consts, state), feed) if packed else (state, feed.x)
    if is_jit_disabled() and plan.length:
        result = _run_step_by_step(function, carry, xs, plan.length, plan.reverse)
    else:
        result = _run_compiled(function, carry, xs, plan)
    if not packed:
        return result
    (_, state), ys = result
    return state, ys


def named_signature(*names: str) -> inspect.Signature:
    """A signature in the body's own names, which JAX's messages then use."""
    kind = inspect.Parameter.POSITIONAL_ONLY
    return inspect.Signature([inspect.Parameter(name, kind) for name in names])


def _run_compiled(function: _Lowered, carry: PyTree, xs: PyTree, loop: Plan) -> tuple[PyTree, PyTree]:
    # The output types of a loop without steps are known from a trace alone, which lax.scan refuses under disable_jit.
    length = None if jax.tree.leaves(xs) else loop.length  # lax.scan asks for an int, and a size may be symbolic
    traced = jax.disable_jit(False) if is_jit_disabled() else contextlib.nullcontext()
    try:
        with traced:
            return lax_scan(
                function, carry, xs, length, loop.reverse, loop.lowering.unroll, **dict(loop.lowering.further)
            )
    except TypeError as error:
        frames = (each.tb_frame for each in walk_traceback(error.__traceback__))
        if not any(is_package_frame(frame) and frame.f_code is _Lowered.__call__.__code__ for frame in frames):
            _blame_step(function, carry, xs)  # raised by lax.scan of the carry's types, not by the body
        raise


def in_one_mesh(plan: Plan, given: Arrays) -> Arrays:
    """What a loop runs on, its whole state on the mesh with explicit axes that its arrays name, if they name one.

    Under `jax.vmap` over an axis that is sharded on such a mesh, JAX cannot give a type to a leaf that becomes mapped
    if it names no mesh.
    """
    mesh = _mesh_to_name(plan, given)
    if mesh is None:
        return given
    leaves, structure = jax.tree.flatten(as_arrays(given.state))
    is_set = not jax.sharding.get_abstract_mesh().empty  # else JAX reshards nothing outside of a trace
    named = [in_mesh(leaf, mesh) if is_set or isinstance(leaf, Tracer) else leaf for leaf in leaves]
    return given._replace(state=jax.tree.unflatten(structure, named))


def _mesh_to_name(plan: Plan, given: Arrays) -> Any:
    # Of a remainder, lax.scan writes outputs that name the mesh which is set into arrays that may name none.
    mesh = set_mesh() if _has_remainder(plan) else None
    return mesh or mesh_of((given.state, given.consts, given.xs))


def _has_remainder(loop: Plan) -> bool:
    """Whether an unrolled loop has steps that are left over."""
    unroll = loop.lowering.unroll
    return type(unroll) is int and unroll > 1 and isinstance(loop.length, int) and loop.length % unroll > 0


_last_trace: contextvars.ContextVar[bool] = contextvars.ContextVar("last_trace", default=False)


def is_last_trace() -> bool:
    """Whether weak types have settled: from here on a weakly typed leaf that changes its type is an error too."""
    return _last_trace.get()


@contextlib.contextmanager
def weak_types_settled() -> Generator[None]:
    """Within it, steps refuse every change of a type."""
    token = _last_trace.set(True)
    try:
        yield
    finally:
        _last_trace.reset(token)


def _blame_step(function: _Lowered, carry: PyTree, xs: PyTree) -> None:
    """Traces the step the way that lax.scan did, so that the check in the step finds what lax.scan found.

    A step lets a weakly typed leaf pass whose type changed, as lax.scan then promotes the init and traces once more.
    Where it does not settle in that second trace, the first error is lax.scan's: only then is this needed.
    """
    try:
        x = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), xs)
        out, _ = types_of(lambda c, x: function(c, x), carry, x)
        with weak_types_settled():
            jax.eval_shape(lambda c, x: function(c, x), settle(carry, out)[0], x)
    except Fault:
        raise
    except Exception:  # something else was wrong: lax.scan's message is kept
        return


def settle(carry: PyTree, out: PyTree) -> tuple[PyTree, bool]:
    """The init that lax.scan uses if weakly typed leaves were returned with another type, and whether it changed."""
    leaves, treedef = jax.tree.flatten(carry)
    pairs = [promoted(given, returned) for given, returned in zip(leaves, jax.tree.leaves(out), strict=True)]
    return jax.tree.unflatten(treedef, [leaf for leaf, _ in pairs]), True in [changed for _, changed in pairs]


class _NamedPair(NamedTuple):
    carry: Any
    y: Any


@functools.cache
def keeps_named_pairs() -> bool:
    """Whether this release of lax.scan takes a NamedTuple as a pair, and gives its result in one (0.12 does not)."""
    try:
        jax.eval_shape(lambda: own_scan(lambda carry, x: _NamedPair(carry, x), None, None, length=1))
    except TypeError:
        return False
    return True


def _run_step_by_step(
    function: _Lowered, carry: PyTree, xs: PyTree, length: int, reverse: bool
) -> tuple[PyTree, PyTree]:
    """Runs a loop under `jax.disable_jit`: the body runs on concrete values, step by step, with every check."""
    carry = as_arrays(carry)
    positions = range(length)[::-1] if reverse else range(length)

    def take(i: int) -> PyTree:
        return jax.tree.map(lambda leaf: jax.lax.index_in_dim(jnp.asarray(leaf), i, keepdims=False), xs)

    pair = function(carry, take(positions[0]))
    carry, changed = settle(carry, _halves(pair)[0])
    with weak_types_settled():
        if changed:  # as lax.scan does, once more from the promoted init
            pair = function(carry, take(positions[0]))
        first, y = _halves(pair)
        carry, ys = as_arrays(first), [y]
        for i in positions[1:]:
            carry, y = _halves(function(carry, take(i)))
            carry = as_arrays(carry)
            ys.append(y)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(ys[::-1] if reverse else ys))
    return jax.tree.unflatten(jax.tree.structure(pair, is_leaf=lambda node: node is not pair), (carry, stacked))


def _halves(pair: PyTree) -> list[PyTree]:
    """The carry and y of a step, in whatever container the body returned them."""
    return jax.tree.leaves(pair, is_leaf=lambda node: node is not pair)
