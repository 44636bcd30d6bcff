"""Finds what all layers of a stack share: leaves that are not arrays, and the numbers and flags of Python."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from .._avals import dtype_of, is_weak, shape_of
from .._flax import box_classes, holds
from .._tree import freeze_leaves, is_number, is_static
from .._types import PyTree


def freeze_shared(tree: PyTree) -> PyTree:
    """Replaces what all layers share by nodes that hold it; a tree without any comes back unchanged."""
    pairs = zip(jax.tree.leaves(tree), numbers_in(tree), strict=True)
    return freeze_leaves(tree, [shared or is_static(leaf) for leaf, shared in pairs])


def numbers_in(tree: PyTree) -> list[bool]:
    """For each leaf whether it is a plain Python number; in a variable of flax one is an array."""
    boxes = box_classes()
    if not holds(tree, boxes):
        return [is_number(leaf) for leaf in jax.tree.leaves(tree)]
    parts = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, boxes))
    numbers: list[bool] = []
    for part in parts:
        numbers += [False] * len(jax.tree.leaves(part)) if isinstance(part, boxes) else [is_number(part)]
    return numbers


def is_same_number(one: Any, other: Any) -> bool:
    """Whether two leaves are one Python number: 1 is neither True nor 1.0, and NaN is NaN."""
    return type(one) is type(other) and is_number(one) and repr(one) == repr(other)


def is_traced_number(leaf: Any) -> bool:
    """Whether a leaf is what JAX makes of a Python number that it traces: a scalar with a weak type, or a flag."""
    if getattr(leaf, "ndim", 0):  # faster than to ask JAX for the type
        return False
    return shape_of(leaf) == () and (is_weak(leaf) or dtype_of(leaf) == np.bool_)
