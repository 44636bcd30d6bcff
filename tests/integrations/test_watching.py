"""`check_finite` and `progress` of the loops over flax and nnx modules."""

import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, PartitionSpec as P
from nonfinite import caught

import treescan
from treescan.integrations.flax import RNN, scan
from treescan.integrations.nnx import scan as nnx_scan

pytestmark = pytest.mark.quick

T, B, F = 6, 2, 4
STEP, ROW = 3, 1
WAYS = ("eager", "jit", "disable_jit")
SHARED: dict[str, Any] = {"variable_broadcast": "params", "split_rngs": {"params": False}}
ONES, XS = jnp.ones((B, F)), jnp.ones((T, B, F))


def bar(label: str) -> treescan.meters.Progress:
    return treescan.meters.Progress(
        label, show=lambda carry: {"h": jax.tree.leaves(carry)[0].sum()}, meter=treescan.meters.Text()
    )


class Logs(nn.Module):
    """A cell that is NaN where its inputs are negative."""

    drops: bool = False

    @nn.compact
    def __call__(self, carry: Any, x: Any) -> Any:
        carry = nn.Dense(F)(carry) * 0.1 + jnp.log(x)
        if self.drops:
            carry = nn.Dropout(0.5, deterministic=False)(carry)
        return carry, carry.sum(-1)


def planted(value: float = -1.0) -> Any:
    return XS.at[STEP, ROW].set(value)


def go(way: str, call: Any, *given: Any) -> Any:
    if way == "disable_jit":
        with jax.disable_jit():
            return call(*given)
    return (jax.jit(call) if way == "jit" else call)(*given)


def found() -> Any:
    record = treescan.last_nonfinite()
    assert record is not None and (record.step, record.rows, record.kind) == (STEP, (ROW,), "NaN")
    return record


@pytest.mark.parametrize(
    ("way", "options", "drops"),
    [
        ("eager", {"reverse": True}, False),
        ("jit", {"remat": "nested", "out_axes": 1}, False),
        ("disable_jit", {}, False),
        *(("jit", {}, True), ("disable_jit", {}, True)),  # cells that are traced twice
    ],
    ids=str,
)
def test_a_step_of_flax_scan_is_named(way: str, options: dict[str, Any], drops: bool) -> None:
    roles: dict[str, Any] = {**SHARED, "split_rngs": {"params": False, "dropout": True}, **options}
    layer, plain = (lifted(drops=drops) for lifted in (scan(Logs, **roles, check_finite=True), scan(Logs, **roles)))
    rngs = {"dropout": jax.random.key(1)}
    variables = layer.init({"params": jax.random.key(0), **rngs}, ONES, XS)
    results = (each.apply(variables, ONES, XS, rngs=rngs) for each in (layer, plain))
    jax.tree.map(np.testing.assert_array_equal, *results)
    text = caught(lambda: go(way, lambda xs: layer.apply(variables, ONES, xs, rngs=rngs), planted()))
    assert "`flax.scan` over `Logs`: `carry` became NaN in step 3 of 6 (row 1), first in `log` at" in text
    record = found()
    np.testing.assert_array_equal(record.x.args[0], planted()[STEP])
    if not drops:
        _, ys = Logs().apply({"params": variables["params"]}, record.carry.carry, *record.x.args)
        assert np.isnan(ys).tolist() == [False, True]


@pytest.mark.parametrize(("way", "around"), [("eager", "cell"), ("jit", "loop")])
def test_a_step_of_a_rematerialized_cell_or_loop_is_named(way: str, around: str) -> None:
    roles: dict[str, Any] = {**SHARED, "check_finite": True}
    lifted: Any = scan(nn.remat(Logs), **roles) if around == "cell" else nn.remat(scan(Logs, **roles))

    class Net(nn.Module):
        @nn.compact
        def __call__(self, carry: Any, xs: Any) -> Any:
            return lifted()(carry, xs)[1].sum()

    variables = Net().init(jax.random.key(0), ONES, XS)
    gradient = jax.grad(Net().apply)
    go(way, gradient, variables, ONES, XS)
    text = caught(lambda: go(way, gradient, variables, ONES, planted()))
    assert "`carry` became NaN in step 3 of 6 (row 1), first in `log` at" in text


