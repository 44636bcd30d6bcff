"""Selects and lends rows in the leaves of a batch, whatever their sharding, and finds the chunks that have any."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap

from .._avals import (
    Array,
    ArrayLike,
    LeafAxes,
    PyTree,
    in_mesh,
    is_key,
    is_sharded,
    mesh_of,
    names_no_mesh,
    on_automatic_axes,
    parts_of,
    place_like,
    shard,
    unspread,
    varying_axes,
)
from .._cpu.rows import in_one_place
from .._loop.feed import Slot
from .._loop.loop import Loop
from .._loop.run import debugs_nans
from .._trace.smooth import is_smooth
from .._tree import map_leaves


def mask_of_lengths(lengths: ArrayLike, steps: int) -> Array:
    """bool[steps, *batch]: whether a step is among the first `lengths` of its row."""
    lengths = jnp.asarray(lengths)
    if is_sharded(lengths) or not isinstance(steps, int):  # a symbolic size is of any size
        return jax.lax.broadcasted_iota(np.int32, (steps, *lengths.shape), 0) < lengths.astype(np.int32)[None]
    return _mask_of_lengths(lengths, steps)


@functools.partial(jax.jit, static_argnames="steps", inline=True)  # traced once for each shape
def _mask_of_lengths(lengths: Array, steps: int) -> Array:
    dtype = lengths.dtype if steps <= jnp.iinfo(lengths.dtype).max else np.int32  # the positions must fit
    return jax.lax.broadcasted_iota(dtype, (steps, *lengths.shape), 0) < lengths.astype(dtype)[None]


def numbers_of_steps(length: int, *, reverse: bool) -> Array:
    """int32[T]: for each position how many steps run before it."""
    order = jnp.arange(length, dtype=jnp.int32)
    return order[::-1] if reverse else order


def any_along(flags: Array, axes: Iterable[int]) -> Array:
    """`jnp.any` along some axes, as a single operation. `jnp.any` calls a compiled function, which is slow to trace."""
    axes = tuple(axes)
    return jax.lax.reduce_or(flags, axes) if axes else flags


def any_of(flags: Array) -> Array:
    """bool[]: whether any flag is set."""
    return any_along(flags, range(flags.ndim))


def select(chosen: Array, new: Array, old: Array) -> Array:
    """`jnp.where`, with the mask and the other value sharded as the leaf is, where shardings are part of the type."""
    old, new = _in_mesh_of(chosen, old, new)
    if not (chosen.ndim or new.ndim or old.ndim) and mesh_of(chosen):  # JAX 0.8 does not map the choice of a number
        return jnp.where(chosen[None], new[None], old[None])[0]
    if not any(map(is_sharded, (chosen, new, old))):
        return jnp.where(chosen, new, old)
    shape = jnp.broadcast_shapes(chosen.shape, new.shape, old.shape)
    whole = [value for value in (new, old, chosen) if value.shape == shape]
    like = next(filter(is_sharded, whole), whole[0] if whole else chosen)
    sharding = jax.typeof(like).sharding
    if like.shape != shape or sharding.mesh.empty:  # a leaf that names no mesh takes the mask's
        return jnp.where(chosen, new, old)
    chosen, new, old = (shard(jnp.broadcast_to(value, shape), sharding) for value in (chosen, new, old))
    return jnp.where(chosen, new, old)


def select_n(chosen: Array, old: Array, new: Array) -> Array:
    """`jax.lax.select_n` of arrays of one shape."""
    return jax.lax.select_n(chosen, *_in_mesh_of(chosen, old, new))


def _in_mesh_of(chosen: Array, old: Array, new: Array) -> tuple[Array, Array]:
    """The values of a selection, on the mesh of the mask if they name none.

    JAX gives the result the type of the values. Under `jax.vmap` over an axis that is sharded on an Explicit mesh, it
    cannot map a type that names no mesh.
    """
    mesh = mesh_of(chosen)
    misses = mesh is not None and names_no_mesh(old) and names_no_mesh(new)
    return in_mesh((old, new), mesh) if misses else (old, new)


def expand(valid: Array, leaf: Array, axis: int) -> Array:
    """A mask in the rank of a leaf, its batch axes at `axis`.

    Explicit in every axis: a [B] mask against a [B, D] leaf with B = D would broadcast against the features.
    """
    return valid.reshape((*(1 for _ in range(axis)), *valid.shape, *(1 for _ in range(leaf.ndim - axis - valid.ndim))))


class RowMask:
    """The mask of one step, in the shape of each leaf: leaves of one shape share it, as each would take time to trace.

    Attributes:
        valid: bool[*batch].
    """

    def __init__(self, valid: Array, some: Callable[[Array], Array] = any_of) -> None:
        self.valid = valid
        self._some = some
        self._shaped: dict[tuple[Any, ...], Array] = {}

    def some(self) -> Array:
        """bool[]: whether any row is valid."""
        return self._once((), lambda: self._some(self.valid))

    def select(self, new: Array, old: Array, axis: int | None) -> Array:
        """`new` for valid rows, `old` for others; for a leaf without rows (None), `new` if any row is valid.

        `old` has the shape of `new`, or is broadcast to it.
        """
        if axis is None:
            return select(self.some(), new, old)
        if any(map(is_sharded, (self.valid, new, old))) or new.dtype != old.dtype or old.ndim not in (0, new.ndim):
            return select(expand(self.valid, new, axis), new, old)
        dimensions = tuple(range(axis, axis + self.valid.ndim))
        mask = self._once((new.shape, axis), lambda: jax.lax.broadcast_in_dim(self.valid, new.shape, dimensions))
        if old.shape != new.shape:
            old = jax.lax.broadcast_in_dim(old, new.shape, tuple(range(old.ndim)))
        return select_n(mask, old, new)

    def _once(self, key: tuple[Any, ...], make: Callable[[], Array]) -> Array:
        if key not in self._shaped:
            self._shaped[key] = make()
        return self._shaped[key]


def select_valid(valid: Array, new: Array, old: Array, axis: int | None) -> Array:
    """One leaf of `RowMask.select`."""
    return RowMask(valid).select(new, old, axis)


def last_set(flags: Array) -> Array:
    """uint32[]: the number of the last flag that is set, in C order; 0 if none is.

    It is the largest of numbers, because an argmax of flags over devices gathers all of them on each device.
    """
    numbers = place_like(jnp.arange(flags.size, dtype=jnp.uint32).reshape(flags.shape), jax.typeof(flags))
    return jax.lax.reduce_max(select(flags, numbers, jnp.zeros_like(numbers)), range(flags.ndim))


def take_row(leaf: Array, row: Array, axis: int, batch: tuple[int, ...]) -> Array:
    """One row of a leaf, its batch axes kept with size 1; `row` counts through the batch shape in C order.

    The number is unsigned: of a signed one JAX asks each time whether it counts from the end. Where rows may be spread
    over devices, the row is added up: a slice at a number that is computed would gather all rows on each device.
    """
    if not in_one_place(leaf):
        chosen = jnp.arange(math.prod(batch), dtype=row.dtype).reshape(batch) == row
        rows = tuple(range(axis, axis + len(batch)))

        def total(part: Array) -> Array:  # `jnp.sum` would lose a weak type
            return jax.lax.expand_dims(jax.lax.reduce_sum(part, rows), rows)

        return add_up(leaf, expand(chosen, leaf, axis), total)
    head, tail = leaf.shape[:axis], leaf.shape[axis + len(batch) :]
    if len(batch) == 1:
        zero = np.zeros((), row.dtype)
        starts = [row if i == axis else zero for i in range(leaf.ndim)]
        return jax.lax.dynamic_slice(leaf, starts, (*head, 1, *tail))
    flat = leaf.reshape((*head, math.prod(batch), *tail))
    return jax.lax.dynamic_index_in_dim(flat, row, axis).reshape((*head, *(1 for _ in batch), *tail))


def at_step(leaf: Array, step: Array) -> Array:
    """The slice of `leaf` [T, ...] at a step. Under vmap it is a gather, which JAX cannot give a type on a mesh."""
    index = functools.partial(jax.lax.dynamic_index_in_dim, axis=0, keepdims=False)
    return on_automatic_axes(index, parts_of(leaf)[1:], leaf, step)


def pick_steps(leaf: Array, steps: Array, axis: int | None) -> Array:
    """For each row the slice of `leaf` [T, ...] at the row's own step; `steps` is int[*batch]."""
    assert axis is not None
    return on_automatic_axes(functools.partial(_pick_steps, axis=axis), parts_of(leaf)[1:], leaf, steps)


