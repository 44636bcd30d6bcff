"""`pack` puts sequences end to end into the rows of a batch, `unpack` takes them out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, overload

import numpy as np

from .._avals import describe_argument
from .._errors import ArgumentError, ArgumentTypeError, Fault, explain, verb
from .._reprs import short_html, short_repr
from .._types import Array, PyTree, X, Y
from .first_fit import Fit, Ints, first_fit, least_fit, shortest_fit
from .inits import stack_inits
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


class PackIndex(NamedTuple):
    """Where each sequence is in a `treescan.Packed` batch, in the order in which they were given.

    Attributes:
        row: int32[N], its row.
        start: int32[N], its first step there.
        length: int32[N], the number of its steps.
    """

    row: Array
    start: Array
    length: Array


class Packed(NamedTuple, Generic[X]):
    """A batch of rows with several sequences in each, end to end: the result of `treescan.pack`. It is a pytree.

    Attributes:
        data: the sequences, leaves `[T, R, ...]`.
        mask: bool[T, R], which steps belong to a sequence.
        resets: bool[T, R], True at the first step of each sequence.
        index: where each sequence is.
        init: the carry that each sequence starts from, leaves `[N, ...]`; None: the init of the row.
    """

    data: X
    mask: Array
    resets: Array
    index: PackIndex  # type: ignore[assignment]  # in place of the method of tuples, which nobody looks for here
    init: PyTree = None

    def __repr__(self) -> str:
        return short_repr("Packed", **self._asdict())

    def _repr_html_(self) -> str:
        return short_html("Packed", **self._asdict())

    @property
    def steps(self) -> int:
        """The number of steps T of the rows."""
        return self.mask.shape[0]

    @property
    def rows(self) -> int:
        """The number of rows R."""
        return self.mask.shape[1]

    @property
    @verb
    def efficiency(self) -> float:
        """The part of all steps that is valid, from 0 to 1; of a batch without any step, 1. Not under a trace."""
        try:
            mask = check_concrete(self.mask, "mask")
            return float(mask.mean()) if mask.size else 1.0
        except Exception as error:
            explained = explain(error, "Packed.efficiency")
        raise explained


@overload
def pack(
    sequences: Sequence[np.ndarray[Any, Any]],
    *,
    rows: int | None = None,
    length: int | None = None,
    value: PyTree = 0,
    init: Sequence[PyTree] | None = None,
) -> Packed[Array]: ...
@overload
def pack(
    sequences: Sequence[X],
    *,
    rows: int | None = None,
    length: int | None = None,
    value: PyTree = 0,
    init: Sequence[PyTree] | None = None,
) -> Packed[X]: ...
@verb
def pack(
    sequences: Sequence[Any],
    *,
    rows: int | None = None,
    length: int | None = None,
    value: PyTree = 0,
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
        value: the value of the padding: a number, or a prefix tree of a sequence with numbers.
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
    try:
        wanted = check_count(rows, "rows", least=1), check_count(length, "length")
        checked = check_sequences(sequences)
        fit = _arrange(checked.lengths, *wanted)
        spans = Spans(fit.row, fit.start, checked.lengths)
        mask, resets = (np.zeros((fit.length, fit.rows), bool) for _ in range(2))
        for row, steps in spans.each():
            mask[steps, row] = True
            resets[steps.start : min(steps.start + 1, steps.stop), row] = True
        data = lay_out(checked, spans, fit.length, fit.rows, value)
        index = PackIndex(*put([part.astype(np.int32) for part in spans]))
        carries = None if init is None else stack_inits(init, len(checked.lengths))
        return Packed(data, put(mask), put(resets), index, carries)
    except Exception as error:
        explained = explain(error, "pack")
    raise explained


def _arrange(lengths: Ints, rows: int | None, length: int | None) -> Fit:
    """A place for each sequence, in one row at least: in as many rows as are wanted, of the length that is wanted."""
    if length is not None:
        check_fits(lengths, length)
        fit = first_fit(lengths, length)
    else:
        fit = least_fit(lengths) if rows is None else shortest_fit(lengths, rows)
    if rows is not None and fit.rows > rows:
        raise Fault(
            ArgumentError,
            f"{{verb}}: {_rows(rows, length)} cannot hold {len(lengths)} sequences, of {lengths.sum()} steps in all.",
            f"First-fit decreasing takes {_rows(fit.rows, length)}, or "
            f"{_rows(rows, shortest_fit(lengths, rows).length)}.",
        )
    return fit._replace(rows=max(fit.rows, 1) if rows is None else rows)


def _rows(rows: int, length: int | None) -> str:
    return f"{rows} row{'' if rows == 1 else 's'} of {length} steps"


@verb
def unpack(packed: Packed[Any], ys: Y) -> list[Y]:
    """Cuts outputs of a packed batch into sequences, in the order in which `pack` received them.

    Args:
        packed: the batch.
        ys: any pytree with leaves `[T, R, ...]`: outputs, or `packed.data`.

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
        >>> for sequence in treescan.unpack(batch, batch.data * 10):
        ...     print(sequence)
        [10 20]
        [30 40 50 60]
        [70]
    """
    try:
        if not isinstance(packed, Packed):
            raise not_packed(packed, "a `Packed`", "`unpack(packed, ys)`. A `Padded` goes to `treescan.unpad`.")
        spans = Spans(*(check_concrete(part, f"packed.index.{name}") for name, part in packed.index._asdict().items()))
        check_lead("ys", ys, (packed.rows,), packed.steps)
        return cut_out(ys, spans)
    except Exception as error:
        explained = explain(error, "unpack")
    raise explained


def not_packed(packed: Any, kind: str, call: str) -> Fault:
    """What is raised where something else than a batch comes first."""
    return Fault(
        ArgumentTypeError,
        f"{{verb}} takes {kind}, got {describe_argument(packed)}.",
        f"Pass the batch first, and then values computed from its data: {call}",
    )
