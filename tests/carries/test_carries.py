"""The built-in carries are the Python loops that they stand for, and refuse what they cannot hold."""

import functools
import math
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import numpy.testing as npt
import pytest
from hypothesis import given, settings
from loops import array, disable_jit, eager
from oracle import assert_close
from thin import parametrize

import treescan
from treescan import fold
from treescan.carries import (
    Keys,
    Moments,
    best,
    buffer,
    carry_of,
    cast,
    clip_gradient,
    ema,
    keys,
    moments,
    running_sum,
    stop_gradient,
    window,
)

T, B = 5, 2
START, XS = array(B, seed=1), array(T, B, seed=2)
LENGTHS = np.array([4, 2])


def scan_of(given, init, xs, lengths):
    return treescan.scan(given, init, xs)


def mask_scan_of(given, init, xs, lengths):
    return treescan.mask_scan(given, init, xs, lengths=lengths, chunk=2)


VERBS = {"scan": scan_of, "mask_scan": mask_scan_of}


# What each is for.

floats = st.floats(-(2.0**100), 2.0**100, width=32) | st.floats(-1.0, 1.0, width=32)


@jax.jit
def sum_of(terms):
    return fold(lambda total, x: x, running_sum(jnp.zeros((), terms.dtype)), terms).read()


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


def test_the_parts_of_a_complex_sum_are_sums_of_their_own():
    """What is lost in one of them is kept, whatever becomes of the other."""
    terms = jnp.array([1.0, *[2.0**-25] * 8], jnp.float32)
    for total in (jnp.float32(3e38), jnp.float32(0)):
        both = sum_of(jax.lax.complex(jnp.full(9, total), terms))
        assert both.imag == sum_of(terms) == 1 + 2.0**-22
        assert both.real == sum_of(jnp.full(9, total))


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
        npt.assert_allclose(merged.variance, values.var(), rtol=1e-4, atol=1e-2)
        npt.assert_allclose(merged.sample_variance, values.var(ddof=1), rtol=1e-4, atol=1e-2)


def test_moments_do_not_cancel():
    xs = jnp.float32(1e4) + array(50)
    final = carry_of(fold(lambda _, x: x, moments(), xs), Moments)
    npt.assert_allclose(final.variance, np.var(np.asarray(xs, np.float64)), rtol=1e-2)
    assert moments_of([3.0]).sample_variance == 0


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
    final = fold(
        lambda c, x: {"h": c["h"] + x.astype(jnp.bfloat16), "n": (c["n"] + 1).astype(jnp.int8), "rng": None}, init, XS
    )
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


# What they do with what they cannot hold, and at the ends of their ranges.


def limited(h: jax.Array, scale: jax.Array) -> jax.Array:
    def loss(h: jax.Array) -> jax.Array:
        return jnp.sum(fold(lambda h, _: h * scale, clip_gradient(h, max_norm=1.0), length=1).tree)

    return jax.grad(loss)(h)


@pytest.mark.parametrize("dtype, scale", [(jnp.float32, 1e30), (jnp.float16, 6e4), (jnp.float32, jnp.inf)])
def test_a_gradient_that_explodes_keeps_its_direction(dtype: Any, scale: float) -> None:
    gradient = limited(jnp.ones(2, dtype), jnp.asarray(scale, dtype))
    npt.assert_allclose(gradient, np.full(2, 0.5**0.5), rtol=1e-3)


def test_half_precision_keeps_its_direction_too() -> None:
    scale = jnp.array([6e4, 2e3], jnp.float16)
    npt.assert_allclose(limited(jnp.ones(2, jnp.float16), scale), [0.99944, 0.03331], rtol=2e-3)


def test_a_row_without_a_gradient_has_a_second_derivative() -> None:
    def loss(h: jax.Array) -> jax.Array:
        return jnp.sum(fold(lambda h, _: jnp.sin(h), clip_gradient(h, max_norm=1.0), length=2).tree[0] ** 3)

    h = jnp.array([[0.5, 1.0], [0.5, 1.0]])
    second = jax.grad(lambda h: jnp.sum(jax.grad(loss)(h) ** 2))(h)
    assert np.all(np.asarray(second[0]) != 0)
    npt.assert_array_equal(second[1], np.zeros(2, np.float32))


