"""Sums, averages and moments against a loop in float64, in all dtypes: thousands of steps, near the ends of a range.

What is seen is what the loop has, rounded once to the dtype of the carry. Gradients are rounded to the dtype of x.
"""

import contextlib
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import treescan
from treescan.carries import ema, moments, running_sum

pytestmark = pytest.mark.quick

KINDS = ("sum", "ema", "unbiased", "moments")
EVERYDAY, ALL = (38, 47, 57, 100, 112, 189), 240
WIDE = {"float16": "float32", "bfloat16": "float32"}  # what is kept


class Program(NamedTuple):
    """A carry, the entries that it collects, and which of them count."""

    kind: str
    layout: str  # "alone", "rows", "shared" or "shared alone", which has no mask
    dtype: str  # of the carry
    xs: Any  # [T, B, ...] of another dtype, perhaps
    mask: Any  # bool[T, B]
    start: Any  # [B, ...], or [...] if all rows share it
    decay: float
    weights: Any  # of the carry's results, two for moments


def program(seed: int) -> Program:
    rng = np.random.default_rng(seed)
    pick, flip = (lambda *each: each[rng.integers(len(each))]), (lambda p=0.5: rng.random() < p)
    kind = KINDS[seed % 4]
    half, others = ("float16", "bfloat16"), ("complex64", "complex64", "complex128") * (kind != "moments")
    dtype = pick(*half, *half, "float32", "float32", "float64", *others)
    given = pick(dtype, dtype, dtype, "int32", {"float64": "float32", "float32": "bfloat16"}.get(dtype, dtype))
    layout = pick("alone", "rows", "shared", "shared", "shared alone")
    long = (5000, 2)
    steps, rows = pick((0, 3), (7, 0), (7, 4), (40, 300), (40, 300), (40, 300), long, long, long)
    inner = pick((), (2,))
    shape = (steps, rows, *inner)
    values = draw(rng, pick("ones", "normal", "large", "cancel"), shape, given)
    if "complex" in given:
        values = values + 1j * draw(rng, pick("ones", "normal", "cancel"), shape, given)
    mask = np.ones((steps, rows), bool)
    if layout in ("rows", "shared"):
        mask = (rng.random((steps, rows)) < 0.7) & (rng.random((steps, 1)) < 0.8) & flip(0.9)
    seen = inner if layout.startswith("shared") else (rows, *inner)
    start = rng.integers(-3, 4, seen) * 0.5
    weights = [pick(-0.5, 1.0, 2.0, 3.0) for _ in range(2)]
    return Program(kind, layout, dtype, as_given(values, given), mask, start, pick(0.0, 0.5, 0.9, 0.999), weights)


