"""The schedule of the chunks of a masked scan: what of each is run."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ..._types import Array
from .leaves import any_along, most_of_all, most_of_devices


class Schedule(NamedTuple):
    """The part of each chunk that runs.

    Attributes:
        branch: int32[N]: 0: nothing; i: the first tiers[i-1] rows of the order.
        order: int32[N, B], the rows of each chunk, live ones first; None if there is but one tier.
    """

    branch: Array
    order: Array | None = None


@functools.partial(jax.jit, static_argnames=("size", "tiers"), inline=True)  # traced once for each shape
def make_schedule(valid: Array, size: int, tiers: tuple[int, ...]) -> Schedule:
    """What of each chunk is to be run: the same for all elements of a vmap and on all devices of a shard_map.

    Args:
        valid: bool[T, *batch].
        size: the steps of a chunk.
        tiers: the numbers of rows to choose from, ascending.
    """
    if len(tiers) == 1:
        branch = any_along(_chunks_of(valid, size), range(1, valid.ndim + 1)).astype(jnp.int32)
        return Schedule(most_of_all(most_of_devices(branch)))
    live = any_along(_chunks_of(valid, size), (1, *range(3, valid.ndim + 1)))
    number = jnp.sum(live, axis=1, dtype=jnp.int32)
    needed = jnp.sum(number[:, None] > jnp.array([[0, *tiers[:-1]]], jnp.int32), axis=1, dtype=jnp.int32)
    return Schedule(most_of_all(most_of_devices(needed)), _live_first(live))


def _live_first(live: Array) -> Array:
    """int32[N, B], the rows of each chunk in their order, live ones first: sorted as numbers, which is cheaper."""
    rows = jnp.arange(live.shape[1], dtype=jnp.int32)
    return jnp.sort(jnp.where(live, rows, rows + rows.size), axis=1) % rows.size


def _chunks_of(valid: Array, size: int) -> Array:
    """bool[N, size, *batch], the steps of each chunk; those after the last are not valid."""
    length = valid.shape[0]
    if size == length:  # a symbolic length too
        return valid[None]
    count = -(-length // size)
    if count * size != length:
        none = jnp.zeros((), valid.dtype)
        valid = jax.lax.pad(valid, none, [(0, count * size - length, 0), *((0, 0, 0) for _ in valid.shape[1:])])
    return valid.reshape(count, size, *valid.shape[1:])
