"""`check_finite="backward"`: looks at the cotangents of the carry, in reverse mode.

The state holds a probe, whose cotangent notes what is found (`Probe`). A rule before the first step reads
it once the gradient has come through all steps. Nothing is told in a program that is not differentiated.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp

from ..._avals import Array, LeafAxes, PyTree, TreeDef, in_mesh, is_key, mesh_of, place_like
from ..._errors import Fault, Misuse
from ..._loop.loop import Feed, Loop
from ..._trace.hoist import Hoisted, is_smooth, zeros_like
from ..._tree import merge, replaced, split
from ..rows.axes import spread_batch_axes
from ..rows.leaves import expand, last_set, select, select_valid, take_row
from .case import CONSTANT, Bad, Evidence, OuterSteps, Worst, looks_backward, outer_steps
from .check import Check, tell
from .site import (
    At,
    Numbering,
    Reads,
    Site,
    Told,
    any_of_rows,
    batch_of,
    case_of,
    evidence_of_step,
    feed_at,
    of_rows,
    show_one,
)

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


def tapped(rule: Callable[..., Any], leaves: list[Array], probe: Probe, reads: Any) -> tuple[list[Array], Probe]:
    """The leaves and the probe, on whose cotangents a rule looks: it maps (reads, these) to theirs, and None."""

    def look(reads: Any, given: Any) -> Any:
        mesh = mesh_of((reads, given))  # zeros that JAX makes need not name it
        return rule(reads, given if mesh is None else in_mesh(given, mesh))

    same = jax.custom_vjp(lambda leaves, probe, reads: (leaves, probe))
    same.defvjp(lambda leaves, probe, reads: ((leaves, probe), reads), look)
    return same(leaves, probe, reads)


def _look(
    axes: LeafAxes, of_result: bool, number: Array, given: tuple[list[Array], Probe]
) -> tuple[list[Array], Probe, None]:
    """The rule that looks at the cotangents of the state before or after a step.

    Args:
        axes: for each leaf where the rows are; None: it belongs to all.
        of_result: whether no step made them yet.
        number: how many steps ran before the step.
        given: the cotangents of the leaves, and of the probe.
    """
    leaves, probe = given
    is_open, rows = probe.is_open(), probe.code.ndim - 1
    bad = jnp.zeros((1,) * rows, bool)
    for leaf, axis in zip(leaves, axes, strict=True):
        bad = bad | any_of_rows(~jnp.isfinite(leaf), axis, rows)
    found, going = is_open & bad, is_open & ~bad
    digits = jnp.stack([(number + 1) // _BASE, (number + 1) % _BASE], -1).astype(jnp.float32)
    whether = place_like(jnp.full_like(digits[..., :1], of_result), jax.typeof(digits))
    code = jnp.concatenate([digits, whether], -1)
    closed, any_found, none_found = probe.closed, found, going
    if closed is not None:
        any_found, none_found = jnp.any(found), (closed == 0) & ~jnp.any(found)
        closed = select(any_found, jnp.ones_like(closed), closed)
    noted = Probe(
        select(found[..., None], code, probe.code),
        _where(going, none_found, leaves, probe.after, axes),
        _where(found, any_found, leaves, probe.before, axes),
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
        y_from: which of the outputs that a probe notes is the first of this loop's.
    """

    flags: tuple[bool, ...]
    axes: LeafAxes
    y_axes: LeafAxes
    y_from: int = 0

    @property
    def own_y(self) -> slice:
        """Where the outputs of this loop are among those that a probe notes."""
        return slice(self.y_from, self.y_from + len(self.y_axes))

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
    given = Pull(loop.consts, leaves, feed, after, found.y[noted.own_y])
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
        site.x_of(feed.x, inner),
        site.valid_of(feed),
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