def draw(rng: np.random.Generator, what: str, shape: tuple[int, ...], dtype: str) -> Any:
    """Real numbers. Those that cancel are of all sizes; large ones end the range of a half precision."""
    if what == "ones":
        return np.ones(shape)
    if what == "normal":
        return rng.normal(size=shape)
    if what == "large":
        return {"int32": 2.0**20, "float16": 6e4, "float64": 1e300}.get(dtype, 1e34) * rng.choice([-1, 1], shape)
    spread = rng.normal(size=math.prod(shape) // 3) * 10.0 ** rng.uniform(-4, 4, math.prod(shape) // 3)
    values = np.resize(rng.integers(1, 4, shape), math.prod(shape)).astype(float)
    values[: 2 * len(spread)] = np.concatenate([spread, -spread])
    return rng.permutation(np.clip(values, -6e4, 6e4)).reshape(shape)


def as_given(values: Any, dtype: str) -> Any:
    return np.asarray(values).astype(jnp.dtype(dtype))


def as_wide(values: Any) -> Any:
    values = np.asarray(values)
    return values.astype(np.complex128 if np.iscomplexobj(values) else np.float64)


def exact_sum(values: Any) -> Any:
    """Of real or complex numbers, over the first axis."""
    if np.iscomplexobj(values):
        return exact_sum(values.real) + 1j * exact_sum(values.imag)
    flat = values.reshape(len(values), -1)
    return np.array([math.fsum(column) for column in flat.T]).reshape(values.shape[1:])


def looped(which: Program, x: Any, mask: Any, start: Any) -> tuple[list[Any], Any, Any, Any]:
    """The law: what is seen of the entries [T, R, ...] that count; the gradients of x and of the start; and noise.

    The noise is what the result may be off but for its last rounding, in units of the precision that it is kept in.
    """
    (w, v), kind, steps = which.weights, which.kind, [t for t in range(len(x)) if mask[t].any()]
    counts = mask.reshape(*mask.shape, *[1] * (x.ndim - 2))
    size = np.max(np.abs(x[mask]), initial=0.0)
    if kind == "sum":
        noise = 4 * float(jnp.finfo(WIDE.get(which.dtype, which.dtype)).eps) * mask.sum() ** 2 * size
        return (
            [exact_sum(np.concatenate([start[None], x[mask]]))],
            counts * w * np.ones(x.shape),
            np.full(start.shape, w),
            noise,
        )
    if kind == "moments":
        n = mask.sum()
        mean = x[mask].mean(0) if n else np.zeros(x.shape[2:])
        variance = (np.abs(x[mask] - mean) ** 2).mean(0) if n else np.zeros(x.shape[2:])
        gradient = counts * (w + 2 * v * (x - mean)) / max(n, 1)
        return [mean, variance], gradient, None, 20 * size
    value, weight, decay = start, 0.0, which.decay
    for t in steps:
        if kind == "unbiased" and weight == 0:
            value = np.zeros_like(start)
        value = decay * value + (1 - decay) * x[t][mask[t]].mean(0)
        weight = decay * weight + 1 - decay
    share = np.where(weight > 0, weight, 1.0) if kind == "unbiased" else 1.0
    gradient, back = np.zeros(x.shape), np.full(start.shape, w / share)
    for t in reversed(steps):
        gradient[t] = counts[t] * (1 - decay) * back / mask[t].sum()
        back = decay * back
    if kind == "unbiased" and steps:
        back = np.zeros_like(back)
    return (
        [value / share],
        gradient,
        back,
        8 * min(len(steps), 1 / (1 - decay)) * max(size, np.max(np.abs(start), initial=0)),
    )


def wanted(which: Program) -> tuple[list[Any], Any, Any, Any]:
    """`looped`, for all rows together, or for each."""
    x = as_wide(which.xs)
    start = which.start.astype(np.complex128 if "complex" in which.dtype else np.float64)
    if which.layout.startswith("shared"):
        return looped(which, x, which.mask, start)
    rows = [looped(which, x[:, [r]], which.mask[:, [r]], start[r]) for r in range(x.shape[1])]
    if not rows:
        return [start] * (1 + (which.kind == "moments")), x, start, 0.0
    seen, of_x, of_start, noise = zip(*rows, strict=True)
    of_start = None if of_start[0] is None else np.stack(of_start)
    return [np.stack(each) for each in zip(*seen, strict=True)], np.concatenate(of_x, 1), of_start, max(noise)


def seen_by(which: Program, xs: Any, start: Any) -> Any:
    """What the carry shows at the end."""
    shared = which.layout.startswith("shared")
    if which.kind == "sum":
        init = running_sum(start, shared=shared)
    elif which.kind == "moments":
        init = moments(start.shape, which.dtype, shared=shared)
    else:
        init = ema(start, which.decay, debias=which.kind == "unbiased", shared=shared)
    if which.layout.endswith("alone"):
        final = treescan.fold(lambda _, x: x, init, xs)
    else:
        final = treescan.mask_scan(lambda _, x: (x, None), init, xs, mask=jnp.asarray(which.mask))[0]
    seen = final.read()
    return [seen.mean, seen.variance] if which.kind == "moments" else [seen]


@np.errstate(over="ignore", invalid="ignore")
def check(seed: int) -> None:
    which = program(seed)
    values, of_x, of_start, noise = wanted(which)
    with jax.enable_x64(True) if which.dtype in ("float64", "complex128") else contextlib.nullcontext():
        xs, start = jnp.asarray(which.xs), jnp.asarray(which.start).astype(which.dtype)
        wide = WIDE.get(which.dtype, which.dtype)
        places = (0, 1) if jnp.issubdtype(xs.dtype, jnp.inexact) else (1,)

        def loss(xs: Any, start: Any) -> Any:
            pairs = zip(which.weights, seen_by(which, xs, start), strict=False)
            return sum(jnp.real(jnp.sum(w * each.astype(wide))) for w, each in pairs)

        got, gradients = jax.jit(lambda *given: (seen_by(which, *given), jax.grad(loss, places)(*given)))(xs, start)
    unit = float(jnp.finfo(wide).eps) / 2
    about = f"{which.kind} {which.layout} {which.dtype} of {xs.dtype}{list(xs.shape)}, program {seed}"
    for each, want in zip(got, values, strict=True):
        assert each.dtype == which.dtype, about
        own = noise * unit * (1 if each is got[0] else noise)
        compare(each, want, own, about)
    expected = [of_x, of_start] if len(places) == 2 else [of_start]
    for each, want in zip(gradients, expected, strict=True):
        if want is not None:
            size = np.max(np.abs(want), initial=0.0)
            compare(each, want, (0 if which.kind == "sum" else 2000 * unit) * size, f"the gradient of {about}")


def compare(got: Any, want: Any, noise: float, about: str) -> None:
    """Equal but for one rounding to the dtype, and noise."""
    limits = jnp.finfo(got.dtype)
    got, want = as_wide(got), as_wide(want)
    for part in (np.real, np.imag) if np.iscomplexobj(got) else (np.real,):
        a, b = part(got), part(want)
        off = float(limits.eps) * np.abs(b) + noise + float(limits.smallest_normal)
        beyond = np.abs(b) >= float(limits.max)
        fits = np.where(beyond, (np.abs(a) == np.inf) & (np.sign(a) == np.sign(b)), np.abs(a - b) <= off)
        assert fits.all(), f"{about}: {a[~fits][:4]} for {b[~fits][:4]}"


@pytest.mark.parametrize("seed", EVERYDAY)
def test_is_the_loop(seed: int) -> None:
    check(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(0, ALL, 20))
def test_is_the_loop_in_more_programs(seed: int) -> None:
    for each in range(seed, min(seed + 20, ALL)):
        check(each)
