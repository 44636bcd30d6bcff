"""What the tests of `check_finite` share."""

import contextlib
from typing import Any

import jax
import pytest

import treescan


def caught(call: Any) -> str:
    """The text that a call ends with, however it is raised; what comes later of another element is waited for."""
    with pytest.raises((treescan.NonFiniteError, jax.errors.JaxRuntimeError)) as error:
        jax.block_until_ready(call())
        jax.effects_barrier()
    with contextlib.suppress(Exception):  # of another element of a vmap
        jax.effects_barrier()
    return " ".join(str(error.value).split())


@jax.custom_jvp
def halve(leaf: Any, bad: Any) -> Any:
    """Half a leaf; its derivative is wrong where `bad` is."""
    del bad
    return leaf * 0.5


@halve.defjvp
def _halve(given: Any, tangents: Any) -> Any:
    (leaf, bad), (d, _) = given, tangents
    return leaf * 0.5, d * 0.5 * bad