@pytest.mark.parametrize(
    ("way", "lengths", "options"),
    [
        ("eager", None, {"remat": "nested"}),
        ("jit", None, {}),
        ("eager", (6, 5), {"compact": True}),
        ("jit", (6, 2), {"compact": True}),
    ],
    ids=str,
)
def test_a_step_of_an_rnn_is_named(way: str, lengths: Any, options: dict[str, Any]) -> None:
    rnn = RNN(nn.GRUCell(F), time_major=True, check_finite=True, **options)
    given = {} if lengths is None else {"seq_lengths": jnp.array(lengths)}
    variables = rnn.init(jax.random.key(0), XS)

    def call(xs: Any) -> Any:
        return rnn.apply(variables, xs, **given)

    if lengths == (6, 2):  # it is padding
        go(way, call, planted(jnp.nan))
        return
    text = caught(lambda: go(way, call, planted(jnp.nan)))
    verb = "scan" if lengths is None else "mask_scan"
    assert f"`{verb}` over `GRUCell.__call__`" in text
    assert "`carry` became NaN in step 3 of 6 (row 1), which got it from `inputs`" in text
    found()


@pytest.mark.parametrize(
    ("way", "options"), [("eager", {}), ("jit", {"reverse": True}), ("eager", {"remat": "nested"})], ids=str
)
def test_a_step_of_nnx_scan_is_named(way: str, options: dict[str, Any]) -> None:
    class Sum(nnx.Module):
        def __init__(self) -> None:
            self.total = nnx.Variable(jnp.zeros(B))

    @nnx_scan(check_finite=True, **options)
    def step(module: Any, x: Any) -> Any:
        module.total[...] = module.total[...] * 0.5 + jnp.log(x).sum(-1)
        return module, x

    call = (lambda m, xs: step(m, xs)) if way == "eager" else nnx.jit(lambda m, xs: step(m, xs))
    text = caught(lambda: call(Sum(), planted()))
    assert "`module.total` became NaN in step 3 of 6 (row 1), first in `log` at" in text
    record = found()
    assert list(record.carry) == ["module.total"] and list(record.x) == ["x"]
    np.testing.assert_array_equal(record.x["x"], planted()[STEP])


def test_bars_of_flax_and_of_nnx(capsys: pytest.CaptureFixture[str]) -> None:
    lifted: Any = scan(Logs, **SHARED, progress=bar("cells"))
    layer = lifted()
    variables = layer.init(jax.random.key(0), ONES, XS)
    jax.effects_barrier()
    capsys.readouterr()
    jax.jit(layer.apply)(variables, ONES, XS)
    rnn = RNN(nn.GRUCell(F), time_major=True, progress=bar("rnn"))
    of_rnn = rnn.init(jax.random.key(0), XS)
    jax.effects_barrier()
    said = capsys.readouterr().err
    assert "rnn" not in said  # init of an RNN shows nothing
    rnn.apply(of_rnn, XS, seq_lengths=jnp.array([4, 2]))

    @nnx_scan(in_axes=(nnx.Carry, 0), progress=bar("nnx"))
    def step(carry: Any, x: Any) -> Any:
        return carry + x, x

    step(ONES, XS)
    jax.effects_barrier()
    said += capsys.readouterr().err
    for label, count in {"cells": "6/6", "rnn": "4/4", "nnx": "6/6"}.items():
        assert re.search(rf"{label}: 100%, {count}.*h=", said), said


@pytest.mark.devices
def test_a_bar_of_flax_on_an_explicit_mesh(capsys: pytest.CaptureFixture[str]) -> None:
    """A call of flax is not compiled as a whole. JAX could not compile the callback that begins a run by itself."""
    mesh = jax.make_mesh((8,), ("row",), axis_types=(AxisType.Explicit,))
    layer: Any = scan(Logs, **SHARED, progress=bar("cells"))()
    given = jnp.ones((8, F)), jnp.ones((T, 8, F))
    variables = layer.init(jax.random.key(0), *given)
    want = layer.apply(variables, *given)
    jax.effects_barrier()
    capsys.readouterr()
    for way in WAYS[::2]:
        with jax.set_mesh(mesh):
            sharded = [jax.device_put(a, P(*[None] * (a.ndim - 2), "row")) for a in given]
            got = go(way, lambda sharded=sharded: layer.apply(variables, *sharded))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), got, want)
    jax.effects_barrier()
    assert capsys.readouterr().err.count("cells: 100%, 6/6") == 2
