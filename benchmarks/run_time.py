"""Run time: compiled programs under `jit`, an LSTM forward and its gradient; and what `check_finite` costs a loop."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

import treescan
from benchmarks._by_hand import where_scan
from benchmarks._harness import Comparison
from benchmarks._lstm import Params, State, lstm, make_params, normal

STEPS, ROWS, FEATURES, HIDDEN = 512, 32, 64, 128
CELLS = 1024
CHECKED = 1.10  # where the step has a product
TARGET = 1.05  # the programs are the same; what the interleaved runs leave of the noise


Program = Callable[..., tuple[State, Array]]  # (params, xs, *rest) -> (state, ys)


def comparisons() -> Iterator[Comparison]:
    """The comparisons of this suite."""
    params, xs = make_params(FEATURES, HIDDEN), normal(1, (STEPS, ROWS, FEATURES))
    yield from _pairs("control", "itself", _lax, _lax, params, xs)
    yield from _pairs("scan", "jax.lax.scan", _scan, _lax, params, xs, target=TARGET)
    batch_first = jnp.swapaxes(xs, 0, 1)
    yield from _pairs("axes 1", "moveaxis by hand", _axes, _moveaxis, params, batch_first)
    for name, lengths in _lengths().items():
        yield from _pairs(f"mask_scan, {name}", "where by hand", _mask_scan, _where_scan, params, xs, lengths)
    yield from _of_check_finite()


def _of_check_finite() -> Iterator[Comparison]:
    """Loops over 1,024 numbers a row or a step, checked and not."""
    draw = functools.partial(normal, 1)
    products = ("tanh(h @ w + x), 8 x 1024", draw((256, 8, CELLS)), draw((CELLS, CELLS)) / CELLS**0.5, CHECKED)
    elements = ("tanh(h * w + x), 8 x 128", draw((4096, 8, CELLS // 8)), jnp.float32(0.9), None)
    for name, xs, w, target in (products, elements):
        for verb, lengths in ((treescan.scan, None), (treescan.mask_scan, jnp.full(len(xs[0]), len(xs)))):
            run = functools.partial(_checked, verb, lengths)
            plain, checked = (functools.partial(jax.jit(functools.partial(run, on)), w, xs) for on in (False, True))
            yield Comparison(f"check_finite, {verb.__name__}, {name}", "the same without", checked, plain, target)


def _checked(verb: Callable[..., Any], lengths: Array | None, on: bool, w: Array, xs: Array) -> Any:
    def step(h: Array, x: Array) -> tuple[Array, Array]:
        h = jnp.tanh((h @ w if w.ndim else h * w) + x)
        return h, h

    options = {} if lengths is None else {"lengths": lengths}
    return verb(step, jnp.zeros_like(xs[0]), xs, check_finite=on, **options)


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
