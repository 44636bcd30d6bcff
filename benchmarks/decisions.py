"""What it costs that a gradient decides nothing again: `remat` against the same plans of `jax.checkpoint`, by hand.

treescan saves the results of comparisons beside what a plan saves. The last body takes a maximum in each step: there
`jax.checkpoint` alone may return a wrong gradient, so its results are not compared.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

import treescan
from benchmarks._harness import Comparison, Memory
from benchmarks.bodies import Body, bodies, gradient_of, gru
from benchmarks.masked import Program, memory

CHUNK = 16
CHECKPOINT, NESTED = "jax.checkpoint by hand", "jax.checkpoint of chunks by hand"
ANY_RESULT = 1e9

Scan = Callable[[Any, Any, Any], Any]  # (params, init, xs)


def comparisons() -> Iterator[Comparison | Memory]:
    """The comparisons of this suite."""
    everything = [*bodies(), *_deciding()]
    yield from _of(everything[0], "control", functools.partial(_by_hand, everything[0]), CHECKPOINT)
    for body in everything:
        yield from _of(body, "step", functools.partial(_ours, body, "step"), CHECKPOINT)
        whole = treescan.Remat("everything_saveable", levels=2, chunk=CHUNK)
        yield from _of(body, "chunks", functools.partial(_ours, body, whole), NESTED)


def smoke() -> Iterator[Comparison | Memory]:
    """One body."""
    (body,) = _deciding()
    yield from _of(body, "step", functools.partial(_ours, body, "step"), CHECKPOINT)


def _deciding() -> list[Body]:
    """A GRU that returns the largest entry of its state, in absolute value."""
    body = next(body for body in bodies() if body.name == "GRU")

    def step(params: Any, h: Array, x: Array) -> tuple[Array, Array]:
        h, _ = gru(params, h, x)
        return h, jnp.max(jnp.abs(h), axis=-1)

    return [Body("GRU with a maximum", step, body.params, body.init, body.xs)]


def _ours(body: Body, remat: Any, params: Any, init: Any, xs: Any) -> Any:
    return treescan.scan(functools.partial(body.step, params), init, xs, remat=remat)


def _by_hand(body: Body, params: Any, init: Any, xs: Any) -> Any:
    step = jax.checkpoint(functools.partial(body.step, params), prevent_cse=False)
    return jax.lax.scan(step, init, xs)


def _by_hand_in_chunks(body: Body, params: Any, init: Any, xs: Any) -> Any:
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def chunk(state: Any, part: Any) -> tuple[Any, Any]:
        return jax.lax.scan(functools.partial(body.step, params), state, part)

    parts = jax.tree.map(lambda leaf: leaf.reshape(-1, CHUNK, *leaf.shape[1:]), xs)
    final, ys = jax.lax.scan(chunk, init, parts)
    return final, jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), ys)


def _of(body: Body, plan: str, ours: Scan, against: str) -> Iterator[Comparison | Memory]:
    theirs = functools.partial(_by_hand if against == CHECKPOINT else _by_hand_in_chunks, body)
    args = body.params, body.init, body.xs
    candidate, peer = Program(gradient_of(ours)), Program(gradient_of(theirs))
    run, other = functools.partial(candidate, *args), functools.partial(peer, *args)
    tolerance = ANY_RESULT if body.name == "GRU with a maximum" else body.tolerance
    yield Comparison(f"{body.name}, {plan}", against, run, other, tolerance=tolerance)
    yield memory(f"memory, {body.name}, {plan}", against, candidate, peer, args, None)
