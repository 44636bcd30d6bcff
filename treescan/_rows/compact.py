"""`compact` runs the body only on the live rows of a chunk."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._avals import Array, LeafAxes, PyTree, in_mesh, is_sharded, mesh_of, types_of, vary_over, varying_axes
from .._cpu import writes
from .._cpu.rows import gather_rows
from .._errors import BodyFault, Fault, Misuse, TreescanError
from .._loop.feed import Feed, one_step, slots_of, spread
from .._loop.loop import Loop, Step
from .._trace.equations import equations_within, jaxprs_within, place_of
from .._trace.hoist import trace_also, whole_state
from .._transforms.refuse import refuse_symbolic
from .._tree import map_leaves
from .axes import RowAxes
from .leaves import ORDER, may_branch

PARTS, LARGE_PARTS, MOST_EQUATIONS = (1, 2, 4, 16), (1, 2, 16), 100
"""What the batch is divided by for the tiers of `compact=True`; the same for a large step, which takes seconds to
compile; and the equations from which on a step is large. The body is compiled once for each tier.

Measured with `benchmarks/small_tiers.py`, 64 rows, by the half of the steps that is held back. Against seven tiers,
each twice the one before, four take 0.65 of the time to compile. They take 0.98 of the time to run rows of uniform
lengths, 0.97 of lognormal and 1.05 of Pareto lengths; at worst 1.12, 1.07 and 1.21. Three take 0.52, and at worst
1.24, 1.47 and 1.15. Those of a large step were chosen with `benchmarks/tiers.py`.
"""

_Idle = Callable[[PyTree, PyTree], PyTree]


@dataclass(frozen=True, repr=False)  # JAX asks for its name: a repr would print all that it holds
class LiveRows:
    """The step that runs another on some of the rows alone, and puts everything in its place.

    Its feed has the `ORDER` of the rows.

    Attributes:
        step: runs a chunk of the loop.
        rows: how many rows it runs on.
        axes: where the rows are in the arguments and outputs.
        idle: the outputs of a chunk in which nothing is run, from the state and their types.
    """

    step: Step
    rows: int
    axes: RowAxes
    idle: _Idle

    def __call__(self, consts: PyTree, state: PyTree, feed: Feed) -> tuple[PyTree, PyTree]:
        order, feed = ORDER.take(feed)
        live, axes = order[: self.rows], self.axes
        new, ys = self.step(
            take_rows(consts, consts.spread(axes.consts), live),
            take_rows(state, axes.state, live),
            take_feed(feed, axes.x, live),
        )
        y_axes = _after_time(axes.y)
        types = [_with_rows(y, axis, order.size) for y, axis in zip(jax.tree.leaves(ys), y_axes, strict=True)]
        idle = self.idle(state, jax.tree.unflatten(jax.tree.structure(ys), types))
        return put_rows(state, new, axes.state, live), put_rows(idle, ys, y_axes, live)


def take_rows(tree: PyTree, axes: LeafAxes, rows: Array) -> PyTree:
    """The given rows of each leaf that has rows. All rows are different: the gradient of the gather relies on it."""

    def take(leaf: Array, axis: int | None) -> Array:
        return leaf if axis is None else gather_rows(leaf, jax.lax.expand_dims(rows, (1,)), axis, distinct=True)

    return map_leaves(take, tree, axes)


def put_rows(tree: PyTree, new: PyTree, axes: LeafAxes, rows: Array) -> PyTree:
    """The leaves of `tree` with the given rows replaced; of a leaf without rows, the new one."""

    def put(leaf: Array, ran: Array, axis: int | None) -> Array:
        if axis is None:
            return ran
        mesh = mesh_of((leaf, ran))
        leaf, ran = (leaf, ran) if mesh is None else in_mesh((leaf, ran), mesh)
        leaf = vary_over(leaf, varying_axes(jax.typeof(ran)))
        return writes.put_rows(leaf, ran, axis, rows)

    return map_leaves(put, tree, jax.tree.leaves(new), axes)


def _with_rows(leaf: Any, axis: int | None, rows: int) -> jax.ShapeDtypeStruct:
    shape = leaf.shape if axis is None else (*leaf.shape[:axis], rows, *leaf.shape[axis + 1 :])
    return jax.ShapeDtypeStruct(shape, leaf.dtype)


def take_feed(feed: Feed, x_axes: LeafAxes, rows: Array) -> Feed:
    """The given rows of what a chunk of steps is fed: time leads."""
    valid = None if feed.valid is None else take_rows(feed.valid, (1,), rows)
    taken = feed._replace(x=take_rows(feed.x, _after_time(x_axes), rows), valid=valid)
    for slot, value in slots_of(feed):
        if slot.rows is None:
            raise Misuse(
                f"{{call}}: `compact` selects rows, and the option that feeds `{slot.name}` to each step does not say "
                "whether it has rows.",
                "Leave `compact` out, or have the option say so: `Slot(name, rows=...)`.",
            )
        if slot.rows:
            taken = slot.put(taken, jax.tree.map(lambda leaf: take_rows(leaf, (1,), rows), value))
    return taken


def _after_time(axes: LeafAxes) -> LeafAxes:
    return tuple(None if axis is None else axis + 1 for axis in axes)


def tiers_of(compact: bool | tuple[int, ...], batch: tuple[int, ...]) -> tuple[int, ...]:
    """The numbers of rows that the body is made for, ascending; the last is the whole batch.

    Raises:
        Fault: for an `ArgumentError` if there are no rows, or a tier has more than there are.
    """
    if not batch:
        raise Misuse(
            "{verb} over {body}: `compact` sorts the rows of a batch, but the batch shape of the mask is [].",
            "Leave `compact` out: for a single row, chunks without a valid step are skipped anyway.",
        )
    refuse_symbolic(batch[0], "compact", of="rows")
    if not isinstance(compact, bool):
        return (*_below(compact, batch[0]), batch[0])
    return spread_tiers(batch[0])


def spread_tiers(rows: int, parts: tuple[int, ...] = PARTS) -> tuple[int, ...]:
    """The batch, and parts of it, in ascending order."""
    return tuple(sorted({math.ceil(rows / part) for part in parts}))


def fewer_tiers(tiers: tuple[int, ...], jaxpr: Any) -> tuple[int, ...]:
    """The tiers that are left if the step, an open jaxpr, is large."""
    return spread_tiers(tiers[-1], LARGE_PARTS) if len(equations_within(jaxpr)) > MOST_EQUATIONS else tiers


def _below(tiers: tuple[int, ...], rows: int) -> list[int]:
    above = [tier for tier in tiers if tier > rows]
    if above:
        raise Misuse(
            f"{{verb}} over {{body}}: `compact` names a tier of {above[0]} rows, but the batch has {rows}.",
            "A tier is a number of rows that the body is compiled for. The whole batch is always a tier.",
        )
    return sorted({tier for tier in tiers if tier < rows})


def trace_tiers(traced: Loop, loop: Loop, axes: RowAxes, tiers: tuple[int, ...]) -> None:
    """Traces the body for each number of rows but the whole batch, for which `hoist` has.

    Args:
        traced: what `hoist(loop)` returned.
        loop: the loop before, its state in its own structure.
        axes: where its rows are.
        tiers: the numbers of rows.
    """
    before = axes._replace(consts=axes.consts.inner)
    for tier in tiers[:-1]:
        given = types_of(functools.partial(_first_rows, before, tier), loop.consts, whole_state(traced), loop.xs)
        consts, state, feed = given
        y = [_with_rows(leaf, axis, tier) for leaf, axis in zip(jax.tree.leaves(traced.hoisted.y), axes.y, strict=True)]
        try:
            fewer = trace_also(traced, loop, (consts, state, one_step(feed)), tuple(leaf.shape for leaf in y))
        except Fault as fault:
            raise _of_fewer_rows(fault, tier, max(tiers)) from None
        except Exception as error:
            raise failed_with_fewer_rows(error, "{body}", tier, max(tiers), _ANY_ROWS) from None
        refuse_shared_draws(traced.hoisted.jaxpr, fewer.jaxpr, tier, max(tiers))


_ANY_ROWS = (
    "The body must work for any number of rows. `compact` cannot select the rows of an array that the body closes "
    'over: pass such an array through the carry, or through xs with None in `{in_axes}` and a tree in `row_axes["x"]` '
    "that says where its rows are."
)


def failed_with_fewer_rows(error: Exception, whose: str, tier: int, rows: int, cure: str) -> Exception:
    """What to raise if a function fails with fewer rows: an error with its likely cause, if it may be the shapes."""
    called = f"`compact` called it with {tier} of the {rows} rows"
    if isinstance(error, TreescanError) or not isinstance(error, TypeError | ValueError):
        error.add_note(f"This happened when {called}.")
        return error
    return BodyFault(f"{whose} failed when {called}. {type(error).__name__}: {error}", cure, cause=error)


def _of_fewer_rows(fault: Fault, tier: int, rows: int) -> Fault:
    """The error for a body that fails with fewer rows, and its most likely cause."""
    return Fault(
        fault.error,
        f"{fault.says.rstrip('.')} when `compact` called it with {tier} of the {rows} rows.",
        _ANY_ROWS,
        header=fault.header,
        rows=fault.rows,
    )


def _first_rows(axes: RowAxes, count: int, consts: PyTree, state: PyTree, feed: Feed) -> tuple[Any, Any, Any]:
    rows = jnp.arange(count)
    consts = take_rows(consts, spread(consts, axes.consts), rows)
    return consts, take_rows(state, axes.state, rows), take_feed(feed, axes.x, rows)


def refuse_tiers(tiers: tuple[int, ...], loop: Loop) -> None:
    """Refuses to sort rows if no branch may depend on data, or if their type shards them over devices."""
    if len(tiers) < 2:
        return
    if not may_branch():
        raise Misuse(
            "{verb} over {body}: `compact` branches on {mask}. Here JAX does not track which values vary over "
            "devices, and devices that take different branches would deadlock. This is so in a `jax.shard_map` with "
            "`check_vma=False`, and in `jax.pmap`.",
            "Leave `check_vma` on, or leave `compact` out.",
        )
    if any(is_sharded(leaf) for leaf in jax.tree.leaves((loop.state, loop.xs.x, loop.xs.valid))):
        raise Misuse(
            "{verb} over {body}: `compact` sorts the rows of a batch, but they are sharded over an explicit mesh.",
            "Leave `compact` out, or run the scan inside `jax.shard_map`, where each device sorts its own rows.",
        )


_DRAWS = frozenset({"random_bits", "random_split", "rng_bit_generator", "rng_uniform"})


def refuse_shared_draws(step: Any, of_fewer: Any, tier: int, rows: int) -> None:
    """Refuses a step that draws random numbers for all rows at once: with fewer rows, they would be others.

    How many numbers a draw makes tells, wherever its key comes from: the carry, xs, a slot, or a closure.

    Args:
        step: its trace for all rows, an open jaxpr.
        of_fewer: that for fewer.
        tier: how many these are.
        rows: how many all are.
    """
    pairs = itertools.zip_longest(*map(_draws_of, (step, of_fewer)))
    bad = [a or b for a, b in pairs if (a and a.drawn) != (b and b.drawn)]
    if bad:
        found = (next(filter(None, map(place_of, draw.within)), "the body") for draw in bad)
        places = " and ".join(dict.fromkeys(found))
        raise Misuse(
            f"{{call}}: `compact` calls the body with {tier} of the {rows} rows, where random numbers that are drawn "
            f"for all rows at once would be others. They are drawn in {places}.",
            "Give each row a key of its own: `treescan.carries.keys(jax.random.split(key, B))` in the carry, or "
            "`jax.random.split(key, (T, B))` in xs. Draw with `jax.vmap`, for each row on its own.",
            *[_OF_BATCH] * any(draw.of_batch for draw in bad),
        )


def refuse_draws_around(loop: Loop) -> None:
    """Refuses the same of what is around a step that was traced already."""
    tiers, given = loop.masked.tiers, (loop.consts, loop.state, loop.xs)
    step, of_fewer = (
        jax.make_jaxpr(loop.step)(consts, state, one_step(feed))
        for tier in (tiers[-1], tiers[0])
        for consts, state, feed in [types_of(functools.partial(_first_rows, loop.masked.axes, tier), *given)]
    )
    refuse_shared_draws(step.jaxpr, of_fewer.jaxpr, tiers[0], tiers[-1])


_OF_BATCH = (
    "Under `jax.vmap`, what keys of `rbg` and `unsafe_rbg` draw depends on the whole batch. Make the keys with "
    '`impl="threefry2x32"`.'
)


class _Draw(NamedTuple):
    """A draw of random numbers.

    Attributes:
        within: its equation, and those that this is within, outwards.
        drawn: of which shape the numbers are that depend on each other.
        of_batch: whether they depend on the keys of other rows.
    """

    within: tuple[Any, ...]
    drawn: tuple[int, ...]
    of_batch: bool


def _draws_of(jaxpr: Any, within: tuple[Any, ...] = ()) -> Iterator[_Draw]:
    """The draws in an open jaxpr, which is within these equations."""
    for equation in jaxpr.eqns:
        here = (equation, *within)
        if equation.primitive.name in _DRAWS:
            keys = equation.invars[0].aval
            of_batch = "rbg" in str(keys.dtype) and bool(keys.shape)
            yield _Draw(here, (*(keys.shape if of_batch else ()), *equation.params["shape"]), of_batch)
        for inner in jaxprs_within(equation):
            yield from _draws_of(inner, here)
