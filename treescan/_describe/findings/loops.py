"""Findings about the loop as a whole: its rows, its products, its length."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from ..._avals import is_sharded
from ..._loop.rewrite import is_rewriting
from ..._remat import Remat
from ..._transforms.auto import AUTO, OPERATIONS_PER_STEP
from ..._transforms.checkpoint import levels_in
from ..._transforms.outputs import KeepOutputs
from ..._transforms.remat import Recompute
from ..._transforms.rows.keep_rows import KeepRows
from ..._transforms.rows.skip import Skip
from ..bodies import TracedBody, spec_of
from ..facts import Finding
from .case import Case, constants_of, is_weight

FEW_STEPS, FEW_OPERATIONS = 8, OPERATIONS_PER_STEP // 10
"""Loops of so many steps, or fewer, are better unrolled where a step takes so few operations."""


def rows_closed_over(case: Case) -> Iterator[Finding]:
    """TS007: an array with rows that the body closes over, under `compact`."""
    for body in case.bodies if case.compact else ():
        rows = body.batch[0]
        for constant, variable, reading in constants_of(body):
            if variable.aval.shape[:1] == (rows,) and reading and not is_weight(reading):
                yield Finding(
                    "TS007",
                    f"{constant.path}: the body closes over {variable.aval}, which seems to have an entry for each "
                    f"of the {rows} rows. `compact` calls the body with fewer rows, but cannot select the rows of "
                    "this array.",
                    "Pass it through the carry, or through xs with None in `in_axes` and a tree as `x_axes`.",
                )


def separate_products(case: Case) -> Iterator[Finding]:
    """TS008: products with weights that the gradient takes in each step, where chunks would take them together."""
    for body in case.bodies:
        weights = [constant.path for constant, _, reading in constants_of(body) if is_weight(reading)]
        reason = _why_separate(case, body) if weights and _would_take_together(case) else None
        if reason is not None:
            yield Finding(
                "TS008",
                f"the products with {', '.join(weights)} are computed in each {case.unit}, not once per chunk. The "
                f"reason: {reason[0]}.",
                reason[1],
            )


def _would_take_together(case: Case) -> bool:
    """Whether the call has chunks that compute products at once where nothing is in the way."""
    recompute = case.transform(Recompute)
    return case.transform(Skip) is not None or case.ends_early or (recompute is not None and recompute.remat == AUTO)


def _why_separate(case: Case, body: TracedBody) -> tuple[str, str] | None:
    skip, recompute, trace = case.transform(Skip), case.transform(Recompute), body.hoisted
    remat = getattr(recompute, "remat", None) if recompute else getattr(case.program, "remat", None)
    save = getattr(case.transform(KeepRows) or case.transform(KeepOutputs), "save", None)
    reasons = [
        (not is_rewriting(), "rewriting is off", "Leave `rewriting(False)` and `TREESCAN_REWRITE=0` out."),
        (trace.effects, "the body has a side effect", "Leave the callback out when training."),
        (
            trace.reverse_rule,
            "the body calls a function with a `jax.custom_vjp`",
            "Give it a `jax.custom_jvp` instead, if possible.",
        ),
        (skip is not None and skip.chunk == 0, "`chunk=0`", "Leave `chunk` out."),
        (
            _recomputes_steps(remat),
            "`remat` recomputes each of them",
            'Use `Remat("everything_saveable", levels=2)`, or leave `remat` out, if there is enough memory.',
        ),
        (
            save is not None and any(keep not in (1, None) for keep in save.leaves),
            "`save` keeps some outputs",
            "Keep all of them, if there is enough memory.",
        ),
        (
            any(map(is_sharded, _leaves(body))),
            "the carry or xs is sharded over an explicit mesh",
            "Run the loop within `jax.shard_map`.",
        ),
    ]
    return next(((why, cure) for holds, why, cure in reasons if holds), None)


def _recomputes_steps(remat: object) -> bool:
    return isinstance(remat, Remat) and levels_in(remat) >= 1 and remat.budget is None and not _saves_steps(remat)


def _saves_steps(remat: Remat) -> bool:
    return getattr(remat.policy, "__name__", None) == "everything_saveable"


def _leaves(body: TracedBody) -> list[object]:
    return [leaf.value for leaf in itertools.chain(body.x, body.carry) if spec_of(leaf.value)]


def short_loop(case: Case) -> Iterator[Finding]:
    """TS009: a loop that is too short for its overhead."""
    steps, unroll = case.calls[-1].length, case.calls[-1].unroll
    unrolled = unroll is True or unroll == 0 or unroll >= steps
    if 0 < steps <= FEW_STEPS and case.operations < FEW_OPERATIONS and not (unrolled or case.ends_early):
        yield Finding(
            "TS009",
            f"{steps} {case.unit}s of about {case.operations:,} operations each: the loop itself takes longer than "
            f"its {case.unit}s.",
            "Pass `unroll=True`.",
        )
