"""Whether a step, a chunk or a tier of its rows runs: the one branch of a loop, and what runs on live rows alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from .._avals import Array, PyTree
from .._loop.feed import Feed
from .._loop.loop import Step
from .axes import RowAxes
from .fill import Idle
from .leaves import ORDER, SCHEDULE


def run_or_leave(
    way: Array | None, ways: Sequence[Step], leave: Step, *given: Any, in_turn: bool = False
) -> tuple[PyTree, PyTree]:
    """Runs one of several steps, or none of them.

    Args:
        way: bool[], whether the only one runs; or int32[]: 0: none; i: ways[i - 1]. It has to be the same for all
            elements of a vmap and on all devices, as `any_of_all` makes it. None: the last one runs, without a branch.
        ways: the steps.
        leave: the step that runs nothing. What it returns has the same types.
        given: consts, state and feed, which the step is given.
        in_turn: whether the steps, which have no y, are tried one after another. Of two branches XLA copies nothing if
            one only hands on what it is given.
    """
    if way is None:
        return ways[-1](*given)
    if way.dtype == jnp.bool_:
        return jax.lax.cond(way, ways[0], leave, *given)
    if not in_turn or len(ways) == 1:
        return jax.lax.switch(way, [leave, *ways], *given)

    def some(consts: PyTree, state: PyTree, feed: Any) -> tuple[PyTree, None]:
        for number, run in enumerate(ways, 1):
            state, _ = jax.lax.cond(way == number, run, leave, consts, state, feed)
        return state, None

    return jax.lax.cond(way > 0, some, leave, *given)


def scheduled(feed: Feed) -> tuple[Array, Feed]:
    """The way that a chunk goes by its schedule, and its feed, with the order of the rows if they have one."""
    schedule, feed = SCHEDULE.take(feed)
    return schedule.branch, ORDER.put(feed, schedule.order)


def on_live_rows(step: Step, tiers: Sequence[int], axes: RowAxes, idle: Idle) -> tuple[Step, ...]:
    """What runs a chunk on the first rows of its `ORDER`, for each number of them; the last, on all.

    Args:
        step: runs a chunk.
        tiers: the numbers of rows; only the last where there is no order.
        axes: where the rows are.
        idle: the outputs of rows on which nothing is run.
    """
    if len(tiers) == 1:
        return (OnAllRows(step),)
    from .compact import LiveRows

    return (*(LiveRows(step, tier, axes, idle) for tier in tiers[:-1]), OnAllRows(step))


@dataclass(frozen=True, repr=False)  # JAX asks for its name: a repr would print all that it holds
class OnAllRows:
    """The step that runs another on all rows, which need no order."""

    step: Step

    def __call__(self, consts: PyTree, state: PyTree, feed: Feed) -> tuple[PyTree, PyTree]:
        return self.step(consts, state, ORDER.put(feed, None))
