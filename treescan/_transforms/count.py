"""`fori`: the index is a part of the state, as it is in `jax.lax.fori_loop`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from .._loop import Feed, Loop, Step
from .._types import Array, PyTree


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


def count(loop: Loop, lower: int) -> Loop:
    """Feeds the positions of a loop, from `lower` up, as x.

    A Python int to begin with, the index keeps a weak type, and takes on that of what it is mixed with.
    """
    first, stride = (lower + loop.length - 1, -1) if loop.reverse else (lower, 1)
    return dataclasses.replace(loop, step=Counted(loop.step, stride), state=(first, loop.state))
