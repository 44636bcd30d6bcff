"""Fits a line to each round of measurements, so that the spread of its slope is known."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

NOISY = 0.5
"""The relative spread of a slope above which it is too noisy."""


class Line(NamedTuple):
    """How something grows: a median over rounds, with quartiles.

    Attributes:
        base: what it is at 0.
        slope: what one more adds.
        low: the lower quartile of the slope.
        high: the upper quartile.
    """

    base: float
    slope: float
    low: float
    high: float

    @property
    def is_noisy(self) -> bool:
        """Whether the slope cannot be told from noise."""
        return self.low <= 0 or self.high - self.low > NOISY * self.slope


def fit(places: Sequence[float], rounds: Sequence[Sequence[float]]) -> Line:
    """The line through measurements at the same places, of which each round has one a place.

    A round is measured within a short time, so what disturbs the machine for longer moves all of it, and little of its
    slope.
    """
    pairs = [_least_squares(places, values) for values in rounds]
    slopes = sorted(slope for _, slope in pairs)
    quarter = len(slopes) // 4
    base = statistics.median(base for base, _ in pairs)
    return Line(base, statistics.median(slopes), slopes[quarter], slopes[-1 - quarter])


def _least_squares(places: Sequence[float], values: Sequence[float]) -> tuple[float, float]:
    """The value at 0, and the slope."""
    center, middle = statistics.fmean(places), statistics.fmean(values)
    products = sum((x - center) * (y - middle) for x, y in zip(places, values, strict=True))
    slope = products / sum((x - center) ** 2 for x in places)
    return middle - slope * center, slope