def _pick_steps(leaf: Array, steps: Array, *, axis: int) -> Array:
    rows = tuple(range(1 + axis, 1 + axis + steps.ndim))
    return jax.lax.gather(
        leaf,
        steps[..., None],
        jax.lax.GatherDimensionNumbers(
            offset_dims=tuple(i for i in range(leaf.ndim - 1) if i + 1 not in rows),
            collapsed_slice_dims=(0,),
            start_index_map=(0,),
            operand_batching_dims=rows,
            start_indices_batching_dims=tuple(range(steps.ndim)),
        ),
        tuple(1 if i == 0 or i in rows else size for i, size in enumerate(leaf.shape)),
        mode="clip",
    )


def first_valid(valid: Array, *, reverse: bool) -> tuple[Array, Array]:
    """For each row whether any step is valid, and the position of the first one in the order of the run.

    Args:
        valid: bool[T, *batch].
        reverse: whether the loop runs from the last position to the first.

    Returns:
        bool[*batch] and int32[*batch]; of a row without a valid step any position.
    """
    length = valid.shape[0]
    # The least of numbers, which is cheaper than an argmax.
    if reverse:
        first = jax.lax.reduce_max(_steps_or(-1, valid), (0,))
        return jax.lax.ge(first, jnp.zeros_like(first)), jax.lax.max(first, jnp.zeros_like(first))
    first = jax.lax.reduce_min(_steps_or(length, valid), (0,))
    return first < length, jax.lax.min(first, jax.lax.full_like(first, length - 1))


