"""Known faults of XLA, each with a small program that shows it: found by what was compiled, not by a clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from .._verbs.scan import scan
from .copies import copies_in_loops

STEPS, WIDTH = 256, 64


@dataclass(frozen=True)
class KnownFault:
    """A fault that a release of XLA may have.

    Attributes:
        name: what it is called.
        program: a function of the buffer that shows it.
        dtype: of the buffer.
        meaning: what it costs a user, and what to do about it.
    """

    name: str
    program: Callable[[Any], Any]
    dtype: str
    meaning: str

    def copies(self) -> int:
        """How many instructions of its loop copy or convert the whole buffer; 0: it is not there."""
        buffer = jax.ShapeDtypeStruct((STEPS, WIDTH), jnp.dtype(self.dtype))
        text = jax.jit(self.program).lower(buffer).compile().as_text()
        return copies_in_loops(text or "", buffer.shape, self.dtype)


def _stack_small(buffer: Any) -> Any:
    """A loop that stacks small outputs: the buffer is the stack, and its argument is not read but for one row."""

    def step(carry: Any, x: Any) -> tuple[Any, Any]:
        carry = carry * 0.5 + x.astype(carry.dtype)
        return carry, carry

    return scan(step, buffer[0], jnp.arange(STEPS))[1]


def _write_small(buffer: Any) -> Any:
    """A loop that writes a few numbers of a carried buffer, and reads others."""

    def step(carry: Any, i: Any) -> tuple[Any, None]:
        return carry.at[i, :4].set(carry[i, 4:8] * 0.5), None

    return scan(step, buffer, jnp.arange(STEPS))[0]


def _pass_through(buffer: Any) -> Any:
    """A loop with one branch that returns its carry unchanged, and one that writes a row of it."""

    def step(carry: Any, i: Any) -> tuple[Any, None]:
        return jax.lax.cond(i % 2 == 0, lambda c: c, lambda c: c.at[i].add(1.0), carry), None

    return scan(step, buffer, jnp.arange(STEPS))[0]


FAULTS = (
    KnownFault(
        "small bfloat16 outputs copy their whole stack",
        _stack_small,
        "bfloat16",
        "The time of such a loop grows with the square of its steps. Return the outputs as float32 and convert the "
        "stack after the loop, or keep fewer of them (`save=`).",
    ),
    KnownFault(
        "small float32 outputs copy their whole stack",
        _stack_small,
        "float32",
        "The time of such a loop grows with the square of its steps. Keep fewer outputs (`save=`).",
    ),
    KnownFault(
        "small writes into the carry copy all of it",
        _write_small,
        "float32",
        "A step that writes a few numbers into a large carry takes as long as writing all of it. Return these "
        "numbers as an output, and read them after the loop.",
    ),
    KnownFault(
        "a branch that returns its carry unchanged copies it",
        _pass_through,
        "float32",
        "A `jax.lax.cond` over a large carry takes as long as copying all of it, whichever branch is taken. Return "
        "the new values from the branch, and write them outside the branch.",
    ),
)
