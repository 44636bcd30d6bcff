"""What the tests of `check_finite` share."""

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import treescan


def go(way: str, call: Any, data: Any, *, backward: bool) -> Any:
    """What a call makes of data and of a scale of 1, or its gradient in the scale, in one of several ways."""
    derive, one = jax.grad(call, 1) if backward else call, jnp.float32(1)
    both = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), (data, one))
    if way == "jit":
        return jax.jit(derive)(data, one)
    if way == "vmap":
        return jax.jit(jax.vmap(derive))(*both)
    if way == "grad of vmap":
        return jax.grad(lambda scale: jax.vmap(call)(both[0], scale * both[1]).sum())(one)
    with jax.disable_jit(way == "disable_jit"):
        return derive(data, one)


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
