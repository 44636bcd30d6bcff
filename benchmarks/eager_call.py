"""Eager calls: what a call outside of `jit` costs when its body was seen before.

The bodies are module-level functions, so that JAX's caches hit: from the second call on, nothing
is traced or compiled, and what is left is dispatch. The loops are short to make that visible.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

import treescan
from benchmarks._by_hand import where_scan, where_step
from benchmarks._harness import Comparison

State = dict[str, Array]

STEPS, ROWS, FEATURES = 8, 4, 4
TARGET = 1.15


def decay(state: State, x: Array) -> tuple[State, Array]:
    """One step: every leaf of the state follows x."""
    state = jax.tree.map(lambda leaf: 0.9 * leaf + x, state)
    return state, x


def noisy(h: Array, x: Array, *, key: Array) -> tuple[Array, Array]:
    """One step that draws noise."""
    h = 0.9 * h + x + jax.random.normal(key, h.shape)
    return h, h


def noisy_by_hand(carry: tuple[Array, Array], inputs: tuple[Array, Array]) -> tuple[tuple[Array, Array], Array]:
    """`noisy` for `lax.scan`: the key travels in the carry, and the position in xs."""
    (h, key), (i, x) = carry, inputs
    h, y = noisy(h, x, key=jax.random.fold_in(key, i))
    return (h, key), y


masked_decay = where_step(decay)


@jax.jit
def jitted_where_scan(state: State, xs: Array, lengths: Array) -> tuple[State, Array]:
    """The hand-written masked scan as one compiled program."""
    return where_scan(decay, state, xs, lengths)


def comparisons() -> Iterator[Comparison]:
    """The comparisons of this suite."""
    xs = jnp.ones((STEPS, ROWS, FEATURES))
    small = _state(1)
    yield Comparison(
        "control, 1 leaf",
        "itself",
        lambda: lax.scan(decay, small, xs),
        lambda: lax.scan(decay, small, xs),
    )
    for leaves in (1, 10, 100):
        yield _plain(leaves, xs)
    yield _gradient(small, xs)
    yield from _options(small, xs)
    yield from _masked(small, xs, jnp.asarray([8, 5, 2, 0]))


def _state(leaves: int) -> State:
    return {f"leaf{i}": jnp.ones((ROWS, FEATURES)) for i in range(leaves)}


def _plain(leaves: int, xs: Array) -> Comparison:
    state = _state(leaves)
    return Comparison(
        f"{leaves} {'leaf' if leaves == 1 else 'leaves'}",
        "jax.lax.scan",
        lambda: treescan.scan(decay, state, xs),
        lambda: lax.scan(decay, state, xs),
        TARGET,
    )


def _gradient(state: State, xs: Array) -> Comparison:
    """What JAX has differentiated once, it keeps with the program of an eager call. That of `lax.scan` has none."""

    def gradient(scan: Callable[..., Any]) -> Callable[[], State]:
        taken = jax.grad(lambda state: sum(jnp.sum(leaf) for leaf in jax.tree.leaves(scan(decay, state, xs))))
        return lambda: taken(state)

    return Comparison("gradient, 1 leaf", "jax.lax.scan", gradient(treescan.scan), gradient(lax.scan), TARGET)


def _options(state: State, xs: Array) -> Iterator[Comparison]:
    """Options against the same thing written by hand around `lax.scan`, eagerly too."""
    key, h = jax.random.key(0), state["leaf0"]
    batch_first = jnp.swapaxes(xs, 0, 1)

    def key_by_hand() -> tuple[Array, Array]:
        (final, _), ys = lax.scan(noisy_by_hand, (h, key), (jnp.arange(STEPS), xs))
        return final, ys

    def axes_by_hand() -> tuple[State, Array]:
        final, ys = lax.scan(decay, state, jnp.moveaxis(batch_first, 1, 0))
        return final, jnp.moveaxis(ys, 0, 1)

    yield Comparison("key=", "fold_in by hand", lambda: treescan.scan(noisy, h, xs, key=key), key_by_hand)
    yield Comparison(
        "in_axes=1",
        "moveaxis by hand",
        lambda: treescan.scan(decay, state, batch_first, in_axes=1),
        lambda: lax.scan(decay, state, jnp.moveaxis(batch_first, 1, 0)),
    )
    yield Comparison(
        "in_axes=1, out_axes=1",
        "moveaxis by hand",
        lambda: treescan.scan(decay, state, batch_first, in_axes=1, out_axes=1),
        axes_by_hand,
    )


def _masked(state: State, xs: Array, lengths: Array) -> Iterator[Comparison]:
    """`mask_scan` called eagerly, against an eager and against a compiled peer."""

    def masked() -> tuple[State, Array]:
        return treescan.mask_scan(decay, state, xs, lengths=lengths)

    def eager_by_hand() -> tuple[State, Array]:
        return lax.scan(masked_decay, state, (xs, jnp.arange(STEPS)[:, None] < lengths))

    yield Comparison("mask_scan, peer eager", "where by hand", masked, eager_by_hand)
    yield Comparison(
        "mask_scan, peer jitted",
        "where by hand in one jit",
        masked,
        lambda: jitted_where_scan(state, xs, lengths),
    )
