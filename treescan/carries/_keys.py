"""Random keys: a fresh one per step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._avals import Array, describe_argument
from .._errors import TypeMisuse, named_options
from ._base import AbstractCarry, as_seen
from ._buffer import own


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Keys(AbstractCarry[Array, Any]):
    """A fresh key per step: the n-th one is `jax.random.fold_in(key, n)`. What the body returns there is ignored.

    The key is a constant of the loop; only n is carried. In `mask_scan`, a key of shape [] is shared by all rows, and
    advances in steps in which any row is valid. Keys `[*batch]` are one per row, and each row draws the same numbers as
    without padding. With `reverse`, gaps in the `mask` or `resets`, a shared key draws other numbers.

    Attributes:
        key: a PRNG key [], or one per row [*batch].
        drawn: int32, of the shape of the key: how many keys were drawn so far. None: none.
    """

    key: Array
    drawn: Array = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        """Begins to count, unless this is a structure without its arrays."""
        if self.drawn is None and isinstance(self.key, jax.Array | np.ndarray):
            raw = not jnp.issubdtype(self.key.dtype, jax.dtypes.prng_key)
            object.__setattr__(self, "drawn", jnp.zeros(self.key.shape[: -1 if raw else None], jnp.int32))

    def read(self) -> Array:
        """The key of this step."""
        fold = jax.random.fold_in
        for _ in range(jnp.ndim(self.drawn)):
            fold = jax.vmap(fold)
        return fold(self.key, self.drawn)

    def write(self, returned: Any, valid: Array | None) -> Keys:
        """One more was drawn."""
        return replace(self, drawn=self.drawn + 1)

    def rows(self) -> Mapping[str, Any] | None:
        """Shared by all rows, unless there is one a row."""
        return None if jnp.ndim(self.drawn) == 0 else {"key": 0, "drawn": 0}


@named_options
def keys(key: Array) -> Array:
    """Carries a key, and shows the body a fresh one per step.

    Args:
        key: a PRNG key [] (also raw key data, uint32[2]), or one per row [*batch], for example `jax.random.split(key,
            rows)`.

    Returns:
        `Keys`, typed as the key that the body sees.

    Raises:
        ArgumentTypeError: if it is not a key.

    Examples:
        >>> import jax
        >>> import treescan
        >>> from treescan.carries import keys
        >>> def walk(carry, _):
        ...     carry["place"] += jax.random.normal(carry["rng"])
        ...     return carry, carry["place"]
        >>> final, places = treescan.scan(
        ...     walk, {"place": 0.0, "rng": keys(jax.random.key(0))}, length=3
        ... )
        >>> places.shape, int(final["rng"].drawn)
        ((3,), 3)
    """
    try:
        made = jnp.asarray(key)
        if not jnp.issubdtype(made.dtype, jax.dtypes.prng_key):
            made = jax.random.wrap_key_data(made)
    except (TypeError, ValueError):
        raise TypeMisuse(
            f"{{verb}}: `key` must be a PRNG key, got {describe_argument(key)}.",
            "Make it with `jax.random.key(seed)`, or with `jax.random.split(key, rows)` for one per row.",
        ) from None
    return as_seen(Keys(own(made)))