def _steps_or(other: int, valid: Array) -> Array:
    """int32[T, *batch]: the position of each valid step, `other` elsewhere."""
    if is_sharded(valid) or not isinstance(other, int):
        steps = jnp.arange(valid.shape[0], dtype=jnp.int32).reshape(-1, *(1 for _ in valid.shape[1:]))
        return jnp.where(valid, steps, other)
    steps = jax.lax.broadcasted_iota(jnp.int32, valid.shape, 0)
    return select_n(valid, jax.lax.full(valid.shape, other, jnp.int32), steps)


def add_up(leaf: Array, chosen: Array, total: Callable[[Array], Array]) -> Array:
    """Adds up a leaf of which only the one chosen part counts, for dtypes that cannot be added up as well."""
    if is_key(leaf):
        bits = add_up(jax.random.key_data(leaf), chosen[..., None], total)
        return jax.random.wrap_key_data(bits, impl=jax.random.key_impl(leaf))
    if leaf.dtype == jnp.bool_:
        return add_up(leaf.astype(jnp.int32), chosen, total) > 0
    return total(select(chosen, leaf, jnp.zeros_like(leaf)))


@custom_vmap
def most_of_all(counts: Array) -> Array:
    """`counts` itself; under vmap, nested or not, the largest of all elements. int32[...] to int32[...]."""
    return counts


@most_of_all.def_vmap
def _most_of_all_rule(axis_size: int, in_batched: list[bool], counts: Array) -> tuple[Array, bool]:
    if in_batched[0]:
        counts = jnp.max(counts, axis=0) if axis_size else jnp.zeros_like(counts, shape=counts.shape[1:])
    return most_of_all(counts), False


@custom_vmap
def _unless_alone(going: Array) -> Array:
    return place_like(jnp.ones_like(going), jax.typeof(going))


@_unless_alone.def_vmap
def _unless_alone_rule(axis_size: int, in_batched: list[bool], going: Array) -> tuple[Array, bool]:
    del axis_size
    return (going, True) if in_batched[0] else (_unless_alone(going), False)


def unless_alone(going: Array) -> Array:
    """True, inside a branch that is taken if `going` is set. If others share the branch, `going` itself.

    These are the elements of a vmap and the devices of a shard_map: the branch is taken if any of them goes on.
    """
    return going if varying_axes(jax.typeof(going)) else _unless_alone(going)


def may_branch() -> bool:
    """Whether a branch may depend on data: not inside of a `shard_map` that does not tell which axes a value varies on.

    Devices that took different branches around a collective of the body's would wait for each other forever.
    """
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return not manual or bool(varying_axes(jax.typeof(jax.lax.axis_index(manual[0]))))


@custom_vmap
def on_each_device(leaf: Array) -> Array:
    """A value for a callback, which JAX can call only for elements of a vmap that each device has."""
    return leaf


@on_each_device.def_vmap
def _on_each_device_rule(axis_size: int, in_batched: list[bool], leaf: Array) -> tuple[Array, bool]:
    del axis_size
    return on_each_device(unspread(leaf) if in_batched[0] else leaf), in_batched[0]


def any_of_all(flags: Array) -> Array:
    """Whether a flag is set in any row, in any element of a vmap, on any device: the same for all."""
    flags = jnp.any(flags) if flags.ndim else flags
    return most_of_all(most_of_devices(flags.astype(jnp.int32))) > 0


