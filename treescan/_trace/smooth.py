"""Which leaves of a tree have tangents, and trees of tangents."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.custom_derivatives import SymbolicZero, zero_from_primal

from .._avals import Array, Aval, Leaves, PyTree, place_like
from .._tree import Part


def is_smooth(leaf: Any) -> bool:
    """Whether a value has a tangent, or values of a type have."""
    return bool(jnp.issubdtype(leaf.dtype if hasattr(leaf, "dtype") else jax.typeof(leaf).dtype, jnp.inexact))


def smooth_part(tree: PyTree) -> Part:
    """All leaves of a tree that can have a tangent."""
    leaves, structure = jax.tree.flatten(tree)
    return Part(structure, tuple(map(is_smooth, leaves)))


def nonzero_part(tree: PyTree, tangents: PyTree) -> tuple[Part, Leaves]:
    """Which leaves have a tangent that is not known to be zero, and these tangents."""
    leaves, structure = jax.tree.flatten(tree)
    d_leaves = jax.tree.leaves(tangents)
    on = tuple(is_smooth(leaf) and not isinstance(d, SymbolicZero) for leaf, d in zip(leaves, d_leaves, strict=True))
    return Part(structure, on), [d for d, is_on in zip(d_leaves, on, strict=True) if is_on]


def zeros_like(leaf: Array | Aval) -> Array:
    """A tangent of zero, of the type of a leaf, or of this type."""
    aval = leaf if isinstance(leaf, ShapedArray) else jax.typeof(leaf)
    return place_like(jnp.zeros(aval.shape, aval.dtype), aval)


def instantiated(tangent: Array | SymbolicZero, like: Array) -> Array:
    """A tangent as an array, zero or not."""
    return zeros_like(like) if isinstance(tangent, SymbolicZero) else tangent


def no_tangent(leaf: Array) -> Any:
    """What represents the tangent of a leaf that has none."""
    return zero_from_primal(leaf, symbolic_zeros=True)


def fill_in(tree: PyTree, tangents: list[Array]) -> PyTree:
    """The tangent of a tree, from those of the leaves that have any."""
    part = smooth_part(tree)
    return part.join(tangents, [no_tangent(leaf) for leaf in part.split(tree)[1]])
