"""Finds which hook of a custom carry raised, and at which line."""

from __future__ import annotations

from .._avals import describe_leaf
from .._errors import is_jax_frame, shorten, walk_traceback

_HOOKS = ("read", "write", "rows")


def root_of(error: Exception) -> Exception:
    """What a hook raised, of an error that tells of it."""
    while isinstance(error.__cause__, Exception):
        error = error.__cause__
    return error


def failed_hook(kind: type, error: Exception) -> tuple[str, str]:
    """The innermost call of a hook of this class that failed, and the line, outside of JAX, at which it did."""
    call, place = "carry", ""
    for entry in walk_traceback(error.__traceback__):
        frame = entry.tb_frame
        if frame.f_code.co_name in _HOOKS and isinstance(frame.f_locals.get("self"), kind):
            call = f"{frame.f_code.co_name}()"
            if "valid" in frame.f_locals:
                valid = frame.f_locals["valid"]
                call = f"write(valid={'None' if valid is None else describe_leaf(valid)})"
        if call != "carry" and not is_jax_frame(frame):
            place = f"{shorten(frame.f_code.co_filename)}:{entry.tb_lineno}"
    return call, place
