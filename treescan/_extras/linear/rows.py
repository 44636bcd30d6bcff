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
from ..._rows.spans import are_valid, at_rows, ends_of, numbers_of, refuse_split_rows, turns
from ..._tree import Prefix, leaves_with_path
from ...carries._registry import Adopted
from .products import How, Steps, but, times


def steps_of(flags: RowFlags, time_axis: int, reverse: bool, count: int) -> Steps:
    """Which steps are valid and where segments begin, with the steps in front, of checked flags.

    Args:
        flags: checked ones.
        time_axis: where the steps are in a mask and in resets.
        reverse: whether the loop runs from the last step to the first.
        count: the number of steps.
    """
    mask, resets = (None if each is None else jnp.moveaxis(each, time_axis, 0) for each in flags[1:3])
    valid = mask if flags.lengths is None else mask_of_lengths(flags.lengths, count)
    if resets is None or not count:
        return Steps(valid)
    if valid is None:
        after = jnp.concatenate([resets[1:], jnp.zeros_like(resets[:1])])
        return Steps(None, after if reverse else resets)
    cut = beginnings(resets, valid, reverse=reverse)
    if flags.spans is not None:
        refuse_split_rows(flags.spans, valid)
        cut = cut | turns(numbers_of(flags.spans, valid.shape), valid, later=reverse)
    return Steps(valid, cut)


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


def entering(how: How, steps: Steps, a: Array, b: Array, table: Array, numbers: Array) -> Array:
    """What is added in each step, with what the sequences of a `Packed` begin from, of which there is a table."""
    begins = jnp.take(table, jnp.maximum(numbers - 1, 0), axis=0, mode="clip").astype(how.state)
    enters = times(how, but(steps.cut, a.astype(how.state), 0), begins)
    return but(steps.valid, b.astype(how.state), 0) + but(steps.cut, enters, 0)


def ends(hs: Array, spans: Any, valid: Any, start: Array, *, reverse: bool) -> Array:
    """The last state of each sequence of a `Packed`; of one without a valid step, `start`."""
    return ends_of(hs, spans, 0, start, are_valid(spans, valid), reverse=reverse)


def rows_at(leaf: Array, spans: Any) -> Array:
    """For each sequence of a `Packed` what a leaf has for its row."""
    return at_rows(leaf, spans, 0)
