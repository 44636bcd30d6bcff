"""`offset`: the loop is a part of a longer run. Checks it, and refuses the options that such a part cannot honour."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from .._avals import clamped, describe_traced, dtype_of, shape_of
from .._errors import ArgumentError, Misuse, expect
from .outputs import KeepOutputs
from .program import Arguments, Program
from .rows.axes import RowFlags
from .rows.fill import HOLD, KeepRows
from .truncate import Truncate

_CURE = (
    "It is the position of the first {unit} in the whole run: an int of at least 0, or an int array of shape [], "
    "traced or not."
)


def check_offset(offset: Any, steps: int) -> Any:
    """int32[]: the position of the first step. An int becomes an array too, so all parts of a run share one program.

    One that is not known is clamped to what is allowed.

    Raises:
        Fault: for an `ArgumentTypeError` if it is not one int, for an `ArgumentError` if it is known and out of range.
    """
    dtype = None if type(offset) is int else dtype_of(offset)  # one beyond int32 has none
    is_int = dtype is not None and jnp.issubdtype(dtype, jnp.integer) and shape_of(offset) == ()
    expect(is_int or type(offset) is int, "offset", "an int", offset, _CURE)
    most = 2**31 - 1 - (steps if isinstance(steps, int) else 0)
    if isinstance(offset, Tracer) or not getattr(offset, "is_fully_addressable", True):
        return clamped(jnp.asarray(offset), most)
    number = int(offset)
    expect(number >= 0, "offset", "at least 0", number, _CURE, error=ArgumentError)
    expect(number <= most, "offset", f"at most {most}", number, "Positions are of type int32.", error=ArgumentError)
    return np.int32(number)


def refuse_options(program: Program, given: Arguments) -> None:
    """Refuses what a part cannot do as the whole run would.

    Raises:
        Fault: for an `ArgumentError`.
    """
    _refuse_resets(given.rows, reverse=program.call.reverse)
    for transform in program.transforms:
        if isinstance(transform, Truncate):
            _refuse_truncate(given.rows, reverse=program.call.reverse)
        if getattr(transform, "has_positions", False):
            raise Misuse(
                "{call}: `save` with positions cannot be combined with `offset`: they may be those of another part.",
                "Keep all outputs of the part, and index them.",
            )
        if isinstance(transform, KeepRows) and HOLD in transform.fill.leaves:
            raise Misuse(
                '{call}: `fill="hold"` cannot be combined with `offset`: the last y of a row may be in another part.',
                "Give a number, and hold the value in the carry.",
            )
        if isinstance(transform, KeepOutputs | KeepRows) and transform.save is not None:
            for keep in transform.save.leaves:
                _check_keep(keep, given.offset, len(program.call.each))


def _refuse_resets(rows: RowFlags | None, *, reverse: bool) -> None:
    if rows is None or rows.resets is None:
        return
    if rows.spans is not None:
        raise Misuse(
            "{call}: xs is a `Packed`, whose sequences begin and end in it, so it is no part of a longer run.",
            "Leave `offset` out. Or scan over its `data`, with its `mask` and `resets`, and give `reset_to`.",
        )
    if rows.to is None:
        raise Misuse(
            "{call}: with `offset`, `init` is the carry of the part before, and `resets` would restore that.",
            "Say by `reset_to` what they restore.",
        )
    if reverse:
        raise Misuse(
            "{call}: `resets` and `offset` cannot be combined in reverse: where the last segment of a part ends is "
            "known to the part after it.",
            "Run the whole loop at once, or run it forward.",
        )


def _refuse_truncate(rows: RowFlags | None, *, reverse: bool) -> None:
    if reverse:
        raise Misuse(
            "{call}: `truncate` and `offset` cannot be combined in reverse: where the gradient is cut depends on the "
            "end of the whole run.",
            "Leave `truncate` out, and cut the gradient between parts, `jax.lax.stop_gradient(carry)`.",
        )
    if rows is not None and (rows.mask is not None or rows.resets is not None):
        name = "mask" if rows.mask is not None else "resets"
        raise Misuse(
            f"{{call}}: `truncate` counts the valid steps of each row, and with `{name}` their number before this part "
            "is not known. `offset` says only how many steps came before.",
            "Say by `lengths` where rows are valid, or leave `truncate` out and cut the gradient between parts, "
            "`jax.lax.stop_gradient(carry)`.",
        )


def _check_keep(keep: Any, offset: Any, blocks: int) -> None:
    """Refuses to keep every k-th output where the part does not begin with the first step of k.

    Args:
        keep: every how many steps an output is kept, or something else.
        offset: a checked offset.
        blocks: how many blocks take turns, each of which counts its own layers.
    """
    if keep is None or keep <= 1:
        return
    known = isinstance(offset, np.integer)
    if not known or int(offset) % (keep * blocks):
        steps = f"{keep} {{unit}}s" if blocks == 1 else f"{keep * blocks} {{unit}}s, {keep} for each block"
        raise Misuse(
            f"{{call}}: `save={keep}` needs an `offset` that is a multiple of {steps}, got "
            f"{int(offset) if known else describe_traced(offset)}.",
            f"Cut the whole run at multiples of {keep * blocks}. Only the last part may have another length."
            if known
            else f"Pass `offset` as an int, at multiples of {keep * blocks}: which outputs are kept must be known when "
            "the program is traced.",
        )