def test_a_gradient_within_the_norm_is_the_same() -> None:
    npt.assert_array_equal(limited(jnp.ones(2), jnp.asarray(0.25)), np.full(2, 0.25, np.float32))
    npt.assert_array_equal(limited(jnp.ones(2), jnp.asarray(0.0)), np.zeros(2, np.float32))


LOSSY: dict[str, tuple[Any, Any]] = {
    "window": (window(jnp.array([0, 1])), 0.5),
    "best": (best(0), (0.5, 0.5)),
    "buffer": (buffer(0, 4), (0.5, True)),
    "sum": (running_sum(), 1 + 1j),
    "cast": (cast(0), 0.5),
    "ema": (ema(0.0, 0.9), 1j),
}


@parametrize("given", LOSSY)
def test_what_cannot_be_held_is_refused(given: tuple[Any, Any]) -> None:
    init, returned = given
    with pytest.raises(treescan.errors.PluginError, match="cannot hold"):
        fold(lambda seen, x: returned, init, jnp.ones(2))


def test_a_flag_is_true_unless_it_is_zero() -> None:
    assert int(fold(lambda seen, x: (x, 0.5), buffer(0.0, 4), jnp.ones(3)).count) == 3


def test_half_precision_moments_count_beyond_its_range() -> None:
    values = jnp.tile(jnp.array([0.0, 1.0], jnp.float16), (2, 300))
    mask = jnp.ones((2, 600), bool)
    final, _ = treescan.mask_scan(lambda c, x: (x, None), moments(dtype=jnp.float16), values, mask=mask)
    npt.assert_allclose(final.squares, 300, rtol=1e-2)


@pytest.mark.parametrize(
    "make",
    [
        lambda: moments(-1),
        lambda: moments(dtype="none"),  # type: ignore[arg-type]
        lambda: ema(0.0, 0.9j),
        lambda: ema({"w": 0.0}, {"w": jnp.nan}),
        lambda: clip_gradient(1.0, 1j),
        lambda: clip_gradient(1.0, max_norm=jnp.nan),
    ],
)
def test_values_that_cannot_be(make: Any) -> None:
    """The texts of others are golden."""
    with pytest.raises(treescan.errors.ArgumentError):
        make()


@pytest.mark.parametrize("decay, seen", [(0.0, 3.0), (0.999, 2.0), (1.0, 7.0)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
def test_an_average_without_bias_starts_from_anything(decay: float, seen: float, dtype: Any) -> None:
    """Where what comes has the weight 0, the start stays."""

    @jax.jit
    def run(start: Any) -> Any:
        init = ema({"w": start}, {"w": jnp.float32(decay)}, debias=True)
        return fold(lambda average, x: {"w": x}, init, jnp.array([1.0, 2.0, 3.0], dtype)).read()["w"]

    npt.assert_allclose(run(jnp.asarray(7.0, dtype)), seen, rtol=2e-3)


def test_a_norm_beyond_the_range_of_float16_is_limited() -> None:
    def loss(h: jax.Array) -> jax.Array:
        return jnp.sum(fold(lambda h, _: h, clip_gradient(h, max_norm=1e5), length=1).tree * jnp.float16(6e4))

    npt.assert_allclose(jax.grad(loss)(jnp.ones(4, jnp.float16)), np.full(4, 5e4, np.float16))


def test_moments_of_large_entries_of_one_step_are_finite() -> None:
    final = fold(lambda _, x: x, moments(shared=True), jnp.full((3, 4), 1e20))
    assert (final.mean, final.variance) == (jnp.float32(1e20), 0)


@pytest.mark.parametrize("limit", ["limit", "max_norm"])
def test_a_traced_limit_below_0_counts_as_0(limit: str) -> None:
    def gradient(bound: float) -> Any:
        def loss(h: jax.Array, bound: Any) -> Any:
            return jnp.sum(fold(lambda h, _: 3 * h, clip_gradient(h, **{limit: bound}), length=1).tree)

        return jax.jit(jax.grad(loss))(jnp.ones(2), bound)

    npt.assert_array_equal(gradient(-1.0), np.zeros(2, np.float32))
    assert np.isnan(gradient(float("nan"))).all()


def test_the_best_of_no_rows_stays() -> None:
    none = jnp.zeros((2, 0))
    final, _ = treescan.mask_scan(lambda c, x: ((x, x), None), best(7.0), none, mask=jnp.zeros((2, 0), bool))
    assert float(final.value) == 7.0


def test_a_raw_numpy_key() -> None:
    raw = np.asarray(jax.random.key_data(jax.random.key(3)))
    _, drawn = treescan.scan(lambda key, _: (key, jax.random.key_data(key)), Keys(raw), length=2)
    expected = [jax.random.key_data(jax.random.fold_in(jax.random.key(3), n)) for n in range(2)]
    npt.assert_array_equal(drawn, np.stack(expected))


MAKERS = {
    "best": best,
    "cast": lambda value, _: cast(value),
    "ema": lambda value, _: ema(value, 0.5),
    "window": lambda value, _: window(value),
    "running_sum": lambda value, _: running_sum(value),
    "clip_gradient": lambda value, _: clip_gradient(value, 1.0),
    "stop_gradient": lambda value, _: stop_gradient(value),
}


@parametrize("make", MAKERS)
def test_a_state_that_holds_values_and_their_carry_can_be_donated(make: Any) -> None:
    """No two of its arrays have one buffer."""
    weights, score = jnp.arange(3.0), jnp.ones(())
    state = {"w": weights, "score": score, "seen": make(weights, score)}
    pointers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array)]
    assert len(pointers) == len(set(pointers))


