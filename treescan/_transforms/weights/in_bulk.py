"""Runs a chunk of steps with its products with weights computed at once.

Forward, these are the products of x with large weights. In the derivative they are all products that read only x. For
the products that read the state they are the cotangents of the weights; see `deferred`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray, eval_jaxpr
from jax.custom_batching import custom_vmap

from ..._avals import Array, PyTree, is_sharded, varying_axes
from ..._loop.chunk import RunChunk
from ..._loop.loop import Feed, Loop, Memo, Step
from ..._loop.run import run
from ..._trace.cost import count_operations
from ..._trace.equations import PRODUCTS, evaluate_alone, has_branches, interpret, jaxprs_within, with_jaxprs
from ..._trace.hoist import Hoisted, Unproven, array_of, lifted, one_step
from ..checkpoint import Checkpointed, chooses
from ..outputs import QuietSteps
from ..rows.leaves import select
from .deferred import Arguments, Forward, compute_early, policy_within, run_split, save_all_but_cheap
from .products import Split, products_of_step

_MIXED = -1
"""In place of the index of a branch: elements differ in it."""


@custom_vmap
def _ask(index: Array) -> tuple[Array, Array]:
    """The index for all elements, and each element's own. int32[] to int32[], int32[]."""
    return index, index


@_ask.def_vmap
def _ask_rule(axis_size: int, in_batched: list[bool], index: Array) -> tuple[tuple[Array, Array], tuple[bool, bool]]:
    del axis_size
    if not in_batched[0]:
        return _ask(index), (False, False)
    return (jnp.full((), _MIXED, index.dtype), index), (False, True)


@dataclass(frozen=True)
class MappedLater:
    """A step whose branches JAX can map after it was differentiated."""

    step: Step

    def __call__(self, consts: PyTree, state: PyTree, feed: Feed) -> tuple[PyTree, PyTree]:
        given = consts, state, feed
        traced, out = jax.make_jaxpr(lambda *given: self.step(*given), return_shape=True)(*given)
        results = _evaluate(traced.jaxpr, traced.consts, jax.tree.leaves(given))
        typed = [array_of(value, aval) for value, aval in zip(results, traced.out_avals, strict=True)]
        return jax.tree.unflatten(jax.tree.structure(out), typed)


def with_safe_branches(loop: Loop) -> Loop:
    """The loop, whose trace tells whether its step branches, with that step made safe to map."""
    return dataclasses.replace(loop, step=MappedLater(loop.step)) if loop.trace.branches else loop


def _evaluate(jaxpr: Any, consts: Any, given: Any) -> list[Any]:
    """Evaluates an open jaxpr, its branches in a form that JAX can map after it was differentiated."""

    def each(equation: Any, read: list[Any]) -> list[Any]:
        if _is_plain(equation):
            return _choose(equation, *read)
        if any(map(has_branches, jaxprs_within(equation))):
            equation = equation.replace(params=with_jaxprs(equation.params, _safe))
        return evaluate_alone(jaxpr, equation, read)

    return interpret(jaxpr, consts, given, each, into=lambda equation: None)


def _is_plain(equation: Any) -> bool:
    """Whether an equation is a branch that only computes; one with effects or mutable arrays cannot be mapped."""
    if equation.primitive.name != "cond" or equation.effects:
        return False
    avals = [atom.aval for atom in equation.invars]
    return all(isinstance(aval, ShapedArray) and not varying_axes(aval) for aval in avals)


def _choose(equation: Any, index: Array, *operands: Any) -> list[Any]:
    """A branch that is one of several, or all of them where elements differ in the index."""
    avals = [var.aval for var in equation.outvars]

    def evaluate(branch: Any, own: Array, *operands: Any) -> list[Any]:
        del own
        return list(map(array_of, _evaluate(branch.jaxpr, branch.consts, operands), avals))

    def mixed(own: Array, *operands: Any) -> list[Any]:
        results = list[Any]()
        for number, branch in enumerate(branches):
            chosen = own == number
            shown = [select(chosen, operand, jax.lax.stop_gradient(operand)) for operand in operands]
            now = evaluate(branch, own, *shown)
            results = [select(chosen, new, old) for new, old in zip(now, results, strict=True)] if number else now
        return results

    branches = equation.params["branches"]
    shared, own = _ask(index)
    single: list[Callable[..., list[Any]]] = [functools.partial(evaluate, branch) for branch in branches]
    return jax.lax.switch(jnp.where(shared == _MIXED, len(branches), shared), [*single, mixed], own, *operands)


def _safe(value: Any) -> Any:
    """A jaxpr within a loop or a call, closed or not, with the branches in it made safe."""
    jaxpr = getattr(value, "jaxpr", value)
    closed = jaxpr is not value
    if not has_branches(jaxpr):
        return value
    consts = value.consts if closed else []

    def safe(*given: Any) -> list[Any]:
        return list(map(array_of, _evaluate(jaxpr, consts, given), [atom.aval for atom in jaxpr.outvars]))

    avals = [var.aval for var in jaxpr.invars]
    traced = jax.make_jaxpr(safe)(*(jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in avals))
    if closed:
        return traced
    return value if traced.consts else traced.jaxpr  # an open one has no place for constants


