"""A checked loop, and what it is run from once more: its trace, its rows, and what it is fed.

The steps before the bad one run again, and that one operation by operation.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from ..._avals import Array, LeafAxes, PyTree, TreeDef, in_mesh, mesh_of, place_like, shard, spec_parts, types_of
from ..._loop.chunk import Level, run_chunked
from ..._loop.feed import Consts, Feed, Slot
from ..._loop.loop import Loop, Step, in_turn
from ..._program.nest import KeepUnchanged, run_nested
from ..._rows.axes import Begins, Rows, rows_after_trace, with_axes
from ..._rows.keyword import WithKeyword
from ..._rows.leaves import (
    any_of_all,
    at_step,
    expand,
    last_set,
    mask_of_lengths,
    numbers_of_steps,
    select,
    select_valid,
    take_row,
)
from ..._rows.mask import Mask
from ..._trace.hoist import hoist, lift
from ..._trace.smooth import is_smooth
from ..._trace.steps import Lifted
from ..._transforms.axes import WHOLE
from ..._tree import leaves_with_path, merge, split
from ..resets import ResetRows, begin, begins_of
from .blame import Blame, becomes_bad
from .case import CONSTANT, About, Bad, Case, Evidence, Worst


def batch_of(loop: Loop) -> tuple[int, ...]:
    """The batch shape; () for a loop without rows."""
    valid = loop.xs.valid
    return () if loop.rows is None or valid is None else valid.shape[1:]


def of_rows(value: Array, loop: Loop) -> Array:
    """A value of shape [*batch, ...], its rows sharded as those of the state, where shardings are part of the type."""
    batch = len(batch_of(loop))
    for leaf, axis in zip(loop.state, loop.masked.axes.state, strict=True) if batch else ():
        sharding = jax.typeof(leaf).sharding
        parts = () if axis is None else spec_parts(sharding.spec)[axis : axis + batch]
        if any(part is not None for part in parts):
            return shard(value, NamedSharding(sharding.mesh, PartitionSpec(*parts)))
    return value


def with_heads(loop: Loop, heads: list[Array]) -> Loop:
    """The loop with further leaves before those of its state, which are never reset; in them the rows lead."""
    rows, state, none = loop.rows, [*heads, *loop.state], (False,) * len(heads)
    if rows is None:
        return loop.having(state=state)
    segments = loop.segments
    if segments is not None:
        begins = begins_of(loop, loop.state)
        begins = Begins(begins.flags, [*(None for _ in heads), *begins.targets], (*none, *begins.tables))
        segments = segments._replace(begins=begins)
    before = rows.unchanged
    unchanged = None if before is None else lambda: (*none, *before())
    trace = dataclasses.replace(loop.hoisted, fixed=(*none, *loop.hoisted.fixed))
    axes = (*(0,) * len(heads), *rows.axes.state)
    rows = rows._replace(unchanged=unchanged)
    return with_axes(loop.having(state=state, trace=trace, rows=rows, segments=segments), state=axes)


def in_rows(loop: Loop, traced: Loop) -> Loop:
    """What `hoist` made of a masked loop that `is_untraced`, with its rows where it has them."""
    rows, fixed, segments = loop.masked, traced.hoisted.fixed, loop.segments
    left = rows_after_trace(traced.hoisted, rows.axes, rows.y_axes)
    if segments is not None and segments.begins is not None:
        flags, targets, tables = segments.begins
        segments = segments._replace(begins=Begins(flags, split(fixed, targets)[1], tuple(split(fixed, tables)[1])))
    return traced.having(rows=rows._replace(axes=left.axes, fixed=left.fixed, unchanged=None), segments=segments)


def show_one(leaves: Sequence[Array], axes: LeafAxes, valid: Array) -> list[Array]:
    """The leaves, in which rows that are not valid have what one that is valid has."""
    lender = last_set(valid)
    return [
        leaf if axis is None else select_valid(valid, leaf, take_row(leaf, lender, axis, valid.shape), axis)
        for leaf, axis in zip(leaves, axes, strict=True)
    ]


GOOD = -1
"""In place of a step's number: none went wrong."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Watched:
    """A step after which its state is looked at. It numbers steps in the order in which they run, from 0.

    Its state is [the first bad step, with `counts` the number of this one, *the inner state]. In a masked loop each row
    has its own of these, int32[*batch]: they are masked as the carry is, so that no padding is ever looked at.

    Attributes:
        step: the inner step; its state is a list of leaves.
        keyed: whether the inner step is fed its position too.
        counts: whether the state counts the steps; else the feed has their positions.
        last: the highest position, of a loop in reverse; else None.
        watched: for each leaf of the inner state whether it is looked at: the body may change it.
        axes: for each leaf of the inner state where the batch shape starts; None: it belongs to all rows.
    """

    step: Step
    keyed: bool
    counts: bool
    last: Any
    watched: tuple[bool, ...]
    axes: LeafAxes

    def __call__(self, consts: PyTree, state: list[Array], feed: Feed) -> tuple[PyTree, PyTree]:
        heads = 1 + self.counts
        (first, *count), given = state[:heads], state[heads:]
        number = count[0] if count else feed.position if self.last is None else self.last - feed.position
        new, y = self.step(consts, given, feed if self.keyed else feed._replace(position=None))
        is_good, bad = first == GOOD, jnp.zeros((1,) * first.ndim, bool)
        alike = dict[Any, Array]()  # leaves of one type are reduced together: a reduction is what costs
        for old, leaf, watched, axis in zip(given, new, self.watched, self.axes, strict=True):
            if watched and is_smooth(leaf):
                flags = becomes_bad(old, leaf)
                kind = jax.typeof(flags), axis
                alike[kind] = alike[kind] | flags if kind in alike else flags
        for (_, axis), flags in alike.items():
            bad = bad | any_of_rows(flags, axis, first.ndim)
        bad = is_good & place_like(bad, jax.typeof(first))
        return [select(bad, number, first), *(n + 1 for n in count), *new], y


