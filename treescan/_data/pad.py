"""`pad` makes one batch of sequences of different lengths, `unpad` takes them out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, overload

import numpy as np

from .._avals import describe_argument
from .._checks.rows import check_lengths
from .._errors import ArgumentError, ArgumentTypeError, Fault, explain, verb
from .._reprs import short_html, short_repr
from .._transforms.rows.leaves import mask_of_lengths
from .._types import Array, ArrayLike, PyTree, X
from .sequences import (
    Spans,
    check_concrete,
    check_count,
    check_fits,
    check_lead,
    check_sequences,
    cut_out,
    lay_out,
    put,
)


@verb
def length_mask(lengths: ArrayLike, length: int) -> Array:
    """Makes the mask of rows that are valid in their first steps.

    Args:
        lengths: int[*batch], traced or not: the number of valid steps of each row. Concrete lengths must lie between 0
            and `length`; traced ones are clamped to that, as by `treescan.mask_scan`.
        length: the number of steps T.

    Returns:
        bool[T, *batch]: True in the first `lengths[b]` steps of row b.

    Raises:
        ArgumentError: if lengths are out of range, or `length` is negative.
        ArgumentTypeError: if lengths are not ints, or `length` is None.
        TracedArgumentError: if `length` is traced.

    Examples:
        >>> import jax.numpy as jnp
        >>> import treescan
        >>> print(treescan.length_mask(jnp.array([3, 0, 1]), 3))
        [[ True False  True]
         [ True False False]
         [ True False False]]
    """
    try:
        steps = check_count(length, "length")
        if steps is None:
            raise Fault(
                ArgumentTypeError,
                "{verb}: `length` is None.",
                "It is the number of steps of the mask, the size of axis 0 of the masked array, `xs.shape[0]`.",
            )
        return mask_of_lengths(check_lengths(lengths, steps, "{verb}"), steps)
    except Exception as error:
        explained = explain(error, "length_mask")
    raise explained


class Padded(NamedTuple, Generic[X]):
    """A batch of rows that are padded to one length: the result of `treescan.pad`. It is a pytree.

    Attributes:
        data: the sequences, leaves `[T, B, ...]`: sequence b is the first `lengths[b]` steps of row b.
        lengths: int32[B], the number of steps of each sequence.
    """

    data: X
    lengths: Array

    def __repr__(self) -> str:
        return short_repr("Padded", **self._asdict())

    def _repr_html_(self) -> str:
        return short_html("Padded", **self._asdict())

    @property
    @verb
    def mask(self) -> Array:
        """Which steps are valid, bool[T, B]; under a trace too."""
        try:
            steps = check_lead("data", self.data, np.shape(self.lengths))
            return mask_of_lengths(check_lengths(self.lengths, steps, "{verb}"), steps)
        except Exception as error:
            explained = explain(error, "Padded.mask")
        raise explained

    @property
    @verb
    def efficiency(self) -> float:
        """The part of all steps that is valid, from 0 to 1; of a batch without any step, 1. Not under a trace."""
        try:
            lengths = check_concrete(self.lengths, "lengths")
            total = check_lead("data", self.data, lengths.shape) * lengths.size
            return float(lengths.sum(dtype=np.int64) / total) if total else 1.0
        except Exception as error:
            explained = explain(error, "Padded.efficiency")
        raise explained


@overload
def pad(
    sequences: Sequence[np.ndarray[Any, Any]], *, length: int | None = None, value: PyTree = 0
) -> Padded[Array]: ...
@overload
def pad(sequences: Sequence[X], *, length: int | None = None, value: PyTree = 0) -> Padded[X]: ...
@verb
def pad(sequences: Sequence[Any], *, length: int | None = None, value: PyTree = 0) -> Padded[Any]:
    """Pads sequences of different lengths to rows of one length.

    It runs on the host, outside of `jax.jit`. The result is a pytree of arrays: pass it to compiled functions, and to
    `treescan.mask_scan` as `xs`.

    Args:
        sequences: a list of pytrees of one structure. The leaves of a sequence are `[its steps, ...]`, with 0 or more
            steps; dtypes and trailing shapes are the same in all sequences. Typed PRNG keys are allowed.
        length: the number of steps T. None: that of the longest sequence. A compiled function is reused for batches of
            the same length.
        value: the value of the padding: a number, or a prefix tree of a sequence with numbers.

    Returns:
        The batch, leaves `[T, B, ...]`, and the lengths, int32[B].

    Raises:
        ArgumentError: if the sequences do not fit together, if there are none, if one is longer than `length`, or if a
            leaf cannot hold `value`.
        ArgumentTypeError: if `sequences` is not a list, or `length` is not an int.
        TracedArgumentError: if sequences or `length` are traced.

    Examples:
        >>> import jax.numpy as jnp
        >>> import treescan
        >>> batch = treescan.pad([jnp.array([1.0, 2.0, 3.0]), jnp.array([4.0])])
        >>> print(batch.data)
        [[1. 4.]
         [2. 0.]
         [3. 0.]]
        >>> print(batch.lengths)
        [3 1]
        >>> def step(total, x):
        ...     return total + x, None
        >>> total, _ = treescan.mask_scan(
        ...     step, jnp.zeros(2), batch.data, lengths=batch.lengths
        ... )
        >>> print(total)
        [6. 4.]
    """
    try:
        steps, checked = check_count(length, "length"), check_sequences(sequences)
        steps = int(checked.lengths.max()) if steps is None else steps
        check_fits(checked.lengths, steps)
        data = lay_out(checked, _rows(checked.lengths), steps, len(checked.lengths), value)
        return Padded(data, put(checked.lengths.astype(np.int32)))
    except Exception as error:
        explained = explain(error, "pad")
    raise explained


@overload
def unpad(data: Padded[X]) -> list[X]: ...
@overload
def unpad(data: X, lengths: ArrayLike) -> list[X]: ...
@verb
def unpad(data: Any, lengths: ArrayLike | None = None) -> list[Any]:
    """Cuts a padded batch, or outputs of a scan over it, into sequences.

    Args:
        data: a `Padded`; or any pytree with leaves `[T, B, ...]`, for example the outputs of `treescan.mask_scan`.
        lengths: int[B], the number of steps of each sequence: `Padded.lengths`. Omit it if `data` is a `Padded`.

    Returns:
        A list of B pytrees, leaves `[lengths[b], ...]`.

    Raises:
        ArgumentError: if lengths are missing, given twice or out of range, or if a leaf does not start with the axes
            `[T, B]`.
        ArgumentTypeError: if lengths are not ints.
        TracedArgumentError: if lengths are traced, because they become shapes.

    Examples:
        >>> import jax.numpy as jnp
        >>> import treescan
        >>> batch = treescan.pad([jnp.array([1.0, 2.0, 3.0]), jnp.array([4.0])])
        >>> for sequence in treescan.unpad(batch.data * 10, batch.lengths):
        ...     print(sequence)
        [10. 20. 30.]
        [40.]
    """
    try:
        if isinstance(data, Padded) == (lengths is not None):
            raise Fault(
                ArgumentError,
                f"{{verb}}: `lengths` are {'missing' if lengths is None else 'given twice'}.",
                "A `Padded` contains them: `unpad(padded)`. Other values do not: `unpad(ys, padded.lengths)`.",
            )
        data, lengths = data if isinstance(data, Padded) else (data, lengths)
        counts = check_concrete(check_lengths(lengths, None, "{verb}"), "lengths")
        if counts.ndim != 1:
            raise Fault(
                ArgumentError,
                f"{{verb}}: `lengths` must have one axis, got {describe_argument(lengths)}.",
                "Give int[B], one length for each row of leaves [T, B, ...]. If there are several batch axes, "
                "flatten them into one.",
            )
        check_lengths(lengths, check_lead("data", data, counts.shape), "{verb}")
        return cut_out(data, _rows(counts))
    except Exception as error:
        explained = explain(error, "unpad")
    raise explained


def _rows(lengths: Any) -> Spans:
    """Each sequence at the start of its own row."""
    return Spans(np.arange(len(lengths)), np.zeros(len(lengths), np.int64), np.asarray(lengths, np.int64))
