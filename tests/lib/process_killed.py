"""What `test_process_killed.py` runs in several processes: a long stream with checkpoints, until one dies."""

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from processes import join

import treescan

T, B, D, CHUNK = 240, 12, 3, 4  # twelve rows: for one, two, three and four processes
HEARTBEAT = 10
INIT = np.linspace(-1, 1, B * D, dtype=np.float32).reshape(B, D)
XS = np.random.default_rng(0).normal(size=(T, B, D)).astype(np.float32)


def step(h: Any, x: Any) -> Any:
    h = jnp.tanh(h + x - h.mean(0, keepdims=True))  # each step exchanges the mean over all rows
    return h, h.sum(-1)


def main() -> None:
    number, count, (folder, pause, fails) = join(
        heartbeat_timeout_seconds=HEARTBEAT, shutdown_timeout_seconds=HEARTBEAT
    )
    mesh = jax.make_mesh((jax.device_count(),), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    mine = np.array_split(np.arange(B), count)[number]

    def put(whole: Any, *spec: Any) -> Any:
        return jax.make_array_from_process_local_data(jax.NamedSharding(mesh, jax.P(*spec)), whole)

    def source(start: int, n: int) -> Any:
        return put(XS[start : start + n, mine], None, "d")

    def on_part(part: treescan.types.Part[Any, Any]) -> None:
        time.sleep(float(pause))
        print("part", part.start, flush=True)
        if part.start == 4 * CHUNK and number == int(fails):
            raise ValueError

    print("begins", flush=True)
    try:
        checkpoint = treescan.Checkpoint(folder, every=2)
        init = put(INIT[mine], "d")
        h, _ = treescan.stream(
            step, init, source, part=CHUNK, length=T, on_part=on_part, checkpoint=checkpoint, donate=True
        )
    except Exception as error:
        print("raised", type(error).__name__, flush=True)
        raise
    print("ends", float(jnp.abs(h).sum()), float((h**3).sum()), flush=True)
    if count > 1:
        jax.distributed.shutdown()


if __name__ == "__main__":
    main()
