"""Runs all measurements, and looks for all faults."""

from __future__ import annotations

from .faults import FAULTS
from .growth import measure
from .report import Report, this_machine

SECONDS = 10.0
"""For how long loops are timed. Compiling them takes some seconds more."""


def examine(seconds: float = SECONDS) -> Report:
    """Measures how loops grow, and looks for faults."""
    return Report(this_machine(), measure(seconds), [(fault, fault.copies()) for fault in FAULTS])
