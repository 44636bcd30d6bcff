"""Loops within a step of a checked loop: what they find is told with that step too."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp

from ..._finite import Within
from ..._loop.loop import Feed, Loop, Step
from ..._types import Array, PyTree


class Outer(NamedTuple):
    """A checked loop, in whose steps another loop runs.

    Attributes:
        call: the verb and the body, as messages name them.
        length: the steps of the loop.
    """

    call: str
    length: Any

    def at(self, position: Any) -> Within:
        """One of its steps."""
        return Within(self.call, int(position), int(self.length))


class OuterSteps(NamedTuple):
    """The steps in which a loop runs, the innermost first.

    Attributes:
        loops: the loops.
        positions: int32[] each, of the step.
    """

    loops: tuple[Outer, ...] = ()
    positions: tuple[Array, ...] = ()


_outer: contextvars.ContextVar[OuterSteps] = contextvars.ContextVar("outer", default=OuterSteps())  # noqa: B039


def outer_steps() -> OuterSteps:
    """The steps of checked loops in which a loop runs that is traced now."""
    return _outer.get()


@contextlib.contextmanager
def _within(outer: Outer, position: Array) -> Generator[None]:
    loops, positions = _outer.get()
    token = _outer.set(OuterSteps((outer, *loops), (position, *positions)))
    try:
        yield
    finally:
        _outer.reset(token)


@dataclass(frozen=True)
class Numbered:
    """A step that tells the loops within it of its position.

    Attributes:
        step: the inner step.
        keyed: whether that is fed its position too.
        call: the verb and the body, as messages name them.
        length: the steps of the loop.
    """

    step: Step
    keyed: bool
    call: str
    length: Any

    def __call__(self, consts: PyTree, state: PyTree, feed: Feed) -> tuple[PyTree, PyTree]:
        assert feed.position is not None
        with _within(Outer(self.call, self.length), feed.position):
            return self.step(consts, state, feed if self.keyed else feed._replace(position=None))


def numbered(loop: Loop, call: str) -> Loop:
    """The loop, whose steps tell the loops within them of their positions."""
    keyed = loop.xs.position is not None
    xs = loop.xs if keyed else loop.xs._replace(position=jnp.arange(loop.length, dtype=jnp.int32))
    return dataclasses.replace(loop, step=Numbered(loop.step, keyed, call, loop.length), xs=xs)
