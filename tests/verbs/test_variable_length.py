"""`mask_scan` is each row scanned on its own, unpadded, whatever the options: values, and every gradient."""

import functools

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from oracle import assert_bitwise, assert_close
from thin import parametrize
from unpadded import CASES, Setup, assert_equals_the_rows, draw_rows, make_batch

import treescan

T, B = 5, 3
PADDING = [np.nan, np.inf, -np.inf, 0.0, -1.0, 3e38, 0.5]
LENGTHS, MASK, RESETS = ("lengths",), ("mask",), ("resets",)
SEGMENTS = ("mask", "resets")


def setup(case="singular", carried=False, given=MASK, **options):
    hashable = {name: tuple(value.items()) if isinstance(value, dict) else value for name, value in options.items()}
    return Setup(case, carried, given, tuple(hashable.items()))


def check(setup, shape, seed, padding=np.nan, density=0.6, kind="grad"):
    valid, resets = draw_rows(setup.given, shape, density, seed)
    assert_equals_the_rows(setup, kind, make_batch(setup.case, valid, padding, seed), valid, resets)


SETUPS = {
    "plain": (setup("lstm", given=LENGTHS), (T, B)),
    "carried params": (setup("gru", carried=True), (T, B)),
    "keys, chunks of 3": (setup("noisy", given=LENGTHS, chunk=3, fill=-7), (T, B)),
    "reverse, chunks of 2": (setup(reverse=True, chunk=2, fill={"y": np.nan, "n": -1}), (T, B)),
    "whole": (setup(chunk=0, reverse=True, fill="hold", given=LENGTHS), (T, B)),
    "resets": (setup("lstm", given=RESETS, chunk=2), (T, B)),
    "resets in reverse": (setup(carried=True, given=("lengths", "resets"), reverse=True, chunk=1), (T, B)),
    "resets and lengths": (setup("gru", given=("lengths", "resets"), reverse=True, fill="hold"), (T, B)),
    "held": (setup(carried=True, fill={"y": "hold", "n": -1}, chunk=3, remat="step"), (T, B)),
    "compact": (setup(carried=True, given=LENGTHS, compact=True, chunk=2), (T, 4)),
    "compact in reverse": (setup(given=SEGMENTS, compact=(1,), chunk=2, reverse=True, fill="hold"), (T, B)),
    "compact keys": (setup("noisy", compact=(2,), chunk=3, remat="nested"), (T, B)),
    "nested": (setup("lstm", given=SEGMENTS, remat="nested", chunk=1, unroll=2), (T, B)),
    "batch leads": (setup("gru", time_axis=1, given=SEGMENTS, chunk=4), (T, T)),
    "batch leads, compact": (setup(time_axis=1, compact=True, chunk=2, carried=True, reverse=True), (T, 2)),
    "single row": (setup(given=SEGMENTS, chunk=2, fill="hold"), (T,)),
    "two batch axes": (setup("noisy", carried=True, given=SEGMENTS, chunk=2, reverse=True), (T, 2, 2)),
    "two batch axes, compact": (setup(given=SEGMENTS, chunk=2, compact=True), (T, 2, 2)),
}

seeds = st.integers(0, 2**31 - 1)


SLOW = {"carried params", "whole", "resets and lengths", "two batch axes, compact"}


@pytest.mark.parametrize(
    "case", [pytest.param(c, id=n, marks=[pytest.mark.slow] if n in SLOW else []) for n, c in SETUPS.items()]
)
@settings(max_examples=5)
@given(seeds, st.sampled_from(PADDING), st.sampled_from([0.0, 0.2, 0.6, 0.9, 1.0]))
def test_equals_the_unpadded_rows_in_value_and_gradient(case, seed, padding, density):
    check(*case, seed, padding, density)


@pytest.mark.parametrize("steps", [0, 1])
@parametrize(
    "options",
    {
        "chunks": {"given": SEGMENTS, "fill": "hold", "chunk": 1},
        "compact": {"compact": True, "given": LENGTHS},
        "nested": {"carried": True, "remat": "nested", "reverse": True},
    },
)
def test_short_loops(options, steps):
    for seed in range(3):
        check(setup(**options), (steps, B), seed)


def patterns(steps, rows):
    """Masks that mean something: [T, B]."""
    at, row = np.mgrid[:steps, :rows]
    return {
        "left padding": at >= 2 + row,
        "holes": (at + row) % 2 == 0,
        "one step each, the last": at == steps - 1,
        "one chunk in the middle": (at >= 2) & (at < 4),
        "a row that pauses for a chunk": (row > 0) ^ (at // 2 == 1),
        "one live row": row == 1,
        "rows take turns": at // 2 == row,
    }


@pytest.mark.parametrize(("name", "reverse"), [(name, i % 2 == 0) for i, name in enumerate(patterns(T, B))])
def test_patterns_of_a_mask(name, reverse):
    valid = patterns(T, B)[name]
    given = setup(given=SEGMENTS, reverse=reverse, compact=(1,), chunk=2, fill="hold")
    assert_equals_the_rows(given, "grad", make_batch("singular", valid, np.nan), valid, np.zeros_like(valid))
    resets = np.random.default_rng(0).random(valid.shape) < 0.5
    assert_equals_the_rows(given, "grad", make_batch("singular", valid, 0.0), valid, resets)


@pytest.mark.parametrize(
    "given",
    [
        setup(given=SEGMENTS, carried=True),
        pytest.param(setup("lstm", given=LENGTHS, reverse=True), marks=pytest.mark.slow),
        pytest.param(setup("gru", given=SEGMENTS), marks=pytest.mark.slow),
    ],
    ids=lambda given: given.case,
)
def test_forward_values_do_not_depend_on_the_chunk(given):
    """To the last bit."""
    steps = 7
    valid, resets = draw_rows(given.given, (steps, B), 0.5, 3)
    batch = make_batch(given.case, valid, np.nan)

    def run(chunk):
        scan = given._replace(options=(*given.options, ("fill", "hold"), ("chunk", chunk))).runner(valid, resets)
        return jax.jit(scan)(*batch.given)

    whole = run(0)
    for chunk in (None, 1, 3, 5, steps, steps + 1):
        assert_bitwise(run(chunk), whole)


def test_traced_lengths_out_of_range_are_clamped():
    params, rows, xs = make_batch("singular", np.ones((T, 2), bool), np.nan).given
    body = functools.partial(CASES["singular"].body, params | {"act": jnp.tanh})

    @jax.jit
    def run(lengths):
        return treescan.mask_scan(body, rows, xs, lengths=lengths, chunk=2, compact=True)

    for out, within in (([-3, 99], [0, T]), ([T + 1, -1], [T, 0])):
        assert_close(run(jnp.array(out)), run(jnp.array(within)), rtol=0, atol=0)
