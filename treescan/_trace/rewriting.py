"""Whether steps may be rewritten, and what a rewriting raises where it cannot prove what it relies on."""

from __future__ import annotations

import contextlib
import contextvars
import os
from collections.abc import Generator

import jax
import jax.numpy as jnp

from .._avals import Array
from .._errors import ArgumentTypeError, named_options

_wanted: contextvars.ContextVar[bool | None] = contextvars.ContextVar("rewriting", default=None)


def is_rewriting() -> bool:
    """Whether steps may be rewritten: what the innermost `rewriting` says, else the environment."""
    wanted = _wanted.get()
    return os.environ.get("TREESCAN_REWRITE", "1") != "0" if wanted is None else wanted


@contextlib.contextmanager
@named_options
def rewriting(enabled: bool) -> Generator[None]:
    """Turns the rewriting of steps on or off, for loops that are traced inside the context.

    treescan computes some products for many steps at once, writes outputs in place, takes leaves that no step changes
    out of the carry, and has its own rule to differentiate `while_scan`. Each rewriting checks its conditions. If you
    still doubt a number, compute it again without any rewriting: every loop then runs the step as you wrote it, and JAX
    differentiates it. That is slower, takes more memory, and should differ only by rounding.

    The setting acts while JAX traces. A function under `jax.jit` that was traced before keeps its program: trace it
    again inside the context, or start Python with the environment variable `TREESCAN_REWRITE=0`.

    Args:
        enabled: whether steps may be rewritten.

    Returns:
        A context manager.

    Raises:
        ArgumentTypeError: if `enabled` is not a bool.

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
