"""What built-in carries do with what they cannot hold, and at the ends of their ranges."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import treescan
from treescan import fold
from treescan.carries import (
    Keys,
    best,
    buffer,
    cast,
    clip_gradient,
    ema,
    moments,
    stop_gradient,
    sum_,
    window,
)


def limited(h: jax.Array, scale: jax.Array) -> jax.Array:
    def loss(h: jax.Array) -> jax.Array:
        return jnp.sum(fold(lambda h, _: h * scale, clip_gradient(h, max_norm=1.0), length=1).tree)

    return jax.grad(loss)(h)


@pytest.mark.parametrize("dtype, scale", [(jnp.float32, 1e30), (jnp.float16, 6e4), (jnp.float32, jnp.inf)])
def test_a_gradient_that_explodes_keeps_its_direction(dtype: Any, scale: float) -> None:
    gradient = limited(jnp.ones(2, dtype), jnp.asarray(scale, dtype))
    np.testing.assert_allclose(gradient, np.full(2, 0.5**0.5), rtol=1e-3)


def test_a_gradient_within_the_norm_is_the_same() -> None:
    np.testing.assert_array_equal(limited(jnp.ones(2), jnp.asarray(0.25)), np.full(2, 0.25, np.float32))
    np.testing.assert_array_equal(limited(jnp.ones(2), jnp.asarray(0.0)), np.zeros(2, np.float32))


LOSSY: dict[str, tuple[Any, Any]] = {
    "window": (window(jnp.array([0, 1])), 0.5),
    "best": (best(0), (0.5, 0.5)),
    "buffer": (buffer(0, 4), (0.5, True)),
    "sum": (sum_(), 1 + 1j),
    "ema": (ema(0.0, 0.9), 1j),
}


@pytest.mark.parametrize("name", LOSSY)
def test_what_cannot_be_held_is_refused(name: str) -> None:
    init, returned = LOSSY[name]
    with pytest.raises(treescan.PluginError, match="cannot hold"):
        fold(lambda seen, x: returned, init, jnp.ones(2))


def test_a_flag_is_true_unless_it_is_zero() -> None:
    assert int(fold(lambda seen, x: (x, 0.5), buffer(0.0, 4), jnp.ones(3)).count) == 3


def test_half_precision_moments_count_beyond_its_range() -> None:
    values = jnp.tile(jnp.array([0.0, 1.0], jnp.float16), (2, 300))
    mask = jnp.ones((2, 600), bool)
    final, _ = treescan.mask_scan(lambda c, x: (x, None), moments(dtype=jnp.float16), values, mask=mask)
    np.testing.assert_allclose(final.squares, 300, rtol=1e-2)


@pytest.mark.parametrize(
    "make", [lambda: moments(dtype=int), lambda: ema(5.0, 0.9, debias=True), lambda: buffer((), 3)]
)
def test_starts_that_cannot_be(make: Any) -> None:
    with pytest.raises(ValueError, match=r"floating-point|starts from 0|no leaves"):
        make()


def test_the_best_of_no_rows_stays() -> None:
    none = jnp.zeros((2, 0))
    final, _ = treescan.mask_scan(lambda c, x: ((x, x), None), best(7.0), none, mask=jnp.zeros((2, 0), bool))
    assert float(final.value) == 7.0


def test_a_raw_numpy_key() -> None:
    raw = np.asarray(jax.random.key_data(jax.random.key(3)))
    _, drawn = treescan.scan(lambda key, _: (key, jax.random.key_data(key)), Keys(raw), length=2)
    expected = [jax.random.key_data(jax.random.fold_in(jax.random.key(3), n)) for n in range(2)]
    np.testing.assert_array_equal(drawn, np.stack(expected))


MAKERS = {
    "best": best,
    "cast": cast,
    "ema": lambda value: ema(value, 0.5),
    "window": window,
    "sum_": sum_,
    "clip_gradient": lambda value: clip_gradient(value, 1.0),
    "stop_gradient": stop_gradient,
}


@pytest.mark.parametrize("name", MAKERS)
def test_a_state_that_holds_a_value_and_its_carry_can_be_donated(name: str) -> None:
    weights = jnp.arange(3.0)
    state = {"w": weights, "score": jnp.ones(()), "seen": MAKERS[name](weights)}
    pointers = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array)}
    assert len(pointers) == sum(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(state))
    donated = jax.jit(lambda state: jax.tree.map(lambda leaf: leaf + 1, state), donate_argnums=0)(state)
    assert donated["w"].tolist() == [1, 2, 3]


def test_the_best_and_its_score_are_copies_where_they_have_buffers() -> None:
    weights, score = jnp.arange(3.0), jnp.ones(())
    state = {"w": weights, "score": score, "best": best(weights, score)}

    @functools.partial(jax.jit, donate_argnums=0)
    def train(state: dict[str, Any]) -> Any:
        return treescan.fold(lambda state, x: {**state, "best": (x, state["w"] + x)}, state, jnp.array([0.5, 2.0]))

    assert train(state)["best"].value.tolist() == [2, 3, 4]
    kept = jnp.ones(3)
    for make in (lambda x: best(x).value, lambda x: best(kept).value, lambda x: cast(kept).tree):
        assert not jax.make_jaxpr(make)(kept).eqns


NUMBERS = {
    "ema": (lambda **o: ema(0.0, 0.5, **o), lambda c: c.value, [0.5, 5.0, 50.0]),
    "sum": (sum_, lambda c: c.total, [1.0, 10.0, 100.0]),
    "moments": (moments, lambda c: c.mean, [1.0, 10.0, 100.0]),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_a_carry_of_a_number_combines_the_entries_of_a_vector_only_if_told_to(name: str) -> None:
    make, value, of_each = NUMBERS[name]
    xs = jnp.array([[1.0, 10.0, 100.0]])

    def run(init: Any) -> Any:
        return value(fold(lambda _, x: x, init, xs))

    with pytest.raises(treescan.PluginError, match=r"make it of shape \(3,\).*shared=True"):
        run(make())
    combined = jnp.sum if name == "sum" else jnp.mean
    np.testing.assert_allclose(run(make(shared=True)), combined(jnp.array(of_each)), rtol=1e-6)
    np.testing.assert_allclose(jax.vmap(lambda x: value(fold(lambda _, x: x, make(), x[None])))(xs[0]), of_each)
    rows = treescan.mask_scan(lambda _, x: (x, None), make(), xs, lengths=jnp.array([1, 1, 0]))[0]
    np.testing.assert_allclose(value(rows), combined(jnp.array(of_each[:2])), rtol=1e-6)
    rows = treescan.mask_scan(lambda _, x: (x, None), make(), xs, resets=jnp.zeros((1, 3), bool))[0]
    np.testing.assert_allclose(value(rows), combined(jnp.array(of_each)), rtol=1e-6)


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
    with pytest.raises(treescan.PluginError, match=r"For a number per entry, make it of shape \(3,\)"):
        treescan.mask_scan(lambda _, x: (x, None), ema(0.0, 0.9, shared=True), jnp.ones((4, 2, 3)), lengths=[1, 2])
