"""`truncate`: the gradient is cut between stretches of steps, as truncated backpropagation through time does."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from .._loop import Feed, Loop, Step
from .._types import Array, PyTree
from .axes import LeafAxes
from .batch_axes import RowLoop
from .rows import expand, select


@dataclass(frozen=True)
class Truncated:
    """A step before which the gradient is cut where its feed says so. Its state is a list of leaves.

    Attributes:
        step: the inner step.
        axes: for each leaf where the shape of the flag starts; None: it is cut where any flag is set.
        fixed: for each leaf whether no step changes it; None: none of them is such.
    """

    step: Step
    axes: LeafAxes
    fixed: tuple[bool, ...] | None = None

    def __call__(self, consts: PyTree, state: list[Array], feed: Feed) -> tuple[PyTree, PyTree]:
        cut = feed.cut
        assert cut is not None
        fixed = self.fixed or (False,) * len(state)
        leaves = [
            leaf if is_fixed or not jnp.issubdtype(leaf.dtype, jnp.inexact) else _cut(cut, leaf, axis)
            for leaf, axis, is_fixed in zip(state, self.axes, fixed, strict=True)
        ]
        return self.step(consts, leaves, feed._replace(cut=None))


def _cut(cut: Array, leaf: Array, axis: int | None) -> Array:
    flags = jnp.any(cut) if axis is None else expand(cut, leaf, axis)
    return select(flags, jax.lax.stop_gradient(leaf), leaf)


def truncate(loop: Loop, size: int, fixed: tuple[bool, ...] | None = None) -> Loop:
    """Cuts the gradient at the positions that `size` divides, in reverse too.

    Args:
        loop: the loop, its state a list of leaves.
        size: the steps of a stretch.
        fixed: for each leaf whether no step changes it; None: those have left the state.
    """
    position = jnp.arange(loop.length)
    if loop.reverse:  # a stretch begins with its highest position
        cut = ((position + 1) % size == 0) & (position + 1 < loop.length)
    else:
        cut = (position % size == 0) & (position > 0)
    step = Truncated(loop.step, (0,) * len(loop.state), fixed)
    return dataclasses.replace(loop, step=step, xs=loop.xs._replace(cut=cut))


def truncate_rows(rows: RowLoop, size: int, fixed: tuple[bool, ...] | None = None) -> RowLoop:
    """The same for each row by itself: between two valid steps of it that lie in different stretches."""
    loop, axes = rows
    valid, length = loop.xs.valid, loop.length
    assert valid is not None
    position = jnp.arange(length).reshape(-1, *(1 for _ in valid.shape[1:]))
    if loop.reverse:
        run = jax.lax.cummin(jnp.where(valid, position, length), reverse=True)
        before = jnp.concatenate([run[1:], jnp.full_like(run[:1], length)])
        begun = before < length
    else:
        run = jax.lax.cummax(jnp.where(valid, position, -1))
        before = jnp.concatenate([jnp.full_like(run[:1], -1), run[:-1]])
        begun = before >= 0
    cut = valid & begun & (before // size != position // size)
    loop = dataclasses.replace(loop, step=Truncated(loop.step, axes.state, fixed), xs=loop.xs._replace(cut=cut))
    return rows._replace(loop=loop)
