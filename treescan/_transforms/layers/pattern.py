"""Assembles the loop of a verb over layers: one loop per block, and the blocks in turn."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import jax
import jax.numpy as jnp

from ..._axes import LeafAxes
from ..._loop.body import Memo
from ..._loop.loop import Loop
from ..._remat import Remat
from ..._trace.hoist import hoist
from ..._tree import Prefix
from ..._types import PyTree
from ..axes import scan_over_axes
from ..outputs import ALL, keep_afterwards, move_kept
from ..program import Arguments, Call, execute
from ..refuse import in_reverse_alone
from .turns import (
    Remats,
    Saves,
    beside_states,
    carry_states,
    cotangent_bytes,
    of_x,
    run_turns,
    shape_states,
    trace_turns,
    with_state,
)

if TYPE_CHECKING:
    from ..._errors import Fault
    from ..budget import RematPlan
    from ..progress import ShowProgress
    from .prefetch import Gather


class Watching(Protocol):
    """Watches x during the loop, and reports after the layers have run."""

    def x_of(self, state: list[Any], /) -> PyTree:
        """What the last layer returned."""
        ...

    def evidence(self, state: list[Any], ys: PyTree, /) -> PyTree:
        """The outputs, with what was found."""
        ...


class Check(Protocol):
    """`check_finite`."""

    @property
    def no_forward_mode(self) -> Callable[[], Fault] | None:
        """What is said where JAX refuses forward mode; None: it does not."""
        ...

    def watch(self, loops: Sequence[Loop], /) -> tuple[list[Loop], Watching]:
        """The loops, with a step that looks at x after each layer."""
        ...


@dataclass(frozen=True)
class Pattern:
    """The program of a verb over layers. The xs that it is given are a tuple with one item for each block.

    Attributes:
        blocks: for each block how its own layers are run.
        axes: for each block and each leaf of its xs the axis of the layers; None as a whole: axis 0 for all.
        sequence: whether the user gave a sequence of blocks: then there is one ys for each.
        out_axes: prefix of ys; None as a whole: axis 0 for all.
        remat: what the gradient recomputes, of all blocks or of each.
        saves: for each block what is kept of its outputs.
        name: the profiler's name for the loop.
        states: for each block the number of leaves of its state, which is the last item of its xs; None: no state.
        prefetch: what gathers the next layer while one is computed, for a single block without `remat`.
        check: looks at x after each layer; None: nothing does.
        shown: how the loop shows its progress.
    """

    blocks: tuple[Call, ...]
    axes: tuple[LeafAxes | None, ...]
    sequence: bool
    out_axes: Prefix | None
    remat: Remats
    saves: Saves
    name: str | None
    states: tuple[int, ...] | None = None
    prefetch: Gather | None = None
    check: Check | None = None
    shown: ShowProgress | None = None

    @property
    def moves(self) -> bool:
        """Whether there is work outside the loop."""
        moves = self.out_axes is not None or any(axes is not None for axes in self.axes) or self.prefetch is not None
        moves = moves or len(self.blocks) > 1 or self.remat is not None or any(self.saves)
        return moves or self.states is not None or self.check is not None or self.shown is not None

    def _joint(self, memo: Memo) -> Memo:
        """What is kept for all blocks together, from what is kept for the first."""
        return functools.reduce(Memo.joint, (block.body.function for block in self.blocks[1:]), memo)

    def run(self, given: Arguments) -> tuple[PyTree, PyTree]:
        """Runs the layers."""
        programs = self._joint(self.blocks[0].body.programs)
        with self._refusing_forward_mode():
            return execute(self, given, programs, moves=self.moves or given.key is not None)

    def _refusing_forward_mode(self) -> contextlib.AbstractContextManager[None]:
        if self.prefetch is not None:
            from .prefetch import no_forward_mode

            return in_reverse_alone(no_forward_mode)
        return in_reverse_alone(None if self.shown is None else self.shown.no_forward_mode)

    def __call__(self, given: Arguments) -> tuple[PyTree, PyTree]:
        loops = self.lay(given)
        with jax.named_scope(self.name) if self.name else contextlib.nullcontext():
            if self.check is None:
                state, each = self._run(loops, given)
                return state, self._moved(each)
            loops, watch = self.check.watch(loops)
            state, each = dataclasses.replace(self, shown=of_x(self.shown, watch.x_of))._run(loops, given)
            leaves, *others = (state,) if self.states is None else state
            x, ys = watch.x_of(leaves), watch.evidence(leaves, self._moved(each))
            return (x if self.states is None else (x, *others)), ys

    def _moved(self, each: list[PyTree]) -> PyTree:
        """The outputs of all blocks, the axis of their layers where it is to be."""
        ys = tuple(each) if self.sequence else each[0]
        if self.out_axes is None:
            return ys
        saves = [ALL if save is None else save.tree for save in self.saves]
        return move_kept(ys, self.out_axes.tree, Prefix.of(tuple(saves) if self.sequence else saves[0]))

    def _run(self, loops: list[Loop], given: Arguments) -> tuple[PyTree, list[PyTree]]:
        """The last state, with the stacks of the layers' own states if there are any, and the outputs of each loop."""
        memo = self._joint(self.blocks[0].body.memo)
        if self.states is None:
            return self._run_scanned(loops, self.saves, memo)
        if self.remat is not None or self.prefetch is not None:
            state, each = self._run_scanned(loops, tuple(map(with_state, self.saves)), memo)
            return (state, tuple(new for new, _ in each)), [y for _, y in each]
        (state, stacks, _), each = run_turns(
            carry_states(loops, self.states), None, self.saves, memo, beside_states(self.shown)
        )
        return (state, shape_states(stacks, [xs[-1] for xs in given.xs])), each

    def _run_scanned(self, loops: list[Loop], saves: Saves, memo: Memo) -> tuple[PyTree, list[PyTree]]:
        """The last state and the outputs of each loop, where nothing of the layers' own is carried."""
        if self.prefetch is None:
            return run_turns(loops, self.remat, saves, memo, self.shown)
        from .prefetch import run_prefetched

        state, ys = run_prefetched(loops[0], self.axes[0], self.prefetch)
        return state, [ys if saves[0] is None else keep_afterwards(ys, saves[0], reverse=loops[0].reverse)]

    def plan(self, given: Arguments) -> RematPlan:
        """What the gradient needs under its `remat`, and a plan where that is a budget."""
        from ..budget import plan_of, plan_of_turns

        assert self.remat is None or isinstance(self.remat, Remat)
        loops = [self._loop_of(given, place) for place, call in enumerate(self.blocks) if call.length]
        single = len(self.blocks) == 1
        plan = plan_of(hoist(loops[0]), self.remat) if single else plan_of_turns(trace_turns(loops), self.remat)
        if self.states is None or self.remat is not None:
            return plan
        carried = sum(map(cotangent_bytes, (xs[-1] for xs in given.xs)))  # the gradient of stacks that are carried
        return dataclasses.replace(plan, needed_bytes=plan.needed_bytes + carried)

    def lay(self, given: Arguments) -> list[Loop]:
        """For each block the loop of its layers by themselves."""
        return [self._loop_of(given, place) for place in range(len(self.blocks))]

    def _loop_of(self, given: Arguments, place: int) -> Loop:
        """The loop of one block. A layer's position is its number among all layers."""
        call, axes = self.blocks[place], self.axes[place]
        loop = call.lay(given._replace(xs=given.xs[place]))
        if given.key is not None:
            position = place + len(self.blocks) * jnp.arange(call.length)
            loop = dataclasses.replace(loop, xs=loop.xs._replace(position=position))
        return loop if axes is None or self.prefetch is not None else scan_over_axes(loop, axes)
