"""`mask_scan`: steps that are not valid hold the carry, and whatever stands in their x is never read.

Before the body, the (state, x) of a padded row is replaced by a pair known to be good; after the body, the state and
y are selected. Selecting afterwards alone would not do: its gradient is 0 times the body's Jacobian at the padding,
and where that is NaN or inf, so is the product.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from .._avals import describe_argument, describe_leaf, is_key, place_like, promoted, shape_of, vary_over, varying_axes
from .._errors import ArgumentError, ArgumentTypeError, Fault, Row
from .._loop import Feed, Loop, Step, as_arrays, is_jit_disabled, run
from .._tree import Prefix, PrefixMismatch, leaves_with_path
from .._types import Array, PyTree
from .axes import LeafAxes, scan_over_axes, spread_axes
from .good_pairs import GoodPair, earliest_pair, own_pairs
from .hoist import hoist_shared
from .lend import any_device, any_of_all, lend, may_branch
from .rows import expand, select, take_row


@dataclass(frozen=True)
class MaskPlan:
    """What `mask_scan` is told beside the mask: prefix trees that say where the batch shape starts, and the fill."""

    carry_axes: Prefix
    x_axes: Prefix
    y_axes: Prefix
    fill: Prefix
    spelled: str = ""  # the fill as text: 0.0 and -0.0 compare as equal


@dataclass(frozen=True)
class Masked:
    """The step that shows padded rows a good pair and keeps their state. Its consts are (GoodPair, inner consts).

    Attributes:
        step: the inner step.
        carry_axes: for each leaf of the state, the axis where the batch shape starts; None: shared by all rows.
        x_axes: the same for each leaf of one step's x.
        y_axes: a prefix of y, of the same meaning; None: `fill` on steps that no row runs.
        fill: a prefix of y: what it is on padded steps.
    """

    step: Step
    carry_axes: LeafAxes
    x_axes: LeafAxes
    y_axes: Prefix
    fill: Prefix

    def __call__(self, consts: Any, state: PyTree, feed: Feed) -> tuple[PyTree, PyTree]:
        good, inner = consts
        valid = feed.valid
        assert valid is not None
        state_leaves, state_tree = jax.tree.flatten(state)
        x_leaves, x_tree = jax.tree.flatten(feed.x)
        show = _show_shared if None in (*self.carry_axes, *self.x_axes) else _show_own
        shown = show(valid, state_leaves, good.state, self.carry_axes)
        shown_x = show(valid, x_leaves, good.x, self.x_axes)
        returned, y = self.step(
            inner, jax.tree.unflatten(state_tree, shown), feed._replace(x=jax.tree.unflatten(x_tree, shown_x))
        )
        kept = [  # a leaf that comes back as the object that was shown stays what it was: a constant of the loop
            old if new is seen else _select(valid, new, old, axis)
            for old, seen, new, axis in zip(
                state_leaves, shown, jax.tree.leaves(returned), self.carry_axes, strict=True
            )
        ]
        return jax.tree.unflatten(state_tree, kept), self._fill_padding(valid, y)

    def _fill_padding(self, valid: Array, y: PyTree) -> PyTree:
        axes = spread_batch_axes("y_axes", self.y_axes, y, "y", valid.shape)
        filled = [
            _select(valid, leaf, fill, axis)
            for leaf, fill, axis in zip(jax.tree.leaves(y), fill_leaves(self.fill, y), axes, strict=True)
        ]
        return jax.tree.unflatten(jax.tree.structure(y), filled)


def _show_own(valid: Array, leaves: list[Array], good: list[Array], axes: LeafAxes) -> list[Array]:
    return [_select(valid, leaf, other, axis) for leaf, other, axis in zip(leaves, good, axes, strict=True)]


def _show_shared(valid: Array, leaves: list[Array], good: list[Array], axes: LeafAxes) -> list[Array]:
    """Some leaves are shared by all rows: a row's first pair might not fit what these are by now.

    Padded rows are shown a row that is valid at this very step. Where there is none, everything is as it was when the
    earliest row began, shared leaves included; nothing that the body then returns is kept.
    """
    if valid.size == 0:
        return leaves
    rows = valid.reshape(-1)
    any_row, lender = jnp.any(rows), jnp.argmax(rows)

    def show(leaf: Array, other: Array, axis: int | None) -> Array:
        if axis is None:
            return select(any_row, leaf, other)
        lent = jax.lax.stop_gradient(take_row(leaf, lender, axis, valid.shape))
        return _select(valid, leaf, select(any_row, lent, other), axis)

    return list(map(show, leaves, good, axes))


def _select(valid: Array, new: Array, old: Array, axis: int | None) -> Array:
    return select(jnp.any(valid) if axis is None else expand(valid, new, axis), new, old)


def run_masked(
    loop: Loop, valid: Array, plan: MaskPlan, names: tuple[str, str], in_axes: LeafAxes | None
) -> tuple[PyTree, PyTree]:
    """Runs a loop on padded rows.

    Args:
        loop: the loop, its xs as the user gave them.
        valid: bool[T, *batch].
        plan: the axes and the fill.
        names: the body's own names for its carry and its x.
        in_axes: for each leaf of xs the axis scanned over, or None; None as a whole: axis 0 for all.
    """
    carry, x = names
    batch = valid.shape[1:]
    carry_axes = spread_batch_axes("carry_axes", plan.carry_axes, loop.state, carry, batch)
    x_axes, whole_axes = _rows_of_x(loop.xs.x, plan.x_axes, in_axes, x, batch)
    varying = varying_axes(jax.typeof(valid))
    state = jax.tree.map(lambda leaf: vary_over(leaf, varying), as_arrays(loop.state))
    loop = dataclasses.replace(loop, state=state, xs=loop.xs._replace(valid=valid))
    if in_axes is not None:
        loop = lend_whole(scan_over_axes(loop, in_axes), whole_axes, valid)
    if None not in carry_axes or loop.length == 0 or is_jit_disabled():
        return _run_selecting(loop, valid, carry_axes, x_axes, plan)
    hoisted = hoist_shared(loop, carry_axes)
    axes = tuple(axis for axis, fixed in zip(carry_axes, hoisted.fixed, strict=True) if not fixed)
    changed, ys = _run_selecting(hoisted.loop, valid, axes, x_axes, plan)
    return hoisted.restore(changed), ys


def _rows_of_x(
    xs: PyTree, prefix: Prefix, in_axes: LeafAxes | None, root: str, batch: tuple[int, ...]
) -> tuple[LeafAxes, LeafAxes]:
    """Where the batch shape starts in the leaves of one step's x: in those that are sliced, and in those given whole.

    A leaf that is given whole has rows where `x_axes` is a tree that says so: one int for all speaks of the slices.
    """
    leaves, structure = jax.tree.flatten(xs)
    axes = in_axes or (0,) * len(leaves)
    step = [
        jax.ShapeDtypeStruct(shape if axis is None else shape[:axis] + shape[axis + 1 :], jax.typeof(leaf).dtype)
        for leaf, axis in zip(leaves, axes, strict=True)
        for shape in (jax.typeof(leaf).shape,)
    ]
    if isinstance(prefix.tree, int):
        prefix = Prefix.of(jax.tree.unflatten(structure, [None if a is None else prefix.tree for a in axes]))
    starts = spread_batch_axes("x_axes", prefix, jax.tree.unflatten(structure, step), root, batch)
    pairs = list(zip(starts, axes, strict=True))
    return tuple(s for s, axis in pairs if axis is not None), tuple(s for s, axis in pairs if axis is None)


def lend_whole(loop: Loop, axes: LeafAxes, valid: Array) -> Loop:
    """Rows of leaves that are given whole: one without any valid step has another row's, once for the whole loop."""
    if not any(axis is not None for axis in axes) or 0 in valid.shape:
        return loop
    have = jnp.any(valid, axis=0)
    lender = jnp.argmax(have.reshape(-1))

    def lent(leaf: Array, axis: int | None) -> Array:
        if axis is None:
            return leaf
        return select(expand(have, leaf, axis), leaf, take_row(jax.lax.stop_gradient(leaf), lender, axis, have.shape))

    whole, inner = loop.consts
    return dataclasses.replace(loop, consts=(list(map(lent, whole, axes)), inner))