@dataclass(frozen=True, eq=False, kw_only=True)
class WatchedBackward(Numbering):
    """A step that hands on a probe. Its state: [*the leaves of the probe, with `counts` its number, *the inner state].

    Attributes:
        probe: the structure of the probe.
        noted: which cotangents of its own state are looked at.
        looks_after: whether it looks at the cotangents too that the step is given: some come from beside the loop.
    """

    probe: TreeDef
    noted: Noted
    looks_after: bool = False

    def __call__(self, consts: PyTree, state: list[Array], feed: Feed) -> tuple[PyTree, PyTree]:
        probe, count, given = self.split(state)
        number = self.number(count, feed)
        given, probe = self.look(given, probe, number)
        new, y = self.run(consts, given, feed)
        outputs, structure = jax.tree.flatten(y)
        flags = list(map(is_smooth, outputs))
        noted, _ = split(flags, outputs)
        own = self.noted.own_y
        noted, passed = pass_outputs(self.noted.y_axes, noted, probe._replace(y=probe.y[own]))
        probe = passed._replace(y=[*probe.y[: own.start], *passed.y, *probe.y[own.stop :]])
        if self.looks_after:
            new, probe = self.look(new, probe, number, of_result=True)
        y = jax.tree.unflatten(structure, replaced(flags, outputs, noted))
        return [*jax.tree.leaves(probe), *(n + 1 for n in count), *new], y

    def look(
        self, state: list[Array], probe: Probe, number: Array, *, of_result: bool = False
    ) -> tuple[list[Array], Probe]:
        """The inner state and the probe; the cotangents of the state are looked at."""
        rule = functools.partial(_look, self.noted.axes, of_result)
        seen, probe = tapped(rule, self.noted.pick(state), probe, number)
        return replaced(self.noted.flags, state, seen), probe

    def split(self, state: list[Array]) -> tuple[Probe, list[Array], list[Array]]:
        """The probe, the number if there is one, and the inner state."""
        size = self.probe.num_leaves
        start = size + self.counts
        return jax.tree.unflatten(self.probe, state[:size]), state[size:start], state[start:]

    def end(self, state: list[Array], last: Any) -> list[Array]:
        """The inner state after the last step, of this number. Where no step looks at what it is given, this does."""
        probe, _, inner = self.split(state)
        if self.looks_after:
            return inner
        return self.look(inner, probe, jnp.asarray(last, jnp.int32), of_result=True)[0]


@dataclass(frozen=True)
class CheckCotangents(Check):
    """`check_finite="backward"`."""

    def no_forward_mode(self) -> Fault:
        """The error for forward mode; of a loop that ends early, where JAX would refuse it."""
        if self.about.ends_early:
            return Misuse(
                '{verb} over {body}: `check_finite="backward"` looks at cotangents, which reverse mode alone has. '
                "Forward mode was asked for, or the gradient of a `jax.vmap`, for which JAX needs it here.",
                "Take `jax.vmap` of `jax.grad` in place of `jax.grad` of `jax.vmap`. Or leave it out there: True looks "
                "at the carry, in forward mode too.",
            )
        return Misuse(
            '{verb} over {body}: forward mode was asked for, and `check_finite="backward"` looks at cotangents, which '
            "reverse mode alone has.",
            "Leave it out there. True looks at the carry, in forward mode too.",
        )

    def watch(self, loop: Loop, hoisted: Hoisted, sites: list[Site]) -> Loop:
        """The checked loop, of its trace and of the sites of the loops that take turns."""
        plain, early, rows = self.in_leaves(loop, hoisted), self.about.ends_early, loop.rows
        noted, batch, changed = _noted(sites, rows, batch_of(loop)), batch_of(loop), None
        if len(plain.state) < len(noted[0].flags):  # those that no step changes have left the state
            changed = tuple(split(sites[0].fixed, noted[0].flags)[1])
        own = [each if changed is None else dataclasses.replace(each, flags=changed) for each in noted]
        leaves = own[0].pick(plain.state)

        def of_each_row(*shape: int, dtype: Any = jnp.float32) -> Array:
            return of_rows(jnp.zeros((*batch, *shape), dtype), loop)

        y = [
            of_each_row(*aval.shape, dtype=aval.dtype) if axis is None and batch else zeros_like(aval)
            for site, each in zip(sites, noted, strict=True)
            for aval, axis in zip(_y_of(site), each.y_axes, strict=True)
        ]
        probe = Probe(
            of_each_row(3),
            list(map(zeros_like, leaves)),
            list(map(zeros_like, leaves)),
            y,
            jnp.zeros((), jnp.float32) if rows is not None and None in noted[0].axes else None,
            of_each_row(2) if early and rows is not None else None,
        )
        told, reads = functools.partial(_tell, sites, noted, outer_steps()), tuple(site.reads for site in sites)
        seen, probe = begin(told, (reads, outer_steps().positions), leaves, probe)
        parts, structure = jax.tree.flatten(probe)
        count = [of_rows(jnp.zeros(batch, jnp.int32), loop)] * early
        plain = dataclasses.replace(plain, state=replaced(own[0].flags, plain.state, seen))
        if rows is not None:
            plain = dataclasses.replace(plain, trace=plain.trace._replace(reverse_rule=True))
        heads, axes = [*parts, *count], (*probe.axes(own[0].axes, own[0].y_axes), *(0 for _ in count))
        looks_after = early or rows is not None
        each = [{"probe": structure, "noted": one, "looks_after": looks_after} for one in own]
        checked = self.around_steps(WatchedBackward, plain, each, heads, axes)
        step = cast(WatchedBackward, checked.each[0].step)
        return checked.finished(lambda state: step.end(state, loop.steps - 1))


