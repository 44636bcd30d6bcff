"""How a body is called: its parameters, and its words for a step."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .._avals import PyTree
from .._loop.loop import Body

if TYPE_CHECKING:
    from .annotations import Scope


@dataclass(frozen=True, eq=False)
class Convention:
    """The convention that a verb's body follows. There is one object for each, equal to itself alone.

    Attributes:
        verb: the verb's name.
        call: how it is called, for messages.
        takes: the body's positional parameters, for messages.
        place: where among them the carry is.
        spread: whether x is a tuple of arguments, which the arguments that all steps share follow.
        pair: whether the body returns a pair of the carry and y; else the carry alone.
        stacks: whether the carry after each step is what is stacked.
        other: the verb whose body returns the other of the two, if there is one.
        further: where other arguments of the body come from, for messages.
        stateful: whether the last item of x is a state, which the body returns behind the carry.
        records: from a carry and an x to those that a record of a step holds for the user.
    """

    verb: str
    call: str
    takes: tuple[str, ...] = ("carry", "x")
    place: int = 0
    spread: bool = False
    pair: bool = False
    stacks: bool = False
    other: str = "scan"
    further: str = "Bind other arguments first, `functools.partial({step}, ...)`"
    stateful: bool = False
    records: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]] | None = None

    @property
    def carry(self) -> str:
        """The name of the carry where the body's own name does not matter."""
        return self.takes[self.place]

    @property
    def or_alone(self) -> str:
        """For messages: the verb to call with a body that returns the carry alone."""
        return f", or call `treescan.{self.other}`, whose body returns {{the_carry}} alone" if self.other else ""


SCAN = Convention("scan", "scan(step, init, xs)", pair=True, other="fold")
MASK_SCAN = dataclasses.replace(SCAN, verb="mask_scan", call="mask_scan(step, init, xs, lengths=lengths)")
WHILE_SCAN = dataclasses.replace(SCAN, verb="while_scan", call="while_scan(cond, step, init, xs)", other="")
STREAM = dataclasses.replace(SCAN, verb="stream", call="stream(step, init, source, part=part)", other="")
FOLD = Convention("fold", "fold(step, init, xs)")
ACCUMULATE = dataclasses.replace(FOLD, verb="accumulate", call="accumulate(step, init, xs)", stacks=True)
FORI = Convention("fori", "fori(lower, upper, step, init)", ("i", "carry"), place=1)
FOLD_LAYERS = Convention(
    "fold_layers",
    "fold_layers(block, x, layers)",
    ("layer", "x"),
    place=1,
    spread=True,
    other="scan_layers",
    further="Pass what all layers share as `args=(...)`, and what differs between layers as `xs`. A parameter with "
    "a default may be left out",
)
SCAN_LAYERS = dataclasses.replace(
    FOLD_LAYERS, verb="scan_layers", call="scan_layers(block, x, layers)", pair=True, other="fold_layers"
)
WITH_STATE = {
    FOLD_LAYERS: dataclasses.replace(FOLD_LAYERS, call="fold_layers(block, x, layers, state=state)", stateful=True),
    SCAN_LAYERS: dataclasses.replace(SCAN_LAYERS, call="scan_layers(block, x, layers, state=state)", stateful=True),
}
"""The conventions of layers that have a state."""
_OF_GROUPS = ("state", "variables", "rngs", "args", "broadcast")
CHUNK_MAP = Convention("chunk_map", "chunk_map(f, xs, chunk_size)", ("chunk",), other="")
LIFT = Convention("lift", 'lift(fn, variable_broadcast="params")', _OF_GROUPS, spread=True, pair=True, other="")


def annotated(body: Body) -> contextlib.AbstractContextManager[Scope | None]:
    """One scope of axis names for one call of a body; None if it has no annotations of jaxtyping.

    While nobody has imported jaxtyping, no body has any.
    """
    if "jaxtyping" not in sys.modules:
        return contextlib.nullcontext()
    from .annotations import signature_of

    signature = body.memo.keep(signature_of, lambda: signature_of(body))
    return contextlib.nullcontext() if signature is None else signature.scope()
