"""`compact`: the rows of a chunk that have anything to do, first, and the body on these alone."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from .._avals import describe_argument, is_sharded, vary_over, varying_axes
from .._errors import ArgumentError, ArgumentTypeError, Fault
from .._loop import Feed, Loop, Step
from .._types import Array, PyTree
from .axes import LeafAxes
from .batch_axes import RowAxes, RowLoop
from .hoist import Hoisted, one_step, trace_also

MOST_TIERS = 7
"""That `compact=True` makes; the body is compiled once for each."""

_Idle = Callable[[PyTree, PyTree], PyTree]


@dataclass(frozen=True)
class LiveRows:
    """The step that runs another on the first rows of a permutation, and puts everything back where it was.

    Its feed's schedule is (order, inverse): int32[B], the permutation that brings live rows to the front, and back.

    Attributes:
        step: runs a chunk of the loop.
        rows: how many rows it runs on.
        axes: where the rows stand in the arguments and outputs.
        idle: the outputs of a chunk in which nothing is run, from the state and their types.
    """

    step: Step
    rows: int
    axes: RowAxes
    idle: _Idle

    def __call__(self, consts: PyTree, state: PyTree, feed: Feed) -> tuple[PyTree, PyTree]:
        order, inverse = feed.schedule
        live, others = order[: self.rows], order[self.rows :]
        inner = (
            take_rows(consts, self.axes.consts, live),
            take_rows(state, self.axes.state, live),
            _take_feed(feed._replace(schedule=None), self.axes.x, live),
        )
        new, ys = self.step(*inner)
        kept = take_rows(state, self.axes.state, others)
        return _merge(new, kept, self.axes.state, inverse, state), self._outputs(ys, kept, inverse)

    def _outputs(self, ys: PyTree, kept: PyTree, inverse: Array) -> PyTree:
        axes = _after_time(self.axes.y)
        missing = jax.tree.unflatten(
            jax.tree.structure(ys),
            [_resized(y, axis, inverse.size - self.rows) for y, axis in zip(jax.tree.leaves(ys), axes, strict=True)],
        )
        return _merge(ys, self.idle(kept, missing), axes, inverse, ys)


def _merge(new: PyTree, kept: PyTree, axes: LeafAxes, inverse: Array, like: PyTree) -> PyTree:
    """The rows that ran and the others, in the order of the user's."""

    def merge(ran: Array, other: Array, axis: int | None) -> Array:
        if axis is None:
            return ran
        other = vary_over(other, varying_axes(jax.typeof(ran)))
        return _permute(jnp.concatenate([ran, other], axis), inverse, axis)

    merged = map(merge, jax.tree.leaves(new), jax.tree.leaves(kept), axes)
    return jax.tree.unflatten(jax.tree.structure(like), list(merged))


def _permute(leaf: Array, rows: Array, axis: int) -> Array:
    """Rows that are all different; said so, the gradient of the gather is no slow scatter."""
    return jnp.take(leaf, rows, axis, mode="clip", unique_indices=True)


def take_rows(tree: PyTree, axes: LeafAxes, rows: Array) -> PyTree:
    """The given rows of each leaf that has rows."""
    leaves, structure = jax.tree.flatten(tree)
    taken = [leaf if axis is None else _permute(leaf, rows, axis) for leaf, axis in zip(leaves, axes, strict=True)]
    return jax.tree.unflatten(structure, taken)


def _take_feed(feed: Feed, x_axes: LeafAxes, rows: Array) -> Feed:
    """The given rows of what a chunk of steps is fed: time leads."""
    taken = {name: take_rows(getattr(feed, name), (1,), rows) for name in ("valid", "reset") if _has(feed, name)}
    return feed._replace(x=take_rows(feed.x, _after_time(x_axes), rows), **taken)


def _has(feed: Feed, name: str) -> bool:
    return getattr(feed, name) is not None


def _after_time(axes: LeafAxes) -> LeafAxes:
    return tuple(None if axis is None else axis + 1 for axis in axes)


def _resized(leaf: Any, axis: int | None, rows: int) -> jax.ShapeDtypeStruct:
    shape = leaf.shape if axis is None else (*leaf.shape[:axis], rows, *leaf.shape[axis + 1 :])
    return jax.ShapeDtypeStruct(shape, leaf.dtype)


