"""The bytes that a program needs at one time: XLA packs its buffers into one heap, and so does this.

What is dead before a result is written may have its place there, if it is not larger.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .buffers import Buffer, timeline

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
        fitting = (place for place in places if place[0].size >= buffer.size and not _meets(buffer, place))
        place = next(fitting, left)
        place.append(buffer)
    return left


def _meets(buffer: Buffer, others: Sequence[Buffer]) -> bool:
    """Whether a buffer is held while any of the others is."""
    return any(buffer.start <= other.end and other.start <= buffer.end for other in others)


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
