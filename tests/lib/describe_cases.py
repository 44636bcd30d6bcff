"""Calls with a planted fault each, and the same calls without it."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import treescan
from treescan import Description


class Faulty(NamedTuple):
    """One fault.

    Attributes:
        code: of the finding.
        says: what the finding says, in part.
        describe: describes the call, with the fault or without.
    """

    code: str
    says: str
    describe: Callable[[bool], Description]


def _unchanged_leaf(fault: bool) -> Description:
    w = jnp.ones((4, 4))

    def step(carry, x):
        h = jnp.tanh(carry["h"] @ carry["w"] + x) if fault else jnp.tanh(carry["h"] @ w + x)
        return {**carry, "h": h}, None

    init = {"h": jnp.zeros((8, 4))} | ({"w": w} if fault else {})
    return treescan.describe(treescan.scan, step, init, jnp.ones((100, 8, 4)))


def _unread_output(fault: bool) -> Description:
    def inner(total, x):
        return total + x, jnp.sin(x) if fault else None

    def step(total, x):
        total, _ = jax.lax.scan(inner, total, x)
        return total, None

    return treescan.describe(treescan.scan, step, jnp.zeros(3), jnp.ones((100, 5, 3)))


def _constant_output(fault: bool) -> Description:
    w = jnp.ones(3)

    def step(total, x):
        return total + x * w, {"w": w * 2 if fault else None, "x": total}

    return treescan.describe(treescan.scan, step, jnp.zeros(3), jnp.ones((100, 3)))


def _large_constant(fault: bool) -> Description:
    data = jnp.ones((100, 64))

    def step(i, total):
        return total + (data[i] if fault else 1.0)

    return treescan.describe(treescan.fori, 0, 100, step, jnp.zeros(64))


def _many_scalars(fault: bool) -> Description:
    gains = {f"gain_{i}": jnp.float32(1) for i in range(60 if fault else 3)}

    def step(gains, total, x):
        return total + sum(gains.values()) * x, None

    return treescan.describe(treescan.scan, functools.partial(step, gains), jnp.zeros(3), jnp.ones((100, 3)))


def _weak_type(fault: bool) -> Description:
    init = {"total": jnp.zeros(3), "count": 0 if fault else jnp.float32(0)}

    def step(carry, x):
        return {"total": carry["total"] + x, "count": carry["count"] + jnp.float32(0.5)}, None

    return treescan.describe(treescan.scan, step, init, jnp.ones((100, 3)))


def _rows_closed_over(fault: bool) -> Description:
    scale = jnp.ones(8)

    def step(h, x):
        return (h + x) * (scale[:, None] if fault else 1.0), None

    lengths = jnp.arange(8) * 12
    return treescan.describe(
        treescan.mask_scan, step, jnp.zeros((8, 4)), jnp.ones((100, 8, 4)), lengths=lengths, compact=True
    )


def _separate_products(fault: bool) -> Description:
    w = jnp.ones((4, 4))

    def step(h, x):
        return jnp.tanh(h @ w + x), None

    lengths = jnp.arange(8) * 12
    options = {"chunk": 0} if fault else {}
    return treescan.describe(
        treescan.mask_scan, step, jnp.zeros((8, 4)), jnp.ones((100, 8, 4)), lengths=lengths, **options
    )


def _short_loop(fault: bool) -> Description:
    xs = jnp.ones((3 if fault else 300, 4))
    return treescan.describe(treescan.fold, lambda total, x: total + x, jnp.zeros(4), xs)


def _gathered_weights(fault: bool) -> Description:
    mesh = Mesh(jax.devices(), ("data",))

    def spread(array, *spec):
        return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*spec)))

    def block(layer, x):
        return jnp.tanh(x @ layer["w"])

    layers = {"w": spread(jnp.ones((16, 64, 64)), None, "data" if fault else None)}
    return treescan.describe(treescan.fold_layers, block, spread(jnp.ones((256, 64)), "data"), layers)


def cache_of_rows(fault: bool) -> tuple[Callable[..., Any], Any, dict[str, Any]]:
    """A step that writes one position per row into a cache, its init, and the options that it needs."""
    rows, positions = 4, 512
    init = {"cache": jnp.zeros((rows, positions, 16)), "i": jnp.zeros(rows, jnp.int32)}

    def write(carry, x, at):
        h = jnp.sin(x + carry["i"].astype(x.dtype)[:, None])
        cache = carry["cache"].at[jnp.arange(rows), at].set(h, mode="drop")
        return {"cache": cache, "i": carry["i"] + 1}, h

    def step(carry, x):
        return write(carry, x, carry["i"])

    def shared(carry, x, valid):
        return write(carry, x, jnp.where(valid, carry["i"], positions))

    return (step, init, {}) if fault else (shared, init, {"carry_axes": {"cache": None, "i": 0}})


def until(lengths: jax.Array) -> Callable[[Any], Any]:
    """The condition that a row has taken fewer steps."""
    return lambda carry: carry["i"] < lengths


def _selected_leaf(fault: bool) -> Description:
    step, init, options = cache_of_rows(fault)
    return treescan.describe(
        treescan.while_scan, until(jnp.arange(4) * 9), step, init, jnp.ones((40, 4, 16)), **options
    )


def _selected_leaf_of_mask_scan(fault: bool) -> Description:
    if not fault:
        return _selected_leaf(fault)
    step, init, _ = cache_of_rows(fault)
    return treescan.describe(treescan.mask_scan, step, init, jnp.ones((40, 4, 16)), lengths=jnp.arange(4) * 9)


FAULTS = {
    "unchanged leaf": Faulty("TS001", 'carry["w"]: no step changes it', _unchanged_leaf),
    "unread output": Faulty("TS002", "a loop in the body stacks float32[5,3]", _unread_output),
    "constant output": Faulty("TS003", 'y["w"]', _constant_output),
    "large constant": Faulty("TS004", "data: float32[100,64], 25.0 KiB", _large_constant),
    "many scalars": Faulty("TS005", "60 leaves are single numbers", _many_scalars),
    "weak type": Faulty("TS006", 'carry["count"]: ~int32[] becomes float32[]', _weak_type),
    "rows closed over": Faulty("TS007", "scale: the body closes over", _rows_closed_over),
    "separate products": Faulty("TS008", "the products with w", _separate_products),
    "short loop": Faulty("TS009", "3 steps of about 4 operations each", _short_loop),
    "gathered weights": Faulty("TS010", 'layer["w"]: sharded over `data`', _gathered_weights),
    "selected leaf": Faulty("TS011", "128.0 KiB. A step writes 256 B of it", _selected_leaf),
    "selected leaf of mask_scan": Faulty("TS011", 'carry["cache"]: float32[4,512,16]', _selected_leaf_of_mask_scan),
}