def tiers_of(compact: bool | tuple[int, ...], batch: tuple[int, ...]) -> tuple[int, ...]:
    """The numbers of rows that the body is made for, ascending; the last is the whole batch.

    Raises:
        Fault: for an `ArgumentError` if there are no rows, or a tier has more than there are.
    """
    if not batch:
        raise Fault(
            ArgumentError,
            "{verb} over {body}: `compact` orders the rows of a batch, but the batch shape of the mask is [].",
            "Leave `compact` out: for a single row, chunks without a valid step are skipped anyway.",
        )
    if not isinstance(compact, bool):
        return (*_within(compact, batch[0]), batch[0])
    return halvings(batch[0])


def halvings(rows: int) -> tuple[int, ...]:
    """1, and from there up to `rows`: twice as many each time, or so many more that there are `MOST_TIERS` at most."""
    steps = min(MOST_TIERS - 1, math.ceil(math.log2(max(rows, 1))))
    return tuple(sorted({rows, *(round(rows ** (i / steps)) for i in range(steps))}))


def _within(tiers: tuple[int, ...], rows: int) -> list[int]:
    above = [tier for tier in tiers if tier > rows]
    if above:
        raise Fault(
            ArgumentError,
            f"{{verb}} over {{body}}: `compact` names a tier of {above[0]} rows, but the batch has {rows}.",
            "A tier is a number of rows that the body is made for; the whole batch always is one.",
        )
    return sorted({tier for tier in tiers if tier < rows})


def check_compact(compact: Any, *, keyed: bool) -> bool | tuple[int, ...]:
    """A bool, or the tiers as ints above 0."""
    tiers = compact if isinstance(compact, bool) else _check_tiers(compact)
    if tiers and keyed:
        raise Fault(
            ArgumentError,
            "{verb} over {body}: `compact` and `key` exclude each other: the body would draw for other rows.",
            "Give each row a key of its own, in the carry: `keys = jax.random.split(key, B)`, and in the body "
            "`keys, now = jnp.moveaxis(jax.vmap(jax.random.split)(keys), 1, 0)`.",
        )
    return tiers


def _check_tiers(compact: Any) -> tuple[int, ...]:
    if isinstance(compact, tuple | list) and compact and all(map(_is_count, compact)):
        return tuple(map(int, compact))
    raise Fault(
        ArgumentTypeError,
        f"{{verb}} over {{body}}: `compact` is True, False or a tuple of ints above 0, got "
        f"{describe_argument(compact) if not isinstance(compact, tuple | list) else compact}.",
        "`compact=True` halves the batch again and again; a tuple names the numbers of rows instead.",
    )


def _is_count(tier: Any) -> bool:
    return hasattr(tier, "__index__") and not isinstance(tier, bool | jax.Array) and int(tier) > 0


def trace_tiers(hoisted: Hoisted, before: RowLoop, tiers: tuple[int, ...]) -> None:
    """Traces the body for each number of rows but the whole batch, for which `hoist` has.

    Args:
        hoisted: what `hoist(before.loop)` returned.
        before: the loop before, its state in its own structure, and where its rows stand.
        tiers: the numbers of rows.
    """
    loop = before.loop
    if len(tiers) > 1:
        refuse_sharded_rows(loop)
    for tier in tiers[:-1]:
        first = functools.partial(_first_rows, before.axes, tier)
        consts, state, feed = jax.eval_shape(first, loop.consts, loop.state, loop.xs)
        try:
            trace_also(hoisted, loop, (consts, jax.tree.leaves(state), one_step(feed)))
        except Exception as error:
            error.add_note(f"`compact` had the body run on {tier} of the {max(tiers)} rows.")
            raise


def _first_rows(axes: RowAxes, count: int, consts: PyTree, state: PyTree, feed: Feed) -> tuple[Any, Any, Any]:
    rows = jnp.arange(count)
    return take_rows(consts, axes.consts, rows), take_rows(state, axes.state, rows), _take_feed(feed, axes.x, rows)


def refuse_sharded_rows(loop: Loop) -> None:
    """Rows that are spread over devices by their type cannot be ordered."""
    leaves = jax.tree.leaves((loop.state, loop.xs.x, loop.xs.valid))
    if any(is_sharded(leaf) for leaf in leaves):
        raise Fault(
            ArgumentError,
            "{verb} over {body}: `compact` orders the rows of a batch, which are spread over an explicit mesh.",
            "Leave `compact` out, or run the scan inside of `jax.shard_map`, where each device orders its own rows.",
        )
