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


@pytest.mark.parametrize("options", [{}, {"reverse": True, "remat": "step"}, {"unroll": 2}], ids=str)
def test_it_is_the_masked_scan(init, xs, options):
    """Whose rows are those of a plain loop; padding has no gradient."""

    def masked(init, xs):
        return treescan.mask_scan(lambda h, x: (step(h, x),) * 2, init, xs, lengths=LENGTHS, **options)

    def folds(init, xs):
        given = {"lengths": LENGTHS, **options}
        return treescan.fold(step, init, xs, **given), treescan.accumulate(step, init, xs, **given)

    for ours, want in zip(*(both(run)(init, xs) for run in (folds, masked)), strict=True):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), ours, want)


def both(run):
    """What comes out, and the gradients."""

    def loss(*given):
        found = run(*given)
        return sum(jnp.sum(jnp.sin(leaf)) for leaf in found), found

    return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))


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
