"""Reads compiled programs: what stands in their branches and in their loops."""

import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax

_CALLED = re.compile(r"=\{?(%[\w.\-]+(?:, %[\w.\-]+)*)")
_COLLECTIVE = re.compile(r"\b(?:all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(")
_SHAPE = re.compile(r"\b[a-z]+\d*\w*\[([\d,]*)\]")


class Program:
    """The compiled program of a function for its arguments."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        compiled = jax.jit(function).lower(*args).compile()
        self.temp_bytes: int = compiled.memory_analysis().temp_size_in_bytes
        self._computations: dict[str, list[str]] = {}
        lines: list[str] = []
        for line in compiled.as_text().splitlines():
            if line.endswith("{") and not line.startswith(" "):
                lines = self._computations.setdefault(line.removeprefix("ENTRY ").split(" ")[0], [])
            elif line.startswith(" "):
                lines.append(line.split(", metadata=")[0])

    def __iter__(self) -> Iterator[str]:
        """All instructions."""
        for lines in self._computations.values():
            yield from lines

    def branches(self) -> list[list[str]]:
        """For each conditional the text of its branches, with all that they call."""
        found = [line for line in self if " conditional(" in line]
        return [[self._text(name) for name in self._called(line)] for line in found]

    def loops(self) -> list[str]:
        """The text of each loop's condition and body, with all that they call."""
        return ["\n".join(map(self._text, self._called(line))) for line in self if " while(" in line]

    def collectives(self) -> int:
        return len(_COLLECTIVE.findall("\n".join(self)))

    def collective_sizes(self) -> list[int]:
        """The elements of each array that devices exchange, as each of them has it afterwards."""
        found = filter(_COLLECTIVE.search, self)
        shapes = [shape for line in found for shape in _SHAPE.findall(_COLLECTIVE.split(line.partition(" = ")[2])[0])]
        return [math.prod(map(int, filter(None, shape.split(",")))) for shape in shapes]

    def collectives_in_loops(self) -> int:
        return sum(len(_COLLECTIVE.findall(text)) for text in self.loops())

    def copies_in_loops(self, *shape: int) -> int:
        """How many instructions of the loops copy or convert a whole array of float32."""
        whole = re.compile(rf"= f32\[{','.join(map(str, shape))}\]\S* (?:copy|convert)\(")
        return len({line for text in self.loops() for line in text.splitlines() if whole.search(line)})

    def _called(self, line: str) -> list[str]:
        return [name for names in _CALLED.findall(line) for name in names.split(", ") if name in self._computations]

    def _text(self, name: str) -> str:
        lines = self._computations[name]
        return "\n".join([*lines, *(self._text(other) for line in lines for other in self._called(line))])
