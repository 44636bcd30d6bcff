"""Writes the outputs of a masked loop in place, while nothing is differentiated.

A branch that returns the outputs of a chunk writes them, or what represents them, has them copied out of it, and the
loop around copies them to their places. Here arrays for the outputs of all steps are carried instead: a chunk that is
run writes into them step by step, and one that is not leaves them alone. Of two branches XLA copies nothing if one
only hands on what it is given; so the tiers of `compact` are tried one after the other. The derivative is that of the
loop that stacks, as what is carried would be saved for each chunk.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from ..._avals import stacked_type, vary_over, varying_axes
from ..._cpu.writes import Places, entry, indices_of, put_entry, put_rows_of_steps, writes_in_place
from ..._loop.chunk import RunChunk, as_step
from ..._loop.loop import Feed, Loop, Step
from ..._loop.run import debugs_nans, run
from ..._trace.equations import has_large_products
from ..._trace.hoist import Unproven, push_plainly
from ..._types import Array, PyTree
from ..checkpoint import is_remat3
from ..nest import plan
from ..outputs import emitting, is_thinned, run_keeping
from ..weights.in_bulk import with_early_products, without_early_products
from ..weights.products import LARGE
from .axes import RowAxes
from .compact import put_rows, take_feed, take_rows
from .leaves import Schedule
from .mask import masked_step

Result = tuple[PyTree, list[Array]]

Derive = Callable[[Loop, int, list[Array], Any], tuple[Any, Any]]
"""Maps a loop whose step returns its outputs as a list, the steps of a chunk, the outputs of steps that are not run,
`[T, ...]`, and the tangents of (consts, state, xs) to the results and their tangents; `Unproven` where it may not."""


class _Given(NamedTuple):
    consts: PyTree
    state: PyTree
    xs: Feed

    def put_into(self, loop: Loop) -> Loop:
        return dataclasses.replace(loop, consts=self.consts, state=self.state, xs=self.xs)


class Carried(NamedTuple):
    """What goes from chunk to chunk.

    Attributes:
        state: the loop's.
        outputs: for each leaf of y, those of all steps, where `Places` has them.
    """

    state: PyTree
    outputs: list[Array]


def write_in_place(loop: Loop, tiers: tuple[int, ...], derive: Derive | None) -> Loop:
    """The loop with a runner that writes its outputs in place. If that is impossible or useless, the loop itself.

    Under `jax_remat3` the derivative of a rule like that of `InPlace` saves what its checkpoints were to leave out.
    """
    chunks = loop.wishes[0].size < loop.length and len(loop.wishes) == 1
    held = any(slot is not None for slot in loop.rows.outputs.idle.held or ())
    changed = loop.remat is not None or is_thinned(loop.keeps) or held
    fits = chunks and writes_in_place() and not is_remat3() and not changed
    apart = loop.rows.apart() and not debugs_nans()
    return dataclasses.replace(loop, runner=InPlace(tiers, apart, derive)) if fits else loop


@dataclass(frozen=True)
class InPlace:
    """Runs a masked loop in chunks that write their outputs.

    Attributes:
        tiers: the numbers of rows to choose from; only the last, all of them, where rows are not ordered.
        drops_stand_ins: whether padded rows may be shown their own values; see `mask.masked_step`.
        derive: the derivative, where it is not that of the loop that stacks; None: it is.
    """

    tiers: tuple[int, ...]
    drops_stand_ins: bool
    derive: Derive | None

    def __call__(self, loop: Loop) -> Result:
        stacked, levels = plan(loop)
        keeps = loop.keeps or ()
        given = _Given(stacked.consts, stacked.state, stacked.xs)
        empty = _Given(None, None, Feed(None))  # the rule may not hold tracers
        stacked, loop = empty.put_into(stacked), empty.put_into(loop)
        plain = loop.step
        step = masked_step(loop.step, stands_in=False) if self.drops_stand_ins else loop.step
        loop = dataclasses.replace(loop, step=emitting(step, keeps))

        def rule(primals: tuple[_Given], tangents: tuple[_Given]) -> tuple[Any, Any]:
            if self.derive is not None and len(levels) == 1:
                whole = primals[0].put_into(dataclasses.replace(stacked, step=emitting(plain, keeps)))
                with contextlib.suppress(Unproven):
                    return self.derive(whole, levels[0].size, self._outputs(whole), tangents[0])

            def stack(given: _Given) -> Result:
                return run_keeping(given.put_into(stacked), levels, keeps)

            return push_plainly(stack, primals[0], tangents[0])

        function = jax.custom_jvp(lambda given: self._run(given.put_into(loop), levels[0].size))
        function.defjvp(rule, symbolic_zeros=True)
        return function(given)

    def _run(self, loop: Loop, size: int) -> Result:
        products = has_large_products(loop.trace.jaxpr, LARGE)
        return write_chunks(loop, size, self._outputs(loop), self.tiers, loop.rows.axes, products=products)

    @staticmethod
    def _outputs(loop: Loop) -> list[Array]:
        """The outputs of a loop that runs nothing."""
        kept = zip(loop.trace.y_avals, loop.keeps or (), strict=True)
        y = [aval for aval, keep in kept if keep is not None]
        types = [stacked_type(leaf, loop.length) for leaf in y]
        idle = loop.rows.outputs.idle(loop.state, types)
        masked = varying_axes(jax.typeof(loop.xs.valid))
        return [vary_over(leaf, varying_axes(of) | masked) for leaf, of in zip(idle, y, strict=True)]


def write_chunks(
    loop: Loop,
    size: int,
    outputs: list[Array],
    tiers: tuple[int, ...] = (0,),
    axes: RowAxes | None = None,
    *,
    products: bool = False,
) -> Result:
    """Runs the chunks of a loop that its schedule selects. Its steps write their outputs, a list, in place.

    Args:
        loop: the loop; its feed's schedule is a `leaves.Schedule`.
        size: the steps of a chunk.
        outputs: those of steps that are not run, `[T, ...]`.
        tiers: the numbers of rows to choose from; one for all of them.
        axes: where the rows are, if there are several tiers.
        products: whether a step has products that may be computed for a chunk at once.
    """
    schedule: Schedule = loop.xs.schedule
    loop = dataclasses.replace(loop, xs=loop.xs._replace(schedule=None))
    count, left = divmod(loop.length, size)
    places = Places(size, folded=not left and len(tiers) == 1)
    main = _Chunk(as_step(dataclasses.replace(loop, length=size)), tiers, axes, products, places)
    carried = Carried(loop.state, places.lay(outputs))
    consts = (loop.consts, places.lay(loop.xs))
    scheduled = jax.tree.map(lambda leaf: jax.lax.slice_in_dim(leaf, 0, count), schedule) if left else schedule
    whole = Feed(places.starts(count), schedule=scheduled)

    def run_rest(carried: Carried) -> Carried:  # not worth further copies of the body
        rest = _Chunk(as_step(dataclasses.replace(loop, length=left)), tiers[-1:], axes, products, Places(left))
        last = jax.tree.map(lambda leaf: jax.lax.index_in_dim(leaf, count, keepdims=False), schedule)
        return rest(consts, carried, Feed(np.uint32(count * size), schedule=last))[0]

    carried = run_rest(carried) if left and loop.reverse else carried
    chunks = dataclasses.replace(
        loop, step=main, consts=consts, state=carried, xs=whole, length=count, unroll=1, lowering=()
    )
    carried, _ = run(chunks)
    carried = run_rest(carried) if left and not loop.reverse else carried
    return carried.state, places.unlay(carried.outputs)


@dataclass(frozen=True)
class _Chunk:
    """A step that runs the scheduled part of a chunk. Its consts are (consts, xs), its x is where the chunk begins.

    Attributes:
        steps: runs the steps of a chunk.
        tiers: the numbers of rows to choose from.
        axes: where the rows are; None where there is one tier.
        products: whether a step has products that may be computed for a chunk at once.
        places: where its steps are in xs and outputs.
    """

    steps: RunChunk
    tiers: tuple[int, ...]
    axes: RowAxes | None
    products: bool
    places: Places

    def __call__(self, consts: PyTree, state: Carried, feed: Feed) -> tuple[Carried, None]:
        schedule: Schedule = feed.schedule
        inner, xs = consts

        def all_rows(carried: Carried) -> Carried:
            fed = self.places.of_chunk(xs, feed.x) if self.products else xs
            loop, step, consts = self._begin(inner, carried.state, fed)
            writing = dataclasses.replace(
                loop,
                step=_Write(step, self.places.folded),
                consts=(consts, xs, feed.x),
                state=carried,
                xs=Feed(self.places.steps()),
            )
            return run(writing)[0]

        def first_rows(rows: int, carried: Carried) -> Carried:
            assert schedule.order is not None
            assert self.axes is not None
            live, axes = schedule.order[:rows], self.axes
            fed = take_feed(self.places.of_chunk(xs, feed.x), axes.x, live)
            loop, step, consts = self._begin(
                take_rows(inner, axes.consts, live), take_rows(carried.state, axes.state, live), fed
            )
            new, ys = run(dataclasses.replace(loop, step=step, consts=consts, xs=Feed((self.places.steps(), fed))))
            outputs = [
                jax.lax.dynamic_update_slice_in_dim(out, y, feed.x, 0)
                if axis is None
                else put_rows_of_steps(out, y, axis, live, feed.x)
                for out, y, axis in zip(carried.outputs, ys, axes.y, strict=True)
            ]
            return Carried(put_rows(carried.state, new, axes.state, live), outputs)

        run_tiers: list[Callable[[Carried], Carried]] = [
            *(functools.partial(first_rows, tier) for tier in self.tiers[:-1]),
            all_rows,
        ]

        def run_some(carried: Carried) -> Carried:
            if len(run_tiers) == 1:
                return all_rows(carried)
            for branch, run_tier in enumerate(run_tiers, 1):
                carried = jax.lax.cond(schedule.branch == branch, run_tier, _as_it_is, carried)
            return carried

        return jax.lax.cond(jax.lax.gt(schedule.branch, np.int32(0)), run_some, _as_it_is, state), None

    def _begin(self, consts: PyTree, state: PyTree, fed: Feed) -> tuple[Loop, Step, PyTree]:
        loop = self.steps.loop(consts, state, fed)
        step, consts = with_early_products(loop) if self.products else without_early_products(loop)
        return loop, step, consts


@dataclass(frozen=True)
class _Write:
    """A step that writes its outputs. Its consts are (consts, xs, the chunk's x), its x is its place in the chunk."""

    step: Step
    folded: bool

    def __call__(self, consts: PyTree, state: Carried, feed: Feed) -> tuple[Carried, None]:
        (inner, xs, start), place = consts, feed.x
        at = indices_of(start, place, folded=self.folded)
        fed = jax.tree.map(lambda leaf: entry(leaf, at), xs)
        new, ys = self.step(inner, state.state, Feed((place, fed)))
        outputs = zip(state.outputs, ys, strict=True)
        return Carried(new, [put_entry(out, y, at) for out, y in outputs]), None


def _as_it_is(carried: Carried) -> Carried:
    return carried
