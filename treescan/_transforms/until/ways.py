"""How the chunks of a loop that has ended are computed again, for its derivative.

Chunks that were run to their end are plain loops. In the chunk in which the loop ended, each step is a branch.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ..._loop.chunk import as_step
from ..._loop.loop import Feed, Loop, Step
from ..._remat import Remat
from ..._trace.smooth import Part
from ..._tree import Prefix
from ..._types import Array
from ..checkpoint import RematChunk, checkpoint, checkpoint_steps, save_costly
from ..rows.leaves import select
from ..rows.lend import most_of_all, most_of_devices
from .early_exit import Chunks, StepOutputs
from .stand_ins import good_pair, masked_step
from .tangents import FinishedLoop, Ways, group, order_of_steps

RUN_NONE, RUN_SOME, RUN_ALL = 0, 1, 2
"""What of a chunk is run: no step of any element, some, or every step of all of them."""

ZERO = Prefix.of(0)


@dataclass(frozen=True)
class StepByStep:
    """The step that runs another where any element or row is valid, as its schedule says, and saves what goes in."""

    step: Step
    outputs: StepOutputs

    def __call__(self, consts: Any, state: list[Any], feed: Feed) -> tuple[list[Any], Any]:
        live = feed.schedule
        feed = feed._replace(schedule=None)
        return checkpoint(self._branch, prevent_cse=False)(live, consts, state, feed)

    def _branch(self, live: Array, consts: Any, state: list[Any], feed: Feed) -> tuple[list[Any], Any]:
        return jax.lax.cond(live, self._varied, self._leave, consts, state, feed)

    def _varied(self, consts: Any, state: list[Any], feed: Feed) -> tuple[list[Any], Any]:
        state, y = self.step(consts, state, feed)
        return state, self.outputs.varied(y)

    def _leave(self, consts: Any, state: list[Any], feed: Feed) -> tuple[list[Any], Any]:
        del consts, feed
        return state, self.outputs.filled()


@dataclass(frozen=True)
class _Whole:
    """Runs a chunk of which every step was taken, and shows nothing else."""

    step: Step

    def __call__(self, consts: Any, state: list[Any], feed: Feed) -> tuple[list[Any], Any]:
        _, inner = consts
        return self.step(inner, state, feed._replace(valid=None, schedule=None))


def ways_of(
    ran: FinishedLoop, part: Part, d_consts: list[Array], outputs: StepOutputs, plan: Chunks, *, branches: bool
) -> Ways:
    """How to compute the chunks of a loop whose condition is one bool.

    Args:
        ran: the loop, and what is known of how it ran.
        part: which leaves of the consts have a tangent.
        d_consts: these tangents.
        outputs: the types of y.
        plan: the chunks, and what is recomputed within them.
        branches: whether a branch may depend on data.
    """
    loop, taken, size = ran.loop, ran.taken, plan.size
    good, consts, own = good_pair(loop, taken > 0)
    flags, _ = part.split(own)
    zeroed = [select(flag, d, jnp.zeros_like(d)) for flag, d in zip(flags, d_consts, strict=True)]
    order = group(order_of_steps(loop), size)
    most = most_of_all(most_of_devices(taken))
    least = -most_of_all(most_of_devices(-taken))
    first, last = jnp.min(order, axis=1), jnp.max(order, axis=1)
    branch = jnp.where(first >= most, RUN_NONE, jnp.where(last < least, RUN_ALL, RUN_SOME))
    some = run_chunk(dataclasses.replace(loop, step=_masked(loop, outputs, branches)), outputs, size)
    runners = (some, _Whole(recomputed_chunk(loop, outputs, plan))) if branches else (some,)
    return Ways(good, consts, zeroed, runners, branch, order < taken, order < most if branches else None)


def recomputed_chunk(loop: Loop, outputs: StepOutputs, plan: Chunks) -> Step:
    """What runs a whole chunk, and saves of it what the user said, or what is not had for next to nothing."""
    loop = dataclasses.replace(loop, length=plan.size)
    loop = checkpoint_steps(loop, plan.remat or Remat(policy=save_costly))
    return as_step(loop, outputs.levels(plan.size, plan.inner, lambda size: RematChunk()))


def run_chunk(loop: Loop, outputs: StepOutputs, size: int) -> Step:
    """What runs a chunk, and saves all of it."""
    return as_step(dataclasses.replace(loop, length=size, unroll=1), outputs.levels(size, (), _nothing_around))


def _nothing_around(size: int) -> None:
    del size


def _masked(loop: Loop, outputs: StepOutputs, branches: bool) -> Step:
    masked = masked_step(loop, ZERO)
    return StepByStep(masked, dataclasses.replace(outputs, fill=ZERO)) if branches else masked
