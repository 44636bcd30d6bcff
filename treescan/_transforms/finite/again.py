"""Runs the steps before the bad one again, and that one operation by operation."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..._avals import is_key, place_like
from ..._axes import LeafAxes
from ..._loop.body import Memo
from ..._loop.chunk import Level, run_chunked
from ..._loop.loop import Feed, Loop, Step
from ..._trace.blame import Blame, becomes_bad, is_checked
from ..._trace.hoist import Lifted, merge
from ..._types import Array, PyTree
from ..rows.leaves import expand, last_set, mask_of_lengths, select, select_valid, take_row
from ..rows.resets import begin, begins_of
from .case import CONSTANT, About, Bad, Case, Evidence, Worst
from .site import GOOD, RowArrays, Site, any_of_rows, numbers_of, show_one

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
        of_y = tuple(0 if axis is None else axis for axis in y)
        closed, reached = (() if leaf is None else (axis,) for leaf, axis in ((self.closed, None), (self.reached, 0)))
        return (0, *state, *state, *of_y, *closed, *reached)


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


def pass_state(look: Look, leaves: list[Array], probe: Probe, number: Array) -> tuple[list[Array], Probe]:
    """The state and the probe before or after a step; the cotangents of the state are looked at."""
    return _passed(look, leaves, probe, number)


def _pass(look: Look, leaves: list[Array], probe: Probe, number: Array) -> tuple[list[Array], Probe]:
    del look, number
    return leaves, probe


def _keep_number(look: Look, leaves: list[Array], probe: Probe, number: Array) -> Any:
    del look
    return (leaves, probe), number


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


_passed: Any = jax.custom_vjp(_pass, nondiff_argnums=(0,))
_passed.defvjp(_keep_number, _look)


def pass_outputs(axes: LeafAxes, leaves: list[Array], probe: Probe) -> tuple[list[Array], Probe]:
    """The outputs of a step and the probe after it; the cotangents of the outputs are noted."""
    return _passed_outputs(axes, leaves, probe)


def _pass_outputs(axes: LeafAxes, leaves: list[Array], probe: Probe) -> tuple[list[Array], Probe]:
    del axes
    return leaves, probe


def _keep_nothing(axes: LeafAxes, leaves: list[Array], probe: Probe) -> Any:
    del axes
    return (leaves, probe), None


def _note(axes: LeafAxes, _: None, given: tuple[list[Array], Probe]) -> tuple[list[Array], Probe]:
    leaves, probe = given
    spread = [
        jnp.broadcast_to(leaf, old.shape) if axis is None else leaf
        for leaf, old, axis in zip(leaves, probe.y, axes, strict=True)
    ]
    where = tuple(0 if axis is None else axis for axis in axes)
    is_open = probe.is_open()
    return leaves, probe._replace(y=_where(is_open, is_open, spread, probe.y, where))


_passed_outputs: Any = jax.custom_vjp(_pass_outputs, nondiff_argnums=(0,))
_passed_outputs.defvjp(_keep_nothing, _note)


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
    feed = jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, at.place, keepdims=False), loop.xs)
    unchanged, _ = loop.consts
    before = merge(site.fixed, unchanged, state)
    shown, fed = (before, feed) if loop.rows is None else _without_padding(before, feed, site, loop)
    results = _evaluate(told, shown, fed, site, loop)
    after = [jnp.asarray(new, old.dtype) for old, new in zip(before, results, strict=False)]
    valid = None if loop.rows is None else feed.valid
    bad = _became(before, after, valid, site, loop)
    worst = Worst.of(bad)
    rest = [None] * (len(results) - len(after))
    bits = told.blame.bits([*worst.pick(bad), *rest], worst.is_nan)
    position = jnp.asarray(at.position, jnp.int32)
    return Evidence(at.first, position, before, after, site.x_of(feed.x), valid, worst, bits)


def _became(before: list[Array], after: list[Array], valid: Array | None, site: Site, loop: Loop) -> list[Bad | None]:
    """For each leaf of the state which elements became bad; None: it is not looked at."""

    def of_leaf(old: Array, new: Array, fixed: bool, axis: int | None) -> Bad | None:
        if fixed or not is_checked(new):
            return None
        ran = True if valid is None or axis is None else expand(valid, new, axis)
        return Bad(jnp.isnan(new) & ran, becomes_bad(old, new) & ran)

    axes = (None,) * len(before) if loop.rows is None else merge(site.fixed, loop.rows.fixed, loop.rows.axes.state)
    return list(map(of_leaf, before, after, site.fixed, axes))


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
    told.names += [*[CONSTANT] * len(held), *whole, *[CONSTANT] * others, *site.names_of_state(), *fed, CONSTANT]
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
        tuple(told.names),
        site.names_of_state(),
        site.fixed,
        axes,
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


class Reads(NamedTuple):
    """The arrays of a loop.

    Attributes:
        consts: its consts.
        state: its state.
        xs: what it is fed.
        rows: those of its rows, or None.
        last: the position of the step that runs first, in reverse.
    """

    consts: Any
    state: list[Array]
    xs: Feed
    rows: RowArrays | None
    last: Any


@dataclass(frozen=True, eq=False)
class Pulled:
    """A loop whose cotangents are looked at, and beside it its arrays: rules for derivatives may not hold tracers.

    Attributes:
        loop: the loop, less its arrays.
        site: what it is called; its arrays are not used.
        paths: what each leaf of the state is called.
        fed: what the leaves that are given whole are called, and those that a step is fed.
        noted: for each leaf of the whole state whether it is looked at.
        axes: for each of these where the rows are.
        y_axes: the same for each leaf of one step's y.
        reads: the arrays, tangents and all: the gradient of any of them asks what was found.
        mesh: over which they are spread, or None.
    """

    loop: Loop
    site: Site
    paths: tuple[str, ...]
    fed: tuple[list[str], list[str]]
    noted: tuple[bool, ...]
    axes: LeafAxes
    y_axes: LeafAxes
    reads: Reads
    mesh: Any

    @classmethod
    def of(cls, site: Site, noted: tuple[bool, ...], axes: LeafAxes, y_axes: LeafAxes) -> Pulled:
        """Of a loop before it was checked."""
        loop = site.hoisted.loop
        rows = None if loop.rows is None else RowArrays.of(loop.rows)
        reads = Reads(loop.consts, loop.state, loop.xs, rows, jnp.asarray(site.last, jnp.int32))
        bare = dataclasses.replace(site.once_more(), consts=None, state=None)
        return cls(bare, site, site.names_of_state(), site.names_of_feed(), noted, axes, y_axes, reads, site.mesh)

    def laid(self, reads: Reads, taken: Array | None = None) -> Loop:
        """The loop with its arrays; where it ended early, its rows ran so many steps."""
        rows, xs = self.loop.rows, reads.xs
        if reads.rows is not None:
            rows = reads.rows.put(rows)
        if taken is not None and rows is not None:
            ran = mask_of_lengths(taken, self.loop.length)
            xs = xs._replace(valid=ran[::-1] if self.loop.reverse else ran)
        return dataclasses.replace(self.loop, consts=reads.consts, state=reads.state, xs=xs, rows=rows, memo=Memo())


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


def evidence_of(told: Told, pulled: Pulled, found: Found, reads: Reads) -> Evidence:
    """What is known of a bad cotangent. Its `before` is the carry of the step, its `after` the cotangents."""
    loop, first = pulled.laid(reads, found.taken), found.number
    last = loop.length - 1
    at = At(first, last - first, reads.last - first) if loop.reverse else At(first, first, first)
    return evidence_there(told, pulled, found, loop, at, state_before(at, pulled.site, loop))


def evidence_there(told: Told, pulled: Pulled, found: Found, loop: Loop, at: At, leaves: list[Array]) -> Evidence:
    """What is known of a bad cotangent in a step whose state is known."""
    feed: Feed = jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, at.place, keepdims=False), loop.xs)
    fixed, slices = pulled.site.fixed, pulled.site.slices
    still = [is_fixed for is_fixed, noted in zip(fixed, pulled.noted, strict=True) if noted]
    after = [leaf for leaf, is_fixed in zip(found.after, still, strict=True) if not is_fixed]
    given = Pull(loop.consts, leaves, feed, after, found.y)
    results = iter(
        _pull_back(told, pulled, loop, given if loop.rows is None else _of_found_rows(given, pulled, found, loop))
    )
    unchanged, _ = loop.consts
    made = iter(found.before if loop.rows is None else _cleared(found.before, found.rows, pulled.axes))
    cotangents = [next(made) if noted else None for noted in pulled.noted]
    worst = Worst.of(_bad(cotangents))
    pulls = [is_checked(leaf) and not still for leaf, still in zip(pulled.site.hoisted.settled, fixed, strict=True)]
    blamed = worst.pick(_bad([next(results) if pulls_it else None for pulls_it in pulls]))
    return Evidence(
        found.number,
        jnp.asarray(at.position, jnp.int32),
        merge(fixed, unchanged, leaves),
        [jnp.zeros(()) if leaf is None else leaf for leaf in cotangents],
        feed.x if slices is None else slices.join(_whole(loop), jax.tree.leaves(feed.x)),
        None if loop.rows is None else feed.valid,
        worst,
        told.blame.bits([each for each, pulls_it in zip(blamed, pulls, strict=True) if pulls_it], worst.is_nan),
        found.of_result,
    )


def _bad(cotangents: Sequence[Array | None]) -> list[Bad | None]:
    """For each leaf which elements are bad; None: it is not looked at."""
    return [None if leaf is None else Bad(jnp.isnan(leaf), ~jnp.isfinite(leaf)) for leaf in cotangents]


def _whole(loop: Loop) -> Sequence[Array]:
    """The leaves of xs that are given whole."""
    _, (_, (whole, *_)) = loop.consts
    return whole


def _of_found_rows(given: Pull, pulled: Pulled, found: Found, loop: Loop) -> Pull:
    """What a step is pulled from, in which every other row has the values of a row that was found."""
    unchanged, inner = given.consts
    x, structure = jax.tree.flatten(given.feed.x)
    lender, batch, axes = last_set(found.rows), found.rows.shape, loop.rows.axes
    y = [
        take_row(leaf, lender, 0, batch).reshape(leaf.shape[len(batch) :]) if axis is None else leaf
        for leaf, axis in zip(given.y, pulled.y_axes, strict=True)
    ]

    def show(leaves: Sequence[Array], axes: LeafAxes) -> list[Array]:
        return show_one(leaves, axes, found.rows)

    return Pull(
        (show(unchanged, loop.rows.fixed), inner),
        show(given.leaves, axes.state),
        given.feed._replace(x=jax.tree.unflatten(structure, show(x, axes.x))),
        show(given.after, pulled.axes),
        show(y, pulled.y_axes),
    )


def _cleared(leaves: Sequence[Array], rows: Array, axes: LeafAxes) -> list[Array]:
    """Cotangents, 0 in rows that were not found."""
    return [
        leaf if axis is None else select_valid(rows, leaf, jnp.zeros((), leaf.dtype), axis)
        for leaf, axis in zip(leaves, axes, strict=True)
    ]


def _pull_back(told: Told, pulled: Pulled, loop: Loop, given: Pull) -> list[Array]:
    """Evaluates the derivative of a step, and notes what each of its inputs is called. Returns the cotangents."""

    def pull(consts: Any, leaves: list[Array], feed: Any, after: list[Array], y: list[Array]) -> list[Array]:
        def outputs(smooth: list[Array]) -> tuple[list[Array], list[Array]]:
            given = iter(smooth)
            state = [next(given) if is_checked(leaf) else leaf for leaf in leaves]
            new, ys = loop.step(consts, state, feed)
            return list(filter(is_checked, new)), list(filter(is_checked, jax.tree.leaves(ys)))

        _, back = jax.vjp(outputs, list(filter(is_checked, leaves)))
        return back((after, y))[0]

    jaxpr = jax.make_jaxpr(pull)(*given)
    told.names += [*_names(pulled, given, len(jaxpr.consts)), CONSTANT]
    opened = jaxpr.jaxpr.replace(constvars=[], invars=[*jaxpr.jaxpr.constvars, *jaxpr.jaxpr.invars])
    return told.blame.evaluate(opened, [*jaxpr.consts, *jax.tree.leaves(given)])


def _names(pulled: Pulled, given: Pull, closed: int) -> list[str]:
    """What the inputs of the derivative of a step are called."""
    unchanged, (held, inner) = given.consts
    whole, fed = pulled.fed
    changing = [path for path, fixed in zip(pulled.paths, pulled.site.fixed, strict=True) if not fixed]
    fixed = [path for path, is_fixed in zip(pulled.paths, pulled.site.fixed, strict=True) if is_fixed]
    others = len(jax.tree.leaves(inner)) - len(whole)
    smooth = [path for path, leaf in zip(changing, given.leaves, strict=True) if is_checked(leaf)]
    constants = [*[CONSTANT] * closed, *fixed, *[CONSTANT] * len(held), *whole, *[CONSTANT] * others]
    assert len(unchanged) == len(fixed)
    cotangents = [*(f"the cotangent of {path} after it" for path in smooth), *(["the cotangent of y"] * len(given.y))]
    return [*constants, *changing, *fed, *cotangents]


def case_of_pulled(pulled: Pulled, about: About, told: Told) -> Case:
    """What is static of the evidence."""
    site, count, rows = pulled.site, len(pulled.site.fixed), pulled.loop.rows
    carry = site.carry_of(range(count))
    unnoted = tuple(not noted for noted in pulled.noted)
    return Case(
        about,
        about.length or site.given.length,
        tuple(told.blame.operations),
        tuple(told.names),
        pulled.paths,
        unnoted,
        (None,) * count if rows is None else tuple(merge(site.fixed, rows.fixed, rows.axes.state)),
        tuple(jax.tree.leaves(carry)),
        jax.tree.structure(carry),
        site.given.names[0],
        pulled.mesh,
    )
