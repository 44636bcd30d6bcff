"""Reads a compiled program, and finds the parts of a buffer that its loops write again in each step."""

from __future__ import annotations

import re
from collections.abc import Iterable

_NAMES = {"bfloat16": "bf16", "float32": "f32", "int32": "s32"}
_CALLED = re.compile(r"=\{?(%[\w.\-]+(?:, %[\w.\-]+)*)")


def copies_in_loops(text: str, shape: tuple[int, ...], dtype: str = "float32") -> int:
    """How many instructions in the loops of a program copy or convert a whole array of a type.

    Args:
        text: the program, as XLA prints it.
        shape: the array's shape.
        dtype: its dtype.
    """
    kind = re.escape(f"{_NAMES[dtype]}[{','.join(map(str, shape))}]")
    whole = re.compile(rf"= {kind}\S* (?:copy|convert)\(")
    computations = _computations(text)
    loops = [line for lines in computations.values() for line in lines if " while(" in line]
    return sum(bool(whole.search(line)) for name in _reached(computations, loops) for line in computations[name])


def _computations(text: str) -> dict[str, list[str]]:
    """The instructions of each computation by its name."""
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        if line.endswith("{") and not line.startswith(" "):
            lines = found.setdefault(line.removeprefix("ENTRY ").split(" ")[0], [])
        elif line.startswith(" "):
            lines.append(line.split(", metadata=")[0])
    return found


def _reached(computations: dict[str, list[str]], lines: Iterable[str]) -> set[str]:
    """The computations that instructions call, and those that these call."""
    reached: set[str] = set()
    left = [name for line in lines for name in _called(line)]
    while left:
        name = left.pop()
        if name in computations and name not in reached:
            reached.add(name)
            left += [inner for line in computations[name] for inner in _called(line)]
    return reached


def _called(line: str) -> list[str]:
    return [name for names in _CALLED.findall(line) for name in names.split(", ")]
