"""`fori`: the index is a part of the state, as it is in `jax.lax.fori_loop`; so are positions of unknown number."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from .._loop import Feed, Loop, Step
from .._types import Array, ArrayLike, PyTree


@dataclass(frozen=True)
class Counted:
    """The step that feeds its index to another. Its state is (index, the inner state).

    Attributes:
        step: the inner step.
        stride: 1, or -1 in reverse.
    """

    step: Step
    stride: int

    def __call__(self, consts: PyTree, state: tuple[Array, PyTree], feed: Feed) -> tuple[PyTree, PyTree]:
        index, inner = state
        inner, y = self.step(consts, inner, feed._replace(x=index))
        return (index + self.stride, inner), y


@dataclass(frozen=True)
class Positioned:
    """The step that feeds its position to another, from which a key is folded. Its state is (position, the inner)."""

    step: Step
    stride: int

    def __call__(self, consts: PyTree, state: tuple[Array, PyTree], feed: Feed) -> tuple[PyTree, PyTree]:
        position, inner = state
        inner, y = self.step(consts, inner, feed._replace(position=position))
        return (position + self.stride, inner), y


def count(loop: Loop, lower: int) -> Loop:
    """Feeds the positions of a loop, from `lower` up, as x.

    A Python int to begin with, the index keeps a weak type, and takes on that of what it is mixed with.
    """
    return count_from(loop, lower + loop.length - 1 if loop.reverse else lower)


def count_from(loop: Loop, first: ArrayLike) -> Loop:
    """Feeds indices as x, of which the first step is given `first`."""
    return dataclasses.replace(loop, step=Counted(loop.step, -1 if loop.reverse else 1), state=(first, loop.state))


def position_from(loop: Loop, first: ArrayLike) -> Loop:
    """Feeds positions, of which the first step is given `first`."""
    return dataclasses.replace(loop, step=Positioned(loop.step, -1 if loop.reverse else 1), state=(first, loop.state))
