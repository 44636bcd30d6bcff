"""`save` and `out_axes`: which outputs are kept, and along which axis they are stacked."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from .._avals import Array, PyTree, as_arrays, exact_int, place_like, types_of
from .._errors import ArgumentError, Misuse, expect, warn_user
from .._loop.chunk import Level, RunChunk, run_chunked
from .._loop.feed import Feed, one_step
from .._loop.loop import Arrays, Loop, Plan, Step, is_untraced
from .._loop.sizes import Wish
from .._trace.hoist import lifted, traced
from .._transforms.axes import move_outputs, spread_prefix, static_axes
from .._transforms.call import Arguments, Call
from .._transforms.refuse import refuse_symbolic, refuse_with_refs
from .._transforms.transform import Stage, Transform
from .._tree import Prefix, split
from .._types import Axes, Save

Keep = int | None
"""Every how many steps an output is kept (1: in all of them), LAST, or None for never."""

ALL, LAST = 1, 0
EVERYTHING = Prefix.of(ALL)


@dataclass(frozen=True)
class KeepOutputs(Transform):
    """`save`: keeps of each output what a prefix of y says."""

    save: Prefix
    stage: ClassVar[Stage] = Stage.THINNED

    @classmethod
    def of(cls, save: Any) -> KeepOutputs | None:
        """What the user said: a prefix of y with "all", "last", numbers or None; None if everything is kept.

        Raises:
            Fault: for an `ArgumentError` if it holds anything else.
        """
        prefix = check_save(save)
        return None if prefix is None else cls(prefix)

    def refuse_part(self, call: Call, given: Arguments) -> None:
        refuse_parts_of_keeps(self.save, call, given)

    def __call__(self, loop: Loop) -> Loop:
        save, reverse = self.save, loop.reverse
        # What has a runner of its own stacks all outputs. So does a pattern without a whole round: it has no loop.
        if is_untraced(loop) or not loop.length or loop.runner is not None:
            return loop.finished(ys=lambda result: keep_afterwards(result.ys, save, reverse=reverse))
        loop = traced(loop)
        keeps, structure = spread_keeps(save, loop.hoisted.y), jax.tree.structure(loop.hoisted.y)
        if is_thinned(keeps):
            refuse_symbolic(loop.length, "save")
            if loop.offset is None:  # the last part of a run may be short
                warn_of_nothing(keeps, loop.length)
            if loop.hoisted.refs:
                refuse_with_refs("save")
            loop = lifted(loop)  # its step becomes a function, which would hold what the body closes over
        loop = loop.having(keeps=keeps)
        return loop.finished(ys=lambda result: without_dropped(kept_leaves(result.ys, keeps), structure, save))


def warn_of_nothing(keeps: tuple[Keep, ...], length: int) -> None:
    """Warns if each k-th output is to be kept of less than k steps."""
    for keep in {keep for keep in keeps if keep is not None and keep > length}:
        says = f'`save={keep}` keeps no output, because there are only {length}. `save="last"` keeps the last one.'
        warn_user(says, UserWarning)


def refuse_parts_of_keeps(save: Prefix, call: Call, given: Arguments) -> None:
    """Refuses to keep every k-th output of a part that does not begin with the first step of k, as far as is known.

    Raises:
        Fault: for an `ArgumentError`.
    """
    blocks = len(call.each)  # that take turns, each of which counts its own layers
    position: Any = given.offset
    if not isinstance(position, np.integer):
        return
    for keep in (keep for keep in save.leaves if keep is not None and keep > 1):
        if not int(position) % (keep * blocks):
            continue
        steps = f"{keep} {{unit}}s" if blocks == 1 else f"{keep * blocks} {{unit}}s, {keep} for each block"
        raise Misuse(
            f"{{call}}: `save={keep}` needs an `offset` that is a multiple of {steps}, got {int(position)}.",
            f"Cut the whole run at multiples of {keep * blocks}. Only the last part may have another length.",
        )


@dataclass(frozen=True)
class MoveOutputs(Transform):
    """`out_axes`: moves the stacked axis of each output; `save` says which outputs have one."""

    axes: Prefix
    save: Prefix | None = None
    stage: ClassVar[Stage] = Stage.MOVED

    @classmethod
    def of(cls, out_axes: Axes, save: Any = "all") -> MoveOutputs | None:
        """What the user said of `out_axes` and `save`; None if all axes stay where they are.

        Raises:
            Fault: for an `ArgumentTypeError` if `out_axes` holds anything but ints.
        """
        if type(out_axes) is int and out_axes == 0:
            return None
        return cls(static_axes("{out_axes}", out_axes), check_save(save))

    def __call__(self, loop: Loop) -> Loop:
        return loop.finished(ys=lambda result: move_kept(result.ys, self.axes.tree, self.save))


def check_save(save: Save) -> Prefix | None:
    """A prefix tree of what is kept: how often, LAST or None. None as a whole: everything is."""
    if isinstance(save, str) and save == "all":
        return None
    prefix = Prefix.of(save)
    leaves = tuple(map(_check_keep, prefix.leaves))
    return None if all(keep == ALL for keep in leaves) else Prefix(leaves, prefix.structure)


def _check_keep(keep: Any) -> int | None:
    if keep is None:
        return None
    if is_positions(keep):
        return ALL  # of which `RecordOutputs` keeps some, and checks the positions
    if isinstance(keep, str) and keep in ("all", "last"):
        return ALL if keep == "all" else LAST
    steps = exact_int(keep)
    kinds = '"all", "last", an int of at least 1, positions or None'
    cure = (
        "An int k keeps the positions k-1, 2k-1 and so on, and None drops an output. Other positions are a `range` or "
        "a NumPy array: `np.array([4, 9, 99])`. Give one for all of y, or a prefix tree of y."
    )
    expect(steps is not None and steps >= 1, "save", kinds, keep, cure, error=ArgumentError)
    return steps


def is_positions(keep: Any) -> bool:
    """Whether it is a sequence of positions; a number in an array of NumPy's is none."""
    return isinstance(keep, range) or (isinstance(keep, np.ndarray) and keep.ndim > 0)


