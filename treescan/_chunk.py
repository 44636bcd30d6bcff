"""`chunk`, the one combinator over loops: a loop whose step runs a loop, plus the remainder; and its planner."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ._loop import Body, Feed, Loop, Step, run
from ._types import PyTree


@dataclass(frozen=True)
class RunChunk:
    """A step that runs `length` steps of another, over the stretch of xs that it is fed."""

    body: Body
    step: Step
    length: int
    sizes: tuple[int, ...]
    reverse: bool
    unroll: int | bool
    lowering: tuple[tuple[str, Any], ...]

    def __call__(self, consts: PyTree, state: PyTree, feed: Feed) -> tuple[PyTree, PyTree]:
        inner = Loop(self.body, self.step, consts, state, feed, self.length, self.reverse, self.unroll, self.lowering)
        return run_chunked(inner, self.sizes)


class Chunked(NamedTuple):
    """A loop in two parts: `main` runs whole chunks, `rest` the steps that fill none, at the highest positions."""

    main: Loop | None
    rest: Loop | None


def chunk(loop: Loop, sizes: tuple[int, ...]) -> Chunked:
    """Splits a loop at the multiples of the largest size, and its chunks at those of the smaller ones.

    Main part, remainder and every level share the loop's own step, so that lax.scan traces the body once.

    Args:
        loop: the loop.
        sizes: ascending, each dividing the next; at least one.
    """
    *inner, size = sizes
    count, left = divmod(loop.length, size)
    main = rest = None
    if count:
        main = dataclasses.replace(
            loop,
            step=RunChunk(loop.body, loop.step, size, tuple(inner), loop.reverse, loop.unroll, loop.lowering),
            xs=jax.tree.map(lambda leaf: _head(leaf, count * size).reshape(count, size, *leaf.shape[1:]), loop.xs),
            length=count,
            unroll=1,
        )
    if left:
        xs = jax.tree.map(lambda leaf: jax.lax.slice_in_dim(leaf, count * size, None), loop.xs)
        rest = dataclasses.replace(loop, xs=xs, length=left)
    return Chunked(main, rest)


def _head(leaf: Any, steps: int) -> Any:
    return leaf if leaf.shape[0] == steps else jax.lax.slice_in_dim(leaf, 0, steps)


def run_chunked(loop: Loop, sizes: tuple[int, ...]) -> tuple[PyTree, PyTree]:
    """Runs a loop in nested chunks; the results are those of `run`."""
    if not sizes or loop.length <= sizes[0]:
        return run(loop)
    main, rest = chunk(loop, sizes)
    if main is None:
        return run_chunked(loop, sizes[:-1])
    if rest is None:
        return _run_main(main)
    if loop.reverse:
        state, last = run_chunked(rest, sizes[:-1])
        state, first = _run_main(dataclasses.replace(main, state=state))
    else:
        state, first = _run_main(main)
        state, last = run_chunked(dataclasses.replace(rest, state=state), sizes[:-1])
    return state, jax.tree.map(lambda a, b: jnp.concatenate([a, b]), first, last)


def _run_main(main: Loop) -> tuple[PyTree, PyTree]:
    state, ys = run(main)
    return state, jax.tree.map(lambda y: y.reshape(y.shape[0] * y.shape[1], *y.shape[2:]), ys)


class Wish(NamedTuple):
    """What one feature asks of the chunks: a boundary every `size` steps; exactly there, or about there."""

    size: int
    exact: bool = False


def plan_sizes(length: int, wishes: Iterable[Wish]) -> tuple[int, ...]:
    """One list of nested sizes for all wishes, so that no two features nest loops, and copies of the body, each.

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
