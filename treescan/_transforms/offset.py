"""`offset`: the loop is a part of a longer run. What such a part cannot honour, each option refuses."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from .._avals import clamped, dtype_of, shape_of
from .._errors import ArgumentError, expect

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