def spread_keeps(save: Prefix, y: PyTree) -> tuple[Keep, ...]:
    """What is kept of each leaf of y.

    Raises:
        Fault: for an `ArgumentError` if the prefix does not fit.
    """
    cure = (
        'Give "all", "last", a number or None for all of y, or a prefix tree of y with these. Positions are a `range` '
        "or a NumPy array, `np.array([4, 9, 99])`: a list or a tuple is a tree."
    )
    return tuple(spread_prefix("`save`", save.tree, y, "y", cure))


def boundaries(keeps: Sequence[Keep], length: int) -> list[Wish]:
    """What outputs that are not kept in all steps ask of the planner."""
    return [Wish(keep, exact=True) for keep in sorted({k for k in keeps if k and k > 1}) if keep < length]


def is_thinned(keeps: Sequence[Keep] | None) -> bool:
    """Whether any output is kept in some steps alone; None: ys are stacked whole."""
    return not {ALL, None}.issuperset(keeps or ())


def keep_afterwards(ys: PyTree, save: Prefix, *, reverse: bool) -> PyTree:
    """Keeps outputs from those of all steps, if steps ran one by one or there is none."""

    def kept(leaf: Array, keep: Keep) -> Array | None:
        if keep is None:
            return None
        if keep == LAST:
            return leaf[0 if reverse else -1] if leaf.shape[0] else jax.lax.full(leaf.shape[1:], 0, leaf.dtype)
        return leaf if keep == ALL else leaf[keep - 1 :: keep]

    leaves, structure = jax.tree.flatten(ys)
    keeps = spread_keeps(save, one_of(ys))
    return without_dropped([kept(leaf, keep) for leaf, keep in zip(leaves, keeps, strict=True)], structure, save)


