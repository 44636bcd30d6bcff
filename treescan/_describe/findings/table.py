"""The codes of all findings."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ..facts import Finding
from . import devices, leaves, loops, outputs
from .case import Case

FINDINGS: dict[str, tuple[str, Callable[[Case], Iterator[Finding]]]] = {
    "TS001": ("A leaf of the carry that no step changes", leaves.unchanged_leaves),
    "TS002": ("An output that nothing reads", outputs.unread),
    "TS003": ("An output that is the same in every step", outputs.constant_outputs),
    "TS004": ("A constant as large as the carry", leaves.large_constants),
    "TS005": ("Many leaves of a single number", leaves.many_scalars),
    "TS006": ("A weak type that is promoted", leaves.promoted_leaves),
    "TS007": ("An array with rows that the body closes over, under `compact`", loops.rows_closed_over),
    "TS008": ("Products that are not taken together", loops.separate_products),
    "TS009": ("A loop too short for its overhead", loops.short_loop),
    "TS010": ("Weights that are gathered whole", devices.gathered_weights),
}
"""For each code its title, and what finds it. A code keeps its meaning for good."""


def find(case: Case) -> tuple[Finding, ...]:
    """All that is found in a call, in the order of the codes."""
    return tuple(finding for _, finder in FINDINGS.values() for finding in finder(case))
