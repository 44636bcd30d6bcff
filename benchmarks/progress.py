"""Progress: what it costs to show how far a loop is, against the same loop without, and against jax-tqdm.

Both have as many updates as they make unasked: jax-tqdm 20, treescan five a second at most. The bars are those of tqdm,
and are written to nowhere. `jax-tqdm` is optional: `pip install jax-tqdm`.
"""

import contextlib
import importlib
import importlib.util
import io
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

import treescan
from benchmarks._harness import Comparison

SHORT = 32
"""The size of the state whose step takes about ten microseconds. That of one millisecond depends on the machine."""
LENGTHS = {100: 40, 1000: 10, 2000: 10}
"""The lengths of the loops with steps of one millisecond, and how many blocks are measured of each."""
MANY = 20_000
METER = treescan.meters.Tqdm() if importlib.util.find_spec("tqdm") else treescan.meters.Text()
BAR = treescan.meters.Progress("loop", meter=METER)
WITHOUT, PEER = "the same without progress", "jax-tqdm"


def step(state: Array, x: Array) -> tuple[Array, None]:
    """One step: a product of matrices."""
    return jnp.tanh(state @ state + x.astype(state.dtype)), None


def comparisons() -> Iterator[Comparison]:
    """The comparisons of this suite."""
    long = _size_of_a_millisecond()
    for length, blocks in LENGTHS.items():
        yield from _of_default(f"scan, {length} steps of 1 ms", long, length, 1.02, blocks)
    hundred = treescan.meters.Progress("loop", updates=100, meter=METER)
    name, blocks = "scan, 1000 steps of 1 ms, 100 updates", LENGTHS[1000]
    yield Comparison(name, WITHOUT, _quietly(hundred, long, 1000), _quietly(None, long, 1000), blocks=blocks)
    yield from _of_default(f"scan, {MANY} steps of 10 us", SHORT, MANY, None, None)


def smoke() -> Iterator[Comparison]:
    """The comparisons of short loops."""
    for length in (20, 100):
        yield from _of_default(f"scan, {length} steps", SHORT, length, None, None)


def _size_of_a_millisecond() -> int:
    """The size of the state whose step takes one millisecond or a little more on this machine: a multiple of 32."""
    return next(size for size in itertools.count(256, 32) if _seconds_per_step(size) >= 1e-3)


def _seconds_per_step(size: int) -> float:
    run, times = _quietly(None, size, 100), list[float]()
    for _ in range(4):
        began = time.perf_counter()
        run()
        times.append((time.perf_counter() - began) / 100)
    return min(times[1:])


def _of_default(name: str, size: int, length: int, target: float | None, blocks: int | None) -> Iterator[Comparison]:
    shown = _quietly(BAR, size, length)
    yield Comparison(name, WITHOUT, shown, _quietly(None, size, length), target, blocks=blocks)
    if importlib.util.find_spec("jax_tqdm"):
        yield Comparison(name, PEER, shown, _quietly(PEER, size, length), 1.0, blocks=blocks)


def _loop(bar: treescan.meters.Progress | str | None, length: int) -> Callable[[Array, Array], Array]:
    if bar == PEER:
        with_bar: Any = importlib.import_module("jax_tqdm").scan_tqdm(length)(step)
        return jax.jit(lambda init, xs: lax.scan(with_bar, init, xs)[0])
    return jax.jit(lambda init, xs: treescan.scan(step, init, xs, progress=bar)[0])


def _quietly(bar: treescan.meters.Progress | str | None, size: int, length: int) -> Callable[[], Array]:
    run, init, xs = _loop(bar, length), jnp.eye(size) / 2, jnp.arange(length)

    def quiet() -> Array:
        with contextlib.redirect_stderr(io.StringIO()):
            result = jax.block_until_ready(run(init, xs))
            jax.effects_barrier()
        return result

    return quiet
