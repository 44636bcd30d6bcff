"""Reads the segment ids of a data pipeline: where each sequence is in rows that are packed already."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from .._avals import Array, ArrayLike, PyTree, describe_leaf, dtype_of, on_automatic_axes, shape_of
from .._errors import Misuse, Row, TracedMisuse, expect
from .._rows.axes import Spans
from .._rows.checks import check_time_axis
from .._tree import leaves_with_path
from .sequences import check_count, put, some


def read_ids(
    data: PyTree, segment_ids: ArrayLike, time_axis: int, num_segments: int | None
) -> tuple[PyTree, Array, Array, Spans]:
    """Data whose steps lead, and the mask, the resets and the places of the sequences of a `Packed`.

    Concrete ids are checked, and are read on the host, which compiles nothing.
    """
    axis, most = check_time_axis(time_axis), check_count(num_segments, "num_segments", least=1)
    given = _check_ids(data, segment_ids)
    is_traced = isinstance(given, Tracer)
    xp: Any = jnp if is_traced else np
    ids = xp.moveaxis(given, axis, 0)
    steps, rows = ids.shape
    edge = xp.zeros_like(ids[:1])
    is_first, is_last = ids != xp.concatenate([edge, ids[:-1]]), ids != xp.concatenate([ids[1:], edge])
    mask = ids != 0
    if not is_traced:
        most = _count(np.argwhere((is_first & mask).T), ids, axis, most)
    if most is None:
        raise TracedMisuse(
            "{verb}: `segment_ids` are traced, so the number of sequences is not known.",
            "Give a `num_segments` that is large enough, as for `jax.ops.segment_sum`: for example the most segments "
            "that a row may have, times the number of rows.",
            "Or scan over the rows, which returns a carry for each of them: `mask_scan(step, init, data, "
            "mask=segment_ids != 0, resets=segment_ids != jnp.roll(segment_ids, 1, "
            f"{axis}){', time_axis=1' if axis else ''})`.",
        )

    def index_of(is_first: Array, is_last: Array) -> Array:
        """int32[3, N]: the row, the first step and the length of each, row by row; zeros past the last."""
        numbers = xp.arange(1, most + 1)
        first, last = (xp.searchsorted(xp.cumsum(flags.T.reshape(-1)), numbers) for flags in (is_first, is_last))
        index = xp.stack([first // max(steps, 1), first % max(steps, 1), last - first + 1])
        return xp.where(first < steps * rows, index, 0).astype(np.int32)

    index: Any = on_automatic_axes(index_of, (None, None), is_first & mask, is_last & mask)
    if is_traced:  # so there may be more segments than were expected, from this place on
        place = jnp.arange(rows * steps, dtype=jnp.int32).reshape(rows, steps).T
        mask &= place < jnp.max(index[0] * steps + index[1] + index[2], initial=0)
    flags: PyTree = mask, is_first & mask, tuple(index)
    return jax.tree.map(lambda leaf: jnp.moveaxis(leaf, axis, 0), data), *(flags if is_traced else put(flags))


def _check_ids(data: Any, segment_ids: Any) -> Any:
    """The ids as an array, int[*, *], with whose axes each leaf of the data begins."""
    dtype = dtype_of(segment_ids)
    expect(
        dtype is not None and jnp.issubdtype(dtype, jnp.integer),
        "segment_ids",
        "ints",
        segment_ids,
        "Give the number of each step's segment in its row, and 0 at padding. For a bool array of the first steps, "
        "pass `resets` to `treescan.mask_scan`.",
    )
    given = segment_ids if isinstance(segment_ids, Tracer) else np.asarray(segment_ids)
    if given.ndim != 2:
        raise Misuse(
            f"{{verb}}: `segment_ids` must have two axes, rows and steps, but are {describe_leaf(segment_ids)}.",
            "For a single row: `segment_ids[None]`, and the same for each leaf of the data, with `time_axis=1`. For "
            "several batches, map over them: `jax.vmap`.",
        )
    expected = f"[{given.shape[0]}, {given.shape[1]}, ...]"
    bad = [
        Row(path, expected, describe_leaf(leaf))
        for path, leaf in leaves_with_path("data", data)
        if (shape_of(leaf) or ())[:2] != given.shape
    ]
    if bad:
        raise Misuse(
            "{verb}: data and `segment_ids` have different rows or steps.",
            "Every leaf must begin with the two axes of `segment_ids`. Pass other arrays beside the batch: "
            "`xs=(packed, others)`.",
            rows=some(bad),
        )
    return given


def _count(firsts: np.ndarray, ids: np.ndarray, axis: int, most: int | None) -> int:
    """The number of sequences N, from the row and the step in which each begins, int[N, 2]; checks concrete ids."""

    def at(row: int, step: int) -> str:
        return f"segment_ids[{step}, {row}]" if axis == 0 else f"segment_ids[{row}, {step}]"

    seen: dict[tuple[int, int], int] = {}
    for row, step in firsts.tolist():
        number = int(ids[step, row])
        if number < 0:
            raise Misuse(
                f"{{verb}}: {at(row, step)} is {number}.",
                "Ids are numbers from 1 up, and 0 is padding. If padding is -1: `segment_ids + 1`.",
            )
        if (number, row) in seen:
            raise Misuse(
                f"{{verb}}: segment {number} begins twice in one row, at {at(row, seen[number, row])} and "
                f"{at(row, step)}.",
                "The steps of a segment must be next to each other. If these are two segments, number them: "
                f"`jnp.where(segment_ids == 0, 0, jnp.cumsum(segment_ids != jnp.roll(segment_ids, 1, {axis}), "
                f"{axis}) + 1)`.",
                f"If {'the steps lead, [T, B]' if axis else 'the rows lead, [B, T]'}: `time_axis={1 - axis}`.",
            )
        seen[number, row] = step
    if most is not None and len(firsts) > most:
        raise Misuse(
            f"{{verb}}: `num_segments` is {most}, but `segment_ids` have {len(firsts)} segments.",
            "Give a number that is large enough, or leave it out where the ids are not traced.",
        )
    return max(len(firsts), 1) if most is None else most
