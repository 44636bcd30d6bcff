"""Exponential moving averages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, overload

import jax
import jax.numpy as jnp
from jax.core import Tracer

from .._types import Array, ArrayLike, PyTree
from ._base import AbstractCarry, as_seen
from ._entries import entries, entry, inexact, is_shared, maker, widest

T = TypeVar("T")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Ema(AbstractCarry[Any, Any]):
    """The exponential moving average of what the body returns: value = decay * value + (1 - decay) * returned.

    With a weight, the body sees value / weight, weight = decay * weight + (1 - decay) from 0 on: the average
    that is not biased towards its start (the bias correction of Adam: Kingma and Ba, 2015, section 3).

    A value that all rows of a `mask_scan` share is updated once per step, with the mean of the valid entries.

    Attributes:
        value: any pytree of floating-point arrays.
        decay: a number, or an array that broadcasts against each leaf and has no rows; may be traced.
        weight: the same tree, or None.
        shared: whether all rows share it; None: leaves without axes are shared.
    """

    value: PyTree
    decay: ArrayLike
    weight: PyTree = None
    shared: bool | None = field(default=None, metadata={"static": True})

    def read(self) -> PyTree:
        """The average."""
        if self.weight is None:
            return self.value
        return jax.tree.map(lambda v, w: v / jnp.where(w == 0, jnp.ones_like(w), w), self.value, self.weight)

    def write(self, returned: PyTree, valid: Array | None) -> Ema:
        """One step of each average."""
        new = jax.tree.map(lambda old, came: self._average(old, self._entry(old, came, valid)), self.value, returned)
        if self.weight is None:
            return replace(self, value=new)
        weight = jax.tree.map(lambda old: self._average(old, jnp.ones_like(old)), self.weight)
        return replace(self, value=new, weight=weight)

    def _average(self, old: Array, came: Array) -> Array:
        decay = jnp.asarray(self.decay)  # computed in its precision: 0.999 is 1 in bfloat16
        dtype = old.dtype if jnp.iscomplexobj(old) else widest(decay.dtype, old.dtype)
        if not decay.weak_type:
            decay = decay.astype(dtype)
        if decay.ndim not in (0, old.ndim):
            decay = jnp.broadcast_to(decay, old.shape)
        return (decay * old.astype(dtype) + (1 - decay) * came.astype(dtype)).astype(old.dtype)

    def _entry(self, value: Array, returned: ArrayLike, valid: Array | None) -> Array:
        if not is_shared(self.shared, value):
            return entry(returned, value)
        rows = entries(returned, value, valid)
        if not rows.axes:
            return rows.values
        return jnp.sum(rows.values, rows.axes) / jnp.maximum(rows.number, 1).astype(value.dtype)

    def rows(self) -> Mapping[str, Any]:
        """Each leaf as `shared` has it; none in the decay."""
        axes = jax.tree.map(lambda leaf: None if is_shared(self.shared, leaf) else 0, self.value)
        return {"value": axes, "decay": None, "weight": None if self.weight is None else axes}


@overload
def ema(start: float, decay: ArrayLike, *, debias: bool = False, shared: bool | None = None) -> Array: ...
@overload
def ema(start: T, decay: ArrayLike, *, debias: bool = False, shared: bool | None = None) -> T: ...
@maker
def ema(start: Any, decay: ArrayLike, *, debias: bool = False, shared: bool | None = None) -> Any:
    """Carries the exponential moving average of what the body returns.

    Args:
        start: the average before the first step: any pytree of numbers or arrays.
        decay: the weight of the past, between 0 and 1; a number or an array, traced or not.
        debias: whether the body sees the average without its bias towards `start`, which must then be 0.
        shared: whether all rows of a `mask_scan` share the average: then the body returns entries [*batch, ...], and
            their mean over the valid rows counts. None: leaves without axes are shared, others have rows.

    Raises:
        ValueError: if `debias` is given with a start other than 0.

    Returns:
        `Ema`, typed as the average that the body sees.

    Examples:
        >>> import jax.numpy as jnp
        >>> import treescan
        >>> from treescan.carries import ema
        >>> final = treescan.fold(
        ...     lambda average, x: x, ema(0.0, decay=0.5), jnp.array([1.0, 1.0, 1.0])
        ... )
        >>> print(final.read())
        0.875
    """
    value = jax.tree.map(inexact, start)
    leaves = jax.tree.leaves(value)
    if debias and not any(isinstance(leaf, Tracer) for leaf in leaves) and any(jnp.any(leaf != 0) for leaf in leaves):
        raise ValueError("an average without bias starts from 0: `ema(0.0, decay, debias=True)`")
    return as_seen(Ema(value, decay, jax.tree.map(jnp.zeros_like, value) if debias else None, shared))
