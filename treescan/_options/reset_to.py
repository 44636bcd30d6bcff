"""`reset_to`: what a reset restores, checked leaf by leaf against init."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeGuard

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.core import ShapedArray

from .._avals import (
    Array,
    LeafAxes,
    PyTree,
    describe_argument,
    describe_leaf,
    describe_node,
    dtype_of,
    holds,
    is_key,
    is_weak,
    shape_of,
)
from .._body.carry import agree
from .._errors import Fault, Misuse, Row, noted
from .._loop.loop import Loop
from .._rows.axes import RowFlags, flags_given, spread_carry_axes
from .._rows.checks import batch_of
from .._transforms.axes import spread_prefix
from .._tree import Prefix, is_static, leaves_with_path, path_str
from ..carries._base import is_carry
from ..carries._registry import Adopted, adopt, kind_of


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
    try:
        axes = spread_carry_axes(carry_axes, arrays, root, batch)
    except Fault:
        return flags  # `FindRows` is the first transform, and refuses such a carry with more advice
    check = functools.partial(_checked, adopted.init, axes, root)
    if flags.inits is not None:
        assert flags.spans is not None
        fits = functools.partial(_fits_table, np.shape(flags.spans[0])[0], batch)
        name = "the `init` of the `Packed`"
        return flags._replace(inits=check(name, flags.inits, (_SEQUENCES, _SEQUENCES), fits))
    with noted("`reset_to`, called with `init`,"):
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
            if is_carry(node) and len(where) < len(above) and isinstance(value, _NUMBERS):
                value = None  # a number for several parts: a custom carry among them keeps its own start
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
        value
        if value is None or is_key(leaf)
        else _unsettled(value)
        if is_weak(leaf)
        else jnp.asarray(value, _type_of(leaf).dtype)
        for leaf, value in pairs
    ]


def _unsettled(value: Any) -> Array:
    """What is put back in a leaf whose type settles later: an int in a small type, so that it says its range.

    That is one without a sign, where the number has none: other types without a sign hold it too.
    """
    if not isinstance(value, _NUMBERS):
        return jnp.asarray(value)
    number = value.item() if isinstance(value, np.generic) else value
    if not isinstance(number, int):
        return jnp.asarray(number)
    kinds = (jnp.uint4, np.uint8, np.uint16, np.int32, np.uint32) if number >= 0 else (np.int8, np.int16, np.int32)
    kind = next((kind for kind in kinds if jnp.iinfo(kind).min <= number <= jnp.iinfo(kind).max), None)
    return jnp.asarray(float(number)) if kind is None else jnp.asarray(number, kind)


def check_settled(loop: Loop, values: list[Any]) -> None:
    """Refuses what a leaf cannot hold whose type has settled in the trace of the loop: a weakly typed init.

    Args:
        loop: the loop, in the trace of which its types settled.
        values: for each leaf of its state what a reset puts back; None: its init.

    Raises:
        Fault: for an `ArgumentError`.
    """
    named = leaves_with_path(loop.names[0], jax.tree.unflatten(loop.hoisted.structure, loop.hoisted.fixed))
    paths = [path for path, is_fixed in named if not is_fixed]
    rows = [
        Row(path, f"{_type_of(leaf)}", describe_leaf(value))
        for path, leaf, value in zip(paths, loop.state, values, strict=True)
        if value is not None and not _casts(dtype_of(value), dtype_of(leaf))
    ]
    if rows:
        name = "`reset_to`" if flags_given(loop).inits is None else "the `init` of the `Packed`"
        raise Misuse(
            f"{{call}}: {name} does not fit {loop.names[0]}.",
            "The init is weakly typed there, as Python scalars are, and takes on the type that the step returns. Give "
            "what that type holds, or start from an array of the type that you need.",
            rows=rows,
        )


def _casts(given: Any, dtype: Any) -> bool:
    """Whether a dtype holds all values of another, rounded if both are floating-point dtypes."""
    if given == dtype or jnp.issubdtype(given, jax.dtypes.prng_key):
        return bool(given == dtype)
    if jnp.issubdtype(dtype, jnp.inexact):
        return bool(jnp.issubdtype(dtype, jnp.complexfloating) or not jnp.issubdtype(given, jnp.complexfloating))
    return bool(jnp.issubdtype(given, jnp.integer)) and bool(np.can_cast(given, dtype, "safe"))


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
            'one entry per row and an axis in `row_axes["carry"]`.'
        )
        return Row(path, "None", came, "shared"), cure
    return None


def _fits(place: _Place) -> Row | None:
    """The row for a value that a leaf cannot hold, neither alone nor with an entry for each row."""
    value, leaf = place.value, place.leaf
    if value is None or place.axis is None:
        return None
    if isinstance(value, _NUMBERS) and not is_key(leaf):
        fits = is_weak(leaf) or holds(_type_of(leaf).dtype, value.item() if isinstance(value, np.generic) else value)
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
    if is_weak(leaf):  # it settles later: see `check_settled`
        return dtype_of(value) is not None and not is_key(value)
    return dtype_of(value) == dtype or (
        is_weak(value) and not is_key(leaf) and bool(jnp.result_type(value, jnp.zeros((), dtype)) == dtype)
    )
