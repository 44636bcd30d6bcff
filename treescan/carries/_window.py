"""The last k values (lags)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from .._avals import describe_leaf
from .._types import Array, PyTree
from ._base import AbstractCarry, as_seen
from ._entries import fitted, maker, strong

T = TypeVar("T")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Window(AbstractCarry[Any, Any]):
    """The last k values that the body returned, oldest first: `window[-1]` is the last one, `window[-i]` lag i.

    A step costs one copy of the window. In `mask_scan`, the batch shape comes after axis k.

    Attributes:
        values: any pytree of arrays, leaves [k, ...].
    """

    values: PyTree

    def read(self) -> PyTree:
        """The values, leaves [k, ...]."""
        return self.values

    def write(self, returned: PyTree, valid: Array | None) -> Window:
        """The oldest value goes, a new one comes."""
        return Window(jax.tree.map(_shift, self.values, returned))

    def rows(self) -> int:
        """Behind the k values."""
        return 1


def _shift(values: Array, returned: Any) -> Array:
    if jnp.shape(returned) != values.shape[1:]:
        raise TypeError(
            f"it carries {describe_leaf(values)}, values of shape {list(values.shape[1:])}, but was given "
            f"{describe_leaf(returned)}"
        )
    return jnp.concatenate([values[1:], fitted(jnp.asarray(returned), values)[None]])


@maker
def window(history: T) -> T:
    """Carries the last k values, for example for an autoregressive model of order k.

    Args:
        history: the values before the first step, oldest first: any pytree of arrays, leaves [k, ...], k at least 1.

    Returns:
        `Window`, typed as the history. The body sees the last k values and returns a new one, leaves [...].

    Raises:
        ValueError: if a leaf has no axis of values.

    Examples:
        >>> import jax.numpy as jnp
        >>> import treescan
        >>> from treescan.carries import window
        >>> def fibonacci(last, _):
        ...     return last[-1] + last[-2], last[-1]
        >>> _, numbers = treescan.scan(fibonacci, window(jnp.array([0, 1])), length=8)
        >>> print(numbers)
        [ 1  1  2  3  5  8 13 21]
    """
    for leaf in jax.tree.leaves(history):
        if jnp.ndim(leaf) == 0 or jnp.shape(leaf)[0] == 0:
            raise ValueError(f"the history has {describe_leaf(leaf)}: its first axis must be the last k values")
    return as_seen(Window(jax.tree.map(strong, history)))
