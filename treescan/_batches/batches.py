"""Batches of sequences of different lengths: `pad` and `pack` make them, `unpad`, `unpack`, `repad` take them apart."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from .._arguments import check_reverse
from .._avals import Array, ArrayLike, PyTree, describe_argument, is_key, on_automatic_axes, parts_of
from .._errors import Fault, Misuse, TracedMisuse, TypeMisuse, verb
from .._rows.checks import check_lengths
from .._rows.leaves import mask_of_lengths
from .._rows.spans import refuse_split_rows
from .._types import X, Y
from .batch import Packed, PackIndex, Padded
from .sequences import (
    Spans,
    arrange,
    check_concrete,
    check_count,
    check_fits,
    check_lead,
    check_sequences,
    put,
    spread_fill,
    stack_inits,
)


class PadOptions(TypedDict, total=False):
    """What `pad` takes by name."""

    length: int | None
    fill: PyTree


class PackOptions(PadOptions, total=False):
    """What `pack` takes by name."""

    rows: int | None
    init: Sequence[PyTree] | None


@overload
def pack(sequences: Sequence[np.ndarray[Any, Any]], **options: Unpack[PackOptions]) -> Packed[Array]: ...
@overload
def pack(sequences: Sequence[X], **options: Unpack[PackOptions]) -> Packed[X]: ...
@verb
def pack(
    sequences: Sequence[Any],
    *,
    rows: int | None = None,
    length: int | None = None,
    fill: PyTree = 0,
    init: Sequence[PyTree] | None = None,
) -> Packed[Any]:
    """Packs sequences of different lengths end to end into rows, with little padding.

    Sequences are placed by first-fit decreasing, which needs at most 11/9 of the smallest possible number of rows, plus
    one. It runs on the host, outside of `jax.jit`. The result is a pytree of arrays.

    Args:
        sequences: a list of pytrees, as for `treescan.pad`. Sequences of 0 steps take no room.
        rows: the number of rows R. Without `length`: rows are as short as first-fit decreasing can make them (to within
            0.2%, if that takes many trials).
        length: the number of steps T. Without `rows`: as many rows as needed. With both: exactly this shape; rows that
            are not needed stay empty. With neither: both are chosen so that few steps are padding, with a length
            between that of the longest sequence and twice that.
        fill: the value of the padding: a number, or a prefix tree of a sequence with numbers.
        init: a list with the carry that each sequence starts from: the `init` of the scan for one row, with None for
            the parts that are the same for all sequences. `treescan.mask_scan` restores it where the sequence begins,
            in reverse at its last step. Its leaves may be traced. `packed._replace(init=...)` replaces them, with
            leaves `[N, ...]`. Each sequence's init gets its own gradient.

    Returns:
        The batch, leaves `[T, R, ...]`, with its mask, resets, index and inits.

    Raises:
        ArgumentError: as `treescan.pad`; also if `rows` of `length` do not hold all sequences, or if there is not an
            init for each of them, or these differ in structure.
        ArgumentTypeError: if `sequences` or `init` is not a list, or `rows` or `length` are not ints.
        TracedArgumentError: if sequences, `rows` or `length` are traced.

    Examples:
        >>> import jax.numpy as jnp
        >>> import treescan
        >>> batch = treescan.pack(
        ...     [jnp.array([1, 2]), jnp.array([3, 4, 5, 6]), jnp.array([7])], rows=2
        ... )
        >>> print(batch.data.T)  # [R, T]
        [[3 4 5 6]
         [1 2 7 0]]
        >>> print(batch.resets.T)
        [[ True False False False]
         [ True False  True False]]
        >>> batch.efficiency
        0.875
    """
    wanted = check_count(rows, "rows", least=1), check_count(length, "length")
    checked = check_sequences(sequences)
    fit = arrange(checked.lengths, *wanted)
    spans = Spans(fit.row, fit.start, checked.lengths)
    mask, resets = (np.zeros((fit.length, fit.rows), bool) for _ in range(2))
    for row, steps in spans.each():
        mask[steps, row] = True
        resets[steps.start : min(steps.start + 1, steps.stop), row] = True
    data = checked.lay_out(spans, fit.length, fit.rows, fill)
    index = PackIndex(*put([part.astype(np.int32) for part in spans]))
    carries = None if init is None else stack_inits(init, len(checked.lengths))
    return Packed(data, put(mask), put(resets), index, carries)


@verb
def unpack(ys: Y, packed: Packed[Any]) -> list[Y]:
    """Cuts outputs of a packed batch into sequences, in the order in which `pack` received them.

    Args:
        ys: any pytree with leaves `[T, R, ...]`: outputs, or `packed.data`.
        packed: the batch.

    Returns:
        A list of N pytrees, leaves `[steps of the sequence, ...]`.

    Raises:
        ArgumentError: if a leaf of ys does not start with the axes `[T, R]`.
        ArgumentTypeError: if `packed` is not a `Packed`.
        TracedArgumentError: if `packed` is traced, because its lengths become shapes.

    Examples:
        >>> import jax.numpy as jnp
        >>> import treescan
        >>> batch = treescan.pack(
        ...     [jnp.array([1, 2]), jnp.array([3, 4, 5, 6]), jnp.array([7])]
        ... )
        >>> for sequence in treescan.unpack(batch.data * 10, batch):
        ...     print(sequence)
        [10 20]
        [30 40 50 60]
        [70]
    """
    if not isinstance(packed, Packed):
        raise not_packed(packed, "a `Packed`", "`unpack(ys, packed)`. A `Padded` goes to `treescan.unpad`.")
    spans = Spans(*(check_concrete(part, f"packed.index.{name}") for name, part in packed.index._asdict().items()))
    check_lead("ys", ys, (packed.rows,), packed.steps)
    return spans.cut_out(ys)


def not_packed(packed: object, kind: str, call: str) -> Fault:
    """What is raised where something else than a batch comes second."""
    return TypeMisuse(
        f"{{verb}} takes {kind} second, got {describe_argument(packed)}.",
        f"Pass values computed from the data of a batch first, and then the batch: {call}",
    )


@overload
def last(ys: Y, batch: Packed[Any], *, reverse: bool) -> Y: ...
@overload
def last(ys: Y, batch: Padded[Any], *, reverse: bool) -> Y: ...
@verb
def last(ys: Y, batch: Packed[Any] | Padded[Any], *, reverse: bool | None = None) -> Y:
    """Returns the last y of each sequence. It is one gather, works on traced arrays, and is differentiable.

    With the `reverse` of the scan that computed ys, this is the y that `save="last"` keeps for each sequence. If y is
    the carry, it is the carry after each sequence. With the opposite, it is the first y of each sequence's run.

    Args:
        ys: any pytree with leaves `[T, R, ...]`: the outputs of a scan over the batch.
        batch: a `Packed` or a `Padded`.
        reverse: whether the scan that computed ys ran in reverse. Required, because ys do not show it. False: the y of
            a sequence's last step in time. True: the y of its first step in time, which ran last.

    Returns:
        A pytree with leaves `[N, ...]`, in the order of the sequences in `pack` or `pad`; 0 for a
        sequence of 0 steps.

    Raises:
        ArgumentError: if a leaf of ys does not start with the axes `[T, R]`.
        ArgumentTypeError: if `batch` is neither a `Packed` nor a `Padded`, or `reverse` is missing or not a bool.

    Examples:
        >>> import jax.numpy as jnp
        >>> import treescan
        >>> batch = treescan.pack(
        ...     [jnp.array([1, 2]), jnp.array([3, 4, 5, 6]), jnp.array([7])]
        ... )
        >>> print(treescan.last(batch.data * 10, batch, reverse=False))
        [20 60 70]
        >>> print(treescan.last(batch.data * 10, batch, reverse=True))
        [10 30 70]
    """
    if not isinstance(batch, Packed | Padded):
        raise not_packed(batch, "a `Packed` or a `Padded`", "`last(ys, batch, reverse=False)`.")
    if reverse is None:
        raise TypeMisuse(
            "{verb} needs `reverse`: the direction of the scan that computed the ys.",
            "Pass `reverse=False` for a forward scan, whose sequences end with their last step, or `reverse=True` for "
            "one that ran in reverse, whose sequences end with their first.",
            "treescan cannot tell the direction from the ys, and the wrong direction would return the y of another "
            "step without an error.",
        )
    check_reverse(reverse)
    if isinstance(batch, Packed):
        index, steps = batch.index, batch.steps
        check_lead("ys", ys, (batch.rows,), steps)
        start, length = index.start, index.length
        rows = [jnp.where(length > 0, index.row, jnp.arange(length.shape[0], dtype=jnp.int32))]
    else:
        shape = np.shape(batch.lengths)
        steps = check_lead("data", batch.data, shape)
        check_lead("ys", ys, shape, steps)
        length = jnp.clip(jnp.asarray(batch.lengths, jnp.int32), 0, steps)
        start, rows = jnp.zeros_like(length), list(jnp.indices(length.shape, dtype=jnp.int32))
    # Empty sequences are at places outside, no two of them the same.
    end = jnp.where(length > 0, start if reverse else start + length - 1, steps)
    return jax.tree.map(lambda leaf: _gather(leaf, (end, *rows)), ys)


def _gather(leaf: Array, where: tuple[Array, ...], value: ArrayLike = 0) -> Array:
    """The leaf at each place, the value for places outside.

    Places are unique, so that the gradient is a scatter in no order.
    """
    if is_key(leaf):
        bits = _gather(jax.random.key_data(leaf), where)
        return jax.random.wrap_key_data(bits, impl=jax.random.key_impl(leaf))
    count, out = len(where), where[0].shape
    shape, dtype = (*out, *leaf.shape[count:]), jax.typeof(leaf).dtype
    if 0 in (*leaf.shape[:count], *out):  # which JAX refuses to gather from
        return jnp.full(shape, value, dtype)

    rows = parts_of(leaf)[1:count] if out == leaf.shape[1:count] else (None,) * len(out)
    gather = functools.partial(_get, np.asarray(value).item())
    return on_automatic_axes(gather, (*rows, *parts_of(leaf)[count:]), jnp.asarray(leaf), *where)


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _get(value: complex, leaf: Array, *where: Array) -> Array:
    """Compiled for each type: JAX keeps eager gathers by their `fill_value`, and 0 is equal to False and to 0j."""
    return leaf.at[where].get(mode="fill", fill_value=value, unique_indices=True)


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
    steps = check_count(length, "length")
    if steps is None:
        raise TypeMisuse(
            "{verb}: `length` is None.",
            "It is the number of steps of the mask, the size of axis 0 of the masked array, `xs.shape[0]`.",
        )
    return mask_of_lengths(check_lengths(lengths, steps), steps)


@overload
def pad(sequences: Sequence[np.ndarray[Any, Any]], **options: Unpack[PadOptions]) -> Padded[Array]: ...
@overload
def pad(sequences: Sequence[X], **options: Unpack[PadOptions]) -> Padded[X]: ...
@verb
def pad(sequences: Sequence[Any], *, length: int | None = None, fill: PyTree = 0) -> Padded[Any]:
    """Pads sequences of different lengths to rows of one length.

    It runs on the host, outside of `jax.jit`. The result is a pytree of arrays: pass it to compiled functions, and to
    `treescan.mask_scan` as `xs`.

    Args:
        sequences: a list of pytrees of one structure. The leaves of a sequence are `[its steps, ...]`, with 0 or more
            steps; dtypes and trailing shapes are the same in all sequences. Typed PRNG keys are allowed.
        length: the number of steps T. None: that of the longest sequence. A compiled function is reused for batches of
            the same length.
        fill: the value of the padding: a number, or a prefix tree of a sequence with numbers.

    Returns:
        The batch, leaves `[T, B, ...]`, and the lengths, int32[B].

    Raises:
        ArgumentError: if the sequences do not fit together, if there are none, if one is longer than `length`, or if a
            leaf cannot hold `fill`.
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
    steps, checked = check_count(length, "length"), check_sequences(sequences)
    steps = int(checked.lengths.max()) if steps is None else steps
    check_fits(checked.lengths, steps)
    data = checked.lay_out(_own_rows(checked.lengths), steps, len(checked.lengths), fill)
    return Padded(data, put(checked.lengths.astype(np.int32)))


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
    if isinstance(data, Packed) or isinstance(lengths, Packed):
        raise Misuse("{verb} takes no `Packed`.", "`treescan.unpack(ys, packed)` returns its sequences.")
    if isinstance(data, Padded) == (lengths is not None):
        raise Misuse(
            f"{{verb}}: `lengths` are {'missing' if lengths is None else 'given twice'}.",
            "A `Padded` contains them: `unpad(padded)`. Other values do not: `unpad(ys, padded.lengths)`.",
        )
    data, lengths = data if isinstance(data, Padded) else (data, lengths)
    counts = check_concrete(check_lengths(lengths, None), "lengths")
    if counts.ndim != 1:
        raise Misuse(
            f"{{verb}}: `lengths` must have one axis, got {describe_argument(lengths)}.",
            "Give int[B], one length for each row of leaves [T, B, ...]. If there are several batch axes, "
            "flatten them into one.",
        )
    check_lengths(lengths, check_lead("data", data, counts.shape))
    return _own_rows(counts).cut_out(data)


