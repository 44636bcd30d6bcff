"""Writes of steps and rows into arrays that a loop carries, in the form that costs nothing beside the write."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._avals import Array, PyTree, place_like


@dataclass(frozen=True)
class Places:
    """Where a chunk's steps are in the arrays of all steps: `[T, ...]`, or folded, `[chunks, steps, ...]`.

    A step that takes a few microseconds needs folded arrays. XLA reads and writes them at a pair of indices as fast as
    at one, and at a sum of two it does not: the sum is one operation more in each step. A loop with a remainder, or
    with several tiers of rows, must not be hurt: it cannot be folded, or it gathers and scatters rows of whole chunks.

    Attributes:
        size: the steps of a chunk.
        folded: whether the arrays are folded.
    """

    size: int
    folded: bool = False

    def lay(self, tree: PyTree) -> PyTree:
        """Leaves `[T, ...]` as the loop reads and writes them."""
        if not self.folded:
            return tree
        size = self.size
        return jax.tree.map(lambda leaf: jax.lax.reshape(leaf, (leaf.shape[0] // size, size, *leaf.shape[1:])), tree)

    def unlay(self, tree: PyTree) -> PyTree:
        """Such leaves as `[T, ...]`."""
        if not self.folded:
            return tree
        return jax.tree.map(lambda leaf: jax.lax.reshape(leaf, (leaf.shape[0] * leaf.shape[1], *leaf.shape[2:])), tree)

    def starts(self, count: int) -> np.ndarray[Any, Any]:
        """Where each of so many chunks begins."""
        return np.arange(count, dtype=np.uint32) * np.uint32(1 if self.folded else self.size)

    def steps(self) -> np.ndarray[Any, Any]:
        """The steps' places in the chunk; unsigned, as of signed ones JAX asks whether they count from the end."""
        return np.arange(self.size, dtype=np.uint32)

    def of_chunk(self, tree: PyTree, start: Array) -> PyTree:
        """The steps of the chunk that begins there, `[steps, ...]`."""
        if self.folded:
            return jax.tree.map(lambda leaf: entry(leaf, (start,)), tree)
        return jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, start, self.size), tree)


def indices_of(start: Array, step: Array, *, folded: bool) -> tuple[Array, ...]:
    """Where one step of the chunk that begins there is: see `Places`."""
    return (start, step) if folded else (jax.lax.add(start, step),)


def entry(leaf: Array, at: Sequence[Array]) -> Array:
    """`leaf[at]`, without the call that JAX traces for `dynamic_index_in_dim`."""
    one = jax.lax.dynamic_slice(leaf, _begin_of(leaf, at), (*[1] * len(at), *leaf.shape[len(at) :]))
    return jax.lax.squeeze(one, range(len(at)))


def put_entry(leaf: Array, value: Array, at: Sequence[Array]) -> Array:
    """The leaf, with `leaf[at]` replaced."""
    value = place_like(jax.lax.expand_dims(value, range(len(at))), jax.typeof(leaf))
    return jax.lax.dynamic_update_slice(leaf, value, _begin_of(leaf, at))


def _begin_of(leaf: Array, at: Sequence[Array]) -> list[Any]:
    return [*at, *[np.zeros((), np.uint32)] * (leaf.ndim - len(at))]


def put_rows(leaf: Array, new: Array, axis: int, rows: Array) -> Array:
    """The leaf with some rows replaced, int[N].

    A step on the smallest tier of `compact` needs the write of one row as a slice: XLA's CPU backend makes several
    operations of a scatter of one row. A step on more rows must not be hurt: its rows lie anywhere, in one scatter.
    """
    if rows.shape == (1,):
        return jax.lax.dynamic_update_slice_in_dim(leaf, new, rows[0].astype(np.uint32), axis)
    others = tuple(i for i in range(leaf.ndim) if i != axis)
    numbers = jax.lax.ScatterDimensionNumbers(others, (axis,), (axis,))
    places = jax.lax.expand_dims(rows, (1,))
    return jax.lax.scatter(leaf, places, new, numbers, unique_indices=True, mode="promise_in_bounds")


def put_rows_of_steps(leaf: Array, new: Array, axis: int, rows: Array, start: Array) -> Array:
    """The leaf `[T, ...]` with some rows of a chunk replaced, which begins at `start`; one row as in `put_rows`."""
    if rows.shape == (1,):
        row, zero = rows[0].astype(start.dtype), jnp.zeros((), start.dtype)
        return jax.lax.dynamic_update_slice(
            leaf, new, [start, *(row if i == axis else zero for i in range(new.ndim - 1))]
        )
    places = jnp.stack([jnp.broadcast_to(start.astype(rows.dtype), rows.shape), rows], axis=1)
    numbers = jax.lax.ScatterDimensionNumbers(
        update_window_dims=tuple(i for i in range(new.ndim) if i != axis + 1),
        inserted_window_dims=(axis + 1,),
        scatter_dims_to_operand_dims=(0, axis + 1),
    )
    return jax.lax.scatter(leaf, places, new, numbers, unique_indices=True, mode="promise_in_bounds")
