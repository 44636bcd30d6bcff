"""What the tests of `check_finite` share."""

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import treescan


def go(way: str, call: Any, data: Any) -> Any:
    """What a call makes of data and of a scale of 1, in one of several ways."""
    one = jnp.float32(1)
    both = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), (data, one))
    if way == "jit":
        return jax.jit(call)(data, one)
    if way == "vmap":
        return jax.jit(jax.vmap(call))(*both)
    if way == "grad of vmap":
        return jax.grad(lambda scale: jax.vmap(call)(both[0], scale * both[1]).sum())(one)
    with jax.disable_jit(way == "disable_jit"):
        return call(data, one)


def caught(call: Any) -> str:
    """The text that a call ends with, however it is raised; what comes later of another element is waited for."""
    with pytest.raises((treescan.errors.NonFiniteError, jax.errors.JaxRuntimeError)) as error:
        jax.block_until_ready(call())
        jax.effects_barrier()
    with contextlib.suppress(Exception):  # of another element of a vmap
        jax.effects_barrier()
    return " ".join(str(error.value).split())


def named(call: Any) -> tuple[str, treescan.types.NonFinite]:
    """The text that a call ends with, and the record of what it names."""
    text, record = caught(call), treescan.last_nonfinite()
    assert record is not None
    return text, record
