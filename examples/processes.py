"""One training program on several processes: rows of unequal length.

Each process reads its own rows. In two terminals, or on two machines that
share a folder:

    python examples/processes.py 0 2 localhost:1234 /tmp/run
    python examples/processes.py 1 2 localhost:1234 /tmp/run
"""

# --8<-- [start:first]
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import treescan

if len(sys.argv) != 5:
    sys.exit(__doc__)
number, count, address, folder = sys.argv[1:]
jax.distributed.initialize(
    address,
    num_processes=int(count),
    process_id=int(number),
    heartbeat_timeout_seconds=30,
    shutdown_timeout_seconds=30,
)
# --8<-- [end:first]

# --8<-- [start:program]
BATCHES, STEPS, ROWS, WIDTH = 60, 20, 8, 4
share = ROWS // int(count)
mine = slice(int(number) * share, (int(number) + 1) * share)
mesh = jax.make_mesh(
    (jax.device_count(),), ("data",), axis_types=(AxisType.Auto,)
)


def put(local: np.ndarray, *spec: str | None) -> Array:
    """A global array, of which each process gives its own rows."""
    return jax.make_array_from_process_local_data(
        NamedSharding(mesh, P(*spec)), local
    )


def read(start: int, n: int) -> tuple[Array, Array]:
    """Batches from `start` on: every process reads its own rows."""
    draw = np.random.default_rng(start)
    xs = draw.normal(size=(n, STEPS, ROWS, WIDTH)).astype(np.float32)
    lengths = draw.integers(1, STEPS + 1, (n, ROWS), dtype=np.int32)
    return (
        put(xs[:, :, mine], None, None, "data"),
        put(lengths[:, mine], None, "data"),
    )


def loss(w: Array, xs: Array, lengths: Array) -> Array:
    """How far the sums that the loop computes are from those of the rows."""

    def step(h: Array, x: Array) -> tuple[Array, None]:
        return h + x @ w, None

    h0 = jnp.zeros((ROWS, WIDTH))
    h, _ = treescan.mask_scan(step, h0, xs, lengths=lengths)
    valid = jnp.arange(STEPS)[:, None] < lengths
    sums = jnp.where(valid[..., None], xs, 0).sum(0)
    return jnp.mean((h - sums) ** 2 / lengths[:, None])


def train(w: Array, batch: tuple[Array, Array]) -> tuple[Array, Array]:
    value, gradient = jax.value_and_grad(loss)(w, *batch)
    return w - 0.1 * gradient, value


w: Array = jax.device_put(  # the same on all devices
    np.zeros((WIDTH, WIDTH), np.float32), NamedSharding(mesh, P())
)
w, value = treescan.stream(
    train,
    w,
    read,
    length=BATCHES,
    part=10,
    save="last",
    checkpoint=treescan.Checkpoint(folder, every=2),
    progress=True,
)
print(f"process {number}: loss {float(value):.6f}")
jax.distributed.shutdown()
# --8<-- [end:program]
