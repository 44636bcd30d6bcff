"""Runs a chunk of steps with its products with weights computed at once.

Forward, these are the products of x with large weights. In the derivative they are all products that read only x. For
the products that read the state they are the cotangents of the weights; see `deferred`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
from jax.core import eval_jaxpr

from ..._avals import is_sharded
from ..._loop.body import Memo
from ..._loop.chunk import RunChunk
from ..._loop.loop import Feed, Loop, Step
from ..._loop.run import run
from ..._trace.hoist import lifted, one_step
from ..._trace.smooth import Unproven
from ..._types import PyTree
from .branches import with_safe_branches
from .deferred import Arguments, Forward, run_split
from .products import Split, products_of_step
from .steps_at_once import compute_early


@dataclass(frozen=True)
class InBulk:
    """The step that runs a chunk of steps.

    Attributes:
        chunk: the same, step by step.
    """

    chunk: RunChunk

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
    """The same for what runs a chunk; as it is if that does not run its steps one by one."""
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


@dataclass(frozen=True)
class AtOnce:
    """What is put around a chunk that saves all of its steps: their products are computed at once."""

    def __call__(self, step: Step, looped: bool) -> Step:
        del looped
        return in_bulk(step)


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
    """The same for a step that has none."""
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
