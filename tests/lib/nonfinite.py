"""What the tests of `check_finite` share."""

import contextlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import treescan

ROW_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "reverse": {"reverse": True},
    "chunk": {"chunk": 3},
    "unskipped": {"chunk": 0},
    "compact": {"compact": True},
    "compact in reverse": {"compact": (2,), "chunk": 4, "reverse": True},
    "hold": {"fill": "hold"},
    "last": {"save": "last"},
    "every second": {"save": 2},
    "remat": {"remat": "nested"},
}
"""Options of a `mask_scan`, for forward and backward checks."""


def gradient(way: str, call: Any, *data: Any) -> Any:
    """The derivative of `call(*data, scale)` with respect to the scale at 1, taken in one of several ways."""
    one, last = jnp.float32(1), len(data)
    axes = (*(None for _ in data), 0)
    if way == "disable_jit":
        with jax.disable_jit():
            return jax.grad(call, last)(*data, one)
    if way == "jit":
        return jax.jit(jax.grad(call, last))(*data, one)
    if way == "grad of jit":
        return jax.grad(jax.jit(call), last)(*data, one)
    if way == "vmap of grad":
        return jax.vmap(jax.grad(call, last), axes)(*data, jnp.ones(2))
    if way == "grad of vmap":
        return jax.grad(lambda scale: jax.vmap(call, axes)(*data, scale * jnp.ones(2)).sum())(one)
    return jax.grad(call, last)(*data, one)


def layer_plantings(
    count: int, seed: int, forms: Sequence[str], ways: Sequence[str], sizes: tuple[int, int], everyday: Sequence[int]
) -> list[Any]:
    """Cases (form, way, layer, rows, reverse); `sizes` are those of layers and of rows."""
    draw, (layers, size) = np.random.default_rng(seed), sizes
    found = []
    for i in range(count):
        form, way = forms[i % len(forms)], ways[(i // len(forms)) % len(ways)]
        rows = sorted(draw.choice(size, size=draw.integers(1, size + 1), replace=False).tolist())
        case = form, way, int(draw.integers(layers)), rows, bool(draw.integers(2))
        marks = [] if i in everyday else pytest.mark.slow
        found.append(pytest.param(*case, id=f"{i}-{form}-{way}", marks=marks))
    return found


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
