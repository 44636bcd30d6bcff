"""`remat`: what the gradient recomputes instead of saving it, a step or a chunk at a time."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import NoReturn

import jax

from .._chunk import Level, Wish, run_chunked
from .._errors import ArgumentError, Fault
from .._loop import Feed, Loop, Step, is_jit_disabled
from .._types import PyTree, Remat
from .hoist import hoist


@dataclass(frozen=True)
class Checkpointed:
    """A step of which the gradient saves nothing but what goes in.

    Attributes:
        step: the inner step.
        looped: whether a loop runs it, where nothing can be merged with the first computation. Elsewhere that has to
            be forbidden to the compiler, or it would save everything after all.
    """

    step: Step
    looped: bool

    def __call__(self, consts: PyTree, state: PyTree, feed: Feed) -> tuple[PyTree, PyTree]:
        return jax.checkpoint(self.step, prevent_cse=not self.looped)(consts, state, feed)


def checkpoint_steps(loop: Loop) -> Loop:
    """Saves the carry of each step and nothing else; the step is computed once more in the gradient."""
    return dataclasses.replace(loop, step=Checkpointed(loop.step, looped=_stays_a_loop(loop)))


def _stays_a_loop(loop: Loop) -> bool:
    return loop.unroll is not True and loop.unroll == 1


def nested_wish(length: int) -> Wish:
    """Chunks of about the square root of the length, with which as many carries are saved as a chunk has steps.

    Sizes that divide the length come first: a remainder has xs cut in two, which copies them.
    """
    refuse_symbolic(length, 'remat="nested"')
    root = math.isqrt(length)
    dividing = [size for size in range(max(2, root // 2), 2 * root + 1) if length % size == 0]
    return Wish(min(dividing, key=lambda size: abs(math.log(size * size / length)), default=max(2, root)))


def refuse_symbolic(count: int, option: str, of: str = "steps") -> None:
    """Refuses to divide steps or rows whose number is a symbol, as `jax.export` has them."""
    if not isinstance(count, int):
        raise Fault(
            ArgumentError,
            f"{{verb}} over {{body}}: `{option}` divides the {of}, but their number is symbolic.",
            f"Leave it out, or export for a number of {of} that is known.",
        )


def refuse_with_refs(option: str) -> NoReturn:
    """Refuses what needs a branch or a second computation, for a body that closes over a mutable array."""
    raise Fault(
        ArgumentError,
        f"{{verb}} over {{body}}: `{option}` cannot be had for a body that closes over a mutable array (a `Ref`).",
        "Carry its value instead, or leave the option out: then all {unit}s are run, and none is recomputed.",
    )


def run_rematerialized(loop: Loop, remat: Remat) -> tuple[PyTree, PyTree]:
    """Runs a loop that saves less for its gradient; its results are those of `run`.

    "step" saves T carries; "nested" about twice the square root of T, and computes each step once more than "step".
    """
    hoisted = hoist(loop)
    if hoisted.refs:
        refuse_with_refs("remat")
    levels: tuple[Level, ...] = ()
    if remat == "nested":
        levels = (Level(nested_wish(loop.length).size, Checkpointed),)
    state, ys = run_chunked(checkpoint_steps(hoisted.loop), levels)
    return hoisted.restore(state), ys


def rematerializes(length: int) -> bool:
    """Whether there is anything to do: no gradient is taken of a loop without steps, nor without tracing."""
    return length > 0 and not is_jit_disabled()
