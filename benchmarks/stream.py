"""Streams: parts of a run against one scan of the whole, in time and in memory.

A step takes about one millisecond. The whole has its xs on the device before the clock starts, and the stream reads
them from memory of the host. The memory is the peak of the arrays that JAX holds. `python -m benchmarks.stream` runs a
source of 10 GB, of which only parts exist, and prints the peak of the resident memory.
"""

import functools
import itertools
import resource
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import treescan
from benchmarks._harness import Comparison, Memory

STEPS, CHUNK = 1000, 100
WHOLE = "one scan of the whole"


def step(state: Any, x: Any) -> tuple[Any, Any]:
    """One step: a product of matrices."""
    state = jnp.tanh(state @ state + x)
    return state, state[0]


def comparisons() -> Iterator[Comparison | Memory]:
    """The comparisons of this suite."""
    size = next(size for size in itertools.count(256, 32) if _seconds_per_step(size) >= 1e-3)
    for steps, name in ((STEPS, "all parts whole"), (STEPS - 50, "the last part shorter")):
        yield Comparison(
            f"stream, {steps} steps of 1 ms, part={CHUNK}, {name}",
            WHOLE,
            functools.partial(_streamed, size, steps),
            _scanned(size, steps),
            1.02,
            blocks=12,
        )
    yield Memory(f"arrays of a stream, {20 * CHUNK} steps, part={CHUNK}", "two parts", _peak, _two_parts, 1.1)


def smoke() -> Iterator[Comparison | Memory]:
    """Tiny forms of the same."""
    yield Comparison("stream, 250 steps", WHOLE, functools.partial(_streamed, 8, 250), _scanned(8, 250))
    yield Memory("arrays of a stream", "two parts", _peak, _two_parts)


def _streamed(size: int, steps: int, on_part: Callable[[Any], object] | None = None) -> Any:
    ys = list[Any]()
    xs = np.zeros((steps, size), np.float32)
    state, _ = treescan.stream(
        step, jnp.eye(size) / 2, xs, part=CHUNK, on_part=lambda part: ys.append(np.asarray(part.ys))
    )
    return state, np.concatenate(ys)


def _scanned(size: int, steps: int) -> Callable[[], Any]:
    whole = jax.jit(lambda init, xs: treescan.scan(step, init, xs))
    init, xs = jnp.eye(size) / 2, jnp.zeros((steps, size))

    def run() -> Any:
        state, ys = whole(init, xs)
        return state, np.asarray(ys)

    return run


def _seconds_per_step(size: int) -> float:
    run, times = _scanned(size, 100), list[float]()
    for _ in range(4):
        began = time.perf_counter()
        jax.block_until_ready(run())
        times.append((time.perf_counter() - began) / 100)
    return min(times[1:])


_WIDTH = 10_000


def _narrow(carry: Any, x: Any) -> tuple[Any, Any]:
    return carry + x[0], x * 2


def _two_parts() -> int:
    return 2 * CHUNK * _WIDTH * 4 * 2  # xs and ys


def _peak() -> int:
    most = [0]
    before = {id(each) for each in jax.live_arrays()}

    def on_part(part: Any) -> None:
        most.append(sum(each.nbytes for each in jax.live_arrays() if id(each) not in before))

    def read(start: int, n: int) -> Any:
        return np.full((n, _WIDTH), start, np.float32)

    treescan.stream(_narrow, jnp.float32(0), read, part=CHUNK, length=20 * CHUNK, on_part=on_part)
    return max(most)


def large(gigabytes: float = 10.0) -> tuple[int, float, float]:
    """Streams a source of so many gigabytes.

    Returns:
        The bytes of the source, and the peaks of the resident memory before and after, in bytes.
    """
    length = int(gigabytes * 1e9 / (_WIDTH * 4))

    def read(start: int, n: int) -> Any:
        return np.full((n, _WIDTH), start % 7, np.float32)

    def run(steps: int) -> int:
        treescan.stream(_narrow, jnp.float32(0), read, part=CHUNK, length=steps, on_part=lambda part: part.ys.sum())
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    return length * _WIDTH * 4, run(5 * CHUNK), run(length)


if __name__ == "__main__":
    read, first, peak = large(float(sys.argv[1]) if len(sys.argv) > 1 else 10.0)
    print(f"source {read / 1e9:.1f} GB, resident {first / 1e6:.0f} MB after 5 parts, {peak / 1e6:.0f} MB at the peak")