def any_of_rows(flags: Array, axis: int | None, rows: int) -> Array:
    """bool[*batch], from the flags of a leaf: those of each row together; of all rows, for a leaf without."""
    if axis is None:
        return jnp.any(flags)
    return jnp.any(flags, tuple(i for i in range(flags.ndim) if not axis <= i < axis + rows))


def earliest(firsts: Array) -> Array:
    """int32[]: the first bad step of all rows."""
    none = jnp.iinfo(firsts.dtype).max
    first = jnp.min(jnp.where(firsts == GOOD, none, firsts), initial=none)
    return jnp.where(first == none, GOOD, first)


def positions_of(loop: Loop, place: int = 0, count: int = 1) -> Array:
    """int32[T]: the positions of the steps of a loop among those of all that take turns."""
    positions = jnp.arange(loop.length, dtype=jnp.int32)
    return positions if count == 1 else place + count * positions


@dataclass(frozen=True, eq=False)
class Site:
    """A loop before it was checked.

    Attributes:
        about: the words for messages about it.
        given: the loop; in the names and the structure of the user's.
        traced: the same traced, what the body closes over lifted.
        last: the position of the step that runs first, in reverse.
    """

    about: About
    given: Loop
    traced: Loop
    last: Any

    @property
    def fixed(self) -> tuple[bool, ...]:
        """For each leaf of the state whether no step changes it."""
        return self.traced.hoisted.fixed

    @property
    def mesh(self) -> Any:
        """The mesh over which the arrays of the loop are spread, as far as types or the context tell; or None."""
        meshes = [jax.typeof(leaf).sharding.mesh for leaf in jax.tree.leaves(self.traced.arrays)]
        return next((mesh for mesh in (*meshes, jax.sharding.get_abstract_mesh()) if not mesh.empty), None)

    def once_more(self, taken: Array | None = None) -> Loop:
        """The traced loop without tangents: else a derivative would run through what is run once more.

        Args:
            taken: int32[*batch], how many steps each row ran, of rows that stop early; None: as many as the mask says.
        """
        loop = self.traced
        (consts, state, xs), segments = jax.lax.stop_gradient(loop.arrays), loop.segments
        if segments is not None and segments.begins is not None:
            targets = jax.lax.stop_gradient(segments.begins.targets)
            segments = segments._replace(begins=segments.begins._replace(targets=targets))
        if loop.rows is not None and taken is not None:
            ran = mask_of_lengths(taken, loop.length)
            xs = xs._replace(valid=ran[::-1] if loop.reverse else ran)
        assert isinstance(loop.step, Lifted)
        step = loop.step.silenced()
        bare = loop.having(trace=None, finish=(), wishes=(), lowering=loop.lowering.plain, runner=None)
        return bare.having(step=step, consts=consts, state=state, xs=xs, segments=segments, callee=bare.callee.apart())

    def row_axes(self, rows: Rows | None) -> LeafAxes:
        """For each leaf of the state where these rows are; None: it belongs to all, or there are none."""
        return (None,) * len(self.fixed) if rows is None else tuple(merge(self.fixed, rows.fixed, rows.axes.state))

    def valid_of(self, feed: Feed) -> Array | None:
        """The mask of a step, as the user knows it. A loop whose condition is one bool has none."""
        alone = feed.valid is not None and not feed.valid.ndim and self.given.limit is not None
        return None if alone else feed.valid

    def x_of(self, x: PyTree, consts: Consts | None) -> PyTree:
        """The user's x, of one that a step is fed and the consts of the given loop."""
        x, slices = x.x if isinstance(x, WithKeyword) else x, self.about.slices
        if slices is None:
            return x
        assert consts is not None
        return slices.join(_whole_of(consts), jax.tree.leaves(x))

    @property
    def structure(self) -> TreeDef:
        """Of the state that is the user's; there may be indices around it."""
        return self.traced.hoisted.structure if self.given.rows is None else self.given.hoisted.structure

    def carry_of(self, leaves: Sequence[Any]) -> PyTree:
        """The user's carry, of the leaves of the state."""
        if self.given.limit is not None:
            from ..._until.run import Going

            assert isinstance(self.given.runner, Going)
            return self.given.runner.condition.state_of(leaves)
        state = jax.tree.unflatten(self.structure, leaves)
        return self.given.carry_of(state) if self.given.rows is None else state

    def names_of_state(self) -> tuple[str, ...]:
        """What each leaf of the state is called; one that is not the carry's is the index, which the body sees as x."""
        carry, x = self.given.names
        found = {place: path for path, place in leaves_with_path(carry, self.carry_of(range(len(self.fixed))))}
        return tuple(found.get(i, x) for i in range(len(self.fixed)))

    def names_of_feed(self) -> tuple[list[str], list[str]]:
        """What the leaves that are given whole are called, and those that a step is fed."""
        xs, name = self.given.xs, self.given.names[1]
        x = self.x_of(xs.x, self.given.consts)
        trees = [(name, x)] if self.about.roots is None else zip(self.about.roots, x, strict=False)
        named = [path for root, tree in trees for path, _ in leaves_with_path(root, tree)]
        whole: list[str] = []
        if self.about.slices is not None:
            whole, named = split([axis is None for axis in self.about.slices.axes], named)
        if isinstance(xs.x, WithKeyword):
            named.append("first")
        fed, others = self.traced.xs, {"position": "the position", "valid": "valid"}
        return whole, [*named, *(text for field, text in others.items() if getattr(fed, field) is not None)]


