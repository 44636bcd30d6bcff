"""What a body closes over dies with it: after every verb, eager or not, differentiated or not.

A user who makes a body in each call, with arrays in it, must not run out of memory.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from thin import parametrize
from works import table
from works.columns import bodies, left_over
from works.example import Given
from works.table import Cell

import treescan
from treescan.integrations.flax import RNN
from treescan.integrations.nnx import scan as nnx_scan

pytestmark = pytest.mark.quick

DAILY = ("scan", "mask_scan")
LEFT = "left over"


@pytest.mark.parametrize("verb", [v if v in DAILY else pytest.param(v, marks=pytest.mark.slow) for v in table.VERBS])
def test_a_verb_leaves_nothing(verb: str) -> None:
    assert not table.wrong([Cell(verb, (), LEFT)])


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("verb", table.VERBS)
def test_no_option_leaves_anything(verb: str, part: int) -> None:
    assert not table.wrong(Cell(verb, (form,), LEFT) for form in [*table.VERBS[verb].forms][part::4])


# What the table does not have.


def body_of(given: Given) -> Any:
    def step(carry: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        carry = jnp.tanh(carry @ given["w"] + x)
        return carry, jnp.sin(carry)

    return step


def of_condition(given: Given) -> Any:
    return treescan.while_scan(lambda carry: jnp.sum(carry) < given["w"][0, 0], body_of(given), given["h"], given["a"])


def of_flax_rnn(given: Given) -> Any:
    class Cell(nn.RNNCellBase):
        __call__ = nn.compact(lambda self, carry, x: body_of(given)(carry, x))
        initialize_carry = lambda self, rng, input_shape: given["h"]  # noqa: E731
        num_feature_axes = 1

    run = RNN(Cell(), time_major=True, return_carry=True)
    return run.apply({}, given["a"], initial_carry=given["h"], seq_lengths=jnp.array([2, 0, 4]))


def of_nnx(given: Given) -> Any:
    run = nnx_scan(body_of(given), in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
    return run(given["h"], given["a"])


GIVEN = table.VERBS["mask_scan"].given
RUNS = {"condition": of_condition, "flax RNN": of_flax_rnn, "nnx scan": of_nnx}


@pytest.mark.slow
@parametrize("run", RUNS)
def test_a_condition_or_a_module_leaves_nothing(run: Any) -> None:
    left_over(lambda given: jax.tree.leaves(run(given)), GIVEN)


def test_what_is_left_is_noticed() -> None:
    kept = []

    def run(given: Given) -> Any:
        kept.append(body_of(given))
        return jax.tree.leaves(treescan.scan(kept[-1], given["h"], given["a"]))

    before = bodies()
    with pytest.raises(AssertionError, match="after eager, a body is alive"):
        left_over(run, GIVEN)
    assert bodies() == before + 2
