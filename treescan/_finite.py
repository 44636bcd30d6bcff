"""`NonFinite`, the record of a carry that became NaN or infinite, and `last_nonfinite`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from ._avals import Array, PyTree

OF_RESULT = "what is computed of the result"
"""Where a cotangent comes from that no step of the loop made."""


class Within(NamedTuple):
    """A step of a loop, in which another loop ran.

    Attributes:
        call: the verb and the body, for example "`fold` over `step` (model.py:7)".
        step: the position of the step; with `offset`, in the whole run.
        steps: the steps of the loop; with `offset`, of the run up to the end of this part.
    """

    call: str
    step: int
    steps: int

    def after(self, step: Any, offset: Any) -> Within:
        """The step, counted over the whole run, of a part of it that begins at `offset`; None: at 0."""
        first = 0 if offset is None else int(offset)
        return self._replace(step=first + int(step), steps=first + self.steps)

    def __str__(self) -> str:
        return f"step {self.step:,} of {self.steps:,} of {self.call}"


@dataclass(frozen=True, eq=False)
class NonFinite:
    """The first step of a loop with `check_finite` in which a leaf of the carry became NaN or infinite.

    For a verb over layers, a step is a layer, the carry is the block's x, and `x` what a layer has of its own.

    Attributes:
        path: the leaf, for example `h.cell`.
        kind: whether it became NaN or infinite; None: the step was run again to find out, with another result. Then
            `path` is the whole carry, and the operation is not known.
        step: the position of the step, counted from 0, in reverse too: that of its x in xs. With `offset`, it is that
            in the whole run.
        steps: the steps of the loop; with `offset`, those of the run up to the end of this part.
        ends_early: whether these are the most that it may take.
        rows: the rows that did; in a loop without rows the entries along the leaf's first axis. Empty for a leaf that
            has none. Where rows are in several axes, each is a tuple.
        operation: the first operation with such a result, as JAX names it; None: the value was there before the step.
        place: the line of that operation, for example `model.py:31`; None if it is not known.
        source: the leaf of the carry or of x that the value came from, if no operation of this step made it.
        one_of: operations and leaves of which one made the value, if it cannot be decided which. Then `operation`,
            `place` and `source` are None.
        was_finite: whether all of the carry before the step was finite.
        carry: the carry before the step, as the body sees it.
        x: the x of the step.
        valid: which rows ran the step; None: all.
        unit: what a step is: "step", or "layer".
        backward: whether this is the cotangent of the leaf, of the carry before the step.
        within: the steps of other checked loops in which this loop ran, the innermost first.
        place_in_stack: for layers of several blocks, which of their stacks this layer is in, and where. Otherwise None.
    """

    path: str
    kind: Literal["NaN", "inf"] | None
    step: int
    steps: int
    rows: tuple[int, ...] | tuple[tuple[int, ...], ...]
    operation: str | None
    place: str | None
    source: str | None
    was_finite: bool
    carry: PyTree
    x: PyTree
    ends_early: bool = False
    valid: Array | None = None
    unit: Literal["step", "layer"] = "step"
    place_in_stack: tuple[int, int] | None = None
    backward: bool = False
    within: tuple[Within, ...] = ()
    one_of: tuple[str, ...] = ()

    def __str__(self) -> str:
        stack = ["layer {1} of `layers[{0}]`".format(*self.place_in_stack)] if self.place_in_stack else []
        rows = [f"row{'s' * (len(self.rows) > 1)} {_listed(list(map(str, self.rows)))}"] if self.rows else []
        where = f" ({'; '.join([*stack, *rows])})" if stack or rows else ""
        what = "the cotangent of " if self.backward else ""
        became = f"{what}`{self.path}` became {self.kind or 'NaN or infinite'}"
        most = "at most " if self.ends_early else ""
        outer = "".join(f", within {step}" for step in self.within)
        return f"{became} in {self.unit} {self.step:,} of {most}{self.steps:,}{where}{outer}{self._origin()}"

    def _origin(self) -> str:
        if self.backward and self.source == OF_RESULT:
            return f"; it was so before that {self.unit}, from {OF_RESULT}"
        if self.kind is None:
            return ". Run once more, the steps came out otherwise: rounding may decide, or a callback"
        if self.one_of:
            return f", which comes from one of {_listed(self.one_of)}"
        if self.source is not None:
            return f", which got it from `{self.source}`"
        place = "" if self.place is None else f" at {self.place}"
        which = f"carry in that {self.unit}" if self.backward else "carry before it"
        before = f"; the {which} was finite" if self.was_finite else ""
        return f", first in `{self.operation}`{place}{before}"


def _listed(names: Sequence[str]) -> str:
    """Some names: `3, 4 and 9`."""
    first, last = (names[:4], f"{len(names) - 4} others") if len(names) > 5 else (names[:-1], names[-1])
    return f"{', '.join(first)} and {last}" if first else last


_last: list[NonFinite | None] = [None]


def note(record: NonFinite) -> None:
    """Keeps a record for `last_nonfinite`."""
    _last[0] = record


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
    return _last[0]
