"""The best candidate so far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp

from .._avals import describe_argument, describe_leaf
from .._errors import ArgumentTypeError, Fault
from .._types import Array, ArrayLike, PyTree
from ._base import AbstractCarry, as_seen
from ._entries import entries, entry, inexact, is_shared, maker, numbers, pair, same_structure, strong

T = TypeVar("T")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Best(AbstractCarry[tuple[Array, Any], tuple[ArrayLike, Any]]):
    """The candidate with the best score so far, of the pairs (score, value) that the body returns.

    Of several candidates with the same score, the first stays. A score that is NaN is never better.

    Attributes:
        score: of the best, floating point.
        value: the best: any pytree of arrays that start with the axes of the score.
        mode: "max" or "min", which scores are better.
        shared: whether all rows share it; None: if the score has no axes.
    """

    score: Array
    value: PyTree
    mode: Literal["max", "min"] = field(default="max", metadata={"static": True})
    shared: bool | None = field(default=None, metadata={"static": True})

    def read(self) -> tuple[Array, PyTree]:
        """The best score and its value."""
        return self.score, self.value

    def write(self, returned: tuple[ArrayLike, PyTree], valid: Array | None) -> Best:
        """The better one of two, or of all valid rows."""
        score, value = pair(returned, "score, value")
        same_structure(value, self.value)
        if is_shared(self.shared, self.score):
            if 0 in jnp.shape(score):
                return self
            score, value = self._best_row(score, value, valid)
        score = entry(score, self.score)
        better = score > self.score if self.mode == "max" else score < self.score

        def choose(new: Any, old: Array) -> Array:
            new = entry(new, old)
            return jnp.where(better.reshape(*better.shape, *(1 for _ in range(old.ndim - better.ndim))), new, old)

        return replace(self, score=jnp.where(better, score, self.score), value=jax.tree.map(choose, value, self.value))

    def _best_row(self, score: ArrayLike, value: PyTree, valid: Array | None) -> tuple[Array, PyTree]:
        rows = entries(score, self.score, valid)
        if not rows.axes:
            counts = True if rows.counts is None else rows.counts
            return jnp.where(counts, rows.values, self._worst()), value
        counts = ~jnp.isnan(rows.values) if rows.counts is None else rows.counts & ~jnp.isnan(rows.values)
        flat = jnp.where(counts, rows.values, self._worst()).reshape(-1)
        place = jnp.argmax(flat) if self.mode == "max" else jnp.argmin(flat)

        def take(leaf: Any) -> Array:
            leaf = jnp.asarray(leaf)
            shape = rows.values.shape
            if leaf.shape[: len(shape)] != shape:
                raise TypeError(f"the scores are {describe_leaf(score)}, but a value is {describe_leaf(leaf)}")
            return leaf.reshape(-1, *leaf.shape[len(shape) :])[place]

        return flat[place], jax.tree.map(take, value)

    def _worst(self) -> float:
        return -jnp.inf if self.mode == "max" else jnp.inf

    def rows(self) -> Mapping[str, Any] | None:
        """As `shared` has it."""
        return None if is_shared(self.shared, self.score) else {"score": 0, "value": 0}


@maker
def best(
    value: T,
    score: ArrayLike | None = None,
    *,
    mode: Literal["max", "min"] = "max",
    shared: bool | None = None,
) -> tuple[Array, T]:
    """Carries the best candidate so far.

    Args:
        value: the first best value: any pytree of arrays. They are copied, so a state that also holds them can be
            donated.
        score: its score, a number, or one per row [*batch]. None: worse than any, -inf or inf, of shape [].
        mode: whether high ("max") or low scores ("min") are better.
        shared: whether all rows of a `mask_scan` share it: then the body returns scores [*batch] and values
            [*batch, ...], of which the best valid row counts. None: if the score has no axes.

    Returns:
        `Best`, typed as the pair (score, value) that the body sees. The body returns a pair (score, candidate).

    Raises:
        ArgumentTypeError: if the score is not a number (but, for example, a function that computes it), or the value
            contains no arrays.
        ValueError: if the mode is another.

    Examples:
        >>> import jax.numpy as jnp
        >>> import treescan
        >>> from treescan.carries import best
        >>> def descend(carry, _):
        ...     x = carry["x"] - 0.9 * 2 * carry["x"]
        ...     return {"x": x, "best": (x**2, x)}, None
        >>> final, _ = treescan.scan(
        ...     descend, {"x": 1.0, "best": best(1.0, mode="min")}, length=5
        ... )
        >>> print(final["best"].value.round(3))
        -0.328
    """
    if mode not in ("max", "min"):
        raise ValueError(f'mode is "max" or "min", but got {mode!r}')
    if callable(score):
        raise Fault(
            ArgumentTypeError,
            f"{{verb}}: `score` must be a number, or one for each row, got {describe_argument(score)}.",
            "It is the score of the first value. None is worse than any score. The body computes the scores of "
            "later values, and returns `(score, candidate)` in the place of the carry.",
        )
    start = (-jnp.inf if mode == "max" else jnp.inf) if score is None else numbers(score, "score")
    return as_seen(Best(inexact(start), jax.tree.map(strong, value), mode, shared))
