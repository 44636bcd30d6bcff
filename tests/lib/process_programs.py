"""What `test_processes.py` runs in each of two processes, of two devices each: prints a line of JSON for each case."""

import contextlib
import dataclasses
import functools
import json
import logging
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from processes import join

import treescan

T, B, D = 6, 4, 3
LENGTHS = np.array([6, 5, 4, 6], np.int32)


def step(h: Any, x: Any) -> Any:
    return jnp.log(h + x)


def layers_of(h: Any, xs: Any, **options: Any) -> Any:
    scale = lambda layer, x: x * layer  # noqa: E731
    return treescan.fold_layers([lambda layer, x: step(x, layer), scale], h, [xs, jnp.ones(T)], **options)


def in_parts(h: Any, xs: Any, **options: Any) -> Any:
    return treescan.stream(lambda h, x: (step(h, x), None), h, xs, part=2, **options)[0]


def until(axis: int | None, h: Any, xs: Any, **options: Any) -> Any:
    return treescan.while_scan(lambda h: h.sum(axis) < 1e9, lambda h, x: (step(h, x), None), h, xs, **options).carry


def grad_of(call: Any) -> Any:
    return jax.grad(lambda h, xs: call(h, xs).sum())


WAYS = {
    "eager": lambda call: call,
    "jit": jax.jit,
    "grad": grad_of,
    "jit of grad": lambda call: jax.jit(grad_of(call)),
    "jit of vmap": lambda call: jax.jit(jax.vmap(call, (1, 2), 1)),
    "jit of grad of checkpoint": lambda call: jax.jit(grad_of(jax.checkpoint(call))),
}
rows = functools.partial(treescan.fold, lengths=LENGTHS)
FORWARD = {
    "fold": functools.partial(treescan.fold, step), "rows": functools.partial(rows, step), "layers": layers_of,
    "until": functools.partial(until, None), "rows until": functools.partial(until, -1),
}  # fmt: skip
FEW = [("Auto", "fold", "eager"), ("Explicit", "fold", "jit")]
ALL = [
    ("Auto", "stream", "eager"),
    *(("Auto", form, way) for form in FORWARD for way in ("eager", "jit", "jit of grad")),
    *(("Auto", "fold", way) for way in ("grad", "jit of vmap", "jit of grad of checkpoint", "jit, mesh set")),
    *(("Explicit", form, way) for form in FORWARD for way in ("eager", "jit of grad", "jit, mesh set")),
]
"""(kind of mesh, form, way)"""


@dataclasses.dataclass(frozen=True)
class Counter(treescan.meters.AbstractProgressMeter):
    """Counts the bars of this process."""

    bars: ClassVar[list[str]] = []

    def init(self, label: str, total: Any) -> Any:
        self.bars.append("open")
        return len(self.bars) - 1

    def step(self, bar: Any, done: int, shown: Any) -> None:
        del bar, done, shown

    def close(self, bar: Any) -> None:
        self.bars[bar] = "closed"


def bars_of(h: Any, xs: Any) -> list[str]:
    """The bars that this process shows of a loop over all processes."""
    for updates in (None, 2):
        shows = treescan.meters.Progress("loop", updates=updates, meter=Counter(), show=lambda h: {"mean": h.mean()})
        jax.block_until_ready(FORWARD["fold"](h, xs, progress=shows))
        jax.effects_barrier()
    return Counter.bars


def arrays(mesh: Any) -> Any:
    """The carry, and xs that are good and bad, in parts that the processes hold."""

    def put(array: Any, *spec: Any) -> Any:
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    good = np.full((T, B, D), 2.0, np.float32)
    bad = good.copy()
    bad[3, 3] = -9.0
    h = put(np.ones((B, D), np.float32), "d")
    return h, [put(xs, None, "d") for xs in (good, bad)]


def outcome(run: Any, h: Any, xs: Any, mesh: Any) -> Any:
    """What was raised, and a number that all processes make together afterwards."""
    error = None
    try:
        jax.block_until_ready(run(h, xs))
        jax.effects_barrier()
    except (treescan.errors.NonFiniteError, jax.errors.JaxRuntimeError) as raised:
        error = type(raised).__name__ if "NonFiniteError" in repr(raised) else repr(raised)
    with contextlib.suppress(Exception):  # what JAX keeps of the failure
        jax.effects_barrier()
    together = jax.jit(jnp.sum, out_shardings=NamedSharding(mesh, PartitionSpec()))(h)
    return error, float(together)


def told() -> Any:
    """The record, and what it holds."""
    record = treescan.last_nonfinite()
    if record is None:
        return None
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves((record.carry, record.x))]
    return str(record), [leaf.shape for leaf in leaves], [float(np.nansum(leaf)) for leaf in leaves]


def main() -> None:
    logging.getLogger("jax").setLevel(logging.CRITICAL)
    number, _, (which,) = join()
    for kind, form, way in FEW if which == "few" else ALL:
        mesh = jax.make_mesh((4,), ("d",), axis_types=(getattr(AxisType, kind),))
        h, (good, bad) = arrays(mesh)
        call = ({"stream": in_parts} | FORWARD)[form]
        plain, comma, _ = way.partition(",")
        with jax.set_mesh(mesh) if comma else contextlib.nullcontext():
            run = WAYS[plain](lambda h, xs, call=call: call(h, xs, check_finite=True))
            outcomes = [outcome(run, h, xs, mesh) for xs in (good, bad, good, bad, good)]
        print(json.dumps({"case": [kind, form, way], "outcomes": outcomes, "told": told()}), flush=True)
    print(json.dumps({"process": number, "bars": bars_of(h, good)}), flush=True)
    error, _ = outcome(jax.jit(lambda h, xs: FORWARD["fold"](h, xs, check_finite=True)), h, bad, mesh)
    print(json.dumps({"last": error}), flush=True)
    jax.distributed.shutdown()  # without it, the first process is aborted where it ends


if __name__ == "__main__":
    main()
