"""Carries of rows: what all of them share counts the valid ones alone."""

import functools
import math

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import numpy.testing as npt
import pytest
from hypothesis import given, settings
from oracle import assert_close
from thin import parametrize

import treescan
from treescan.carries import best, buffer, ema, keys, moments, running_sum

T, LENGTHS = 7, np.array([5, 0, 3, 7])
B = len(LENGTHS)
VALID = np.arange(T)[:, None] < LENGTHS
HOLES = np.random.default_rng(0).random((T, B)) < 0.5


# What all rows share. Each carry with each option is in the laws of `check_carry`, and several in random programs.

XS = np.random.default_rng(3).uniform(-1, 1, (T, B)).astype(np.float32)
lengths_up_to = st.sampled_from([1, 2, T]).flatmap(
    lambda steps: st.tuples(st.just(steps), st.lists(st.integers(0, steps), min_size=B, max_size=B))
)


def statistics_body(carry, x):
    pair = jnp.stack([x, x * x], -1)
    returned = {name: pair if name.endswith("pairs") else x for name in carry}
    return returned, None


@functools.cache
def statistics(steps):
    """All statistics of rows of given lengths, with their gradients of the sum of the averages and the variances."""

    @jax.jit
    def call(xs, lengths):
        def total(xs):
            init = {
                "moments": moments(),
                "moments of pairs": moments((2,), shared=True),
                "sum": running_sum(),
                "sum of pairs": running_sum(jnp.zeros(2), shared=True),
                "ema": ema(0.0, 0.5),
                "ema of pairs": ema(jnp.zeros(2), 0.5, debias=True, shared=True),
            }
            xs = jnp.where(treescan.length_mask(lengths, steps), xs, jnp.nan)
            final, _ = treescan.mask_scan(statistics_body, init, xs, lengths=lengths, chunk=3)
            seen = {name: carry.read() for name, carry in final.items()}
            return jnp.sum(seen["moments"].variance) + jnp.sum(seen["ema"]) + jnp.sum(seen["sum of pairs"]), seen

        return jax.grad(total, has_aux=True)(xs)

    return call


def ema_of(steps, debias):
    value, weight = 0.0, 0.0
    for entries in steps:
        if len(entries):
            value, weight = 0.5 * value + 0.5 * np.mean(entries, 0), 0.5 * weight + 0.5
    return value / (weight or 1) if debias else value


@settings(max_examples=20)
@given(lengths_up_to)
def test_statistics_count_exactly_the_valid_entries(drawn):
    steps, lengths = drawn
    xs = XS[:steps].astype(np.float64)
    valid = np.arange(steps)[:, None] < lengths
    of_xs, seen = statistics(steps)(jnp.asarray(XS[:steps]), jnp.array(lengths, jnp.int32))
    entries = xs[valid]
    pairs = np.stack([entries, entries**2], -1)

    def close(got, expected):
        npt.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)

    for name, values in (("moments", entries), ("moments of pairs", pairs)):
        assert seen[name].count == len(values)
        close(seen[name].mean, values.mean(0) if len(values) else 0 * seen[name].mean)
        close(seen[name].variance, values.var(0) if len(values) else 0 * seen[name].mean)
    close(seen["sum"], math.fsum(entries))
    close(seen["sum of pairs"], [math.fsum(column) for column in pairs.T])
    by_step = [xs[t, valid[t]] for t in range(steps)]
    close(seen["ema"], ema_of(by_step, debias=False))
    close(seen["ema of pairs"], ema_of([np.stack([x, x * x], -1) for x in by_step], debias=True) * np.ones(2))
    number = valid.sum(1, keepdims=True).clip(1)
    active = valid.any(1, keepdims=True)
    later = active[::-1].cumsum(0)[::-1] - active
    slopes = (2 * (xs - entries.mean()) / entries.size if entries.size else 0) + 0.5 / number * 0.5**later + 1 + 2 * xs
    close(of_xs, np.where(valid, slopes, 0))


COMPACT = {
    "all rows": {},
    "chunks": {"chunk": 3},
    "compact": {"chunk": 3, "compact": True},
    "nested": {"remat": "nested"},
}


