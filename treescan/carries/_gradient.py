"""Carries that change a gradient on its way back through time, or the dtype of what they hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from .._avals import Array, ArrayLike, PyTree, describe_leaf, dtype_of
from .._errors import Misuse, named_options
from .._tree import describe_tree, leaves_with_path
from ._base import AbstractCarry, as_seen, read_tree, write_tree
from ._buffer import fitted, inexact, own, strong, widest
from ._registry import adopt

T = TypeVar("T")


@jax.custom_vjp
def _limit_value(value: Array, limit: ArrayLike) -> Array:
    return value


def _clip_to(limit: ArrayLike, g: Array) -> tuple[Array, Array]:
    most = jnp.maximum(jnp.asarray(limit), 0)  # one that was traced may be negative
    return jnp.clip(g, -most, most), jnp.zeros_like(most)


_limit_value.defvjp(lambda value, limit: (value, limit), _clip_to)


@jax.custom_vjp
def _limit_norm(value: Array, limit: ArrayLike) -> Array:
    return value


def _scale_to(limit: ArrayLike, g: Array) -> tuple[Array, Array]:
    """Divides by the largest element before anything is squared: gradients that explode are what this is for.

    Half precision is computed in float32. The root is never that of 0, where it has no derivative.
    """
    wide = g.astype(widest(g.dtype))
    limited, most = (
        jnp.maximum(limit, 0).astype(wide.dtype),
        jnp.finfo(wide.dtype).max / 16,
    )  # whose reciprocal is a normal number
    finite = jnp.clip(wide, -most, most)
    largest = jnp.max(jnp.abs(finite), axis=-1, keepdims=True, initial=0) if g.ndim else jnp.abs(finite)
    unit = finite / _or_one(largest)
    norm = jnp.sqrt(_or_one(jnp.sum(unit * unit, axis=-1, keepdims=True))) if g.ndim else _or_one(jnp.abs(unit))
    clipped = (unit / norm * limited).astype(g.dtype)
    return jnp.where(largest <= limited / norm, g, clipped), jnp.zeros_like(limit)  # so that a limit of NaN is seen


def _or_one(x: Array) -> Array:
    return jnp.where(x > 0, x, jnp.ones_like(x))


_limit_norm.defvjp(lambda value, limit: (value, limit), _scale_to)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ClipGradient(AbstractCarry[Any, Any]):
    """Values whose gradient is clipped per step on its way back through time (A. Graves, arXiv:1308.0850, 2.1).

    The cotangent of the value that a step sees, from that step and all later ones, is limited. The values do not
    change. Reverse mode only: forward mode has no cotangent to limit. If a loss uses the final values, take them from
    `tree`; with `read`, their cotangent is limited once more.

    Attributes:
        tree: any pytree of floating-point arrays; custom carries may be in it.
        limit: the largest absolute value of an element, or None.
        max_norm: the largest Euclidean norm along the last axis, or None.
    """

    tree: PyTree
    limit: ArrayLike | None = None
    max_norm: ArrayLike | None = None

    def read(self) -> PyTree:
        """The values; their cotangent is limited."""
        return jax.tree.map(self._clip, read_tree(self.tree))

    def _clip(self, value: Array) -> Array:
        if not jnp.issubdtype(jnp.result_type(value), jnp.inexact):
            return value
        if self.limit is not None:
            value = _limit_value(value, jnp.asarray(self.limit, value.dtype))
        if self.max_norm is not None:
            value = _limit_norm(value, jnp.asarray(self.max_norm, widest(value.dtype)))  # float16 ends at 65504
        return value

    def write(self, returned: PyTree, valid: Array | None) -> ClipGradient:
        """What was returned."""
        return replace(self, tree=write_tree(self.tree, returned, valid))

    def rows(self) -> Mapping[str, Any]:
        """They lead in the values; none in the limits."""
        return {"tree": 0, "limit": None, "max_norm": None}


@named_options
def clip_gradient(tree: T, limit: ArrayLike | None = None, *, max_norm: ArrayLike | None = None) -> T:
    """Carries values whose gradient is clipped per step on its way back through time. Reverse mode only.

    Args:
        tree: any pytree of floating-point arrays; custom carries may be in it.
        limit: the largest absolute value that an element of the cotangent keeps.
        max_norm: the largest Euclidean norm that the cotangent keeps along its last axis, for example the features of a
            row. A limit is at least 0. A traced one that is negative counts as 0.

    Returns:
        `ClipGradient`, typed as the tree.

    Raises:
        ArgumentError: unless exactly one of the limits is given, at least 0; or for complex numbers.

    Examples:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import treescan
        >>> from treescan.carries import clip_gradient
        >>> def loss(h):
        ...     return treescan.fold(
        ...         lambda h, _: 3 * h, clip_gradient(h, 2.0), length=4
        ...     ).tree
        >>> print(jax.grad(loss)(1.0))
        2.0
    """
    if (limit is None) == (max_norm is None):
        raise Misuse(
            f"{{verb}}: pass either `limit` or `max_norm`; {'neither is' if limit is None else 'both are'} given.",
            "`limit` cuts each element of the gradient, `max_norm` scales it along the last axis.",
        )
    given = {"limit": limit, "max_norm": max_norm}
    limits = [None if bound is None else inexact(bound, name) for name, bound in given.items()]
    for name, bound in given.items():
        known = bound is not None and not isinstance(bound, Tracer)
        if jnp.iscomplexobj(bound) or (known and not np.all(np.asarray(bound) >= 0)):
            says = f"{{verb}}: `{name}` must be at least 0, got {describe_tree(np.asarray(bound))}."
            raise Misuse(says, "It is the largest size that the gradient keeps.")
    values = adopt(tree, "tree").init
    for path, leaf in leaves_with_path("tree", values):
        if jnp.issubdtype(dtype_of(leaf), jnp.complexfloating):
            says = f"{{verb}} limits real numbers, got {describe_leaf(leaf)} at {path}."
            raise Misuse(says, "Carry its real and imaginary parts as two arrays.")
    return as_seen(ClipGradient(jax.tree.map(own, values), *limits))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StopGradient(AbstractCarry[Any, Any]):
    """Values through which no gradient flows back in time: a step sees them as constants.

    If a loss uses the final values, take them from `tree`; `read` returns constants.

    Attributes:
        tree: any pytree of arrays; custom carries may be in it.
    """

    tree: PyTree

    def read(self) -> PyTree:
        """The values, as constants."""
        return read_tree(jax.lax.stop_gradient(self.tree))

    def write(self, returned: PyTree, valid: Array | None) -> StopGradient:
        """What was returned."""
        return StopGradient(write_tree(self.tree, returned, valid))


@named_options
def stop_gradient(tree: T) -> T:
    """Carries values through which no gradient flows back in time.

    Args:
        tree: any pytree of arrays; custom carries may be in it.

    Returns:
        `StopGradient`, typed as the tree.

    Examples:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import treescan
        >>> from treescan.carries import stop_gradient
        >>> def loss(w):  # only the last step counts: h is a constant in it
        ...     return treescan.fold(
        ...         lambda h, x: w * h + x, stop_gradient(1.0), jnp.ones(2)
        ...     ).tree
        >>> print(jax.grad(loss)(2.0))
        3.0
    """
    return as_seen(StopGradient(jax.tree.map(own, adopt(tree, "tree").init)))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cast(AbstractCarry[Any, Any]):
    """Values that are cast back to their first dtypes in each step.

    The body may return them in another dtype, for example after computing in bfloat16 with float32 weights. What would
    lose more than precision is refused: a float in place of an int.

    Attributes:
        tree: any pytree of arrays; custom carries may be in it.
    """

    tree: PyTree

    def read(self) -> PyTree:
        """The tree as it is."""
        return read_tree(self.tree)

    def write(self, returned: PyTree, valid: Array | None) -> Cast:
        """What was returned, in the dtypes of before."""

        def cast_back(old: Array, new: ArrayLike) -> ArrayLike:
            return new if old is new else fitted(jnp.asarray(new), old)

        return Cast(jax.tree.map(cast_back, self.tree, write_tree(self.tree, returned, valid)))


@overload
def cast(tree: float) -> Array: ...
@overload
def cast(tree: T) -> T: ...
@named_options
def cast(tree: Any) -> Any:
    """Carries values that keep their dtypes, whatever floating-point dtypes the body returns.

    Args:
        tree: any pytree of arrays; custom carries may be in it.

    Returns:
        `Cast`, typed as the tree.

    Examples:
        >>> import jax.numpy as jnp
        >>> import treescan
        >>> from treescan.carries import cast
        >>> def step(h, x):
        ...     return jnp.tanh(
        ...         h + x
        ...     ), h  # x is float32, h bfloat16: the sum is float32
        >>> final, _ = treescan.scan(
        ...     step, cast(jnp.zeros((), jnp.bfloat16)), jnp.ones(4)
        ... )
        >>> final.read().dtype
        dtype(bfloat16)
    """
    return as_seen(Cast(jax.tree.map(strong, adopt(tree, "tree").init)))
