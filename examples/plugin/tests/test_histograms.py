"""Histograms count as NumPy does, alone and carried by treescan."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

import treescan
from histograms import Histogram, histogram
from histograms.for_treescan import HistogramCarry
from treescan.testing import check_carry

EDGES = [-1.0, -0.5, 0.0, 0.25, 1.0]
VALUES = (
    np.random.default_rng(0).uniform(-1.5, 1.5, (4, 3, 2)).astype(np.float32)
)
VALUES[0, 0] = -1.0, 1.0  # the outer edges are in their bins
VALID = np.arange(4)[:, None] < np.array([4, 0, 2])


def test_the_carry_keeps_the_laws_of_treescan() -> None:
    carry = HistogramCarry(histogram(EDGES))
    check_carry(carry, VALUES, batch=(3,))


def test_values_are_counted_as_numpy_counts_them() -> None:
    expected, _ = np.histogram(VALUES, EDGES)
    np.testing.assert_array_equal(
        histogram(EDGES).add(VALUES).counts, expected
    )


def test_values_outside_and_nan_and_masked_ones_are_not_counted() -> None:
    values, where = (
        np.array([-9.0, np.nan, 9.0, np.inf, 0.1, 0.1]),
        np.array([True] * 5 + [False]),
    )
    np.testing.assert_array_equal(
        histogram(EDGES).add(values, where).counts, [0, 0, 1, 0]
    )


def test_the_density_is_that_of_numpy_and_zero_without_values() -> None:
    expected, _ = np.histogram(VALUES, EDGES, density=True)
    np.testing.assert_allclose(
        histogram(EDGES).add(VALUES).density(), expected, rtol=1e-6
    )
    np.testing.assert_array_equal(histogram(EDGES).density(), np.zeros(4))


def step(seen: Histogram, x: Array) -> tuple[Any, Array]:
    """Any: to a type checker, what a body returns for a carry has the type of
    what it sees.
    """
    return x, seen.counts


def test_a_scan_takes_a_histogram_and_returns_one() -> None:
    final, counts = jax.jit(
        lambda: treescan.scan(step, histogram(EDGES), jnp.asarray(VALUES))
    )()
    assert isinstance(final, Histogram)
    np.testing.assert_array_equal(
        final.counts, np.histogram(VALUES, EDGES)[0]
    )
    np.testing.assert_array_equal(
        counts[-1], np.histogram(VALUES[:-1], EDGES)[0]
    )


@pytest.mark.parametrize("padding", [np.nan, 0.1])
def test_padding_is_not_counted(padding: float) -> None:
    padded = jnp.asarray(
        np.where(VALID[..., None], VALUES, np.float32(padding))
    )
    final, _ = treescan.mask_scan(
        step, histogram(EDGES), padded, mask=VALID, row_axes={"y": None}
    )
    np.testing.assert_array_equal(
        final.counts, np.histogram(VALUES[VALID], EDGES)[0]
    )
