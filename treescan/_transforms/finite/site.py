"""What a checked loop is run from once more: its trace, its rows, and what it is fed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self, cast

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from ..._avals import place_like, shard, spec_parts
from ..._axes import LeafAxes
from ..._loop.body import Memo
from ..._loop.loop import Feed, Loop, Step, Transform
from ..._trace.blame import becomes_bad
from ..._trace.hoist import Hoisted, Repeatable, hoist, is_smooth, lift, merge, split
from ..._tree import leaves_with_path
from ..._types import Array, PyTree, TreeDef
from ..rows.axes import Begins, Rows, with_axes
from ..rows.leaves import last_set, mask_of_lengths, select, select_valid, take_row
from ..rows.resets import begins_of


def batch_of(loop: Loop) -> tuple[int, ...]:
    """The batch shape; () for a loop without rows."""
    valid = loop.xs.valid
    return () if loop.rows is None or valid is None else valid.shape[1:]


def of_rows(value: Array, loop: Loop) -> Array:
    """A value of shape [*batch, ...], its rows sharded as those of the state, where shardings are part of the type."""
    batch = len(batch_of(loop))
    for leaf, axis in zip(loop.state, loop.rows.axes.state, strict=True) if batch else ():
        sharding = jax.typeof(leaf).sharding
        parts = () if axis is None else spec_parts(sharding.spec)[axis : axis + batch]
        if any(part is not None for part in parts):
            return shard(value, NamedSharding(sharding.mesh, PartitionSpec(*parts)))
    return value


def with_heads(loop: Loop, heads: list[Array], axes: LeafAxes | None = None) -> Loop:
    """The loop with further leaves before those of its state, which are never reset.

    Args:
        loop: the loop.
        heads: the leaves.
        axes: for each where the rows are, in a loop that has rows; None: they lead in all of them.
    """
    rows, state, none = loop.rows, [*heads, *loop.state], (False,) * len(heads)
    if rows is None:
        return dataclasses.replace(loop, state=state)
    begins = None if rows.resets is None else begins_of(loop, loop.state)
    if begins is not None:
        begins = Begins(begins.flags, [*(None for _ in heads), *begins.targets], (*none, *begins.tables))
    unchanged = None if rows.unchanged is None else lambda: (*none, *rows.unchanged())
    trace = loop.trace._replace(fixed=(*none, *loop.trace.fixed))
    axes = (*(axes or (0,) * len(heads)), *rows.axes.state)
    rows = rows._replace(begins=begins, unchanged=unchanged)
    return with_axes(dataclasses.replace(loop, state=state, trace=trace, rows=rows), state=axes)


def in_rows(loop: Loop, hoisted: Hoisted) -> Hoisted:
    """The trace of a masked loop that `is_untraced`, with its rows where it has them."""
    rows, fixed, begins = loop.rows, hoisted.fixed, loop.rows.begins
    on, state = map(tuple, split(fixed, rows.axes.state))
    _, (closed, _) = hoisted.loop.consts
    axes = rows.axes._replace(consts=(*on, *(None for _ in closed), *rows.axes.consts), state=state)
    if begins is not None:
        begins = Begins(begins.flags, split(fixed, begins.targets)[1], tuple(split(fixed, begins.tables)[1]))
    rows = rows._replace(axes=axes, fixed=on, begins=begins, unchanged=None)
    return hoisted._replace(loop=dataclasses.replace(hoisted.loop, rows=rows))


def show_one(leaves: Sequence[Array], axes: LeafAxes, valid: Array) -> list[Array]:
    """The leaves, in which rows that are not valid have what one that is valid has."""
    lender = last_set(valid)
    return [
        leaf if axis is None else select_valid(valid, leaf, take_row(leaf, lender, axis, valid.shape), axis)
        for leaf, axis in zip(leaves, axes, strict=True)
    ]


class Reads(NamedTuple):
    """The arrays of a loop: rules for derivatives may not hold tracers, so these are given to a rule beside it.

    Attributes:
        consts: its consts.
        state: its state.
        xs: what it is fed.
        rows: of its rows `resets`, `lengths`, `spans`, and what segments begin from; None: it has no rows.
        last: the position of the step that runs first, in reverse.
    """

    consts: Any
    state: list[Array]
    xs: Feed
    rows: tuple[Any, ...] | None
    last: Any


GOOD = -1
"""In place of a step's number: none went wrong."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Numbering:
    """A step around another. It numbers steps in the order in which they run, from 0.

    Attributes:
        step: the inner step; its state is a list of leaves.
        keyed: whether the inner step is fed its position too.
        counts: whether the state counts the steps; else the feed has their positions.
        last: the highest position, of a loop in reverse; else None.
    """

    step: Step
    keyed: bool
    counts: bool = False
    last: Any = None

    def number(self, count: Sequence[Array], feed: Feed) -> Array:
        """int32[*batch]: how many steps run before this one."""
        if count:
            return count[0]
        assert feed.position is not None
        return feed.position if self.last is None else self.last - feed.position

    def run(self, consts: PyTree, state: list[Array], feed: Feed) -> tuple[PyTree, PyTree]:
        """Runs the inner step."""
        return self.step(consts, state, feed if self.keyed else feed._replace(position=None))

    @property
    def once_only(self) -> bool:
        """Whether it has effects that JAX refuses to repeat."""
        return cast(Repeatable, self.step).once_only

    def silenced(self) -> Self:
        """The step without the callbacks of the body, for a second run that must not report again."""
        return dataclasses.replace(self, step=cast(Repeatable, self.step).silenced())


