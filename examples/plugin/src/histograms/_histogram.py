"""Counts of values in bins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Histogram:
    """How many values fell into each bin.

    Attributes:
        edges: floating point[bins + 1], increasing. A bin has its left edge
            in it; the last one has both.
        counts: int32[bins].
    """

    edges: Array
    counts: Array

    def add(
        self, values: ArrayLike, where: ArrayLike | None = None
    ) -> Histogram:
        """The histogram with more values.

        Those outside of the edges, and NaN, are not counted.

        Args:
            values: an array of any shape.
            where: bool, of the same shape: which of them count. None: all.
        """
        values = jnp.asarray(values, self.edges.dtype)
        inside = (values >= self.edges[0]) & (values <= self.edges[-1])
        if where is not None:
            inside &= jnp.asarray(where)
        bins = jnp.searchsorted(self.edges, values, side="right") - 1
        # The last edge belongs to the last bin.
        bins = jnp.clip(bins, 0, self.counts.size - 1)
        return replace(
            self,
            counts=self.counts.at[bins].add(inside.astype(self.counts.dtype)),
        )

    def density(self) -> Array:
        """The counts, scaled to an integral of 1; 0 while there are none."""
        total = jnp.maximum(jnp.sum(self.counts), 1).astype(self.edges.dtype)
        return self.counts.astype(self.edges.dtype) / (
            total * jnp.diff(self.edges)
        )


def histogram(edges: ArrayLike | Sequence[float]) -> Histogram:
    """A histogram without values.

    Args:
        edges: [bins + 1], increasing.
    """
    edges = jnp.asarray(edges, float)
    return Histogram(edges, jnp.zeros(edges.size - 1, jnp.int32))
