"""Selects rows in the leaves of a batch, whatever their sharding."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._avals import is_key, is_sharded
from ..._types import Array, ArrayLike


def mask_of_lengths(lengths: ArrayLike, steps: int) -> Array:
    """bool[steps, *batch]: whether a step is among the first `lengths` of its row."""
    lengths = jnp.asarray(lengths)
    if is_sharded(lengths) or not isinstance(steps, int):  # a symbolic size is of any size
        return jax.lax.broadcasted_iota(np.int32, (steps, *lengths.shape), 0) < lengths.astype(np.int32)[None]
    return _mask_of_lengths(lengths, steps)


@functools.partial(jax.jit, static_argnames="steps", inline=True)  # traced once for each shape
def _mask_of_lengths(lengths: Array, steps: int) -> Array:
    dtype = lengths.dtype if steps <= jnp.iinfo(lengths.dtype).max else np.int32  # the positions must fit
    return jax.lax.broadcasted_iota(dtype, (steps, *lengths.shape), 0) < lengths.astype(dtype)[None]


def any_along(flags: Array, axes: Iterable[int]) -> Array:
    """`jnp.any` along some axes, as a single operation. `jnp.any` calls a compiled function, which is slow to trace."""
    axes = tuple(axes)
    return jax.lax.reduce_or(flags, axes) if axes else flags


def any_of(flags: Array) -> Array:
    """bool[]: whether any flag is set."""
    return any_along(flags, range(flags.ndim))


def select(chosen: Array, new: Array, old: Array) -> Array:
    """`jnp.where`, with the mask and the other value sharded as the leaf is, where shardings are part of the type."""
    like = next((value for value in (new, old) if is_sharded(value)), None)
    if like is None:
        return jnp.where(chosen, new, old)
    spec = jax.typeof(like).sharding.spec
    parts = (jnp.broadcast_to(value, like.shape) for value in (chosen, new, old))
    mask, first, second = (jax.sharding.reshard(part, spec) for part in parts)
    return jnp.where(mask, first, second)


def expand(valid: Array, leaf: Array, axis: int) -> Array:
    """A mask in the rank of a leaf, its batch axes at `axis`.

    Explicit in every axis: a [B] mask against a [B, D] leaf with B = D would broadcast against the features.
    """
    return valid.reshape((*(1 for _ in range(axis)), *valid.shape, *(1 for _ in range(leaf.ndim - axis - valid.ndim))))


class RowMask:
    """The mask of one step, in the shape of each leaf: leaves of one shape share it, as each would take time to trace.

    Attributes:
        valid: bool[*batch].
    """

    def __init__(self, valid: Array, some: Callable[[Array], Array] = any_of) -> None:
        self.valid = valid
        self._some = some
        self._shaped: dict[tuple[Any, ...], Array] = {}

    def some(self) -> Array:
        """bool[]: whether any row is valid."""
        return self._made((), lambda: self._some(self.valid))

    def select(self, new: Array, old: Array, axis: int | None) -> Array:
        """`new` for valid rows, `old` for others; for a leaf without rows (None), `new` if any row is valid.

        `old` has the shape of `new`, or is broadcast to it.
        """
        if axis is None:
            return select(self.some(), new, old)
        if is_sharded(new) or is_sharded(old) or new.dtype != old.dtype or old.ndim not in (0, new.ndim):
            return select(expand(self.valid, new, axis), new, old)
        dimensions = tuple(range(axis, axis + self.valid.ndim))
        mask = self._made((new.shape, axis), lambda: jax.lax.broadcast_in_dim(self.valid, new.shape, dimensions))
        if old.shape != new.shape:
            old = jax.lax.broadcast_in_dim(old, new.shape, tuple(range(old.ndim)))
        return jax.lax.select_n(mask, old, new)

    def _made(self, key: tuple[Any, ...], make: Callable[[], Array]) -> Array:
        if key not in self._shaped:
            self._shaped[key] = make()
        return self._shaped[key]


def select_valid(valid: Array, new: Array, old: Array, axis: int | None) -> Array:
    """One leaf of `RowMask.select`."""
    return RowMask(valid).select(new, old, axis)


def unsigned(number: Array) -> Array:
    """A number that is not negative, in an unsigned type."""
    return number.astype(jnp.uint32)


def take_row(leaf: Array, row: Array, axis: int, batch: tuple[int, ...]) -> Array:
    """One row of a leaf, its batch axes kept with size 1; `row` counts through the batch shape in C order.

    It is unsigned where many leaves are taken of: of a signed number JAX asks each time whether it counts from the end.
    """
    if is_sharded(leaf):
        chosen = jnp.arange(_size(batch), dtype=row.dtype).reshape(batch) == row
        return _pick_out(leaf, expand(chosen, leaf, axis), tuple(range(axis, axis + len(batch))), keepdims=True)
    head, tail = leaf.shape[:axis], leaf.shape[axis + len(batch) :]
    if len(batch) == 1:
        zero = np.zeros((), row.dtype)
        starts = [row if i == axis else zero for i in range(leaf.ndim)]
        return jax.lax.dynamic_slice(leaf, starts, (*head, 1, *tail))
    flat = leaf.reshape((*head, -1, *tail))
    return jax.lax.dynamic_index_in_dim(flat, row, axis).reshape((*head, *(1 for _ in batch), *tail))


def gather_rows(leaf: Array, rows: Array, axis: int, *, distinct: bool = False, of_first_step: bool = False) -> Array:
    """The given rows of a leaf; `rows` is int[N, 1], each within the leaf.

    Args:
        leaf: rows at `axis`.
        rows: which rows; unsigned numbers are not asked whether they count from the end.
        axis: where the rows are.
        distinct: whether all rows differ, which the gradient then relies on.
        of_first_step: the leaf is `[T, ...]`, and the rows are those of the entry 0, where they are at `axis`.
    """
    collapsed = (0, axis + 1) if of_first_step else (axis,)
    others = tuple(i for i in range(leaf.ndim - of_first_step) if i != axis)
    return jax.lax.gather(
        leaf,
        rows,
        jax.lax.GatherDimensionNumbers(others, collapsed, collapsed[-1:]),
        tuple(1 if i in collapsed else size for i, size in enumerate(leaf.shape)),
        unique_indices=distinct,
        mode="clip",
    )


def pick_steps(leaf: Array, steps: Array, axis: int | None) -> Array:
    """For each row the slice of `leaf` [T, ...] at the row's own step; `steps` is int[*batch]."""
    assert axis is not None
    if is_sharded(leaf):
        chosen = jax.lax.broadcasted_iota(steps.dtype, (leaf.shape[0], *(1 for _ in steps.shape)), 0) == steps[None]
        ones = (1 for _ in range(axis))
        tail = (1 for _ in range(leaf.ndim - 1 - axis - steps.ndim))
        return _pick_out(leaf, chosen.reshape((leaf.shape[0], *ones, *steps.shape, *tail)), (0,), keepdims=False)

    rows = tuple(range(1 + axis, 1 + axis + steps.ndim))
    return jax.lax.gather(
        leaf,
        steps[..., None],
        jax.lax.GatherDimensionNumbers(
            offset_dims=tuple(i for i in range(leaf.ndim - 1) if i + 1 not in rows),
            collapsed_slice_dims=(0,),
            start_index_map=(0,),
            operand_batching_dims=rows,
            start_indices_batching_dims=tuple(range(steps.ndim)),
        ),
        tuple(1 if i == 0 or i in rows else size for i, size in enumerate(leaf.shape)),
        mode="clip",
    )


def _size(batch: tuple[int, ...]) -> int:
    size = 1
    for n in batch:
        size *= n
    return size


def _pick_out(leaf: Array, chosen: Array, axes: tuple[int, ...], *, keepdims: bool) -> Array:
    """The one entry along `axes` at which `chosen` is set: a reduction, which works along sharded axes too."""
    return add_up(leaf, chosen, lambda part: jnp.sum(part, axes, dtype=part.dtype, keepdims=keepdims))


def add_up(leaf: Array, chosen: Array, total: Callable[[Array], Array]) -> Array:
    """Adds up a leaf of which only the one chosen part counts, for dtypes that cannot be added up as well."""
    if is_key(leaf):
        bits = add_up(jax.random.key_data(leaf), chosen[..., None], total)
        return jax.random.wrap_key_data(bits, impl=jax.random.key_impl(leaf))
    if leaf.dtype == jnp.bool_:
        return add_up(leaf.astype(jnp.int32), chosen, total) > 0
    return total(select(chosen, leaf, jnp.zeros_like(leaf)))
