"""What a checked loop is run from once more: its trace, its rows, and what it is fed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from ..._avals import place_like, shard, spec_parts
from ..._axes import LeafAxes
from ..._loop.body import Memo
from ..._loop.loop import Feed, Loop, Step, Transform
from ..._loop.run import is_jit_disabled
from ..._trace.blame import becomes_bad, is_checked
from ..._trace.hoist import Hoisted, Repeatable, hoist, lift
from ..._tree import leaves_with_path
from ..._types import Array, PyTree, TreeDef
from ..axes import MergeWhole
from ..once import DroppingOnce
from ..rows.axes import Begins, Rows, with_axes
from ..rows.leaves import last_set, select, select_valid, take_row
from ..rows.resets import begins_of
from .case import numbered


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
    loop = dataclasses.replace(loop, state=[*heads, *loop.state])
    if loop.rows is None:
        return loop
    rows, none = loop.rows, (None,) * len(heads)
    begins = begins_of(loop, loop.state[len(heads) :]) if rows.resets is not None else None
    if begins is not None:
        tables = (*(False for _ in heads), *begins.tables)
        begins = begins._replace(targets=[*none, *begins.targets], tables=tables)
    trace = loop.trace._replace(fixed=(*(False for _ in heads), *loop.trace.fixed))
    loop = dataclasses.replace(loop, trace=trace, rows=rows._replace(begins=begins, unchanged=_after(heads, rows)))
    return with_axes(loop, state=(*(axes or (0,) * len(heads)), *rows.axes.state))


def _after(heads: list[Array], rows: Rows) -> Any:
    unchanged = rows.unchanged
    return None if unchanged is None else lambda: (*(False for _ in heads), *unchanged())


def in_rows(loop: Loop, hoisted: Hoisted) -> Hoisted:
    """The trace of a masked loop that `is_untraced`, with its rows where it has them."""
    rows, fixed = loop.rows, hoisted.fixed
    on = tuple(axis for axis, is_fixed in zip(rows.axes.state, fixed, strict=True) if is_fixed)
    state = _others(rows.axes.state, fixed)
    _, (closed, _) = hoisted.loop.consts
    axes = rows.axes._replace(consts=(*on, *(None for _ in closed), *rows.axes.consts), state=tuple(state))
    begins = rows.begins
    if begins is not None:
        begins = Begins(begins.flags, _others(begins.targets, fixed), tuple(_others(begins.tables, fixed)))
    rows = rows._replace(axes=axes, fixed=on, begins=begins, unchanged=None)
    return hoisted._replace(loop=dataclasses.replace(hoisted.loop, rows=rows))


def _others(values: Sequence[Any], fixed: Sequence[bool]) -> list[Any]:
    return [value for value, is_fixed in zip(values, fixed, strict=True) if not is_fixed]


def show_one(leaves: Sequence[Array], axes: LeafAxes, valid: Array) -> list[Array]:
    """The leaves, in which rows that are not valid have what one that is valid has."""
    lender = last_set(valid)

    def shown(leaf: Array, axis: int | None) -> Array:
        if axis is None:
            return leaf
        return select_valid(valid, leaf, take_row(leaf, lender, axis, valid.shape), axis)

    return [shown(leaf, axis) for leaf, axis in zip(leaves, axes, strict=True)]


def without_tangents(rows: Rows | None) -> Rows | None:
    """Rows whose segments begin from constants: no gradient reaches them."""
    if rows is None or rows.begins is None:
        return rows
    return rows._replace(begins=rows.begins._replace(targets=jax.lax.stop_gradient(rows.begins.targets)))


class RowArrays(NamedTuple):
    """The arrays of the rows of a loop, as far as its steps need them.

    Attributes:
        resets: where segments begin, or None.
        lengths: of each row, or None.
        spans: of a `Packed`: where its sequences are, or None.
        flags: where a row begins anew, if that is another place; or None.
        targets: what it begins from.
    """

    resets: Array | None
    lengths: Array | None
    spans: tuple[Array, Array, Array] | None
    flags: Array | None
    targets: list[Array | None] | None

    @classmethod
    def of(cls, rows: Rows) -> RowArrays:
        """Those of the rows of a loop."""
        flags, targets = (None, None) if rows.begins is None else (rows.begins.flags, rows.begins.targets)
        return cls(rows.resets, rows.given.lengths, rows.given.spans, flags, targets)

    def put(self, rows: Rows) -> Rows:
        """The rows with these."""
        begins = rows.begins
        if begins is not None and self.flags is not None and self.targets is not None:
            begins = begins._replace(flags=self.flags, targets=self.targets)
        given = rows.given._replace(lengths=self.lengths, spans=self.spans)
        return rows._replace(resets=self.resets, given=given, begins=begins)


GOOD = -1
"""In place of a step's number: none went wrong."""


