"""`remat="auto"` picks the plan that is expected to be the fastest and saves no more than a loop without `remat`.

Steps run in chunks whose products with weights are computed at once. The gradient recomputes the chunks if computing a
step again takes less time than writing and reading what it saves.
"""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

import jax

from .._loop.rewrite import is_rewriting
from .._remat import Remat
from .._trace.cost import count_operations, count_saved_bytes
from .._trace.hoist import Hoisted, one_step
from .budget import RematPlan, best_segment, plan_of
from .checkpoint import Checkpointed
from .footprint import bytes_of_step
from .weights.deferred import save_all_but_cheap

Auto: TypeAlias = Literal["auto"]
AUTO: Final = "auto"

OPERATIONS_PER_BYTE = 64
"""How many operations take a device as long as one byte that is saved: it is written once, and read once."""

CACHE, CACHED = 2**24, 12
"""Up to so many bytes may stay in a processor's cache from when they are saved; there they cost this part."""

OPERATIONS_PER_STEP = 100_000
"""The overhead of a step, in operations: even a small step takes at least a microsecond."""

LEAST_STEPS = 32
"""Shorter loops are not changed."""

LEAST_CHUNKS, CHUNK = 16, 32
"""A loop has at least so many chunks if they have fewer than so many steps: each chunk takes time and memory."""


def fastest(hoisted: Hoisted) -> RematPlan:
    """The plan. Its `remat` is "auto" where nothing is recomputed, and products may be computed at once."""
    length = hoisted.loop.length
    plain = plan_of(hoisted, None)
    told = hoisted.effects or hoisted.refs or hoisted.reverse_rule
    if told or length < LEAST_STEPS or not is_rewriting():
        return plain
    segment = max(best_segment(length, 2, plain.carry_bytes, plain.step_bytes), _least_segment(length))
    chunks = plan_of(hoisted, Remat(jax.checkpoint_policies.everything_saveable, levels=2, segment=segment))
    price = OPERATIONS_PER_BYTE // (CACHED if plain.saved_bytes < CACHE else 1)
    if chunks.saved_bytes < plain.saved_bytes and _operations(hoisted) < price * plain.step_bytes:
        return chunks
    return plain.with_remat(AUTO)


def _least_segment(length: int) -> int:
    """The steps of the smallest chunks to be used. If possible they divide the loop: a remainder is compiled apart."""
    least = min(CHUNK, length // LEAST_CHUNKS)
    return next((segment for segment in range(least, 2 * least) if length % segment == 0), least)


def saves_steps(hoisted: Hoisted) -> bool:
    """Whether it is faster if chunks save their steps instead of recomputing them.

    It is faster if all saved values stay in a processor's cache, and a step takes longer than writing and reading them.
    Only the trace of the step is needed. A plan would also trace the derivative, which may never be taken.
    """
    length = hoisted.loop.length
    if not isinstance(length, int):
        return False
    saved = count_saved_bytes(hoisted.jaxpr)
    dear = OPERATIONS_PER_STEP + count_operations(hoisted.jaxpr) >= OPERATIONS_PER_BYTE // CACHED * saved
    return length * saved < CACHE and dear


def saves_more(hoisted: Hoisted, plain: RematPlan, size: int, products: int) -> bool:
    """Whether a loop saves more in chunks of this size, whose products (bytes per step) are computed at once."""
    step = Checkpointed(hoisted.loop.step, looped=True, policy=save_all_but_cheap)
    return plain.steps * bytes_of_step(hoisted, step) + 2 * size * products > plain.saved_bytes


def _operations(hoisted: Hoisted) -> int:
    """Of one step."""
    loop = hoisted.loop
    return OPERATIONS_PER_STEP + count_operations(
        jax.make_jaxpr(loop.step)(loop.consts, loop.state, one_step(loop.xs)).jaxpr
    )
