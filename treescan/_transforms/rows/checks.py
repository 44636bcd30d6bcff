"""Checks of the arguments that `mask_scan` adds: lengths, masks, resets and what they restore, chunks and tiers."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeGuard

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.core import ShapedArray, Tracer

from ..._avals import (
    Array,
    LeafAxes,
    PyTree,
    describe_argument,
    describe_leaf,
    describe_node,
    describe_traced,
    dtype_of,
    exact_int,
    holds,
    is_key,
    is_weak,
    shape_of,
)
from ..._body.carry import agree
from ..._errors import (
    ArgumentError,
    ArgumentTypeError,
    Misuse,
    Row,
    TypeMisuse,
    expect,
)
from ..._tree import Prefix, is_static, path_str
from ...carries._base import is_carry
from ...carries._registry import Adopted, adopt, kind_of
from ..axes import spread_prefix
from .axes import RowFlags, spread_carry_axes


def check_rows(flags: RowFlags, time_axis: int, steps: int, offset: Any = None) -> RowFlags:
    """At most one of lengths (ints, in range if concrete) and mask, or resets alone (both bools that fit the steps).

    With an offset, lengths count from the first step of the whole run. Those that are returned are the part's.
    """
    lengths, mask, resets = flags[:3]
    if (lengths is None) == (mask is None) and (resets is None or mask is not None):
        both = "both are given" if mask is not None else "neither is given"
        raise Misuse(
            f"{{call}}: pass either `lengths` or `mask`; {both}.",
            "`lengths` int[*batch] counts each row's steps from the first; `mask` bool[T, *batch] marks any pattern; "
            "`resets` alone means that every step is valid.",
        )
    checked = flags._replace(
        lengths=None if lengths is None else _lengths_of_part(lengths, steps, offset),
        mask=None if mask is None else _check_flags("mask", mask, time_axis, steps),
        resets=None if resets is None else _check_flags("resets", resets, time_axis, steps),
    )
    if checked.resets is None or checked[:2] == (None, None):
        return checked
    if batch_of(RowFlags(resets=checked.resets), time_axis) != batch_of(checked, time_axis):
        name, other = ("lengths", checked.lengths) if checked.mask is None else ("mask", checked.mask)
        raise Misuse(
            f"{{call}}: `resets` {describe_argument(checked.resets)} and `{name}` {describe_argument(other)} have "
            "different rows.",
            "Both must have the same batch shape. `resets` also has the axis of the steps.",
        )
    return checked


def batch_of(flags: RowFlags, time_axis: int) -> tuple[int, ...]:
    """The shape of the batch, as the lengths say it, or the mask, or resets alone."""
    if flags.lengths is not None:
        return tuple(np.shape(flags.lengths))
    shape = np.shape(flags.resets if flags.mask is None else flags.mask)
    return (*shape[:time_axis], *shape[time_axis + 1 :])


def _lengths_of_part(lengths: Any, steps: int, offset: Any) -> Array:
    """int[*batch]: how many steps of each row are in the part that begins at `offset`; None: it is the whole."""
    if offset is None:
        return jnp.asarray(check_lengths(lengths, steps))
    lengths = jnp.asarray(check_lengths(lengths, steps, is_part=True))
    lengths = lengths if lengths.dtype.itemsize > 4 else lengths.astype(jnp.int32)  # others would wrap
    left = jnp.maximum(lengths - offset, 0)
    return jnp.minimum(left, steps) if isinstance(steps, int) else left


def check_lengths(lengths: Any, steps: int | None, *, is_part: bool = False) -> Any:
    """Ints, between 0 and `steps` where both are known: no tracer, no symbolic size. In a part, they may be more."""
    given, lengths = lengths, _as_array(lengths) if isinstance(lengths, list | tuple) else lengths
    dtype = dtype_of(lengths)
    pattern = "Give the number of valid steps of each row, int[*batch]; a bool pattern is a `mask`."
    expect(dtype is not None and jnp.issubdtype(dtype, jnp.integer), "lengths", "ints", given, pattern)
    known = isinstance(steps, int) and not isinstance(lengths, Tracer)
    if not known or not getattr(lengths, "is_fully_addressable", True):
        return lengths
    values = np.asarray(lengths)
    if values.size and (values.min() < 0 or (values.max() > steps and not is_part)):
        row = int(np.argmax((values < 0) | (values > steps) & (not is_part)))
        where = list(map(int, np.unravel_index(row, values.shape))) or ""
        wrong = f"but lengths{where} is {values.flat[row]}."
        if is_part:
            cure = "With `offset`, they count from the first step of the whole run, so all parts take the same lengths."
            raise Misuse(f"{{call}}: `lengths` must be at least 0, {wrong}", cure)
        raise Misuse(
            f"{{call}}: `lengths` must lie between 0 and the {steps} steps, {wrong}",
            f"Cut the lengths, `jnp.clip(lengths, 0, {steps})`, or pad to the longest row. If the data lead with the "
            "batch instead, `mask_scan` takes `time_axis=1`.",
        )
    return lengths


def _as_array(lengths: list[Any] | tuple[Any, ...]) -> Any:
    """A list of lengths as an array of ints, concrete unless it contains tracers. A ragged list is unchanged."""
    for convert in (np.asarray, jnp.asarray):
        with contextlib.suppress(TypeError, ValueError):
            array = convert(lengths)
            return array if array.size else array.astype(np.int32)
    return lengths


_CURES_OF_FLAGS = {
    "mask": "Compare, for example `mask=tokens != pad`; for the number of valid steps of each row, use `lengths`.",
    "resets": "Mark the first step of each segment, for example `resets=episode_step == 0`.",
}


def _check_flags(name: str, flags: Any, time_axis: int, steps: int) -> Any:
    if isinstance(flags, list | tuple):
        flags = _as_array(flags)
    expect(dtype_of(flags) == np.dtype(bool), name, "a bool array", flags, _CURES_OF_FLAGS[name])
    shape = shape_of(flags) or ()
    if len(shape) <= time_axis or shape[time_axis] != steps:
        wanted, leads, swapped = f"bool[{steps}, *batch]", "the batch leads", ""
        if time_axis == 1:
            wanted, leads = f"bool[B, {steps}]", "the steps lead"
        if len(shape) == 2 and shape[1 - time_axis] == steps:
            swapped = (
                f"If {leads} there, pass `{name}.T`, or `time_axis={1 - time_axis}` if xs have that layout too. "
                "Otherwise "
            )
        raise Misuse(
            f"{{call}}: `{name}` must have the steps along axis {time_axis}, {wanted}, but is "
            f"{describe_argument(flags)}.",
            f"{swapped}xs has {steps} steps: give `{name}` the same number, along axis {time_axis}.",
        )
    return jnp.asarray(flags)


def check_time_axis(time_axis: Any) -> int:
    """0 or 1."""
    axis = exact_int(time_axis)
    layouts = (
        "0 means that time leads, [T, B, ...]; 1 that the batch leads, [B, T, ...]. For other layouts, use `in_axes` "
        "and `out_axes`."
    )
    error = ArgumentTypeError if axis is None else ArgumentError
    expect(axis in (0, 1), "time_axis", "0 or 1", time_axis, layouts, error=error)
    assert axis is not None
    return axis


def check_chunk(chunk: Any, compact: Any) -> int | None:
    """An int of at least 0, or None."""
    if chunk is None:
        return None
    size = exact_int(chunk)
    skipped = (
        "It is the number of steps that are skipped together if no row is valid. None lets treescan choose it, and 0 "
        "turns skipping off."
    )
    error = ArgumentTypeError if size is None else ArgumentError
    expect(size is not None and size >= 0, "chunk", "an int of at least 0, or None", chunk, skipped, error=error)
    if size == 0 and compact:
        raise Misuse(
            "{call}: `compact` sorts the rows of each chunk, but `chunk=0` turns chunks off.",
            "Leave `chunk` out, or give the number of steps in a chunk.",
        )
    return size


def check_compact(compact: Any, *, keyed: bool) -> bool | tuple[int, ...]:
    """A bool, or the tiers as ints above 0."""
    items: list[Any] = list(compact) if isinstance(compact, tuple | list) else []
    above = tuple(count for count in map(exact_int, items) if count is not None and count > 0)
    tiers: bool | tuple[int, ...] = bool(compact) if isinstance(compact, bool | np.bool_) else above
    if tiers is above and (not above or len(above) < len(items)):
        raise TypeMisuse(
            f"{{call}}: `compact` must be True, False or a tuple of ints above 0, got "
            f"{'(' + ', '.join(map(describe_traced, items)) + ')' if items else describe_traced(compact)}.",
            "`compact=True` makes tiers of 1, 2, 4, ... rows; a tuple names the numbers of rows instead.",
        )
    if tiers and keyed:
        raise Misuse(
            "{call}: `compact` and `key` cannot be combined: the body would draw different numbers.",
            "Give each row a key of its own, in the carry: `keys = jax.random.split(key, B)`, and in the body "
            "`keys, now = jnp.moveaxis(jax.vmap(jax.random.split)(keys), 1, 0)`.",
        )
    return tiers


def check_padded(given: Mapping[str, Any], kind: str, path: str = "xs") -> None:
    """Refuses options that a `Padded` or a `Packed` already determines."""
    said = [name for name, value in given.items() if value is not None]
    if said:
        raise Misuse(
            f"{{call}}: {path} is a `{kind}`, which already determines `{said[0]}`.",
            f"Leave `{said[0]}` out, or pass `{path}.data` in place of {path}.",
        )


def check_targets(
    flags: RowFlags,
    reset_to: PyTree,
    init: PyTree,
    carry_axes: Prefix,
    time_axis: int,
    adopted: Adopted,
    arrays: PyTree,
    root: str,
) -> RowFlags:
    """The flags, with what a reset puts back for each leaf of init.

    Args:
        flags: checked ones. Their `inits` are those of a `Packed`, as it holds them.
        reset_to: what the user said.
        init: the carry as the user gave it.
        carry_axes: a prefix of it.
        time_axis: the axis of the steps in the mask and the resets.
        adopted: the init, values of registered types as custom carries.
        arrays: the same without its static leaves.
        root: the body's own name for its carry.

    Raises:
        Fault: for an `ArgumentError` if nothing is reset, or what is put back does not fit the init.
    """
    if reset_to is not None and flags.inits is not None:
        raise Misuse(
            "{call}: xs is a `Packed` with an `init` for each sequence, which already determines `reset_to`.",
            "Leave `reset_to` out, or leave `init` out of `pack`.",
        )
    if reset_to is not None and flags.resets is None:
        raise Misuse(
            "{call}: `reset_to` says what a reset restores, but no `resets` are given.",
            "Mark the first step of each segment, for example `resets=episode_step == 0`. Without resets, each row "
            "only starts from `init`.",
        )
    batch = batch_of(flags, time_axis)
    check = functools.partial(_checked, adopted.init, spread_carry_axes(carry_axes, arrays, root, batch), root)
    if flags.inits is not None:
        assert flags.spans is not None
        fits = functools.partial(_fits_table, np.shape(flags.spans[0])[0], batch)
        name = "the `init` of the `Packed`"
        return flags._replace(inits=check(name, flags.inits, (_SEQUENCES, _SEQUENCES), fits))
    tree = reset_to(init) if _is_function(reset_to) else reset_to
    if _is_function(reset_to) and (tree is None or _is_function(tree)):
        raise Misuse(
            f"{{call}}: `reset_to` is a function, which returned {describe_argument(tree)}.",
            "It receives `init` and returns what a reset restores: `lambda init: jax.tree.map(jnp.zeros_like, init)`.",
        )
    return flags._replace(to=check("`reset_to`", tree, (_PREFIX, _FITS), _fits))


class _Place(NamedTuple):
    """A leaf of init that is an array, and what a prefix tree has for it.

    Attributes:
        path: the leaf's.
        leaf: the leaf.
        axis: where its rows start, or None.
        value: what the prefix has; None: nothing.
        own: whether the prefix has it for this leaf alone.
        carry: the custom carry that the leaf is a part of, where the prefix has none; None otherwise.
        shared: whether the leaf has no rows, nor has any other leaf of the carry that it is a part of.
    """

    path: str
    leaf: Any
    axis: int | None
    value: Any
    own: bool
    carry: Any
    shared: bool


def _checked(
    init: PyTree,
    axes: LeafAxes,
    root: str,
    name: str,
    given: PyTree,
    cures: tuple[str, str],
    fits: Callable[[_Place], Row | None],
) -> list[Any]:
    """What a reset restores in each leaf of init that is an array, of its dtype; None: its init.

    Args:
        init: the carry that a scan starts from, values of registered types as custom carries.
        axes: for each leaf that is an array the axis where the batch shape starts; None: shared by all rows.
        root: the body's own name for its carry.
        name: what messages call what is given.
        given: a prefix tree of init.
        cures: what the user may do where it is no prefix, and where a value does not fit.
        fits: the row of a message for a value whose shape or dtype does not fit its leaf.
    """
    no_prefix, misfit = (cure.replace("{root}", root) for cure in cures)
    flat, structure = jtu.tree_flatten_with_path(adopt(given).init, is_leaf=lambda node: node is None)
    numbers = jax.tree.unflatten(structure, range(len(flat)))
    chosen = iter(spread_prefix(name, numbers, init, root, no_prefix))
    named, of_arrays, places = iter(jtu.tree_flatten_with_path(init)[0]), iter(axes), list[_Place]()
    for above, node in jtu.tree_flatten_with_path(init, is_leaf=is_carry)[0]:
        leaves = jax.tree.leaves(node)
        of_node = [None if is_static(leaf) else next(of_arrays) for leaf in leaves]
        for leaf, axis in zip(leaves, of_node, strict=True):
            (where, value), (path, _) = flat[next(chosen)], next(named)
            if value is leaf or (is_static(leaf) and (where != path or (is_static(value) and agree(leaf, value)))):
                value = None
            carry = node if is_carry(node) and len(where) <= len(above) else None
            shared = all(axis is None for axis in of_node)
            places.append(_Place(path_str(root, path), leaf, axis, value, where == path, carry, shared))
    found = [_misfit(place) or (fits(place), "") for place in places]
    bad = {row: cure for row, cure in found if row}
    if bad:
        raise Misuse(
            f"{{call}}: {name} does not fit {root}.",
            *([] if all(bad.values()) else [misfit]),
            *dict.fromkeys(filter(None, bad.values())),
            rows=list(bad),
        )
    pairs = [(place.leaf, None if place.axis is None else place.value) for place in places if not is_static(place.leaf)]
    return [
        value if value is None or is_key(leaf) else jnp.asarray(value, _type_of(leaf).dtype) for leaf, value in pairs
    ]


_PREFIX = (
    "Give a number for all leaves, a prefix tree of {root} with numbers, or a function of `init` that returns one "
    "of these. None keeps the value of `init`."
)
_FITS = (
    "For each leaf give a number, an array of the leaf's shape and dtype with an entry for each row, or None for the "
    "value of `init`. `jnp.broadcast_to(state, leaf.shape)` spreads the state of one row, and "
    "`state.astype(leaf.dtype)` casts it."
)
_SEQUENCES = (
    "Give `pack` one {root} for each sequence, with the shapes of one row. Use None for the parts that all "
    "sequences take from `init`."
)


def _is_function(reset_to: Any) -> TypeGuard[Callable[..., Any]]:
    """Whether it is to be called: what can be called and is a container, as a module is, is a value."""
    if not callable(reset_to) or kind_of(reset_to):
        return False
    return isinstance(reset_to, jtu.Partial) or jtu.all_leaves([reset_to])


def _misfit(place: _Place) -> tuple[Row, str] | None:
    """The row and the cure for the value of a prefix at a leaf that no shape or dtype would make fit."""
    path, leaf, value = place.path, place.leaf, place.value
    if value is None:
        return None
    came = describe_argument(value)
    if is_static(leaf):
        cure = f"{path}: a leaf that is not an array must be the same in every step. Give None there."
        return Row(path, describe_leaf(leaf), came, "static"), cure
    if is_static(value):
        return Row(path, f"{_type_of(leaf)}", describe_leaf(value)), ""
    if place.carry is not None:
        kind = type(place.carry).__name__
        cure = (
            f"{path} is a part of a custom carry (`{kind}`), which defines its own start: give a carry of that "
            "class there, or None for the value of `init`."
        )
        return Row(path, f"a part of a {kind}", came), cure
    if place.shared and place.own:
        cure = (
            f"{path}: all rows share this leaf, and a shared leaf is never reset. Give None there, or give the leaf "
            "one entry per row and an axis in `carry_axes`."
        )
        return Row(path, "None", came, "shared"), cure
    return None


def _fits(place: _Place) -> Row | None:
    """The row for a value that a leaf cannot hold, neither alone nor with an entry for each row."""
    value, leaf = place.value, place.leaf
    if value is None or place.axis is None:
        return None
    if isinstance(value, _NUMBERS) and not is_key(leaf):
        fits = holds(_type_of(leaf).dtype, value.item() if isinstance(value, np.generic) else value)
    else:
        shapes = [shape_of(leaf)] if is_key(leaf) else [(), shape_of(leaf)]
        fits = shape_of(value) in shapes and _same_dtype(value, leaf)
    came = describe_argument(value) + ("" if place.own else " for several leaves")
    return None if fits else Row(place.path, f"{_type_of(leaf)}", came)


def _fits_table(count: int, batch: tuple[int, ...], place: _Place) -> Row | None:
    """The row for a value that does not have so many entries, each of what a row of the leaf holds."""
    value, leaf, axis = place.value, place.leaf, place.axis
    if value is None or axis is None:
        return None
    shape = shape_of(leaf) or ()
    wanted = (count, *shape[:axis], *shape[axis + len(batch) :])
    if place.own and shape_of(value) == wanted and _same_dtype(value, leaf):
        return None
    return Row(place.path, f"{ShapedArray(wanted, _type_of(leaf).dtype)}", describe_node(value))


_NUMBERS = (bool, int, float, complex, np.generic)


def _type_of(leaf: Any) -> ShapedArray:
    """A leaf's shape and dtype, weak or not."""
    return ShapedArray(jax.typeof(leaf).shape, jax.typeof(leaf).dtype)


def _same_dtype(value: Any, leaf: Any) -> bool:
    dtype = dtype_of(leaf)
    return dtype_of(value) == dtype or (
        is_weak(value) and not is_key(leaf) and bool(jnp.result_type(value, jnp.zeros((), dtype)) == dtype)
    )
