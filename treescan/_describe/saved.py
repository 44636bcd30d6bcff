"""What each step saves for the gradient, by the line of the body that computes it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .._avals import describe_leaf
from .._trace.blame import place_of
from .._trace.buffers import bytes_of
from .._trace.equations import called
from .._transforms.footprint import carry_bytes, residuals_of_step
from .bodies import TracedBody
from .facts import Saved

CARRY = "the carry"
_ELSEWHERE = "elsewhere"


def saved_by_steps(bodies: list[TracedBody]) -> tuple[Saved, ...]:
    """What one step of each body saves if nothing is recomputed, the largest first.

    Nothing if JAX refuses a gradient.
    """
    try:
        return tuple(sorted(_all(bodies), key=lambda each: -each.bytes))
    except Exception:  # the plan of the call says why
        return ()


def _all(bodies: list[TracedBody]) -> Iterator[Saved]:
    for body in bodies:
        carry = carry_bytes(body.hoisted)
        if carry:
            yield Saved(CARRY, (), tuple(map(describe_leaf, body.hoisted.loop.state)), carry)
        by_place: dict[str, list[Any]] = {}
        for residual in residuals_of_step(body.hoisted, body.hoisted.loop.step):
            by_place.setdefault(place_of(residual.equation) or _ELSEWHERE, []).append(residual)
        for place, residuals in by_place.items():
            operations = dict.fromkeys(_operation(residual.equation) for residual in residuals)
            types = tuple(str(residual.aval) for residual in residuals)
            yield Saved(place, tuple(operations), types, sum(bytes_of(residual.aval) for residual in residuals))


def _operation(equation: Any) -> str:
    """The name of an operation, or of the function that is called."""
    return str(equation.params.get("name", "call")) if called(equation) else equation.primitive.name
