"""What batches of sequences of different lengths are: `Padded` and `Packed`."""

from __future__ import annotations

from typing import Generic, NamedTuple

import numpy as np

from .._avals import Array, PyTree
from .._errors import verb
from .._tree import short_html, short_repr
from .._types import X


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
        from .sequences import check_concrete

        mask = check_concrete(self.mask, "mask")
        return float(mask.mean()) if mask.size else 1.0


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
        from .._transforms.rows.checks import check_lengths
        from .._transforms.rows.leaves import mask_of_lengths
        from .sequences import check_lead

        steps = check_lead("data", self.data, np.shape(self.lengths))
        return mask_of_lengths(check_lengths(self.lengths, steps), steps)

    @property
    @verb
    def efficiency(self) -> float:
        """The part of all steps that is valid, from 0 to 1; of a batch without any step, 1. Not under a trace."""
        from .sequences import check_concrete, check_lead

        lengths = check_concrete(self.lengths, "lengths")
        total = check_lead("data", self.data, lengths.shape) * lengths.size
        return float(lengths.sum(dtype=np.int64) / total) if total else 1.0
