"""A store that values are appended to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from .._avals import describe_leaf
from .._types import Array, ArrayLike, PyTree
from ._base import AbstractCarry, as_seen
from ._entries import entries, entry, fitted, is_shared, maker, numbers, pair, same_structure

T = TypeVar("T")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Buffer(AbstractCarry[tuple[Any, Array], tuple[Any, ArrayLike]]):
    """A store for a number of values. The body returns pairs (value, append), and values with `append` are kept.

    Values beyond its capacity are dropped, but counted: `count` may be larger than the capacity.

    Attributes:
        values: any pytree of arrays, leaves [capacity, ...]; [capacity, *batch, ...] if each row has its own.
        count: int32, [] or [*batch]: how many values were appended so far, including dropped ones.
        shared: whether all rows share it; None: if the count has no axes.
    """

    values: PyTree
    count: Array
    shared: bool | None = field(default=None, metadata={"static": True})

    def read(self) -> tuple[PyTree, Array]:
        """The values, of which the first `count` are filled, and the count."""
        return self.values, self.count

    def write(self, returned: tuple[PyTree, ArrayLike], valid: Array | None) -> Buffer:
        """Appends a value, or those of valid rows, in the order of the rows."""
        value, append = pair(returned, "value, append")
        same_structure(value, self.values)
        append = jnp.asarray(append).astype(bool).astype(jnp.int32)
        if not is_shared(self.shared, self.count):
            told = entry(append, self.count) != 0
            return self._put(
                value, jnp.where(told, self.count, _capacity(self.values)), self.count + told.astype(jnp.int32)
            )
        rows = entries(append, self.count, valid)
        told = rows.values.astype(bool)
        before = jnp.cumsum(told.reshape(-1), dtype=jnp.int32).reshape(told.shape) - told.astype(jnp.int32)
        place = jnp.where(told, self.count + before, _capacity(self.values))
        return self._put(value, place, self.count + jnp.sum(told, dtype=jnp.int32))

    def _put(self, value: PyTree, place: Array, count: Array) -> Buffer:
        return replace(
            self, values=jax.tree.map(lambda new, old: self._set(old, new, place), value, self.values), count=count
        )

    def _set(self, values: Array, value: Any, place: Array) -> Array:
        """Writes to the given places; one at or past the capacity writes nothing."""
        new = fitted(jnp.asarray(value), values)
        expected = values.shape[1:] if self.count.ndim else (*place.shape, *values.shape[1:])
        if new.shape != expected:
            raise self._misfit(values, value, expected)

        def put(values: Array, new: Array, place: Array) -> Array:
            return values.at[place].set(new, mode="drop")

        for _ in range(self.count.ndim):  # the rows of each have places of their own
            put = jax.vmap(put, in_axes=(1, 0, 0), out_axes=1)
        return put(values, new, place)

    def _misfit(self, values: Array, value: Any, expected: tuple[int, ...]) -> TypeError:
        one = describe_leaf(jax.ShapeDtypeStruct(expected, values.dtype))
        says = f"it appends one value of type {one} per step, but was given {describe_leaf(value)}"
        if jnp.shape(value) == values.shape:
            says += f", which has the shape of the whole buffer of {values.shape[0]} values: return only the new value"
        return TypeError(says)

    def rows(self) -> Mapping[str, Any] | None:
        """As `shared` has it: behind the capacity in the values."""
        return None if is_shared(self.shared, self.count) else {"values": 1, "count": 0}


def _capacity(values: PyTree) -> int:
    return jax.tree.leaves(values)[0].shape[0]


@maker
def buffer(value: T, capacity: int, *, batch: tuple[int, ...] = (), shared: bool | None = None) -> tuple[T, Array]:
    """Carries a store for values, which the body appends to.

    Args:
        value: a value, for its types: any pytree of arrays; without the batch shape, even if each row has its own.
        capacity: the number of values that fit. Further values are dropped, but counted.
        batch: the batch shape of a `mask_scan` in which each row has its own.
        shared: whether all rows of a `mask_scan` share it: then the body returns values [*batch, ...] and flags
            [*batch], of which those of valid rows are appended. None: if `batch` is ().

    Returns:
        `Buffer`, typed as the pair (values, count) that the body sees, with leaves [capacity, *batch, ...]. The body
        returns a pair (value, append), a new value and a bool: whether to append it.

    Raises:
        ValueError: if the capacity is less than 1.

    Examples:
        >>> import jax.numpy as jnp
        >>> import treescan
        >>> from treescan.carries import buffer
        >>> def keep_even(seen, x):
        ...     return (x, x % 2 == 0), None
        >>> final, _ = treescan.scan(keep_even, buffer(0, capacity=4), jnp.arange(6))
        >>> print(final.values, final.count)
        [0 2 4 0] 3
    """
    if not jax.tree.leaves(value):
        raise ValueError("a buffer holds values, but the one given for their types has no leaves")
    if capacity < 1:
        raise ValueError(f"a buffer has room for at least one value, but got capacity={capacity}")

    def room(leaf: Any) -> Array:
        return jnp.zeros((capacity, *batch, *jnp.shape(leaf)), numbers(leaf).dtype)

    return as_seen(Buffer(jax.tree.map(room, value), jnp.zeros(batch, jnp.int32), shared))
