"""`NonFinite`, the record of a carry that became NaN or infinite, and `last_nonfinite`."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ._types import PyTree


@dataclass(frozen=True, eq=False)
class NonFinite:
    """The first step of a loop with `check_finite` in which a leaf of the carry became NaN or infinite.

    Attributes:
        path: the leaf, for example `h.cell`.
        kind: whether it became NaN or infinite; None: the step was run again to find out, with another result. Then
            `path` is the whole carry, and the operation is not known.
        step: the position of the step, counted from 0, in reverse too: that of its x in xs.
        steps: the steps of the loop.
        rows: the entries along the leaf's first axis that did; empty for a leaf without axes.
        operation: the first operation with such a result, as JAX names it; None: the value was there before the step.
        place: the line of that operation, for example `model.py:31`; None if it is not known.
        source: the leaf of the carry or of x that the value came from, if no operation of this step made it.
        was_finite: whether all of the carry before the step was finite.
        carry: the carry before the step, as the body sees it.
        x: the x of the step.
    """

    path: str
    kind: Literal["NaN", "inf"] | None
    step: int
    steps: int
    rows: tuple[int, ...]
    operation: str | None
    place: str | None
    source: str | None
    was_finite: bool
    carry: PyTree
    x: PyTree

    def __str__(self) -> str:
        rows = f" ({_counted(self.rows)})" if self.rows else ""
        became = f"`{self.path}` became {self.kind or 'NaN or infinite'}"
        return f"{became} in step {self.step:,} of {self.steps:,}{rows}{self._origin()}"

    def _origin(self) -> str:
        if self.kind is None:
            return ". Run once more, the steps came out otherwise: rounding may decide, or a callback"
        if self.source is not None:
            return f", which got it from `{self.source}`"
        place = "" if self.place is None else f" at {self.place}"
        before = "; the carry before it was finite" if self.was_finite else ""
        return f", first in `{self.operation}`{place}{before}"


def _counted(rows: Sequence[int]) -> str:
    """Some rows by number: `rows 3 and 9`."""
    if len(rows) == 1:
        return f"row {rows[0]}"
    if len(rows) > 5:
        return f"rows {', '.join(map(str, rows[:4]))} and {len(rows) - 4} others"
    return f"rows {', '.join(map(str, rows[:-1]))} and {rows[-1]}"


class _Last:
    """The record that was made last."""

    def __init__(self) -> None:
        self.record: NonFinite | None = None
        self.lock = threading.Lock()


_last = _Last()


def note(record: NonFinite) -> None:
    """Keeps a record for `last_nonfinite`."""
    with _last.lock:
        _last.record = record


def last_nonfinite() -> NonFinite | None:
    """Returns the last record of `check_finite` in this process, also under `jax.jit`.

    Returns:
        The record, or None if there is none yet. Its `carry` and `x` are those of that step, so you can call the body
        on them. They are kept until the next record.

    Examples:
        >>> import jax.numpy as jnp
        >>> import treescan
        >>> def step(h, x):
        ...     return jnp.log(h + x)
        >>> xs = jnp.array([1.0, 2.0, -9.0, 1.0])
        >>> try:
        ...     h = treescan.fold(step, jnp.float32(1.0), xs, check_finite=True)
        ... except treescan.NonFiniteError:
        ...     record = treescan.last_nonfinite()
        >>> print(record.step, record.operation, step(record.carry, record.x))
        2 log nan
    """
    with _last.lock:
        return _last.record
