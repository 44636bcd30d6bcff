"""Plans the chunks of a loop: one list of nested sizes for all that ask for chunks, and what goes around each.

Up to four things ask for chunks:

- outputs that are kept in every k-th step alone: a boundary after each of these steps;
- a wish with slots, for example the schedule of padded rows: chunks of its own, each with an entry in the feed;
- wishes without slots, for example recomputation: chunks of about their sizes;
- a wish outside of all others, for example reports of progress.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from typing import TypeAlias

import jax

from .._avals import PyTree, as_arrays, is_weak, types_of
from .._loop.chunk import Level
from .._loop.feed import one_step
from .._loop.loop import Loop
from .._loop.sizes import Wish, plan_sizes
from .._outputs.outputs import boundaries, is_thinned, last_chunk

Places: TypeAlias = dict[int, list[Wish]]
"""The sizes of nested chunks, and for each the wishes that put something around its chunks, innermost first."""


def plan(loop: Loop) -> tuple[Loop, tuple[Level, ...]]:
    """The nested chunks of a loop, and the loop that runs in them.

    First it is decided which wishes have which size. Then each puts something around its chunks, from the innermost
    to the outermost.
    """
    if not (loop.wishes or loop.keeps):
        return loop, ()
    if is_thinned(loop.keeps):
        loop = loop.having(state=_settled(loop))
    others, slotted, outer = list[Wish](), None, None
    for wish in loop.wishes:
        if wish.outside:
            assert outer is None
            outer = wish
        elif wish.slots:
            assert slotted is None
            slotted = wish
        else:
            others.append(wish)
    places = _places(loop, slotted, others)
    if outer is not None:
        places = _with_outer(loop, places, slotted, others, outer)
    levels = list[Level]()
    for size, wishes in sorted(places.items(), key=operator.itemgetter(0)):
        level = Level(size)
        for wish in wishes:
            if wish.put is not None:
                loop, around = wish.put(loop, size)
                level = level.inside(around, wish.slots)
        levels.append(level)
    return loop, tuple(levels)


def _settled(loop: Loop) -> PyTree:
    """The state, its weak types those that a step returns: the first step is the same program as the others."""
    state, _ = types_of(loop.step, loop.consts, loop.state, one_step(loop.xs))
    return jax.tree.map(
        lambda leaf, after: leaf if after.weak_type or not is_weak(leaf) else leaf.astype(after.dtype),
        as_arrays(loop.state),
        state,
    )


def _places(loop: Loop, slotted: Wish | None, others: Sequence[Wish]) -> Places:
    """The place of each wish.

    The wish with slots has its chunks to itself. If no other size is left for recomputation, nothing is recomputed
    beside it: what such a wish puts around its chunks recomputes them anyway.
    """
    if slotted is None:
        return _nearest_places(_sizes(loop, None, others), others)
    # Chunks of one step, or of all steps, whose number may be symbolic, cut nothing.
    cuts = slotted.size not in (loop.length, 1)
    sizes = _sizes(loop, slotted if cuts else None, others)
    # Nearest may be the whole loop: in far smaller chunks than it asks for, it would branch more often than it skips.
    size = _nearest((*sizes, loop.length), slotted.size) if cuts else slotted.size
    return _nearest_places([other for other in sizes if other != size], others) | {size: [slotted]}


def _nearest_places(sizes: Collection[int], wishes: Sequence[Wish]) -> Places:
    """Each wish at the size that is nearest to its own.

    Two at one size are of one plan of recomputation, for which one checkpoint around these chunks is enough: that of
    the larger wish.
    """
    places: Places = {size: [] for size in sizes}
    for wish in sorted(wishes, key=lambda wish: wish.size):
        if sizes and wish.put is not None:
            places[_nearest(sizes, wish.size)] = [wish]
    return places


def _with_outer(loop: Loop, places: Places, slotted: Wish | None, others: Sequence[Wish], outer: Wish) -> Places:
    """The places with that of the outer wish: the smallest size of at least its own that is outside of all others."""
    # Planned together with the others, it may lie within the chunks of an output that is seldom kept.
    together = _places(loop, slotted, [*others, Wish(outer.size)])
    taken = max((size for size, wishes in together.items() if wishes), default=1)
    large = [size for size in together if size >= max(taken, outer.size)]
    if large:
        return together | {min(large): [*together[min(large)], outer]}
    # Its size was rounded down: then it takes the next multiple of the largest size of the others.
    largest = max((size for size, wishes in places.items() if wishes or size < loop.length), default=1)
    size = -(-outer.size // largest) * largest
    return places | {size: [*places.get(size, ()), outer]}


def _sizes(loop: Loop, slotted: Wish | None, others: Sequence[Wish]) -> tuple[int, ...]:
    """The sizes of nested chunks.

    `plan_sizes` replaces exact sizes that do not divide one another by their greatest common divisor, which may be one
    step. So outputs and the wish with slots are not both exact unless they fit:

    - if the user has chosen the chunks, an output that does not fit them, or one before it, is kept in all steps, and
      cut afterwards;
    - if not, the chunks have exactly their size where no output asks for a boundary, and otherwise fit the outputs.
    """
    keeps = loop.keeps or ()
    outputs = boundaries(keeps, loop.length)
    wishes = list(others)
    if slotted is not None:
        if slotted.exact:
            outputs = _fitting(slotted, outputs)
        wishes.append(slotted._replace(exact=slotted.exact or not outputs))
    sizes = plan_sizes(loop.length, [*wishes, *outputs]) if wishes or outputs else ()
    return last_chunk(loop) if not sizes and is_thinned(keeps) else sizes


def _fitting(chosen: Wish, outputs: Sequence[Wish]) -> list[Wish]:
    """The outputs of which each size divides the chosen one and the others, or is a multiple, the first ones first."""
    fit = [chosen]
    for output in outputs:
        if all(output.size % each.size == 0 or each.size % output.size == 0 for each in fit):
            fit.append(output)
    return fit[1:]


def _nearest(sizes: Collection[int], wish: int) -> int:
    """The size with the smallest ratio to the requested one."""
    return min(sizes, key=lambda size: max(size / wish, wish / size))
