"""`repad` gives each packed sequence its own row, on the device."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from .._avals import is_key
from .._errors import Fault, TracedArgumentError, explain, verb
from .._transforms.rows.packed import refuse_split_rows
from .._types import Array, PyTree, Y
from .pack import Packed, not_packed
from .pad import Padded
from .sequences import check_count, check_fits, check_lead, spread_value


@verb
def repad(packed: Packed[Any], ys: Y, *, length: int | None = None, value: PyTree = 0) -> Padded[Y]:
    """Gives each packed sequence a row of its own. It is one gather, works on traced arrays, and is differentiable.

    Losses that expect a padded batch, for example CTC, take it in this form. Padding is not read, and gets no gradient.

    Args:
        packed: the batch.
        ys: any pytree with leaves `[T, R, ...]`: the outputs of a scan over the batch, or its data.
        length: the number of steps of the rows. None: the T of the batch, which holds each sequence. A smaller number
            must hold the longest sequence. That is checked if the batch is not traced.
        value: the value of the padding: a number, or a prefix tree of ys with numbers.

    Returns:
        The batch, leaves `[length, N, ...]` and lengths int32[N], in the order of the sequences in `pack`.

    Raises:
        ArgumentError: if a leaf of ys does not start with the axes `[T, R]`, if a sequence is longer than `length`, if
            a leaf cannot hold `value`, or if rows are spread over devices.
        ArgumentTypeError: if `packed` is not a `Packed`, or `length` is not an int.
        TracedArgumentError: if `length` is traced, or is less than T and the batch is traced.

    Examples:
        >>> import jax.numpy as jnp
        >>> import treescan
        >>> batch = treescan.pack(
        ...     [jnp.array([1, 2]), jnp.array([3, 4, 5, 6]), jnp.array([7])], rows=2
        ... )
        >>> padded = treescan.repad(batch, batch.data * 10)
        >>> print(padded.data)
        [[10 30 70]
         [20 40  0]
         [ 0 50  0]
         [ 0 60  0]]
        >>> print(padded.lengths)
        [2 4 1]
    """
    try:
        if not isinstance(packed, Packed):
            raise not_packed(
                packed, "a `Packed`", "`repad(packed, ys)`. A `Padded` already has one row for each sequence."
            )
        steps = check_count(length, "length")
        steps = packed.steps if steps is None else steps
        check_lead("ys", ys, (packed.rows,), packed.steps)
        _check_length(packed, steps)
        refuse_split_rows(packed.index[:3], packed.mask)
        values = spread_value(value, ys, "ys", "ys")
        leaves, structure = jax.tree.flatten(ys)
        rows = [_rows_of(packed, leaf, steps, number) for leaf, number in zip(leaves, values, strict=True)]
        return Padded(jax.tree.unflatten(structure, rows), jnp.asarray(packed.index.length))
    except Exception as error:
        explained = explain(error, "repad")
    raise explained


def _check_length(packed: Packed[Any], steps: int) -> None:
    lengths = packed.index.length
    if steps >= packed.steps:
        return
    if isinstance(lengths, Tracer):
        raise Fault(
            TracedArgumentError,
            f"{{verb}}: `length` is {steps}, less than the {packed.steps} steps of the rows, and the lengths of the "
            "sequences are traced, so the longest may not fit.",
            "Leave `length` out: every sequence fits the steps of the rows. Or pack to rows of that length, "
            f"`pack(sequences, length={steps})`. If you know that no sequence is longer, cut the result: "
            f"`padded._replace(data=padded.data[:{steps}])`.",
        )
    check_fits(np.asarray(lengths), steps)


def _rows_of(packed: Packed[Any], leaf: Any, steps: int, value: Any) -> Array:
    """A leaf with a row for each sequence; places outside for padding, no two the same."""
    if is_key(leaf):
        bits = _rows_of(packed, jax.random.key_data(leaf), steps, 0)
        return jax.random.wrap_key_data(bits, impl=jax.random.key_impl(leaf))
    row, start, length = (jnp.asarray(part)[None] for part in packed.index)
    at = jnp.arange(steps, dtype=jnp.int32)[:, None]
    valid = at < length
    count = row.shape[1]
    shape, dtype = (steps, count, *leaf.shape[2:]), jax.typeof(leaf).dtype
    if 0 in leaf.shape[:2] or not steps:  # which JAX refuses to gather from
        return jnp.full(shape, value, dtype)
    step = jnp.where(valid, start + at, packed.steps + at)
    rows = jnp.where(valid, row, jnp.arange(count, dtype=jnp.int32)[None])
    gathered = jnp.asarray(leaf).at[step, rows].get(mode="fill", fill_value=0, unique_indices=True)
    return jnp.where(valid.reshape(steps, count, *(1 for _ in shape[2:])), gathered, jnp.asarray(value, dtype))
