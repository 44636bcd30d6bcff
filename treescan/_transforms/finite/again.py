"""Runs the steps before the bad one again, and that one operation by operation."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..._loop.chunk import Level, run_chunked
from ..._loop.loop import Feed, Loop, Step
from ..._trace.blame import Blame
from ..._trace.hoist import Lifted, merge
from ..._types import Array, PyTree
from ..rows.leaves import mask_of_lengths
from ..rows.resets import begin, begins_of
from .case import CONSTANT, About, Case, Evidence
from .rows import show_one
from .site import Site
from .watch import GOOD, numbers_of


@dataclass(frozen=True, eq=False)
class Before:
    """A step that runs if fewer than so many ran before it, and hands on the state else.

    Its consts are (that number, inner consts), its x is (how many ran before it, inner x).
    """

    step: Step
    keyed: bool

    def __call__(self, consts: Any, state: list[Array], feed: Feed) -> tuple[PyTree, PyTree]:
        end, inner = consts
        number, x = feed.x
        new, _ = self.step(inner, state, feed._replace(x=x))
        return [jnp.where(number < end, leaf, old) for old, leaf in zip(state, new, strict=True)], None


@dataclass(frozen=True, eq=False)
class Stretch:
    """A chunk of such steps, in a branch: none of those after the end is run."""

    step: Step

    def __call__(self, consts: Any, state: list[Array], feed: Feed) -> tuple[PyTree, PyTree]:
        end, _ = consts
        numbers, _ = feed.x
        return jax.lax.cond(jnp.min(numbers) < end, self.step, _nothing, consts, state, feed)


def _nothing(consts: Any, state: list[Array], feed: Feed) -> tuple[PyTree, PyTree]:
    del consts, feed
    return state, None


class Told:
    """What is static of an evaluated step.

    Attributes:
        blame: its operations.
        names: what its inputs are called.
    """

    def __init__(self) -> None:
        self.blame = Blame()
        self.names: list[str] = []


class At(NamedTuple):
    """A step.

    Attributes:
        first: int32[], how many ran before it.
        place: where it is in xs.
        position: what it is called by.
    """

    first: Array
    place: Array
    position: Any


def gather(first: Array, site: Site, about: About, taken: Array | None = None) -> tuple[Evidence, Case]:
    """What is known of the first bad step, in a branch that is taken only if there is one. It has no derivative.

    Args:
        first: int32[], how many steps ran before it; -1: there is none.
        site: the loop.
        about: the words for messages about it.
        taken: int32[*batch], how many steps ran, of a loop that ends early; None: all.
    """

    def explain(told: Told, first: Array, taken: Array | None) -> Evidence:
        loop = site.once_more()
        if taken is not None and loop.rows is not None:
            ran = mask_of_lengths(taken, loop.length)
            loop = dataclasses.replace(loop, xs=loop.xs._replace(valid=ran[::-1] if loop.reverse else ran))
        last = loop.length - 1
        at = At(first, last - first, site.last - first) if loop.reverse else At(first, first, first)
        return evidence_at(told, at, state_before(at, site, loop), site, loop)

    evidence, told = in_branch(first != GOOD, explain, first, taken)
    return evidence, case_of(site, about, told)


def in_branch(here: Array, explain: Callable[..., Evidence], *operands: Any) -> tuple[Evidence, Told]:
    """What is found out in a branch, and what is static of that."""
    tolds: list[Told] = []

    def taken(*operands: Any) -> Evidence:
        tolds.append(Told())
        return explain(tolds[-1], *operands)

    with jax.disable_jit(False):
        shapes = jax.eval_shape(taken, *operands)
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    nothing = zeros._replace(first=jnp.int32(GOOD))
    evidence = jax.lax.cond(here, taken, lambda *_: nothing, *operands)
    return jax.lax.stop_gradient(evidence), tolds[0]


def evidence_at(told: Told, at: At, state: list[Array], site: Site, loop: Loop) -> Evidence:
    """Evaluates a step operation by operation, from the leaves of the state that change.

    Args:
        told: notes what is static of it.
        at: the step.
        state: the state before it.
        site: the loop.
        loop: the same, as it runs once more.
    """
    feed = jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, at.place, keepdims=False), loop.xs)
    unchanged, _ = loop.consts
    before = merge(site.fixed, unchanged, state)
    shown, fed = (before, feed) if loop.rows is None else _without_padding(before, feed, site, loop)
    results = _evaluate(told, shown, fed, site, loop)
    after = [jnp.asarray(new, old.dtype) for old, new in zip(before, results, strict=False)]
    valid = None if loop.rows is None else feed.valid
    position, bits = jnp.asarray(at.position, jnp.int32), jnp.stack(told.blame.bits)
    return Evidence(at.first, position, before, after, site.x_of(feed.x), valid, bits)


def _without_padding(state: list[Array], feed: Feed, site: Site, loop: Loop) -> tuple[list[Array], Feed]:
    """A step in which padded rows are shown what a valid one is."""
    assert feed.valid is not None
    axes = merge(site.fixed, loop.rows.fixed, loop.rows.axes.state)
    x, structure = jax.tree.flatten(feed.x)
    x = jax.tree.unflatten(structure, show_one(x, loop.rows.axes.x, feed.valid))
    return show_one(state, tuple(axes), feed.valid), feed._replace(x=x)


def state_before(at: At, site: Site, loop: Loop) -> list[Array]:
    """The leaves of the state before a step; where rows begin anew, as they begin."""
    around = loop
    for transform in () if loop.rows is None else site.around:
        around = transform(around)
    step = Before(around.step, site.keyed)
    xs = around.xs._replace(x=(numbers_of(loop), around.xs.x))
    again = dataclasses.replace(around, step=step, consts=(at.first, around.consts), xs=xs)
    state, _ = run_chunked(again, _levels(loop.length))
    if loop.rows is None or loop.rows.resets is None:
        return state
    begins = begins_of(loop, loop.state)
    flags = jax.lax.dynamic_index_in_dim(begins.flags, at.place, keepdims=False)
    return begin(flags, state, begins.targets, loop.rows.axes.state, begins.tables)


def _levels(length: Any) -> tuple[Level, ...]:
    size = math.isqrt(length) if isinstance(length, int) else 1
    return (Level(size, lambda step, looped: Stretch(step)),) if size > 1 else ()


def _evaluate(told: Told, state: list[Array], feed: Feed, site: Site, loop: Loop) -> list[Any]:
    """Evaluates a step, and notes what each of its inputs is called."""
    step, (_, (closed, inner)) = loop.step, loop.consts
    assert isinstance(step, Lifted)
    unchanged = [leaf for leaf, fixed in zip(state, site.fixed, strict=True) if fixed]
    changing = [leaf for leaf, fixed in zip(state, site.fixed, strict=True) if not fixed]
    shapes = step.traced.shapes((unchanged, inner), changing, feed)
    jaxpr = step.traced.jaxprs[shapes]
    held = [closed[i] for i in step.places[shapes] if i is not None]
    opened = jaxpr.jaxpr.replace(constvars=[], invars=[*jaxpr.jaxpr.constvars, *jaxpr.jaxpr.invars])
    whole, fed = site.names_of_feed()
    others = len(jax.tree.leaves(inner)) - len(whole)
    told.names += [*[CONSTANT] * len(held), *whole, *[CONSTANT] * others, *site.names_of_state(), *fed]
    return told.blame.evaluate(opened, [*held, *jax.tree.leaves((inner, state, feed))])


def case_of(site: Site, about: About, told: Told) -> Case:
    """What is static of the evidence."""
    count, rows = len(site.fixed), site.hoisted.loop.rows
    carry = site.carry_of(range(count))
    axes = (None,) * count if rows is None else tuple(merge(site.fixed, rows.fixed, rows.axes.state))
    return Case(
        about,
        about.length or site.given.length,
        tuple(told.blame.operations),
        tuple(told.blame.results[:count]),
        tuple(told.names),
        site.names_of_state(),
        site.fixed,
        axes,
        tuple(jax.tree.leaves(carry)),
        jax.tree.structure(carry),
        site.given.names[0],
    )
