"""The buffers of a program as XLA's CPU backend lays them out: what a jaxpr is going to need beside its results.

A plan of what the gradient saves needs these bytes before anything is compiled. No step is hurt: nothing here changes a
program, so that on another backend only the estimate is off.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .._avals import bytes_of
from .._trace.blame import ELEMENTWISE
from .._trace.cost import TRANSCENDENTAL
from .._trace.equations import interpret, loop_of, opened, origins

_SAME = frozenset(
    {"copy", "expand_dims", "mesh_cast", "name", "optimization_barrier", "pcast", "pvary", "reshape",
     "sharding_constraint", "squeeze", "stop_gradient"}
)  # fmt: skip
_FUSED = ELEMENTWISE - {
    "acos", "acosh", "asin", "asinh", "atan", "atanh", "complex", "conj", "copy", "digamma", "lgamma", "name",
    "nextafter", "stop_gradient",
} | {
    "broadcast_in_dim", "concatenate", "dynamic_slice", "iota", "one_minus_square", "pad", "rev", "shift_left",
    "shift_right_logical", "slice", "split", "transpose",
}  # fmt: skip
_REDUCTIONS = frozenset(
    {"argmax", "argmin", "reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_prod", "reduce_sum"}
)
_WRITES_INTO = frozenset({"dynamic_update_slice", "scatter", "scatter-add", "scatter_add"})


class Buffer(NamedTuple):
    """Some bytes, held from one point in time through another; of a result, from when it is written."""

    size: int
    start: int
    end: int
    is_result: bool = False


class Timeline(NamedTuple):
    """The buffers of a program, and how many points in time it takes."""

    buffers: tuple[Buffer, ...]
    duration: int


def timeline(jaxpr: Any) -> Timeline:
    """The buffers of an open jaxpr, beside what it is given. What it returns is marked."""
    return _Layout(jaxpr, {}, whole=True).timeline()


@dataclass(eq=False)
class _Value:
    """A value of a program, whatever it is called."""

    aval: Any

    @property
    def size(self) -> int:
        return bytes_of(self.aval)


@dataclass(eq=False)
class _Operation:
    """An equation, its variables resolved: of calls and of what only changes a shape nothing is left."""

    equation: Any
    reads: list[_Value]
    writes: list[_Value]

    @property
    def name(self) -> str:
        return self.equation.primitive.name

    @property
    def computes_at_once(self) -> bool:
        """Whether it can compute what it reads by itself."""
        return self.name in _FUSED or self.name in _REDUCTIONS


def _inlined(jaxpr: Any, given: Sequence[_Value]) -> tuple[list[_Operation], list[_Value]]:
    """The operations of a jaxpr, and its outputs."""
    operations = list[_Operation]()

    def each(equation: Any, reads: list[_Value]) -> list[_Value]:
        if equation.primitive.name in _SAME and len(reads) == len(equation.outvars):
            return reads
        writes = [_Value(var.aval) for var in equation.outvars]
        operations.append(_Operation(equation, reads, writes))
        return writes

    return operations, interpret(opened(jaxpr), [], given, each, lambda value, aval: _Value(aval))


class _Layout:
    """Lays out one jaxpr.

    Args:
        jaxpr: the jaxpr.
        known: the timelines of jaxprs within jaxprs: each is laid out once.
        carried: the places of the inputs whose buffers it may write over.
        slices: how many of the last inputs are slices that its loop cuts out for each step.
        stacked: how many of the last outputs its loop copies to their places.
        whole: whether it is a program, whose results are to be marked.
    """

    def __init__(
        self,
        jaxpr: Any,
        known: dict[Any, Timeline],
        carried: range = range(0),
        slices: int = 0,
        stacked: int = 0,
        *,
        whole: bool = False,
    ) -> None:
        self._known = known
        self._inputs = [_Value(var.aval) for var in (*jaxpr.constvars, *jaxpr.invars)]
        operations, self._outputs = _inlined(jaxpr, self._inputs)
        wanted, needed = set(self._outputs), list[_Operation]()
        for operation in reversed(operations):  # XLA removes what nobody reads
            if not wanted.isdisjoint(operation.writes):
                needed.append(operation)
                wanted.update(operation.reads)
        self._operations = needed[::-1]
        self._readers: dict[_Value, list[_Operation]] = {}
        for operation in self._operations:
            for value in dict.fromkeys(operation.reads):
                self._readers.setdefault(value, []).append(operation)
        self._writer = {value: operation for operation in self._operations for value in operation.writes}
        self._given = set(self._inputs)
        self._results = {value for value in self._outputs if value in self._writer} if whole else set[_Value]()
        copied = self._results | set(filter(self._is_copied, self._outputs[len(self._outputs) - stacked :]))
        self._outside = {*self._given, *(value for value in self._outputs if value not in copied)}
        self._last = self._last_reads()
        self._add_what_becomes_an_output()
        self._add_what_is_written_over([self._inputs[place] for place in carried])
        self._slices = [v for v in self._inputs[len(self._inputs) - slices :] if self._is_read_whole(v)]

    def _is_copied(self, value: _Value) -> bool:
        """Whether an output has a buffer before it is stacked: what is elementwise is written to its place at once."""
        writer = self._writer.get(value)
        return writer is not None and writer.name not in _FUSED

    def _is_read_whole(self, value: _Value) -> bool:
        return any(not reader.computes_at_once for reader in self._readers.get(value, []))

    def _is_stored(self, value: _Value) -> bool:
        """Whether a value has a buffer, its own or outside: it is not computed by each of its readers."""
        writer = self._writer.get(value)
        if writer is None or writer.name not in _FUSED or value in self._results:
            return True
        shared = writer.name in TRANSCENDENTAL and len(self._readers.get(value, [])) > 1
        return shared or self._is_read_whole(value)

    def _is_run(self, operation: _Operation) -> bool:
        """Whether an operation writes anything."""
        return operation.name not in _FUSED or any(
            value in self._outputs or self._is_stored(value) for value in operation.writes
        )

    def _sources(self, operation: _Operation) -> Iterable[_Value]:
        """The stored values that are read where an operation runs: of what it computes itself, what that reads."""
        found, left = dict[_Value, None](), list(operation.reads)
        seen = set[_Value]()
        while left:
            value = left.pop()
            if value in seen:
                continue
            seen.add(value)
            if self._is_stored(value):
                found[value] = None
            else:
                left += self._writer[value].reads
        return found

    def _last_reads(self) -> dict[_Value, int]:
        last = dict[_Value, int]()
        for number, operation in enumerate(self._operations):
            if self._is_run(operation):
                last.update(dict.fromkeys(self._sources(operation), number))
        for value in self._outputs:
            if not self._is_stored(value):
                last.update(dict.fromkeys(self._sources(self._writer[value]), len(self._operations)))
            elif value not in self._outside:
                last[value] = len(self._operations)
        return last

    def _in_place(self, operation: _Operation) -> list[tuple[_Value, _Value]]:
        """The pairs of what an operation reads and what it writes in that place."""
        if operation.name == "scan":
            _, first, count = loop_of(operation.equation)
            return list(zip(operation.reads[first : first + count], operation.writes[:count], strict=True))
        if operation.name in _WRITES_INTO:
            return [(operation.reads[0], operation.writes[0])]
        return self._handed_on(operation) if operation.name == "cond" else []

    def _handed_on(self, operation: _Operation) -> list[tuple[_Value, _Value]]:
        """The pairs of what a branch is given and what it returns, where one of the branches hands it on."""
        given = operation.reads[1:]
        found = [origins(branch.jaxpr, given) for branch in operation.equation.params["branches"]]
        pairs = zip(operation.writes, zip(*found, strict=True), strict=True)
        return [(before, after) for after, each in pairs for before in dict.fromkeys(each) if before is not None]

    def _add_what_becomes_an_output(self) -> None:
        """What is written over in place until it is returned is in the buffer of what is returned."""
        for number, operation in reversed(list(enumerate(self._operations))):
            for before, after in self._in_place(operation):
                if after in self._outside and before not in self._given and self._last.get(before) == number:
                    self._outside.add(before)

    def _add_what_is_written_over(self, carried: Sequence[_Value]) -> None:
        """What is written over what the program is given, and may change, is in the buffer of that."""
        free = set(carried)
        for number, operation in enumerate(self._operations):
            for before, after in self._in_place(operation):
                if before in free and self._last.get(before) == number:
                    self._outside.add(after)
                    free.add(after)

    def timeline(self) -> Timeline:
        """The buffers, one operation after the other."""
        held = {value: Buffer(value.size, 0, 0) for value in self._slices}
        done, begun, now = list[Buffer](), dict[_Operation, int](), 0
        for number, operation in enumerate(self._operations):
            if not self._is_run(operation):
                continue
            dying = [value for value in self._sources(operation) if self._last[value] == number and value in held]
            direct = [value for value in dying if value in operation.reads]
            within = self._within(operation)
            done += [Buffer(each.size, each.start + now + 1, each.end + now + 1) for each in within.buffers]
            begun[operation], end = now, now + within.duration + 1
            done += self._copies(operation, begun, end)
            for before, after in self._taken_over(operation, direct):
                held[after] = held.pop(before)
            for value in operation.writes:
                if value not in held and value not in self._outside and self._is_stored(value):
                    held[value] = Buffer(value.size, now, now)
            for value in self._results.intersection(operation.writes):
                held[value] = held[value]._replace(is_result=True)
            ended = [v for v in (*dying, *operation.writes) if v in held and self._last.get(v, -1) <= number]
            for value in dict.fromkeys(ended):
                done.append(held.pop(value)._replace(end=end))
            now = end + 1
        done += [buffer._replace(end=now) for buffer in held.values()]
        return Timeline(tuple(done), now + 1)

    def _taken_over(self, operation: _Operation, dying: Sequence[_Value]) -> list[tuple[_Value, _Value]]:
        """The pairs of what is read for the last time and what is written over it."""
        pairs = [pair for pair in self._in_place(operation) if pair[0] in dying]
        if operation.name in _FUSED:
            free = [value for value in dying if not self._is_folded(value)]
            for value in operation.writes:
                kept = self._is_folded(value) or value in self._results
                fits = [other for other in free if other.size == value.size and not kept]
                match = next(iter(fits), None)
                if match is not None:
                    free.remove(match)
                    pairs.append((match, value))
        unique = {before: after for before, after in pairs if after not in self._outside}
        return list(unique.items())

    def _is_folded(self, value: _Value) -> bool:
        """Whether a product reads or writes a value of more than two axes, which XLA folds into two for it."""
        around = [*self._readers.get(value, []), *filter(None, [self._writer.get(value)])]
        return len(value.aval.shape) > 2 and any(operation.name == "dot_general" for operation in around)

    def _within(self, operation: _Operation) -> Timeline:
        """The timeline of what an operation runs."""
        params = operation.equation.params
        if operation.name == "scan":
            jaxpr, first, carried = loop_of(operation.equation)
            slices, stacked = len(jaxpr.invars) - first - carried, len(jaxpr.outvars) - carried
            return self._inner(jaxpr, range(first, first + carried), slices, stacked)
        if operation.name == "cond":
            branches = [branch.jaxpr for branch in params["branches"]]
            return _one_after_another([self._inner(branch, range(len(branch.invars))) for branch in branches])
        if operation.name == "while":
            return _one_after_another([self._inner(params[name].jaxpr) for name in ("cond_jaxpr", "body_jaxpr")])
        return Timeline((), 0)

    def _inner(self, *given: Any) -> Timeline:
        """The timeline of a jaxpr within this one; see the arguments of a layout."""
        if given not in self._known:
            jaxpr, *others = given
            self._known[given] = _Layout(jaxpr, self._known, *others).timeline()
        return self._known[given]

    def _copies(self, operation: _Operation, begun: dict[_Operation, int], end: int) -> list[Buffer]:
        """A product copies an operand of which its batch axes do not lead, or of the second what it sums over.

        One of two matrices does not. The others do so as soon as the other operand can be computed.
        """
        ranks = [len(value.aval.shape) for value in operation.reads]
        if operation.name != "dot_general" or max(ranks) <= 2:
            return []
        (_, summed), batches = operation.equation.params["dimension_numbers"]
        first, second = (tuple(axes) == tuple(range(len(axes))) for axes in batches)
        second = second and tuple(summed) == tuple(range(len(batches[1]), len(batches[1]) + len(summed)))
        copied = list[Buffer]()
        for place, leads in enumerate((first, second)):
            value, other = operation.reads[place], operation.reads[1 - place]
            if not leads and not self._is_written_as_read(value):
                copied.append(Buffer(value.size, self._ready(other, begun, begun[operation]), end))
        return copied

    def _ready(self, value: _Value, begun: dict[_Operation, int], now: int) -> int:
        """When all that a value is computed from is there; one that is given waits for nothing, and is read now."""
        writer = self._writer.get(value)
        writers = [self._writer[source] for source in self._sources(writer) if source in self._writer] if writer else []
        return max((begun[each] + 1 for each in writers), default=now)

    def _is_written_as_read(self, value: _Value) -> bool:
        writer = self._writer.get(value)
        return writer is not None and writer.name in _FUSED and len(self._readers[value]) == 1


def _one_after_another(timelines: Sequence[Timeline]) -> Timeline:
    buffers, now = list[Buffer](), 0
    for each in timelines:
        buffers += [Buffer(size, start + now, end + now) for size, start, end, _ in each.buffers]
        now += each.duration
    return Timeline(tuple(buffers), now)


_SMALL = 4096
"""Buffers that are so many times smaller than all others together are not packed, but added."""


def temporary_bytes(jaxpr: Any) -> int:
    """What an open jaxpr needs beside its arguments and results."""
    return packed_size(_beside_results(timeline(jaxpr).buffers))


def _beside_results(buffers: Sequence[Buffer]) -> list[Buffer]:
    """The buffers that have no place where a result is written later."""
    places = [[buffer] for buffer in sorted(buffers) if buffer.is_result]  # the smallest that fits is taken
    left = list[Buffer]()
    for buffer in sorted((each for each in buffers if not each.is_result), reverse=True):
        fitting = (
            place
            for place in places
            if place[0].size >= buffer.size
            and not any(buffer.start <= other.end and other.start <= buffer.end for other in place)
        )
        next(fitting, left).append(buffer)
    return left


def packed_size(buffers: Sequence[Buffer]) -> int:
    """The size of a heap, the largest buffers first, each in the smallest gap that is free while it is held."""
    least = held_at_most(buffers) // _SMALL
    small = [buffer for buffer in buffers if buffer.size <= least]
    large = sorted((buffer for buffer in buffers if buffer.size > least), key=lambda each: (-each.size, each.start))
    starts, ends, offsets, tops = (np.zeros(len(large), np.int64) for _ in range(4))
    for number, buffer in enumerate(large):
        at_once = (starts[:number] <= buffer.end) & (ends[:number] >= buffer.start)
        place = _smallest_gap(offsets[:number][at_once], tops[:number][at_once], buffer.size)
        starts[number], ends[number] = buffer.start, buffer.end
        offsets[number], tops[number] = place, place + buffer.size
    return int(tops.max(initial=0)) + held_at_most(small)


def _smallest_gap(offsets: np.ndarray[Any, Any], tops: np.ndarray[Any, Any], size: int) -> int:
    """Where so many bytes fit between those that are taken; behind all of them if there is no gap."""
    order = np.argsort(offsets, kind="stable")
    offsets, reached = offsets[order], np.maximum.accumulate(np.concatenate([[0], tops[order]]))
    gaps = offsets - reached[:-1]
    fits = np.flatnonzero(gaps >= size)
    return int(reached[fits[np.argmin(gaps[fits])]] if len(fits) else reached[-1])


def held_at_most(buffers: Sequence[Buffer]) -> int:
    """The most bytes that are held at one time."""
    if not buffers:
        return 0
    changes = np.zeros(max(buffer.end for buffer in buffers) + 2, np.int64)
    for size, start, end, _ in buffers:
        changes[start] += size
        changes[end + 1] -= size
    return int(np.cumsum(changes).max())
