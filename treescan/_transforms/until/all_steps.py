"""Runs a loop with an early exit as a scan over all the steps that it may take, when nothing is rewritten.

Steps after the end are masked, so JAX differentiates the loop like any other scan. That takes the time and the memory
of all steps.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from ..._loop.chunk import run_chunked
from ..._loop.loop import Feed, Loop, Step
from ..._trace.hoist import merge
from ..._types import PyTree
from .condition import Condition
from .early_exit import Progress, Reads, StepOutputs, going_on
from .stand_ins import good_pair, masked_step


@dataclass(frozen=True)
class MaskedStep:
    """The step that is masked where the loop has ended. Its state is `Progress`.

    Its consts are `Reads`, in which the consts of the inner step are (GoodPair, consts).

    Attributes:
        masked: the inner step, which is told whether it is taken.
        condition: of the next state.
        fixed: for each leaf of the whole state whether it is unchanged.
    """

    masked: Step
    condition: Condition
    fixed: tuple[bool, ...]

    def __call__(self, reads: Reads, progress: Progress, feed: Feed) -> tuple[Progress, PyTree]:
        going = going_on(progress, reads)
        _, (unchanged, _) = reads.inner
        new, y = self.masked(reads.inner, progress.leaves, feed._replace(valid=going))
        after = self.condition(reads.closed, merge(self.fixed, unchanged, new))
        taken = progress.taken + going.astype(progress.taken.dtype)
        return Progress(jnp.where(going, after, progress.holds), taken, new), y


def run_all_steps(
    loop: Loop, reads: Reads, first: Progress, condition: Condition, fixed: tuple[bool, ...], outputs: StepOutputs
) -> tuple[Progress, Any]:
    """Runs all steps of a loop, and keeps nothing of those after its end.

    Args:
        loop: the loop, as `lift` makes it.
        reads: what every step reads; its consts are the loop's.
        first: the state before the first step.
        condition: whether another step is taken.
        fixed: for each leaf of the whole state whether it is unchanged.
        outputs: the types of y, and what it is where no step is taken.
    """
    good, consts, _ = good_pair(loop, going_on(first, reads))
    step = MaskedStep(masked_step(loop, outputs.fill), condition, fixed)
    loop = dataclasses.replace(loop, step=step, consts=reads._replace(inner=(good, consts)), state=first)
    return run_masked(loop, outputs)


def run_masked(loop: Loop, outputs: StepOutputs) -> tuple[Progress, Any]:
    """Runs all steps of a loop whose step is masked."""
    return run_chunked(loop, outputs.levels(loop.length, (), lambda size: None))
