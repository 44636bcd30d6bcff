"""Arrays that XLA writes before other operations read them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from .._avals import is_sharded
from .._loop.rewrite import is_rewriting
from .._types import Array


def written(entry: Array) -> Array:
    """A slice or a selection in an array of its own: a step's entry of a stack, or what padded rows are shown.

    XLA fuses it into what reads it, and its CPU backend does not vectorize functions of such operands: a step of an
    LSTM, a GRU or a hidden Markov model takes up to twice as long then. XLA writes rows that are gathered first.
    """
    fused = jax.default_backend() == "cpu" and entry.ndim > 1 and jnp.issubdtype(entry.dtype, jnp.inexact)
    known = all(isinstance(size, int) for size in entry.shape) and is_rewriting()
    return _write(entry) if fused and known and has_one_device() and not is_sharded(entry) else entry


def has_one_device() -> bool:
    """Whether rows cannot be spread over devices. A trace does not tell where the axes of a mesh are not explicit.

    Axes that are joined with the axis of the steps cannot be spread, and rows that are gathered cannot be either.
    """
    return jax.device_count() == 1


@jax.custom_jvp
def _written(entry: Array) -> Array:
    rows = np.arange(entry.shape[0], dtype=np.uint32)[:, None]
    return jax.lax.gather(
        entry,
        rows,
        jax.lax.GatherDimensionNumbers(tuple(range(1, entry.ndim)), (0,), (0,)),
        (1, *entry.shape[1:]),
        indices_are_sorted=True,
        unique_indices=True,
        mode="clip",
    )


@_written.defjvp
def _rule(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    """The tangent is handed on: the transpose of a gather would be a scatter."""
    return _written(*primals), tangents[0]


_write = jax.jit(_written, inline=True)  # traced once for each shape
