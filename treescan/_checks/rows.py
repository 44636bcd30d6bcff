"""Checks of the arguments that `mask_scan` adds: lengths, masks, resets, chunks and tiers."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from .._avals import (
    describe_argument,
    describe_traced,
    dtype_of,
    exact_int,
    shape_of,
)
from .._errors import (
    ArgumentError,
    ArgumentTypeError,
    Fault,
    Misuse,
    TracedArgumentError,
    TypeMisuse,
    expect,
    expect_int,
)
from .._transforms.rows.axes import RowFlags

_TRACED_LENGTH = (
    "A loop's length is part of the compiled program. For a length that is known only at run time, scan over the "
    "longest possible length and pass the traced one to `treescan.mask_scan(..., lengths=...)`; or make it a "
    "static argument of the function under `jax.jit`."
)
_LENGTH_OF_ROWS = (
    "`length` is the number of steps of the whole loop. Did you mean `lengths`, the number of valid steps of each row? "
    "`mask_scan`, `fold` and `accumulate` take it."
)
_MOST_OF_ROWS = (
    "It is one number for all rows. If rows should stop after different numbers of steps, count the steps in the "
    "carry, and let the condition of `while_scan` return one bool for each row."
)


def check_length(length: Any, name: str = "length", cure: str = _TRACED_LENGTH) -> int | None:
    """An int from 0 up, or None. `cure` is what to do about a traced one."""
    if length is None or (type(length) is int and length >= 0):
        return length
    rows = _LENGTH_OF_ROWS if name == "length" else _MOST_OF_ROWS
    dtype, counts = dtype_of(length), False  # whether it is a list or an array of ints, as `lengths` are
    if isinstance(length, list | tuple):
        counts = bool(length) and all(exact_int(item) is not None for item in length)
    elif shape_of(length) and dtype is not None:
        counts = jnp.issubdtype(dtype, jnp.integer)
    expect(not counts, name, "an int", length, rows)
    if isinstance(length, Tracer):
        raise Fault(TracedArgumentError, f"{{call}}: `{name}` is {describe_traced(length)}.", cure)
    whole = "Give the number of steps as an int of at least 0. `int(...)` converts a whole number."
    return expect_int(length, name, whole, least=0, small="Give an int of at least 0.")


def check_bound(bound: Any, name: str) -> int:
    """A concrete int: the end of a range of indices."""
    if isinstance(bound, Tracer):
        raise Fault(
            TracedArgumentError,
            f"{{call}}: `{name}` is {describe_traced(bound)}.",
            "Pass `max_length=`, the largest number of steps that the loop may take. It runs only the steps up to "
            "the bound, and is differentiable. Or make the bound a static argument of the function under `jax.jit`.",
        )
    first = "The bounds come first, `treescan.fori(lower, upper, step, init)`, and count whole steps."
    return expect_int(bound, name, first)


def check_rows(flags: RowFlags, time_axis: int, steps: int) -> RowFlags:
    """At most one of lengths (ints, in range if concrete) and mask, or resets alone (both bools that fit the steps)."""
    lengths, mask, resets = flags[:3]
    if (lengths is None) == (mask is None) and (resets is None or mask is not None):
        both = "both are given" if mask is not None else "neither is given"
        raise Misuse(
            f"{{call}}: pass either `lengths` or `mask`; {both}.",
            "`lengths` int[*batch] counts each row's steps from the first; `mask` bool[T, *batch] marks any pattern; "
            "`resets` alone means that every step is valid.",
        )
    checked = flags._replace(
        lengths=None if lengths is None else jnp.asarray(check_lengths(lengths, steps)),
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


def check_lengths(lengths: Any, steps: int | None) -> Any:
    """Ints, between 0 and `steps` where both are known."""
    given, lengths = lengths, _as_array(lengths) if isinstance(lengths, list | tuple) else lengths
    dtype = dtype_of(lengths)
    pattern = "Give the number of valid steps of each row, int[*batch]; a bool pattern is a `mask`."
    expect(dtype is not None and jnp.issubdtype(dtype, jnp.integer), "lengths", "ints", given, pattern)
    if steps is None or isinstance(lengths, Tracer) or not getattr(lengths, "is_fully_addressable", True):
        return lengths
    values = np.asarray(lengths)
    if values.size and (values.min() < 0 or values.max() > steps):
        row = int(np.argmax((values < 0) | (values > steps)))
        where = list(map(int, np.unravel_index(row, values.shape))) or ""
        raise Misuse(
            f"{{call}}: `lengths` must lie between 0 and the {steps} steps, but lengths{where} is {values.flat[row]}.",
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
