"""A failing program made smaller, whatever programs are."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TypeVar

P = TypeVar("P")
F = TypeVar("F")


def smallest(
    program: P,
    failure: F,
    seconds: float,
    candidates: Callable[[P], Iterable[P]],
    fails: Callable[[P, F], F | None],
) -> tuple[P, F]:
    """The smallest that is found in so many seconds, and how it fails.

    Args:
        program: it fails.
        failure: how.
        seconds: when to stop.
        candidates: somewhat smaller programs.
        fails: how one of them fails, if that is in the same way; else None.
    """
    until, again = time.monotonic() + seconds, True
    while again and time.monotonic() < until:
        again = False
        for smaller in candidates(program):
            if time.monotonic() > until:
                break
            found = fails(smaller, failure)
            if found is not None:
                program, failure, again = smaller, found, True
                break
    return program, failure
