"""Numbers and values of several dtypes in one array of words, which is what a callback is given."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._types import Array


def packed(numbers: Array, values: Sequence[Array]) -> tuple[Array, list[Array]]:
    """Numbers and values in one array of words, and the values that do not fit a word.

    JAX moves each argument of a callback to the host by itself: one took 50 microseconds, and each further one 35.
    """
    words = [_word(value)[..., None] for value in values if value.dtype.itemsize <= 4]
    return jnp.concatenate([numbers, *words], axis=-1), [value for value in values if value.dtype.itemsize > 4]


def _word(value: Array) -> Array:
    if jnp.issubdtype(value.dtype, jnp.floating):
        return jax.lax.bitcast_convert_type(value.astype(jnp.float32), jnp.int32)
    return value.astype(jnp.int32)


def unpacked(words: Any, wide: Sequence[Any], kinds: Sequence[Any]) -> list[Any]:
    """The values again, of these dtypes."""
    others, places = iter(wide), itertools.count()
    return [next(others) if kind.itemsize > 4 else _value(words[..., next(places)], kind) for kind in kinds]


def _value(word: Any, kind: Any) -> Any:
    floating = jnp.issubdtype(kind, jnp.floating)
    return np.ascontiguousarray(word).view(np.float32 if floating else np.uint32 if kind.kind == "u" else np.int32)
