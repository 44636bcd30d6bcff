"""`remat="auto"`: the plan that is expected to be the fastest, and that saves no more than a loop without `remat`.

Each step saves what its derivative reads, in chunks whose products with weights are computed at once. These chunks are
recomputed where a step is computed again sooner than what it saves is written and read back.
"""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

import jax

from .._loop.rewrite import is_rewriting
from .._remat import Remat
from .._trace.cost import count_operations
from .._trace.hoist import Hoisted, one_step
from .budget import RematPlan, best_segment, plan_of

Auto: TypeAlias = Literal["auto"]
AUTO: Final = "auto"

OPERATIONS_PER_BYTE = 20
"""How many operations take a device as long as one byte that is saved: it is written once, and read once."""

OPERATIONS_PER_STEP = 100_000
"""What a step costs beside its operations, in operations: small ones take a microsecond at least."""

LEAST_STEPS = 32
"""Shorter loops are left as they are."""


def fastest(hoisted: Hoisted) -> RematPlan:
    """The plan. Its `remat` is "auto" where nothing is recomputed, and products may be computed at once."""
    length = hoisted.loop.length
    plain = plan_of(hoisted, None)
    told = hoisted.effects or hoisted.refs or hoisted.reverse_rule
    if told or length < LEAST_STEPS or not is_rewriting():
        return plain
    segment = best_segment(length, 2, plain.carry_bytes, plain.step_bytes)
    chunks = plan_of(hoisted, Remat(jax.checkpoint_policies.everything_saveable, levels=2, segment=segment))
    if chunks.saved_bytes < plain.saved_bytes and _operations(hoisted) < OPERATIONS_PER_BYTE * plain.step_bytes:
        return chunks
    return plain.with_remat(AUTO)


def _operations(hoisted: Hoisted) -> int:
    """Of one step."""
    loop = hoisted.loop
    return OPERATIONS_PER_STEP + count_operations(
        jax.make_jaxpr(loop.step)(loop.consts, loop.state, one_step(loop.xs)).jaxpr
    )
