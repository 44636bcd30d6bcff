"""Lists what differs between two trees. chex decides whether anything does."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from .._avals import describe_leaf, is_key
from .._errors import Row
from .._tree import leaves_with_path
from .._types import PyTree

_SLACK = 64
"""By how many units in the last place of the largest number two ways to the same result may differ."""


def differ(root: str, expected: PyTree, came: PyTree, *, exact: bool = False) -> Iterator[Row]:
    """A row for each leaf in which two trees differ."""
    if not passes(chex.assert_trees_all_equal_structs, expected, came):
        yield Row(root, str(jax.tree.structure(expected)), str(jax.tree.structure(came)), "")
        return
    for (path, a), b in zip(leaves_with_path(root, expected), jax.tree.leaves(came), strict=True):
        first, second = values_of(a), values_of(b)
        if first.shape != second.shape or not equal(first, second, exact=exact):
            yield Row(path, show(first), show(second), "")


def passes(assertion: Callable[..., None], *trees: PyTree, **tolerance: float) -> bool:
    """Whether an assertion of chex holds."""
    with contextlib.suppress(AssertionError):
        assertion(*trees, **tolerance)
        return True
    return False


def values_of(leaf: Any) -> np.ndarray:
    """The numbers of a leaf; of a typed key its data."""
    return np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf)


def equal(a: np.ndarray, b: np.ndarray, *, exact: bool) -> bool:
    """Whether two arrays of one shape are equal, to the bit or up to rounding."""
    if exact or not jnp.issubdtype(a.dtype, jnp.inexact):
        return passes(chex.assert_trees_all_equal, a, b)
    wide_a, wide_b = (x.astype(np.complex128 if np.iscomplexobj(x) else np.float64) for x in (a, b))
    slack = _SLACK * float(jnp.finfo(a.dtype).eps) * max(1.0, np.max(np.abs(wide_a[np.isfinite(wide_a)]), initial=0))
    return passes(chex.assert_trees_all_close, wide_a, wide_b, rtol=0, atol=slack)


def show(values: np.ndarray) -> str:
    """An array in few characters."""
    if values.size > 4:
        return f"{describe_leaf(values)} {np.array2string(values.reshape(-1)[:3], precision=7)[:-1]} ..."
    return np.array2string(values, precision=7).replace("\n", "")


def finite(root: str, tree: PyTree) -> Iterator[Row]:
    """A row for each leaf that is not finite."""
    for path, leaf in leaves_with_path(root, tree):
        if not passes(chex.assert_tree_all_finite, leaf):
            yield Row(path, "finite", show(values_of(leaf)), "")
