"""`remat` and `save`: what a long loop's gradient needs and costs, against what one would write by hand and equinox.

The body is `tanh(c @ W)`, whose carry is large against its weights, over T = 1,024 steps.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import equinox.internal as eqxi
import jax
import jax.numpy as jnp
from jax import Array

import treescan
from benchmarks._harness import Comparison, Compiled, Memory
from benchmarks._lstm import normal

STEPS, FEW_STEPS = 1024, 16
ROWS, WIDTH = 256, 64
EVERY = 16  # outputs that are kept

BY_HAND, EQUINOX = "jax.checkpoint nested by hand", "equinox, checkpointed"
PLAIN, SLICED = "treescan, everything saved", "stacked, then sliced"

TIME_TARGETS = {2: 1.2, 3: 1.5}  # of so many levels, against the gradient that saves everything
SAME = 1.05  # programs that do the same work
SAVE_TARGET = 1.1  # of the outputs that are kept, beside what the loop without any needs

Program = Callable[[Array, Array], Any]  # (weights [D, D], carry [B, D])


def comparisons() -> Iterator[Comparison | Memory]:
    """The comparisons of this suite."""
    yield from _remat(STEPS, TIME_TARGETS, SAME)
    yield from _save(STEPS, SAME, SAVE_TARGET)


def smoke() -> Iterator[Comparison | Memory]:
    """The same with few steps, without targets."""
    yield from _remat(FEW_STEPS, {}, None)
    yield from _save(FEW_STEPS, None, None)


def _step(weights: Array, carry: Array) -> Array:
    return jnp.tanh(carry @ weights)


def _fold(steps: int, remat: treescan.Remat | None, weights: Array, carry: Array) -> Array:
    return treescan.fold(lambda c, _: _step(weights, c), carry, None, steps, remat=remat)


def _nested_by_hand(steps: int, weights: Array, carry: Array) -> Array:
    inner = next(size for size in range(int(steps**0.5), 0, -1) if steps % size == 0)

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def step(c: Array, _: None) -> tuple[Array, None]:
        return _step(weights, c), None

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def chunk(c: Array, _: None) -> tuple[Array, None]:
        return jax.lax.scan(step, c, None, length=inner)

    return jax.lax.scan(chunk, carry, None, length=steps // inner)[0]


def _equinox(steps: int, weights: Array, carry: Array) -> Array:
    final, _ = eqxi.scan(lambda c, _: (_step(weights, c), None), carry, None, steps, kind="checkpointed")
    return final


@functools.cache
def _inputs() -> tuple[Array, Array]:
    return normal(0, (WIDTH, WIDTH)) / WIDTH**0.5, normal(1, (ROWS, WIDTH))


def _compiled(program: Program) -> Compiled:
    return Compiled(jax.jit(program), _inputs())


def _gradient(program: Program) -> Compiled:
    return _compiled(jax.grad(lambda weights, carry: jnp.sum(program(weights, carry) ** 2), argnums=(0, 1)))


def _remat(steps: int, targets: dict[int, float], same: float | None) -> Iterator[Comparison | Memory]:
    plain = _gradient(functools.partial(_fold, steps, None))
    by_hand = _gradient(functools.partial(_nested_by_hand, steps))
    equinox = _gradient(functools.partial(_equinox, steps))
    yield Comparison("control, gradient", "itself", plain, plain)
    for levels in (2, 3):
        ours = _gradient(functools.partial(_fold, steps, treescan.Remat(levels=levels)))
        name = f"{levels} levels, gradient"
        yield Comparison(name, PLAIN, ours, plain, targets.get(levels))
        yield Memory(f"memory, {name}", PLAIN, ours.temporaries, plain.temporaries)
        yield Comparison(name, EQUINOX, ours, equinox, same)
        yield Memory(f"memory, {name}", EQUINOX, ours.temporaries, equinox.temporaries)
        if levels == 2:
            yield Comparison(name, BY_HAND, ours, by_hand, same)
            yield Memory(f"memory, {name}", BY_HAND, ours.temporaries, by_hand.temporaries, same)


def _scan(steps: int, save: Any, weights: Array, carry: Array) -> tuple[Array, Any]:
    return treescan.scan(lambda c, _: (_step(weights, c), jnp.sin(c)), carry, None, steps, save=save)


def _sliced(steps: int, weights: Array, carry: Array) -> tuple[Array, Array]:
    def step(c: Array, _: None) -> tuple[Array, Array]:
        return _step(weights, c), jnp.sin(c)

    final, ys = jax.lax.scan(step, carry, None, length=steps)
    return final, ys[EVERY - 1 :: EVERY]


def _kept_bytes(steps: int) -> int:
    """The outputs that are kept, and what the loop without outputs needs."""
    nothing = _compiled(functools.partial(_scan, steps, None)).allocated()
    return nothing + steps // EVERY * ROWS * WIDTH * 4


def _both(program: Callable[[Array, Array], tuple[Array, Array]]) -> Program:
    def loss(weights: Array, carry: Array) -> Array:
        final, ys = program(weights, carry)
        return jnp.sum(final**2) + jnp.sum(ys**2)

    return jax.grad(loss, argnums=(0, 1))


def _save(steps: int, same: float | None, target: float | None) -> Iterator[Comparison | Memory]:
    ours, sliced = functools.partial(_scan, steps, EVERY), functools.partial(_sliced, steps)
    name = f"save={EVERY}"
    yield Comparison(f"{name}, forward", SLICED, _compiled(ours), _compiled(sliced), same)
    yield Comparison(f"{name}, gradient", SLICED, _compiled(_both(ours)), _compiled(_both(sliced)), same)
    yield Memory(f"memory, {name}, forward", SLICED, _compiled(ours).allocated, _compiled(sliced).allocated)
    kept = functools.partial(_kept_bytes, steps)
    yield Memory(f"memory, {name}, forward", "the outputs that are kept", _compiled(ours).allocated, kept, target)
    ours, sliced = _compiled(_both(ours)), _compiled(_both(sliced))
    yield Memory(f"memory, {name}, gradient", SLICED, ours.temporaries, sliced.temporaries)
