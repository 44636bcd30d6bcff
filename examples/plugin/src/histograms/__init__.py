"""Histograms as JAX pytrees."""

from ._histogram import Histogram as Histogram, histogram as histogram
