"""Running mean and variance."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from .._avals import describe_argument
from .._errors import ArgumentTypeError, Fault
from .._types import Array, ArrayLike
from ._base import AbstractCarry, as_seen
from ._entries import entries, entry, is_shared, maker, widest


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Statistics:
    """What the body sees of `Moments`.

    Attributes:
        count: int32: the number of entries so far.
        mean: their mean.
        variance: their variance, 0 before the first: the sum of squared deviations by the count.
    """

    count: Array
    mean: Array
    variance: Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Moments(AbstractCarry[Statistics, ArrayLike]):
    """The mean and variance of what the body returns, by Welford's recurrence (Technometrics 4, 1962).

    Entries of several rows at once, and two `Moments`, are merged by the formula of Chan, Golub and LeVeque (1979):
    with d = mean_b - mean_a and n = n_a + n_b the mean is mean_a + d n_b / n, the sum of squared deviations
    squares_a + squares_b + d^2 n_a n_b / n. Both are exact except for rounding, and neither subtracts large numbers.

    Attributes:
        count: int32, of the mean's shape, [] if shared: the number of entries.
        mean: their mean.
        squares: the sum of their squared deviations from it.
        shared: whether all rows share them; None: if the mean has no axes.
    """

    count: Array
    mean: Array
    squares: Array
    shared: bool | None = field(default=None, metadata={"static": True})

    def variance(self, ddof: int = 0) -> Array:
        """The variance, `squares / (count - ddof)`; 0 while there are no more than `ddof` entries."""
        return self.squares / jnp.maximum(self.count - ddof, 1).astype(self.mean.dtype)

    def merge(self, other: Moments) -> Moments:
        """The moments of all entries of both."""
        count = self.count + other.count
        dtype = self.mean.dtype
        wide = widest(dtype)  # counts and their ratios: float16 ends at 65504
        mine, theirs, all_ = (n.astype(wide) for n in (self.count, other.count, jnp.maximum(count, 1)))
        delta = other.mean - self.mean
        between = (delta.astype(wide) ** 2 * (mine * (theirs / all_))).astype(dtype)
        mean = self.mean + (delta.astype(wide) * (theirs / all_)).astype(dtype)
        return replace(self, count=count, mean=mean, squares=self.squares + other.squares + between)

    def read(self) -> Statistics:
        """Count, mean and variance."""
        return Statistics(self.count, self.mean, self.variance())

    def write(self, returned: ArrayLike, valid: Array | None) -> Moments:
        """One entry more, or one a valid row."""
        if not is_shared(self.shared, self.mean):
            return self._add(entry(returned, self.mean))
        rows = entries(returned, self.mean, valid)
        if not rows.axes and rows.counts is None:
            return self._add(rows.values)
        mean = jnp.sum(rows.values, rows.axes) / jnp.maximum(rows.number, 1).astype(self.mean.dtype)
        deviations = rows.values - jnp.broadcast_to(mean, rows.values.shape)
        if rows.counts is not None:
            deviations = jnp.where(rows.counts, deviations, jnp.zeros_like(deviations))
        return self.merge(replace(self, count=rows.number, mean=mean, squares=jnp.sum(deviations**2, rows.axes)))

    def _add(self, value: Array) -> Moments:
        count = self.count + 1
        delta = value - self.mean
        mean = self.mean + delta / count.astype(value.dtype)
        return replace(self, count=count, mean=mean, squares=self.squares + delta * (value - mean))

    def rows(self) -> Mapping[str, Any] | None:
        """As `shared` has it."""
        return None if is_shared(self.shared, self.mean) else {"count": 0, "mean": 0, "squares": 0}


@maker
def moments(shape: tuple[int, ...] = (), dtype: DTypeLike = float, *, shared: bool | None = None) -> Statistics:
    """Carries the running mean and variance of what the body returns.

    Args:
        shape: the shape of an entry; [*batch, ...] if each row of a `mask_scan` has its own.
        dtype: of the mean, floating point.
        shared: whether all rows of a `mask_scan` share them: then the body returns entries [*batch, *shape], of which
            those of valid rows count. None: if the shape is ().

    Returns:
        `Moments`, typed as the statistics that the body sees. The body returns an entry in their place.

    Raises:
        ArgumentTypeError: if the shape is not a tuple of ints, for example an array.
        ValueError: if the dtype is not floating point.

    Examples:
        >>> import jax.numpy as jnp
        >>> import treescan
        >>> from treescan.carries import moments
        >>> def normalise(seen, x):
        ...     return x, (x - seen.mean) / jnp.sqrt(seen.variance + 1e-6)
        >>> final, _ = treescan.scan(normalise, moments(), jnp.array([1.0, 2.0, 6.0]))
        >>> print(final.mean, final.variance(ddof=1))
        3.0 7.0
    """
    mean = jnp.zeros(_checked(shape), dtype)
    if not jnp.issubdtype(mean.dtype, jnp.floating):
        raise ValueError(f"a mean is a floating-point number, but got dtype {mean.dtype}")
    count = jnp.zeros(() if is_shared(shared, mean) else shape, jnp.int32)
    return as_seen(Moments(count, mean, jnp.zeros_like(mean), shared))


def _checked(shape: Any) -> tuple[int, ...]:
    """The shape of an entry; one number is the shape of a vector."""
    parts = shape if isinstance(shape, tuple | list) else (shape,)
    try:
        return tuple(operator.index(part) for part in parts)
    except TypeError:
        pass
    cure = "Give a tuple of ints: `moments((features,))`, or `moments()` for the moments of a number."
    if isinstance(shape, jax.Array | np.ndarray):
        cure = f"For entries like this array, give its shape, `moments({tuple(shape.shape)})`. The moments start empty."
    raise Fault(
        ArgumentTypeError, f"{{verb}}: `shape` must be the shape of an entry, got {describe_argument(shape)}.", cure
    )