def traced_as_it_runs(loop: Loop) -> Loop:
    """The loop traced, what its body closes over lifted. The body is traced here unless it was already."""
    with jax.disable_jit(False):
        if loop.rows is None:
            return lift(hoist(loop))
        if loop.masked.unchanged is None:
            return loop
        return in_rows(loop, lift(hoist(loop, [not fixed for fixed in loop.masked.unchanged()])))


END: Slot[Array] = Slot("end")
"""int32[], how many steps run."""


@dataclass(frozen=True, eq=False)
class Before:
    """A step that runs if fewer than so many ran before it, and hands on the state else.

    Its x is (how many ran before it, inner x).
    """

    step: Step

    def __call__(self, consts: Consts, state: list[Array], feed: Feed) -> tuple[PyTree, PyTree]:
        end, consts = END.take(consts)
        number, x = feed.x
        new, _ = self.step(consts, state, feed._replace(x=x))
        return [select(number < end, leaf, old) for old, leaf in zip(state, new, strict=True)], None


@dataclass(frozen=True, eq=False)
class Stretch:
    """A chunk of such steps, in a branch: none of those after the end is run."""

    step: Step

    def __call__(self, consts: Consts, state: list[Array], feed: Feed) -> tuple[PyTree, PyTree]:
        end, (numbers, _) = END.read(consts), feed.x
        return jax.lax.cond(
            any_of_all(jnp.min(numbers) < end), self.step, lambda _, state, feed: (state, None), consts, state, feed
        )


class Told:
    """What is static of an evaluated step.

    Attributes:
        blame: its operations.
        names: what its inputs are called.
    """

    def __init__(self) -> None:
        self.blame = Blame()
        self.names: list[str] = []

    def evaluate(self, closed: Any, names: Sequence[str], given: Sequence[Any]) -> list[Any]:
        """Evaluates an open jaxpr of these inputs, what it closes over first, and notes what each is called."""
        self.names += [*names, CONSTANT]
        return self.blame.evaluate(closed, given)