def most_of_devices(counts: Array) -> Array:
    """The largest counts over the manual mesh axes that they vary on, so that all devices take the same branch."""
    axes = tuple(sorted(varying_axes(jax.typeof(counts))))
    return jax.lax.pmax(counts, axes) if axes else counts


@custom_vmap
def _substitute(have: Array, leaves: list[Array]) -> tuple[list[Array], list[Array]]:
    own, mesh = jnp.ones((), bool), mesh_of((have, leaves))
    return leaves, [own if mesh is None else in_mesh(own, mesh)] * len(leaves)


@_substitute.def_vmap
def _substitute_rule(
    axis_size: int, in_batched: list[Any], have: Array, leaves: list[Array]
) -> tuple[tuple[list[Array], list[Array]], tuple[list[bool], list[bool]]]:
    """Fills in the elements of one mapped axis, then asks the next axis out for those that found no lender in it."""
    have_batched, leaves_batched = in_batched
    if not have_batched:
        have_any, own, filled = have, have, leaves
    elif not axis_size:
        have_any, own, filled = jnp.zeros((), bool), have, leaves
    else:
        have_any, own, lender = jnp.any(have, axis=0), have, jnp.argmax(have, axis=0)

        def of_lender(leaf: Array) -> Array:
            """Its value. JAX cannot give a type to a slice at a computed place of an axis that is sharded."""
            if not is_sharded(leaf):
                return leaf[lender]
            return jax.lax.squeeze(take_row(leaf, last_set(have), 0, (axis_size,)), (0,))

        filled = [
            _choose(own, leaf, of_lender(leaf)) if batched else leaf
            for leaf, batched in zip(leaves, leaves_batched, strict=True)
        ]
    # The next axis out lends to whole elements: a leaf that is mapped here keeps this axis as one of its own.
    lent, outer_own = _substitute(have_any, filled)
    flags = [
        jnp.where(have_any, own, outer) if batched and have_batched else outer
        for outer, batched in zip(outer_own, leaves_batched, strict=True)
    ]
    flags_batched = [batched and have_batched for batched in leaves_batched]
    return (lent, flags), (list(leaves_batched), flags_batched)


_lend_traced_once = jax.jit(_substitute, inline=True)  # for each list of types


def substitute_elements(have: Array, tree: PyTree) -> tuple[PyTree, list[Array]]:
    """Gives elements of mapped axes that have nothing good the values of one that has.

    Args:
        have: bool[], whether this element's values are good.
        tree: the values.

    Returns:
        The values, where `have` is set the element's own; and for each leaf a bool[] that tells whether the element's
        own value is there. A leaf that is the same for all elements stays so, and so does its flag.
    """
    leaves, structure = jax.tree.flatten(tree)
    lent, own = _lend_traced_once(*_across_devices(have, leaves))
    return jax.tree.unflatten(structure, lent), own


def substitute_over_elements(have: Array, leaves: list[Array]) -> tuple[list[Array], list[Array]]:
    """Lends a list of leaves between the elements of mapped axes, and never between devices."""
    return _lend_traced_once(have, leaves) if leaves else ([], [])


def choose_own(mine: PyTree, lent: PyTree, own: list[Array]) -> PyTree:
    """A tree, each leaf this element's own where its flag in `own` is set, else the one that was lent."""
    return map_leaves(lambda leaf, flag, other: select(flag, leaf, other), mine, own, jax.tree.leaves(lent))


def _across_devices(have: Array, leaves: list[Array]) -> tuple[Array, list[Array]]:
    """Lends over the manual axes of a `shard_map` that `have` varies on, from the lowest device that has something."""
    for axis in sorted(varying_axes(jax.typeof(have))):
        rank = jax.lax.axis_index(axis)
        lender = jax.lax.pmin(jnp.where(have, rank, jax.lax.axis_size(axis)), axis)
        chosen = rank == lender
        leaves = [
            _choose(have, leaf, _from_device(leaf, chosen, axis)) if axis in varying_axes(jax.typeof(leaf)) else leaf
            for leaf in leaves
        ]
        have = jax.lax.pmax(have.astype(jnp.int32), axis) > 0
    return have, leaves


def _from_device(leaf: Array, chosen: Array, axis: str) -> Array:
    """The leaf of the one device on which `chosen` is set."""
    shaped = chosen.reshape((1,) * leaf.ndim)
    return add_up(leaf, shaped, lambda part: jax.lax.psum(part, axis))


