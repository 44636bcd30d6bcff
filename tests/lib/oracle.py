"""What results are compared with, and how: to the bit, or but for rounding."""

from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import numpy.testing as npt


def is_inexact(leaf: Any) -> bool:
    return jnp.issubdtype(jnp.asarray(leaf).dtype, jnp.inexact)


def assert_bitwise(actual: Any, expected: Any) -> None:
    """Equal structures, types, weak types and bits."""
    chex.assert_trees_all_equal_structs(actual, expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert jax.typeof(a) == jax.typeof(b)
        npt.assert_array_equal(as_numpy(a), as_numpy(b))


def assert_close(got: Any, want: Any, rtol: float = 2e-5, atol: float | None = None) -> None:
    """Equal structures and types, and values but for rounding, beside the largest of their array too."""
    atol = rtol if atol is None else atol
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = as_numpy(a), as_numpy(b)
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        npt.assert_allclose(a, b, rtol=rtol, atol=atol * max(1.0, float(np.max(np.abs(b[np.isfinite(b)]), initial=0))))


def compiled(function: Callable[..., Any], *args: Any) -> Any:
    """The result of a function as one program."""
    return jax.jit(function)(*args)


def as_numpy(leaf: Any) -> np.ndarray:
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return np.asarray(jax.random.key_data(leaf))
    return np.asarray(leaf)
