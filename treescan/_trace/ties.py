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

_REACHES = jax.__version_info__ >= (0, 9)
"""Whether a `psum` of what varies can be mapped. On JAX 0.8, values are tied only to what varies over no other axes."""


class Ties:
    """Ties values to all arrays of a tree, and to where along some named axes they are computed.

    Args:
        given: the arrays.
        axes: the names.
    """

    def __init__(self, given: PyTree, axes: Iterable[Hashable] = ()) -> None:
        leaves = [*jax.tree.leaves(given), *map(jax.lax.axis_index, axes)]
        found: dict[frozenset[str], list[Array]] = {}
        for leaf in leaves:
            found.setdefault(varying_axes(jax.typeof(leaf)), []).append(_nothing_of(leaf))
        self._over = {axes: functools.reduce(jax.lax.add, parts) for axes, parts in found.items()}

    def __call__(self, leaf: Array) -> Array:
        """The value itself, of any type."""
        aval = jax.typeof(leaf)
        parts = self._along(varying_axes(aval))
        if not parts:
            return leaf
        zero = jnp.sum(functools.reduce(jax.lax.add, parts))
        if not is_smooth(leaf):
            return jax.lax.select_n(jax.lax.ne(zero, np.float32(0)), leaf, leaf)
        other = place_like(jnp.broadcast_to(zero.astype(leaf.dtype), leaf.shape), aval)
        return jax.lax.select_n(np.ones((), np.bool_), other, leaf)

    def _along(self, axes: frozenset[str]) -> list[Array]:
        """What to tie a value to that varies over these manual axes: it varies over no others."""
        others = {each: tuple(sorted(each - axes)) for each in self._over}
        parts = [
            jax.lax.psum(part, others[each]) if others[each] else part
            for each, part in self._over.items()
            if _REACHES or not others[each]
        ]
        varying = frozenset[str]().union(*(varying_axes(jax.typeof(part)) for part in parts))
        return [vary_over(part, varying) for part in parts]


def _nothing_of(leaf: Array) -> Array:
    """float32[0], which depends on a value, linearly if that may have a tangent."""
    none = jnp.broadcast_to(leaf, (0, *leaf.shape))
    if jnp.issubdtype(none.dtype, jax.dtypes.extended):
        none = jax.lax.eq(none, none)
    return jnp.sum(jnp.real(none).astype(jnp.float32), axis=range(1, none.ndim))


def tied(tree: PyTree) -> PyTree:
    """A tree, each leaf of which depends on every other one."""
    return jax.tree.map(Ties(tree), tree)
