"""The built-in carries are the Python loops that they stand for, in value and gradient, and cost no more."""

import functools
import math

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import numpy.testing as npt
import pytest
from built_in_carries import (
    CASES,
    FORWARD,
    NAMES,
    assert_close,
    losses,
    run,
    with_gradients,
)
from hypothesis import given, settings
from loops import array, disable_jit, eager
from thin import parametrize

import treescan
from treescan.carries import (
    Keys,
    Moments,
    carry_of,
    cast,
    clip_gradient,
    ema,
    keys,
    moments,
    sum_,
)

T, B = 5, 2
START, KEYS, XS = array(B, seed=1), jax.random.split(jax.random.key(0), B), array(T, B, seed=2)
STARTS, ALL_XS = dict.fromkeys(NAMES, START), dict.fromkeys(NAMES, XS)
LENGTHS = np.array([4, 2])


# The loop: that its values and gradients are those of a Python loop is in `test_carries_masked.py`.


@functools.cache
def derivatives(verb):
    """Of the loss of each case that has a forward mode: along a direction, and by the gradient."""
    options = {"lengths": LENGTHS} if verb == "mask_scan" else {}
    given = dict.fromkeys(FORWARD, START), dict.fromkeys(FORWARD, XS)

    @jax.jit
    def both(given):
        def call(start, xs):
            return run(FORWARD, getattr(treescan, verb), start, KEYS, xs, **options)

        _, tangents = jax.jvp(lambda *given: losses(call(*given)), given, jax.tree.map(jnp.cos, given))
        return tangents, with_gradients(call, *given)

    tangents, results = both(given)
    return {name: (tangents[name], results[name][1]) for name in FORWARD}


