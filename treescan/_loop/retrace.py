"""`TREESCAN_WARN_RETRACE=1` warns where a new function object per call makes JAX trace again."""

from __future__ import annotations

import collections
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from .._errors import RetraceWarning, describe_body, warn_user

_seen: collections.Counter[str] = collections.Counter()


def wanted() -> bool:
    """Whether the user asked for these warnings."""
    return os.environ.get("TREESCAN_WARN_RETRACE") == "1"


def under_a_trace() -> bool:
    """Whether operations are being recorded by an outer trace (as under `jax.jit`) instead of executed."""
    try:
        return isinstance(jnp.zeros(()), Tracer)
    except RuntimeError:  # the number comes from the host, which `jax.transfer_guard` may disallow
        with jax.transfer_guard("allow"):
            return isinstance(jnp.zeros(()), Tracer)


def count_body(function: Callable[..., Any]) -> None:
    """Notes that a body was seen for the first time, and warns at the 2nd, 4th, 8th, ... one from the same place.

    Under an outer trace a new body is no cost of its own: the outer trace is what is cached.
    """
    if not wanted() or under_a_trace():
        return
    place = describe_body(function)
    _seen[place] += 1
    times = _seen[place]
    if times > 1 and times & (times - 1) == 0:
        _warn(
            f"{place} was passed as {times} different function objects, and traced and compiled {times} times. A "
            f"lambda, a partial, a bound method or a nested function is a new object each time that it is written "
            f"down: define the body once, outside of the code that calls the scan, or wrap that code in `jax.jit`."
        )


def warn_second_trace(body: Callable[..., Any], leaves: list[tuple[str, str, str]]) -> None:
    """Says which weakly typed leaves of the init make JAX trace a body twice."""
    if wanted():
        which = ", ".join(f"{path} ({given} to {returned})" for path, given, returned in leaves)
        _warn(
            f"{describe_body(body)} is traced twice, because the init is a Python scalar whose type the step changes: "
            f"{which}. Start from an array with the dtype that the step returns."
        )


def _warn(message: str) -> None:
    warn_user(message, RetraceWarning)
