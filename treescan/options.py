"""Options of your own: `scan(..., options=[Clip(4.0)])` puts what an object does around each step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from enum import Enum
from typing import Any, ClassVar

from ._avals import Array, PyTree
from ._loop.feed import Feed, Slot
from ._loop.loop import Step

__all__ = ["Around", "Feed", "Option", "Slot", "Step"]


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name[0] == "_")]


class Around(Enum):
    """What an option of your own is put around; the value says what it then sees.

    The three give the same values if the option changes none; from `MASK` on, it changes those of padded rows too. They
    may give different gradients and effects: one that clips cotangents sees those of padded rows only from `MASK` on,
    and one that prints does so again wherever it is recomputed.
    """

    BODY = (
        "The body. The option is given the carry and x that the body is given, and may return another y. Padding is "
        "hidden outside of it, and what the gradient recomputes holds it."
    )
    MASK = (
        "The step of all rows, padded ones included, but not of chunks that are skipped, nor of rows that `compact` "
        "leaves out. The state is a list of the arrays that steps change, with what other options added to it. What "
        "the gradient recomputes holds the option."
    )
    REMAT = (
        "The step that `remat` recomputes. The state is as for `MASK`. What the option itself computes is saved, but "
        "where `remat` recomputes chunks of steps."
    )


class Option(ABC):
    """What an option of your own does in each step. A subclass is a dataclass with `frozen=True`, without arrays.

    It is given to a verb as an item of `options=[...]`. The first of several is the innermost, among those that are
    around the same. An object is part of the key of the compiled program: it needs a hash. Two objects share a program
    if they are equal and what they hold is the same: 1, 1.0 and True are not, and neither are 0.0 and -0.0.

    Attributes:
        around: what it is put around; `BODY` if the class does not say.
    """

    around: ClassVar[Around] = Around.BODY

    @abstractmethod
    def __call__(self, step: Step, consts: PyTree, state: PyTree, feed: Feed, /) -> tuple[PyTree, PyTree]:
        """Runs a step, with what the option adds.

        Args:
            step: the step: `step(consts, state, feed) -> (state, y)`.
            consts: arrays that every step is given. They are handed to `step` unchanged.
            state: what goes from step to step; see `Around`. The returned one has the same structure and types as that
                of `step`.
            feed: what this step is given, `feed.x` among it.

        Returns:
            The next state, and y.
        """

    def feeds(self, length: int) -> Mapping[Slot[Any], Array]:
        """What each step is given besides: for each `Slot` an array `[length, ...]`; `slot.of(feed)` reads it.

        Args:
            length: the number of steps.
        """
        del length
        return {}
