"""Runs the chunks of a masked loop that its schedule selects, whose steps write their outputs in place."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np

from .._avals import Array, PyTree
from .._cpu.writes import Places, entry, indices_of, put_entry, put_rows_of_steps
from .._loop.feed import Feed
from .._loop.loop import Arrays, Plan, Step
from .._loop.run import run
from .._rows.axes import RowAxes
from .._rows.compact import put_rows, take_feed, take_rows
from .._rows.leaves import ORDER, SCHEDULE
from .._rows.run_or_leave import run_or_leave, scheduled
from .in_bulk import with_early_products, without_early_products

Result = tuple[PyTree, list[Array]]


class Carried(NamedTuple):
    """What goes from chunk to chunk.

    Attributes:
        state: the loop's.
        outputs: for each leaf of y, those of all steps, where `Places` has them.
    """

    state: PyTree
    outputs: list[Array]


def write_chunks(
    plan: Plan,
    given: Arrays,
    size: int,
    outputs: list[Array],
    tiers: tuple[int, ...] = (0,),
    axes: RowAxes | None = None,
    *,
    products: bool = False,
) -> Result:
    """Runs the chunks of a loop that its schedule selects. Its steps write their outputs, a list, in place.

    Args:
        plan: the loop.
        given: what it runs on; its feed has a `SCHEDULE`.
        size: the steps of a chunk.
        outputs: those of steps that are not run, `[T, ...]`.
        tiers: the numbers of rows to choose from; one for all of them.
        axes: where the rows are, if there are several tiers.
        products: whether a step has products that may be computed for a chunk at once.
    """
    schedule, fed = SCHEDULE.take(given.xs)
    count, left = divmod(plan.length, size)
    places = Places(size, folded=not left and len(tiers) == 1)
    main = _Chunk(plan.having(length=size), tiers, axes, products, places)
    carried = Carried(given.state, places.lay(outputs))
    consts = (given.consts, places.lay(fed))
    scheduled = jax.tree.map(lambda leaf: jax.lax.slice_in_dim(leaf, 0, count), schedule) if left else schedule
    # A mask is read by many fusions. At a pair of indices, XLA's CPU backend does not vectorize these.
    whole = Feed(places.starts(count), valid=consts[1].valid if places.folded else None)

    def run_rest(carried: Carried) -> Carried:  # not worth further copies of the body
        rest = _Chunk(plan.having(length=left), tiers[-1:], axes, products, Places(left))
        last = jax.tree.map(lambda leaf: jax.lax.index_in_dim(leaf, count, keepdims=False), schedule)
        return rest(consts, carried, SCHEDULE.put(Feed(np.uint32(count * size)), last))[0]

    carried = run_rest(carried) if left and plan.reverse else carried
    chunks = plan.having(step=main, length=count, lowering=plan.lowering.plain)
    carried, _ = run(chunks, Arrays(consts, carried, SCHEDULE.put(whole, scheduled)))
    carried = run_rest(carried) if left and not plan.reverse else carried
    return carried.state, places.unlay(carried.outputs)


@dataclass(frozen=True)
class _Chunk:
    """A step that runs the scheduled part of a chunk. Its consts are (consts, xs), its x is where the chunk begins.

    Its feed has the chunk's mask, bool[steps, *batch], if `places` are folded.

    Attributes:
        steps: the loop over the steps of a chunk.
        tiers: the numbers of rows to choose from.
        axes: where the rows are; None where there is one tier.
        products: whether a step has products that may be computed for a chunk at once.
        places: where its steps are in xs and outputs.
    """

    steps: Plan
    tiers: tuple[int, ...]
    axes: RowAxes | None
    products: bool
    places: Places

    def __call__(self, consts: PyTree, state: Carried, feed: Feed) -> tuple[Carried, None]:
        way, feed = scheduled(feed)
        ways: list[Step] = [*(functools.partial(self._first_rows, tier) for tier in self.tiers[:-1]), self._all_rows]
        return run_or_leave(way, ways, _as_it_is, consts, state, feed, in_turn=True)

    def _all_rows(self, consts: PyTree, carried: Carried, feed: Feed) -> tuple[Carried, None]:
        inner, xs = consts
        fed = self.places.of_chunk(xs, feed.x) if self.products else xs
        step, inner = self._begin(Arrays(inner, carried.state, fed))
        consts = inner, xs if feed.valid is None else xs._replace(valid=None), feed.x
        given = Arrays(consts, carried, Feed(self.places.steps(), valid=feed.valid))
        return run(self.steps.having(step=_Write(step, self.places.folded)), given)[0], None

    def _first_rows(self, rows: int, consts: PyTree, carried: Carried, feed: Feed) -> tuple[Carried, None]:
        assert self.axes is not None
        (inner, xs), live, axes = consts, ORDER.read(feed)[:rows], self.axes
        fed = take_feed(self.places.of_chunk(xs, feed.x), axes.x, live)
        state = take_rows(carried.state, axes.state, live)
        step, inner = self._begin(Arrays(take_rows(inner, inner.spread(axes.consts), live), state, fed))
        new, ys = run(self.steps.having(step=step), Arrays(inner, state, Feed((self.places.steps(), fed))))
        outputs = [
            jax.lax.dynamic_update_slice_in_dim(out, y, feed.x, 0)
            if axis is None
            else put_rows_of_steps(out, y, axis, live, feed.x)
            for out, y, axis in zip(carried.outputs, ys, axes.y, strict=True)
        ]
        return Carried(put_rows(carried.state, new, axes.state, live), outputs), None

    def _begin(self, given: Arrays) -> tuple[Step, PyTree]:
        return (with_early_products if self.products else without_early_products)(self.steps, given)


@dataclass(frozen=True)
class _Write:
    """A step that writes its outputs. Its consts are (consts, xs, the chunk's x), its x is its place in the chunk.

    The mask is in its feed, or in xs.
    """

    step: Step
    folded: bool

    def __call__(self, consts: PyTree, state: Carried, feed: Feed) -> tuple[Carried, None]:
        (inner, xs, start), place = consts, feed.x
        at = indices_of(start, place, folded=self.folded)
        fed: Feed = jax.tree.map(lambda leaf: entry(leaf, at), xs)
        fed = fed if feed.valid is None else fed._replace(valid=feed.valid)
        new, ys = self.step(inner, state.state, Feed((place, fed)))
        outputs = zip(state.outputs, ys, strict=True)
        return Carried(new, [put_entry(out, y, at) for out, y in outputs]), None


def _as_it_is(consts: PyTree, carried: Carried, feed: Feed) -> tuple[Carried, None]:
    del consts, feed
    return carried, None