def _run_selecting(
    loop: Loop, valid: Array, carry_axes: LeafAxes, x_axes: LeafAxes, plan: MaskPlan
) -> tuple[PyTree, PyTree]:
    good, consts = _good_pair(loop, valid, carry_axes, x_axes)
    masked = dataclasses.replace(
        loop, step=Masked(loop.step, carry_axes, x_axes, plan.y_axes, plan.fill), consts=(good, consts)
    )
    return _run_if_any(masked, valid, plan.fill)


def _good_pair(loop: Loop, valid: Array, carry_axes: LeafAxes, x_axes: LeafAxes) -> tuple[GoodPair, PyTree]:
    """The pair for padded rows, and the consts; both from another element of a vmap for one that has nothing valid.

    Under stop_gradient: each would be a cotangent accumulator otherwise, and a way in for NaN.
    """
    state, xs = jax.lax.stop_gradient((jax.tree.leaves(loop.state), jax.tree.leaves(loop.xs.x)))
    if 0 in valid.shape:  # no step, or no row: there is no pair, and nothing that would be shown one
        return GoodPair(state, [jax.lax.full(leaf.shape[1:], 0, leaf.dtype) for leaf in xs]), loop.consts
    find = earliest_pair if None in (*carry_axes, *x_axes) else own_pairs
    good = find(state, xs, valid, carry_axes, x_axes, reverse=loop.reverse)
    consts, structure = jax.tree.flatten(loop.consts)
    (good, lent), own = lend(jnp.any(valid), (good, jax.lax.stop_gradient(consts)))
    own_consts = own[len(own) - len(consts) :]
    chosen = [select(flag, mine, theirs) for flag, mine, theirs in zip(own_consts, consts, lent, strict=True)]
    return jax.lax.stop_gradient(good), jax.tree.unflatten(structure, chosen)


