"""`first`, a keyword of the body: which rows take the first valid step of their segment, in the order of the run."""

from __future__ import annotations

import jax.numpy as jnp

from .._avals import Array
from .._errors import Misuse
from .._loop.feed import Keyword, Slot
from .._loop.loop import Loop
from .._rows.axes import flags_given
from .._rows.leaves import first_valid
from .._rows.spans import numbers_of, refuse_split_rows, turns
from .resets import beginnings


def first_steps(loop: Loop, resets: Array | None) -> Array:
    """bool[T, *batch]: the first valid step of each segment of each row.

    Args:
        loop: the loop, with its mask.
        resets: bool[T, *batch], where segments begin in time; None: nowhere.

    Raises:
        Fault: for an `ArgumentError` if the loop is a part of a longer run, and another part decides it.
    """
    valid, given = loop.xs.valid, flags_given(loop)
    if loop.offset is not None and (given.mask is not None or loop.reverse):
        raise Misuse(
            "{call}: the body takes `first`, and the loop is a part of a longer run. Whether a row has taken a step "
            "before is known to another part.",
            "With `offset`, give `lengths` or `resets` without a mask, and run forward. Or carry the flag: True in "
            "`init`, and False in what the body returns.",
        )
    if 0 in valid.shape:
        return valid
    have, step = first_valid(valid, reverse=loop.reverse)
    steps = jnp.arange(valid.shape[0], dtype=step.dtype).reshape(-1, *(1 for _ in have.shape))
    first = (steps == step[None]) & have[None]
    if loop.offset is not None:
        first = first & (loop.offset == 0)
    if resets is not None:
        first = first | beginnings(resets, valid, reverse=loop.reverse)
    if given.spans is not None:
        refuse_split_rows(given.spans, valid)
        first = first | turns(numbers_of(given.spans, valid.shape), valid, later=loop.reverse)
    return first


FIRST = Keyword(Slot("first", rows=True), first_steps)
"""The keyword."""
