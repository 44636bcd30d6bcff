"""An autoregression of order p, whose lags `treescan.carries.window` carries, against loops in NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from unpadded import assert_close

import treescan
from treescan.carries import window

STEPS = 14
ORDERS = [1, 2, 5]


def given_of(order, steps=STEPS):
    """(coefficients, with lag 1 first; the values before the first step, the oldest first; the noise), in float64."""
    rng = np.random.default_rng(order)
    coefficients = rng.uniform(-1, 1, order) / np.sqrt(order)
    return coefficients, rng.uniform(-1, 1, order), rng.uniform(-1, 1, steps)


def autoregression(coefficients, history, noise, *, reverse=False, band=np.inf):
    """(all lags at the end, oldest first; the values in their places; how many), the loop that the tests stand on."""
    values, ys, taken = list(history), np.zeros(len(noise)), 0
    for t in range(len(noise))[::-1] if reverse else range(len(noise)):
        if not abs(values[-1]) < band:
            break
        ys[t] = sum(a * values[-lag] for lag, a in enumerate(coefficients, 1)) + noise[t]
        values.append(ys[t])
        taken += 1
    return np.array(values[-len(history) :]), ys, taken


def total(lags, ys):
    """Every lag and every value counts with its own weight."""
    return (np.arange(1, len(lags) + 1) * lags**2).sum() + (np.arange(1, len(ys) + 1) / 4 * ys**2).sum()


def slopes(loss, *given, gap=1e-6):
    """Central differences, of each argument."""
    found = []
    for i, arg in enumerate(given):
        slope = np.zeros_like(arg)
        for at in np.ndindex(arg.shape):
            ends = []
            for sign in (1, -1):
                moved = arg.copy()
                moved[at] += sign * gap
                ends.append(loss(*given[:i], moved, *given[i + 1 :]))
            slope[at] = (ends[0] - ends[1]) / (2 * gap)
        found.append(slope)
    return tuple(found)


def predicted(coefficients, lags, noise):
    return jnp.sum(coefficients * lags[::-1]) + noise


def step(coefficients, lags, noise):
    value = predicted(coefficients, lags, noise)
    return value, value


def scanned(coefficients, history, noise, **options):
    carry, ys = treescan.scan(functools.partial(step, coefficients), window(history), noise, **options)
    return carry.values, ys


def folded(coefficients, history, noise, **options):
    return treescan.fold(functools.partial(predicted, coefficients), window(history), noise, **options).values


def while_scanned(coefficients, history, noise, *, band, **options):
    result = treescan.while_scan(
        lambda lags: jnp.abs(lags[-1]) < band,
        functools.partial(step, coefficients),
        window(history),
        noise,
        **options,
    )
    return result.carry.values, result.ys, result.steps


def in_float32(given):
    return tuple(jnp.asarray(leaf, jnp.float32) for leaf in given)


def close(got, want):
    assert_close(got, jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), want), rtol=1e-4, atol=1e-5)


def gradient(run, given):
    def loss(*given):
        lags, ys = run(*given)[:2]
        weights = (jnp.arange(1, len(leaf) + 1, dtype=jnp.float32) for leaf in (lags, ys))
        return jnp.sum(next(weights) * lags**2) + jnp.sum(next(weights) / 4 * ys**2)

    return jax.jit(jax.grad(loss, (0, 1, 2)))(*in_float32(given))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("reverse", [False, True])
def test_values(order, reverse):
    given = given_of(order)
    lags, ys, _ = autoregression(*given, reverse=reverse)
    for compiled in (jax.jit, lambda run: run):
        close(compiled(functools.partial(scanned, reverse=reverse))(*in_float32(given)), (lags, ys))
        close(compiled(functools.partial(folded, reverse=reverse))(*in_float32(given)), lags)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("reverse", [False, True])
def test_gradients(order, reverse):
    given = given_of(order)
    want = slopes(lambda *given: total(*autoregression(*given, reverse=reverse)[:2]), *given)
    close(gradient(functools.partial(scanned, reverse=reverse), given), want)

    def last(*given):
        return folded(*given, reverse=reverse), jnp.zeros(0)

    want = slopes(lambda *given: total(autoregression(*given, reverse=reverse)[0], np.zeros(0)), *given)
    close(gradient(last, given), want)


@pytest.mark.parametrize("order", ORDERS)
def test_vmap(order):
    """Over series with a noise and a history each, and over coefficients."""
    coefficients, history, noise = given_of(order)
    many = np.stack([coefficients, coefficients / 2, -coefficients])
    histories, noises = np.stack([history, -history, 2 * history]), np.stack([noise, noise[::-1], -noise])
    want = [autoregression(*each)[:2] for each in zip(many, histories, noises, strict=True)]
    got = jax.jit(jax.vmap(scanned))(*in_float32((many, histories, noises)))
    close(got, tuple(np.stack(leaves) for leaves in zip(*want, strict=True)))
    shared = jax.vmap(folded, (None, 0, 0))(*in_float32((coefficients, histories, noises)))
    rows = zip(histories, noises, strict=True)
    close(shared, np.stack([autoregression(coefficients, *each)[0] for each in rows]))


@pytest.mark.parametrize("order", ORDERS)
def test_series_in_a_batch(order):
    """The batch stands behind the lags."""
    coefficients, history, noise = given_of(order)
    histories, noises = np.stack([history, -history], 1), np.stack([noise, noise[::-1]], 1)

    def body(lags, noise):
        value = jnp.sum(in_float32([coefficients])[0][:, None] * lags[::-1], 0) + noise
        return value, value

    carry, ys = treescan.scan(body, window(in_float32([histories])[0]), in_float32([noises])[0])
    want = [autoregression(coefficients, histories[:, b], noises[:, b])[:2] for b in range(2)]
    close((carry.values, ys), tuple(np.stack(leaves, 1) for leaves in zip(*want, strict=True)))


def banded(order):
    """A process that leaves the band of 1.2 after some steps and not at once."""
    coefficients, history, noise = given_of(order)
    return np.abs(coefficients) / np.abs(coefficients).sum(), 0.5 * np.abs(history), 0.1 + 0.4 * np.abs(noise)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("reverse", [False, True])
def test_until_it_leaves_a_band(order, reverse):
    given = banded(order)
    lags, ys, taken = autoregression(*given, reverse=reverse, band=1.2)
    assert 1 < taken < STEPS
    run = functools.partial(while_scanned, band=1.2, reverse=reverse)
    got = jax.jit(run)(*in_float32(given))
    assert int(got[2]) == taken
    close(got[:2], (lags, ys))
    want = slopes(lambda *given: total(*autoregression(*given, reverse=reverse, band=1.2)[:2]), *given)
    close(gradient(run, given), want)


def test_each_series_leaves_the_band_by_itself():
    coefficients, history, noise = banded(2)
    noises = np.stack([noise, 3 * noise, 0 * noise])
    want = [autoregression(coefficients, history, each, band=1.2) for each in noises]
    assert len({taken for *_, taken in want}) == 3
    run = functools.partial(while_scanned, band=1.2)
    got = jax.jit(jax.vmap(run, (None, None, 0)))(*in_float32((coefficients, history, noises)))
    assert [int(taken) for taken in got[2]] == [taken for *_, taken in want]
    close(got[:2], (np.stack([lags for lags, *_ in want]), np.stack([ys for _, ys, _ in want])))
