"""What the loop does for custom carries is what one writes by hand: the same equations, constants and traces."""

import collections
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxprs import equations, num_consts, subjaxprs
from loops import array
from thin import parametrize

import treescan
from treescan.carries import ema, keys, window

pytestmark = pytest.mark.quick

T, B, LENGTHS = 5, 2, np.array([4, 2])
KEYS, XS = jax.random.split(jax.random.key(0), B), array(T, B, seed=2)


def keys_by_hand(carry, x):
    y = x * jax.vmap(jax.random.uniform)(jax.vmap(jax.random.fold_in)(carry["key"], carry["n"]))
    return {"key": carry["key"], "n": carry["n"] + 1}, y


def ema_by_hand(carry, x):
    value, decay = carry["value"], carry["decay"]
    return {"decay": decay, "value": decay * value + (1 - decay) * x}, value


def window_by_hand(carry, x):
    return jnp.concatenate([carry[1:], (x - carry[-1])[None]]), carry[-2]


class Hand(NamedTuple):
    """A custom carry and what one writes without it, and how many hyperparameters it has."""

    init: Any
    body: Any
    by_hand_init: Any
    by_hand: Any
    carry_axes: Any = 0
    constants: int = 0


ZEROS = jnp.zeros(B)
HANDS = {
    "keys": Hand(
        keys(KEYS),
        lambda key, x: (None, x * jax.vmap(jax.random.uniform)(key)),
        {"key": KEYS, "n": jnp.zeros(B, jnp.int32)},
        keys_by_hand,
        constants=1,
    ),
    "ema": Hand(
        ema(ZEROS, jnp.float32(0.9)),
        lambda average, x: (x, average),
        {"value": ZEROS, "decay": jnp.float32(0.9)},
        ema_by_hand,
        carry_axes={"value": 0, "decay": None},
        constants=1,
    ),
    "window": Hand(
        window(jnp.zeros((3, B))),
        lambda last, x: (x - last[-1], last[-2]),
        jnp.zeros((3, B)),
        window_by_hand,
        carry_axes=1,
    ),
}


def primitives(jaxpr):
    found = collections.Counter(eqn.primitive.name for eqn in jaxpr.eqns)
    for eqn in jaxpr.eqns:
        for value in eqn.params.values():
            for sub in subjaxprs(value):
                found += primitives(sub)
    return found


def program(scan, body, init, **options):
    """The equations by their primitives, and the constants of each loop."""
    jaxpr = jax.make_jaxpr(lambda init, xs: scan(body, init, xs, **options))(init, XS).jaxpr
    return primitives(jaxpr), [num_consts(eqn) for eqn in equations(jaxpr, "scan")]


@parametrize("hand", HANDS)
def test_the_program_is_that_of_a_loop_by_hand(hand):
    ours = program(treescan.scan, hand.body, hand.init)
    assert ours == program(jax.lax.scan, hand.by_hand, hand.by_hand_init)
    assert ours[1] == [hand.constants]
    ours = program(treescan.scan, hand.body, hand.init, remat="nested")
    assert ours == program(treescan.scan, hand.by_hand, hand.by_hand_init, remat="nested")
    assert min(ours[1]) >= hand.constants


@parametrize(
    "options", {"chunks": {"chunk": 2}, "reverse": {"reverse": True, "remat": "step"}, "nested": {"remat": "nested"}}
)
@parametrize("hand", HANDS)
def test_a_masked_program_is_that_of_a_carry_by_hand(hand, options):
    options = {"lengths": jnp.asarray(LENGTHS), **options}
    ours = program(treescan.mask_scan, hand.body, hand.init, **options)
    by_hand = {"row_axes": {"carry": hand.carry_axes}, **options}
    assert ours == program(treescan.mask_scan, hand.by_hand, hand.by_hand_init, **by_hand)
