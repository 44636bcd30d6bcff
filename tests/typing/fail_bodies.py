"""Bodies that do not fit: exactly the lines marked `# error` are errors to pyright and mypy. Never run."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from treescan import accumulate, fold, fori, mask_scan, pad, scan

xs, one, key, lengths = jnp.arange(3.0), jnp.ones(()), jax.random.key(0), jnp.array([3, 1])


class State(NamedTuple):
    h: Array


class Other(NamedTuple):
    h: Array


def step(carry: State, x: Array) -> tuple[State, Array]:
    return carry, x


def pair_step(carry: State, x: tuple[Array, Array]) -> tuple[State, Array]:
    return carry, x[0]


def idle_step(carry: State, x: None) -> tuple[State, None]:
    return carry, None


def changing_step(carry: State, x: Array) -> tuple[Other, Array]:
    return Other(carry.h), x


def fold_step(carry: State, x: Array) -> State:
    return carry


def triple_step(carry: State, x: Array) -> tuple[State, Array, Array]:
    return carry, x, x


def keyed_step(carry: State, x: Array, *, key: Array) -> tuple[State, Array]:
    return carry, x


def valid_step(carry: State, x: Array, *, valid: Array) -> tuple[State, Array]:
    return carry, x


scan(step, State(one), xs)
scan(pair_step, State(one), xs)  # error
scan(step, State(one), (xs, xs))  # error
scan(step, State(one), length=3)  # error
scan(idle_step, State(one), xs)  # error
scan(step, Other(one), xs)  # error
scan(changing_step, State(one), xs)  # error
scan(fold_step, State(one), xs)  # error
scan(triple_step, State(one), xs)  # error
scan(State(one), step, xs)  # error
scan(keyed_step, State(one), xs, key=key)
scan(keyed_step, State(one), xs)  # error
scan(step, State(one), xs, key=key)  # error
scan(valid_step, State(one), xs)  # error

fold(fold_step, State(one), xs)
fold(fold_step, Other(one), xs)  # error
fold(fold_step, State(one), length=3)  # error
accumulate(fold_step, State(one), xs, key=key)  # error
fori(0, 3, fold_step, State(one))  # error

mask_scan(valid_step, State(one), xs, lengths=lengths)
mask_scan(fold_step, State(one), xs, lengths=lengths)  # error
mask_scan(step, Other(one), xs, lengths=lengths)  # error
mask_scan(step, State(one), (xs, xs), lengths=lengths)  # error
mask_scan(step, State(one), pad([one, one]))
mask_scan(step, State(one), pad([(one, one)]))  # error
mask_scan(keyed_step, State(one), xs, lengths=lengths)  # error
mask_scan(valid_step, State(one), xs, lengths=lengths, key=key)  # error
