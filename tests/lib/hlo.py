"""Reads compiled programs: what stands in their branches and in their loops."""

import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax

_CALLED = re.compile(r"=\{?(%[\w.\-]+(?:, %[\w.\-]+)*)")
_COLLECTIVE = re.compile(r"\b(?:all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"\d+"')
_SHAPE = re.compile(r"\b[a-z]+\d*\w*\[([\d,]*)\]")


class Program:
    """The compiled program of a function for its arguments."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        compiled = jax.jit(function).lower(*args).compile()
        self.temp_bytes: int = compiled.memory_analysis().temp_size_in_bytes
        self._computations: dict[str, list[str]] = {}
        self._entry = ""
        lines: list[str] = []
        for line in compiled.as_text().splitlines():
            if line.endswith("{") and not line.startswith(" "):
                self._entry = line.removeprefix("ENTRY ").split(" ")[0] if line.startswith("ENTRY") else self._entry
                lines = self._computations.setdefault(line.removeprefix("ENTRY ").split(" ")[0], [])
            elif line.startswith(" "):
                lines.append("".join([line.split(", metadata=")[0], *_TRIPS.findall(line)]))

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

    def runs(self, name: str) -> int:
        """How often instructions of this name run, those of loops as often as the loop."""
        found = re.compile(rf"\b{name}(?:-start)?\(")

        def within(computation: str) -> int:
            count = 0
            for line in self._computations[computation]:
                trips = [int(each.split('"')[-2]) for each in _TRIPS.findall(line)]
                count += bool(found.search(line)) + math.prod(trips) * sum(map(within, self._called(line)))
            return count

        return within(self._entry)

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