def _own_rows(lengths: np.ndarray) -> Spans:
    """Each sequence at the start of its own row."""
    return Spans(np.arange(len(lengths)), np.zeros(len(lengths), np.int64), np.asarray(lengths, np.int64))


@verb
def repad(ys: Y, packed: Packed[Any], *, length: int | None = None, fill: PyTree = 0) -> Padded[Y]:
    """Gives each packed sequence a row of its own. It is one gather, works on traced arrays, and is differentiable.

    Losses that expect a padded batch, for example CTC, take it in this form. Padding has no effect and no gradient.

    Args:
        ys: any pytree with leaves `[T, R, ...]`: the outputs of a scan over the batch, or its data.
        packed: the batch.
        length: the number of steps of the rows. None: the T of the batch, which holds each sequence. A smaller number
            must hold the longest sequence. That is checked if the batch is not traced.
        fill: the value of the padding: a number, or a prefix tree of ys with numbers.

    Returns:
        The batch, leaves `[length, N, ...]` and lengths int32[N], in the order of the sequences in `pack`.

    Raises:
        ArgumentError: if a leaf of ys does not start with the axes `[T, R]`, if a sequence is longer than `length`, if
            a leaf cannot hold `fill`, or if rows are spread over devices.
        ArgumentTypeError: if `packed` is not a `Packed`, or `length` is not an int.
        TracedArgumentError: if `length` is traced, or is less than T and the batch is traced.

    Examples:
        >>> import jax.numpy as jnp
        >>> import treescan
        >>> batch = treescan.pack(
        ...     [jnp.array([1, 2]), jnp.array([3, 4, 5, 6]), jnp.array([7])], rows=2
        ... )
        >>> padded = treescan.repad(batch.data * 10, batch)
        >>> print(padded.data)
        [[10 30 70]
         [20 40  0]
         [ 0 50  0]
         [ 0 60  0]]
        >>> print(padded.lengths)
        [2 4 1]
    """
    if not isinstance(packed, Packed):
        raise not_packed(packed, "a `Packed`", "`repad(ys, packed)`. A `Padded` already has one row for each sequence.")
    steps = check_count(length, "length")
    steps = packed.steps if steps is None else steps
    check_lead("ys", ys, (packed.rows,), packed.steps)
    if steps < packed.steps and isinstance(packed.index.length, Tracer):
        raise TracedMisuse(
            f"{{verb}}: `length` is {steps}, less than the {packed.steps} steps of the rows, and the lengths of the "
            "sequences are traced, so the longest may not fit.",
            "Leave `length` out: every sequence fits the steps of the rows. Or pack to rows of that length, "
            f"`pack(sequences, length={steps})`. If you know that no sequence is longer, cut the result: "
            f"`padded._replace(data=padded.data[:{steps}])`.",
        )
    if steps < packed.steps:
        check_fits(np.asarray(packed.index.length), steps)
    refuse_split_rows(packed.index[:3], packed.mask)
    values = spread_fill(fill, ys, "ys", "ys")
    leaves, structure = jax.tree.flatten(ys)
    row, start, count = (jnp.asarray(part)[None] for part in packed.index)
    at = jnp.arange(steps, dtype=jnp.int32)[:, None]
    outside = packed.steps + at, jnp.arange(row.shape[1], dtype=jnp.int32)[None]  # no two places the same
    where = tuple(jnp.where(at < count, place, other) for place, other in zip((start + at, row), outside, strict=True))
    rows = [_gather(leaf, where, number) for leaf, number in zip(leaves, values, strict=True)]
    return Padded(jax.tree.unflatten(structure, rows), jnp.asarray(packed.index.length))
