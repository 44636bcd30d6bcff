"""`mask_scan`: a step that is not valid holds the carry, and its x is never read.

Before the body, the (state, x) of a padded row is replaced by a pair known to be good; after the body, the state and
y are selected. It is not enough to select afterwards: the gradient is 0 times the body's Jacobian at the padding,
and if that is NaN or inf, the product is NaN.

About gradients through a selection: https://github.com/jax-ml/jax/issues/1052.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from .._avals import Array, LeafAxes, PyTree
from .._cpu.rows import gather_rows, in_one_place, written
from .._loop.feed import Consts, Feed, Flag, Slot
from .._loop.loop import Loop, Step, is_untraced
from .._remat.checkpoint import decides
from .._transforms.transform import Stage, Transform
from .._tree import Prefix, map_leaves
from .axes import OF_Y, RowAxes, flags_given, spread_batch_axes, with_axes
from .fill import fill_leaves, without_hold
from .leaves import (
    RowMask,
    any_of,
    at_step,
    choose_own,
    first_valid,
    last_set,
    pick_steps,
    select,
    substitute_elements,
    substitute_over_elements,
    substitute_rows,
    take_row,
    unless_alone,
)

_once_a_shape = functools.partial(jax.jit, inline=True)
"""Traces a function once for each shape of its arguments, and hands its equations out from then on."""


class GoodPair(NamedTuple):
    """The values that padded rows see. If all rows see the same values, the batch axes have size 1.

    Attributes:
        state: leaves of the state.
        consts: of the leaves of the consts, None for one that is shown as it is; empty: all of them are.
        x: leaves of one step's x, None for one that is shown as it is.
    """

    state: list[Array]
    consts: list[Array | None]
    x: list[Any]


GOOD: Slot[GoodPair] = Slot("good")
"""What padded rows see. Where it is taken out, they see their own state and x: nothing may be differentiated then."""

SOME_VALID, ALL_VALID = Flag("some valid"), Flag("all valid")
"""Said by a step within whose branch some row is valid, or all are, in each step."""


def own_pairs(
    state: list[Array], xs: list[Array], begin: tuple[Array, Array | None], axes: tuple[LeafAxes, LeafAxes]
) -> GoodPair:
    """Each row's own first valid pair; a row that has none borrows that of another row of the batch.

    Args:
        state: leaves of the state.
        xs: leaves of x, of all steps.
        begin: for each row whether it has a valid step, and the first one; None: it is the first of all.
        axes: where the batch shape starts in the state and in one step's x.
    """
    carry_axes, x_axes = axes
    have, first = begin
    batch = have.shape
    source = _own_or_first(have) if len(batch) == 1 and in_one_place(have, *state, *xs) else None

    @functools.cache
    def lender() -> tuple[Array, RowMask]:
        return last_set(have), RowMask(have)

    def borrow(leaf: Array, axis: int | None) -> Array:
        assert axis is not None
        if not batch:  # there is no other row
            return leaf
        if source is None:
            row, mask = lender()
            return mask.select(leaf, take_row(leaf, row, axis, batch), axis)
        return gather_rows(leaf, source, axis)

    def borrow_x(leaf: Array, axis: int | None) -> Array:
        if first is not None:
            return borrow(pick_steps(leaf, first, axis), axis)
        if axis is None or source is None:
            return borrow(jax.lax.index_in_dim(leaf, 0, keepdims=False), axis)
        return gather_rows(leaf, source, axis, of_first_step=True)

    return GoodPair(list(map(borrow, state, carry_axes)), [], list(map(borrow_x, xs, x_axes)))


@functools.partial(jax.jit, static_argnames=("steps", "reverse", "axes"), inline=True)  # traced once for each shape
def own_pairs_of_lengths(
    state: list[Array],
    xs: list[Array],
    lengths: Array,
    *,
    steps: int,
    reverse: bool,
    axes: tuple[LeafAxes, LeafAxes],
) -> tuple[GoodPair, Array]:
    """`own_pairs` where each row's steps are its first `lengths`, int[*batch]; and whether any row has a pair.

    The pairs are under stop_gradient.
    """
    state, xs = jax.lax.stop_gradient((state, xs))
    first = jnp.clip(lengths.astype(jnp.int32) - 1, 0, steps - 1) if reverse else None  # None: position 0 for all
    have = jax.lax.gt(lengths, jnp.zeros_like(lengths))
    return own_pairs(state, xs, (have, first), axes), any_of(have)


@_once_a_shape
def _own_or_first(have: Array) -> Array:
    """uint32[N, 1]: for each row its own number, or that of the first row that has something."""
    first, shape = jax.lax.argmax(have, 0, np.uint32), (have.size, 1)
    own = jax.lax.broadcasted_iota(first.dtype, shape, 0)
    return jax.lax.select_n(jax.lax.reshape(have, shape), jax.lax.broadcast(first, shape), own)


def earliest_pair(
    state: list[Array],
    consts: list[Array | None],
    xs: list[Array],
    valid: Array,
    axes: tuple[LeafAxes, LeafAxes, LeafAxes],
    *,
    reverse: bool,
) -> GoodPair:
    """The first valid pair of the row that begins first, with the leaves that all rows share as they were then.

    `axes` says where the batch shape starts in the state, in the consts and in one step's x.
    """
    carry_axes, const_axes, x_axes = axes
    batch, length = valid.shape[1:], valid.shape[0]
    have, first = first_valid(valid, reverse=reverse)
    order = length - 1 - first if reverse else first
    begins = jnp.min(select(have, order, jnp.full_like(order, length - 1)))
    lender = last_set(have & (order == begins))
    step = length - 1 - begins if reverse else begins

    def row(leaf: Array, axis: int | None) -> Array:
        return leaf if axis is None else take_row(leaf, lender, axis, batch)

    lasting = [None if leaf is None else row(leaf, axis) for leaf, axis in zip(consts, const_axes, strict=True)]
    x = [at_step(leaf, step) for leaf in xs]
    return GoodPair(list(map(row, state, carry_axes)), lasting, list(map(row, x, x_axes)))


@dataclass(frozen=True)
class Masked:
    """The step that shows padded rows a good pair and keeps their state, a list of leaves.

    The consts of other steps are shown too where the good pair has something for them: where other leaves are shared by
    all rows, one row stands in for another in everything.

    Attributes:
        step: the inner step, as `hoist` makes it.
        carry_axes: for each leaf of the state, the axis where the batch shape starts; None: shared by all rows.
        const_axes: the same for each leaf of the consts.
        x_axes: the same for each leaf of one step's x.
        y_axes: a prefix of y, of the same meaning; None: `fill` on steps that no row runs.
        fill: a prefix of y: what it is on padded steps.
        decides: whether the body compares what it computes, or chooses among it: what is selected for it is `written`
            first, so that XLA compiles the body as it would without the mask.
    """

    step: Step
    carry_axes: LeafAxes
    const_axes: LeafAxes
    x_axes: LeafAxes
    y_axes: Prefix
    fill: Prefix
    decides: bool = False

    def __call__(self, consts: Consts, state: list[Array], feed: Feed) -> tuple[PyTree, PyTree]:
        good, consts = GOOD.take(consts)
        if ALL_VALID.on(consts):
            return self.step(consts, state, feed)
        branches = SOME_VALID.on(consts)
        mask = RowMask(feed.valid, (lambda valid: unless_alone(any_of(valid))) if branches else any_of)
        show, shown = functools.partial(self._show, mask, branches), state
        if good is not None:
            x, x_tree = jax.tree.flatten(feed.x)
            shown = show(state, good.state, self.carry_axes)
            if good.consts:
                leaves, structure = jax.tree.flatten(consts)
                consts = jax.tree.unflatten(structure, show(leaves, good.consts, self.const_axes))
            shown_x = show(x, good.x, self.x_axes)
            feed = feed._replace(x=jax.tree.unflatten(x_tree, shown_x))
        returned, y = self.step(consts, shown, feed)
        kept = [
            old if new is seen else mask.select(new, old, axis)
            for old, seen, new, axis in zip(state, shown, returned, self.carry_axes, strict=True)
        ]
        return kept, self._fill_padding(mask, y)

    def _show(self, mask: RowMask, branches: bool, leaves: list[Array], good: list[Any], axes: LeafAxes) -> list[Array]:
        show = _show_shared if None in (*self.carry_axes, *self.x_axes) else _show_own
        shown = show(mask, leaves, good, axes)
        if not self.decides:
            return shown
        # In a branch that is taken where some row is valid, what all rows share is shown as it is: not to be copied.
        whole = [
            new is leaf or (axis is None and branches) for leaf, new, axis in zip(leaves, shown, axes, strict=True)
        ]
        return [new if same else written(new) for new, same in zip(shown, whole, strict=True)]

    def _fill_padding(self, mask: RowMask, y: PyTree) -> PyTree:
        axes = spread_batch_axes(OF_Y, self.y_axes, y, "y", mask.valid.shape)
        return map_leaves(mask.select, y, fill_leaves(self.fill, y), axes)


def without_good(given: Any) -> Any:
    """What a loop runs on without the good pairs, which no step reads then, or which are computed from the rest."""
    return given._replace(consts=GOOD.put(given.consts, None))


def _show_own(mask: RowMask, leaves: list[Array], good: list[Any], axes: LeafAxes) -> list[Array]:
    return [
        leaf if other is None else mask.select(leaf, other, axis)
        for leaf, other, axis in zip(leaves, good, axes, strict=True)
    ]


def _show_shared(mask: RowMask, leaves: list[Array], good: list[Any], axes: LeafAxes) -> list[Array]:
    """Some leaves are shared by all rows, and a row's first pair may not fit their current values.

    Padded rows are shown a row that is valid at this very step. Where there is none, everything is as it was when the
    earliest row began, shared leaves included; nothing that the body then returns is kept.
    """
    valid = mask.valid
    if valid.size == 0:
        return leaves
    any_row, lender = mask.some(), last_set(valid)

    def show(leaf: Array, other: Array | None, axis: int | None) -> Array:
        if other is None:
            return leaf
        if axis is None:
            return select(any_row, leaf, other)
        lent = jax.lax.stop_gradient(take_row(leaf, lender, axis, valid.shape))
        return mask.select(leaf, select(any_row, lent, other), axis)

    return list(map(show, leaves, good, axes))


@dataclass(frozen=True)
class Mask(Transform):
    """Runs the steps of invalid rows on a good pair, and discards their results.

    If every step is valid, the loop does not change.

    Attributes:
        fill: a prefix of y: what it is on padded steps.
    """

    fill: Prefix
    stage: ClassVar[Stage] = Stage.MASKED

    @classmethod
    def of(cls, fill: PyTree) -> Mask:
        """With the fill as `check_fill` returns it."""
        return cls(Prefix.of(fill))

    def __call__(self, loop: Loop) -> Loop:
        if loop.masked.all_valid:
            return loop
        fill = without_hold(self.fill) if is_untraced(loop) else self.fill
        return mask(loop, fill, lengths=flags_given(loop).lengths)


def mask(loop: Loop, fill: Prefix, *, lengths: Array | None = None) -> Loop:
    """Masks the steps of a loop whose state is a list of leaves.

    Args:
        loop: the loop.
        fill: a prefix of y: what it is on padded steps.
        lengths: int[*batch], if each row's valid steps are known to be its first ones; None: they are any.
    """
    axes, fixed_axes, valid = loop.masked.axes, loop.masked.fixed, loop.xs.valid
    share = None in (*axes.state, *axes.x)  # a shared leaf that changes; one that does not fits every pair
    consts: Consts = loop.consts
    if not share:  # a row's unchanged leaves are good for it throughout; a row without any step is lent another's
        consts = consts._replace(unchanged=substitute_rows(consts.unchanged, fixed_axes, valid))
        loop = loop.having(consts=consts)
    good, consts = _good_pair(loop, axes, lengths, share=share)
    decided = not is_untraced(loop) and loop.trace is not None and decides(loop.hoisted.jaxpr)
    step = Masked(loop.step, axes.state, consts.spread(axes.consts), axes.x, loop.masked.y_axes, fill, decides=decided)
    good_axes: LeafAxes = () if share else (*axes.state, *axes.x)  # one row, or all
    loop = loop.having(step=step, consts=GOOD.put(consts, good))
    return with_axes(loop, consts=GOOD.note(axes.consts, good_axes))


def _good_pair(loop: Loop, axes: RowAxes, lengths: Array | None, *, share: bool) -> tuple[GoodPair, Consts]:
    """The pair for padded rows, and the consts; both from another element of a vmap for one that has nothing valid.

    They are under stop_gradient. Otherwise each would have a cotangent accumulator, and could let NaN in.
    """
    valid, consts = loop.xs.valid, loop.consts
    xs = jax.tree.leaves(loop.xs.x)
    if 0 in valid.shape:  # no step or no row: there is no pair, and none is needed
        first = [jax.lax.full(leaf.shape[1:], 0, leaf.dtype) for leaf in xs]
        return GoodPair(jax.lax.stop_gradient(loop.state), [], first), consts
    if share:
        const_axes = consts.spread(axes.consts)
        lasting = [
            None if axis is None else leaf for leaf, axis in zip(jax.tree.leaves(consts), const_axes, strict=True)
        ]
        state, lasting, xs = jax.lax.stop_gradient((loop.state, lasting, xs))
        good = earliest_pair(state, lasting, xs, valid, (axes.state, const_axes, axes.x), reverse=loop.reverse)
        have = any_of(valid)
    else:
        good, have = _own_pairs(loop, xs, lengths, (axes.state, axes.x))
    closed, consts = consts.closed, consts._replace(closed=None)
    (good, lent), own = substitute_elements(have, (good, jax.lax.stop_gradient(consts)))
    consts = choose_own(consts, lent, own[len(jax.tree.leaves(good)) :])
    return good, consts if closed is None else consts._replace(closed=substitute_closed(closed, have))


def _own_pairs(
    loop: Loop, xs: list[Array], lengths: Array | None, axes: tuple[LeafAxes, LeafAxes]
) -> tuple[GoodPair, Array]:
    """Each row's own pair, and whether any row has one."""
    if lengths is not None and isinstance(loop.length, int):
        return own_pairs_of_lengths(loop.state, xs, lengths, steps=loop.length, reverse=loop.reverse, axes=axes)
    state, xs = jax.lax.stop_gradient((loop.state, xs))
    have, first = first_valid(loop.xs.valid, reverse=loop.reverse)
    return own_pairs(state, xs, (have, first), axes), any_of(have)


def substitute_closed(closed: list[Any], have: Array) -> list[Any]:
    """What a body closes over; under vmap, an element that has nothing valid is given another element's.

    Only what is traced can be mapped. Devices do not lend to each other: a body may gather what it closes over, and
    the other devices count on their part of it.
    """
    traced = [i for i, value in enumerate(closed) if isinstance(value, Tracer)]
    mine = [closed[i] for i in traced]
    lent, own = substitute_over_elements(have, jax.lax.stop_gradient(mine))
    chosen = dict(zip(traced, choose_own(mine, lent, own), strict=True))
    return [chosen.get(i, value) for i, value in enumerate(closed)]