def test_nothing_is_copied_in_a_trace() -> None:
    kept = jnp.ones(3)
    for make in (lambda x: best(x).value, lambda x: best(kept).value, lambda x: cast(kept).tree):
        assert not jax.make_jaxpr(make)(kept).eqns


NUMBERS = {
    "ema": (lambda **o: ema(0.0, 0.5, **o), lambda c: c.value, [0.5, 5.0, 50.0]),
    "sum": (running_sum, lambda c: c.total, [1.0, 10.0, 100.0]),
    "moments": (moments, lambda c: c.mean, [1.0, 10.0, 100.0]),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_a_carry_of_a_number_combines_the_entries_of_a_vector_only_if_told_to(name: str) -> None:
    make, value, of_each = NUMBERS[name]
    xs = jnp.array([[1.0, 10.0, 100.0]])

    def run(init: Any) -> Any:
        return value(fold(lambda _, x: x, init, xs))

    with pytest.raises(treescan.errors.PluginError, match=r"make it of shape \(3,\).*shared=True"):
        run(make())
    combined = jnp.sum if name == "sum" else jnp.mean
    npt.assert_allclose(run(make(shared=True)), combined(jnp.array(of_each)), rtol=1e-6)
    npt.assert_allclose(jax.vmap(lambda x: value(fold(lambda _, x: x, make(), x[None])))(xs[0]), of_each)
    rows = treescan.mask_scan(lambda _, x: (x, None), make(), xs, lengths=jnp.array([1, 1, 0]))[0]
    npt.assert_allclose(value(rows), combined(jnp.array(of_each[:2])), rtol=1e-6)


@pytest.mark.parametrize("name", ["ema", "unbiased", "clip_gradient"])
def test_stretches_of_one_length_are_one_program(name: str) -> None:
    """Also where a hyperparameter was given as a Python number."""
    makes = {
        "ema": lambda: ema(0.0, 0.9),
        "unbiased": lambda: ema(0, 0.9, debias=True),
        "clip_gradient": lambda: clip_gradient(jnp.zeros(()), 2.0),
    }

    @functools.partial(jax.jit, donate_argnums=0)
    def stretch(carry: Any, xs: Any) -> Any:
        return fold(lambda _, x: x, carry, xs)

    carry = makes[name]()
    for _ in range(3):
        carry = stretch(carry, jnp.ones(4))
    assert stretch._cache_size() == 1


def test_a_vector_a_row_for_a_number_of_all_rows() -> None:
    with pytest.raises(treescan.errors.PluginError, match=r"For a number per entry, make it of shape \(3,\)"):
        treescan.mask_scan(lambda _, x: (x, None), ema(0.0, 0.9, shared=True), jnp.ones((4, 2, 3)), lengths=[1, 2])