@dataclass(frozen=True, eq=False)
class Watched:
    """A step after which its state is looked at. It numbers steps in the order in which they run, from 0.

    Its state is [the first bad step, with `counts` the number of this one, *the inner state]. In a masked loop each row
    has its own of these, int32[*batch]: they are masked as the carry is, so that no padding is ever looked at.

    Attributes:
        step: the inner step; its state is a list of leaves.
        keyed: whether the inner step is fed its position too.
        watched: for each leaf of its state whether it is looked at: the body may change it.
        axes: for each leaf of its state where the batch shape starts; None: it belongs to all rows.
        counts: whether the state counts the steps; else the feed has their positions.
        last: the highest position, of a loop in reverse; else None.
    """

    step: Step
    keyed: bool
    watched: tuple[bool, ...]
    axes: LeafAxes
    counts: bool = False
    last: Any = None

    def __call__(self, consts: PyTree, state: list[Array], feed: Feed) -> tuple[PyTree, PyTree]:
        (first, *count), given = state[: self.heads], state[self.heads :]
        number = count[0] if count else number_of_position(feed.position, self.last)
        new, y = self.step(consts, given, feed if self.keyed else feed._replace(position=None))
        bad = (first == GOOD) & place_like(self._went_bad(given, new, first.ndim), jax.typeof(first))
        return [select(bad, number, first), *(n + 1 for n in count), *new], y

    def _went_bad(self, given: Sequence[Array], new: Sequence[Array], rows: int) -> Array:
        """bool[*batch]: whether a leaf of a row became NaN or infinite, or one of all rows did."""
        bad = jnp.zeros((1,) * rows, bool)
        for old, leaf, watched, axis in zip(given, new, self.watched, self.axes, strict=True):
            if watched and is_checked(leaf):
                bad = bad | any_of_rows(becomes_bad(old, leaf), axis, rows)
        return bad

    @property
    def heads(self) -> int:
        """How many leaves lead the state."""
        return 1 + self.counts

    @property
    def once_only(self) -> bool:
        """Whether it has effects that JAX refuses to repeat."""
        return cast(Repeatable, self.step).once_only

    def silenced(self) -> Watched:
        """The step without the callbacks of the body, for a second run that must not report again."""
        return dataclasses.replace(self, step=cast(Repeatable, self.step).silenced())


def number_of_position(position: Array | None, last: Any) -> Array:
    """How many steps run before the one at a position; `last` is the highest one, of a loop in reverse."""
    assert position is not None
    return position if last is None else last - position


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
        first, second = iter(whole), iter(sliced)
        return jax.tree.unflatten(self.structure, [next(first if axis is None else second) for axis in self.axes])


@dataclass(frozen=True, eq=False)
class Site:
    """A loop before it was checked.

    Attributes:
        given: the loop; in the names and the structure of the user's.
        hoisted: its trace; what the body closes over is lifted.
        slices: what is scanned over, where some leaves are given whole; None: none are.
        whole: these leaves.
        around: what is put around a step of rows.
        last: the position of the step that runs first, in reverse.
        roots: what the items of x are called, where x is a tuple of arguments.
    """

    given: Loop
    hoisted: Hoisted
    slices: Slices | None
    whole: list[Array]
    around: tuple[Transform, ...]
    last: Any
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

    def once_more(self) -> Loop:
        """The traced loop without tangents: else a derivative would run through what is run once more."""
        loop = self.hoisted.loop
        consts, state, xs = jax.lax.stop_gradient((loop.consts, loop.state, loop.xs))
        step, rows = self.hoisted.repeatable.silenced(), without_tangents(loop.rows)
        bare = dataclasses.replace(loop, trace=None, finish=(), wishes=(), unroll=1, lowering=(), runner=None)
        return dataclasses.replace(bare, step=step, consts=consts, state=state, xs=xs, rows=rows, memo=Memo())

    def x_of(self, x: PyTree) -> PyTree:
        """The user's x, of one that a step is fed."""
        return x if self.slices is None else self.slices.join(jax.lax.stop_gradient(self.whole), jax.tree.leaves(x))

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
        x = self.x_of(xs.x)
        trees = [(name, x)] if self.roots is None else zip(self.roots, x, strict=False)
        named = [path for root, tree in trees for path, _ in leaves_with_path(root, tree)]
        whole: list[str] = []
        if self.slices is not None:
            pairs = list(zip(named, self.slices.axes, strict=True))
            whole = [path for path, axis in pairs if axis is None]
            named = [path for path, axis in pairs if axis is not None]
        fed, others = self.hoisted.loop.xs, {"position": "the position", "valid": "valid"}
        return whole, [*named, *(text for field, text in others.items() if getattr(fed, field) is not None)]


def site_of(
    loop: Loop, slices: Slices | None, around: tuple[Transform, ...], last: Any, call: str | None = None
) -> Site:
    """The site of a loop, whose body is traced here unless it was already.

    Args:
        loop: the loop.
        slices: what is scanned over, where some leaves are given whole; None: none are.
        around: what is put around a step of rows.
        last: the position of the step that runs first, in reverse.
        call: the verb and the body, where loops within a step are told of it; None: they are not.
    """
    with jax.disable_jit(False):
        hoisted = _traced(loop if call is None else numbered(loop, call))
    return Site(loop, hoisted, slices, whole_of(loop) if slices is not None else [], around, last)


def _traced(loop: Loop) -> Hoisted:
    if loop.rows is None:
        return lift(hoist(loop))
    if loop.rows.unchanged is None:
        return loop.trace._replace(loop=loop)
    changing = [not fixed for fixed in loop.rows.unchanged()]
    return in_rows(loop, lift(hoist(loop, changing)))


def whole_of(loop: Loop) -> list[Array]:
    """The leaves of xs that are given whole, which lead the consts that the body's own step is given."""
    if isinstance(loop.step, MergeWhole | DroppingOnce):
        return loop.consts[0]
    _, inner = loop.consts
    return inner[0] if is_jit_disabled() else inner[1][0]
