"""A pair of elements that the loop gives its operator, and whether there is any.

In rounds, the operator is given pairs that the loop never gives it: a sequence and the one before it, or padding.
Their results are selected away. But zero times NaN is NaN on the way back, also to what the operator closes over. So
a pair takes their place that the loop gives it too: the first two elements of a segment, or `init` and the first. Its
values and derivatives are finite wherever those that count are. Where no row has such a pair, the operator is not
called.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from ..._avals import Array, PyTree, is_sharded, place_like, types_of, vary_over, varying_axes
from ..._rows.leaves import any_of_all, expand, last_set, may_branch, substitute_elements, take_row
from .parts import Pair, Part


def first_with_init(part: Part, init: PyTree, starts: Array) -> Pair:
    """`init`, leaves `[T, *batch, ...]`, and the element at a step where a segment starts."""
    return _one(init, part.value, starts, last_set(starts), last_set(starts))


def first_two(part: Part, valid: Array, *, reverse: bool) -> tuple[Pair, Array]:
    """The first two elements of a segment, and which steps are the second ones, bool[T, *batch]."""
    count, rows = valid.shape[0], valid[0].size
    steps = jnp.arange(count, dtype=jnp.int32)
    order = expand(steps[::-1] if reverse else steps, valid, 0)

    def last(flags: Array) -> Array:  # the place in the order of the last flag up to here; -1: there was none
        return jax.lax.cummax(jnp.where(flags, order, -1), reverse=reverse)

    until = last(valid)
    none = jnp.full_like(until[:1], -1)
    before = jnp.concatenate([until[1:], none] if reverse else [none, until[:-1]])
    starts = valid & ((before < 0) if part.begins is None else (before < 0) | part.begins)
    second = valid & ~starts & (before == last(starts))
    here = last_set(second)
    place = jnp.maximum(take_row(before, here, 0, valid.shape).reshape(()), 0)
    step = (count - 1 - place if reverse else place).astype(here.dtype)
    return _one(part.value, part.value, second, step * rows + here % max(rows, 1), here), second


def _one(before: PyTree, here: PyTree, flags: Array, first: Array, second: Array) -> Pair:
    """The elements at two places. Where no flag is set, those of another element of a `jax.vmap`, or of a device."""

    def at(tree: PyTree, place: Array) -> PyTree:
        return jax.tree.map(lambda leaf: take_row(jax.lax.stop_gradient(leaf), place, 0, flags.shape), tree)

    return substitute_elements(jnp.any(flags), Pair(at(before, first), at(here, second)))[0]


def unless_none(flags: Array, run: Callable[[], PyTree], value: PyTree) -> PyTree:
    """What `run` returns, or the value where no flag is set: in any row, element of a `jax.vmap`, or device."""
    if not may_branch():
        return run()
    is_spread = jax.sharding.get_abstract_mesh().manual_axes or any(map(is_sharded, jax.tree.leaves(value)))
    types = types_of(run) if is_spread else None

    def leave() -> PyTree:
        if types is None:
            return value
        return jax.tree.map(lambda leaf, like: vary_over(place_like(leaf, like), varying_axes(like)), value, types)

    return jax.lax.cond(any_of_all(flags), run, leave)
