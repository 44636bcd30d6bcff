"""What was found, as text for a terminal and as data."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

from .._layout import indented, table, wrap
from .faults import KnownFault
from .growth import Found
from .lines import Line


class Report(NamedTuple):
    """What was found.

    Attributes:
        machine: what it was found on.
        found: how loops grow.
        copies: for each fault how many copies its program makes in each step.
    """

    machine: Mapping[str, str]
    found: Sequence[Found]
    copies: Sequence[tuple[KnownFault, int]]

    def __str__(self) -> str:
        parts = [", ".join(self.machine.values()), _growth(self.found), _noise(self.found), _faults(self.copies)]
        return "\n\n".join(filter(None, parts))

    def as_json(self) -> str:
        """The same as data: seconds and bytes, with the quartiles of what one more costs."""
        growth = [{"name": each.name, "seconds": _data(each.seconds), "bytes": each.bytes.slope} for each in self.found]
        faults = [{"name": fault.name, "copies": copies} for fault, copies in self.copies]
        return json.dumps({"machine": dict(self.machine), "growth": growth, "faults": faults}, indent=2)


def this_machine() -> dict[str, str]:
    """What this is, in words."""
    device = jax.devices()[0]
    return {
        "jax": f"jax {jax.__version__}",
        "device": f"{jax.device_count()} x {device.device_kind}",
        "system": f"{platform.system()} {platform.machine()}",
    }


def _data(line: Line) -> dict[str, Any]:
    return {"each": line.slope, "low": line.low, "high": line.high, "noisy": line.is_noisy}


def _growth(found: Sequence[Found]) -> str:
    rows = [(each.name, _time(each.seconds), _spread(each.seconds), _bytes(each.bytes.slope)) for each in found]
    return "The cost of one more:\n" + table(("", "time", "half of the rounds", "memory"), rows)


def _time(line: Line) -> str:
    return "too noisy" if line.is_noisy else duration(line.slope)


def _spread(line: Line) -> str:
    return f"{duration(line.low)} to {duration(line.high)}"


def duration(seconds: float) -> str:
    """A time with two or three digits."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(seconds) >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def _bytes(number: float) -> str:
    return f"{round(number)} B" if abs(number) < 10_000 else f"{number / 1000:.3g} kB"


def _noise(found: Sequence[Found]) -> str:
    noisy = [each.name for each in found if each.seconds.is_noisy]
    if not noisy:
        return ""
    return indented(
        f"This machine is too noisy to measure the time of {len(noisy)} of {len(found)}. Run this again when the "
        "machine is idle."
    )


def _faults(copies: Sequence[tuple[KnownFault, int]]) -> str:
    there = [(fault, number) for fault, number in copies if number]
    names = [fault.name for fault, number in copies if not number]
    parts = [wrap(f"Faults of this XLA: {len(there)} of {len(copies)} known ones.")]
    parts += [
        indented(f"{fault.name} ({number} in the loop that shows it). {fault.meaning}") for fault, number in there
    ]
    if names:
        parts.append(indented(f"Not found: {'; '.join(names)}."))
    return "\n\n".join(parts)
