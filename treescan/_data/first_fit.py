"""Assigns sequences to rows by first-fit decreasing, and searches for the best length of a row."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Ints: TypeAlias = npt.NDArray[np.int64]

_CANDIDATES = 64  # lengths to choose from where the user leaves the choice
_EXACT = 32  # so many lengths are tried without leaving any out
_CLOSE = 512  # what is gained by less than this part is not searched for


class Fit(NamedTuple):
    """Where each sequence goes, in the order of the lengths that were given.

    `slack` is how much longer the rows would have to be for any sequence to go elsewhere, 0 if none ever would.
    """

    length: int
    rows: int
    row: Ints
    start: Ints
    slack: int


def first_fit(lengths: Ints, length: int, most: int | None = None) -> Fit:
    """Puts the longest sequence that is left into the first row with enough room for it, and so on.

    Sequences of one length are placed together: a few array operations a length, however many sequences have it.
    (D. S. Johnson, Near-optimal bin packing algorithms, 1973: at most 11/9 of the fewest rows, and one more.)

    Args:
        lengths: those of the sequences, from 0 up. One of length 0 occupies nothing, and is at the start of row 0.
        length: that of the rows, from the longest sequence's up.
        most: gives up when there are more rows than so many.
    """
    free: Ints = np.full(len(lengths), length, np.int64)  # of each row; the first `rows` are in use
    row: Ints = np.zeros(len(lengths), np.int64)
    start: Ints = np.zeros(len(lengths), np.int64)
    rows, slack = 0, 0
    for size, group in _by_length(lengths):
        chosen = np.flatnonzero(free[:rows] >= size)
        missing = len(group) - int((free[chosen] // size).sum())
        opened = max(0, -(-missing // (length // size)))
        chosen = np.concatenate([chosen, np.arange(rows, rows + opened)])
        room = free[chosen] // size
        first = np.cumsum(room) - room  # the place in the group of the first sequence in each row
        took = np.clip(len(group) - first, 0, room)
        row[group] = np.repeat(chosen, took)
        nth = np.arange(len(group)) - np.repeat(first, took)
        start[group] = length - free[row[group]] + nth * size
        free[chosen] -= took * size
        rows += opened
        short = size - free[:rows]
        slack = min(filter(None, (slack, int(short.min(initial=size, where=short > 0)))))
        if most is not None and rows > most:
            break
    return Fit(length, rows, row, start, slack)


def _by_length(lengths: Ints) -> list[tuple[int, Ints]]:
    """The sequences of each length from 1 up, by their positions: the longest first, ties in the user's order."""
    order = np.argsort(-lengths, kind="stable")
    order = order[lengths[order] > 0]
    ends = np.flatnonzero(np.diff(lengths[order])) + 1
    return [(int(lengths[group[0]]), group) for group in np.split(order, ends) if len(group)]


def shortest_fit(lengths: Ints, rows: int) -> Fit:
    """The shortest rows of which first-fit decreasing needs no more than `rows`.

    Longer rows may need more of them, so that a bisection can miss the shortest. From the least length that could do
    we go to the next that changes anything; past 32 of them in strides of 1/512, to be done with it.
    """
    fit, tried = first_fit(lengths, _least_length(lengths, rows), most=rows), 1
    while fit.rows > rows:
        longer = fit.length + max(fit.slack, 1 if tried < _EXACT else fit.length // _CLOSE)
        fit, tried = first_fit(lengths, longer, most=rows), tried + 1
    return fit


def _least_length(lengths: Ints, rows: int) -> int:
    """A bound from below on the length of so many rows that hold all.

    Of the longest k rows + 1 sequences, k + 1 share a row, whichever: at least the shortest k + 1 of them.
    """
    longest_first = np.sort(lengths)[::-1]
    total = np.concatenate([[0], np.cumsum(longest_first)])
    k = np.arange((len(lengths) - 1) // rows + 1)
    crowded = total[k * rows + 1] - total[k * rows - k]
    return max(int(crowded.max()), -(-int(total[-1]) // rows))


def least_fit(lengths: Ints) -> Fit:
    """Rows of the length that takes the fewest steps in all, from the longest sequence's to twice that.

    Of up to 64 lengths those are tried that could do better than the best so far, by 1/512 at least where that is a
    step or more; of equals the shortest is taken.
    """
    longest = int(lengths.max())
    if not longest:
        return first_fit(lengths, 0)
    candidates = np.unique(np.linspace(longest, 2 * longest, _CANDIDATES).astype(np.int64))
    bounds = sorted((int(length) * _fewest_rows(lengths, int(length)), int(length)) for length in candidates)
    best: Fit | None = None
    for bound, length in bounds:
        if best is None or (bound + bound // _CLOSE, length) < _cost(best):
            fit = first_fit(lengths, length, most=_cost(best)[0] // length if best else None)
            best = min(best or fit, fit, key=_cost)
    assert best is not None
    return best


def _cost(fit: Fit) -> tuple[int, int]:
    return fit.rows * fit.length, fit.length


def _fewest_rows(lengths: Ints, length: int) -> int:
    """A bound from below on the number of rows of a length: no two of more than half of it share one."""
    return max(-(-int(lengths.sum()) // length), int(np.count_nonzero(2 * lengths > length)))
