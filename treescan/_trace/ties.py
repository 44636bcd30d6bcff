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
from jax.custom_derivatives import SymbolicZero

from .._avals import Array, PyTree, place_like, vary_over, varying_axes
from .._tree import merge, split
from .smooth import is_smooth

_REACHES = jax.__version_info__ >= (0, 9)
"""Whether a `psum` of what varies can be mapped. On JAX 0.8, values are tied only to what varies over no other axes."""


def tie(tree: PyTree, given: PyTree, axes: Iterable[Hashable] = (), *, call: bool = False) -> PyTree:
    """The values of a tree, each of which depends on all arrays of another, and on named axes.

    Args:
        tree: the values. What stands for no tangent is left alone.
        given: the arrays.
        axes: the named axes, where each value depends on its place along them.
        call: whether it is a call in the program, which JAX differentiates and transposes once in each round.
    """
    leaves, structure = jax.tree.flatten(tree)
    on = [jax.dtypes.float0 != leaf.dtype and not isinstance(leaf, SymbolicZero) for leaf in leaves]
    given, (values, left) = jax.tree.leaves(given), split(on, leaves)
    smooth, others = split(list(map(is_smooth, given)), given)
    if others or axes:  # apart from what may be linear, so that JAX transposes nothing of it
        smooth += _nothings(others, tuple(axes))
    tied = (_tied_by_call if call else _tied)(values, smooth) if smooth else values
    return jax.tree.unflatten(structure, merge(on, tied, left))


@functools.partial(jax.jit, static_argnums=1, inline=True)  # JAX traces it once for the same types
def _nothings(others: list[Array], axes: tuple[Hashable, ...]) -> list[Array]:
    return [_nothing_of(leaf) for leaf in (*others, *map(jax.lax.axis_index, axes))]


def _tie(values: list[Array], given: list[Array]) -> list[Array]:
    found: dict[frozenset[str], list[Array]] = {}
    for leaf in given:
        found.setdefault(varying_axes(jax.typeof(leaf)), []).append(_nothing_of(leaf))
    nothing = {varying: functools.reduce(jax.lax.add, parts) for varying, parts in found.items()}
    return [_tied_to(nothing, value) for value in values]


# Of what goes through a call, XLA does not see that it is constant: it writes out a constant cotangent for all steps.
_tied, _tied_by_call = jax.jit(_tie, inline=True), jax.jit(_tie)


def _nothing_of(leaf: Array) -> Array:
    """float32[0], which depends on a value, linearly if that may have a tangent."""
    none = jnp.broadcast_to(leaf, (0, *leaf.shape))
    if jnp.issubdtype(none.dtype, jax.dtypes.extended):
        none = jax.lax.eq(none, none)
    return jnp.sum(jnp.real(none).astype(jnp.float32), axis=range(1, none.ndim))


def _tied_to(nothing: dict[frozenset[str], Array], value: Array) -> Array:
    """The value itself, of any type, tied to arrays without entries, by the manual axes that each varies over."""
    aval, axes = jax.typeof(value), varying_axes(jax.typeof(value))
    parts = [_varying_at_most(part, axes) for over, part in nothing.items() if _REACHES or over <= axes]
    if not parts:
        return value
    varying = frozenset[str]().union(*map(varying_axes, map(jax.typeof, parts)))
    zero = jnp.sum(functools.reduce(jax.lax.add, [vary_over(part, varying) for part in parts]))
    if not is_smooth(value):
        return jax.lax.select_n(jax.lax.ne(zero, np.float32(0)), value, value)
    other = place_like(jnp.broadcast_to(zero.astype(value.dtype), value.shape), aval)
    return jax.lax.select_n(np.ones((), np.bool_), other, value)


def _varying_at_most(part: Array, axes: frozenset[str]) -> Array:
    others = tuple(sorted(varying_axes(jax.typeof(part)) - axes))
    return jax.lax.psum(part, others) if others else part
