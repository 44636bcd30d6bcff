"""Batches in the xs of `mask_scan`: a `Padded` or a `Packed`, whole or as a part of a tree."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from .._checks.rows import check_padded
from .._data.pack import Packed
from .._data.pad import Padded
from .._errors import ArgumentError, Fault
from .._transforms.rows.batch_axes import RowFlags
from .._tree import PrefixMismatch, broadcast_prefix, leaves_with_path
from .._types import Axes, PyTree

_Batch = Padded[Any] | Packed[Any]


def rows_of(xs: PyTree, flags: RowFlags, time_axis: int, in_axes: Axes) -> tuple[PyTree, RowFlags]:
    """The data of xs, and the rows of the batches in it; those of anything else as they were given.

    Raises:
        Fault: for an `ArgumentError` if something else says what the batches say, or if they differ in that.
    """
    batches = [(path, node) for path, node in leaves_with_path("xs", xs, is_leaf=_is_batch) if _is_batch(node)]
    if not batches:
        return xs, flags
    path, first = batches[0]
    kind, is_packed = type(first).__name__, isinstance(first, Packed)
    said = {"lengths": flags.lengths, "mask": flags.mask, "time_axis": time_axis or None}
    said |= {"resets": flags.resets} if is_packed else {}
    said |= {"in_axes": in_axes} if _is_batch(xs) else {}
    check_padded(said, kind, path)
    for other_path, other in batches:
        _refuse_within(other_path, other)
        _refuse_other_rows(batches[0], (other_path, other))
    data = jax.tree.map(lambda node: node.data if _is_batch(node) else node, xs, is_leaf=_is_batch)
    if in_axes is not None:
        _check_in_axes(in_axes, xs, data)
    if isinstance(first, Padded):
        return data, RowFlags(lengths=first.lengths, resets=flags.resets)
    spans = first.index.row, first.index.start, first.index.length
    return data, RowFlags(mask=first.mask, resets=first.resets, spans=spans, inits=_init_of(batches))


def _is_batch(node: Any) -> bool:
    return isinstance(node, Padded | Packed)


def _refuse_within(path: str, batch: _Batch) -> None:
    """Refuses a batch whose data hold another."""
    for inner, node in leaves_with_path(f"{path}.data", batch.data, is_leaf=_is_batch):
        if _is_batch(node):
            raise Fault(
                ArgumentError,
                f"{{verb}} over {{body}}: {inner} is a `{type(node).__name__}` within a `{type(batch).__name__}`.",
                f"A batch may only contain data: use `{inner}.data` there, or pass both batches side by side.",
            )


def _refuse_other_rows(first: tuple[str, _Batch], other: tuple[str, _Batch]) -> None:
    """Refuses two batches that do not say the same of their rows, or may not."""
    (path, batch), (other_path, other_batch) = first, other
    both = f"{path} is a `{type(batch).__name__}` and {other_path} a `{type(other_batch).__name__}`"
    one = f"`{path}._replace(data=({path}.data, {other_path}.data))`"
    if type(batch) is not type(other_batch):
        raise Fault(
            ArgumentError,
            f"{{verb}} over {{body}}: {both}, which have different rows.",
            "Make both with `pad`, or both with `pack`. "
            f"`repad({path if isinstance(batch, Packed) else other_path}, ys)` gives each packed sequence a row.",
        )
    pairs = list(zip(_said(batch), _said(other_batch), strict=True))
    if any(a is not b and (isinstance(a, Tracer) or isinstance(b, Tracer)) for a, b in pairs):
        raise Fault(
            ArgumentError,
            f"{{verb}} over {{body}}: {both}, whose rows are traced, so they may differ.",
            f"Combine the data of both into one batch: {one}.",
        )
    if not all(a is b or _equal(a, b) for a, b in pairs):
        raise Fault(
            ArgumentError,
            f"{{verb}} over {{body}}: {both}, which have different rows.",
            "Make one batch from sequences that contain both, `pad([(a, b), ...])` or `pack([(a, b), ...])`.",
        )


def _said(batch: _Batch) -> list[Any]:
    """What a batch says of its rows."""
    return [batch.lengths] if isinstance(batch, Padded) else [batch.mask, batch.resets, *batch.index]


def _equal(a: Any, b: Any) -> bool:
    return np.shape(a) == np.shape(b) and bool(np.all(np.asarray(a) == np.asarray(b)))


def _init_of(batches: list[tuple[str, Any]]) -> PyTree:
    """The inits of the one batch that has some."""
    having = [(path, batch.init) for path, batch in batches if batch.init is not None]
    if len(having) > 1 and any(init is not having[0][1] for _, init in having):
        raise Fault(
            ArgumentError,
            f"{{verb}} over {{body}}: {having[0][0]} and {having[1][0]} both have an `init` for each sequence.",
            f"Leave one of them out: `{having[1][0]}._replace(init=None)`.",
        )
    return having[0][1] if having else None


def _check_in_axes(in_axes: Axes, xs: PyTree, data: PyTree) -> None:
    """Refuses `in_axes` that say of the data of a batch anything but 0; what is no prefix is found out later."""
    own = jax.tree.map(
        lambda node: jax.tree.map(lambda _: True, node.data) if _is_batch(node) else False, xs, is_leaf=_is_batch
    )
    try:
        axes = broadcast_prefix(in_axes, data, "xs")
    except PrefixMismatch:
        return
    named = leaves_with_path("xs", data)
    for axis, is_own, (path, _) in zip(axes, jax.tree.leaves(own), named, strict=True):
        if is_own and not (type(axis) is int and axis == 0):
            raise Fault(
                ArgumentError,
                f"{{verb}} over {{body}}: `in_axes` is {axis!r} for {path}, a part of a batch. The first axis of a "
                "batch is always the steps.",
                "Give 0 for the parts of a `Padded` or a `Packed`, and other axes, or None, for the other leaves.",
            )