@dataclass(frozen=True, eq=False, kw_only=True)
class Watched(Numbering):
    """A step after which its state is looked at.

    Its state is [the first bad step, with `counts` the number of this one, *the inner state]. In a masked loop each row
    has its own of these, int32[*batch]: they are masked as the carry is, so that no padding is ever looked at.

    Attributes:
        watched: for each leaf of the inner state whether it is looked at: the body may change it.
        axes: for each leaf of the inner state where the batch shape starts; None: it belongs to all rows.
    """

    watched: tuple[bool, ...]
    axes: LeafAxes

    def __call__(self, consts: PyTree, state: list[Array], feed: Feed) -> tuple[PyTree, PyTree]:
        heads = 1 + self.counts
        (first, *count), given = state[:heads], state[heads:]
        number = self.number(count, feed)
        new, y = self.run(consts, given, feed)
        is_good, bad = first == GOOD, jnp.zeros((1,) * first.ndim, bool)
        for old, leaf, watched, axis in zip(given, new, self.watched, self.axes, strict=True):
            if watched and is_smooth(leaf):
                bad = bad | any_of_rows(becomes_bad(old, leaf), axis, first.ndim)
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


def numbers_of(loop: Loop) -> Array:
    """int32[T]: for each position how many steps run before it."""
    order = jnp.arange(loop.length, dtype=jnp.int32)
    return order[::-1] if loop.reverse else order


@dataclass(frozen=True)
class Slices:
    """What is scanned over, where some leaves are given whole.

    Attributes:
        axes: for each leaf of xs the axis that is scanned over; None: it is given whole.
        structure: of xs.
    """

    axes: LeafAxes
    structure: TreeDef

    def join(self, whole: Sequence[Any], sliced: Sequence[Any]) -> PyTree:
        """The tree of xs, of the leaves that are given whole and of the others."""
        return jax.tree.unflatten(self.structure, merge([axis is None for axis in self.axes], whole, sliced))


