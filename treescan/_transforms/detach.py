"""`detached`: the same values without a derivative, as of `jax.lax.stop_gradient`, but JAX can transpose it.

JAX has no transpose rule for its own `stop_gradient`. It transposes a `jax.custom_jvp` as the function within.
"""

from __future__ import annotations

from typing import Any

import jax

from .._types import Array
from .smooth import no_tangent


@jax.custom_jvp
def detached(leaf: Array) -> Array:
    """The leaf, which is smooth, without a derivative of any order."""
    return leaf


def _rule(primals: tuple[Array], tangents: Any) -> tuple[Array, Any]:
    del tangents
    # Not `detached` again: a second derivative of a scan would go through the function within.
    return jax.lax.stop_gradient(primals[0]), no_tangent(primals[0])


detached.defjvp(_rule, symbolic_zeros=True)
