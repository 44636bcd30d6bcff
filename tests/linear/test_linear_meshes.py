"""`linear_scan` on eight devices: rows without a collective, and steps that are split over devices."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hlo import Program
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import treescan
from treescan import linear_scan

pytestmark = [pytest.mark.devices, pytest.mark.quick]

T, B, D = 48, 8, 2
RNG = np.random.default_rng(0)
A, BS = (jnp.asarray(RNG.normal(size=(T, B, D)) * scale, jnp.float32) for scale in (0.6, 1))
INIT = jnp.asarray(RNG.normal(size=(B, D)), jnp.float32)
LENGTHS = jnp.array([T, 0, 3, 17, 48, 30, 6, 7])
RESETS = jnp.asarray(RNG.random((T, B)) < 0.1)


def slow(value: Any) -> Any:
    return pytest.param(value, marks=pytest.mark.slow)


def gradients(run: Any) -> Any:
    def loss(a: Any, b: Any, init: Any) -> Any:
        last, hs = run(a, b, init)
        return jnp.sum(last**2) + jnp.sum(jnp.sin(hs))

    return lambda *given: (run(*given), jax.grad(loss, (0, 1, 2))(*given))


def assert_close(got: Any, want: Any) -> None:
    for each, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(each, other, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("method", ["sequential", *map(slow, ["chunked", "parallel"])])
@pytest.mark.parametrize("kind", [slow(AxisType.Auto), AxisType.Explicit])
def test_rows_and_features_need_no_collective(method: str, kind: Any) -> None:
    mesh = jax.make_mesh((4, 2), ("rows", "width"), axis_types=(kind, kind))
    run = gradients(lambda *given: linear_scan(*given, lengths=LENGTHS, method=method))
    with jax.set_mesh(mesh):
        spread = [jax.device_put(each, NamedSharding(mesh, P(None, "rows", "width"))) for each in (A, BS)]
        init = jax.device_put(INIT, NamedSharding(mesh, P("rows", "width")))
        got = jax.jit(run)(*spread, init)
        only = lambda *given: linear_scan(*given, lengths=LENGTHS, method=method)  # noqa: E731
        assert Program(jax.grad(lambda *g: jnp.sum(only(*g)[1] ** 2)), *spread, init).collectives() <= 1  # the sum's
    assert_close(jax.device_get(got), run(A, BS, INIT))


@pytest.mark.parametrize("count", [slow(8), 3])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("method", ["sequential", slow("parallel")])
def test_steps_are_split_over_devices(method: str, reverse: bool, count: int) -> None:
    mesh = jax.make_mesh((count,), ("steps",), axis_types=(AxisType.Auto,), devices=jax.devices()[:count])
    options: dict[str, Any] = {"reverse": reverse, "method": method, "lengths": LENGTHS}
    flags = {} if reverse else {"resets": RESETS}

    def whole(*given: Any) -> Any:
        return linear_scan(*given, reset_to=None if reverse else 0.5, **flags, **options)

    def part(a: Any, b: Any, init: Any, resets: Any) -> Any:
        own = {} if reverse else {"resets": resets, "reset_to": 0.5}
        return linear_scan(a, b, init, axis_name="steps", **own, **options)

    split = P("steps")
    over = jax.shard_map(part, mesh=mesh, in_specs=(split, split, P(), split), out_specs=(P(), split))
    run = lambda *given: over(*given, RESETS)  # noqa: E731
    assert_close(jax.jit(gradients(run))(A, BS, INIT), gradients(whole)(A, BS, INIT))


def test_devices_exchange_a_product_and_a_state_as_often_as_they_double() -> None:
    mesh = jax.make_mesh((8,), ("steps",), axis_types=(AxisType.Auto,))
    split = P("steps")
    run = jax.shard_map(
        lambda a, b: linear_scan(a, b, axis_name="steps")[1], mesh=mesh, in_specs=(split, split), out_specs=split
    )
    spread = [jax.device_put(each, NamedSharding(mesh, split)) for each in (A, BS)]
    program = Program(run, *spread)
    exchanged = program.collective_sizes()
    assert len(exchanged) <= 2 * math.log2(8) and max(exchanged) <= 2 * B * D, exchanged
    gradient = Program(jax.grad(lambda *g: jnp.sum(jnp.cos(run(*g))), (0, 1)), *spread)
    assert max(gradient.collective_sizes()) <= 2 * B * D, gradient.collective_sizes()


def test_steps_that_automatic_axes_split_are_gathered() -> None:
    """Without an error: the types do not show it."""
    mesh = jax.make_mesh((8,), ("steps",), axis_types=(AxisType.Auto,))
    spread = [jax.device_put(each, NamedSharding(mesh, P("steps"))) for each in (A, BS)]
    assert_close(jax.jit(linear_scan)(*spread), linear_scan(A, BS))
    assert Program(linear_scan, *spread).collective_sizes().count(A.size) == 2


def test_matrices_over_devices() -> None:
    mesh = jax.make_mesh((8,), ("steps",), axis_types=(AxisType.Auto,))
    split, a = P("steps"), jnp.asarray(RNG.normal(size=(T, 1, D, D)) * 0.5, jnp.float32)
    run = lambda a, b: linear_scan(a, b, matrix=True, axis_name="steps")  # noqa: E731
    over = jax.shard_map(run, mesh=mesh, in_specs=(split, split), out_specs=(P(), split))
    assert_close(jax.jit(over)(a, BS), linear_scan(a, BS, matrix=True))


def test_lengths_beyond_the_steps_of_all_devices_are_refused() -> None:
    mesh = jax.make_mesh((8,), ("steps",), axis_types=(AxisType.Auto,))
    split = P("steps")

    def run(b: Any) -> Any:
        return linear_scan(0.5, b, lengths=np.full(B, T + 1), axis_name="steps")

    with pytest.raises(treescan.errors.ArgumentError, match=f"between 0 and the {T} steps"):
        jax.shard_map(run, mesh=mesh, in_specs=split, out_specs=(P(), split))(BS)


def split_call(seed: int) -> tuple[dict[str, Any], str, dict[str, Any], dict[str, Any]]:
    """Options of a call with `axis_name`, the layout of b, arrays whose steps are split, and others. Padding is NaN."""
    rng = np.random.default_rng(seed)
    pick, flip = (lambda *each: each[rng.integers(len(each))]), (lambda p=0.5: rng.random() < p)
    dtype, count, rows, width = pick("float32", "float16", "complex64"), 8 * pick(1, 2, 5), 4, 2

    def draw(*shape: int) -> Any:
        real = rng.normal(size=shape)
        return jnp.asarray(real + 1j * rng.normal(size=shape) if dtype == "complex64" else real)

    options: dict[str, Any] = {"reverse": flip(), "matrix": flip(0.3), "save": pick("all", "last", "last", None)}
    options |= {"fill": pick(0, -1.5), "method": pick("sequential", "chunked", "parallel"), "time_axis": pick(0, 1)}
    if options["method"] == "sequential":
        options["remat"] = pick(None, 2)
    layout = pick("whole", "lengths", "mask", "padded")
    lengths = np.array([count, 0, rng.integers(count + 1), rng.integers(count + 1)])
    valid = np.arange(count)[:, None] < lengths if layout in ("lengths", "padded") else np.ones((count, rows), bool)
    valid = rng.random((count, rows)) < [0.0, 0.1, 0.5, 1.0] if layout == "mask" else valid
    options["time_axis"] *= layout != "padded"
    a = 0.5 * draw(pick(count, 1), pick(rows, 1), width, *[width] * options["matrix"])
    if a.shape[:2] == valid.shape:
        a = jnp.where(valid.reshape(*valid.shape, *[1] * (a.ndim - 2)), a, jnp.nan)
    b = jnp.where(valid[..., None], draw(count, rows, width), jnp.nan)
    split, others = {"b": b.astype(dtype)}, {"lengths": jnp.asarray(lengths)}
    (split if len(a) > 1 else others)["a"] = a.astype(dtype)
    wide = "complex64" if dtype == "complex64" else "float32"
    others |= {"init": draw(rows, width).astype(wide)} if flip(0.7) else {}
    if layout == "mask":
        split["mask"] = jnp.asarray(valid)
    if flip() and not options["reverse"]:
        split["resets"] = jnp.asarray(rng.random((count, rows)) < 0.3)
        others |= {"reset_to": draw(rows, width).astype(wide)} if flip() else {}
    return options, layout, split, others


def called(options: dict[str, Any], layout: str, split: dict[str, Any], others: dict[str, Any], **more: Any) -> Any:
    """The call, and what is saved with the steps in front."""
    given, axis = split | others, options["time_axis"]
    given |= {name: jnp.swapaxes(given[name], 0, axis) for name in ("a", "b", "mask", "resets") if name in given}
    lengths, a, b, init = (given.pop(name, None) for name in ("lengths", "a", "b", "init"))
    if layout == "lengths":
        given["lengths"] = lengths
    if layout == "padded":
        b = treescan.Padded(b, lengths)
    last, hs = linear_scan(a, b, init, **given, **options, **more)
    return (last, jnp.swapaxes(hs, 0, axis) if options["save"] == "all" else hs)


@pytest.mark.parametrize("seed", [9, 26, *map(slow, range(27, 60))])
def test_each_option_over_devices_is_that_of_one_device(seed: int) -> None:
    options, layout, split, others = split_call(seed)
    devices = (2, 4, 8)[seed % 3]
    mesh = jax.make_mesh((devices,), ("steps",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])
    own = functools.partial(called, options, layout)
    saved = P("steps") if options["save"] == "all" else P()
    over = jax.shard_map(
        functools.partial(own, axis_name="steps"),
        mesh=mesh,
        in_specs=(P("steps"), P()),
        out_specs=(P(), saved),
        check_vma=bool(seed // 3 % 2),
    )

    def run(function: Any) -> Any:
        def loss(floats: Any, rest: Any) -> Any:
            last, hs = function({**floats[0], **rest[0]}, {**floats[1], **rest[1]})
            squares = [jnp.real(each).astype(jnp.float32) ** 2 for each in (last, hs) if each is not None]
            return sum(jnp.sum(each * jnp.cos(jnp.arange(each.size)).reshape(each.shape)) for each in squares)

        is_float = lambda each: jnp.issubdtype(each.dtype, jnp.inexact)  # noqa: E731
        floats, rest = (
            [{n: x for n, x in given.items() if is_float(x) == kept} for given in (split, others)]
            for kept in (True, False)
        )
        return jax.jit(lambda *given: (function(split, others), jax.grad(loss)(*given)))(floats, rest)

    got, want = run(over), run(own)
    tolerance = 2e-2 if split["b"].dtype == jnp.float16 else 5e-4
    for each, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        size = float(np.max(np.abs(np.asarray(other)), initial=1))
        np.testing.assert_allclose(each, other, rtol=tolerance, atol=tolerance * size, err_msg=f"{layout} {options}")
