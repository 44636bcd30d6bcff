"""`fori` keeps the index in the state."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from .._loop.loop import Feed, Loop, Step
from .._types import Array, ArrayLike, PyTree


@dataclass(frozen=True)
class Counted:
    """The step that feeds its index to another. Its state is (index, the inner state).

    Attributes:
        step: the inner step.
        stride: 1, or -1 in reverse.
        place: where in the feed the index is.
    """

    step: Step
    stride: int
    place: Literal["x", "position"]

    def __call__(self, consts: PyTree, state: tuple[Array, PyTree], feed: Feed) -> tuple[PyTree, PyTree]:
        index, inner = state
        fed = feed._replace(x=index) if self.place == "x" else feed._replace(position=index)
        inner, y = self.step(consts, inner, fed)
        return (index + self.stride, inner), y


@dataclass(frozen=True)
class Count:
    """`fori`: feeds the positions of a loop as x, from `lower` up.

    The index starts as a Python int. So it has a weak type, and adopts the type of the values it is combined with.
    """

    lower: int
    moves = False

    def __call__(self, loop: Loop) -> Loop:
        return count_from(loop, self.lower + loop.length - 1 if loop.reverse else self.lower)


def count_from(loop: Loop, first: ArrayLike, place: Literal["x", "position"] = "x") -> Loop:
    """Feeds indices as x, or as positions from which keys are folded; the first step is given `first`."""
    step = Counted(loop.step, -1 if loop.reverse else 1, place)
    loop = dataclasses.replace(loop, step=step, state=(first, loop.state))
    return loop.finished(lambda state: state[1])
