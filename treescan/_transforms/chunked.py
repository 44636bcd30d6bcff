"""What a loop without a mask is put through: remat, truncation, and the choice of its outputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import jax

from .._chunk import Level
from .._errors import ArgumentError, Fault
from .._loop import Loop, as_arrays, is_jit_disabled, run
from .._remat import Remat
from .._sizes import plan_sizes
from .._tree import Prefix
from .._types import PyTree
from .budget import fit_budget
from .hoist import Hoisted, fixed_leaves, flatten_only, hoist
from .outputs import (
    ALL,
    Keep,
    boundaries,
    is_thinned,
    keep_afterwards,
    kept_leaves,
    last_chunk,
    run_keeping,
    spread_keeps,
    without_dropped,
)
from .remat import checkpoint_steps, refuse_symbolic, refuse_to_repeat, refuse_with_refs, remat_level, remat_wishes
from .truncate import truncate


@dataclass(frozen=True)
class ChunkPlan:
    """What a verb was told of memory and outputs.

    Attributes:
        remat: what the gradient recomputes; None: nothing.
        save: a prefix of y: what is kept of the outputs; None: everything.
        truncate: the steps between which the gradient is cut; None: it is not.
    """

    remat: Remat | None = None
    save: Prefix | None = None
    truncate: int | None = None

    @property
    def is_plain(self) -> bool:
        """Whether nothing was asked for."""
        return self.remat is None and self.save is None and self.truncate is None


PLAIN = ChunkPlan()
EVERYTHING = Prefix.of(ALL)


def run_planned(loop: Loop, plan: ChunkPlan) -> tuple[PyTree, PyTree]:
    """Runs a loop as it was planned; its results are those of `run`, less the outputs that are not kept."""
    if plan.is_plain:
        return run(loop)
    if is_jit_disabled() or not loop.length:
        return _run_untraced(loop, plan)
    hoisted = hoist(loop)
    keeps = spread_keeps(plan.save or EVERYTHING, hoisted.y)
    _refuse(hoisted, plan, keeps)
    remat = fit_budget(hoisted, plan.remat) if plan.remat else None
    loop = hoisted.loop
    if plan.truncate:
        loop = truncate(loop, plan.truncate)
    if remat:
        loop = checkpoint_steps(loop, remat)
    levels = levels_for(loop, remat, keeps)
    state, ys = run_keeping(loop, levels, keeps)
    structure = jax.tree.structure(hoisted.y)
    return hoisted.restore(state), without_dropped(kept_leaves(ys, keeps), structure, plan.save or EVERYTHING)


def levels_for(loop: Loop, remat: Remat | None, keeps: Sequence[Keep]) -> tuple[Level, ...]:
    """The nested chunks that serve all: the gradient recomputes those that come nearest to what it wants."""
    wishes = remat_wishes(loop.length, remat)
    sizes = plan_sizes(loop.length, [*wishes, *boundaries(keeps, loop.length)]) if wishes or is_thinned(keeps) else ()
    if not sizes and is_thinned(keeps):
        sizes = last_chunk(loop)
    return levels_of(sizes, remat, [wish.size for wish in wishes])


def levels_of(sizes: Sequence[int], remat: Remat | None, wished: Sequence[int]) -> tuple[Level, ...]:
    """Levels of the given sizes, of which those nearest to the wished ones are recomputed."""
    if remat is None or not sizes:
        return tuple(map(Level, sizes))
    recomputed = {nearest(sizes, wish) for wish in wished}
    last = max(recomputed, default=0)
    return tuple(remat_level(s, remat, outermost=s == last) if s in recomputed else Level(s) for s in sizes)


def nearest(sizes: Sequence[int], wish: int) -> int:
    """The size that comes nearest to a wished one, in ratio."""
    return min(sizes, key=lambda size: max(size / wish, wish / size))


def _run_untraced(loop: Loop, plan: ChunkPlan) -> tuple[PyTree, PyTree]:
    """Step by step on values, or no step at all: what is not kept is thrown away afterwards."""
    if plan.remat and plan.remat.budget and loop.length:  # whether it fits is the same question here
        with jax.disable_jit(False):
            fit_budget(hoist(loop), plan.remat)
    if plan.truncate and loop.length:
        hoisted = flatten_only(dataclasses.replace(loop, state=as_arrays(loop.state)))
        state, ys = run(truncate(hoisted.loop, plan.truncate, fixed_leaves(loop)))
        state = hoisted.restore(state)
    else:
        state, ys = run(loop)
    return state, ys if plan.save is None else keep_afterwards(ys, plan.save, reverse=loop.reverse)


def _refuse(hoisted: Hoisted, plan: ChunkPlan, keeps: Sequence[Keep]) -> None:
    if plan.remat:
        refuse_to_repeat(hoisted)
    if is_thinned(keeps):
        refuse_symbolic(hoisted.loop.length, "save")
        if hoisted.refs:
            refuse_with_refs("save")


def refuse_offload(remat: Remat | None) -> None:
    """Refuses to move carries where the outermost chunks are not those of the plan."""
    if remat is not None and remat.offload is not None:
        raise Fault(
            ArgumentError,
            "{verb} over {body}: {verb} takes no `offload` of a `Remat`, as it recomputes chunks of its own.",
            "Leave it out, or give `levels`, with which less is saved.",
        )


def refuse_budget(remat: Remat | None, where: str) -> None:
    """Refuses to choose a plan by its bytes where these are not known."""
    if remat is not None and remat.budget is not None:
        raise Fault(
            ArgumentError,
            f"{{verb}} over {{body}}: `Remat.fit` does not choose a plan for {where}.",
            "Name one: `Remat(levels=...)`, with more levels where less is to be saved.",
        )
