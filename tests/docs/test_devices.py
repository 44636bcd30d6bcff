"""What the page of devices says of collectives, counted in the programs that it shows, on eight devices."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hlo import Program
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from test_docs import OF_DEVICES, as_users_run_it, blocks_of, run

import treescan

pytestmark = pytest.mark.devices
__all__ = ["as_users_run_it"]  # a fixture


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    """What the blocks of the page define up to the micro-batches."""
    names: dict[str, Any] = {"__name__": "page"}
    for block in blocks_of(OF_DEVICES[0].read_text()):
        if block.raises is None and "total" not in names:
            run(block, "devices.md", names)
    return names


def sums(program: Program, w: Any) -> int:
    """How many sums over devices have the size of the weights; those of loops, which are not unrolled, count once."""
    return program.collective_sizes().count(w.size)


def of_part(w: Any, part: Any) -> Any:
    return jax.grad(lambda w: jnp.sum(jnp.tanh(part @ w) ** 2))(w)


def in_parts(w: Any, batch: Any) -> Any:
    return treescan.chunk_map(functools.partial(of_part, w), batch, 16, reduce="sum")


def reduced(w: Any, batch: Any) -> Any:
    total = in_parts(jax.sharding.reshard(w, P(reduced={"data"})), batch)
    return jax.sharding.reshard(total, P())


def test_micro_batches_sum_over_devices_once(page: dict[str, Any]) -> None:
    w, batch, over_devices = page["w"], page["batch"], page["over_devices"]
    varied = jax.device_put(jnp.sin(jnp.arange(float(batch.size))).reshape(batch.shape), batch.sharding)
    expected = of_part(w, np.asarray(varied))
    np.testing.assert_allclose(jax.jit(over_devices)(w, varied), expected, rtol=1e-5)
    once, each = Program(over_devices, w, batch), Program(in_parts, w, batch)
    assert (sums(once, w), once.collectives(), once.collectives_in_loops()) == (1, 1, 0)
    assert (sums(each, w), each.collectives_in_loops()) == (1, 1)


def test_reduced_weights_sum_over_devices_once() -> None:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    w, batch = jnp.eye(8) / 2, jnp.sin(jnp.arange(512.0)).reshape(64, 8)
    given = jax.device_put(w, NamedSharding(mesh, P())), jax.device_put(batch, NamedSharding(mesh, P("data")))
    with jax.set_mesh(mesh):
        np.testing.assert_allclose(jax.jit(reduced)(*given), of_part(w, batch), rtol=1e-5)
        program = Program(reduced, *given)
    assert (program.collectives(), program.collectives_in_loops()) == (1, 0)


def test_a_sum_of_parts_that_do_not_vary_is_multiplied(page: dict[str, Any]) -> None:
    """By JAX: the page warns of it."""

    def forgotten(w: Any, batch: Any) -> Any:
        own = treescan.chunk_map(functools.partial(of_part, w), batch, 2, reduce="sum")
        return jax.lax.psum(own, "data")

    w, batch = page["w"], page["batch"]
    over = jax.shard_map(forgotten, mesh=page["mesh"], in_specs=(P(), P("data")), out_specs=P())
    np.testing.assert_allclose(jax.jit(over)(w, batch), 8 * page["total"], rtol=1e-5)


def test_compact_in_a_shard_map_moves_no_rows(page: dict[str, Any]) -> None:
    given = page["init"], page["xs"], page["lengths"]
    whole = functools.partial(treescan.mask_scan, page["step"])
    for got, want in zip(jax.jit(page["compacted"])(*given), page["masked"](*given), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5)
    inside = Program(page["compacted"], *given)
    outside = Program(lambda init, xs, lengths: whole(init, xs, lengths=lengths, compact=True), *given)
    assert inside.collectives_in_loops() == 0 and max(inside.collective_sizes()) <= 100
    assert outside.collectives_in_loops() > 20
