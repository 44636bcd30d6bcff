"""Progress: what it costs to show how far a loop is, against the same loop without, and against jax-tqdm.

jax-tqdm makes 20 updates by default, treescan 100.
The bars are those of tqdm, and are written to nowhere. `jax-tqdm` is optional: `pip install jax-tqdm`.
"""

import contextlib
import importlib
import importlib.util
import io
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

import treescan
from benchmarks._harness import Comparison

SHORT, LONG = 32, 512
"""The sizes of the state: steps of about ten microseconds, and of one millisecond."""
STEPS = {SHORT: 20_000, LONG: 2_000}
BLOCKS = {SHORT: None, LONG: 6}
METER = treescan.Tqdm() if importlib.util.find_spec("tqdm") else treescan.Text()


def step(state: Array, x: Array) -> tuple[Array, None]:
    """One step: a product of matrices."""
    return jnp.tanh(state @ state + x.astype(state.dtype)), None


def comparisons() -> Iterator[Comparison]:
    """The comparisons of this suite."""
    for size, about in ((LONG, "1 ms a step"), (SHORT, "10 us a step")):
        init, xs = jnp.eye(size) / 2, jnp.arange(STEPS[size])
        shown = _quietly(_shown(treescan.Progress("loop", meter=METER)), init, xs)
        plain = _quietly(_shown(None), init, xs)
        target = 1.02 if size == LONG else None
        yield Comparison(
            f"scan, {about}, 100 updates", "the same without progress", shown, plain, target, blocks=BLOCKS[size]
        )
        if importlib.util.find_spec("jax_tqdm"):
            peer = _quietly(_by_jax_tqdm(STEPS[size]), init, xs)
            twenty = _quietly(_shown(treescan.Progress("loop", updates=20, meter=METER)), init, xs)
            yield Comparison(f"scan, {about}, 20 updates", "jax-tqdm, as many", twenty, peer, 1.0, blocks=BLOCKS[size])
            yield Comparison(f"scan, {about}, 100 updates", "jax-tqdm, 20 updates", shown, peer, blocks=BLOCKS[size])


def _shown(progress: treescan.Progress | None) -> Callable[[Array, Array], Array]:
    return jax.jit(lambda init, xs: treescan.scan(step, init, xs, progress=progress)[0])


def _by_jax_tqdm(steps: int) -> Callable[[Array, Array], Array]:
    with_bar: Any = importlib.import_module("jax_tqdm").scan_tqdm(steps)(step)
    return jax.jit(lambda init, xs: lax.scan(with_bar, init, xs)[0])


def _quietly(run: Callable[[Array, Array], Array], init: Array, xs: Array) -> Callable[[], Array]:
    def quiet() -> Array:
        with contextlib.redirect_stderr(io.StringIO()):
            result = jax.block_until_ready(run(init, xs))
            jax.effects_barrier()
        return result

    return quiet
