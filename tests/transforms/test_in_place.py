"""Masked loops that write their outputs where they stay: the same values and derivatives, and nothing is copied.

The oracle is `chunk=0`, which stacks the outputs of all steps; it is tried itself against unpadded scans.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from by_hand import masked_by_hand
from hlo import Program
from jaxprs import equations
from loops import array

import treescan

STEPS, ROWS, WIDTH, CHUNK = 43, 5, 3, 8
LENGTHS = np.array([43, 3, 0, 17, 26])
MASK = np.random.default_rng(0).uniform(size=(STEPS, ROWS)) < np.where(np.arange(STEPS) < 9, 0.8, 0.05)[:, None]
MASK[16:24] = False


def cell(weights, carry, x):
    carry = jnp.tanh(carry @ weights + x)
    return carry, carry


def of_all_kinds(weights, carry, x):
    """Outputs of several types, with rows at other places than the first, and one without rows."""
    carry, y = cell(weights, carry, x)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(0), jnp.int32(100 * x[:, 0]))
    return carry, {
        "sign": y > 0,
        "count": jnp.int32(10 * y),
        "turned": y.T,
        "halves": y.astype(jnp.bfloat16),
        "complex": jax.lax.complex(y, x),
        "keys": keys,
        "shared": jnp.sum(weights, 0),
        "row": y[:, 0],
    }


def with_constants(weights, carry, x):
    """A body whose trace for fewer rows closes over other constants."""
    carry, y = cell(weights, carry, x)
    return carry, y + 0 * np.arange(x.shape[0], dtype=np.float32)[:, None]


Y_AXES = {
    cell: 0,
    of_all_kinds: {
        **dict.fromkeys(("sign", "count", "halves", "complex", "keys", "row"), 0),
        "turned": 1,
        "shared": None,
    },
    with_constants: 0,
}


def given():
    return array(WIDTH, WIDTH), array(ROWS, WIDTH, seed=1), array(STEPS, ROWS, WIDTH, seed=2)


def run(body, weights, init, xs, **options):
    options = {"chunk": CHUNK, "row_axes": {"y": Y_AXES[body]}, **options}
    return treescan.mask_scan(functools.partial(body, weights), init, xs, **options)


@jax.custom_vjp
def _half_slope(x):
    return jnp.tanh(x)


_half_slope.defvjp(lambda x: (jnp.tanh(x), x), lambda x, d: (d * (1 - jnp.tanh(x) ** 2) / 2,))


def returned_by_branches(program):
    """The types that each conditional returns."""
    lines = [line for line in program if " conditional(" in line]
    return [line.split(" = ")[1].split(" conditional(")[0] for line in lines]


@pytest.mark.parametrize("options", [{}, {"compact": (1, 2)}, {"reverse": True}], ids=str)
def test_nothing_is_copied(options):
    """Control: an output that holds the last valid one is stacked, chunk by chunk."""
    program = Program(functools.partial(run, cell, lengths=jnp.asarray(LENGTHS), **options), *given())
    whole, chunk = f"f32[{STEPS},{ROWS},{WIDTH}]", f"f32[{CHUNK},{ROWS},{WIDTH}]"
    returned = returned_by_branches(program)
    tiers = 1 + len(options.get("compact", ()))
    assert len(returned) == (2 + (tiers if tiers > 1 else 0))  # the remainder has one of its own
    assert all(whole in each and chunk not in each for each in returned)
    assert not any(f"= {whole}" in line and " copy(" in line for line in program)
    held = Program(functools.partial(run, cell, lengths=jnp.asarray(LENGTHS), fill="hold", **options), *given())
    assert any(chunk in each for each in returned_by_branches(held))


@pytest.mark.slow
def test_a_step_has_no_more_operations_than_one_that_is_masked_by_hand():
    """XLA's CPU backend runs up to eight operations one after the other, and more of them in its threads."""
    weights, xs, lengths = jnp.ones((WIDTH, WIDTH)), jnp.ones((48, ROWS, WIDTH)), jnp.asarray(LENGTHS)
    valid = jnp.arange(48)[:, None] < lengths[None]
    body = functools.partial(cell, weights)

    def operations(run):
        loops = Program(run, jnp.ones((ROWS, WIDTH)), xs).loops()
        return max(len(re.findall(r"= \S+ (?:fusion|copy)\(", loop)) for loop in loops if " while(" not in loop)

    def masked(chunk):
        return operations(lambda init, xs: treescan.mask_scan(body, init, xs, lengths=lengths, chunk=chunk))

    assert masked(CHUNK) <= operations(lambda init, xs: masked_by_hand(body, init, xs, valid))
    assert masked(CHUNK) < masked(CHUNK - 1)  # with a remainder, the index is a sum


def _ending(carry, x):
    return jax.lax.while_loop(lambda a: jnp.any(jnp.abs(a) > 1), lambda a: a / 2, carry) + x


def _printing(carry, x):
    jax.debug.callback(lambda a: None, x)
    return carry + x


SHOWN = {
    "plain": lambda carry, x: jnp.tanh(carry + x),
    "a scan": lambda carry, x: jax.lax.scan(lambda a, _: (a / 2, None), carry, None, 3)[0] + x,
    "a convolution": lambda carry, x: jax.lax.conv(carry[:, None], jnp.ones((1, 1, 3)), (1,), "SAME")[:, 0] + x,
}
OTHERS = {
    "told": lambda carry, x, *, valid: carry + x * valid[:, None].astype(x.dtype),
    "a while": _ending,
    "a rule": lambda carry, x: _half_slope(carry) + x,
    "an effect": _printing,
    "a callback": lambda carry, x: carry + jax.pure_callback(np.sin, x, x),
}


@pytest.mark.parametrize("name", [*SHOWN, *OTHERS, "under jax_debug_nans"])
def test_padded_rows_see_their_own_values_but_for_what_the_contract_excludes(name):
    """It selects thrice, for the carry, y and the last carry (`_trace/rules.py`); five times for what the body sees."""
    body = {**SHOWN, **OTHERS}.get(name, SHOWN["plain"])

    def step(carry, x, **told):
        new = body(carry, x, **told)
        return new, new

    if name == "told":
        pair, step = step, lambda carry, x, *, valid: pair(carry, x, valid=valid)
    with jax.debug_nans(name == "under jax_debug_nans"):
        run = lambda init, xs, lengths: treescan.mask_scan(step, init, xs, lengths=lengths, chunk=8)  # noqa: E731
        jaxpr = jax.make_jaxpr(run)(array(4, 3, seed=1), array(32, 4, 3, seed=2), jnp.full(4, 30)).jaxpr
    selected = [each.outvars[0].aval.shape == (4, 3) for each in equations(jaxpr, "select_n")]
    assert (sum(selected) > 3) == (name not in SHOWN)
