"""`run_chunked` runs a loop in nested chunks: the only combinator over loops."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from .._avals import PyTree
from .feed import Feed, Slot, slots_of
from .loop import Arrays, Plan, Step
from .run import in_one_mesh, run
from .sizes import AroundChunk


@dataclass(frozen=True)
class Level:
    """One of the nested sizes into which a loop is cut.

    Attributes:
        size: the steps of a chunk.
        around: what is put around the step that runs a chunk; None: nothing.
        slots: the slots of the feed that have one entry for each chunk of this level.
        outputs: what runs a chunk, or the remainder, in place of the step that does so and keeps all of its outputs.
            What it returns leads with however many are kept of each.
    """

    size: int
    around: AroundChunk | None = None
    slots: tuple[Slot[Any], ...] = ()
    outputs: Callable[[RunChunk], Step] | None = None

    def inside(self, around: AroundChunk, slots: tuple[Slot[Any], ...] = ()) -> Level:
        """The level inside of something more that is put around its chunks, which has entries in these slots."""
        around = around if self.around is None else Outside(self.around, around)
        return dataclasses.replace(self, around=around, slots=(*self.slots, *slots))


@dataclass(frozen=True)
class Outside:
    """What is put around chunks: something, and something else around that."""

    inner: AroundChunk
    outer: AroundChunk

    @property
    def recomputes(self) -> bool:
        """Whether what it puts around chunks has the gradient compute them once more."""
        return recomputes(self.inner)

    def __call__(self, step: Step, looped: bool) -> Step:
        """Both, around a step that runs a chunk."""
        return self.outer(self.inner(step, looped), looped)


def recomputes(around: AroundChunk | None) -> bool:
    """Whether what is put around chunks has the gradient compute them once more."""
    return bool(getattr(around, "recomputes", False))


@dataclass(frozen=True, repr=False)  # JAX asks for its name: a repr would print all that it holds
class RunChunk:
    """A step that runs the steps of a loop, over the stretch of xs that it is fed.

    Attributes:
        plan: the loop.
        levels: how it is cut.
    """

    plan: Plan
    levels: tuple[Level, ...] = ()

    def __call__(self, consts: PyTree, state: PyTree, feed: Feed) -> tuple[PyTree, PyTree]:
        return run_chunked(self.plan, self.levels, Arrays(consts, state, feed))

    @property
    def length(self) -> int:
        """The number of steps."""
        return self.plan.length

    @property
    def is_loop(self) -> bool:
        """Whether XLA runs all of it as a loop. It puts a loop of one step into the program around it.

        `jax.lax.scan` does so with steps that are left over if it unrolls the others.
        """
        length, unroll = self.length, self.plan.lowering.unroll
        sizes = [level.size for level in self.levels if level.size < length]
        if sizes:
            return length // sizes[-1] > 1
        return unroll is not True and length > unroll and length % unroll == 0

    def rolled(self) -> RunChunk:
        """What runs the same steps as a loop, whatever `unroll` says, if there are several of them."""
        lowering = dataclasses.replace(self.plan.lowering, unroll=1)
        return self if self.is_loop else RunChunk(self.plan.having(lowering=lowering), self.levels)


def run_chunked(plan: Plan, levels: tuple[Level, ...], given: Arrays) -> tuple[PyTree, PyTree]:
    """Runs a loop in nested chunks; the results are those of `run`.

    Chunks lie at the multiples of each size, in reverse too; the remainder is at the highest positions. Main part,
    remainder and every level share the loop's own step, so that lax.scan traces it once.

    Args:
        plan: the loop.
        levels: ascending in size, each dividing the next. Nothing is put around a chunk that holds the whole loop,
            unless the feed has an entry for it: then it is its remainder.
        given: what it runs on.
    """
    given = in_one_mesh(plan, given) if levels else given
    while levels and levels[-1].size >= plan.length and not levels[-1].slots:
        levels, outputs = levels[:-1], levels[-1].outputs
        if outputs is not None:
            return outputs(RunChunk(plan, levels))(*given)
    if not levels or not plan.length:
        return run(plan, given)
    left = plan.length if levels[-1].size >= plan.length else plan.length % levels[-1].size
    if left == 1 and _may_grow(levels[-1]):
        left += levels[-1].size
    last = _around(levels[-1], RunChunk(plan.having(length=left), levels[:-1]), looped=False)
    consts, state, xs = given
    if left == plan.length:
        return last(consts, state, _first_entries(xs, levels[-1]))
    main, rest = _split_feed(xs, plan.length - left, levels)
    whole = plan.having(length=plan.length - left)  # without xs, nothing else says how many these are
    if not left:
        return _run_main(whole, levels, Arrays(consts, state, main))
    if plan.reverse:
        state, end = last(consts, state, rest)
        state, start = _run_main(whole, levels, Arrays(consts, state, main))
    else:
        state, start = _run_main(whole, levels, Arrays(consts, state, main))
        state, end = last(consts, state, rest)
    return state, jax.tree.map(lambda a, b: jnp.concatenate([a, b]), start, end)


def _may_grow(level: Level) -> bool:
    """Whether a remainder of one step may be joined to the last chunk of a level.

    XLA puts a single step into the program around it. If the gradient recomputes that step, XLA may round it and its
    derivative in two ways, and what the step decides is lost.
    """
    return recomputes(level.around) and level.outputs is None and not level.slots


def _around(level: Level, chunk: RunChunk, *, looped: bool) -> Step:
    step = chunk if level.outputs is None else level.outputs(chunk)
    return step if level.around is None else level.around(step, looped)


def _split_feed(xs: Feed, steps: int, levels: tuple[Level, ...]) -> tuple[Feed, Feed]:
    """The feed of all whole chunks of the last level, which hold the first `steps` steps, and that of the rest."""
    last, units = levels[-1], {slot: level.size for level in levels for slot in level.slots}
    main, rest = _group(xs._replace(extra=None), steps, last.size)
    for slot, entries in slots_of(xs):  # one for each step, or for each chunk of a level
        unit = units.get(slot, 1)
        of_main, of_rest = _group(entries, steps // unit, last.size // unit)
        if slot in last.slots:
            of_main, of_rest = jax.tree.map(lambda leaf: leaf[:, 0], of_main), _first(of_rest)
        main, rest = slot.put(main, of_main), slot.put(rest, of_rest)
    return main, rest


def _first(entries: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: leaf[0], entries)


def _first_entries(xs: Feed, level: Level) -> Feed:
    """The feed of a single chunk of a level."""
    for slot in level.slots:
        xs = slot.put(xs, _first(slot.of(xs)))
    return xs


def _group(tree: PyTree, steps: int, size: int) -> tuple[PyTree, PyTree]:
    """The first `steps` entries of each leaf in groups of `size`, and the others."""

    def group(leaf: Any) -> Any:
        head = leaf if leaf.shape[0] == steps else jax.lax.slice_in_dim(leaf, 0, steps)
        return head.reshape(steps // size, size, *leaf.shape[1:])

    if all(leaf.shape[0] == steps for leaf in jax.tree.leaves(tree)):
        return jax.tree.map(group, tree), tree
    return jax.tree.map(group, tree), jax.tree.map(lambda leaf: jax.lax.slice_in_dim(leaf, steps, None), tree)


def _run_main(plan: Plan, levels: tuple[Level, ...], given: Arrays) -> tuple[PyTree, PyTree]:
    size = levels[-1].size
    step = _around(levels[-1], RunChunk(plan.having(length=size), levels[:-1]), looped=True)
    state, ys = run(plan.having(step=step, length=plan.length // size, lowering=plan.lowering.plain), given)
    return state, jax.tree.map(lambda y: y.reshape(y.shape[0] * y.shape[1], *y.shape[2:]), ys)
