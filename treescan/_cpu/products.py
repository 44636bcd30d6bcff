"""What a product of many steps is made of, and what their derivatives read."""

from __future__ import annotations

import math

from .._avals import Array
from .._trace.cost import TRANSCENDENTAL
from .rows import in_one_place


def as_one_matrix(stacked: Array, leading: int) -> Array:
    """The operand of a product of many steps, its leading axes, steps and rows, joined to one.

    A step needs it that multiplies a batch with weights, since the cotangent of the weights adds up over all these
    axes: with several of them, XLA's CPU backend copies what the transposed product reads. A step whose rows are
    spread over devices must not be hurt: axes that are joined cannot be spread.
    """
    if not in_one_place():
        return stacked
    return stacked.reshape(math.prod(stacked.shape[:leading]), *stacked.shape[leading:])


def is_computed_by_each_reader(name: str) -> bool:
    """Whether a primitive takes long, and XLA's CPU backend would compute it again in each fusion that reads it.

    A chunk of steps needs the results of such functions saved, `tanh` for example. Cheap steps must not be hurt: what
    is computed again sooner than it is read is not saved.
    """
    return name in TRANSCENDENTAL
