"""What the bodies of a call read, and what its gradient saves under its own plan and under others."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.core import Atom, Tracer, eval_jaxpr
from jax.extend.core import Jaxpr, Var

from ... import _faster
from ..._avals import Array, LeafAxes, bytes_of
from ..._body.closure import named_constants
from ..._errors import TreescanError
from ..._loop.chunk import recomputes
from ..._loop.feed import Consts, one_step
from ..._loop.loop import Arrays, Body, Loop
from ..._options.progress.show import ShowProgress
from ..._outputs.outputs import KeepOutputs
from ..._program.nest import in_rounds, ready
from ..._program.plan import plan
from ..._program.program import Program, Taken
from ..._remat import budget
from ..._remat.checkpoint import Checkpointed
from ..._remat.remat import Recompute, saves_steps
from ..._rows.axes import RowAxes, Rows
from ..._rows.find_rows import FindRows
from ..._rows.skip import Skip
from ..._trace.equations import called, has_symbolic_zeros, inputs_of, place_of
from ..._trace.hoist import lifted, traced
from ..._trace.smooth import is_smooth
from ..._transforms.axes import Count, OverAxes
from ..._transforms.call import Arguments, Call
from ..._tree import leaves_with_path, merge, split
from ..._types import Remat, RematLike
from ..._until.early_exit import plan_chunks
from ..._until.end_early import EndEarly
from .description import Plan, Saved

_T = TypeVar("_T")


def saved_by_steps(bodies: list[TracedBody]) -> tuple[Saved, ...]:
    """What one step of each body saves if nothing is recomputed, by place, the largest first.

    Nothing if JAX refuses a gradient.
    """
    try:
        each = [saved for body in bodies for saved in _saved_of(body)]
    except Exception:  # the plan of the call says why
        return ()
    joined = dict[str, Saved]()
    for saved in each:
        old = joined.get(saved.place, Saved(saved.place, (), (), 0))
        operations = tuple(dict.fromkeys((*old.operations, *saved.operations)))
        joined[saved.place] = Saved(saved.place, operations, (*old.types, *saved.types), old.bytes + saved.bytes)
    return tuple(sorted(joined.values(), key=lambda saved: -saved.bytes))


def _saved_of(body: TracedBody) -> Iterator[Saved]:
    saved = budget.saved_of_step(body.loop, body.loop.step)
    carried = saved.read.values()
    if carried:
        yield Saved("the carry", (), tuple(map(str, carried)), sum(map(bytes_of, carried)))
    for aval, equation in saved.residuals:
        name = str(equation.params.get("name", "call")) if called(equation) else equation.primitive.name
        yield Saved(place_of(equation) or "elsewhere", (name,), (str(aval),), bytes_of(aval))


class Named(NamedTuple):
    """A value that a body is given: its path, and the value as the verb was given it."""

    path: str
    value: Any


@dataclass(frozen=True, eq=False)
class TracedBody:
    """A body with the trace of its step.

    Attributes:
        body: the body.
        loop: the traced loop, what the body closes over among its consts.
        carry: the leaves of the carry.
        fixed: for each of them whether no step changes it.
        x: what is scanned over.
        constants: the values that all steps share, and what the body closes over, in the order of the loop's consts.
        axes: for each leaf of the state that changes where its rows are; None: all share it. Empty if no row may stop.
        rows: where the rows are; None: it has none.
    """

    body: Body
    loop: Loop
    carry: list[Named]
    fixed: list[bool]
    x: list[Named]
    constants: list[Named]
    axes: LeafAxes = ()
    rows: Rows | None = None

    @functools.cached_property
    def jaxpr(self) -> Jaxpr:
        """One step, on (consts, state, feed)."""
        loop = self.loop
        return jax.make_jaxpr(loop.step)(loop.consts, loop.state, one_step(loop.xs)).jaxpr

    @property
    def batch(self) -> tuple[int, ...]:
        """The shape of the rows of a masked loop; () for others."""
        valid = self.loop.xs.valid
        return () if valid is None else valid.shape[1:]

    @property
    def axes_of_rows(self) -> RowAxes:
        """Where the rows are in the leaves of the carry, of x, of y and of what all steps share."""
        if self.rows is None or not self.batch:
            constants, *others = ((None,) * len(each) for each in (self.constants, self.carry, self.x, self.y_vars))
            return RowAxes(Consts(inner=constants), *others)
        consts, state, x, y = self.rows.axes
        carry = merge(self.loop.hoisted.fixed, self.rows.fixed, state)
        constants = self.loop.consts._replace(unchanged=()).spread(consts._replace(unchanged=()))
        constants = constants[: len(self.constants)]  # an offset follows
        return RowAxes(Consts(inner=constants), tuple(carry[len(carry) - len(self.carry) :]), x, y)

    @property
    def inputs(self) -> Arrays:
        """The inputs of the jaxpr by name."""
        return inputs_of(self.jaxpr, self.loop.arrays)

    @property
    def constant_vars(self) -> list[Var]:
        """The inputs of the jaxpr that are `constants`."""
        return jax.tree.leaves(self.inputs.consts._replace(unchanged=()))[: len(self.constants)]

    @property
    def x_vars(self) -> list[Var]:
        """The inputs of the jaxpr that are scanned over."""
        return jax.tree.leaves(self.inputs.xs.x)[: len(self.x)]

    @property
    def y_vars(self) -> list[tuple[str, Atom]]:
        """The outputs of the jaxpr with their paths."""
        outputs = self.jaxpr.outvars[len(self.loop.state) :]
        return [(path, var) for (path, _), var in zip(leaves_with_path("y", self.loop.hoisted.y), outputs, strict=True)]


def trace_bodies(program: Program, outer: Arguments, given: Arguments) -> list[TracedBody]:
    """The bodies of a program, traced for all rows alone; several take turns.

    Args:
        program: the program of a verb.
        outer: the arrays that the verb was given.
        given: the same as they are traced now.
    """
    call, loop = program.call, program.call.lay(given)
    axes: tuple[LeafAxes | None, ...] = (None,) * len(call.each)
    for transform in program.transforms:
        if isinstance(transform, FindRows | EndEarly):
            loop, axes = dataclasses.replace(transform, compact=False)(loop), (transform.in_axes,)
        elif isinstance(transform, Count):
            loop = transform(loop)
        elif isinstance(transform, OverAxes):
            loop, axes = transform(loop), transform.each
    if not call.others:
        return [_traced(call, loop, outer, axes[0])]
    each = zip(call.each, traced(loop).turns, outer.xs, axes, strict=True)
    return [_traced(call, loop, outer._replace(xs=xs), axes) for call, loop, xs, axes in each]


def _traced(call: Call, loop: Loop, outer: Arguments, axes: LeafAxes | None) -> TracedBody:
    loop = lifted(traced(loop))
    fixed = loop.hoisted.fixed
    carry_name, x_name = call.names
    carry = leaves_with_path(carry_name, outer.init)
    counted = len(fixed) - len(carry)  # the index of `fori` and the position of a key lead the state
    parts = [(x_name, outer.xs)]
    if call.convention.spread:  # of layers it is a tuple: the layer, and what else it has of its own
        stateful = call.convention.stateful
        names = [call.convention.takes[0], *(["x_layer"] if len(outer.xs) > 1 + stateful else []), "state"]
        parts = list(zip(names, outer.xs, strict=False))
    scanned = [pair for name, part in parts for pair in leaves_with_path(name, part)]
    whole, sliced = split([axis is None for axis in axes or (0,) * len(scanned)], scanned)
    key: list[tuple[str, Any]] = [] if outer.key is None else [("key", outer.key)]
    closed = loop.consts.closed
    outside = zip(named_constants(call.body.function, closed), closed, strict=True)
    constants = [*outside, *whole, *key, *leaves_with_path("args", outer.args)]
    carried, fed, shared = ([Named(*pair) for pair in pairs] for pairs in (carry, sliced, constants))
    own = () if loop.rows is None or loop.masked.all_valid else loop.masked.axes.state
    return TracedBody(call.body, loop, carried, list(fixed[counted:]), fed, shared, own, loop.rows)


def sharding_of(value: object) -> str | None:
    """How an array is spread over devices; None where it is on one, or that is not known."""
    spec = spec_of(value)
    return None if not any(part is not None for part in spec) else f"P({', '.join(map(repr, spec))})"


def spec_of(value: object) -> Sequence[object]:
    """For each axis of an array the mesh axes over which it is spread."""
    sharding = getattr(jax.typeof(value), "sharding", None) if isinstance(value, Tracer) else None
    sharding = sharding or getattr(value, "sharding", None)
    spec = getattr(sharding, "spec", None)
    return () if spec is None else tuple(getattr(spec, "partitions", spec))


OTHERS: tuple[RematLike | None, ...] = (None, "auto", "step", "nested", Remat(levels=3))
"""The plans that are shown beside that of the call."""


def of_types(function: Callable[[Arguments], _T], given: Arguments) -> _T:
    """What a function finds that is traced for these arrays, which may be types alone."""
    found = list[_T]()
    jax.eval_shape(lambda given: found.append(function(given)), given)
    return found[0]


def plan_of(taken: Taken, remat: RematLike | None, *, used: bool) -> tuple[Plan, tuple[int, ...]]:
    """What a call needs under its `remat`, as an estimate, and the numbers of rows that its body is made for."""
    return of_types(functools.partial(_plan_of, taken.program, remat, used), taken.given)


def _plan_of(program: Program, remat: RematLike | None, used: bool, given: Arguments) -> tuple[Plan, tuple[int, ...]]:
    loop = whole = program.call.lay(given)
    for transform in program.transforms:
        whole = transform(whole)
        if not isinstance(transform, _AROUND_STEPS):
            loop = whole
    sizes, cut = _cut_of(program, whole)
    tiers = getattr(whole.rows, "tiers", ())
    plan = Plan(remat, used, sizes, None, cut.evaluations)
    loop = traced(loop)
    if not any(map(is_smooth, (*loop.state, *loop.hoisted.y_avals))):
        plan = dataclasses.replace(plan, refusal="nothing in it is floating-point")
    else:
        try:
            plan = dataclasses.replace(plan, bytes=budget.plan_of(loop, whole.remat, cut).needed_bytes)
        except budget.Uncounted as error:
            plan = dataclasses.replace(plan, refusal=error.why)
    return plan, tiers if len(tiers) > 1 else ()


_AROUND_STEPS = (Recompute, Skip, KeepOutputs, ShowProgress)
"""The transforms that leave a step as it is, and say what is made of many."""


def other_plans(own: Plan, retake: Callable[[RematLike | None], Taken]) -> Iterator[Plan]:
    """What the same call needs under other plans, as far as its verb takes them. Those that differ in nothing are one.

    Args:
        own: that of the call.
        retake: the same call with another `remat`.
    """
    seen = {(own.sizes, own.bytes, own.evaluations)}
    for other in OTHERS:
        if _spelled_out(other) == _spelled_out(own.remat):
            continue
        with contextlib.suppress(Exception):  # the verb or JAX does not take it, and nobody asked for it
            plan, _ = plan_of(retake(other), other, used=False)
            key = (plan.sizes, plan.bytes, plan.evaluations)
            if key not in seen:
                seen.add(key)
                yield plan


def _spelled_out(remat: RematLike | None) -> RematLike | None:
    plans = {"step": Remat(levels=1), "nested": Remat(levels=2)}
    remat = plans.get(remat, remat) if isinstance(remat, str) else remat
    return Remat(levels=1) if remat == Remat() else remat


class Refused(Exception):
    """There is no gradient; the text says why."""


def gradient_of(program: Program, given: Arguments) -> tuple[Callable[..., list[Array]], list[Array], list[Array]]:
    """The gradient of the sum of the squares of all results of a program.

    It is a function of all floating-point arrays that the program reads, and of its other arrays. Both come with it.

    Raises:
        Refused: if there is none.
    """
    closed = jax.make_jaxpr(program)(given)
    leaves, count = [*closed.consts, *jax.tree.leaves(given)], len(closed.consts)
    floats = list(map(is_smooth, leaves))
    if not any(floats) or not any(map(is_smooth, closed.out_avals)):
        raise Refused("nothing in it is floating-point")
    if has_symbolic_zeros(closed.jaxpr):  # JAX runs such a rule once: a gradient that perturbs other inputs would fail
        raise Refused("a `jax.custom_vjp` in it has symbolic zeros, and JAX runs such a rule only once")

    def loss(smooth: list[Array], others: list[Array]) -> Array:
        whole = merge(floats, smooth, others)
        results = eval_jaxpr(closed.jaxpr, whole[:count], *whole[count:])
        squares = [jnp.square(jnp.real(leaf)).sum(dtype=jnp.float32) for leaf in results if is_smooth(leaf)]
        return sum(squares[1:], squares[0])

    return jax.grad(loss), *split(floats, leaves)


def reason_of(error: Exception) -> str:
    """Why a gradient is refused, in a line."""
    says = " ".join(str(error).split("\n\n")[0].split())
    return says if isinstance(error, TreescanError) else f"JAX says, {says}"


def _cut_of(program: Program, loop: Loop) -> tuple[tuple[int, ...], budget.Cut]:
    """The steps of the nested chunks of a transformed loop, innermost first, and what its gradient makes of them."""
    if loop.limit is not None:
        chunks = plan_chunks(loop)
        sizes = *chunks.inner, chunks.size
        # Each step may be evaluated a last time, from the carry before it.
        again = isinstance(loop.remat, Remat) and loop.remat.policy is not jax.checkpoint_policies.everything_saveable
        return sizes, budget.Cut(sizes, again)
    saves = isinstance(loop.runner, _faster.InPlace) and loop.runner.saves
    saves = saves and saves_steps(loop.hoisted, loop.plan, loop.arrays)
    loop, levels = plan(in_rounds(ready(loop))[0])
    parts = [level for level in levels if level.size < loop.length]
    again = _recomputes_steps(loop.step)
    recomputed = () if saves else tuple(level.size for level in parts if recomputes(level.around))
    return tuple(level.size for level in parts), budget.Cut(recomputed, again)


def _recomputes_steps(step: object) -> bool:
    inner = getattr(step, "steps", ()) or filter(None, [getattr(step, "step", None)])
    return isinstance(step, Checkpointed) or any(map(_recomputes_steps, inner))
