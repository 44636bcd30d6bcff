"""`linear_scan` on eight devices: rows without a collective, and steps that are split over devices."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hlo import Program
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

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


def test_matrices_over_devices() -> None:
    mesh = jax.make_mesh((8,), ("steps",), axis_types=(AxisType.Auto,))
    split, a = P("steps"), jnp.asarray(RNG.normal(size=(T, 1, D, D)) * 0.5, jnp.float32)
    run = lambda a, b: linear_scan(a, b, matrix=True, axis_name="steps")  # noqa: E731
    over = jax.shard_map(run, mesh=mesh, in_specs=(split, split), out_specs=(P(), split))
    assert_close(jax.jit(over)(a, BS), linear_scan(a, BS, matrix=True))
