"""The order of transforms, innermost first: one table for all verbs, with the reason for each place."""

from __future__ import annotations

from typing import NamedTuple

from .._loop.loop import Transform


class Place(NamedTuple):
    """A place in the order.

    Attributes:
        transforms: the classes that have this place, by name: what no call asks for need not be imported.
        reason: why it is there.
    """

    transforms: tuple[str, ...]
    reason: str


ORDER = (
    Place(
        ("OverAxes", "InChunks", "ComputeOnce", "Count", "OverRows", "EndEarly"),
        "They make what the body is fed. All others rely on steps along axis 0, on rows that have been found, and on a "
        "condition that sees the carry as it was given.",
    ),
    Place(
        ("BeginSegments",), "It changes the init. All that looks at the first state has to see the one that is used."
    ),
    Place(
        ("CheckFinite",),
        "They look at what the body itself returns. Padding is hidden outside of them, and what a gradient recomputes "
        "is reported once.",
    ),
    Place(("MoveOutputs",), "Results are finished from the outermost transform to the innermost: axes move last."),
    Place(("Mask",), "It hides padding from all that the body does, checks included."),
    Place(
        ("ResetRows",), "A row is reset before the mask reads its state. So a reset at a valid step shows in that step."
    ),
    Place(
        ("Truncate",),
        "It is inside of what is recomputed, so that the recomputed step is cut too, and outside of the mask, so that "
        "the state that padding keeps is cut with its row.",
    ),
    Place(
        ("RecordOutputs",),
        "It holds outputs in the state, and picks from those that the others keep. It is inside of what is recomputed, "
        "which takes its step for the body's.",
    ),
    Place(("KeepRows",), "It holds outputs in the state. No transform within may take them for the carry."),
    Place(("EndsOfSequences",), "It copies the state of a row where a sequence ends, with the outputs that are held."),
    Place(
        ("CarryStates",),
        "It puts the layers' own states beside the carry. No transform within may take them for it.",
    ),
    Place(("Recompute",), "It recomputes the step with all that an option adds to it."),
    Place(("SumChunks",), "It carries sums that no step reads. A recomputed step need not save them."),
    Place(
        ("Skip",), "It cuts the loop into chunks. What a gradient recomputes of them depends on what `remat` asked for."
    ),
    Place(
        ("KeepOutputs",),
        "It asks for chunks that end where an output is kept. The planner joins these with the others.",
    ),
    Place(("ShowProgress",), "A recomputed chunk must not report again, so reports are outside of all chunks."),
)

_PLACES = {transform: place for place, row in enumerate(ORDER) for transform in row.transforms}


def in_order(*transforms: Transform | None) -> tuple[Transform, ...]:
    """The transforms that have something to do, innermost first."""
    return tuple(
        sorted((each for each in transforms if each is not None), key=lambda each: _PLACES[type(each).__name__])
    )
