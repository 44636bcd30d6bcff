"""From the arguments of a verb over layers to its results: one loop a block, and the blocks by turns."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from .._loop import Body, Loop, Memo, is_jit_disabled
from .._retrace import under_a_trace
from .._rewrite import is_rewriting
from .._tree import Prefix
from .._types import PyTree
from .axes import scan_over_axes
from .outputs import ALL, move_kept
from .pipeline import Given, Plan, make_loop
from .turns import Remats, Saves, run_turns


@dataclass(frozen=True)
class Pattern:
    """What a verb over layers was told, less its arrays.

    Attributes:
        blocks: for each block how its own layers are run.
        sequence: whether the user gave a sequence of blocks: then there is one ys for each.
        out_axes: prefix of ys; None as a whole: axis 0 for all.
        remat: what the gradient recomputes, of all blocks or of each.
        saves: for each block what is kept of its outputs.
        name: the profiler's name for the loop.
    """

    blocks: tuple[Plan, ...]
    sequence: bool
    out_axes: Prefix | None
    remat: Remats
    saves: Saves
    name: str | None


def execute_pattern(bodies: tuple[Body, ...], pattern: Pattern, given: Given) -> tuple[PyTree, PyTree]:
    """Runs a verb over layers; see `execute`. The xs that are given are a tuple with one item for each block."""
    memo, programs = bodies[0].memo, bodies[0].programs
    for body in bodies[1:]:
        memo, programs = memo.joint(body.function), programs.joint(body.function)
    assembled = functools.partial(_assemble, bodies, pattern)
    if _has_work(pattern, given) and not is_jit_disabled() and not under_a_trace():
        return programs(("jit", bodies, pattern, is_rewriting()), lambda: jax.jit(assembled))(given)
    return assembled(given, memo)


def _has_work(pattern: Pattern, given: Given) -> bool:
    moves = pattern.out_axes is not None or any(block.in_axes is not None for block in pattern.blocks)
    asked = pattern.remat is not None or any(pattern.saves)
    return moves or len(pattern.blocks) > 1 or given.key is not None or asked


def _assemble(
    bodies: tuple[Body, ...], pattern: Pattern, given: Given, memo: Memo | None = None
) -> tuple[PyTree, PyTree]:
    loops = [_loop_of(bodies, pattern, given, place) for place in range(len(bodies))]
    with jax.named_scope(pattern.name) if pattern.name else contextlib.nullcontext():
        state, each = run_turns(loops, pattern.remat, pattern.saves, memo or Memo())
        ys = tuple(each) if pattern.sequence else each[0]
        saves = [ALL if save is None else save.tree for save in pattern.saves]
        save = Prefix.of(tuple(saves) if pattern.sequence else saves[0])
        return state, (ys if pattern.out_axes is None else move_kept(ys, pattern.out_axes.tree, save))


def _loop_of(bodies: tuple[Body, ...], pattern: Pattern, given: Given, place: int) -> Loop:
    """The loop of one block. A layer's position is its number among all layers."""
    plan = pattern.blocks[place]
    loop = make_loop(bodies[place], plan, given._replace(xs=given.xs[place]))
    if given.key is not None:
        position = place + len(bodies) * jnp.arange(plan.length)
        loop = dataclasses.replace(loop, xs=loop.xs._replace(position=position))
    return loop if plan.in_axes is None else scan_over_axes(loop, plan.in_axes)
