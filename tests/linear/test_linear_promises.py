"""What a value does not show, or random programs do not have: memory, segments with infinities, dtypes, no retrace."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from treescan import linear_scan

METHODS = ("sequential", "chunked", "parallel")
T, B, D = 512, 4, 16
STATES = T * B * D * 4
RNG = np.random.default_rng(0)
A = jnp.asarray(RNG.random((T, B, D)), jnp.float32)
BS, W = (jnp.asarray(RNG.normal(size=(T, B, D)), jnp.float32) for _ in range(2))


LENGTHS, RESETS = jnp.array([T, 1, 30, 0]), jnp.asarray(RNG.random((T, B)) < 0.1)


def states_of_gradient(a=A, **options):
    """Temporary memory of the gradient by all arrays, in arrays of all states. It is exact."""

    def loss(a, b, init):
        last, hs = linear_scan(a, b, init, **options)
        return jnp.sum(last**2) if options.get("save") else jnp.sum(hs**2 * W)

    compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(a, BS, BS[0]).compile()
    return compiled.memory_analysis().temp_size_in_bytes / STATES


MEMORY = {  # the options, and the most states of "sequential" and of the other methods
    "plain": ({}, 1.1, 3),
    "segments": ({"lengths": LENGTHS, "resets": RESETS}, 1.1, 4),
    "back": ({"lengths": LENGTHS, "resets": RESETS, "reverse": True}, 1.25, 4),
    "mask": ({"mask": ~RESETS}, 1.1, 4),
    "segments alone": ({"resets": RESETS, "reset_to": 0.5}, 1.1, 3.1),
    # The loss's cotangent is the second: no gradient of that size is there whose memory it could have.
    "one factor": ({"a": jnp.float32(0.5)}, 2.1, 4),
    "a factor of all rows": ({"a": A[:, :1]}, 2.1, 4),
    "parts": ({"save": "last", "remat": 16}, 0.3, None),
}


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("case", "method"),
    [
        ("segments", "sequential"),
        *(slow(case, "sequential") for case in MEMORY if case != "segments"),
        *(slow(case, method) for case in MEMORY if case != "parts" for method in METHODS[1:]),
    ],
)
def test_the_gradient_takes_the_memory_of_few_arrays_of_states(case, method):
    options, of_sequential, of_others = MEMORY[case]
    assert states_of_gradient(method=method, **options) < (of_sequential if method == "sequential" else of_others)


@pytest.mark.parametrize("method", ["sequential", *map(slow, METHODS[1:])])
@pytest.mark.parametrize("shared", [False, slow(True)])
def test_a_constant_cotangent_is_not_written_out(method, shared):
    def memory(loss):
        a = A[:, :1] if shared else A
        gradient = jax.jit(jax.grad(lambda a, b: jnp.sum(loss(linear_scan(a, b, method=method)[1])), (0, 1)))
        return gradient.lower(a, BS).compile().memory_analysis().temp_size_in_bytes / STATES

    assert memory(lambda hs: hs) == pytest.approx(memory(lambda hs: W * hs), abs=0.05)


@pytest.mark.quick
@pytest.mark.parametrize("method", ["sequential", "chunked", slow("parallel")])
def test_an_infinity_or_a_large_product_stays_in_its_segment(method):
    a = jnp.full((60, 2), 10.0).at[52:].set(0.5)
    b = jnp.zeros((60, 2)).at[40].set(jnp.inf)
    resets = jnp.zeros(60, bool).at[50].set(True)[:, None] & jnp.ones((60, 2), bool)

    def after(a, b, init):
        return linear_scan(a, b, init, resets=resets, reset_to=1.0, method=method)[1][50:]

    wanted = linear_scan(a[50:], b[50:], 1.0)[1]
    np.testing.assert_allclose(after(a, b, jnp.ones(2)), wanted, rtol=1e-6)
    gradients = jax.grad(lambda *given: jnp.sum(after(*given)), (0, 1, 2))(a, b, jnp.ones(2))
    own = jax.grad(lambda *given: jnp.sum(linear_scan(*given, 1.0)[1]), (0, 1))(a[50:], b[50:])
    for each, other in zip(gradients, own, strict=False):
        np.testing.assert_allclose(each[50:], other, rtol=1e-6)
    if method == "sequential":  # a product that overflows has no gradient in its own segment otherwise
        np.testing.assert_array_equal(gradients[1][:50], 0)


@pytest.mark.quick
@pytest.mark.parametrize("method", ["sequential", *map(slow, METHODS[1:])])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, slow(jnp.float16)])
def test_half_precision_has_a_state_in_float32(method, dtype):
    a, b = A.astype(dtype), BS.astype(dtype)
    last, hs = linear_scan(a, b, method=method)
    assert (last.dtype, hs.dtype) == (jnp.float32, dtype)
    exact = linear_scan(a.astype(jnp.float32), b.astype(jnp.float32))
    np.testing.assert_allclose(last, exact[0], rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(hs.astype(jnp.float32), exact[1], rtol=1e-2, atol=1e-2)
    assert jax.grad(lambda b: jnp.sum(linear_scan(a, b, method=method)[1].astype(jnp.float32)))(b).dtype == dtype


@pytest.mark.quick
def test_trees_scalars_and_one_step_at_a_time():
    b = {"x": BS[:5], "y": (BS[:5, :, :3], BS[:5, 0])}
    last, hs = linear_scan({"x": A[:5], "y": 0.5}, b, reverse=True)
    np.testing.assert_array_equal(hs["x"], linear_scan(A[:5], BS[:5], reverse=True)[1])
    np.testing.assert_array_equal(last["y"][1], linear_scan(0.5, BS[:5, 0], reverse=True)[0])
    assert linear_scan(A[:5], BS[:5], save=None)[1] is None
    with jax.disable_jit():
        np.testing.assert_allclose(linear_scan(A[:5], b["x"], reverse=True)[1], hs["x"], rtol=1e-6)


@pytest.mark.slow
def test_returns_are_those_of_rlax():
    rlax = pytest.importorskip("rlax")
    discount = jnp.where(A[:20, 0, 0] < 0.2, 0.0, 0.99)
    reward, value = BS[:20, 0, 0], W[:21, 0, 0]
    returns = linear_scan(0.9 * discount, reward + discount * 0.1 * value[1:], value[-1], reverse=True)[1]
    np.testing.assert_allclose(returns, rlax.lambda_returns(reward, discount, value[1:], 0.9), rtol=1e-4, atol=1e-5)
    gae = linear_scan(0.9 * discount, reward + discount * value[1:] - value[:-1], reverse=True)[1]
    wanted = rlax.truncated_generalized_advantage_estimation(reward, discount, 0.9, value)
    np.testing.assert_allclose(gae, wanted, rtol=1e-4, atol=1e-5)
