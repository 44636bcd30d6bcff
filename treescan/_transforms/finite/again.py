"""Runs the steps before the bad one again, and that one operation by operation."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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


def gather(first: Array, site: Site, about: About, taken: Array | None = None) -> tuple[Evidence, Case]:
    """What is known of the first bad step, in a branch that is taken only if there is one. It has no derivative.

    Args:
        first: int32[], how many steps ran before it; -1: there is none.
        site: the loop.
        about: what else is said of it.
        taken: int32[*batch], how many steps ran, of a loop that ends early; None: all.
    """
    blames: list[tuple[Blame, list[str]]] = []

    def explain(first: Array, taken: Array | None) -> Evidence:
        blames.append((Blame(), []))
        return _explain(first, site, taken, *blames[-1])

    with jax.disable_jit(False):
        shapes = jax.eval_shape(explain, first, taken)
    case = _case(site, about, *blames[0])
    nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    evidence = jax.lax.cond(first != GOOD, explain, lambda first, taken: nothing._replace(first=first), first, taken)
    return jax.lax.stop_gradient(evidence), case


def _explain(first: Array, site: Site, taken: Array | None, blame: Blame, names: list[str]) -> Evidence:
    loop = site.once_more()
    step = loop.step
    assert isinstance(step, Lifted)
    if taken is not None and loop.rows is not None:
        ran = mask_of_lengths(taken, loop.length)
        loop = dataclasses.replace(loop, xs=loop.xs._replace(valid=ran[::-1] if loop.reverse else ran))
    place = loop.length - 1 - first if loop.reverse else first
    state = _state_before(first, place, site, loop)
    feed = jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, place, keepdims=False), loop.xs)
    unchanged, inner = loop.consts
    before, valid = merge(site.fixed, unchanged, state), feed.valid
    shown, fed = before, feed
    if loop.rows is not None:
        axes = merge(site.fixed, loop.rows.fixed, loop.rows.axes.state)
        shown = show_one(before, tuple(axes), valid)
        x, structure = jax.tree.flatten(feed.x)
        fed = feed._replace(x=jax.tree.unflatten(structure, show_one(x, loop.rows.axes.x, valid)))
    results = _evaluate(step, inner, shown, fed, site, blame, names)
    after = [jnp.asarray(new, old.dtype) for old, new in zip(before, results, strict=False)]
    position = site.last - first if loop.reverse else first
    ran = None if loop.rows is None else valid
    position = jnp.asarray(position, jnp.int32)
    return Evidence(first, position, before, after, site.x_of(feed.x), ran, jnp.stack(blame.bits))


def _state_before(first: Array, place: Array, site: Site, loop: Loop) -> list[Array]:
    """The leaves of the state before a step, which is in this place in xs; where rows begin anew, as they begin."""
    around = loop
    for transform in () if loop.rows is None else site.around:
        around = transform(around)
    step = Before(around.step, site.keyed)
    xs = around.xs._replace(x=(numbers_of(loop), around.xs.x))
    again = dataclasses.replace(around, step=step, consts=(first, around.consts), xs=xs)
    state, _ = run_chunked(again, _levels(loop.length))
    if loop.rows is None or loop.rows.resets is None:
        return state
    begins = begins_of(loop, loop.state)
    flags = jax.lax.dynamic_index_in_dim(begins.flags, place, keepdims=False)
    return begin(flags, state, begins.targets, loop.rows.axes.state, begins.tables)


def _levels(length: Any) -> tuple[Level, ...]:
    size = math.isqrt(length) if isinstance(length, int) else 1
    return (Level(size, lambda step, looped: Stretch(step)),) if size > 1 else ()


def _evaluate(
    step: Lifted, consts: Any, state: list[Array], feed: Feed, site: Site, blame: Blame, names: list[str]
) -> list[Any]:
    """Evaluates a step, and notes what each of its inputs is called."""
    closed, inner = consts
    unchanged = [leaf for leaf, fixed in zip(state, site.fixed, strict=True) if fixed]
    changing = [leaf for leaf, fixed in zip(state, site.fixed, strict=True) if not fixed]
    shapes = step.traced.shapes((unchanged, inner), changing, feed)
    jaxpr = step.traced.jaxprs[shapes]
    held = [closed[i] for i in step.places[shapes] if i is not None]
    opened = jaxpr.jaxpr.replace(constvars=[], invars=[*jaxpr.jaxpr.constvars, *jaxpr.jaxpr.invars])
    whole, fed = site.names_of_feed()
    others = len(jax.tree.leaves(inner)) - len(whole)
    names += [*[CONSTANT] * len(held), *whole, *[CONSTANT] * others, *site.names_of_state(), *fed]
    return blame.evaluate(opened, [*held, *jax.tree.leaves((inner, state, feed))])


def _case(site: Site, about: About, blame: Blame, names: Sequence[str]) -> Case:
    count, rows = len(site.fixed), site.hoisted.loop.rows
    carry = site.carry_of(range(count))
    axes = (None,) * count if rows is None else tuple(merge(site.fixed, rows.fixed, rows.axes.state))
    return Case(
        about,
        site.given.length,
        tuple(blame.operations),
        tuple(blame.results[:count]),
        tuple(names),
        site.names_of_state(),
        site.fixed,
        axes,
        tuple(jax.tree.leaves(carry)),
        jax.tree.structure(carry),
        site.given.names[0],
    )
