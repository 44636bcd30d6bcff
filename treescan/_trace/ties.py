"""Values that depend on others without reading them, so that JAX maps, differentiates and transposes them together.

JAX decides for each result of a function by itself whether it is mapped, and whether it has a tangent. Where a rule
treats all results as one, each of them has to depend on all that is given. A tie says so, and changes no number:

- It takes nothing of a value: an array of it with no entries, whose sum is 0. So it cannot meet a NaN, of padding for
  example, which `checkify` and `jax_debug_nans` would report. XLA removes it.
- It is linear in all values that may have a tangent. What was linear can be transposed afterwards.
- It reaches values that vary over fewer manual axes, for `psum` of an array without entries sends nothing.
- Named axes are given too: `jax.lax.axis_index` is mapped with no argument that is.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable

import jax
import jax.numpy as jnp
import numpy as np

from .._avals import Array, PyTree, place_like, vary_over, varying_axes
from .hoist import is_smooth


class Ties:
    """Ties values to all arrays of a tree, and to where along some named axes they are computed.

    Args:
        given: the arrays.
        axes: the names.
    """

    def __init__(self, given: PyTree, axes: Iterable[Hashable] = ()) -> None:
        leaves = [*jax.tree.leaves(given), *map(jax.lax.axis_index, axes)]
        self._varying = frozenset[str]().union(*(varying_axes(jax.typeof(leaf)) for leaf in leaves))
        parts = [vary_over(_nothing_of(leaf), self._varying) for leaf in leaves]
        self._nothing = functools.reduce(jax.lax.add, parts) if parts else None

    def __call__(self, leaf: Array) -> Array:
        """The value itself, of any type."""
        if self._nothing is None:
            return leaf
        aval = jax.typeof(leaf)
        missing = tuple(sorted(self._varying - varying_axes(aval)))
        zero = jnp.sum(jax.lax.psum(self._nothing, missing) if missing else self._nothing)
        if not is_smooth(leaf):
            return jax.lax.select_n(jax.lax.ne(zero, np.float32(0)), leaf, leaf)
        other = place_like(jnp.broadcast_to(zero.astype(leaf.dtype), leaf.shape), aval)
        return jax.lax.select_n(np.ones((), np.bool_), other, leaf)


def _nothing_of(leaf: Array) -> Array:
    """float32[0], which depends on a value, linearly if that may have a tangent."""
    none = jnp.broadcast_to(leaf, (0, *leaf.shape))
    if jnp.issubdtype(none.dtype, jax.dtypes.extended):
        none = jax.lax.eq(none, none)
    return jnp.sum(jnp.real(none).astype(jnp.float32), axis=range(1, none.ndim))


def tied(tree: PyTree) -> PyTree:
    """A tree, each leaf of which depends on every other one."""
    return jax.tree.map(Ties(tree), tree)
