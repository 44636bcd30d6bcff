"""Sums that do not lose small terms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp

from .._types import Array, ArrayLike
from ._base import AbstractCarry, as_seen
from ._entries import entries, entry, inexact, is_shared, maker


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sum(AbstractCarry[Array, ArrayLike]):
    """The compensated sum of what the body returns: the rounding errors of the additions are summed separately.

    The improved Kahan-Babuska algorithm (A. Neumaier, ZAMM 54, 1974): the error is about one rounding of the result,
    for any number of terms. The error of a plain sum grows with their number.

    Attributes:
        total: the plain sum.
        lost: the sum of its rounding errors.
        shared: whether all rows share it; None: if it has no axes.
    """

    total: Array
    lost: Array
    shared: bool | None = field(default=None, metadata={"static": True})

    def read(self) -> Array:
        """The sum so far."""
        return self.total + self.lost

    def write(self, returned: ArrayLike, valid: Array | None) -> Sum:
        """Adds a term, or the sum of those of valid rows."""
        if is_shared(self.shared, self.total):
            rows = entries(returned, self.total, valid)
            term = jnp.sum(rows.values, rows.axes) if rows.axes else rows.values
        else:
            term = entry(returned, self.total)
        total = self.total + term
        first = jnp.abs(self.total) >= jnp.abs(term)
        error = jnp.where(first, (self.total - total) + term, (term - total) + self.total)
        return replace(self, total=total, lost=self.lost + jnp.where(jnp.isfinite(total), error, jnp.zeros_like(error)))

    def rows(self) -> Mapping[str, Any] | None:
        """As `shared` has it."""
        return None if is_shared(self.shared, self.total) else {"total": 0, "lost": 0}


@maker
def sum_(start: ArrayLike = 0.0, *, shared: bool | None = None) -> Array:
    """Carries the compensated sum of what the body returns.

    Args:
        start: the first value of the sum: a floating-point number or array.
        shared: whether all rows of a `mask_scan` share it: then the body returns terms [*batch, ...], of which those of
            valid rows are added. None: if `start` has no axes.

    Returns:
        `Sum`, typed as the sum that the body sees.

    Examples:
        >>> import jax.numpy as jnp
        >>> import treescan
        >>> from treescan.carries import sum_
        >>> terms = jnp.array([1e8, 1.0, 1.0, -1e8])
        >>> print(treescan.fold(lambda total, x: total + x, 0.0, terms))
        0.0
        >>> print(treescan.fold(lambda total, x: x, sum_(), terms).read())
        2.0
    """
    total = inexact(start)
    return as_seen(Sum(total, jnp.zeros_like(total), shared))
