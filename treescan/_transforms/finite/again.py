"""Runs the steps before the bad one again, and that one operation by operation."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..._avals import is_key, place_like
from ..._axes import LeafAxes
from ..._loop.chunk import Level, run_chunked
from ..._loop.loop import Feed, Loop, Step
from ..._trace.blame import Blame, becomes_bad
from ..._trace.equations import opened
from ..._trace.hoist import Lifted, is_smooth, merge, replaced, split
from ..._types import Array, PyTree
from ..rows.leaves import expand, last_set, select, select_valid, take_row
from ..rows.resets import begin, begins_of
from .case import CONSTANT, About, Bad, Case, Evidence, Worst
from .site import GOOD, Site, any_of_rows, numbers_of, show_one

_BASE = 1 << 16


class Probe(NamedTuple):
    """What its cotangent says of the steps behind it.

    Attributes:
        code: float32[*batch, 3], for each row the number of the step that was found, counted from 1, in two digits, and
            whether the cotangent was bad before that step. 0: there is none.
        after: the last cotangents of the state before that: what this step was given.
        before: the cotangents of the state that were found: what this step made of them.
        y: the cotangents of its outputs; of those without rows, one for each row.
        closed: float32[], whether any row has found one; only where a leaf of the state belongs to all rows.
        reached: float32[*batch, 2], the number of each row's last step; only where the loop may end early.
    """

    code: Array
    after: list[Array]
    before: list[Array]
    y: list[Array]
    closed: Array | None = None
    reached: Array | None = None

    def is_open(self) -> Array:
        """bool[*batch]: in which rows nothing was found."""
        nothing = jnp.all(self.code == 0, -1)
        return nothing if self.closed is None else nothing & (self.closed == 0)

    def axes(self, state: LeafAxes, y: LeafAxes) -> LeafAxes:
        """Where the rows are in each leaf, of where they are in what it notes."""
        closed, reached = (() if leaf is None else (axis,) for leaf, axis in ((self.closed, None), (self.reached, 0)))
        return (0, *state, *state, *_leading(y), *closed, *reached)


def number_of(digits: Array) -> Array:
    """int32[*batch], counted from 0; -1: there is none."""
    digits = digits.astype(jnp.int32)
    return digits[..., 0] * _BASE + digits[..., 1] - 1


def _digits_of(number: Array) -> Array:
    return jnp.stack([(number + 1) // _BASE, (number + 1) % _BASE], -1).astype(jnp.float32)


class Look(NamedTuple):
    """How cotangents of the state are looked at.

    Attributes:
        axes: for each leaf where the rows are; None: it belongs to all.
        of_result: whether no step made them yet.
    """

    axes: LeafAxes
    of_result: bool = False


def tapped(rule: Callable[..., Any], leaves: list[Array], probe: Probe, reads: Any) -> tuple[list[Array], Probe]:
    """The leaves and the probe, on whose cotangents a rule looks: it maps (reads, these) to theirs, and None."""
    same = jax.custom_vjp(lambda leaves, probe, reads: (leaves, probe))
    same.defvjp(lambda leaves, probe, reads: ((leaves, probe), reads), rule)
    return same(leaves, probe, reads)


def pass_state(look: Look, leaves: list[Array], probe: Probe, number: Array) -> tuple[list[Array], Probe]:
    """The state and the probe before or after a step; the cotangents of the state are looked at."""
    return tapped(functools.partial(_look, look), leaves, probe, number)


def _look(look: Look, number: Array, given: tuple[list[Array], Probe]) -> tuple[list[Array], Probe, None]:
    leaves, probe = given
    is_open, rows = probe.is_open(), probe.code.ndim - 1
    bad = jnp.zeros((1,) * rows, bool)
    for leaf, axis in zip(leaves, look.axes, strict=True):
        bad = bad | any_of_rows(~jnp.isfinite(leaf), axis, rows)
    found, going = is_open & bad, is_open & ~bad
    digits = _digits_of(number)
    code = jnp.concatenate([digits, jnp.full_like(digits[..., :1], look.of_result)], -1)
    closed, any_found, none_found = probe.closed, found, going
    if closed is not None:
        any_found, none_found = jnp.any(found), (closed == 0) & ~jnp.any(found)
        closed = jnp.where(any_found, 1.0, closed)
    noted = Probe(
        select(found[..., None], code, probe.code),
        _where(going, none_found, leaves, probe.after, look.axes),
        _where(found, any_found, leaves, probe.before, look.axes),
        probe.y,
        closed,
        None if probe.reached is None else select(probe.reached == 0, digits, probe.reached),
    )
    return leaves, noted, None


def pass_outputs(axes: LeafAxes, leaves: list[Array], probe: Probe) -> tuple[list[Array], Probe]:
    """The outputs of a step and the probe after it; the cotangents of the outputs are noted."""

    def note(_: None, given: tuple[list[Array], Probe]) -> tuple[list[Array], Probe, None]:
        leaves, probe = given
        spread = [
            jnp.broadcast_to(leaf, old.shape) if axis is None else leaf
            for leaf, old, axis in zip(leaves, probe.y, axes, strict=True)
        ]
        is_open = probe.is_open()
        return leaves, probe._replace(y=_where(is_open, is_open, spread, probe.y, _leading(axes))), None

    return tapped(note, leaves, probe, None)


def _leading(axes: LeafAxes) -> LeafAxes:
    """Where the rows are in what is noted of outputs: of those without rows, there is one for each row."""
    return tuple(0 if axis is None else axis for axis in axes)


def _where(rows: Array, others: Array, new: Sequence[Array], old: Sequence[Array], axes: LeafAxes) -> list[Array]:
    """The new leaves where a row is flagged; of leaves that belong to all rows, where `others` says so."""
    return [
        select(others if axis is None or not rows.ndim else expand(rows, a, axis), place_like(a, jax.typeof(b)), b)
        for a, b, axis in zip(new, old, axes, strict=True)
    ]


def zero_of(tree: Any) -> Array:
    """bool[]: False, and mapped where anything in a tree is: JAX adds up the cotangents of what is not."""
    zero = jnp.zeros((), bool)
    for leaf in jax.tree.leaves(tree):
        if not is_key(leaf):
            none = jax.lax.stop_gradient(leaf)[None][:0]
            zero = zero | jnp.any(none != none)
    return zero


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
        return jax.lax.cond(
            jnp.min(numbers) < end, self.step, lambda _, state, feed: (state, None), consts, state, feed
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


def gather(first: Array, site: Site, about: About, taken: Array | None = None) -> tuple[Evidence, Case]:
    """What is known of the first bad step, in a branch that is taken only if there is one. It has no derivative.

    Args:
        first: int32[], how many steps ran before it; -1: there is none.
        site: the loop.
        about: the words for messages about it.
        taken: int32[*batch], how many steps ran, of a loop that ends early; None: all.
    """

    def explain(told: Told, first: Array, taken: Array | None) -> Evidence:
        loop = site.once_more(taken=taken)
        at = At.of(first, loop, site.last)
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

    def nothing(*_: Any) -> Evidence:
        zeros = jax.tree.map(lambda leaf: place_like(jnp.zeros(leaf.shape, leaf.dtype), leaf), shapes)
        return zeros._replace(first=jnp.int32(GOOD))

    evidence = jax.lax.cond(here, taken, nothing, *operands)
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
    feed, rows, (unchanged, _) = feed_at(at, loop), loop.rows, loop.consts
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
    x = site.x_of(feed.x, jax.lax.stop_gradient(site.whole))
    return Evidence(at.first, position, before, after, x, valid, worst, bits)


def feed_at(at: At, loop: Loop) -> Feed:
    """What a step is fed."""
    return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, at.place, keepdims=False), loop.xs)


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
    flags = jax.lax.dynamic_index_in_dim(begins.flags, at.place, keepdims=False)
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


def case_of(site: Site, about: About, told: Told, noted: Sequence[bool] | None = None) -> Case:
    """What is static of the evidence; `noted`: which leaves of the state are looked at. None: those that change."""
    carry = site.carry_of(range(len(site.fixed)))
    return Case(
        about,
        about.length or site.given.length,
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


class Found(NamedTuple):
    """A bad cotangent.

    Attributes:
        number: int32[], of the step, in the order of the run; -1: there is none.
        rows: bool[*batch], in which rows that step was found.
        of_result: bool[], whether it was bad before that step.
        after: the cotangents of the state that the step was given, of leaves that are looked at.
        before: those that it made.
        y: those of its outputs; of those without rows, one for each row.
        taken: int32[*batch], how many steps each row took; None: as many as the mask says.
    """

    number: Array
    rows: Array
    of_result: Array
    after: list[Array]
    before: list[Array]
    y: list[Array]
    taken: Array | None

    @classmethod
    def of(cls, probe: Probe) -> Found:
        """What a probe says: of all rows, what was found first on the way back."""
        numbers = number_of(probe.code)
        number = jnp.max(numbers, initial=-1)
        rows = (numbers == number) & (number >= 0)
        of_result = jnp.any(rows & (probe.code[..., 2] > 0))
        taken = None if probe.reached is None else number_of(probe.reached) + 1
        return cls(number, rows, of_result, probe.after, probe.before, probe.y, taken)


@dataclass(frozen=True)
class Noted:
    """Which cotangents are looked at.

    Attributes:
        flags: for each leaf of the state whether a step may change it, and it has a cotangent.
        axes: for each of these where the rows are; None: it belongs to all rows, or there are none.
        y_axes: the same for each leaf of one step's y that has a cotangent.
    """

    flags: tuple[bool, ...]
    axes: LeafAxes
    y_axes: LeafAxes

    def pick(self, leaves: Sequence[Any]) -> list[Any]:
        """Those of the leaves."""
        return split(self.flags, leaves)[0]


class Pull(NamedTuple):
    """What the derivative of one step is evaluated from.

    Attributes:
        consts: of the loop.
        leaves: the state before the step.
        feed: what the step is fed.
        after: the cotangents that it is given.
        y: those of its outputs.
    """

    consts: Any
    leaves: list[Array]
    feed: Feed
    after: list[Array]
    y: list[Array]


def evidence_of(
    told: Told, site: Site, noted: Noted, found: Found, loop: Loop, at: At, leaves: list[Array]
) -> Evidence:
    """What is known of a bad cotangent. Its `before` is the carry of the step, its `after` the cotangents.

    Args:
        told: notes what is static of it.
        site: the loop.
        noted: which leaves of the whole state are looked at.
        found: the cotangent.
        loop: the same loop, as it runs once more.
        at: the step.
        leaves: the state before it, of the leaves that change.
    """
    feed, rows, (unchanged, (_, inner)) = feed_at(at, loop), loop.rows, loop.consts
    after = split(noted.pick(site.fixed), found.after)[1]
    given = Pull(loop.consts, leaves, feed, after, found.y)
    made = found.before
    if rows is not None:
        given = _of_found_rows(given, noted, found, loop)
        made = [
            leaf if axis is None else select_valid(found.rows, leaf, jnp.zeros((), leaf.dtype), axis)
            for leaf, axis in zip(made, noted.axes, strict=True)  # 0 in rows that were not found
        ]
    pulled = _pull_back(told, site, loop, given)
    none = [None] * len(site.fixed)
    cotangents = merge(noted.flags, made, none)
    worst = Worst.of(_bad(cotangents))
    pulls = [is_smooth(leaf) and not fixed for leaf, fixed in zip(site.hoisted.settled, site.fixed, strict=True)]
    blamed = worst.pick(_bad(merge(pulls, pulled, none)))
    return Evidence(
        found.number,
        jnp.asarray(at.position, jnp.int32),
        merge(site.fixed, unchanged, leaves),
        [jnp.zeros(()) if leaf is None else leaf for leaf in cotangents],
        site.x_of(feed.x, inner[0] if site.slices is not None else ()),
        None if rows is None else feed.valid,
        worst,
        told.blame.bits(split(pulls, blamed)[0], worst.is_nan),
        found.of_result,
    )


def _bad(cotangents: Sequence[Array | None]) -> list[Bad | None]:
    """For each leaf which elements are bad; None: it is not looked at."""
    return [None if leaf is None else Bad(jnp.isnan(leaf), ~jnp.isfinite(leaf)) for leaf in cotangents]


def _of_found_rows(given: Pull, noted: Noted, found: Found, loop: Loop) -> Pull:
    """What a step is pulled from, in which every other row has the values of a row that was found."""
    unchanged, inner = given.consts
    x, structure = jax.tree.flatten(given.feed.x)
    lender, batch, axes = last_set(found.rows), found.rows.shape, loop.rows.axes
    y = [
        take_row(leaf, lender, 0, batch).reshape(leaf.shape[len(batch) :]) if axis is None else leaf
        for leaf, axis in zip(given.y, noted.y_axes, strict=True)
    ]

    def show(leaves: Sequence[Array], axes: LeafAxes) -> list[Array]:
        return show_one(leaves, axes, found.rows)

    return Pull(
        (show(unchanged, loop.rows.fixed), inner),
        show(given.leaves, axes.state),
        given.feed._replace(x=jax.tree.unflatten(structure, show(x, axes.x))),
        show(given.after, noted.axes),
        show(y, noted.y_axes),
    )


def _pull_back(told: Told, site: Site, loop: Loop, given: Pull) -> list[Array]:
    """Evaluates the derivative of a step, and notes what each of its inputs is called. Returns the cotangents."""

    def pull(consts: Any, leaves: list[Array], feed: Any, after: list[Array], y: list[Array]) -> list[Array]:
        def outputs(smooth: list[Array]) -> tuple[list[Array], list[Array]]:
            new, ys = loop.step(consts, replaced(list(map(is_smooth, leaves)), leaves, smooth), feed)
            return list(filter(is_smooth, new)), list(filter(is_smooth, jax.tree.leaves(ys)))

        _, back = jax.vjp(outputs, list(filter(is_smooth, leaves)))
        return back((after, y))[0]

    jaxpr = jax.make_jaxpr(pull)(*given)
    (_, (held, inner)), (whole, fed) = given.consts, site.names_of_feed()
    fixed, changing = split(site.fixed, site.names_of_state())
    smooth = [path for path, leaf in zip(changing, given.leaves, strict=True) if is_smooth(leaf)]
    others = len(jax.tree.leaves(inner)) - len(whole)
    constants = [*[CONSTANT] * len(jaxpr.consts), *fixed, *[CONSTANT] * len(held), *whole, *[CONSTANT] * others]
    cotangents = [*(f"the cotangent of {path} after it" for path in smooth), *(["the cotangent of y"] * len(given.y))]
    names = [*constants, *changing, *fed, *cotangents]
    return told.evaluate(jaxpr.jaxpr, names, [*jaxpr.consts, *jax.tree.leaves(given)])
