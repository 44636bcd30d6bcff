"""`jax.linear_transpose` of a loop that is linear, as rules of `jax.custom_jvp` and Krylov solvers call it."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import treescan

T, B = 48, 3
RNG = np.random.default_rng(0)
A, XS = (jnp.asarray(RNG.uniform(0.2, 0.9, (T, B)), jnp.float32) for _ in range(2))
H0, TO = jnp.asarray(RNG.normal(size=(2, B)), jnp.float32)
MATRICES = jnp.asarray(0.4 * RNG.normal(size=(T, B, B)), jnp.float32)
LENGTHS, RESETS = jnp.array([T, 3, 0]), jnp.asarray(RNG.random((T, B)) < 0.2)
MASK = jnp.asarray(RNG.random((T, B)) < 0.8)

# On JAX 0.8, a scan can only be transposed as part of a derivative.
OF_SCANS = pytest.mark.skipif(jax.__version_info__ < (0, 9), reason="JAX 0.8 transposes no `jax.lax.scan` by itself")


def transposed(f, *given):
    """The transpose as JAX makes it of the function, and as it makes it of its derivative."""
    cotangents = jax.tree.map(
        lambda leaf: jnp.cos(jnp.arange(leaf.size, dtype=leaf.dtype)).reshape(leaf.shape), f(*given)
    )
    return jax.linear_transpose(f, *given)(cotangents), jax.vjp(f, *given)[1](cotangents)


@pytest.mark.parametrize("method", [pytest.param("sequential", marks=OF_SCANS), "chunked", "parallel"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lengths": LENGTHS},
        {"mask": MASK, "reverse": True},
        {"resets": RESETS, "lengths": LENGTHS},
        {"lengths": LENGTHS, "fill": "hold"},
        {"matrix": True},
        {"save": "last", "lengths": LENGTHS},
    ],
    ids=lambda options: "-".join(options),
)
@pytest.mark.parametrize("staged", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["", "jit"])
def test_linear_scan_is_transposed_by_every_method(method, options, staged):
    a = MATRICES if "matrix" in options else A

    def f(b, init):
        return treescan.linear_scan(a, b, init, method=method, **options)

    got, want = transposed(jax.jit(f) if staged else f, XS, H0)
    chex.assert_trees_all_close(got, want, rtol=1e-5, atol=1e-5)


@OF_SCANS
def test_linear_scan_is_transposed_with_respect_to_where_segments_begin():
    def f(b, init, to):
        return treescan.linear_scan(A, b, init, resets=RESETS, reset_to=to, lengths=LENGTHS)

    got, want = transposed(f, XS, H0, TO)
    chex.assert_trees_all_close(got, want, rtol=1e-5, atol=1e-5)


def linear(b):
    return treescan.linear_scan(0.5, b, lengths=LENGTHS)[1]


def masked(b):
    return treescan.mask_scan(lambda h, x: (0.5 * h + x,) * 2, jnp.zeros(B), b, lengths=LENGTHS)[1]


@OF_SCANS
@pytest.mark.parametrize("f", [linear, masked])
def test_a_rule_that_runs_the_loop_on_a_tangent(f):
    ruled = jax.custom_jvp(f)
    ruled.defjvp(lambda primals, tangents: (ruled(*primals), f(*tangents)))
    weights = jnp.sin(jnp.arange(T * B, dtype=jnp.float32)).reshape(T, B)
    got, want = (jax.grad(lambda b, g=g: jnp.vdot(weights, g(b)))(XS) for g in (ruled, f))
    chex.assert_trees_all_close(got, want, rtol=1e-5, atol=1e-5)


@OF_SCANS
@pytest.mark.parametrize("f", [linear, masked])
def test_the_gradient_of_a_linear_solve(f):
    def solved(right):
        return jax.scipy.sparse.linalg.bicgstab(lambda v: v + f(v), right, tol=1e-6)[0].sum()

    direct = jnp.linalg.inv(jnp.eye(T * B) + jax.jacobian(f)(XS).reshape(T * B, T * B)).sum(0).reshape(T, B)
    chex.assert_trees_all_close(jax.grad(solved)(XS), direct, rtol=1e-3, atol=1e-3)


def of_few_steps(b):
    return treescan.mask_scan(lambda h, x: (0.5 * h + x,) * 2, jnp.zeros(B), b, lengths=jnp.array([5, 3, 0]))[1]


def stopping(b):
    def step(carry, x):
        count, h = carry
        h = 0.5 * h + x
        return (count + 1, h), h

    return treescan.while_scan(lambda carry: carry[0] < 40, step, (0, jnp.zeros(B)), b).ys


@pytest.mark.parametrize(("f", "b"), [(of_few_steps, XS[:5]), (masked, XS), (stopping, XS)])
def test_the_derivative_of_any_loop_that_is_linear_can_be_transposed(f, b):
    """What the pages say to write for loops that JAX cannot transpose as they are."""

    def derivative(b):
        return jax.jvp(f, (jnp.zeros_like(b),), (b,))[1]

    (got,), (want,) = transposed(derivative, b)
    chex.assert_trees_all_close(f(b), derivative(b), rtol=1e-6, atol=1e-6)
    chex.assert_trees_all_close(got, want, rtol=1e-5, atol=1e-5)
