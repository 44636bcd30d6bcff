"""`while_scan` against `jax.lax.while_loop` and the loops of equinox that can be differentiated.

The body is `tanh(c @ W)`, about ten microseconds a step, in loops of at most 10,000 steps that stop sooner.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import treescan
from benchmarks._harness import Comparison, Compiled, Memory
from benchmarks._lstm import normal

LONGEST, SHORT = 10_000, 64
ROWS, WIDTH = 128, 64
WIDTH_OF_ROWS = 128
STOPS = (0.05, 0.2, 0.5, 1.0)  # of the longest loop
GROWTH = (1_000, 10_000, 100_000, 1_000_000)  # bounds of a loop that takes as many steps each time
STEPS = 500

WHILE_LOOP = "jax.lax.while_loop"
EQUINOX: dict[str, Literal["bounded", "checkpointed"]] = {
    "equinox, bounded": "bounded",
    "equinox, checkpointed": "checkpointed",
}
ROWS_TARGET = 1.5  # of a scan of all rows over their mean number of steps
FORWARD_TARGET = 1.2
GRADIENT_TARGET = 1 / 1.5


class State(NamedTuple):
    """What is carried: how often the loop ran, and the values."""

    taken: Array
    values: Array


class Inputs(NamedTuple):
    """What the programs are given: weights [D, D], values [B, D], and after how many steps to stop."""

    weights: Array
    values: Array
    stop: Array


Program = Callable[[Inputs], Array]


def comparisons() -> Iterator[Comparison | Memory]:
    """The comparisons of this suite."""
    yield from _compare(LONGEST, FORWARD_TARGET, GRADIENT_TARGET)
    yield from _growth(GROWTH, STEPS)
    yield from _rows_that_stop(256, 100, ROWS_TARGET)


def smoke() -> Iterator[Comparison | Memory]:
    """The same with few steps, without targets."""
    yield from _compare(SHORT, None, None)
    yield from _growth((SHORT, 4 * SHORT), SHORT // 4)
    yield from _rows_that_stop(8, 4, None)


def _step(weights: Array, state: State) -> State:
    return State(state.taken + 1, jnp.tanh(state.values @ weights))


def _while_scan(longest: int, given: Inputs) -> Array:
    init = State(jnp.int32(0), given.values)

    def step(state: State, _: None) -> tuple[State, None]:
        return _step(given.weights, state), None

    ended = treescan.while_scan(lambda state: state.taken < given.stop, step, init, max_length=longest)
    return ended.carry.values


def _while_loop(longest: int, given: Inputs) -> Array:
    def going(state: State) -> Array:
        return (state.taken < given.stop) & (state.taken < longest)

    init = State(jnp.int32(0), given.values)
    return jax.lax.while_loop(going, functools.partial(_step, given.weights), init).values


def _equinox(longest: int, kind: Literal["bounded", "checkpointed"], given: Inputs) -> Array:
    init = State(jnp.int32(0), given.values)
    step = functools.partial(_step, given.weights)
    return eqxi.while_loop(lambda s: s.taken < given.stop, step, init, max_steps=longest, kind=kind).values


def _inputs(stop: int) -> Inputs:
    return Inputs(normal(0, (WIDTH, WIDTH)) / WIDTH**0.5, normal(1, (ROWS, WIDTH)), jnp.int32(stop))


def _compiled(program: Callable[[Inputs], Any], given: Inputs) -> Compiled:
    return Compiled(jax.jit(program), (given,))


def _gradient(program: Program, given: Inputs) -> Compiled:
    def loss(weights: Array, values: Array, stop: Array) -> Array:
        return jnp.sum(program(Inputs(weights, values, stop)) ** 2)

    return _compiled(lambda given: jax.grad(loss, argnums=(0, 1))(*given), given)


def _compare(longest: int, forward: float | None, gradient: float | None) -> Iterator[Comparison | Memory]:
    ours = functools.partial(_while_scan, longest)
    loop = functools.partial(_while_loop, longest)
    first = _inputs(int(STOPS[0] * longest))
    yield Comparison("control, forward", "itself", _compiled(loop, first), _compiled(loop, first))
    for share in STOPS:
        given = _inputs(int(share * longest))
        details = {"steps": float(given.stop)}
        name = f"forward, {share:.0%} of the steps"
        yield Comparison(name, WHILE_LOOP, _compiled(ours, given), _compiled(loop, given), forward, details)
    for share in STOPS:
        given = _inputs(int(share * longest))
        mine, details = _gradient(ours, given), {"steps": float(given.stop)}
        for against, kind in EQUINOX.items():
            theirs = _gradient(functools.partial(_equinox, longest, kind), given)
            yield Comparison(f"gradient, {share:.0%} of the steps", against, mine, theirs, gradient, details)
            if share == STOPS[-1]:
                yield Memory("memory, gradient", against, mine.temporaries, theirs.temporaries)


def _rows_that_stop(rows: int, mean: int, target: float | None) -> Iterator[Comparison]:
    """Rows that stop after exponentially distributed numbers of steps, with `compact`.

    The work is the sum of these numbers. A scan of all rows over their mean does as much, though not the same: of the
    results only that they are finite is compared. A mapped `jax.lax.while_loop` does the same.
    """
    steps = np.ceil(np.random.default_rng(0).exponential(mean, rows))
    left, length = jnp.asarray(steps, jnp.float32), 10 * mean
    given = normal(0, (WIDTH_OF_ROWS, WIDTH_OF_ROWS)) / WIDTH_OF_ROWS**0.5, normal(1, (rows, WIDTH_OF_ROWS))

    def ours(weights: Array, values: Array) -> Array:
        def step(carry: tuple[Array, Array], _: None) -> tuple[tuple[Array, Array], None]:
            return (carry[0] - 1, jnp.tanh(carry[1] @ weights)), None

        init = left, values
        return treescan.while_scan(lambda c: c[0] > 0, step, init, max_length=length, compact=True).carry[1]

    def whole(weights: Array, values: Array) -> Array:
        number = int(np.ceil(steps.mean()))
        return jax.lax.scan(lambda h, _: (jnp.tanh(h @ weights), None), values, length=number)[0]

    def mapped(weights: Array, values: Array) -> Array:
        def one(left: Array, h: Array) -> Array:
            init = left, h
            return jax.lax.while_loop(lambda c: c[0] > 0, lambda c: (c[0] - 1, jnp.tanh(c[1] @ weights)), init)[1]

        return jax.vmap(one)(left, values)

    def finite(function: Callable[..., Any]) -> Callable[[], Array]:
        run = jax.jit(lambda: jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(function(*given))]))
        return lambda: run()

    def gradient(function: Callable[..., Array]) -> Callable[..., Any]:
        return jax.grad(lambda *given: jnp.sum(function(*given) ** 2), (0, 1))

    against, details = "a scan over the mean", {"sum of steps": float(steps.sum()), "most": float(steps.max())}
    yield Comparison("rows that stop, forward", against, finite(ours), finite(whole), target, details)
    mine, theirs = finite(gradient(ours)), finite(gradient(whole))
    yield Comparison("rows that stop, gradient", against, mine, theirs, target, details)
    yield Comparison("rows that stop, forward", "mapped while_loop", finite(ours), finite(mapped), None, details)


def _growth(bounds: tuple[int, ...], steps: int) -> Iterator[Comparison]:
    """The same steps under ever larger bounds, against the smallest: what the steps that are not taken cost."""
    given = _inputs(steps)
    base = _compiled(functools.partial(_while_scan, bounds[0]), given)
    for bound in bounds[1:]:
        ours = _compiled(functools.partial(_while_scan, bound), given)
        yield Comparison(f"forward, {steps} of {bound:,} steps", f"of {bounds[0]:,} steps", ours, base)