def _run_if_any(loop: Loop, valid: Array, fill: Prefix) -> tuple[PyTree, PyTree]:
    """Runs the loop if any step of any row is valid; if not, the body is not evaluated, and nothing is a good pair."""
    if not may_branch() or 0 in valid.shape:
        return run(loop)

    def skip() -> tuple[PyTree, PyTree]:
        # The one trace of the body: the other branch finds it in lax.scan's cache. The branches must agree, so a
        # weakly typed init is promoted as it is by the loop.
        final, ys = jax.eval_shape(lambda: run(loop))
        state = jax.tree.map(lambda given, returned: promoted(given, returned)[0], loop.state, final)
        return state, _all_fill(ys, fill)

    return jax.lax.cond(any_of_all(any_device(jnp.any(valid))), lambda: run(loop), skip)


def _all_fill(ys: PyTree, fill: Prefix) -> PyTree:
    filled = [
        place_like(jnp.broadcast_to(value, y.shape), y)
        for y, value in zip(jax.tree.leaves(ys), fill_leaves(fill, ys), strict=True)
    ]
    return jax.tree.unflatten(jax.tree.structure(ys), filled)


def spread_batch_axes(option: str, axes: Prefix, tree: PyTree, root: str, batch: tuple[int, ...]) -> LeafAxes:
    """One axis a leaf, counted from 0, and the batch shape must stand there.

    Raises:
        Fault: for an `ArgumentError` that lists the leaves in which it does not.
    """
    rows, spread = [], []
    found: set[tuple[int, ...]] = set()
    for (path, leaf), axis in zip(
        leaves_with_path(root, tree), spread_axes(option, axes.tree, tree, root, none=True), strict=True
    ):
        shape = shape_of(leaf) or ()
        start = axis if axis is None or axis >= 0 else axis + len(shape)
        spread.append(start)
        stands = start is None or (0 <= start <= len(shape) - len(batch) and shape[start : start + len(batch)] == batch)
        if start is not None:
            found.add(shape[start : start + len(batch)])
        if not stands:
            rows.append(Row(path, f"{_shape(batch)} at axis {axis}", describe_leaf(leaf), ""))
    if rows:
        other = _shape(found.pop()) if len(found) == 1 else ""
        raise Fault(
            ArgumentError,
            f"{{verb}} over {{body}}: the batch shape {_shape(batch)} of the mask does not stand in every leaf.",
            *([f"The data has batch shape {other}: pass the lengths or the mask of just these rows."] if other else []),
            f"`{option}` says where the batch shape starts in each leaf of {root} (0: it leads), and None marks a leaf "
            "that all rows share.",
            header=("leaf", "batch shape", "is"),
            rows=rows,
        )
    return tuple(spread)