def one_of(ys: PyTree) -> PyTree:
    """The types of one step's y."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), ys)


def kept_leaves(ys: list[Any], keeps: Sequence[Keep]) -> list[Any]:
    """One entry for each leaf of y, None where nothing is kept, from those that are left."""
    left = iter(ys)
    return [None if keep is None else next(left) for keep in keeps]


def without_dropped(leaves: list[Any], structure: Any, save: Prefix) -> PyTree:
    """The tree of ys, with None in the places where `save` says None."""
    ys = jax.tree.unflatten(structure, leaves)
    return jax.tree.map(lambda keep, part: None if keep is None else part, save.tree, ys, is_leaf=lambda k: k is None)


def move_kept(ys: PyTree, out_axes: Axes, save: Prefix | None) -> PyTree:
    """Moves the stacked axis of the outputs that have one to where `out_axes` wants it."""
    return move_outputs(ys, out_axes, stacked=None if save is None else [keep != LAST for keep in save.spread(ys, "y")])


@dataclass(frozen=True)
class Emit:
    """A step that returns some leaves of y, as a list."""

    step: Step
    flags: tuple[bool, ...]

    def __call__(self, consts: PyTree, state: PyTree, feed: Feed) -> tuple[PyTree, list[Array]]:
        state, y = self.step(consts, state, feed)
        return state, split(self.flags, jax.tree.leaves(y))[0]


def emitting(step: Step, keeps: Sequence[Keep]) -> Emit:
    """A step that returns the leaves of y of which anything is kept."""
    return Emit(step, tuple([keep is not None for keep in keeps]))


@dataclass(frozen=True)
class Thinned:
    """What a level keeps of its chunks.

    Attributes:
        size: the steps of a chunk.
        keeps: for each leaf of y.
        innermost: whether the steps of its chunks are run one by one.
    """

    size: int
    keeps: tuple[Keep, ...]
    innermost: bool

    def __call__(self, chunk: RunChunk) -> Step:
        return (QuietSteps if self.innermost else _LastOfChunks)(chunk, self)

    @property
    def emitted(self) -> list[int]:
        """The leaves of y of which anything is kept."""
        return [i for i, keep in enumerate(self.keeps) if keep is not None]


@dataclass(frozen=True)
class _LastOfChunks:
    """Runs chunks, each of which kept something, and keeps of that the last, for the outputs that ask for no more."""

    chunk: RunChunk
    level: Thinned

    @property
    def is_loop(self) -> bool:
        """Whether XLA runs the chunks as a loop."""
        return self.chunk.is_loop

    def __call__(self, consts: PyTree, state: PyTree, feed: Feed) -> tuple[PyTree, list[Array]]:
        state, ys = self.chunk(consts, state, feed)
        kept = zip(self.level.emitted, ys, strict=True)
        return state, [self._last(self.level.keeps[i], y) for i, y in kept]

    def _last(self, keep: Keep, ys: Array) -> Array:
        if keep == LAST:
            return ys[:1] if self.chunk.plan.reverse else ys[-1:]
        if keep == self.level.size:
            return ys[-1:] if self.chunk.length == self.level.size else ys[:0]
        return ys


@dataclass(frozen=True)
class QuietSteps:
    """Runs the steps of a chunk: those whose outputs are kept by themselves, the others in loops without these.

    Attributes:
        chunk: runs all steps, and keeps all outputs.
        level: what is kept.
        inside: what is put around each of the loops; None: nothing.
    """

    chunk: RunChunk
    level: Thinned
    inside: Callable[[Step], Step] | None = None

    def __call__(self, consts: PyTree, state: PyTree, feed: Feed) -> tuple[PyTree, list[Array]]:
        plan, loud = self.chunk.plan, self._loud_steps()
        always = tuple(keep == ALL for keep in self.level.keeps)
        everything = tuple(keep is not None for keep in self.level.keeps)
        parts = list(itertools.pairwise(sorted({0, plan.length, *loud, *(at + 1 for at in loud)})))
        ys: dict[int, list[Array]] = {i: [] for i in self.level.emitted}
        for start, stop in parts[::-1] if plan.reverse else parts:
            flags = everything if start in loud else always
            given, step = Arrays(consts, state, feed), _as_function(plan, Emit(plan.step, flags))
            state, new = _run_alone(step, given, start) if start in loud else self._run_loop(step, given, start, stop)
            kept = [i for i, flag in enumerate(flags) if flag]
            if not all(always[i] or i in loud[start] for i in kept):
                new = jax.lax.optimization_barrier(new)  # all single steps are the same, so they share one program
            for i, y in zip(kept, new, strict=True):
                if always[i] or i in loud[start]:
                    ys[i].append(y)
        if not all(ys.values()):  # empty stacks for the outputs that no step of this chunk keeps
            _, y = types_of(plan.step, consts, state, one_step(feed))
            for i, leaf in enumerate(jax.tree.leaves(y)):
                if ys.get(i) == []:
                    ys[i] = [place_like(jax.lax.full(leaf.shape, 0, leaf.dtype), leaf)[None][:0]]
        pieces = [each[::-1] if plan.reverse else each for each in ys.values()]
        return state, [each[0] if len(each) == 1 else jnp.concatenate(each) for each in pieces]

    def _run_loop(self, step: Step, given: Arrays, start: int, stop: int) -> tuple[PyTree, list[Array]]:
        whole = (start, stop) == (0, self.chunk.length)
        xs = given.xs if whole else jax.tree.map(lambda leaf: jax.lax.slice_in_dim(leaf, start, stop), given.xs)
        part: Step = RunChunk(self.chunk.plan.having(step=step, length=stop - start))
        return (part if self.inside is None else self.inside(part))(given.consts, given.state, xs)

    def _loud_steps(self) -> dict[int, list[int]]:
        """The steps that keep more than all steps do, and the leaves that they keep."""
        loud: dict[int, list[int]] = {}
        for i, keep in enumerate(self.level.keeps):
            if keep == LAST:
                loud.setdefault(0 if self.chunk.plan.reverse else self.chunk.length - 1, []).append(i)
            elif keep not in (ALL, None) and self.chunk.length == self.level.size:
                loud.setdefault(self.chunk.length - 1, []).append(i)
        return loud


def _run_alone(step: Step, given: Arrays, place: int) -> tuple[PyTree, list[Array]]:
    feed = jax.tree.map(lambda leaf: jax.lax.index_in_dim(leaf, place, keepdims=False), given.xs)
    state, ys = as_arrays(step(given.consts, given.state, feed))  # a call returns a constant as a number
    return state, [y[None] for y in ys]


_FEW = 8


def last_chunk(loop: Loop) -> tuple[int, ...]:
    """Where outputs of the last step alone are kept: a few large chunks that leave no remainder.

    The steps before the last are run without them, and to part them from it cuts in two what the steps read and save.
    In chunks, that copies one chunk at a time.
    """
    length = loop.length
    if not jax.tree.leaves(loop.xs):
        return ()
    dividing = [size for size in range(2, length // 2 + 1) if length % size == 0]
    few = [size for size in dividing if size * _FEW <= length]
    return tuple(few[-1:] or dividing[:1])


def run_keeping(
    plan: Plan, levels: Sequence[Level], given: Arrays, keeps: tuple[Keep, ...]
) -> tuple[PyTree, list[Any]]:
    """Runs a loop in chunks, and keeps of its outputs what is asked for.

    Args:
        plan: the loop.
        levels: ascending in size, with a boundary wherever `boundaries` wants one.
        given: what it runs on, weak types settled where outputs are thinned.
        keeps: for each leaf of y what is kept.

    Returns:
        The last state, and the leaves of ys that are left; see `kept_leaves`.
    """
    sizes = [level.size for level in levels] or [plan.length]
    # Where the chunks have no boundary where one should be, an output is kept in all steps.
    often = tuple(ALL if keep and keep % sizes[0] else keep for keep in keeps)
    if any(getattr(level.around, "recomputes", False) for level in levels) and plan.length % sizes[-1] == 1:
        often = tuple(None if keep is None else ALL for keep in keeps)  # the step that is left over is no loop
    if is_thinned(often):
        plan = plan.having(step=_as_function(plan, plan.step))
        chunks = tuple(
            dataclasses.replace(level, outputs=Thinned(level.size, often, innermost=place == 0))
            if place == 0 or LAST in often or level.size in often
            else level
            for place, level in enumerate(levels or (Level(plan.length),))
        )
        state, ys = run_chunked(plan, chunks, given)
    else:
        state, ys = run_chunked(plan.having(step=emitting(plan.step, keeps)), tuple(levels), given)
    pairs = [(keep, kept) for keep, kept in zip(keeps, often, strict=True) if keep is not None]
    return state, [_finish(y, keep, kept, plan, sizes) for y, (keep, kept) in zip(ys, pairs, strict=True)]


def _as_function(loop: Plan, step: Step) -> Step:
    """A step as one function of the program, which all that run it call, kept with what was made for the loop."""

    def body(consts: PyTree, state: PyTree, feed: Feed) -> tuple[PyTree, PyTree]:
        return step(consts, state, feed)

    return (loop.callee.memo or loop.body.memo).program((_as_function, step), lambda: jax.jit(body))


def _finish(ys: Array, keep: int, kept: Keep, loop: Plan, sizes: Sequence[int]) -> Array:
    """What is asked for of an output that was kept as often as the chunks allowed."""
    if keep == LAST:
        return ys[0] if loop.reverse else ys[-1]
    if keep == ALL or (kept == keep and keep in sizes):
        return ys
    stride = keep if kept == ALL else keep // sizes[0]
    return ys[stride - 1 :: stride]
