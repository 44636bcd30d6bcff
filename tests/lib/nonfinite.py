"""What the tests of `check_finite` share."""

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import treescan


def gradient(way: str, call: Any, *data: Any) -> Any:
    """The derivative of `call(*data, scale)` with respect to the scale at 1, taken in one of several ways."""
    one, last = jnp.float32(1), len(data)
    derived = jax.grad(call, last)
    if way == "vmap":
        return jax.vmap(derived, (*(None for _ in data), 0))(*data, jnp.ones(2))
    with jax.disable_jit(way == "disable_jit"):
        return (jax.jit(derived) if way == "jit" else derived)(*data, one)


def caught(call: Any) -> str:
    """The text that a call ends with, however it is raised; what comes later of another element is waited for."""
    with pytest.raises((treescan.NonFiniteError, jax.errors.JaxRuntimeError)) as error:
        jax.block_until_ready(call())
        jax.effects_barrier()
    with contextlib.suppress(Exception):  # of another element of a vmap
        jax.effects_barrier()
    return " ".join(str(error.value).split())


def named(call: Any) -> tuple[str, treescan.NonFinite]:
    """The text that a call ends with, and the record of what it names."""
    text, record = caught(call), treescan.last_nonfinite()
    assert record is not None
    return text, record


@jax.custom_jvp
def halve(leaf: Any, bad: Any) -> Any:
    """Half a leaf; its derivative is wrong where `bad` is."""
    del bad
    return leaf * 0.5


@halve.defjvp
def _halve(given: Any, tangents: Any) -> Any:
    (leaf, bad), (d, _) = given, tangents
    return leaf * 0.5, d * 0.5 * bad