@parametrize("options", COMPACT)
def test_the_best_and_a_buffer_of_all_rows(options):
    def body(carry, x):
        score = jnp.sin(5 * x)
        returned = {"best": (score, {"x": x, "pair": jnp.stack([x, -x], -1)}), "buffer": (x, x > 0), "own": (x, x > 0)}
        return returned, None

    init = {"best": best({"x": 0.0, "pair": jnp.zeros(2)}), "buffer": buffer(0.0, 4), "own": buffer(0.0, 9, batch=(B,))}
    xs = jnp.where(VALID, XS, jnp.nan)
    final, _ = treescan.mask_scan(body, init, xs, lengths=LENGTHS, **options)
    entries = XS[VALID]  # in the order of the steps, then of the rows
    expected = entries[np.argmax(np.sin(5 * entries))]
    assert_close(final["best"].value, {"x": jnp.float32(expected), "pair": jnp.array([expected, -expected])})
    kept = entries[entries > 0]
    assert final["buffer"].count == len(kept) > 4
    npt.assert_array_equal(final["buffer"].values, kept[:4])
    for row, count in enumerate(final["own"].count):
        npt.assert_array_equal(final["own"].values[:count, row], XS[VALID[:, row] & (XS[:, row] > 0), row])


def test_the_first_of_equal_rows_is_the_best_and_nan_never_is():
    scores = jnp.array([[jnp.nan, 1.0, 2.0, 2.0], [jnp.nan, jnp.nan, 2.0, 5.0]])
    for mode, place in (("max", 2), ("min", 1)):
        init = best(jnp.int32(-1), mode=mode)
        final, _ = treescan.mask_scan(
            lambda _, score: ((score, jnp.arange(4)), None),
            init,
            scores,
            mask=jnp.ones((2, 4), bool).at[1, 3].set(False),
        )
        assert (final.score, final.value) == (scores[0, place], place)


@parametrize("reverse", {"forward": False, "reverse": True})
def test_a_shared_key_goes_on_where_any_row_is_valid(reverse):
    key, mask = jax.random.key(3), HOLES & (np.arange(T) != 2)[:, None]

    def body(rng, x):
        return None, x * 0 + jax.random.uniform(rng)

    final, ys = treescan.mask_scan(body, keys(key), jnp.where(mask, XS, jnp.nan), mask=mask, reverse=reverse)
    steps = np.flatnonzero(mask.any(1))[:: -1 if reverse else 1]
    expected = np.zeros((T, B), np.float32)
    for n, t in enumerate(steps):
        expected[t] = np.where(mask[t], jax.random.uniform(jax.random.fold_in(key, n)), 0)
    npt.assert_array_equal(ys, expected)
    assert final.drawn == len(steps)


def test_resets_leave_what_is_shared():
    def body(carry, x):
        return {"all": x, "own": x}, None

    init = {"all": moments(), "own": moments((B,))}
    final, _ = treescan.mask_scan(body, init, jnp.asarray(XS), resets=np.arange(T)[:, None] == np.full(B, 4))
    assert final["all"].count == T * B
    assert final["own"].count.tolist() == [3] * B
    npt.assert_allclose(final["own"].mean, XS[4:].mean(0), rtol=1e-5)


@pytest.mark.parametrize("steps", [0, 3])
def test_a_single_row(steps):
    def body(carry, x):
        return {"moments": x, "sum": x, "best": (x, x), "buffer": (x, True), "ema": x}, None

    init = {
        "moments": moments(),
        "sum": running_sum(),
        "best": best(0.0),
        "buffer": buffer(0.0, 5),
        "ema": ema(1.0, 0.5),
    }
    xs = jnp.where(np.arange(T) < steps, XS[:, 0], jnp.nan)
    final, _ = treescan.mask_scan(body, init, xs, lengths=jnp.int32(steps))
    own = XS[:steps, 0]
    assert (final["moments"].count, final["buffer"].count) == (steps, steps)
    assert final["best"].score == own.max(initial=-np.inf)
    npt.assert_allclose(final["sum"].read(), own.sum(), rtol=1e-6)
    npt.assert_array_equal(final["buffer"].values, np.append(own, np.zeros(5))[:5])
    npt.assert_allclose(final["ema"].read(), 0.5**steps + sum(x * 0.5 ** (steps - t) for t, x in enumerate(own)), 1e-6)
