"""Checks of the arguments that `mask_scan` adds: lengths, masks, resets, chunks and tiers."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from .._avals import describe_argument, describe_traced, dtype_of, exact_int, shape_of
from .._errors import ArgumentError, ArgumentTypeError, Fault
from .._transforms.rows.batch_axes import RowFlags


def check_rows(flags: RowFlags, time_axis: int, steps: int) -> RowFlags:
    """At most one of lengths (ints, in range if concrete) and mask, or resets alone (both bools that fit the steps)."""
    lengths, mask, resets = flags[:3]
    if (lengths is None) == (mask is None) and (resets is None or mask is not None):
        both = "both are given" if mask is not None else "neither is given"
        raise Fault(
            ArgumentError,
            f"{{verb}} over {{body}}: pass either `lengths` or `mask`; {both}.",
            "`lengths` int[*batch] counts each row's steps from the first; `mask` bool[T, *batch] marks any pattern; "
            "`resets` alone means that every step is valid.",
        )
    checked = flags._replace(
        lengths=None if lengths is None else jnp.asarray(check_lengths(lengths, steps)),
        mask=None if mask is None else _check_flags("mask", mask, time_axis, steps),
        resets=None if resets is None else _check_flags("resets", resets, time_axis, steps),
    )
    _check_batch(checked, time_axis)
    return checked


def _check_batch(flags: RowFlags, time_axis: int) -> None:
    """Refuses resets whose rows differ from those of the lengths or the mask."""
    if flags.resets is None or flags[:2] == (None, None):
        return
    resets = _batch(flags.resets, time_axis)
    name, other = ("lengths", flags.lengths) if flags.mask is None else ("mask", flags.mask)
    if resets != (shape_of(other) if flags.mask is None else _batch(other, time_axis)):
        raise Fault(
            ArgumentError,
            f"{{verb}} over {{body}}: `resets` {describe_argument(flags.resets)} and `{name}` "
            f"{describe_argument(other)} have different rows.",
            "Both must have the same batch shape. `resets` also has the axis of the steps.",
        )


def _batch(flags: Any, time_axis: int) -> tuple[int, ...]:
    shape = shape_of(flags) or ()
    return (*shape[:time_axis], *shape[time_axis + 1 :])


def check_lengths(lengths: Any, steps: int | None, call: str = "{verb} over {body}") -> Any:
    """Ints, between 0 and `steps` where both are known. The messages about anything else begin with `call`."""
    given, lengths = lengths, _as_array(lengths) if isinstance(lengths, list | tuple) else lengths
    dtype = dtype_of(lengths)
    if dtype is None or not jnp.issubdtype(dtype, jnp.integer):
        raise Fault(
            ArgumentTypeError,
            f"{call}: `lengths` must be ints, got {describe_argument(given)}.",
            "Give the number of valid steps of each row, int[*batch]; a bool pattern is a `mask`.",
        )
    if steps is None or isinstance(lengths, Tracer) or not getattr(lengths, "is_fully_addressable", True):
        return lengths
    values = np.asarray(lengths)
    if values.size and (values.min() < 0 or values.max() > steps):
        row = int(np.argmax((values < 0) | (values > steps)))
        where = list(map(int, np.unravel_index(row, values.shape))) or ""
        raise Fault(
            ArgumentError,
            f"{call}: `lengths` must lie between 0 and the {steps} steps, but lengths{where} is {values.flat[row]}.",
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


def _check_flags(name: str, flags: Any, time_axis: int, steps: int) -> Any:
    if isinstance(flags, list | tuple):
        flags = _as_array(flags)
    if dtype_of(flags) != np.dtype(bool):
        cure = {
            "mask": "Compare, for example `mask=tokens != pad`; for the number of valid steps of each row, use "
            "`lengths`.",
            "resets": "Mark the first step of each segment, for example `resets=episode_step == 0`.",
        }
        raise Fault(
            ArgumentTypeError,
            f"{{verb}} over {{body}}: `{name}` must be a bool array, got {describe_argument(flags)}.",
            cure[name],
        )
    shape = shape_of(flags) or ()
    if len(shape) <= time_axis or shape[time_axis] != steps:
        wanted = f"bool[{steps}, *batch]" if time_axis == 0 else f"bool[B, {steps}]"
        raise Fault(
            ArgumentError,
            f"{{verb}} over {{body}}: `{name}` must have the steps along axis {time_axis}, {wanted}, but is "
            f"{describe_argument(flags)}.",
            _cure_axis(name, shape, time_axis, steps),
        )
    return jnp.asarray(flags)


def _cure_axis(name: str, shape: tuple[int, ...], time_axis: int, steps: int) -> str:
    other = 1 - time_axis
    if len(shape) == 2 and shape[other] == steps:
        leads = "batch" if time_axis == 0 else "steps"
        return (
            f"If the {leads} lead{'s' if time_axis == 0 else ''} there, pass `{name}.T`, or `time_axis={other}` if "
            f"xs have that layout too. Otherwise xs has {steps} steps: give `{name}` the same number, along axis "
            f"{time_axis}."
        )
    return f"xs has {steps} steps: give `{name}` the same number, along axis {time_axis}."


def check_time_axis(time_axis: Any) -> int:
    """0 or 1."""
    axis = exact_int(time_axis)
    if axis not in (0, 1):
        raise Fault(
            ArgumentTypeError if axis is None else ArgumentError,
            f"{{verb}} over {{body}}: `time_axis` must be 0 or 1, got {describe_traced(time_axis)}.",
            "0 means that time leads, [T, B, ...]; 1 that the batch leads, [B, T, ...]. For other layouts, use "
            "`in_axes` and `out_axes`.",
        )
    return axis


def check_chunk(chunk: Any, compact: Any) -> int | None:
    """An int of at least 0, or None."""
    if chunk is None:
        return None
    size = exact_int(chunk)
    if size is None or size < 0:
        raise Fault(
            ArgumentTypeError if size is None else ArgumentError,
            f"{{verb}} over {{body}}: `chunk` must be an int of at least 0, or None, got {describe_traced(chunk)}.",
            "It is the number of steps that are skipped together if no row is valid. None lets treescan choose it, "
            "and 0 turns skipping off.",
        )
    if size == 0 and compact:
        raise Fault(
            ArgumentError,
            "{verb} over {body}: `compact` sorts the rows of each chunk, but `chunk=0` turns chunks off.",
            "Leave `chunk` out, or give the number of steps in a chunk.",
        )
    return size


def check_compact(compact: Any, *, keyed: bool) -> bool | tuple[int, ...]:
    """A bool, or the tiers as ints above 0."""
    tiers = bool(compact) if isinstance(compact, bool | np.bool_) else _check_tiers(compact)
    if tiers and keyed:
        raise Fault(
            ArgumentError,
            "{verb} over {body}: `compact` and `key` cannot be combined: the body would draw different numbers.",
            "Give each row a key of its own, in the carry: `keys = jax.random.split(key, B)`, and in the body "
            "`keys, now = jnp.moveaxis(jax.vmap(jax.random.split)(keys), 1, 0)`.",
        )
    return tiers


def _check_tiers(compact: Any) -> tuple[int, ...]:
    counts = [exact_int(tier) for tier in compact] if isinstance(compact, tuple | list) else []
    if counts and all(count is not None and count > 0 for count in counts):
        return tuple(count for count in counts if count is not None)
    raise Fault(
        ArgumentTypeError,
        f"{{verb}} over {{body}}: `compact` must be True, False or a tuple of ints above 0, got "
        f"{'(' + ', '.join(map(describe_traced, compact)) + ')' if counts else describe_traced(compact)}.",
        "`compact=True` makes tiers of 1, 2, 4, ... rows; a tuple names the numbers of rows instead.",
    )


def check_padded(given: Mapping[str, Any], kind: str, path: str = "xs") -> None:
    """Refuses options that a `Padded` or a `Packed` already determines."""
    said = [name for name, value in given.items() if value is not None]
    if said:
        raise Fault(
            ArgumentError,
            f"{{verb}} over {{body}}: {path} is a `{kind}`, which already determines `{said[0]}`.",
            f"Leave `{said[0]}` out, or pass `{path}.data` in place of {path}.",
        )
