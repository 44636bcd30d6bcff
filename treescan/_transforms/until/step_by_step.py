"""Runs `while_scan` under `jax.disable_jit`, on concrete values."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..._loop.loop import Loop
from ..._loop.run import as_arrays, run
from ..._trace.hoist import flatten_only
from ..._tree import Prefix
from ..._types import Array, PyTree
from ..rows.fill import fill_leaves
from .condition import CallCondition
from .early_exit import any_of_all
from .reports import Reports
from .rows import mask_rows
from .stand_ins import good_pair, masked_step


class Ended(NamedTuple):
    """A loop that has ended.

    Attributes:
        state: its last state.
        ys: the outputs, filled where no step was taken.
        steps: int32[*batch], the steps that were taken.
        stopped: bool[*batch], whether the condition no longer held.
    """

    state: PyTree
    ys: PyTree
    steps: Array
    stopped: Array


def run_step_by_step(
    loop: Loop,
    call: CallCondition | None,
    init: PyTree,
    holds: Array,
    limit: Array,
    fill: Prefix,
    reports: Reports | None = None,
) -> Ended:
    """Runs a loop while its condition holds, `limit` steps at most.

    Args:
        loop: the loop; as `OverRows` left it where each row stops by itself.
        call: its condition; None holds always.
        init: the user's part of its state, which is last in it.
        holds: bool[*batch], the condition of the first state.
        limit: int32[].
        fill: a prefix of y: what it is where no step is taken.
        reports: reports how far it has come; None: nothing does.
    """
    every = -(-loop.length // reports.updates) if reports else 0
    structure, count = jax.tree.structure(init), len(jax.tree.leaves(init))

    def holds_of(leaves: list[Any]) -> Array:
        if call is None:
            return jnp.ones((), bool)
        return call(jax.tree.unflatten(structure, leaves[len(leaves) - count :]))

    whole = jax.tree.structure(loop.state)
    flat, leaves = _masked(loop, holds & (limit > 0), fill)
    steps, ran = jnp.zeros(holds.shape, jnp.int32), list[PyTree]()
    while len(ran) < loop.length and any_of_all(going := holds & (steps < limit)):
        place = loop.length - 1 - len(ran) if loop.reverse else len(ran)
        x = jax.tree.map(lambda leaf, at=place: jax.lax.slice_in_dim(leaf, at, at + 1), flat.xs)
        one = dataclasses.replace(flat, state=leaves, xs=x._replace(valid=going[None]), length=1)
        leaves, y = run(one)
        ran.append(y)
        steps = steps + going.astype(steps.dtype)
        holds = jnp.where(going, holds_of(leaves), holds)
        if reports and len(ran) % every == 0:
            reports.step(steps, jax.tree.unflatten(whole, leaves))
    ys = _stack(loop, ran, fill)
    return Ended(jax.tree.unflatten(whole, leaves), ys, steps, ~holds)


def _masked(loop: Loop, going: Array, fill: Prefix) -> tuple[Loop, list[Array]]:
    """The loop whose step is told what is taken, and the leaves of its state."""
    if loop.rows is not None:
        return mask_rows(loop, going, fill), loop.state
    hoisted = flatten_only(dataclasses.replace(loop, state=as_arrays(loop.state), xs=as_arrays(loop.xs)))
    flat = hoisted.loop
    pair, consts, _ = good_pair(flat, going, lifted=False)
    return dataclasses.replace(flat, step=masked_step(flat, fill), consts=(pair, consts)), flat.state


def _stack(loop: Loop, ran: list[PyTree], fill: Prefix) -> PyTree:
    """Ys of all steps, from those of the steps that were taken, in their order."""
    if not ran:
        nothing = jax.tree.map(lambda leaf: jax.lax.slice_in_dim(jnp.asarray(leaf), 0, 0), loop.xs)
        _, ran = run(dataclasses.replace(loop, xs=nothing, length=0))
        ran = [ran]
        left = loop.length
    else:
        left = loop.length - len(ran)
    filled = [
        jnp.broadcast_to(value, (left, *leaf.shape[1:]))
        for value, leaf in zip(fill_leaves(fill, ran[0]), jax.tree.leaves(ran[0]), strict=True)
    ]
    parts = [*ran, jax.tree.unflatten(jax.tree.structure(ran[0]), filled)]
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *(parts[::-1] if loop.reverse else parts))
