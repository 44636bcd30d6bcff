"""Runs the steps before the bad one again, and that one operation by operation."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..._avals import in_mesh, mesh_of, place_like
from ..._loop.chunk import Level, run_chunked
from ..._loop.loop import Feed, Loop, Step, in_turn
from ..._trace.blame import Blame, becomes_bad
from ..._trace.equations import opened
from ..._trace.hoist import Lifted, is_smooth, merge, split
from ..._types import Array, PyTree
from ..nest import KeepUnchanged, run_nested
from ..rows.leaves import any_of_all, at_step, expand, select
from ..rows.resets import begin, begins_of
from .case import CONSTANT, Bad, Case, Evidence, Worst
from .site import GOOD, Reads, Site, numbers_of, positions_of, show_one


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
        return [select(number < end, leaf, old) for old, leaf in zip(state, new, strict=True)], None


@dataclass(frozen=True, eq=False)
class Stretch:
    """A chunk of such steps, in a branch: none of those after the end is run."""

    step: Step

    def __call__(self, consts: Any, state: list[Array], feed: Feed) -> tuple[PyTree, PyTree]:
        end, _ = consts
        numbers, _ = feed.x
        return jax.lax.cond(
            any_of_all(jnp.min(numbers) < end), self.step, lambda _, state, feed: (state, None), consts, state, feed
        )


class Told:
    """What is static of an evaluated step.

    Attributes:
        blame: its operations.
        names: what its inputs are called.
    """

    def __init__(self) -> None:
        self.blame = Blame()
        self.names: list[str] = []

    def evaluate(self, closed: Any, names: Sequence[str], given: Sequence[Any]) -> list[Any]:
        """Evaluates an open jaxpr of these inputs, what it closes over first, and notes what each is called."""
        self.names += [*names, CONSTANT]
        return self.blame.evaluate(opened(closed), given)


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

    @classmethod
    def of(cls, first: Array, loop: Loop, last: Any) -> At:
        """The step of a loop before which so many ran; `last` is the position of the first, in reverse."""
        return cls(first, loop.length - 1 - first, last - first) if loop.reverse else cls(first, first, first)


Explain = Callable[..., Evidence]
"""(told, place, loop, at, leaves, *operands) to what is known of a step of the loop in that place."""


def evidence_of_step(
    number: Array, sites: Sequence[Site], reads: Sequence[Reads | None], explain: Explain, taken: Any, *operands: Any
) -> list[tuple[int, Evidence, Told]]:
    """What is known of a step, in a branch that is taken only if there is one: for each loop that may have run it.

    Args:
        number: int32[], how many steps ran before it; -1: there is none.
        sites: the loops that take turns.
        reads: their arrays; None: those that they have, less their tangents.
        explain: evaluates the step.
        taken: int32[*batch], how many steps ran, of a loop that ends early; None: all.
        operands: what it is given beside the step.
    """
    count, last = len(sites), sites[0].last if reads[0] is None else reads[0].last
    if count == 1:

        def explain_it(told: Told, number: Array, taken: Any, reads: Any, *operands: Any) -> Evidence:
            loop = sites[0].once_more(reads, taken)
            at = At.of(number, loop, last if reads is None else reads.last)
            return explain(told, 0, loop, at, state_before(at, sites[0], loop), *operands)

        return [(0, *in_branch(number != GOOD, explain_it, number, taken, reads[0], *operands))]
    # The state before the step is found once for all places: else the program would have all blocks once for each.
    loops = [site.once_more(own) for site, own in zip(sites, reads, strict=True)]
    position = last - number if sites[0].given.reverse else number
    before, found = _before_turn(number, sites, loops), list[tuple[int, Evidence, Told]]()
    for place, loop in enumerate(loops):

        def explain_turn(
            told: Told, at: At, before: list[Array], arrays: Any, *operands: Any, place: int = place
        ) -> Evidence:
            (unchanged, changing), (consts, xs) = split(sites[place].fixed, before), arrays
            there = dataclasses.replace(loops[place], consts=(unchanged, consts[1]), xs=xs)
            return explain(told, place, there, at, changing, *operands)

        here, at = (number != GOOD) & (position % count == place), At(number, position // count, position)
        if loop.length:
            evidence, told = in_branch(here, explain_turn, at, before, (loop.consts, loop.xs), *operands)
            found.append((place, evidence, told))
    return found


def _before_turn(number: Array, sites: Sequence[Site], loops: Sequence[Loop]) -> list[Array]:
    """The leaves of the state before a step: all steps before it run again, in a branch that is taken if there is one.

    Args:
        number: int32[], how many steps run before it; -1: there is none.
        sites: the loops that take turns.
        loops: the same as they run once more.
    """
    unchanged, _ = loops[0].consts

    def again(number: Array, leaves: list[Array]) -> list[Array]:
        before = list[Loop]()
        for place, (site, loop) in enumerate(zip(sites, loops, strict=True)):
            positions = positions_of(loop, place, len(sites))
            numbers = site.last - positions if loop.reverse else positions
            step = Before(KeepUnchanged(loop.step, site.fixed), site.keyed)
            xs = loop.xs._replace(x=(numbers, loop.xs.x))
            before.append(dataclasses.replace(loop, step=step, consts=(number, loop.consts[1]), state=leaves, xs=xs))
        return run_nested(in_turn(before))[0]

    leaves = merge(sites[0].fixed, unchanged, loops[0].state)
    return jax.lax.cond(any_of_all(number != GOOD), again, lambda _, leaves: leaves, number, leaves)


def in_branch(here: Array, explain: Callable[..., Evidence], *operands: Any) -> tuple[Evidence, Told]:
    """What is found out in a branch, and what is static of that. The elements of a vmap take it together."""
    tolds, mesh = list[Told](), mesh_of((here, operands))
    operands = operands if mesh is None else in_mesh(operands, mesh)

    def taken(*operands: Any) -> Evidence:
        tolds.append(Told())
        evidence = explain(tolds[-1], *operands)
        return evidence if mesh is None else in_mesh(evidence, mesh)  # a selection need not name it

    with jax.disable_jit(False):
        shapes = jax.eval_shape(taken, *operands)

    def nothing(*_: Any) -> Evidence:
        zeros = jax.tree.map(lambda leaf: place_like(jnp.zeros(leaf.shape, leaf.dtype), leaf), shapes)
        return zeros._replace(first=place_like(jnp.int32(GOOD), shapes.first))

    evidence = jax.lax.cond(any_of_all(here), taken, nothing, *operands)
    mine = evidence._replace(first=select(here, evidence.first, jnp.full_like(evidence.first, GOOD)))
    return jax.lax.stop_gradient(mine), tolds[0]


def evidence_at(told: Told, at: At, state: list[Array], site: Site, loop: Loop) -> Evidence:
    """Evaluates a step operation by operation, from the leaves of the state that change.

    Args:
        told: notes what is static of it.
        at: the step.
        state: the state before it.
        site: the loop.
        loop: the same, as it runs once more.
    """
    feed, rows, (unchanged, (_, inner)) = feed_at(at, loop), loop.rows, loop.consts
    before, axes, valid = merge(site.fixed, unchanged, state), site.row_axes(rows), None
    shown, fed = before, feed
    if rows is not None:  # padded rows are shown what a valid one is
        assert feed.valid is not None
        valid, (x, structure) = feed.valid, jax.tree.flatten(feed.x)
        fed = feed._replace(x=jax.tree.unflatten(structure, show_one(x, rows.axes.x, valid)))
        shown = show_one(before, axes, valid)
    results = _evaluate(told, shown, fed, site, loop)
    after = [jnp.asarray(new, old.dtype) for old, new in zip(before, results, strict=False)]

    def became_bad(old: Array, new: Array, fixed: bool, axis: int | None) -> Bad | None:
        if fixed or not is_smooth(new):
            return None
        ran = True if valid is None or axis is None else expand(valid, new, axis)
        return Bad(jnp.isnan(new) & ran, becomes_bad(old, new) & ran)

    bad = list(map(became_bad, before, after, site.fixed, axes))
    worst = Worst.of(bad)
    rest = [None] * (len(results) - len(after))
    bits = told.blame.bits([*worst.pick(bad), *rest], worst.is_nan)
    position = jnp.asarray(at.position, jnp.int32)
    return Evidence(at.first, position, before, after, site.x_of(feed.x, inner), site.valid_of(feed), worst, bits)


def feed_at(at: At, loop: Loop) -> Feed:
    """What a step is fed."""
    return jax.tree.map(lambda leaf: at_step(leaf, at.place), loop.xs)


def state_before(at: At, site: Site, loop: Loop) -> list[Array]:
    """The leaves of the state before a step; where rows begin anew, as they begin."""
    around = loop
    for transform in () if loop.rows is None else site.around:
        around = transform(around)
    step = Before(around.step, site.keyed)
    xs = around.xs._replace(x=(numbers_of(loop), around.xs.x))
    again = dataclasses.replace(around, step=step, consts=(at.first, around.consts), xs=xs)
    size = math.isqrt(loop.length) if isinstance(loop.length, int) else 1
    state, _ = run_chunked(again, (Level(size, lambda step, looped: Stretch(step)),) if size > 1 else ())
    if loop.rows is None or loop.rows.resets is None:
        return state
    begins = begins_of(loop, loop.state)
    flags = at_step(begins.flags, at.place)
    return begin(flags, state, begins.targets, loop.rows.axes.state, begins.tables)


def _evaluate(told: Told, state: list[Array], feed: Feed, site: Site, loop: Loop) -> list[Any]:
    """Evaluates a step, and notes what each of its inputs is called."""
    step, (_, (closed, inner)) = loop.step, loop.consts
    assert isinstance(step, Lifted)
    unchanged, changing = split(site.fixed, state)
    shapes = step.traced.shapes((unchanged, inner), changing, feed)
    held = [closed[i] for i in step.places[shapes] if i is not None]
    whole, fed = site.names_of_feed()
    others = len(jax.tree.leaves(inner)) - len(whole)
    names = [*[CONSTANT] * len(held), *whole, *[CONSTANT] * others, *site.names_of_state(), *fed]
    return told.evaluate(step.traced.jaxprs[shapes].jaxpr, names, [*held, *jax.tree.leaves((inner, state, feed))])


def case_of(site: Site, told: Told, noted: Sequence[bool] | None = None) -> Case:
    """What is static of the evidence; `noted`: which leaves of the state are looked at. None: those that change."""
    carry = site.carry_of(range(len(site.fixed)))
    return Case(
        site.about,
        site.about.length or site.given.length,
        tuple(told.blame.operations),
        tuple(told.names),
        site.names_of_state(),
        site.fixed if noted is None else tuple(not each for each in noted),
        site.row_axes(site.hoisted.loop.rows),
        tuple(jax.tree.leaves(carry)),
        jax.tree.structure(carry),
        site.given.names[0],
        site.mesh,
    )