def _tell(
    sites: Sequence[Site],
    noted: Sequence[Noted],
    outer: OuterSteps,
    given: tuple[tuple[Reads, ...], Any],
    probe: Probe,
) -> None:
    """Tells what a probe found, in the arrays of the loops; with them come the positions of the outer steps."""
    (reads, positions), found = given, Found.of(probe)

    def explain(told: Told, place: int, loop: Loop, at: At, leaves: list[Array], found: Found) -> Evidence:
        return evidence_of(told, sites[place], noted[place], found, loop, at, leaves)

    for place, evidence, static in evidence_of_step(found.number, sites, reads, explain, found.taken, found):
        evidence = evidence._replace(offset=reads[place].offset)
        tell(evidence, case_of(sites[place], static, noted[place].flags), outer._replace(positions=positions))


def begin(told: Any, reads: Any, leaves: list[Array], probe: Probe) -> tuple[list[Array], Probe]:
    """The state before the first step, and the probe; what its cotangent says is told in the gradient.

    Args:
        told: tells what a probe says, of what the loop reads.
        reads: what the loop reads.
        leaves: the leaves of the state that are looked at.
        probe: the probe.
    """
    zero = zero_of((reads, leaves))
    probe = jax.tree.map(lambda leaf: leaf + zero.astype(leaf.dtype), probe)

    def tell_what_was_found(reads: Any, given: tuple[list[Array], Probe]) -> tuple[list[Array], None, None]:
        leaves, probe = given
        told(*jax.lax.stop_gradient((reads, probe)))
        return leaves, None, None

    return tapped(tell_what_was_found, leaves, probe, reads)


def _changing(site: Site) -> list[bool]:
    """For each leaf of the whole state whether a step may change it, and it has a cotangent."""
    return [not fixed and is_smooth(leaf) for leaf, fixed in zip(site.hoisted.settled, site.fixed, strict=True)]


def _y_of(site: Site) -> list[Any]:
    """The types of the leaves of one step's y that have a cotangent."""
    return list(filter(is_smooth, site.hoisted.y_avals))


def _noted(sites: Sequence[Site], rows: Any, batch: tuple[int, ...]) -> list[Noted]:
    """Which cotangents of loops that take turns are looked at, of the leaves of their whole state."""
    flags, noted, y_from = tuple(map(any, zip(*map(_changing, sites), strict=True))), list[Noted](), 0
    for site in sites:
        axes, y_axes = site.row_axes(None), cast(LeafAxes, (None,) * len(_y_of(site)))
        if rows is not None:
            axes = site.row_axes(site.hoisted.loop.rows)
            y_axes = spread_batch_axes("y_axes", rows.y_axes, site.hoisted.y, "y", batch)
            y_axes = tuple(split(list(map(is_smooth, site.hoisted.y_avals)), y_axes)[0])
        noted.append(Noted(flags, tuple(split(flags, axes)[0]), y_axes, y_from))
        y_from += len(y_axes)
    return noted


def refuse_truncate(check_finite: Any) -> None:
    """Refuses to look at cotangents that are cut: what was found would be cut with them."""
    if looks_backward(check_finite):
        raise Misuse(
            '{verb} over {body}: `check_finite="backward"` does not look at cotangents that `truncate` cuts.',
            "Leave out one of the two.",
        )
