"""Splits trees into the leaves that have tangents and the others."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero, zero_from_primal

from .._avals import place_like
from .._types import Array, PyTree
from .hoist import merge


class Part(NamedTuple):
    """Which leaves of a tree have a tangent."""

    structure: Any
    on: tuple[bool, ...]

    def split(self, tree: Any) -> tuple[list[Any], list[Any]]:
        """The leaves that have one, and the others."""
        leaves = jax.tree.leaves(tree)
        pairs = list(zip(leaves, self.on, strict=True))
        return [leaf for leaf, on in pairs if on], [leaf for leaf, on in pairs if not on]

    def join(self, on: list[Any], off: list[Any]) -> Any:
        """The tree of both."""
        return jax.tree.unflatten(self.structure, merge(self.on, on, off))


def is_smooth(leaf: Any) -> bool:
    """Whether values of this type have tangents."""
    return bool(jnp.issubdtype(jax.typeof(leaf).dtype, jnp.inexact))


def smooth_part(tree: Any) -> Part:
    """All leaves of a tree that can have a tangent."""
    leaves, structure = jax.tree.flatten(tree)
    return Part(structure, tuple(map(is_smooth, leaves)))


def nonzero_part(tree: PyTree, tangents: PyTree) -> tuple[Part, list[Any]]:
    """Which leaves have a tangent that is not known to be zero, and these tangents."""
    leaves, structure = jax.tree.flatten(tree)
    d_leaves = jax.tree.leaves(tangents)
    on = tuple(is_smooth(leaf) and not isinstance(d, SymbolicZero) for leaf, d in zip(leaves, d_leaves, strict=True))
    return Part(structure, on), [d for d, is_on in zip(d_leaves, on, strict=True) if is_on]


def zeros_like(leaf: Any) -> Array:
    """A tangent of zero, of the leaf's type."""
    aval = jax.typeof(leaf)
    return place_like(jnp.zeros(aval.shape, aval.dtype), aval)


def instantiated(tangent: Any, like: Array) -> Array:
    """A tangent as an array, zero or not."""
    return zeros_like(like) if isinstance(tangent, SymbolicZero) else tangent


def no_tangent(leaf: Any) -> Any:
    """What represents the tangent of a leaf that has none."""
    return zero_from_primal(leaf, symbolic_zeros=True)


class Unproven(Exception):
    """Something that a rewriting of a step relies on does not hold: the step is left as the user wrote it."""


def add_alike(a: Array, b: Array) -> Array:
    """The sum of two tangents of one type, which is never broadcast.

    Raises:
        Unproven: if their shapes or dtypes differ.
    """
    return jax.lax.add(typed_like(b, a), b)


def typed_like(like: Array, value: Array) -> Array:
    """The value itself, which must have the shape and dtype of another.

    Raises:
        Unproven: if it has not.
    """
    types = [(jnp.shape(each), jnp.result_type(each)) for each in (value, like)]
    if types[0] != types[1]:
        raise Unproven(f"{types[0]} is found where {types[1]} is meant")
    return value


def fill_in(tree: PyTree, tangents: list[Array]) -> PyTree:
    """The tangent of a tree, from those of the leaves that have any."""
    part = smooth_part(tree)
    return part.join(tangents, [no_tangent(leaf) for leaf in part.split(tree)[1]])
