"""The recipe of 1F1B on eight devices, and the table of memory and idle time on the page of pipelines."""

import functools
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hlo import Program
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import treescan
from examples.recipes.one_forward_one_backward import gradients

pytestmark = pytest.mark.devices

STAGES, LAYERS, ROWS, WIDTH = 4, 16, 4, 32
SPLIT = P(None, "data")
PAGE = Path(__file__).parents[2] / "docs" / "guides" / "pipeline.md"


def init(key: Any) -> dict[str, Any]:
    up, down = jax.random.normal(key, (2, WIDTH, WIDTH)) / WIDTH**0.5
    return {"up": up, "down": down}


def block(layer: Any, x: Any) -> Any:
    x = x + jnp.tanh(x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True)) @ layer["up"]) @ layer["down"]
    return x


def stage(params: Any, x: Any, first_layer: Any) -> Any:
    return treescan.fold_layers(block, x, params)


def loss(y: Any, target: Any) -> Any:
    return jnp.sum((y - target) ** 2)


def on_device(params: Any, xs: Any, targets: Any) -> Any:
    total, of_params, of_xs = gradients(stage, loss, params, xs, targets, axis_name="stage")
    total, of_params = jax.lax.psum((total, of_params), "data")
    return total, of_params, of_xs


def mesh_of() -> Any:
    return jax.make_mesh((2, STAGES), ("data", "stage"), axis_types=(AxisType.Auto,) * 2)


def step() -> Any:
    specs = P("stage"), SPLIT, SPLIT
    return jax.shard_map(on_device, mesh=mesh_of(), in_specs=specs, out_specs=(P(), P("stage"), SPLIT))


@pytest.mark.quick
@pytest.mark.parametrize("count", [8, 2])
def test_it_is_the_gradient_of_the_mean_loss(count: int) -> None:
    stack = treescan.init_layers(init, jax.random.key(0), LAYERS)
    xs, targets = jax.random.normal(jax.random.key(1), (2, count, 2 * ROWS, WIDTH))

    def whole(stack: Any, xs: Any) -> Any:
        return jnp.mean(jax.lax.map(lambda pair: loss(stage(stack, pair[0], 0), pair[1]), (xs, targets)))

    want, (of_stack, of_xs) = jax.jit(jax.value_and_grad(whole, (0, 1)))(stack, xs)
    got = jax.jit(step())(stack, xs, targets)
    for mine, other in zip(jax.tree.leaves(got), jax.tree.leaves((want, of_stack, of_xs)), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=2e-5 * float(jnp.abs(other).max()))


@functools.cache
def program(count: int, rounds: int | None) -> Program:
    """The gradient of a pipeline of so many rounds; None: by 1F1B."""
    mesh = mesh_of()

    def struct(spec: Any, *shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))

    stack = {name: struct(P("stage"), LAYERS, WIDTH, WIDTH) for name in ("up", "down")}
    xs = struct(SPLIT, count, 2 * ROWS, WIDTH)
    if rounds is None:
        return Program(step(), stack, xs, xs)
    run = functools.partial(treescan.pipeline, stage, axis_name="stage", rounds=rounds)
    over = jax.shard_map(run, mesh=mesh, in_specs=(P("stage"), SPLIT), out_specs=SPLIT)
    whole = jax.value_and_grad(lambda stack, xs, targets: loss(over(stack, xs), targets), (0, 1))
    return Program(whole, stack, xs, xs)


def test_devices_exchange_two_micro_batches_a_tick() -> None:
    compiled = program(8, None)
    assert compiled.runs("collective-permute") == 2 * (8 + 2 * (STAGES - 1))
    assert compiled.collectives_in_loops() == 2
    assert compiled.collective_sizes().count(LAYERS // STAGES * WIDTH**2) == 2


ROUNDS: dict[str, int | None] = {"one round": 1, "two rounds": 2, "four rounds": 4, "1F1B": None}


@pytest.mark.skipif(jax.__version_info__[:2] != (0, 10), reason="the table is of this release")
@pytest.mark.parametrize("name", ["one round", "1F1B", *(pytest.param(n, marks=pytest.mark.slow) for n in ROUNDS)])
def test_the_table_is_what_programs_need(name: str) -> None:
    rounds, found = ROUNDS[name], re.search(rf"^\| {name}.*$", PAGE.read_text(), re.MULTILINE)
    assert found
    _, exchanged, *cells = [cell.strip() for cell in found[0].strip("|").split("|")]
    assert int(exchanged) == program(8, rounds).runs("collective-permute")
    for count, cell in zip((8, 32, 128), cells, strict=True):
        idle, ticks = (STAGES - 1, count * (rounds or 1)) if rounds else (2 * (STAGES - 1), count)
        kib, share = map(float, re.findall(r"[\d.]+", cell.replace(",", "")))
        assert share == pytest.approx(100 * idle / (ticks + idle), abs=0.5)
        assert kib == pytest.approx(program(count, rounds).temp_bytes / 1024, rel=0.1)
