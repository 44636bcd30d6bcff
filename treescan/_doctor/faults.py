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
    """A loop with a branch that hands its carry on, beside one that writes a row of it."""

    def step(carry: Any, i: Any) -> tuple[Any, None]:
        return jax.lax.cond(i % 2 == 0, lambda c: c, lambda c: c.at[i].add(1.0), carry), None

    return scan(step, buffer, jnp.arange(STEPS))[0]


FAULTS = (
    KnownFault(
        "small outputs of bfloat16 copy their stack",
        _stack_small,
        "bfloat16",
        "The time of a loop that stacks them grows with the square of its steps. Return them as float32, and convert "
        "the stack after the loop, or keep fewer (`save=`).",
    ),
    KnownFault(
        "small outputs of float32 copy their stack",
        _stack_small,
        "float32",
        "The time of a loop that stacks them grows with the square of its steps. Keep fewer (`save=`).",
    ),
    KnownFault(
        "small writes into the carry copy it",
        _write_small,
        "float32",
        "A step that writes a few numbers of a large carry takes the time of all of it. Return what is written as an "
        "output, and read it after the loop.",
    ),
    KnownFault(
        "a branch that passes its carry on copies it",
        _pass_through,
        "float32",
        "A `jax.lax.cond` in a step over a large carry takes the time of all of it, whichever branch is taken. Let "
        "the branch return what is to be written, and write it outside of the branch.",
    ),
)