def _shape(shape: tuple[int, ...]) -> str:
    return f"[{','.join(map(str, shape))}]"


def fill_leaves(fill: Prefix, tree: PyTree) -> list[Array]:
    """The fill of each leaf, a scalar of the leaf's dtype; typed keys are filled with zero bits.

    Raises:
        Fault: for an `ArgumentError` if the prefix does not fit or a fill cannot be represented in a leaf's dtype.
    """
    try:
        values = fill.spread(tree, "y")
    except PrefixMismatch as error:
        raise Fault(
            ArgumentError,
            f"{{verb}} over {{body}}: `fill` is no prefix of y: {error}.",
            "Give one scalar for all of y, or a tree with the structure of y down to where one scalar holds.",
        ) from None
    return [_cast(value, leaf, path) for value, (path, leaf) in zip(values, leaves_with_path("y", tree), strict=True)]


def _cast(value: Any, leaf: Any, path: str) -> Array:
    dtype = leaf.dtype if isinstance(leaf, jax.ShapeDtypeStruct) else jax.typeof(leaf).dtype
    if is_key(leaf):
        return jax.lax.full((), 0, dtype)
    if not _holds(dtype, value):
        raise Fault(
            ArgumentError,
            f"{{verb}} over {{body}}: {path} is {describe_leaf(leaf)}, which cannot hold the fill {value!r}.",
            "Give a `fill` that fits, or one for each leaf of y.",
        )
    return jnp.asarray(value, dtype)


def _holds(dtype: Any, value: complex) -> bool:
    """Whether a dtype can hold a number; floating-point dtypes round."""
    if isinstance(value, int) and abs(value) > 2**64:
        return False
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return True
    if isinstance(value, complex):
        return False
    if jnp.issubdtype(dtype, jnp.floating):
        return True
    if math.isnan(value) or math.isinf(value) or value != int(value):
        return False
    if dtype == np.bool_:
        return value in (0, 1)
    limits = jnp.iinfo(dtype)
    return bool(limits.min <= value <= limits.max)


def check_fill(fill: PyTree) -> PyTree:
    """The fill with Python scalars as leaves. NaN becomes one and the same object, as caches compare by equality."""

    def scalar(value: Any) -> Any:
        if isinstance(value, Tracer) or np.ndim(value) or not isinstance(value, _SCALARS):
            raise Fault(
                ArgumentTypeError,
                f"{{verb}} over {{body}}: `fill` takes numbers, got {describe_argument(value)}.",
                "Give a Python or NumPy scalar, or a prefix tree of them.",
            )
        plain = value.item() if isinstance(value, np.generic | np.ndarray | jax.Array) else value
        return math.nan if plain != plain else plain

    return jax.tree.map(scalar, fill, is_leaf=lambda leaf: leaf is None)


_SCALARS = (bool, int, float, complex, np.generic, np.ndarray, jax.Array)
