"""`linear_scan` in mixtures of dtypes against `jax.lax.scan` in float64: thousands of steps, states beyond float16.

Outputs and gradients are what float64 has, rounded once to their own dtype: states are neither kept nor read in less
than float32.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from treescan import linear_scan

pytestmark = pytest.mark.quick

METHODS = ("sequential", "chunked", "parallel")
DTYPES = (  # of a, of b, and of the state
    ("float16", "float16", "float32"),
    ("bfloat16", "bfloat16", "float32"),
    ("float32", "float16", "float32"),
    ("bfloat16", "float16", "float32"),
    ("float16", "float32", "float32"),
    ("float32", "bfloat16", "float32"),
    ("complex64", "complex64", "complex64"),
    ("bfloat16", "complex64", "complex64"),
    ("float64", "float16", "float64"),
    ("float64", "float32", "float64"),
    ("float32", "float64", "float64"),
    ("float64", "complex64", "complex128"),
)
EVERYDAY, ALL = (2, 13, 24, 35), 180


class Program(NamedTuple):
    """A call, its arrays in the widest dtype, and the dtypes that they are given in."""

    options: dict[str, Any]
    arrays: tuple[Any, Any, Any]  # a, b, init
    dtypes: tuple[str, ...]
    valid: Any  # bool[T, B]
    linked: Any  # bool[T, B]


def program(seed: int) -> Program:
    rng = np.random.default_rng(seed)
    pick, flip = (lambda *each: each[rng.integers(len(each))]), (lambda p=0.5: rng.random() < p)
    of_a, of_b, _ = DTYPES[seed % len(DTYPES)]
    of_init = pick(of_a, of_a, "int32")
    steps, rows, width = pick(1, 7, 9, 300, 5000), 3, 2
    options: dict[str, Any] = {"method": METHODS[seed // 2 % 3], "reverse": flip(), "fill": pick(0, -1.5)}
    if options["method"] == "sequential":
        options["remat"] = pick(None, None, 16)
    valid, linked = np.ones((steps, rows), bool), np.ones((steps, rows), bool)
    if flip():
        options["mask"] = valid = rng.random((steps, rows)) < 0.7
    if flip(0.3) and not options["reverse"]:
        options["resets"] = rng.random((steps, rows)) < 0.05
        linked = ~(options["resets"] & valid)

    def draw(dtype: str, *shape: int) -> Any:
        real = rng.normal(size=shape)
        return as_given(real + 1j * rng.normal(size=shape) if "complex" in dtype else real, dtype)

    a = draw(of_a, pick(steps, steps, 1), pick(rows, 1), width)
    a = as_given(a / (abs(a) + pick(0.1, 1.0)) * pick(1.0, -1.0), of_a)
    b = draw(of_b, steps, rows, width)
    if flip():  # states beyond the range of float16
        b = as_given(30_000 + 1000 * b, of_b)
    init = rng.integers(-3, 4, (rows, width)) if of_init == "int32" else draw(of_init, rows, width)
    return Program(options, (a, b, init * 1.0), (of_a, of_b, of_init), valid, linked)


def as_given(values: Any, dtype: str) -> Any:
    """The values, rounded to a dtype, in the widest one."""
    rounded = np.asarray(values).astype(jnp.dtype(dtype))
    return rounded.astype(np.complex128 if "complex" in dtype else np.float64)


def looped(which: Program, a: Any, b: Any, init: Any) -> Any:
    """The law, in the dtype of what is given."""
    dtype = jnp.complex128 if any(map(jnp.iscomplexobj, (a, b, init))) else jnp.float64
    a, b, init = (each.astype(dtype) for each in (a, b, init))

    def step(h: Any, x: Any) -> Any:
        a, b, valid, linked = x
        new = a * jnp.where(linked[:, None], h, init) + b
        h = jnp.where(valid[:, None], new, h)
        return h, jnp.where(valid[:, None], h, which.options["fill"])

    xs = jnp.broadcast_to(a, b.shape), b, jnp.asarray(which.valid), jnp.asarray(which.linked)
    return jax.lax.scan(step, init, xs, reverse=which.options["reverse"])


def with_gradients(run: Any, weights: list[Any]) -> Any:
    """What a call returns, and the gradients of a weighted sum of it by all that have one."""

    def loss(*given: Any) -> Any:
        pairs = zip(weights, run(*given), strict=True)
        return sum(jnp.sum(w * jnp.real(y).astype(jnp.float64)) for w, y in pairs)

    def found(*given: Any) -> Any:
        places = tuple(i for i, each in enumerate(given) if jnp.issubdtype(each.dtype, jnp.inexact))
        return run(*given), jax.grad(loss, places)(*given)

    return jax.jit(found)


def check(seed: int) -> None:
    which, rng = program(seed), np.random.default_rng(seed + 10_000)
    with jax.enable_x64(True):
        exact = tuple(map(jnp.asarray, which.arrays))
        given = [jnp.asarray(each).astype(dtype) for each, dtype in zip(which.arrays, which.dtypes, strict=True)]
        weights = [jnp.asarray(rng.choice([-1.0, 0.5, 2.0], shape)) for shape in (exact[2].shape, exact[1].shape)]
        got, gradients = with_gradients(lambda *g: linear_scan(*g, **which.options), weights)(*given)
        want, expected = with_gradients(lambda *g: looped(which, *g), weights)(*exact)
        state = DTYPES[seed % len(DTYPES)][2]
        assert [each.dtype for each in got] == [state, which.dtypes[1]]
        options = {name: each for name, each in which.options.items() if name not in ("mask", "resets")}
        about = f"program {seed}, {[f'{each.dtype}{list(each.shape)}' for each in given]}: {options}"
        for each, other in zip((*got, *gradients), (*want, *expected), strict=False):
            compare(each, other, state, about)


def compare(got: Any, want: Any, state: str, about: str) -> None:
    """Equal but for one rounding to the dtype, and the roundings of states."""
    limits, kept = jnp.finfo(got.dtype), float(jnp.finfo(state).eps)
    got, want = (np.asarray(each).astype(np.complex128) for each in (got, want))
    for part in (np.real, np.imag):
        a, b = part(got), part(want)
        off = float(limits.eps) * np.abs(b) + float(limits.smallest_normal)
        off = off + 100 * kept * np.max(np.abs(b), initial=0)
        beyond = np.abs(b) > float(limits.max)
        fits = np.where(beyond, np.abs(a) >= float(limits.max), np.abs(a - b) <= off)
        assert fits.all(), f"{about}: {a[~fits][:4]} for {b[~fits][:4]}"


@pytest.mark.parametrize("seed", EVERYDAY)
def test_is_the_loop(seed: int) -> None:
    check(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(0, ALL, 12))
def test_is_the_loop_in_more_programs(seed: int) -> None:
    for each in range(seed, min(seed + 12, ALL)):
        check(each)
