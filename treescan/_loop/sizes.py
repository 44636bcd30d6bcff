"""Plans the sizes of nested chunks: one list of sizes for all transforms that ask for chunks."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable
from typing import Any, NamedTuple


class Wish(NamedTuple):
    """The wish of one transform: a boundary every `size` steps, exactly or approximately.

    Attributes:
        size: the steps of a chunk.
        exact: whether the boundaries have to be there.
        around: what is put around the chunks that come nearest to it, as for `Level.around`; None: nothing.
        schedule: makes, from the loop and the size that was planned, the loop with a schedule for its chunks, and what
            is put around them. One transform at most has one. None: the chunks have no schedule.
        ticks: the same for what is reported after each chunk; no more chunks are made than were asked for, and these
            lie around all others that have something put around them.
    """

    size: int
    exact: bool = False
    around: Any = None
    schedule: Any = None
    ticks: Any = None


def plan_sizes(length: int, wishes: Iterable[Wish]) -> tuple[int, ...]:
    """One list of nested sizes for all wishes, so that features do not each nest loops and copies of the body.

    Exact wishes keep their boundaries: where they do not divide one another, their greatest common divisor has them
    all. The others are moved to the nearest size (in ratio) that divides the next larger exact one and is a multiple
    of the next smaller one, and two of them that lie within a factor of two become one.

    Returns:
        Ascending sizes, each dividing the next, all above 1 and below `length`.
    """
    wishes = list(wishes)
    chain = _divisor_chain({wish.size for wish in wishes if wish.exact})
    for size in sorted(wish.size for wish in wishes if not wish.exact):
        if not any(size / 2 < other < size * 2 for other in chain):
            chain = sorted({*chain, _fit(size, chain)})
    return tuple(size for size in chain if 1 < size < length)


def _divisor_chain(sizes: set[int]) -> list[int]:
    chain = sorted(sizes)
    if any(large % small for small, large in itertools.pairwise(chain)):
        return [math.gcd(*chain)]
    return chain


def _fit(size: int, chain: list[int]) -> int:
    """The size nearest to a wish that keeps every element of the chain dividing the next."""
    below = max((other for other in chain if other <= size), default=1)
    above = min((other for other in chain if other > size), default=None)
    if above is None:
        return max(1, round(size / below)) * below
    fits = [below * k for k in range(1, above // below + 1) if above % (below * k) == 0]
    return min(fits, key=lambda other: abs(math.log(other / size)))


@functools.lru_cache(maxsize=4096)
def divide(length: int, levels: int, first: int | None = None) -> tuple[int, ...]:
    """Sizes of nested chunks that cut a loop into so many levels, with few parts in each.

    Args:
        length: the steps of the loop.
        levels: how many levels there are to be; fewer come out where the loop is too short.
        first: the size of the innermost chunks; None: to be chosen.

    Returns:
        At most `levels - 1` ascending sizes, each dividing the next. Sizes that leave no remainder come first, and
        then those that leave a small one: what is cut in two is copied.
    """
    if levels < 2 or length < 4:
        return ()
    root = length ** (1 / levels)
    sizes = [first] if first else _near(root, length)
    candidates = [(size, *(size * next_size for next_size in divide(length // size, levels - 1))) for size in sizes]
    fitting = [candidate for candidate in candidates if candidate[0] > 1 and candidate[-1] < length]
    return min(fitting, key=lambda chain: _parts_with_remainder(length, chain), default=())


_NEAREST = 24


def _near(root: float, length: int) -> list[int]:
    """Sizes within a factor of two of a root: those that divide the length, and the nearest of the others."""
    within = range(max(2, math.ceil(root / 2)), max(3, math.floor(root * 2) + 1))
    nearest = sorted(within, key=lambda size: abs(math.log(size / root)))
    dividing = [size for size in nearest if length % size == 0]
    return [*dividing[:_NEAREST], *(size for size in nearest[:_NEAREST] if length % size)]


def count_parts(length: int, sizes: tuple[int, ...]) -> int:
    """How many carries are saved at once: the parts of each level, from the outermost down to single steps."""
    if not sizes:
        return length
    parts = -(-length // sizes[-1])
    return parts + sum(large // small for small, large in itertools.pairwise((1, *sizes)))


def _parts_with_remainder(length: int, sizes: tuple[int, ...]) -> float:
    rest = length % sizes[-1]
    return count_parts(length, sizes) * (1.25 if rest else 1) + rest


LARGEST, SMALLEST, FEWEST = 16, 8, 4
"""Of the chunk that is chosen for the user: the most and the least steps, and of how many a short loop is made."""


def chunk_size(length: int) -> int:
    """The steps of a chunk for a loop: 16, fewer for short loops, and near that a divisor, so that nothing remains."""
    size = min(LARGEST, max(SMALLEST, length // FEWEST))
    near = [other for other in range(size // 2 + 1, size * 2) if length % other == 0 and other < length]
    return min(near, key=lambda other: abs(other - size), default=size)