class At(NamedTuple):
    """A step.

    Attributes:
        first: int32[], how many ran before it.
        place: where it is in xs.
        position: what it is called by.
    """

    first: Array
    place: Array
    position: Any

    @classmethod
    def of(cls, first: Array, loop: Loop, last: Any) -> At:
        """The step of a loop before which so many ran; `last` is the position of the first, in reverse."""
        return cls(first, loop.length - 1 - first, last - first) if loop.reverse else cls(first, first, first)


def evidence_of_step(number: Array, sites: Sequence[Site], taken: Any) -> list[tuple[int, Evidence, Told]]:
    """What is known of a step, in a branch that is taken only if there is one: for each loop that may have run it.

    Args:
        number: int32[], how many steps ran before it; -1: there is none.
        sites: the loops that take turns.
        taken: int32[*batch], how many steps ran, of a loop that ends early; None: all.
    """
    count, last = len(sites), sites[0].last
    if count == 1:

        def explain_it(told: Told, number: Array, taken: Any) -> Evidence:
            loop = sites[0].once_more(taken)
            at = At.of(number, loop, last)
            return evidence_at(told, at, state_before(at, loop), sites[0], loop)

        return [(0, *in_branch(number != GOOD, explain_it, number, taken))]
    # The state before the step is found once for all places: else the program would have all blocks once for each.
    loops = [site.once_more() for site in sites]
    position = last - number if sites[0].given.reverse else number
    before, found = _before_turn(number, sites, loops), list[tuple[int, Evidence, Told]]()
    for place, loop in enumerate(loops):

        def explain_turn(told: Told, at: At, before: list[Array], arrays: Any, *, place: int = place) -> Evidence:
            (unchanged, changing), (consts, xs) = split(sites[place].fixed, before), arrays
            there = loops[place].having(consts=consts._replace(unchanged=unchanged), xs=xs)
            return evidence_at(told, at, changing, sites[place], there)

        here, at = (number != GOOD) & (position % count == place), At(number, position // count, position)
        if loop.length:
            evidence, told = in_branch(here, explain_turn, at, before, (loop.consts, loop.xs))
            found.append((place, evidence, told))
    return found


def _before_turn(number: Array, sites: Sequence[Site], loops: Sequence[Loop]) -> list[Array]:
    """The leaves of the state before a step: all steps before it run again, in a branch that is taken if there is one.

    Args:
        number: int32[], how many steps run before it; -1: there is none.
        sites: the loops that take turns.
        loops: the same as they run once more.
    """

    def again(number: Array, leaves: list[Array]) -> list[Array]:
        before = list[Loop]()
        for place, (site, loop) in enumerate(zip(sites, loops, strict=True)):
            positions = positions_of(loop, place, len(sites))
            numbers = site.last - positions if loop.reverse else positions
            step = Before(KeepUnchanged(loop.step, site.fixed))
            xs = loop.xs._replace(x=(numbers, loop.xs.x))
            consts = END.put(loop.consts._replace(unchanged=()), number)
            before.append(loop.having(step=step, consts=consts, state=leaves, xs=xs))
        return run_nested(in_turn(before))[0]

    leaves = merge(sites[0].fixed, loops[0].consts.unchanged, loops[0].state)
    return jax.lax.cond(any_of_all(number != GOOD), again, lambda _, leaves: leaves, number, leaves)


def in_branch(here: Array, explain: Callable[..., Evidence], *operands: Any) -> tuple[Evidence, Told]:
    """What is found out in a branch, and what is static of that. The elements of a vmap take it together."""
    tolds, mesh = list[Told](), mesh_of((here, operands))
    operands = operands if mesh is None else in_mesh(operands, mesh)

    def taken(*operands: Any) -> Evidence:
        tolds.append(Told())
        evidence = explain(tolds[-1], *operands)
        return evidence if mesh is None else in_mesh(evidence, mesh)  # a selection need not name it

    with jax.disable_jit(False):
        shapes = types_of(taken, *operands)

    def nothing(*_: Any) -> Evidence:
        zeros = jax.tree.map(lambda leaf: place_like(jnp.zeros(leaf.shape, leaf.dtype), leaf), shapes)
        return zeros._replace(first=place_like(jnp.int32(GOOD), shapes.first))

    evidence = jax.lax.cond(any_of_all(here), taken, nothing, *operands)
    mine = evidence._replace(first=select(here, evidence.first, jnp.full_like(evidence.first, GOOD)))
    return jax.lax.stop_gradient(mine), tolds[0]


def evidence_at(told: Told, at: At, state: list[Array], site: Site, loop: Loop) -> Evidence:
    """Evaluates a step operation by operation, from the leaves of the state that change.

    Args:
        told: notes what is static of it.
        at: the step.
        state: the state before it.
        site: the loop.
        loop: the same, as it runs once more.
    """
    feed, rows, consts = feed_at(at, loop), loop.rows, loop.consts
    before, axes, valid = merge(site.fixed, consts.unchanged, state), site.row_axes(rows), None
    shown, fed = before, feed
    if rows is not None:  # padded rows are shown what a valid one is
        valid, (x, structure) = feed.valid, jax.tree.flatten(feed.x)
        fed = feed._replace(x=jax.tree.unflatten(structure, show_one(x, rows.axes.x, valid)))
        shown = show_one(before, axes, valid)
    results = _evaluate(told, shown, fed, site, loop)
    after = [jnp.asarray(new, old.dtype) for old, new in zip(before, results, strict=False)]

    def became_bad(old: Array, new: Array, fixed: bool, axis: int | None) -> Bad | None:
        if fixed or not is_smooth(new):
            return None
        ran = True if valid is None or axis is None else expand(valid, new, axis)
        return Bad(jnp.isnan(new) & ran, becomes_bad(old, new) & ran)

    bad = list(map(became_bad, before, after, site.fixed, axes))
    worst = Worst.of(bad)
    rest = [None] * (len(results) - len(after))
    bits = told.blame.bits([*worst.pick(bad), *rest], worst.is_nan)
    position = jnp.asarray(at.position, jnp.int32)
    return Evidence(
        at.first, position, before, after, site.x_of(feed.x, consts.inner), site.valid_of(feed), worst, bits
    )


def feed_at(at: At, loop: Loop) -> Feed:
    """What a step is fed."""
    return jax.tree.map(lambda leaf: at_step(leaf, at.place), loop.xs)


def state_before(at: At, loop: Loop) -> list[Array]:
    """The leaves of the state before a step; where rows begin anew, as they begin."""
    around = loop if loop.rows is None else ResetRows()(Mask.of(0)(loop))
    step = Before(around.step)
    xs = around.xs._replace(x=(numbers_of_steps(loop.length, reverse=loop.reverse), around.xs.x))
    again = around.having(step=step, consts=END.put(around.consts, at.first), xs=xs)
    size = math.isqrt(loop.length) if isinstance(loop.length, int) else 1
    levels = (Level(size, lambda step, looped: Stretch(step)),) if size > 1 else ()
    state, _ = run_chunked(again.plan, levels, again.arrays)
    if loop.segments is None:
        return state
    begins = begins_of(loop, loop.state)
    flags = at_step(begins.flags, at.place)
    return begin(flags, state, begins.targets, loop.masked.axes.state, begins.tables)


def _whole_of(consts: Consts) -> list[Any]:
    """The leaves of xs that are given whole: in these consts, or in those of before a trace."""
    found = WHOLE.of(consts)
    return _whole_of(consts.inner) if found is None else found


def _names_of(consts: Consts | None, whole: Sequence[str]) -> list[str]:
    """What each leaf of the consts of a loop is called before it was traced, from the names of what is given whole."""
    if not whole or consts is None:
        return [CONSTANT] * len(jax.tree.leaves(consts))

    def noted(consts: Consts) -> Consts:
        here = WHOLE.of(consts) is not None
        return WHOLE.note(Consts(), whole) if here else Consts(inner=noted(consts.inner))

    return [name or CONSTANT for name in consts.spread(noted(consts))]


def _evaluate(told: Told, state: list[Array], feed: Feed, site: Site, loop: Loop) -> list[Any]:
    """Evaluates a step, and notes what each of its inputs is called."""
    step, consts = loop.step, loop.consts
    assert isinstance(step, Lifted)
    unchanged, changing = split(site.fixed, state)
    shapes = step.traced.shapes(consts._replace(unchanged=unchanged), changing, feed)
    held = [consts.closed[i] for i in step.places[shapes] if i is not None]
    whole, fed = site.names_of_feed()
    names = [*[CONSTANT] * len(held), *_names_of(consts.inner, whole), *site.names_of_state(), *fed]
    return told.evaluate(
        step.traced.jaxprs[shapes].jaxpr, names, [*held, *jax.tree.leaves((consts.inner, state, feed))]
    )


def case_of(site: Site, told: Told) -> Case:
    """What is static of the evidence."""
    carry = site.carry_of(range(len(site.fixed)))
    return Case(
        site.about,
        site.about.length or site.given.length,
        tuple(told.blame.operations),
        tuple(told.names),
        site.names_of_state(),
        site.fixed,
        site.row_axes(site.traced.rows),
        tuple(jax.tree.leaves(carry)),
        jax.tree.structure(carry),
        site.given.names[0],
        site.mesh,
    )
