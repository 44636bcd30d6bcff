"""Computes outputs that are proven to be the same in every step once, before the loop."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import eval_jaxpr

from ..._avals import PyTree, as_arrays, describe_leaf
from ..._errors import BodyFault, Fault, Row
from ..._loop.feed import Consts, Feed, Slot
from ..._loop.loop import Loop, Step, is_jit_disabled
from ..._trace.dependence import Once, StepProgram
from ..._trace.equations import variables_of
from ..._trace.hoist import flatten_only, hoist, restoring, whole_state
from ..._trace.trace import Inputs, Trace
from ..._transforms.axes import WHOLE, OverAxes, spread_prefix
from ..._transforms.transform import Stage, Transform
from ..._tree import Prefix, leaves_with_path, map_leaves, merge, split

ONCE: Slot[PyTree] = Slot("once")
"""Of a result: y with the outputs that are the same in every step, and None in place of the others."""


class Parted(NamedTuple):
    """A loop without the outputs that are the same in every step.

    Attributes:
        loop: the loop; its state is a list of leaves, and it finishes with the whole state.
        once: y with these outputs in their places, and None in those of the others.
        reads: for each leaf of the consts and of what a step is fed whether what is left reads it.
    """

    loop: Loop
    once: PyTree
    reads: tuple[PyTree, Feed]


def part_outputs(loop: Loop, wanted: Prefix, *, whole: bool = False) -> Parted:
    """Computes values that are the same in every step before the loop, and removes them from the loop.

    Args:
        loop: the loop.
        wanted: a prefix of y, True for each output that must be the same in every step.
        whole: whether leaves that no step changes stay in the state.

    Raises:
        Fault: for a `BodyError` that lists the outputs which are not the same in every step, as far as it is known.
    """
    typed = loop
    if not loop.length:
        one_zero = jax.tree.map(lambda leaf: jnp.zeros((1, *leaf.shape[1:]), leaf.dtype), loop.xs)
        typed = loop.having(xs=one_zero)
    typed = typed.having(state=as_arrays(loop.state))
    with jax.disable_jit(False):
        hoisted = hoist(typed)
    trace = hoisted.hoisted
    flags = _flags(wanted, trace.y)
    program = StepProgram.of(hoisted)
    places = [len(trace.fixed) + i for i, flag in enumerate(flags) if flag]
    once = program.compute(places) or _compute_inlined(program, trace, flags, places)
    rest = program.without(once, places)
    reads = _reads(rest, program, trace.inputs, once, places)
    y = jax.tree.unflatten(jax.tree.structure(trace.y), merge(flags, once.values, [None] * flags.count(False)))
    if is_jit_disabled():
        flat = flatten_only(loop.having(state=as_arrays(loop.state)))
        step: Step = DroppingOnce(flat.step, wanted)
        return Parted(flat.having(step=step, trace=None).finished(restoring(flat)), y, reads)
    consts, rest_y = EARLY.put(hoisted.consts, once.early), jax.tree.structure(_pruned(trace.y, flags))
    run = hoisted.having(xs=loop.xs, length=loop.length, trace=None)
    if whole:
        step = _Rest(rest, program.consts, (False,) * len(trace.fixed), rest_y)
        run = run.having(step=step, consts=consts._replace(unchanged=()), state=whole_state(hoisted))
        return Parted(run.finished(functools.partial(jax.tree.unflatten, trace.structure)), y, reads)
    step = _Rest(rest, program.consts, trace.fixed, rest_y)
    return Parted(run.having(step=step, consts=consts).finished(restoring(hoisted)), y, reads)


def _flags(wanted: Prefix, y: PyTree) -> tuple[bool, ...]:
    """For each leaf of y whether it must be the same in every step."""
    cure = (
        "Give one axis for all leaves, or a prefix tree of y with axes; None for outputs that are the same in every "
        "{step}."
    )
    return tuple(map(bool, spread_prefix("`out_axes`", wanted.tree, y, "y", cure)))


def _compute_inlined(program: StepProgram, trace: Trace, flags: tuple[bool, ...], places: Sequence[int]) -> Once:
    """What is computed once within functions that the step calls. The calls themselves stay in the loop."""
    inlined = program.inlined()
    once = inlined.compute(places)
    if once is None:
        raise _varies(inlined, trace, flags)
    return once._replace(equations=frozenset(), variables=[], early=[])


def _reads(rest: Any, program: StepProgram, given: Inputs, once: Once, places: Sequence[int]) -> tuple[PyTree, Feed]:
    """Which of the consts, and of what a step is fed, what is left reads.

    What was computed before is followed back to these, but for the outputs that are wanted: what is left may read them.
    """
    read = {var for equation in rest.eqns for var in variables_of(equation.invars)}
    left = set(variables_of(rest.outvars))
    wanted = set(variables_of([program.jaxpr.outvars[place] for place in places]))
    behind = {var for var in once.variables if var in left or var not in wanted}
    for number in sorted(once.equations, reverse=True):
        equation = program.jaxpr.eqns[number]
        if not behind.isdisjoint(equation.outvars):
            behind.update(variables_of(equation.invars))
    read |= left | behind
    return jax.tree.map(lambda var: var in read, (given.consts, given.feed))


def _pruned(y: PyTree, flags: Sequence[bool]) -> PyTree:
    return map_leaves(lambda leaf, flag: None if flag else leaf, y, flags)


@dataclass(frozen=True)
class DroppingOnce:
    """The step without some leaves of its y, which a prefix tree names before the leaves are known."""

    step: Step
    wanted: Prefix

    def __call__(self, consts: PyTree, state: PyTree, feed: Feed) -> tuple[PyTree, PyTree]:
        state, y = self.step(consts, state, feed)
        return state, _pruned(y, _flags(self.wanted, y))


EARLY: Slot[list[Any]] = Slot("early")
"""What was computed before the loop."""


@dataclass(frozen=True, eq=False)
class _Rest:
    """What is left of a traced step."""

    jaxpr: Any
    closed: list[Any]
    fixed: tuple[bool, ...]
    y: Any

    def __call__(self, consts: Consts, state: list[Any], feed: Feed) -> tuple[list[Any], PyTree]:
        leaves = jax.tree.leaves((consts.inner, merge(self.fixed, consts.unchanged, state), feed))
        out = eval_jaxpr(self.jaxpr, self.closed, *(EARLY.of(consts) or ()), *leaves, propagate_source_info=True)
        out = [leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf) for leaf in out]
        new, y = out[: len(self.fixed)], out[len(self.fixed) :]
        return split(self.fixed, new)[1], jax.tree.unflatten(self.y, y)


def _varies(program: StepProgram, trace: Trace, flags: Sequence[bool]) -> Fault:
    """Says which outputs are not the same in every step."""
    found, outvars = program.vary(), program.jaxpr.outvars[len(trace.fixed) :]
    named = zip(leaves_with_path("y", trace.y), outvars, flags, strict=True)
    rows = [
        Row(path, "the same in every step", describe_leaf(leaf), "")
        for (path, leaf), var, flag in named
        if flag and not hasattr(var, "val") and var in found
    ]
    return BodyFault(
        "{body} returned values that must be the same in every {unit}, but they depend on values that may differ "
        "between {unit}s: the carry, x, or keys that are split.",
        "A broadcast value is computed once for all {unit}s, from constants and from keys that are not split. Carry a "
        "value that changes, or give it an axis to stack along.",
        header=("leaf", "expected", "is"),
        rows=rows,
    )


@dataclass(frozen=True)
class ComputeOnce(Transform):
    """Computes outputs that are the same in every step once, before the loop; see `ONCE`.

    Attributes:
        wanted: a prefix of y, True for each of these outputs.
        over_axes: the transform of `in_axes`, or None. It is applied here.
        whole: whether leaves that no step changes stay in the state.
        again: asked after the trace, with `Parted.once`, and whether what is left of the loop reads a watched leaf:
            what the body is to be given as its last argument when it is traced again, or None if it is not. None: it
            never is.
        watched: a prefix of xs, True for the leaves that are watched; None: none are.
    """

    wanted: Prefix
    over_axes: OverAxes | None = None
    whole: bool = False
    again: Callable[[PyTree, bool], PyTree] | None = None
    watched: Prefix | None = None
    stage: ClassVar[Stage] = Stage.FED

    def __call__(self, loop: Loop) -> Loop:
        parted = self.part(loop)
        again = None if self.again is None else self.again(parted.once, self._reads_watched(loop, parted))
        rest = parted.loop
        if again is not None:
            shared = loop.consts.inner
            consts = loop.consts._replace(inner=shared._replace(args=(*shared.args[:-1], again)))
            rest = self._over_axes(loop.having(consts=consts))
            rest = rest.having(step=DroppingOnce(rest.step, self.wanted))
        return rest.finished(notes=lambda result: ONCE.put(result, parted.once))

    def part(self, loop: Loop) -> Parted:
        """The loop without these outputs, and their values."""
        return part_outputs(self._over_axes(loop), self.wanted, whole=self.whole)

    def _over_axes(self, loop: Loop) -> Loop:
        return loop if self.over_axes is None else self.over_axes(loop)

    def _reads_watched(self, loop: Loop, parted: Parted) -> bool:
        """Whether what is left of a loop reads one of the leaves of xs that are watched."""
        if self.watched is None:
            return False
        watched = self.watched.spread(loop.xs.x, "xs")
        axes = (self.over_axes and self.over_axes.each[0]) or (0,) * len(watched)
        whole, sliced = split([axis is None for axis in axes], watched)
        consts, feed = parted.reads
        of_whole = [] if consts is None else WHOLE.of(consts) or []
        pairs = [*zip(whole, of_whole, strict=True), *zip(sliced, jax.tree.leaves(feed.x), strict=True)]
        return any(watch and read for watch, read in pairs)