@dataclass(frozen=True, eq=False)
class Site:
    """A loop before it was checked.

    Attributes:
        given: the loop; in the names and the structure of the user's.
        hoisted: its trace; what the body closes over is lifted.
        slices: what is scanned over, where some leaves are given whole; None: none are. These lead the consts.
        last: the position of the step that runs first, in reverse.
        around: what is put around a step of rows.
        roots: what the items of x are called, where x is a tuple of arguments.
    """

    given: Loop
    hoisted: Hoisted
    slices: Slices | None
    last: Any
    around: tuple[Transform, ...] = ()
    roots: tuple[str, ...] | None = None

    @property
    def fixed(self) -> tuple[bool, ...]:
        """For each leaf of the state whether no step changes it."""
        return self.hoisted.fixed

    @property
    def mesh(self) -> Any:
        """The mesh over which the arrays of the loop are spread, as far as types or the context tell; or None."""
        loop = self.hoisted.loop
        meshes = [jax.typeof(leaf).sharding.mesh for leaf in jax.tree.leaves((loop.consts, loop.state, loop.xs))]
        return next((mesh for mesh in (*meshes, jax.sharding.get_abstract_mesh()) if not mesh.empty), None)

    @property
    def keyed(self) -> bool:
        """Whether a step is fed its position."""
        return self.given.xs.position is not None

    @property
    def reads(self) -> Reads:
        """The arrays of the traced loop, tangents and all."""
        loop, rows = self.hoisted.loop, self.hoisted.loop.rows
        begins = None if rows is None or rows.begins is None else (rows.begins.flags, rows.begins.targets)
        of_rows = None if rows is None else (rows.resets, rows.given.lengths, rows.given.spans, begins)
        return Reads(loop.consts, loop.state, loop.xs, of_rows, jnp.asarray(self.last, jnp.int32))

    def once_more(self, reads: Reads | None = None, taken: Array | None = None) -> Loop:
        """The traced loop without tangents: else a derivative would run through what is run once more.

        Args:
            reads: its arrays; None: those that it has, less their tangents.
            taken: int32[*batch], how many steps each row ran, of rows that stop early; None: as many as the mask says.
        """
        loop = self.hoisted.loop
        stopped = jax.lax.stop_gradient if reads is None else lambda tree: tree
        consts, state, xs, arrays, _ = self.reads if reads is None else reads
        (consts, state, xs), rows = stopped((consts, state, xs)), loop.rows
        if arrays is not None:
            resets, lengths, spans, begins = arrays
            begins = None if begins is None else Begins(begins[0], stopped(begins[1]), rows.begins.tables)
            rows = rows._replace(resets=resets, given=rows.given._replace(lengths=lengths, spans=spans), begins=begins)
            if taken is not None:
                ran = mask_of_lengths(taken, loop.length)
                xs = xs._replace(valid=ran[::-1] if loop.reverse else ran)
        step = self.hoisted.repeatable.silenced()
        bare = dataclasses.replace(loop, trace=None, finish=(), wishes=(), unroll=1, lowering=(), runner=None)
        return dataclasses.replace(bare, step=step, consts=consts, state=state, xs=xs, rows=rows, memo=Memo())

    def row_axes(self, rows: Rows | None) -> LeafAxes:
        """For each leaf of the state where these rows are; None: it belongs to all, or there are none."""
        return (None,) * len(self.fixed) if rows is None else tuple(merge(self.fixed, rows.fixed, rows.axes.state))

    def in_layer(self, loop: Loop, leaves: Sequence[Array]) -> tuple[Loop, list[Array]]:
        """The loop of one block where x is known, and the leaves of x that it changes."""
        unchanged, changing = split(self.fixed, leaves)
        return dataclasses.replace(loop, consts=(unchanged, loop.consts[1])), changing

    def x_of(self, x: PyTree, consts: PyTree) -> PyTree:
        """The user's x, of one that a step is fed and the consts of the given loop."""
        return x if self.slices is None else self.slices.join(jax.tree.leaves(consts), jax.tree.leaves(x))

    @property
    def structure(self) -> TreeDef:
        """Of the state that is the user's; there may be indices around it."""
        return self.hoisted.structure if self.given.rows is None else self.given.trace.structure

    def carry_of(self, leaves: Sequence[Any]) -> PyTree:
        """The user's carry, of the leaves of the state."""
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
        trees = [(name, x)] if self.roots is None else zip(self.roots, x, strict=False)
        named = [path for root, tree in trees for path, _ in leaves_with_path(root, tree)]
        whole: list[str] = []
        if self.slices is not None:
            whole, named = split([axis is None for axis in self.slices.axes], named)
        fed, others = self.hoisted.loop.xs, {"position": "the position", "valid": "valid"}
        return whole, [*named, *(text for field, text in others.items() if getattr(fed, field) is not None)]


def site_of(loop: Loop, hoisted: Hoisted, slices: Slices | None, last: Any, **others: Any) -> Site:
    """The site of a loop, of its trace; see `Site`."""
    return Site(loop, hoisted, slices, last, **others)


def traced_as_it_runs(loop: Loop) -> Hoisted:
    """The trace of a loop, what its body closes over lifted. The body is traced here unless it was already."""
    with jax.disable_jit(False):
        if loop.rows is None:
            return lift(hoist(loop))
        if loop.rows.unchanged is None:
            return loop.trace._replace(loop=loop)
        return in_rows(loop, lift(hoist(loop, [not fixed for fixed in loop.rows.unchanged()])))
