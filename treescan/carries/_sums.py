"""A sum that does not lose small terms."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from .._avals import Array, ArrayLike
from .._errors import named_options
from ._base import AbstractCarry
from ._buffer import entries, in_dtype, inexact, is_shared, made, widened


def by_part(function: Callable[..., Sequence[Array]], *values: Array) -> Sequence[Array]:
    """A function of real arrays, of the real and the imaginary parts of complex ones."""
    if not jnp.iscomplexobj(values[0]):
        return function(*values)
    real, imaginary = (function(*map(part, values)) for part in (jnp.real, jnp.imag))
    return [jax.lax.complex(*both) for both in zip(real, imaginary, strict=True)]


def added(total: Array, lost: Array, term: Array) -> tuple[Array, Array]:
    """The rounded sum of three numbers, of which `lost` is small, and what is missing in it.

    What is missing has no derivative, and is 0 in a sum that is not finite.
    """
    first = total + term
    rest = lost + _missing(total, term, first)
    whole = first + rest
    return whole, _missing(first, rest, whole)


def _missing(a: Array, b: Array, rounded: Array) -> Array:
    """What the rounded sum of two numbers misses, exactly (D. Knuth, TAOCP 2, 4.2.2)."""
    a, b, rounded = jax.lax.stop_gradient((a, b, rounded))
    of_b = rounded - a
    missing = (a - (rounded - of_b)) + (b - of_b)
    return jnp.where(jnp.isfinite(missing), missing, jnp.zeros_like(missing))


def exact_sums(values: Array, axes: tuple[int, ...]) -> list[Array]:
    """The sum over axes, as numbers that add to it: all but the last one are exact.

    Added to a number that is large enough, all values are cut at one binary place. So their sum is exact, in any order,
    also over devices. The same is done with what was cut off. Values near the end of the range are scaled, because the
    large number would be infinite.
    """
    count = max(1, math.prod(values.shape[axis] for axis in axes))
    limits, room = jnp.finfo(values.dtype), 4 * 2.0 ** math.ceil(math.log2(count))
    largest = jnp.max(jnp.abs(jax.lax.stop_gradient(values)), axes, keepdims=True, initial=0)
    scale = jnp.where(largest > float(limits.max) / (4 * room), 1 / (4 * room), 1).astype(values.dtype)
    rest, cut, sums = values * scale, room * largest * scale, list[Array]()
    for _ in range(2):
        still = jax.lax.stop_gradient(rest)
        left = still - ((cut + still) - cut)
        left = jnp.where(jnp.isfinite(largest), left, jnp.zeros_like(left))
        sums.append(jnp.sum(rest - left, axes))
        rest, cut = left, room * float(limits.eps) * cut
    scale = jnp.squeeze(scale, axes)
    return [each / scale for each in (*sums, jnp.sum(rest, axes))]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RunningSum(AbstractCarry[Array, ArrayLike]):
    """The compensated sum of what the body returns: the rounding errors of the additions are summed separately.

    Each addition is as exact as one in twice the precision (M. Joldes, J.-M. Muller, V. Popescu, ACM TOMS 44, 2017,
    algorithm 4), and so is the sum of a step's entries (S. Rump, T. Ogita, S. Oishi, SIAM J. Sci. Comput. 31, 2008). So
    the error is one rounding of the result, unless almost all of the sum cancels. The error of a plain sum grows with
    the number of terms. The parts of complex numbers are summed separately.

    Attributes:
        total: the sum, rounded, in at least float32.
        lost: what is missing in it.
        shared: whether all rows share it; None: if it has no axes.
        dtype: that of the sum that the body sees; None: that of the total.
    """

    total: Array
    lost: Array
    shared: bool | None = field(default=None, metadata={"static": True})
    dtype: DTypeLike | None = field(default=None, metadata={"static": True})

    def read(self) -> Array:
        """The sum so far."""
        return in_dtype(self.total + self.lost, self.dtype)

    def write(self, returned: ArrayLike, valid: Array | None) -> RunningSum:
        """Adds a term, or those of valid rows."""
        rows = entries(returned, self.total, valid, shared=self.shared)
        terms = by_part(lambda values: exact_sums(values, rows.axes), rows.values) if rows.axes else [rows.values]
        total, lost = self.total, self.lost
        for term in terms:
            total, lost = by_part(added, total, lost, term)
        return replace(self, total=total, lost=lost)

    def rows(self) -> int | None:
        """They lead; None if all rows share it."""
        return None if is_shared(self.shared, self.total) else 0


@named_options
def running_sum(start: ArrayLike = 0.0, *, shared: bool | None = None) -> Array:
    """Carries the compensated sum of what the body returns.

    Args:
        start: the first value of the sum: a floating-point number or array. The body sees the sum in its dtype. Terms
            are cast to that dtype, but to no less than float32, in which the sum is kept.
        shared: whether all rows of a `mask_scan` share it: then the body returns terms [*batch, ...], of which those of
            valid rows are added; elsewhere all entries are added. None: the same if `start` has no axes, but
            elsewhere than in rows the body returns a number.

    Returns:
        `RunningSum`, typed as the sum that the body sees.

    Examples:
        >>> import jax.numpy as jnp
        >>> import treescan
        >>> from treescan.carries import running_sum
        >>> terms = jnp.array([1e8, 1.0, 1.0, -1e8])
        >>> print(treescan.fold(lambda total, x: total + x, 0.0, terms))
        0.0
        >>> print(treescan.fold(lambda total, x: x, running_sum(), terms).read())
        2.0
    """
    total, dtype = widened(inexact(start))
    return made(RunningSum(total, jnp.zeros_like(total), shared, dtype))
