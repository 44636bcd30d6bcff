"""Loops within a step of a checked loop: what they find is told with that step too."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.core
import jax.extend.core
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
        trace: the trace in which the innermost step runs.
    """

    loops: tuple[Outer, ...] = ()
    positions: tuple[Array, ...] = ()
    trace: Any = None


_outer: contextvars.ContextVar[OuterSteps] = contextvars.ContextVar("outer", default=OuterSteps())  # noqa: B039


def _trace_state() -> Any:
    """What equals itself within one trace of JAX, and nothing of another."""
    home = jax.extend.core if hasattr(jax.extend.core, "get_opaque_trace_state") else jax.core  # JAX 0.8 has it there
    return getattr(home, "get_opaque_trace_state")()  # noqa: B009, an attribute that checkers do not see


def outer_steps() -> OuterSteps:
    """The steps of checked loops in which a loop runs that is traced now; none within a function that JAX traces apart.

    JAX keeps the trace of such a function, for example of one under `jax.jit`, for calls from other steps, whose
    positions it does not know.
    """
    steps = _outer.get()
    return steps if steps.loops and steps.trace == _trace_state() else OuterSteps()


@contextlib.contextmanager
def _within(outer: Outer, position: Array, follows: bool) -> Generator[None]:
    steps = _outer.get() if follows else OuterSteps()
    token = _outer.set(OuterSteps((outer, *steps.loops), (position, *steps.positions), _trace_state()))
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
        follows: whether the loop itself runs in a step whose position is known.
    """

    step: Step
    keyed: bool
    call: str
    length: Any
    follows: bool

    def __call__(self, consts: PyTree, state: PyTree, feed: Feed) -> tuple[PyTree, PyTree]:
        assert feed.position is not None
        with _within(Outer(self.call, self.length), feed.position, self.follows):
            return self.step(consts, state, feed if self.keyed else feed._replace(position=None))


def numbered(loop: Loop, call: str) -> Loop:
    """The loop, whose steps tell the loops within them of their positions."""
    keyed = loop.xs.position is not None
    xs = loop.xs if keyed else loop.xs._replace(position=jnp.arange(loop.length, dtype=jnp.int32))
    return dataclasses.replace(
        loop, step=Numbered(loop.step, keyed, call, loop.length, bool(outer_steps().loops)), xs=xs
    )
