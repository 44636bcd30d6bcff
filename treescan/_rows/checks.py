"""Checks of the arguments that `mask_scan` adds: lengths, masks, resets and what they restore, chunks and tiers."""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from .._avals import (
    Array,
    clamped,
    describe_argument,
    describe_leaf,
    describe_traced,
    dtype_of,
    exact_int,
    shape_of,
)
from .._errors import (
    ArgumentError,
    ArgumentTypeError,
    Misuse,
    PluginFault,
    TypeMisuse,
    expect,
)
from .._loop.feed import Feed, slots_of
from .axes import RowFlags


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
        lengths=None if lengths is None else _lengths_of_part(lengths, steps, offset, time_axis),
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
            *_as_many(checked.lengths, steps, time_axis),
            "Both must have the same batch shape. `resets` also has the axis of the steps.",
        )
    return checked


def leads(time_axis: int) -> str:
    """The layout that the user may have meant, if it is the other one, and what to do then."""
    steps = "the steps lead, [T,B,...]: leave `time_axis=1` out."
    return steps if time_axis else "the batch leads, [B,T,...]: {batch_first}."


def _as_many(lengths: Any, steps: Any, time_axis: int) -> list[str]:
    """The advice if the size that was taken for that of the steps may be that of the batch."""
    is_either = lengths is not None and np.shape(lengths) == (steps,)
    return [f"There are as many lengths as steps. Perhaps {leads(time_axis)}"] * is_either


def batch_of(flags: RowFlags, time_axis: int) -> tuple[int, ...]:
    """The shape of the batch, as the lengths say it, or the mask, or resets alone."""
    if flags.lengths is not None:
        return tuple(np.shape(flags.lengths))
    shape = np.shape(flags.resets if flags.mask is None else flags.mask)
    return (*shape[:time_axis], *shape[time_axis + 1 :])


def _lengths_of_part(lengths: Any, steps: int, offset: Any, time_axis: int) -> Array:
    """int[*batch]: how many steps of each row are in the part that begins at `offset`; None: it is the whole."""
    lengths = jnp.asarray(check_lengths(lengths, steps, is_part=offset is not None, time_axis=time_axis))
    if offset is None:
        return _narrowed(lengths) if isinstance(lengths, Tracer) else lengths
    left = jnp.maximum(clamped(lengths) - offset, 0)
    return jnp.minimum(left, steps) if isinstance(steps, int) else left


def _narrowed(lengths: Array) -> Array:
    """Lengths of a type that int32 holds: larger ones would wrap in a cast. There are never so many steps."""
    return lengths if jnp.iinfo(lengths.dtype).max < 2**31 else clamped(lengths)


def check_lengths(lengths: Any, steps: int | None, *, is_part: bool = False, time_axis: int = 0) -> Any:
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
            *_as_many(values, steps, time_axis),
            f"Cut the lengths, `jnp.clip(lengths, 0, {steps})`, or pad to the longest row.",
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
        given = f"{name}[..., 0]" if len(shape) == 3 and shape[2] == 1 else name
        if (len(shape) == 2 or given != name) and shape[1 - time_axis] == steps:
            swapped = (
                f"If {leads} there, pass `{given}.T`, or `time_axis={1 - time_axis}` if {{xs}} has that layout "
                "too. Otherwise "
            )
        raise Misuse(
            f"{{call}}: `{name}` must have the steps along axis {time_axis}, {wanted}, but is "
            f"{describe_argument(flags)}.",
            f"{swapped}{{xs}} has {steps} steps: give `{name}` the same number, along axis {time_axis}.",
        )
    return jnp.asarray(flags)


def check_slots(feed: Feed, batch: tuple[int, ...]) -> None:
    """The batch shape follows the steps in what slots hold that say they have rows."""
    for slot, value in slots_of(feed):
        bad = [leaf for leaf in jax.tree.leaves(value) if leaf.shape[1 : len(batch) + 1] != batch] if slot.rows else []
        if bad:
            shape = ",".join(map(str, (bad[0].shape[0], *batch)))
            raise PluginFault(
                f"{{call}}: the slot `{slot.name}` says `rows=True`, but is fed {describe_leaf(bad[0])}, without the "
                "rows of the batch.",
                f"Feed it [{shape}, ...]: the steps, then the batch shape. If all rows share the array: `Slot(name, "
                "rows=False)`.",
            )


def check_time_axis(time_axis: Any, name: str = "time_axis", *others: str) -> int:
    """0 or 1; `others` is advice for other layouts."""
    axis = exact_int(time_axis)
    layouts = "0 means that time leads, [T, B, ...]; 1 that the batch leads, [B, T, ...]."
    error = ArgumentTypeError if axis is None else ArgumentError
    expect(axis in (0, 1), name, "0 or 1", time_axis, layouts, *others, error=error)
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
            "`compact=True` makes tiers of a sixteenth, a quarter, a half and all of the rows; a tuple names the "
            "numbers of rows instead.",
        )
    if tiers and keyed:
        raise Misuse(
            "{call}: `compact` and `key` cannot be combined: the body would draw different numbers.",
            "Give each row a key of its own, in the carry: `treescan.carries.keys(jax.random.split(key, B))`. The body "
            "then sees a fresh key per row and step there.",
        )
    return tiers
