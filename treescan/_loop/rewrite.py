"""`rewriting(False)` and `TREESCAN_REWRITE=0` leave the steps of loops alone."""

from __future__ import annotations

import contextlib
import contextvars
import os
from collections.abc import Generator

from .._errors import ArgumentTypeError

_wanted: contextvars.ContextVar[bool | None] = contextvars.ContextVar("rewriting", default=None)


def is_rewriting() -> bool:
    """Whether steps may be rewritten: what the innermost `rewriting` says, else the environment."""
    wanted = _wanted.get()
    return os.environ.get("TREESCAN_REWRITE", "1") != "0" if wanted is None else wanted


@contextlib.contextmanager
def rewriting(enabled: bool) -> Generator[None]:
    """Turns the rewriting of steps on or off for the loops that are traced within.

    treescan runs some products of a step for many steps at once, writes outputs in place, takes leaves that no step
    changes out of the state, and differentiates `while_scan` by a rule of its own. Each rewriting checks what it relies
    on. If you doubt a number all the same, compute it once more without any of them: every loop then runs the step as
    you wrote it, and JAX differentiates it. It is slower, takes more memory, and should differ by rounding alone.

    The setting acts while JAX traces. A function under `jax.jit` that was traced before keeps its program: trace it
    again within, or start Python with the environment variable `TREESCAN_REWRITE=0`.

    Args:
        enabled: whether steps may be rewritten.

    Returns:
        A context manager.

    Raises:
        ArgumentTypeError: if `enabled` is no bool.

    Examples:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import treescan
        >>> def loss(w):
        ...     def step(h, x):
        ...         h = jnp.tanh(w * h + x)
        ...         return h, h
        ...
        ...     _, ys = treescan.mask_scan(
        ...         step, jnp.zeros(2), jnp.ones((9, 2)), lengths=jnp.array([9, 4])
        ...     )
        ...     return ys.sum()
        >>> with treescan.rewriting(False):
        ...     plain = jax.grad(loss)(0.5)
        >>> print(bool(jnp.allclose(jax.grad(loss)(0.5), plain)))
        True
    """
    if not isinstance(enabled, bool):
        raise ArgumentTypeError(f"`rewriting` takes True or False, got {enabled!r}.")
    token = _wanted.set(enabled)
    try:
        yield
    finally:
        _wanted.reset(token)
