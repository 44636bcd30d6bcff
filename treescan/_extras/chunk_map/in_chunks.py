"""`chunk_map`: a loop that feeds a function chunks of entries, and joins or adds up what it returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp

from ..._avals import (
    Array,
    LeafAxes,
    PyTree,
    TreeDef,
    describe_leaf,
    dtype_of,
    first_axes,
    place_like,
    shape_of,
    shard,
    shards_of,
    unspread,
)
from ..._body.call import call_body, check_arrays
from ..._body.signature import CHUNK_MAP, annotated
from ..._errors import BodyFault, Row
from ..._loop.feed import Feed
from ..._loop.loop import Body, Loop, Result, Step, is_untraced
from ..._trace.hoist import traced
from ..._transforms.axes import move_outputs, spread_axes
from ..._transforms.transform import Stage, Transform
from ..._tree import Prefix, leaves_with_path, merge, split, thaw_static


@dataclass(frozen=True)
class MapChunk:
    """The step that calls a function on a chunk. Its consts are the leaves that chunks share, its state is empty.

    Attributes:
        body: the function.
        size: the entries of a chunk.
        axes: where they are in each leaf of xs; None: chunks share the leaf.
        structure: of xs.
        frozen: whether xs holds static leaves.
        out_axes: where they are in each leaf of y, a prefix of it; None: the results of chunks are added up.
    """

    body: Body
    size: int
    axes: LeafAxes
    structure: TreeDef
    frozen: bool
    out_axes: Prefix | None

    def __call__(self, consts: list[Array], state: PyTree, feed: Feed) -> tuple[PyTree, PyTree]:
        cut = [jnp.moveaxis(x, 0, axis) for x, axis in zip(feed.x, _numbers(self.axes), strict=True)]
        chunk = jax.tree.unflatten(self.structure, merge([axis is None for axis in self.axes], consts, cut))
        chunk = thaw_static(chunk) if self.frozen else chunk
        keywords = {} if feed.valid is None else {"valid": feed.valid}
        with annotated(self.body) as scope:
            if scope:
                scope.check_inputs((chunk,))
            y = call_body(self.body, CHUNK_MAP, (chunk,), keywords)
            if scope:
                scope.check_outputs(y, "y")
            check_arrays(y)
        if self.out_axes is None:
            _check_numbers(y)
            return state, y
        return state, self._lead(y, self.out_axes.tree)

    def _lead(self, y: PyTree, out_axes: PyTree) -> PyTree:
        """The results with the entries of the chunk in front."""
        axes = spread_axes("out_axes", out_axes, y, "y")
        rows, leaves = list[Row](), list[Array]()
        for (path, leaf), axis in zip(leaves_with_path("y", y), axes, strict=True):
            shape = shape_of(leaf) or ()
            if -len(shape) <= (at := axis or 0) < len(shape) and shape[at] == self.size:
                leaves.append(jnp.moveaxis(leaf, at, 0))
            else:
                rows.append(Row(path, f"{self.size} along axis {at}", describe_leaf(leaf)))
        if rows:
            raise BodyFault(
                "{body} returned leaves that do not have the entries of its chunk.",
                'To add up the results of all chunks, pass `reduce="sum"`. Otherwise return an output for each entry '
                "of the chunk. `out_axes` says along which axis.",
                rows=rows,
            )
        return jax.tree.unflatten(jax.tree.structure(y), leaves)


def _numbers(axes: LeafAxes) -> list[int]:
    return [axis for axis in axes if axis is not None]


def _check_numbers(y: PyTree) -> None:
    """Refuses results that cannot be added."""
    rows = [
        Row(path, "numbers", describe_leaf(leaf))
        for path, leaf in leaves_with_path("y", y)
        if not jnp.issubdtype(dtype_of(leaf), jnp.number)
    ]
    if rows:
        raise BodyFault(
            '{body} returned leaves that cannot be added up, for `reduce="sum"`.',
            "Convert bools to ints, and keep all else out of what is returned.",
            rows=rows,
        )


def in_groups(leaf: Array, axis: int, groups: int) -> Array:
    """A leaf whose axis is cut into so many groups of entries that follow each other: `[..., groups, n, ...]`."""
    before, after = leaf.shape[:axis], leaf.shape[axis + 1 :]
    return leaf.reshape(*before, groups, leaf.shape[axis] // groups, *after)


@dataclass(frozen=True)
class InChunks(Transform):
    """Cuts xs into the chunks of the loop's steps, and joins what the function returns for them.

    Each chunk has an equal share of each group of entries. A device that holds whole groups then has its share of each
    chunk, and computes with that alone. Chunks of entries that follow each other would be on one device each: all
    devices would compute each of them whole.

    Attributes:
        start: how many entries earlier chunks have.
        size: the entries of a chunk. If there are too few for the last one, the last entry of each group is repeated.
        entries: how many there are from `start` on.
        groups: how many there are, which divides the entries, those of a chunk and `start`.
        axes: where they are in each leaf of xs; None: every chunk receives the leaf whole.
        frozen: whether xs holds static leaves.
        masked: whether the function receives which entries of a chunk are not repeated.
        out_axes: where they are in each leaf of y; None: the results are added up, by `SumChunks`.
    """

    start: int
    size: int
    entries: int
    groups: int
    axes: LeafAxes
    frozen: bool
    masked: bool
    out_axes: Prefix | None
    stage: ClassVar[Stage] = Stage.FED

    def __call__(self, loop: Loop) -> Loop:
        leaves, structure = jax.tree.flatten(loop.xs.x)
        whole, cut = split([axis is None for axis in self.axes], leaves)
        xs = [self._cut(leaf, axis, loop.length) for leaf, axis in zip(cut, _numbers(self.axes), strict=True)]
        valid = self._valid(xs, loop.length) if self.masked else None
        step = MapChunk(loop.body, self.size, self.axes, structure, self.frozen, self.out_axes)
        loop = loop.having(step=step, consts=whole, xs=Feed(xs, valid=valid))
        return loop if self.out_axes is None else loop.finished(ys=self._joined)

    def _cut(self, leaf: Array, axis: int, chunks: int) -> Array:
        """A leaf in chunks, [chunks, size, ...]."""
        leaf = in_groups(jnp.moveaxis(leaf, axis, 0), 0, self.groups)
        start, count = self.start // self.groups, chunks * self.size // self.groups
        leaf = leaf[:, start : start + count]
        if missing := count - leaf.shape[1]:
            last = jnp.broadcast_to(leaf[:, -1:], (self.groups, missing, *leaf.shape[2:]))
            leaf = jnp.concatenate([leaf, last], axis=1)
        shares = leaf.reshape(self.groups, chunks, self.size // self.groups, *leaf.shape[2:])
        return jax.lax.collapse(jnp.moveaxis(shares, 1, 0), 1, 3)

    def _valid(self, xs: list[Array], chunks: int) -> Array:
        """Which entries of the chunks are not repeated, bool[chunks, size], split over devices as the entries are."""
        places = (
            jnp.arange(chunks * self.size // self.groups).reshape(chunks, 1, self.size // self.groups)
            < self.entries // self.groups
        )
        valid = jnp.broadcast_to(places, (chunks, self.groups, places.shape[2])).reshape(chunks, self.size)
        split = [first_axes(x, 2) for x in xs if shards_of(x, 1) > 1]
        return shard(valid, split[0]) if split else valid

    def _joined(self, result: Result) -> PyTree:
        assert self.out_axes is not None

        def join(y: Array) -> Array:
            y = unspread(y, 1) if self.groups % shards_of(y, 1) else y
            y = jax.lax.collapse(jnp.moveaxis(in_groups(y, 1, self.groups), 1, 0), 1, 3)
            return jax.lax.collapse(y[:, : self.entries // self.groups], 0, 2)

        return move_outputs(jax.tree.map(join, result.ys), self.out_axes.tree)


@dataclass(frozen=True)
class Summed:
    """The step that adds up outputs. Its state is (the sums, the inner state)."""

    step: Step

    def __call__(self, consts: PyTree, state: tuple[list[Array], PyTree], feed: Feed) -> tuple[PyTree, PyTree]:
        sums, inner = state
        inner, y = self.step(consts, inner, feed)
        return ([total + leaf for total, leaf in zip(sums, jax.tree.leaves(y), strict=True)], inner), None


@dataclass(frozen=True)
class SumChunks(Transform):
    """`reduce="sum"`: adds up the outputs of all steps, and stacks none."""

    stage: ClassVar[Stage] = Stage.SUMMED

    def __call__(self, loop: Loop) -> Loop:
        if is_untraced(loop):
            return loop.finished(ys=lambda result: jax.tree.map(_sum, result.ys))
        loop = traced(loop)
        structure = jax.tree.structure(loop.hoisted.y)
        zeros = [place_like(jax.lax.full(aval.shape, 0, aval.dtype), aval) for aval in loop.hoisted.y_avals]
        loop = loop.having(step=Summed(loop.step), state=(zeros, loop.state))
        return loop.finished(lambda state: state[1], lambda result: jax.tree.unflatten(structure, result.state[0]))


def _sum(ys: Array) -> Array:
    return jnp.sum(ys, axis=0, dtype=ys.dtype)
