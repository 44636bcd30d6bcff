"""Evidence of a bad cotangent: the derivative of the step that made it, evaluated operation by operation."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..._axes import LeafAxes
from ..._loop.body import Memo
from ..._loop.loop import Feed, Loop
from ..._trace.blame import is_checked
from ..._trace.hoist import merge
from ..._types import Array
from ..rows.leaves import mask_of_lengths, select_valid, take_row, unsigned
from .again import At, Told, state_before
from .case import CONSTANT, About, Case, Evidence
from .probe import Probe, number_of
from .rows import RowArrays, show_one
from .site import Site


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
    """

    loop: Loop
    site: Site
    paths: tuple[str, ...]
    fed: tuple[list[str], list[str]]
    noted: tuple[bool, ...]
    axes: LeafAxes
    y_axes: LeafAxes
    reads: Reads

    @classmethod
    def of(cls, site: Site, noted: tuple[bool, ...], axes: LeafAxes, y_axes: LeafAxes) -> Pulled:
        """Of a loop before it was checked."""
        loop = site.hoisted.loop
        rows = None if loop.rows is None else RowArrays.of(loop.rows)
        reads = Reads(loop.consts, loop.state, loop.xs, rows, jnp.asarray(site.last, jnp.int32))
        bare = dataclasses.replace(site.once_more(), consts=None, state=None)
        return cls(bare, site, site.names_of_state(), site.names_of_feed(), noted, axes, y_axes, reads)

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
    """The same, of a step whose state is known."""
    feed: Feed = jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, at.place, keepdims=False), loop.xs)
    fixed, slices = pulled.site.fixed, pulled.site.slices
    still = [is_fixed for is_fixed, noted in zip(fixed, pulled.noted, strict=True) if noted]
    after = [leaf for leaf, is_fixed in zip(found.after, still, strict=True) if not is_fixed]
    given = Pull(loop.consts, leaves, feed, after, found.y)
    _evaluate(told, pulled, loop, given if loop.rows is None else _of_found_rows(given, pulled, found, loop))
    unchanged, _ = loop.consts
    made = iter(found.before if loop.rows is None else _cleared(found.before, found.rows, pulled.axes))
    return Evidence(
        found.number,
        jnp.asarray(at.position, jnp.int32),
        merge(fixed, unchanged, leaves),
        [next(made) if noted else jnp.zeros(()) for noted in pulled.noted],
        feed.x if slices is None else slices.join(_whole(loop), jax.tree.leaves(feed.x)),
        None if loop.rows is None else feed.valid,
        jnp.stack(told.blame.bits),
        found.of_result,
    )


def _whole(loop: Loop) -> Sequence[Array]:
    """The leaves of xs that are given whole."""
    _, (_, (whole, *_)) = loop.consts
    return whole


def _of_found_rows(given: Pull, pulled: Pulled, found: Found, loop: Loop) -> Pull:
    """The same, in which rows that were not found have what one that was has."""
    unchanged, inner = given.consts
    x, structure = jax.tree.flatten(given.feed.x)
    lender, batch, axes = unsigned(jnp.argmax(found.rows.reshape(-1))), found.rows.shape, loop.rows.axes
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


def _evaluate(told: Told, pulled: Pulled, loop: Loop, given: Pull) -> None:
    """Evaluates the derivative of a step, and notes what each of its inputs is called."""

    def pull(consts: Any, leaves: list[Array], feed: Any, after: list[Array], y: list[Array]) -> list[Array]:
        def outputs(smooth: list[Array]) -> tuple[list[Array], list[Array]]:
            given = iter(smooth)
            state = [next(given) if is_checked(leaf) else leaf for leaf in leaves]
            new, ys = loop.step(consts, state, feed)
            return list(filter(is_checked, new)), list(filter(is_checked, jax.tree.leaves(ys)))

        _, back = jax.vjp(outputs, list(filter(is_checked, leaves)))
        return back((after, y))[0]

    jaxpr = jax.make_jaxpr(pull)(*given)
    told.names += _names(pulled, given, len(jaxpr.consts))
    opened = jaxpr.jaxpr.replace(constvars=[], invars=[*jaxpr.jaxpr.constvars, *jaxpr.jaxpr.invars])
    told.blame.evaluate(opened, [*jaxpr.consts, *jax.tree.leaves(given)])


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
    made = iter(told.blame.results)
    kinds = [is_checked(leaf) for leaf in site.hoisted.settled]
    results = [next(made) if kind and not fixed else None for kind, fixed in zip(kinds, site.fixed, strict=True)]
    unnoted = tuple(not noted for noted in pulled.noted)
    return Case(
        about,
        about.length or site.given.length,
        tuple(told.blame.operations),
        tuple(results),
        tuple(told.names),
        pulled.paths,
        unnoted,
        (None,) * count if rows is None else tuple(merge(site.fixed, rows.fixed, rows.axes.state)),
        tuple(jax.tree.leaves(carry)),
        jax.tree.structure(carry),
        site.given.names[0],
    )