@pytest.mark.parametrize("verb", ["scan", pytest.param("mask_scan", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", FORWARD)
def test_forward_mode_is_the_gradient_along_a_direction(name, verb):
    tangent, (of_start, of_xs) = derivatives(verb)[name]
    along = jnp.sum(of_start * jnp.cos(START)) + jnp.sum(of_xs * jnp.cos(XS))
    assert_close(tangent, along, 5 * CASES[name].rtol)


def test_a_clipped_gradient_has_no_forward_mode():
    def final(h):
        return treescan.fold(lambda h, _: h, clip_gradient(h, 1.0), length=2).read()

    with pytest.raises(TypeError, match="custom_vjp"):
        jax.jvp(final, (1.0,), (1.0,))


def scan_of(given, init, xs, lengths):
    return treescan.scan(given, init, xs)


def mask_scan_of(given, init, xs, lengths):
    return treescan.mask_scan(given, init, xs, lengths=lengths, chunk=2)


VERBS = {"scan": scan_of, "mask_scan": mask_scan_of}


# What each is for.

floats = st.floats(-(2.0**100), 2.0**100, width=32) | st.floats(-1.0, 1.0, width=32)


@jax.jit
def sum_of(terms):
    return treescan.fold(lambda total, x: x, sum_(), terms).read()


@settings(max_examples=50)
@given(st.lists(floats, min_size=8, max_size=8))
def test_a_sum_is_as_exact_as_its_rounding(terms):
    exact, size = math.fsum(terms), math.fsum(map(abs, terms))
    bound = 2.0**-23 * abs(exact) + 8**2 * 2.0**-46 * size + 1e-37
    assert abs(float(sum_of(jnp.array(terms, jnp.float32))) - exact) <= bound


def test_a_sum_that_leaves_the_range_is_infinite():
    assert sum_of(jnp.array([1.0, jnp.inf, 1.0])) == jnp.inf
    assert sum_of(jnp.array([3e38, 3e38, 1.0])) == jnp.inf
    assert jnp.isnan(sum_of(jnp.array([jnp.inf, -jnp.inf])))


def moments_of(values):
    """Of up to 6 values; compiled once."""
    xs = jnp.zeros(6).at[: len(values)].set(jnp.array(values, jnp.float32))
    return moments_of_first(xs, len(values))


merge = jax.jit(Moments.merge)


@jax.jit
def moments_of_first(xs, n):
    return carry_of(treescan.mask_scan(lambda _, x: (x, None), moments(), xs, lengths=n, chunk=0)[0], Moments)


some = st.lists(st.floats(-100, 100, width=32), max_size=6)


@given(some, some)
def test_moments_merge(first, second):
    merged, values = merge(moments_of(first), moments_of(second)), np.array(first + second)
    assert merged.count == len(values)
    if len(values) > 1:
        npt.assert_allclose(merged.mean, values.mean(), rtol=1e-5, atol=1e-4)
        npt.assert_allclose(merged.variance(), values.var(), rtol=1e-4, atol=1e-2)
        npt.assert_allclose(merged.variance(ddof=1), values.var(ddof=1), rtol=1e-4, atol=1e-2)


def test_moments_do_not_cancel():
    xs = jnp.float32(1e4) + array(50)
    final = carry_of(treescan.fold(lambda _, x: x, moments(), xs), Moments)
    npt.assert_allclose(final.variance(), np.var(np.asarray(xs, np.float64)), rtol=1e-2)
    assert final.variance(ddof=50) == final.variance(ddof=60) == final.squares


def moving_average(decay, start, xs):
    value = start
    for x in xs:
        value = decay * value + (1 - decay) * x
    return value


@parametrize("verb", VERBS)
@pytest.mark.parametrize("decay", [0.9, np.array([0.5, 0.9], np.float32)], ids=["number", "array"])
def test_a_decay_is_traced_and_differentiated(decay, verb):
    def total(decay, start, xs):
        return jnp.sum(verb(lambda _, x: (x, None), ema(start, decay), xs, LENGTHS)[0].read())

    def oracle(decay, start, xs):
        decay, n = jnp.broadcast_to(decay, (B,)), [T, T] if verb is scan_of else LENGTHS
        return sum(moving_average(decay[b], start[b], xs[: n[b], b]) for b in range(B))

    args = jnp.asarray(decay, jnp.float32), START, XS

    def derivatives(f):
        return jax.jit(lambda *args: (jax.grad(f, (0, 1, 2))(*args), jax.jvp(f, args, args)))(*args)

    assert_close(derivatives(total), derivatives(oracle))


def test_a_cast_keeps_dtypes():
    init = cast({"h": jnp.ones(2, jnp.bfloat16), "n": 0, "rng": keys(jax.random.key(0))})
    final = treescan.fold(lambda c, x: {"h": c["h"] + x.astype(jnp.bfloat16), "n": 1.7 * x[0], "rng": None}, init, XS)
    assert [leaf.dtype for leaf in jax.tree.leaves(final)][:2] == [jnp.bfloat16, jnp.int32]
    assert carry_of(final.tree["rng"], Keys).drawn == T


@pytest.mark.parametrize("transform", [eager, disable_jit], ids=lambda t: t.__name__)
def test_the_body_may_change_the_containers_that_it_is_shown(transform):
    def body(carry, x):
        carry["ema"]["a"] = x
        carry["list"].append(carry["list"].pop() + carry["ema"].pop("b"))
        carry["ema"]["b"] = 2 * x
        return carry, x

    init = {"ema": ema({"a": 0.0, "b": 1.0}, 0.5), "list": [jnp.zeros(())]}
    final, _ = transform(functools.partial(treescan.scan, body), init, XS[:, 0])
    b = [moving_average(0.5, 1.0, 2 * XS[:n, 0]) for n in range(T + 1)]
    assert_close(final["ema"].read(), {"a": moving_average(0.5, jnp.zeros(()), XS[:, 0]), "b": b[-1]})
    npt.assert_allclose(final["list"][0], sum(b[:-1]), rtol=1e-5)
