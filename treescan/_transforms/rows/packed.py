"""Packed sequences: at which steps each begins and ends, and in which rows they are."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ..._avals import describe_leaf, is_sharded, varying_axes
from ..._errors import ArgumentError, Fault
from ..._types import Array
from .lend import may_branch

Spans = tuple[Array, Array, Array]
"""The row, the first step and the number of steps of each sequence, int32[N]."""


def refuse_split_rows(spans: Spans, valid: Array) -> None:
    """Refuses rows that are sharded over devices, because the index counts the rows of all devices."""
    if valid.ndim != 2:
        raise Fault(
            ArgumentError,
            f"{{call}}: the mask of the `Packed` must have two axes, steps and rows, but is {describe_leaf(valid)}.",
            "To map over several batches, stack all of their leaves: `jax.vmap(run)(batches)`. Or scan a single "
            "row, `mask_scan(step, init, data, mask=mask, resets=resets)`.",
        )
    split = varying_axes(jax.typeof(valid)) - varying_axes(jax.typeof(spans[0]))
    if not split and may_branch() and not is_sharded(valid):
        return
    raise Fault(
        ArgumentError,
        "{call}: the rows of a `Packed` are sharded over devices, but its index counts the rows of all devices.",
        "Leave mesh axes out of the types of the batch, so that JAX itself shards the rows. In a `jax.shard_map`, "
        "leave `check_vma` on and give each device its own `Packed`, with its own index. Or scan the rows "
        "themselves, which gives the carry of each row instead of each sequence: `mask_scan(step, init, "
        "packed.data, mask=packed.mask, resets=packed.resets)`.",
    )


def at_rows(leaf: Array, spans: Spans, axis: int | None) -> Array:
    """A leaf with an entry for each sequence instead of each row: the entry of the row of the sequence."""
    return leaf if axis is None else jnp.take(leaf, spans[0], axis, mode="clip")


def ends_of(ys: Array, spans: Spans, axis: int, value: Array, some: Array, *, reverse: bool) -> Array:
    """The last output of each sequence, from the held outputs of all steps; `value` where `some` is not set."""
    row, start, length = spans
    step = jnp.where(length > 0, start if reverse else start + length - 1, ys.shape[0])
    picked = jnp.moveaxis(ys, axis + 1, 1).at[step, row].get(mode="clip") if ys.size else None
    wide = jnp.broadcast_to(value, (row.shape[0], *ys.shape[1 : axis + 1], *ys.shape[axis + 2 :]))
    some = some.reshape(-1, *(1 for _ in wide.shape[1:]))
    return jnp.moveaxis(wide if picked is None else jnp.where(some, picked, wide), 0, axis)


def are_valid(spans: Spans, valid: Array) -> Array:
    """bool[N]: whether any step of each sequence is."""
    counts = jnp.zeros(spans[0].shape[0] + 1, jnp.int32)
    return counts.at[jnp.where(valid, numbers_of(spans, valid.shape), 0)].add(1)[1:] > 0


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
    count = valid.shape[0]
    if 0 in valid.shape:
        return valid
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
