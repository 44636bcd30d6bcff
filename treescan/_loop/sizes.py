"""The sizes of chunks: the wishes of transforms, and one list of nested sizes that serves all of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeAlias

from .feed import Slot
from .loop import Loop, Step

AroundChunk: TypeAlias = Callable[[Step, bool], Step]
"""What is put around the step that runs a chunk: `around(step, looped)`, where `looped` tells whether that step is the
step of a loop, or runs once, for the remainder."""

Put: TypeAlias = Callable[[Loop, int], tuple[Loop, AroundChunk]]
"""Makes, from the loop and the size that was planned, what is put around the chunks, and the loop that feeds them."""


class Wish(NamedTuple):
    """The wish of one transform: a boundary every `size` steps, exactly or approximately.

    Attributes:
        size: the steps of a chunk.
        exact: whether the boundaries have to be there.
        put: makes what is put around the chunks that come nearest to it; None: nothing is.
        slots: the slots that `put` fills with an entry for each chunk. Such a wish has its chunks, whatever the length,
            and gives way to kept outputs alone. One transform at most has one, beside that with `outside`.
        outside: whether this is put around all else that is put around chunks, which then have at least this size. One
            transform at most has one.
    """

    size: int
    exact: bool = False
    put: Put | None = None
    slots: tuple[Slot[Any], ...] = ()
    outside: bool = False

    @classmethod
    def around(cls, size: int, around: AroundChunk) -> Wish:
        """A wish for approximately this size, with the same around chunks of any size."""
        return cls(size, put=lambda loop, size: (loop, around))


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
    return tuple([size for size in chain if 1 < size < length])


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


LARGEST, SMALLEST, FEWEST = 16, 8, 4
"""Of the chunk that is chosen for the user: the most and the least steps, and of how many a short loop is made."""


def chunk_size(length: int, largest: int = LARGEST) -> int:
    """The steps of a chunk for a loop: 16, fewer for short loops, and near that a divisor, so that nothing remains."""
    size = min(largest, max(SMALLEST, length // FEWEST))
    near = [other for other in range(size // 2 + 1, size * 2) if length % other == 0 and other < length]
    return min(near, key=lambda other: abs(other - size), default=size)
