"""Runs a transformed loop in its chunks, then undoes the transforms on the results."""

from __future__ import annotations

from collections.abc import Sequence

from .._loop.chunk import Level, run_chunked
from .._loop.loop import Loop
from .._loop.run import run
from .._loop.sizes import Wish, plan_sizes
from .._types import PyTree
from .outputs import Keep, boundaries, is_thinned
from .thin import last_chunk, run_keeping


def run_nested(loop: Loop) -> tuple[PyTree, PyTree]:
    """Runs a loop and finishes its results; without wishes, this is its `jax.lax.scan` and nothing else."""
    if loop.runner is not None:
        state, ys = loop.runner(loop)
    elif loop.keeps is not None:
        state, ys = run_keeping(loop, levels_for(loop, loop.wishes, loop.keeps), loop.keeps)
    elif loop.wishes:
        state, ys = run_chunked(loop, levels_for(loop, loop.wishes))
    elif loop.finish:
        state, ys = run(loop)
    else:
        return run(loop)  # in the container that the body chose for its pair
    return finish(loop, state, ys)


def finish(loop: Loop, state: PyTree, ys: PyTree) -> tuple[PyTree, PyTree]:
    """A loop's results in the terms of the loop that its first transform was given."""
    for undo in reversed(loop.finish):
        state, ys = undo(state, ys)
    return state, ys


def levels_for(loop: Loop, wishes: Sequence[Wish], keeps: Sequence[Keep] = ()) -> tuple[Level, ...]:
    """One list of nested chunks for all wishes, and for the outputs that are not kept in all steps."""
    thinned = is_thinned(keeps)
    sizes = plan_sizes(loop.length, [*wishes, *boundaries(keeps, loop.length)]) if wishes or thinned else ()
    if not sizes and thinned:
        sizes = last_chunk(loop)
    return levels_of(sizes, wishes)


def levels_of(sizes: Sequence[int], wishes: Sequence[Wish]) -> tuple[Level, ...]:
    """Levels of the given sizes. What a wish puts around its chunks goes to the size that comes nearest to it."""
    if not sizes:
        return ()
    around = {nearest(sizes, wish.size): wish.around for wish in wishes if wish.around is not None}
    return tuple(Level(size, around.get(size)) for size in sizes)


def nearest(sizes: Sequence[int], wish: int) -> int:
    """The size that comes nearest to a wished one, in ratio."""
    return min(sizes, key=lambda size: max(size / wish, wish / size))
