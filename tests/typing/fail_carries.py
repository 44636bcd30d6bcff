"""Custom carries: what is shown and returned; exactly the lines marked `# error` are errors. Never run."""

from typing import NamedTuple, assert_type

import jax
import jax.numpy as jnp
from jax import Array

from treescan import fold, mask_scan, scan
from treescan.carries import (
    AbstractCarry,
    Ema,
    Keys,
    Moments,
    as_seen,
    best,
    buffer,
    carry_of,
    cast,
    clip_gradient,
    ema,
    keys,
    moments,
    register_carry,
    running_sum,
    window,
)
from treescan.testing import check_carry

xs, one, key = jnp.arange(3.0), jnp.ones(()), jax.random.key(0)


class State(NamedTuple):
    h: Array
    rng: Array
    loss: Array


def step(state: State, x: Array) -> tuple[State, Array]:
    return State(state.h + x, state.rng, x), state.h


init = State(one, keys(key), ema(0.0, decay=0.9))
final, ys = scan(step, init, xs)
assert_type(final, State)
assert_type(ys, Array)
assert_type(mask_scan(step, init, xs, lengths=jnp.array(2)), tuple[State, Array])
assert_type(carry_of(final.rng, Keys), Keys)
assert_type(carry_of(final.loss, Ema), Ema)
assert_type(fold(lambda total, x: total + x, running_sum(), xs), Array)
assert_type(cast(init), State)
assert_type(window(xs), Array)
assert_type(clip_gradient({"h": one}, 1.0), dict[str, Array])
assert_type(best(one), tuple[Array, Array])
assert_type(buffer(one, 3), tuple[Array, Array])
assert_type(moments().mean, Array)


class Doubled(AbstractCarry[Array, Array]):
    def __init__(self, value: Array) -> None:
        self.value = value

    def read(self) -> Array:
        return 2 * self.value

    def write(self, returned: Array, valid: Array | None) -> "Doubled":
        return Doubled(returned)


assert_type(as_seen(Doubled(one)), Array)
assert_type(Doubled(one).write(one, None), Doubled)
check_carry(Doubled(one), xs)


class WrongRead(Doubled):
    def read(self) -> str:  # error
        return "2"


class WrongWrite(Doubled):
    def write(self, returned: str, valid: Array | None) -> "WrongWrite":  # error
        return self


class WrongMask(Doubled):
    def write(self, returned: Array) -> "WrongMask":  # error
        return self


class WrongRows(Doubled):
    def rows(self) -> str:  # error
        return "0"


def to_moments(value: str) -> Moments:
    raise NotImplementedError


register_carry(str, to_moments, repr)
register_carry(int, to_moments, repr)  # error
