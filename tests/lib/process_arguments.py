"""What `test_process_arguments.py` runs in each of two processes: streams whose arguments differ in the second."""

import contextlib
import functools
import json
import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from processes import join

import treescan

T, B, D = 12, 4, 3
XS = np.ones((T + 1, B, D), np.float32)


def step(h: Any, x: Any) -> Any:
    return jnp.tanh(h + x) + h.mean(0), h.sum()


def noisy(h: Any, x: Any, *, key: Any) -> Any:
    return step(h, x + jax.random.normal(key, x.shape))


SHOWS = treescan.meters.Progress("parts", show=lambda h: {"mean": h.mean()}, meter=treescan.meters.Text())
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "nothing": ({}, {}),
    "length": ({}, {"length": T + 1}),
    "part": ({}, {"part": 3}),
    "init": ({}, {"init": np.zeros((B, D), np.int32)}),
    "key": ({"key": 0}, {"key": 1}),
    "save": ({}, {"save": "last"}),
    "lengths": ({"lengths": np.array([12, 3, 4, 5])}, {"lengths": np.array([12, 3, 4, 6])}),
    "check_finite": ({}, {"check_finite": True}),
    "refused": ({}, {"part": 0}),
    "first part": ({"init": np.float32(0)}, {"init": np.float32(0), "length": T + 1}),
    "checkpoint": ({"every": 1}, {"every": 2}),
    "show of progress": ({"progress": SHOWS}, {"progress": True}),
    "again nothing": ({"progress": SHOWS}, {"progress": SHOWS}),
}
"""The options of the first process, and what is other in the second one."""

AROUND: dict[str, Any] = {
    "": contextlib.nullcontext,
    "x64": lambda: jax.enable_x64(True),
    "disable_jit": jax.disable_jit,
    "mesh set": lambda: jax.set_mesh(jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))),
    "Explicit mesh set": lambda: jax.set_mesh(jax.make_mesh((4,), ("d",))),
}
"""Contexts in which the arguments are compared."""


def put(array: Any, *spec: Any) -> Any:
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
    return jax.make_array_from_callback(array.shape, NamedSharding(mesh, PartitionSpec(*spec)), lambda i: array[i])


def stream(folder: str, *, init: Any = None, key: Any = None, every: int | None = None, **options: Any) -> Any:
    options = {"length": T, "part": 4} | options
    init = np.zeros((B, D), np.float32) if init is None else init
    if key is not None:
        options["key"] = jax.random.key(key)
    if every is not None:
        options["checkpoint"] = treescan.Checkpoint(folder, every=every)
    init = put(init, "d") if init.ndim else init
    body = step if key is None else noisy
    if init.ndim == 0:
        body = lambda h, x: (h + x.mean(), None)  # noqa: E731
    return treescan.stream(body, init, lambda start, n: put(XS[start : start + n], None, "d"), **options)


def grown(folder: str) -> Any:
    """Runs over a source that becomes longer twice, after a last part that was shorter, and after a whole one."""
    for length in (6, 8, T):
        h, _ = stream(f"{folder}/grown", every=1, length=length)
    expected, _ = stream(folder)
    assert all((a.data == b.data).all() for a, b in zip(h.addressable_shards, expected.addressable_shards, strict=True))
    return h


def told(run: Any) -> Any:
    """What is raised: its type and text."""
    try:
        jax.block_until_ready(run())
    except Exception as error:
        return type(error).__name__, " ".join(str(error).split())
    return None


def main() -> None:
    logging.getLogger("jax").setLevel(logging.CRITICAL)
    number, _, (folder,) = join(heartbeat_timeout_seconds=30, shutdown_timeout_seconds=30)
    for name, (options, other) in CASES.items():
        print(json.dumps([name, told(functools.partial(stream, folder, **(options | other if number else options)))]))
    for name, context in AROUND.items():
        with context():
            print(json.dumps([name, told(functools.partial(stream, folder, length=T + number))]))
    if number:  # a stream of this process alone waits for nobody
        assert float(treescan.stream(lambda h, x: (h + x, None), 0.0, np.ones(5, np.float32), part=2)[0]) == 5
    print(json.dumps(["at the end", told(functools.partial(grown, folder))]), flush=True)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()
