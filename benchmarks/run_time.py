"""Run time: compiled programs under `jit`, an LSTM forward and its gradient."""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

import treescan
from benchmarks._by_hand import where_scan
from benchmarks._harness import Comparison

STEPS, ROWS, FEATURES, HIDDEN = 512, 32, 64, 128
TARGET = 1.05  # the programs are the same; what the interleaved runs leave of the noise


class Params(NamedTuple):
    """The weights of an LSTM."""

    inputs: Array  # [F, 4H]
    hidden: Array  # [H, 4H]
    bias: Array  # [4H]


class State(NamedTuple):
    """The carry of an LSTM."""

    h: Array  # [B, H]
    c: Array  # [B, H]


def lstm(params: Params, state: State, x: Array) -> tuple[State, Array]:
    """One step.

    Args:
        params: the weights.
        state: the carry, `[B, H]` each.
        x: `[B, F]`.

    Returns:
        The next state, and its h.
    """
    gates = x @ params.inputs + state.h @ params.hidden + params.bias
    i, f, g, o = jnp.split(gates, 4, axis=-1)
    c = jax.nn.sigmoid(f + 1.0) * state.c + jax.nn.sigmoid(i) * jnp.tanh(g)
    h = jax.nn.sigmoid(o) * jnp.tanh(c)
    return State(h, c), h


Program = Callable[..., tuple[State, Array]]  # (params, xs, *rest) -> (state, ys)


def comparisons() -> Iterator[Comparison]:
    """The comparisons of this suite."""
    params, xs = _params(), _normal(1, (STEPS, ROWS, FEATURES))
    yield from _pairs("control", "itself", _lax, _lax, params, xs)
    yield from _pairs("scan", "jax.lax.scan", _scan, _lax, params, xs, target=TARGET)
    batch_first = jnp.swapaxes(xs, 0, 1)
    yield from _pairs("axes 1", "moveaxis by hand", _axes, _moveaxis, params, batch_first)
    for name, lengths in _lengths().items():
        yield from _pairs(f"mask_scan, {name}", "where by hand", _mask_scan, _where_scan, params, xs, lengths)


def _pairs(
    name: str,
    against: str,
    candidate: Program,
    peer: Program,
    *args: Any,
    target: float | None = None,
) -> Iterator[Comparison]:
    """Two compiled programs, forward and in the gradient with respect to weights and xs."""
    for kind, transform in (("forward", jax.jit), ("gradient", _gradient)):
        yield Comparison(
            f"{name}, {kind}",
            against,
            functools.partial(transform(candidate), *args),
            functools.partial(transform(peer), *args),
            target,
        )


def _gradient(program: Program) -> Callable[..., Any]:
    def loss(*args: Any) -> Array:
        state, ys = program(*args)
        return jnp.mean(ys**2) + jnp.mean(state.c)

    return jax.jit(jax.grad(loss, argnums=(0, 1)))


def _lax(params: Params, xs: Array) -> tuple[State, Array]:
    return lax.scan(functools.partial(lstm, params), _init(), xs)


def _scan(params: Params, xs: Array) -> tuple[State, Array]:
    return treescan.scan(functools.partial(lstm, params), _init(), xs)


def _moveaxis(params: Params, xs: Array) -> tuple[State, Array]:
    state, ys = _lax(params, jnp.moveaxis(xs, 1, 0))
    return state, jnp.moveaxis(ys, 0, 1)


def _axes(params: Params, xs: Array) -> tuple[State, Array]:
    body = functools.partial(lstm, params)
    return treescan.scan(body, _init(), xs, in_axes=1, out_axes=1)


def _mask_scan(params: Params, xs: Array, lengths: Array) -> tuple[State, Array]:
    return treescan.mask_scan(functools.partial(lstm, params), _init(), xs, lengths=lengths)


def _where_scan(params: Params, xs: Array, lengths: Array) -> tuple[State, Array]:
    return where_scan(functools.partial(lstm, params), _init(), xs, lengths)


def _normal(seed: int, shape: tuple[int, ...]) -> Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def _params() -> Params:
    scale = HIDDEN**-0.5
    return Params(
        inputs=scale * _normal(2, (FEATURES, 4 * HIDDEN)),
        hidden=scale * _normal(3, (HIDDEN, 4 * HIDDEN)),
        bias=jnp.zeros(4 * HIDDEN),
    )


def _init() -> State:
    return State(h=jnp.zeros((ROWS, HIDDEN)), c=jnp.zeros((ROWS, HIDDEN)))


def _lengths() -> dict[str, Array]:
    """Batches by how much of them is padding: none, three quarters, nine tenths."""
    draws = np.random.default_rng(0)
    half = draws.integers(1, STEPS // 2 + 1, ROWS)
    tailed = np.minimum(STEPS, np.ceil(20 * (1 + draws.pareto(1.5, ROWS))))
    tailed[0] = STEPS  # one long row, as padding to the longest of a batch has it
    return {
        "full": jnp.full(ROWS, STEPS),
        "at most half": jnp.asarray(half, jnp.int32),
        "long tail": jnp.asarray(tailed, jnp.int32),
    }