def _choose(flag: Array, own: Array, other: Array) -> Array:
    """`own` where the flag is set, else `other`; the flag's axes lead the value's."""
    shaped = flag.reshape(flag.shape + (1,) * (own.ndim - flag.ndim))
    return select(shaped, own, other)


def substitute_rows(leaves: Sequence[Array], axes: LeafAxes, valid: Array) -> Sequence[Array]:
    """Leaves that are the same in every step: rows without any valid step have another row's."""
    if all(axis is None for axis in axes) or 0 in valid.shape:
        return leaves
    have = jnp.any(valid, axis=0)
    lender = last_set(have)

    def lent(leaf: Array, axis: int | None) -> Array:
        if axis is None:
            return leaf
        return select(expand(have, leaf, axis), leaf, take_row(jax.lax.stop_gradient(leaf), lender, axis, have.shape))

    return list(map(lent, leaves, axes))


def without_false_alarms(loop: Loop, axes: LeafAxes) -> Loop:
    """Under `jax_debug_nans` the loop without padding: no step reads it, but the gradient may save it with the rest."""
    if not debugs_nans():
        return loop

    def cleaned(leaf: Array, axis: int | None) -> Array:
        if axis is None or not is_smooth(leaf):
            return leaf
        zero = jnp.zeros((), leaf.dtype)
        return jax.vmap(lambda valid, x: select_valid(valid, x, zero, axis))(loop.xs.valid, leaf)

    return loop.having(xs=loop.xs._replace(x=map_leaves(cleaned, loop.xs.x, axes)))


class Schedule(NamedTuple):
    """The part of each chunk that runs.

    Attributes:
        branch: int32[N]: 0: nothing; i: the first tiers[i-1] rows of the order.
        order: int32[N, B], the rows of each chunk, live ones first; None if there is but one tier.
    """

    branch: Array
    order: Array | None = None


SCHEDULE: Slot[Schedule] = Slot("schedule", of_chunks=True)
"""What of a chunk is to be run."""

ORDER: Slot[Array] = Slot("order", of_chunks=True)
"""The order of the rows in a chunk, int32[B], live ones first."""


@functools.partial(jax.jit, static_argnames=("steps", "size"), inline=True)  # traced once for each shape
def schedule_of_lengths(lengths: Array, steps: int, size: int) -> Schedule:
    """`make_schedule` for all rows at a time, each of which is valid in its first `lengths` steps, int[*batch]."""
    most = jnp.max(lengths) if lengths.ndim else lengths
    begins = jax.lax.broadcasted_iota(np.int32, (-(-steps // size),), 0) * np.int32(size)
    return Schedule(most_of_all(most_of_devices((begins < most.astype(np.int32)).astype(np.int32))))


@functools.partial(jax.jit, static_argnames=("size", "tiers"), inline=True)  # traced once for each shape
def make_schedule(valid: Array, size: int, tiers: tuple[int, ...]) -> Schedule:
    """What of each chunk is to be run: the same for all elements of a vmap and on all devices of a shard_map.

    Args:
        valid: bool[T, *batch].
        size: the steps of a chunk.
        tiers: the numbers of rows to choose from, ascending.
    """
    if len(tiers) == 1:
        branch = any_along(_chunks_of(valid, size), range(1, valid.ndim + 1)).astype(jnp.int32)
        return Schedule(most_of_all(most_of_devices(branch)))
    live = any_along(_chunks_of(valid, size), (1, *range(3, valid.ndim + 1)))
    number = jnp.sum(live, axis=1, dtype=jnp.int32)
    needed = jnp.sum(number[:, None] > jnp.array([[0, *tiers[:-1]]], jnp.int32), axis=1, dtype=jnp.int32)
    return Schedule(most_of_all(most_of_devices(needed)), _live_first(live))


def _live_first(live: Array) -> Array:
    """int32[N, B], the rows of each chunk in their order, live ones first: sorted as numbers, which is cheaper."""
    rows = jnp.arange(live.shape[1], dtype=jnp.int32)
    return jnp.sort(jnp.where(live, rows, rows + rows.size), axis=1) % rows.size


def _chunks_of(valid: Array, size: int) -> Array:
    """bool[N, size, *batch], the steps of each chunk; those after the last are not valid."""
    length = valid.shape[0]
    if size == length:  # a symbolic length too
        return valid[None]
    count = -(-length // size)
    if count * size != length:
        none = jnp.zeros((), valid.dtype)
        valid = jax.lax.pad(valid, none, [(0, count * size - length, 0), *((0, 0, 0) for _ in valid.shape[1:])])
    return valid.reshape(count, size, *valid.shape[1:])
