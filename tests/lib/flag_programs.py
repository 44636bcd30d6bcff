"""A small set of programs, one or two for each verb, that are right or wrong by an eager loop in Python.

They run under the flags of JAX by which users look for mistakes, and under those that JAX is about to turn on. Padding
holds NaN, rows are ragged, and one of them is empty.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import treescan

LENGTH, ROWS, WIDTH = 5, 3, 2
LENGTHS = np.array([2, 0, 5])
MASK = np.arange(LENGTH)[:, None] < LENGTHS
RESETS = np.arange(LENGTH)[:, None] == np.array([1, 1, 3])


class Given(NamedTuple):
    """What a program is a function of: all arrays are on the device already. `whole` is xs without padding."""

    w: jax.Array
    h: jax.Array
    xs: jax.Array
    whole: jax.Array
    lengths: jax.Array
    resets: jax.Array
    start: jax.Array
    steps: jax.Array


def given(dtype: Any = np.float32) -> Given:
    """The arguments, NaN where a row has no data."""
    rng = np.random.default_rng(0)
    w, h, xs = (rng.uniform(-1, 1, shape) for shape in [(WIDTH, WIDTH), (ROWS, WIDTH), (LENGTH, ROWS, WIDTH)])
    xs[~MASK] = np.nan
    floats = (array.astype(dtype) for array in (w, h, xs, np.nan_to_num(xs, nan=0.5)))
    return jax.device_put(Given(*floats, LENGTHS.astype(np.int32), RESETS, np.int32(0), np.int32(3)))


def body_of(w: jax.Array) -> Callable[..., Any]:
    def body(carry: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        carry = jnp.tanh(carry @ w + x)
        return carry, jnp.sin(carry)

    return body


def goes_on(carry: jax.Array) -> jax.Array:
    return jnp.sum(carry) < jnp.asarray(4, carry.dtype)


# What each program stands for, a step at a time.


def loop(a: Given, xs: Any, *, valid: Any = None, resets: Any = None, reverse: bool = False, hold: bool = False) -> Any:
    """The loop in Python over steps; of rows that are not valid the carry stays, and y is 0 or the one before."""
    valid = np.ones((LENGTH, ROWS), bool) if valid is None else valid
    carry, ys, last = a.h, [jnp.zeros_like(a.h)] * LENGTH, jnp.zeros_like(a.h)
    for t in range(LENGTH)[::-1] if reverse else range(LENGTH):
        if resets is not None:
            carry = jnp.where((resets[t] & valid[t])[:, None], a.h, carry)
        x = jnp.where(valid[t][:, None], xs[t], jnp.zeros_like(xs[t]))
        new, y = body_of(a.w)(carry, x)
        carry = jnp.where(valid[t][:, None], new, carry)
        last = jnp.where(valid[t][:, None], y, last)
        ys[t] = last if hold else jnp.where(valid[t][:, None], y, jnp.zeros_like(y))
    return carry, jnp.stack(ys)


def loop_until(a: Given) -> Any:
    """The loop with a condition, all rows of which go on together."""
    carry, ys, xs = a.h, [], a.whole
    goes = jnp.ones((), bool)
    for t in range(LENGTH):
        goes = goes & goes_on(carry)
        new, y = body_of(a.w)(carry, xs[t])
        carry = jnp.where(goes, new, carry)
        ys.append(jnp.where(goes, y, jnp.zeros_like(y)))
    return carry, jnp.stack(ys)


def _fold(a: Given) -> jax.Array:
    return loop(a, a.whole)[0]


def _fori(a: Given) -> jax.Array:
    carry = a.h
    for t in range(LENGTH):
        carry = jnp.where(t < a.steps, body_of(a.w)(carry, a.whole[0])[0], carry)
    return carry


def _masked(**options: Any) -> Callable[[Given], Any]:
    return lambda a: loop(a, a.xs, valid=MASK, **options)


def _unmasked(a: Given) -> Any:
    return loop(a, a.whole)


# The same by the verbs.


def masked(**options: Any) -> Callable[[Given], Any]:
    return lambda a: treescan.mask_scan(body_of(a.w), a.h, a.xs, lengths=a.lengths, **options)


def scanned(**options: Any) -> Callable[[Given], Any]:
    return lambda a: treescan.scan(body_of(a.w), a.h, a.whole, **options)


def folded(a: Given) -> Any:
    return treescan.fold(lambda carry, x: body_of(a.w)(carry, x)[0], a.h, a.whole, remat="nested")


def accumulated(a: Given) -> Any:
    return treescan.accumulate(lambda carry, x: body_of(a.w)(carry, x)[0], a.h, a.whole, remat="step")


def _accumulated(a: Given) -> Any:
    carry, states = a.h, []
    for x in a.whole:
        carry, _ = body_of(a.w)(carry, x)
        states.append(carry)
    return jnp.stack(states)


def counted(a: Given) -> Any:
    step = lambda i, carry: body_of(a.w)(carry, a.whole[0])[0]  # noqa: E731
    return treescan.fori(a.start, a.steps, step, a.h, max_length=LENGTH)


def ended(a: Given) -> Any:
    result = treescan.while_scan(goes_on, body_of(a.w), a.h, a.whole)
    return result.carry, result.ys


def layers(verb: Callable[..., Any]) -> Callable[[Given], Any]:
    def run(a: Given) -> Any:
        block = lambda layer, h: body_of(a.w)(h, layer)  # noqa: E731
        block = (lambda layer, h: body_of(a.w)(h, layer)[0]) if verb is treescan.fold_layers else block
        return verb(block, a.h, a.whole, remat="step")

    return run


def lifted(a: Given) -> Any:
    def function(variables: Any, rngs: Any, carry: jax.Array, x: jax.Array) -> Any:
        del rngs
        return body_of(variables["params"]["w"])(carry, x), {}

    run = treescan.lift(function, variable_broadcast="params")
    return run({"params": {"w": a.w}}, {}, a.h, a.whole)[0]


class Program(NamedTuple):
    """A program by a verb, and what it stands for."""

    run: Callable[[Given], Any]
    oracle: Callable[[Given], Any]


PROGRAMS = {
    "scan": Program(scanned(), _unmasked),
    "scan_nested": Program(scanned(remat="nested"), _unmasked),
    "fold": Program(folded, _fold),
    "accumulate": Program(accumulated, _accumulated),
    "fori": Program(counted, _fori),
    "while_scan": Program(ended, loop_until),
    "mask_scan": Program(masked(), _masked()),
    "mask_hold": Program(masked(fill="hold", reverse=True), _masked(hold=True, reverse=True)),
    "mask_compact": Program(masked(chunk=2, compact=True, remat="nested"), _masked()),
    "mask_plain": Program(masked(chunk=0), _masked()),
    "mask_resets": Program(
        lambda a: masked(resets=a.resets, chunk=2)(a), lambda a: loop(a, a.xs, valid=MASK, resets=RESETS)
    ),
    "scan_layers": Program(layers(treescan.scan_layers), _unmasked),
    "fold_layers": Program(layers(treescan.fold_layers), _fold),
    "lift": Program(lifted, _unmasked),
}


# What is compared.


def results(run: Callable[[Given], Any], a: Given) -> Any:
    """The values, the gradient, the tangents, and both of a vmapped program."""

    def total(w: jax.Array, h: jax.Array, xs: jax.Array, whole: jax.Array) -> tuple[jax.Array, Any]:
        out = run(a._replace(w=w, h=h, xs=xs, whole=whole))
        return sum((jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(out)), start=jnp.zeros((), h.dtype)), out

    smooth = a.w, a.h, a.xs, a.whole
    (_, out), gradient = jax.value_and_grad(total, (0, 1, 2, 3), has_aux=True)(*smooth)
    d_out = jax.jvp(lambda *args: total(*args)[0], smooth, tuple(map(jnp.ones_like, smooth)))[1]
    stacked = jnp.stack([a.h, a.h + a.h])
    each = jax.vmap(jax.grad(lambda h: total(a.w, h, a.xs, a.whole)[0]))(stacked)
    return out, gradient, d_out, each


@functools.cache
def expected(name: str, dtype: Any) -> Any:
    """The results of what a program stands for."""
    return _compiled(PROGRAMS[name].oracle, given(dtype))


_compiled = jax.jit(results, static_argnums=0)


def actual(name: str, dtype: Any, *, compiled: bool) -> Any:
    """The results of a program, as one program of XLA or eagerly."""
    return (_compiled if compiled else results)(PROGRAMS[name].run, given(dtype))
