"""What devices exchange, and what they hold, counted in the compiled programs of a pipeline on eight devices."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hlo import Program
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import treescan

pytestmark = pytest.mark.devices

STAGES, ROWS = 4, 16


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


def block(layer: Any, x: Any) -> Any:
    return x + jnp.tanh(x @ layer["up"]) @ layer["down"]


def program(rounds: int, count: int, layers: int = 8, width: int = 32, remat: Any = None) -> Program:
    """The gradient of a pipeline, of weights and micro-batches."""
    mesh = jax.make_mesh((2, STAGES), ("data", "stage"), axis_types=(AxisType.Auto,) * 2)

    def stage(params: Any, x: Any, first_layer: Any) -> Any:
        return treescan.fold_layers(block, x, params, remat=remat)

    def on_device(params: Any, xs: Any) -> Any:
        return treescan.pipeline(stage, params, xs, axis_name="stage", rounds=rounds)

    split = P(None, "data")
    over = jax.shard_map(on_device, mesh=mesh, in_specs=(P("stage"), split), out_specs=split)

    def struct(spec: Any, *shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))

    stack = {name: struct(P("stage"), layers, width, width) for name in ("up", "down")}
    xs = struct(split, count, ROWS, width)
    return Program(jax.value_and_grad(lambda *given: jnp.sum(jnp.cos(over(*given))), (0, 1)), stack, xs)


@pytest.mark.parametrize(("rounds", "count"), [(1, 8), slow(1, 5), (2, 8), slow(2, 12)])
def test_devices_exchange_a_micro_batch_a_tick(rounds: int, count: int) -> None:
    compiled = program(rounds, count, width=24)
    assert compiled.runs("collective-permute") == 2 * (count * rounds + STAGES - 1)
    weights, all_of_xs = 8 // STAGES * 24 * 24, count * ROWS // 2 * 24
    sizes = compiled.collective_sizes()
    assert sizes.count(weights) == 2  # the sum of each weight over the devices that split the batch, after the loop
    assert sizes.count(all_of_xs) == 2  # what the last stage returned, and the gradient of what the first one is given
    assert compiled.collectives_in_loops() == 2
    assert compiled.runs("all-reduce") == compiled.collectives() - 2 <= 4  # XLA may join sums, that of the loss too
    others = ("all-gather", "all-to-all", "reduce-scatter")
    assert not any(compiled.runs(name) for name in others)


@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize("remat", [None, slow("step")])
def test_no_copy_of_the_weights_is_in_flight(remat: Any, rounds: int) -> None:
    """Beside the sum of their gradients there is one gradient of a round, and with several one round's weights."""
    layers, width = 16, 128
    weights = 4 * 2 * layers // STAGES * width**2
    ticks = 8 * rounds + STAGES - 1
    micro_batch = 4 * ROWS // 2 * width
    beside = (rounds == 1 or 1.5) * weights + 4 * ticks * micro_batch
    found = program(rounds, 8, layers, width, remat).temp_bytes
    assert weights < found < weights + beside


def test_what_is_saved_of_a_tick_is_what_goes_in() -> None:
    micro_batch, few, many = 4 * ROWS // 2 * 32, program(1, 16).temp_bytes, program(1, 80).temp_bytes
    assert (many - few) / 64 < 5 * micro_batch
