"""Rows: which steps are valid, where segments begin and from what, and how they end, as in `mask_scan`."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from ..._avals import Array, PyTree, describe_leaf
from ..._errors import Misuse, Row
from ..._options.reset_to import check_targets
from ..._options.resets import beginnings
from ..._rows.axes import RowFlags
from ..._rows.checks import batch_of, check_rows
from ..._rows.leaves import mask_of_lengths
from ..._rows.spans import numbers_of, refuse_split_rows, turns
from ..._tree import Prefix, leaves_with_path
from ...carries._registry import Adopted


def check_flags(flags: RowFlags, reset_to: PyTree, init: PyTree, b: PyTree, time_axis: int, count: int) -> RowFlags:
    """The flags, which fit b, with what resets restore, for each leaf; `init` has all leaves of b."""
    if any(each is not None for each in flags):
        flags = check_rows(flags, time_axis, count)
        batch = batch_of(flags, time_axis)
        rows = [
            Row(path, f"[{', '.join(map(str, (count, *batch)))}, ...]", describe_leaf(leaf))
            for path, leaf in leaves_with_path("b", b)
            if leaf.shape[1 : 1 + len(batch)] != batch
        ]
        if rows:
            raise Misuse(
                "{call}: b does not have the rows of `lengths`, `mask` or `resets`.",
                "Behind its steps, each leaf has one entry for each row. If the batch leads, [B,T,...]: {batch_first}.",
                rows=rows,
            )
    if reset_to is None and flags.inits is None:
        return flags
    return check_targets(flags, reset_to, init, Prefix.of(0), time_axis, Adopted(init), init, "init")


def steps_of(flags: RowFlags, time_axis: int, reverse: bool, count: int) -> tuple[Array | None, Array | None]:
    """Which steps are valid, and which begin a segment, of checked flags: bool[T, *batch]; None: all, or none."""
    mask, resets = (None if each is None else jnp.moveaxis(each, time_axis, 0) for each in flags[1:3])
    valid = mask if flags.lengths is None else mask_of_lengths(flags.lengths, count)
    if resets is None or not count:
        return valid, None
    if valid is None and reverse:
        return None, jnp.concatenate([resets[1:], jnp.zeros_like(resets[:1])])
    if valid is None:
        return None, resets
    begins = beginnings(resets, valid, reverse=reverse)
    if flags.spans is not None:
        refuse_split_rows(flags.spans, valid)
        begins = begins | turns(numbers_of(flags.spans, valid.shape), valid, later=reverse)
    return valid, begins
