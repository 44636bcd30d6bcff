"""`Checkpoint`: where and how often a stream saves its state."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ._text import named_fields


@named_fields
@dataclass(frozen=True)
class Checkpoint:
    """Where and how often a stream saves its state, for the option `checkpoint` of `treescan.stream`.

    Attributes:
        folder: the folder, which belongs to one run. It is made if it is not there.
        every: how many parts there are from one checkpoint to the next.
        keep: how many checkpoints are kept.

    Examples:
        >>> import treescan
        >>> checkpoint = treescan.Checkpoint("run-1", every=100, keep=3)
    """

    folder: str | os.PathLike[str]
    every: int = 1
    keep: int = 2
