"""A transform maps a loop to another. Its stage is its place among the others, and the reason for that place."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from enum import Enum
from typing import Any, ClassVar

from .._loop.feed import Slot
from .._loop.loop import Loop
from .call import Arguments, Call


class Stage(Enum):
    """Where a transform is among the others. Each names its own, as `stage`; no stage names a transform."""

    EXTENDED = "It makes the body another one. All others take the two for one."
    FED = (
        "It makes what the body is fed. All others rely on steps along axis 0, on rows that have been found, and on a "
        "condition that sees the carry as it was given."
    )
    BEGUN = "It changes the init. All that looks at the first state has to see the one that is used."
    WATCHED = (
        "It looks at what the body itself returns. Padding is hidden outside of it, and what a gradient recomputes is "
        "reported once."
    )
    MOVED = "Results are finished from the outermost transform to the innermost: axes move last."
    MASKED = "It hides padding from all that the body does, checks included."
    RESET = "A row is reset before the mask reads its state. So a reset at a valid step shows in that step."
    CUT = (
        "The gradient is cut inside of what is recomputed, so that the recomputed step is cut too, and outside of the "
        "mask, so that the state that padding keeps is cut with its row."
    )
    RECORDED = (
        "It holds outputs in the state, and picks from those that the others keep, so whoever changes y is inside of "
        "it. It is inside of what is recomputed, which takes its step for the body's."
    )
    HELD = "It holds outputs of rows in the state. No transform within may take them for the carry."
    ENDED = "It copies the state of a row where a sequence ends, with the outputs that are held."
    JOINED = "It puts states of the layers' own beside the carry. No transform within may take them for it."
    RECOMPUTED = "It recomputes the step with all that an option adds to it."
    SUMMED = "It carries sums that no step reads. A recomputed step need not save them."
    SKIPPED = "It cuts the loop into chunks. What a gradient recomputes of them depends on what `remat` asked for."
    THINNED = "It asks for chunks that end where an output is kept. The planner joins these with the others."
    SHOWN = "A recomputed chunk must not report again, so reports are outside of all chunks."

    def __init__(self, reason: str) -> None:
        del reason
        self.place = len(type(self).__members__)


class Transform(ABC):
    """One option of a verb: static, hashable and equal by value. It maps a loop to another.

    Attributes:
        stage: where it is among the others.
    """

    stage: ClassVar[Stage]

    @abstractmethod
    def __call__(self, loop: Loop, /) -> Loop:
        """The transformed loop; what undoes the transform in its results goes to `Loop.finish`."""

    def refuse_part(self, call: Call, given: Arguments) -> None:
        """Refuses a loop that is a part of a longer run, with an `offset`, if it cannot be run as the whole would be.

        Raises:
            Fault: for an `ArgumentError`.
        """
        del call, given

    def delivered(self, result: Any) -> Any:
        """The result of a call with this transform, once the program has run: here an option may raise what it found.

        A report for the user goes to the slot `REPORT`.
        """
        return result


REPORT: Slot[Any] = Slot("report")
"""What an option reports of a run to the user, beside the results."""


def in_order(*transforms: Transform | None) -> tuple[Transform, ...]:
    """The transforms that have something to do, innermost first."""
    return tuple(sorted([each for each in transforms if each is not None], key=operator.attrgetter("stage.place")))
