"""Packed sequences: where each is in its row, and what it ends with."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from .._avals import (
    Array,
    describe_leaf,
    on_automatic_axes,
    parts_of,
    varying_axes,
)
from .._errors import Misuse
from .axes import Spans
from .leaves import may_branch


def refuse_split_rows(spans: Spans, valid: Array) -> None:
    """Refuses the rows of a single device in a `jax.shard_map`, because the index counts the rows of all devices."""
    if valid.ndim != 2:
        raise Misuse(
            f"{{call}}: the mask of the `Packed` must have two axes, steps and rows, but is {describe_leaf(valid)}.",
            "To map over several batches, stack all of their leaves: `jax.vmap(run)(batches)`. Or scan a single "
            "row, `mask_scan(step, init, data, mask=mask, resets=resets)`.",
        )
    split = varying_axes(jax.typeof(valid)) - varying_axes(jax.typeof(spans[0]))
    if not split and may_branch():
        return
    raise Misuse(
        "{call}: the rows of a `Packed` are sharded over devices, but its index counts the rows of all devices.",
        "In a `jax.shard_map`, leave `check_vma` on and give each device its own `Packed`, with its own index. Or call "
        "it outside of `jax.shard_map`, where JAX itself shards the rows. Or scan the rows themselves, which gives the "
        "carry of each row instead of each sequence: `mask_scan(step, init, packed.data, mask=packed.mask, "
        "resets=packed.resets)`.",
    )


def at_rows(leaf: Array, spans: Spans, axis: int | None) -> Array:
    """A leaf with an entry for each sequence instead of each row: the entry of the row of the sequence."""
    if axis is None:
        return leaf
    taken = functools.partial(jnp.take, axis=axis, mode="clip")
    return on_automatic_axes(taken, _without(parts_of(leaf), axis), leaf, spans[0])


def _without(parts: tuple[Any, ...], axis: int) -> tuple[Any, ...]:
    """How the axes of an array are sharded that has sequences in the place of rows: these are not."""
    return (*parts[:axis], None, *parts[axis + 1 :])


def ends_of(ys: Array, spans: Spans, axis: int, value: Array, some: Array, *, reverse: bool) -> Array:
    """The last output of each sequence, from the held outputs of all steps; `value` where `some` is not set."""
    ends = functools.partial(_ends_of, axis=axis, reverse=reverse)
    return on_automatic_axes(ends, _without(parts_of(ys)[1:], axis), ys, *spans, value, some)


def _ends_of(
    ys: Array, row: Array, start: Array, length: Array, value: Array, some: Array, *, axis: int, reverse: bool
) -> Array:
    step = jnp.where(length > 0, start if reverse else start + length - 1, ys.shape[0])
    picked = jnp.moveaxis(ys, axis + 1, 1).at[step, row].get(mode="clip") if ys.size else None
    wide = jnp.broadcast_to(value, (row.shape[0], *ys.shape[1 : axis + 1], *ys.shape[axis + 2 :]))
    some = some.reshape(-1, *(1 for _ in wide.shape[1:]))
    return jnp.moveaxis(wide if picked is None else jnp.where(some, picked, wide), 0, axis)


def are_valid(spans: Spans, valid: Array) -> Array:
    """bool[N]: whether any step of each sequence is."""

    def any_of_each(numbers: Array, valid: Array) -> Array:
        counts = jnp.zeros(spans[0].shape[0] + 1, jnp.int32)
        return counts.at[jnp.where(valid, numbers, 0)].add(1)[1:] > 0

    return on_automatic_axes(any_of_each, (), numbers_of(spans, valid.shape), valid)


def numbers_of(spans: Spans, shape: tuple[int, ...]) -> Array:
    """int32[T, R]: which sequence a step belongs to, counted from 1; 0: none."""
    row, start, length = spans
    begun = jnp.zeros(shape, jnp.int32)
    if 0 in shape:
        return begun
    counted = jnp.arange(1, row.shape[0] + 1, dtype=jnp.int32)
    begun = begun.at[jnp.where(length > 0, start, shape[0]), row].set(counted, mode="drop")
    steps = jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    last = jax.lax.cummax(jnp.where(begun > 0, steps, -1))
    number = jnp.where(last < 0, 0, jnp.take_along_axis(begun, jnp.maximum(last, 0), 0))
    ends = jnp.concatenate([jnp.zeros_like(start[:1]), start + length])
    return jnp.where(steps < ends[number], number, 0)


def turns(numbers: Array, valid: Array, *, later: bool) -> Array:
    """bool[T, R]: valid steps of a sequence whose neighbour is of another, or of none.

    The neighbour is the row's next valid step where `later` is set, else the one before.
    """
    if 0 in valid.shape:
        return valid
    return on_automatic_axes(functools.partial(_turns, later=later), parts_of(valid), numbers, valid)


def _turns(numbers: Array, valid: Array, *, later: bool) -> Array:
    count = valid.shape[0]
    steps = jax.lax.broadcasted_iota(jnp.int32, valid.shape, 0)
    if later:
        found = jax.lax.cummin(jnp.where(valid, steps, count), reverse=True)
        near = jnp.concatenate([found[1:], jnp.full_like(found[:1], count)])
    else:
        found = jax.lax.cummax(jnp.where(valid, steps, -1))
        near = jnp.concatenate([jnp.full_like(found[:1], -1), found[:-1]])
    other = jnp.take_along_axis(numbers, jnp.clip(near, 0, count - 1), 0)
    is_other = (near < 0) | (near >= count) | (numbers != other)
    return valid & is_other & (numbers > 0)