@dataclass(frozen=True)
class InBulk:
    """The step that runs a chunk of steps.

    Attributes:
        chunk: the same, step by step.
    """

    chunk: RunChunk

    @property
    def is_loop(self) -> bool:
        """Whether XLA runs the chunk as a loop."""
        return self.chunk.is_loop

    def __call__(self, consts: PyTree, state: PyTree, feed: Any) -> tuple[PyTree, PyTree]:
        loop = self.chunk.loop(consts, state, feed)
        split = _split_of(loop)
        if split is None:
            return run(loop)
        given = Arguments(_reads(split, consts), jax.tree.leaves(state), jax.tree.leaves(feed))
        try:
            state, ys = run_split(loop, split, given)
        except Unproven:
            return run(loop)
        return jax.tree.unflatten(split.state, state), jax.tree.unflatten(split.y, ys)


def in_bulk(chunk: Step) -> Step:
    """What runs a chunk, with the products of its steps at once; unchanged if it does not run its steps one by one."""
    if isinstance(chunk, QuietSteps):
        return dataclasses.replace(chunk, inside=in_bulk)
    return InBulk(chunk) if isinstance(chunk, RunChunk) and not chunk.levels else chunk


def ready_for_chunks(loop: Loop) -> Loop:
    """The traced loop in the form in which a chunk computes the products of its steps at once."""
    # What a body closes over, rows have lifted already.
    return with_safe_branches(loop if loop.rows is not None else lifted(loop))


def bytes_of_products(loop: Loop) -> int:
    """The bytes per step that chunks of a loop keep for the products that they compute at once; 0: there are none.

    These are the products (their cotangents), and what they multiply, where it is neither carried nor scanned over. The
    step of the loop closes over nothing.
    """
    split = _split_of(loop)
    if split is None:
        return 0
    rest = split.derivative.rest
    equations = [(each, rest.eqns[each.equation]) for each in split.deferred]
    products = [e.outvars[0] for _, e in equations]
    operands = {id(var): var for var in (each.of(e)[1] for each, e in equations)}
    kept = [var for key, var in operands.items() if key not in set(map(id, rest.invars))]
    return sum(map(_bytes_of, [*products, *kept, *split.derivative.early.outvars]))


def _bytes_of(var: Any) -> int:
    return var.aval.size * var.aval.dtype.itemsize


PAYS = 8
"""How many times the operations of its other equations the products of a step must take, to be worth a chunk's rule."""


def products_pay(loop: Loop) -> bool:
    """Whether a chunk of a loop takes less time if it computes the products of its steps at once.

    It does so if the products with weights are most of a step. All else takes more time in a chunk than step by step,
    and a step that chooses among values would save all that it computes. The step of the loop closes over nothing.
    """
    split = None if loop.trace.branches or chooses(loop.trace.jaxpr) else _split_of(loop)
    if split is None:
        return False
    early, rest = split.derivative.early, split.derivative.rest
    products = [rest.eqns[each.equation] for each in split.deferred]
    products += [equation for equation in early.eqns if equation.primitive.name in PRODUCTS]
    of_products = count_operations(rest.replace(eqns=products), transcendental=1)
    of_all = sum(count_operations(jaxpr, transcendental=1) for jaxpr in (early, rest))
    return of_products >= PAYS * (of_all - of_products)


def at_once(step: Step, looped: bool) -> Step:
    """What is put around a chunk that saves its steps: their products are computed at once."""
    return Checkpointed(in_bulk(step), looped, save_all_but_cheap) if looped else in_bulk(step)


def saving_step(hoisted: Hoisted) -> Step:
    """A step of a chunk that saves its steps, as the rule of the chunk differentiates it."""
    return Checkpointed(hoisted.loop.step, looped=True, policy=policy_within(hoisted.jaxpr))


def _reads(split: Split, consts: PyTree) -> list[Any]:
    same = [*split.closed, *jax.tree.leaves(consts)]
    return [*eval_jaxpr(split.once, [], *same), *same]


@dataclass(frozen=True)
class RestOfStep:
    """A step of a chunk, without the products that were computed before. Its x is (place in the chunk, feed)."""

    forward: Forward

    def __call__(self, consts: PyTree, state: PyTree, feed: Feed) -> tuple[PyTree, PyTree]:
        place, fed = feed.x
        leaves = Feed((place, jax.tree.leaves(fed)))
        state, y = self.forward(consts, jax.tree.leaves(state), leaves)
        split = self.forward.split
        return jax.tree.unflatten(split.state, state), jax.tree.unflatten(split.y, y)


@dataclass(frozen=True)
class AllOfStep:
    """A step in the same form that computes everything itself."""

    step: Step

    def __call__(self, consts: PyTree, state: PyTree, feed: Feed) -> tuple[PyTree, PyTree]:
        _, fed = feed.x
        return self.step(consts, state, fed)


def without_early_products(loop: Loop) -> tuple[AllOfStep, PyTree]:
    """The form of a step that has no early products."""
    return AllOfStep(loop.step), loop.consts


def with_early_products(loop: Loop) -> tuple[RestOfStep | AllOfStep, PyTree]:
    """The step of a chunk whose early products are computed now, and its consts; for what is not differentiated."""
    split = _split_of(loop)
    if split is None or not split.forward.early.outvars:
        return without_early_products(loop)
    reads = _reads(split, loop.consts)
    try:
        early = compute_early(split.forward.early, reads, jax.tree.leaves(loop.xs))
    except Unproven:
        return without_early_products(loop)
    return RestOfStep(Forward(split)), (reads, early)


def _split_of(loop: Loop) -> Split | None:
    sharded = any(map(is_sharded, jax.tree.leaves((loop.consts, loop.state, loop.xs))))
    if sharded:
        return None
    one = one_step(loop.xs)
    key = (InBulk, loop.step, *map(jax.typeof, jax.tree.leaves((loop.consts, loop.state))), *jax.tree.leaves(one))
    return (loop.memo or Memo())(key, lambda: products_of_step(loop.step, loop.consts, loop.state, one))
