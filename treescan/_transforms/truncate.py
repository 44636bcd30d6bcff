"""`truncate`: the gradient is cut between stretches of steps, as truncated backpropagation through time does."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from .._loop import Feed, Loop, Step
from .._types import Array, PyTree
from .rows import select


@dataclass(frozen=True)
class Truncated:
    """A step before which the gradient is cut where its feed says so. Its state is a list of leaves."""

    step: Step

    def __call__(self, consts: PyTree, state: list[Array], feed: Feed) -> tuple[PyTree, PyTree]:
        assert feed.cut is not None
        return self.step(consts, [_cut(feed.cut, leaf) for leaf in state], feed._replace(cut=None))


def _cut(cut: Array, leaf: Array) -> Array:
    if not jnp.issubdtype(leaf.dtype, jnp.inexact):
        return leaf
    return select(cut, jax.lax.stop_gradient(leaf), leaf)


def truncate(loop: Loop, size: int) -> Loop:
    """Cuts the gradient at the positions that `size` divides, in reverse too.

    Args:
        loop: the loop, its state a list of the leaves that change.
        size: the steps of a stretch.
    """
    position = jnp.arange(loop.length)
    if loop.reverse:  # a stretch begins with its highest position
        cut = ((position + 1) % size == 0) & (position + 1 < loop.length)
    else:
        cut = (position % size == 0) & (position > 0)
    return dataclasses.replace(loop, step=Truncated(loop.step), xs=loop.xs._replace(cut=cut))
