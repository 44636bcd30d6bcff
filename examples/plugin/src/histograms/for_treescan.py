"""How treescan carries a histogram.

It imports this module when it first meets one; nobody else has to.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import Array

from treescan.carries import AbstractCarry, register_carry

from ._histogram import Histogram


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class HistogramCarry(AbstractCarry[Histogram, Array]):
    """Counts the values that the body returns.

    The body sees the histogram so far.

    Attributes:
        histogram: the counts so far. All rows of a batch share them.
    """

    histogram: Histogram

    def read(self) -> Histogram:
        """The histogram so far."""
        return self.histogram

    def write(self, returned: Array, valid: Array | None) -> HistogramCarry:
        """Counts values, of any shape; in `mask_scan` [*batch, ...], of which
        those of valid rows count.
        """
        if valid is not None:  # from [*batch] to the shape of the values
            valid = jnp.expand_dims(valid, range(valid.ndim, returned.ndim))
            valid = jnp.broadcast_to(valid, returned.shape)
        return replace(
            self, histogram=self.histogram.add(returned, where=valid)
        )

    def rows(self) -> None:
        """There is one histogram, not one for each row."""
        return None


# From now on, a Histogram in an `init` is carried as a HistogramCarry, and
# the caller gets a Histogram back.
register_carry(Histogram, HistogramCarry, HistogramCarry.read)
