"""Counts the memory of the gradient of blocks that take turns, and picks the plan that fits a budget."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ..._remat import Remat
from ..._trace.hoist import Hoisted
from ..budget import RematPlan, cheapest_within, describe, kept_by_policy
from ..footprint import footprint_of, footprint_of_turns


def fit_turns(loops: Sequence[Hoisted], remat: Remat) -> Remat | None:
    """The plan of a `Remat` for loops that take turns. One with a budget is given a plan that fits.

    Raises:
        Fault: for an `ArgumentError` if no plan fits.
    """
    chosen = plan_of_turns(loops, remat).remat
    return chosen if isinstance(chosen, Remat) else None


def plan_of_turns(loops: Sequence[Hoisted], remat: Remat | None) -> RematPlan:
    """What the gradient of loops that take turns needs. Loops that lead may have one turn more than the others."""
    rounds = min(hoisted.loop.length for hoisted in loops)
    step = dataclasses.replace(footprint_of_turns(loops), once=_cut_off(loops, rounds))
    if remat is not None and remat.budget is not None:
        return cheapest_within(remat.budget, rounds, step, step, step.whole, unit="period")
    kept = [kept_by_policy(hoisted, remat) for hoisted in loops]
    return describe(remat, rounds, step, None if None in kept else sum(filter(None, kept)))


def _cut_off(loops: Sequence[Hoisted], rounds: int) -> int:
    """The copy of the stacks that lead, off which their last layers are cut."""
    return sum(rounds * footprint_of(hoisted).xs for hoisted in loops if hoisted.loop.length > rounds)
