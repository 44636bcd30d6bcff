"""`linear_scan` against a Python loop in float64, over random programs: values and all kinds of derivatives."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import treescan
from treescan import linear_scan

pytestmark = pytest.mark.quick

METHODS = ("sequential", "chunked", "parallel")
EVERYDAY, ALL = (12, 173), 210
TOLERANCES = {"float32": 1e-5, "complex64": 1e-5, "float16": 1e-2, "bfloat16": 5e-2}


class Program(NamedTuple):
    """A call of `linear_scan`, and what a loop is told of its rows."""

    options: dict[str, Any]
    arrays: tuple[Any, ...]  # a, b, init, reset_to
    valid: Any  # bool[T, B]
    resets: Any  # bool[T, B]
    dtype: str  # of a call, whose loop has the same numbers in float64
    packed: Any = None


def program(seed: int) -> Program:
    rng = np.random.default_rng(seed)
    pick, flip = (lambda *each: each[rng.integers(len(each))]), (lambda p=0.5: rng.random() < p)
    steps, rows, width = (33 if seed % 20 == 13 else pick(0, 1, 2, 7, 9)), 3, 2
    matrix, is_complex, reverse = flip(0.3), flip(0.3), flip()
    options: dict[str, Any] = {"method": METHODS[seed % 3], "matrix": matrix, "reverse": reverse}
    kind = pick("none", "lengths", "mask", "mask", "packed") if steps else pick("none", "lengths")
    valid, resets = np.ones((steps, rows), bool), np.zeros((steps, rows), bool)
    packed = None
    if kind == "lengths":
        lengths = np.array([steps, 0, rng.integers(steps + 1)])
        valid, options["lengths"] = np.arange(steps)[:, None] < lengths, lengths
    if kind == "mask":
        valid = rng.random((steps, rows)) < 0.6
        valid[:, 1] &= flip()
        options["mask"] = valid
    if kind == "packed":
        counts = list(rng.integers(0, steps + 1, 4))
        packed = treescan.pack([np.zeros((c, width)) for c in counts], rows=rows + 1, length=steps)
        rows, valid, resets = rows + 1, np.asarray(packed.mask), np.asarray(packed.resets)
    elif flip() and steps:
        resets = rng.random((steps, rows)) < 0.4
        options["resets"] = resets
    options["remat"] = pick(None, None, 2, 3) if seed % 3 == 0 else None
    options["fill"] = pick(0, 0, -1.5, "hold")
    options["save"] = pick("all", "all", "last")
    options["time_axis"] = 0 if packed is not None else pick(0, 0, 1)

    def draw(*shape: int) -> np.ndarray:
        real = rng.normal(size=shape)
        return real + 1j * rng.normal(size=shape) if is_complex else real

    dtype = pick("float64", "float64", "float32", "bfloat16", "float16")
    if is_complex:
        dtype = "complex64" if dtype == "float32" else "complex128"
    shape = [pick(steps, steps, 1), pick(rows, rows, 1), width] + [width] * matrix
    a, b, init = 0.4 * draw(*shape), draw(steps, rows, width), draw(rows, width)
    to = draw(rows, width) if (resets.any() or packed is not None) and flip() else None
    arrays = [a, b, None if flip(0.2) else init, to]
    wide = jnp.complex128 if is_complex else jnp.float64
    arrays = [None if x is None else np.asarray(jnp.asarray(x).astype(dtype).astype(wide)) for x in arrays]
    return Program(options, tuple(arrays), valid, resets, dtype, packed)


def called(which: Program, a: Any, b: Any, init: Any, to: Any) -> Any:
    """The call, whose padding is NaN."""
    options, valid, wide = dict(which.options), jnp.asarray(which.valid), b.dtype
    state = "float32" if which.dtype in ("float16", "bfloat16") else which.dtype
    a, b, init = (None if each is None else each.astype(which.dtype) for each in (a, b, init))
    to = None if to is None else to.astype(state)
    if a.shape[:2] == valid.shape:
        a = jnp.where(valid.reshape(valid.shape + (1,) * (a.ndim - 2)), a, jnp.nan)
    b = jnp.where(valid[..., None], b, jnp.nan)
    if which.packed is not None:
        b = which.packed._replace(data=b)
    if options["time_axis"]:
        a, b = jnp.swapaxes(a, 0, 1), jnp.swapaxes(b, 0, 1)
        options |= {name: options[name].T for name in ("mask", "resets") if name in options}
    last, hs = linear_scan(a, b, init, reset_to=to, **options)
    assert (last.dtype, hs.dtype) == (state, which.dtype)
    hs = jnp.swapaxes(hs, 0, 1) if options["time_axis"] and options["save"] == "all" else hs
    return last.astype(wide), hs.astype(wide)


def looped(which: Program, a: Any, b: Any, init: Any, to: Any) -> Any:
    """The law: each row by itself, its valid steps in the order of the run."""
    steps, rows = which.valid.shape
    reverse, fill, matrix = (which.options[name] for name in ("reverse", "fill", "matrix"))
    value = 0 if fill == "hold" else fill
    init = jnp.zeros(b.shape[1:], b.dtype) if init is None else init
    to = init if to is None else to
    a = jnp.broadcast_to(a, (steps, rows, *a.shape[2:]))
    lasts, outs, ends = [], [], []
    spans = [] if which.packed is None else list(zip(*map(np.asarray, which.packed.index), strict=True))
    for row in range(rows):
        order = [t for t in range(steps) if which.valid[t, row]]
        order = order[::-1] if reverse else order
        h, ys, seen = init[row], [jnp.full(b.shape[2:], value, b.dtype)] * steps, False
        everything = dict.fromkeys(range(steps)[:: -1 if reverse else 1])
        for t in everything:
            if which.valid[t, row]:
                place = order.index(t)
                flag = (
                    which.resets[order[place - 1], row] if reverse and place else which.resets[t, row] & (not reverse)
                )
                if which.packed is not None and reverse and not place:
                    flag = True
                h = to[row] if flag else h
                h, seen = (a[t, row] @ h if matrix else a[t, row] * h) + b[t, row], True
                ys[t] = h
            elif fill == "hold" and seen:
                ys[t] = h
        lasts.append(h)
        outs.append(ys)
    for row, start, length in spans:
        ends.append(outs[row][start if reverse else start + length - 1] if length else to[row])
    hs = jnp.stack([jnp.stack(ys) for ys in outs], 1) if steps else jnp.zeros(b.shape, b.dtype)
    last = jnp.stack(lasts)
    have = jnp.asarray(which.valid.any(0))[:, None] & (steps > 0)
    end = jnp.where(have, last, jnp.asarray(value, b.dtype))
    if spans:
        last = jnp.stack(ends)
        end = jnp.where(jnp.asarray([length > 0 for *_, length in spans])[:, None], last, jnp.asarray(value, b.dtype))
    return last, hs if which.options["save"] == "all" else end


def everything(function: Any, which: Program, present: tuple[int, ...], weights: Any, tangents: Any) -> Any:
    """A value, its gradients together and one by one, jvp, hvp, and a mapped gradient."""

    def of(*given: Any) -> Any:
        arrays: list[Any] = [None] * 4
        for place, each in zip(present, given, strict=True):
            arrays[place] = each
        return function(which, *arrays)

    def loss(*given: Any) -> Any:
        pairs = zip(weights, of(*given), strict=True)
        return sum(jnp.sum(w * (jnp.real(y * y) + jnp.imag(y))) for w, y in pairs)

    given = tuple(jnp.asarray(which.arrays[place]) for place in present)
    places = tuple(range(len(given)))
    gradient = jax.grad(loss, places)
    found = {"value": of(*given), "gradient": gradient(*given)}
    found["alone"] = [jax.grad(loss, place)(*given) for place in places[1:]]
    found["jvp"] = jax.jvp(of, given, tangents)[1]
    found["hvp"] = jax.jvp(gradient, given, tangents)[1]
    mapped = [None if place == 0 else 0 for place in present]
    twice = [each if axis is None else jnp.stack([each, 2 * each]) for each, axis in zip(given, mapped, strict=True)]
    found["vmap"] = jax.vmap(gradient, mapped)(*twice)
    return found


def check(seed: int, *, jit: bool = True) -> None:
    which = program(seed)
    rng = np.random.default_rng(seed + 10_000)
    present = tuple(place for place, each in enumerate(which.arrays) if each is not None)
    shapes = jax.eval_shape(lambda: looped(which, *(None if x is None else jnp.asarray(x) for x in which.arrays)))
    weights = [rng.normal(size=shape.shape) for shape in shapes]
    tangents = tuple(
        jnp.asarray(rng.normal(size=which.arrays[place].shape), which.arrays[place].dtype) for place in present
    )
    run = functools.partial(everything, which=which, present=present, weights=weights, tangents=tangents)
    mine = (jax.jit(lambda: run(called)) if jit else lambda: run(called))()
    wanted = jax.jit(lambda: run(looped))()
    for name, expected in wanted.items():
        pairs = zip(jax.tree.leaves(mine[name]), jax.tree.leaves(expected), strict=True)
        for place, (got, want) in enumerate(pairs):
            assert got.dtype == want.dtype, (name, place)
            error = f"{name} {place} of program {seed}, {which.dtype}: {which.options}"
            tolerance = TOLERANCES.get(which.dtype, 1e-9)
            atol = tolerance * max(1, np.max(np.abs(want), initial=0))
            np.testing.assert_allclose(got, want, rtol=tolerance, atol=atol, err_msg=error)


@pytest.mark.parametrize("seed", EVERYDAY)
def test_is_the_loop(seed: int) -> None:
    with jax.enable_x64(True):
        check(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(0, ALL, 12))
def test_is_the_loop_in_more_programs(seed: int) -> None:
    with jax.enable_x64(True):
        for each in range(seed, min(seed + 12, ALL)):
            check(each)


@pytest.mark.parametrize("options", [{}, {"method": "parallel"}, {"remat": 2}, {"lengths": np.array([6, 3, 0])}])
@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2])
def test_float8_which_jax_promotes_to_nothing(dtype, options):
    a, b = (jnp.full((6, 3), 0.5, dtype), (jnp.arange(18, dtype=np.float32).reshape(6, 3) / 8).astype(dtype))

    def run(a, b):
        last, hs = treescan.linear_scan(a, b, **options)
        return last.sum() + hs.astype(np.float32).sum(), (last, hs)

    (_, (last, hs)), grads = jax.value_and_grad(run, (0, 1), has_aux=True)(a, b)
    wide = a.astype(np.float32), b.astype(np.float32)
    (_, expected), of_wide = jax.value_and_grad(run, (0, 1), has_aux=True)(*wide)
    assert last.dtype == np.float32 and {hs.dtype, grads[0].dtype, grads[1].dtype} == {np.dtype(dtype)}
    narrow = [expected[0], *(each.astype(dtype) for each in (expected[1], *of_wide))]
    for got, right in zip((last, hs, *grads), narrow, strict=True):
        np.testing.assert_array_equal(got.astype(np.float32), right.astype(np.float32))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("steps", [1, 2, 9])
def test_of_few_steps(method: str, steps: int) -> None:
    def loss(a: Any, b: Any, init: Any, method: str) -> Any:
        last, hs = linear_scan(a, b, init, method=method)
        return jnp.sum(jnp.sin(last)) + jnp.sum(jnp.cos(hs))

    given = jnp.full((steps, 3), 0.5), jnp.cos(jnp.arange(steps * 3.0)).reshape(steps, 3), jnp.arange(3.0)
    got, want = (jax.value_and_grad(loss, (0, 1, 2))(*given, each) for each in (method, "sequential"))
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_of_no_rows(method: str) -> None:
    def loss(a: Any, b: Any, init: Any) -> Any:
        return sum(map(jnp.sum, linear_scan(a, b, init, method=method)))

    given = jnp.ones((20, 0, 2)), jnp.ones((20, 0, 2)), jnp.ones((0, 2))
    value, gradient = jax.value_and_grad(loss, (0, 1, 2))(*given)
    assert value == 0
    assert [leaf.shape for leaf in gradient] == [leaf.shape for leaf in given]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("ragged", [False, True], ids=["", "lengths"])
def test_devices_that_share_the_factor(method: str, ragged: bool) -> None:
    """In a `shard_map`, b varies over devices and a does not."""
    mesh, spec = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("d",)), jax.sharding.PartitionSpec
    a, b, lengths = jnp.full((48, 1), 0.5), jnp.cos(jnp.arange(144.0)).reshape(48, 3), jnp.array([48, 3, 0])

    def loss(a: Any, b: Any, lengths: Any) -> Any:
        last, hs = linear_scan(a, b, method=method, lengths=lengths if ragged else None)
        return jnp.sum(jnp.sin(hs)) + jnp.sum(last)

    def of_devices(*given: Any) -> Any:
        return jax.lax.psum(loss(*given), "d")

    got = jax.shard_map(
        jax.value_and_grad(of_devices, (0, 1)),
        mesh=mesh,
        in_specs=(spec(), spec(None, "d"), spec("d")),
        out_specs=(spec(), (spec(), spec(None, "d"))),
    )(a, b, lengths)
    value, gradient = jax.value_and_grad(loss, (0, 1))(a, b, lengths)
    np.testing.assert_allclose(got[0], value, rtol=1e-5)
    for one, other in zip(got[1], gradient, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
