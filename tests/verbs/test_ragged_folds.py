"""`fold` and `accumulate` with `lengths`: each row by itself, and its padding never read."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import treescan
from treescan.carries import ema, keys

T, B, D = 6, 4, 3
LENGTHS = np.array([6, 0, 2, 5])
W = 0.5 * jnp.eye(D) + 0.1


def step(h, x):
    return jnp.tanh(h @ W + x)


@pytest.fixture
def xs():
    data = jax.random.normal(jax.random.key(0), (T, B, D))
    valid = np.arange(T)[:, None] < LENGTHS
    return jnp.where(valid[..., None], data, jnp.nan)


@pytest.fixture
def init():
    return jax.random.normal(jax.random.key(1), (B, D))


def rows_of(init, xs, reverse):
    """Each row alone, step by step: its last carry, and all carries with 0 on its padding."""
    finals, carries = [], []
    for b, length in enumerate(LENGTHS):
        h, seen = init[b], {}
        for t in range(length)[::-1] if reverse else range(length):
            h = step(h, xs[t, b])
            seen[t] = h
        finals.append(h)
        carries.append(jnp.stack([seen.get(t, jnp.zeros(D)) for t in range(T)]))
    return jnp.stack(finals), jnp.stack(carries, axis=1)


@pytest.mark.parametrize(
    ("options", "disable_jit"),
    [({}, True), ({"reverse": True}, False), ({"remat": "step", "unroll": 2}, False)],
    ids=str,
)
def test_each_row_is_folded_by_itself(init, xs, options, disable_jit):
    final, carries = rows_of(init, xs, options.get("reverse", False))
    with jax.disable_jit(disable_jit):
        folded = treescan.fold(step, init, xs, lengths=LENGTHS, **options)
        stacked = treescan.accumulate(step, init, xs, lengths=LENGTHS, **options)
    np.testing.assert_allclose(folded, final, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(stacked, carries, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("verb", "reverse"), [("fold", True), ("accumulate", False)])
def test_gradients_are_those_of_the_rows(init, xs, verb, reverse):
    def ours(init, xs):
        return jnp.sum(jnp.sin(getattr(treescan, verb)(step, init, xs, lengths=LENGTHS, reverse=reverse)))

    def rows(init, xs):
        return jnp.sum(jnp.sin(rows_of(init, xs, reverse)[verb == "accumulate"]))

    clean = jnp.nan_to_num(xs)
    for mine, plain in zip(jax.grad(ours, (0, 1))(init, xs), jax.grad(rows, (0, 1))(init, clean), strict=True):
        np.testing.assert_allclose(mine, plain, rtol=1e-5, atol=1e-6)
    assert not np.any(jax.grad(ours, 1)(init, xs)[np.arange(T)[:, None] >= LENGTHS])


def test_under_jit_vmap_and_with_options_of_outputs(init, xs):
    mapped = jax.jit(jax.vmap(lambda xs, n: treescan.accumulate(step, init, xs, lengths=n, save="last")))
    lengths = np.stack([LENGTHS, LENGTHS[::-1]])
    both = jnp.stack([xs, jnp.nan_to_num(xs)])
    for got, data, n in zip(mapped(both, lengths), both, lengths, strict=True):
        np.testing.assert_allclose(
            got, treescan.mask_scan(lambda h, x: (step(h, x),) * 2, init, data, lengths=n, save="last")[1], rtol=1e-6
        )
    moved = treescan.accumulate(step, init, xs, lengths=LENGTHS, out_axes=1)
    np.testing.assert_array_equal(moved, jnp.moveaxis(treescan.accumulate(step, init, xs, lengths=LENGTHS), 0, 1))


def test_custom_carries(xs):
    clean = jnp.nan_to_num(xs)
    average = treescan.fold(lambda seen, x: x, ema(jnp.zeros((B, D)), 0.5), xs, lengths=LENGTHS).read()
    for b, length in enumerate(LENGTHS):
        alone = treescan.fold(lambda seen, x: x, ema(jnp.zeros(D), 0.5), clean[:length, b]).read()
        np.testing.assert_allclose(average[b], alone, rtol=1e-6)
    stacked = treescan.accumulate(lambda seen, x: x, ema(jnp.zeros((B, D)), 0.5), xs, lengths=LENGTHS)
    np.testing.assert_allclose(stacked.value[LENGTHS[0] - 1, 0], average[0])
    drawn = treescan.fold(
        lambda c, x: (c[0], c[1] + jax.vmap(jax.random.normal)(c[0])),
        (keys(jax.random.split(jax.random.key(0), B)), jnp.zeros(B)),
        xs,
        lengths=LENGTHS,
    )[1]
    assert drawn[1] == 0 and np.all(drawn[np.array([0, 2, 3])] != 0)


def test_a_body_may_take_valid(init, xs):
    def centred(h, x, *, valid):
        mean = jnp.mean(x, 0, where=valid[:, None], keepdims=True)
        mean = jnp.where(jnp.any(valid), mean, 0.0)
        return h + x - mean

    got = treescan.fold(centred, init, xs, lengths=LENGTHS)
    want = treescan.mask_scan(lambda h, x, *, valid: (centred(h, x, valid=valid), None), init, xs, lengths=LENGTHS)[0]
    np.testing.assert_allclose(got, want)
    with pytest.raises(TypeError, match="valid"):
        treescan.fold(centred, init, xs)
