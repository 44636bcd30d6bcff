"""`remat="auto"` and `Remat.fit` where there is nothing to plan, or no telling: bodies without a gradient, symbols."""

import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import treescan
from treescan import Remat

F32 = jax.ShapeDtypeStruct((), jnp.float32)
XS = jnp.linspace(0.0, 0.2, 40)
AUTO, FIT = "auto", Remat.fit(10**8)


def solver(c, x):
    return jax.lax.while_loop(lambda v: v < 3.0, lambda v: v * 2.0, c + x) * 0.1, c


def host(c, x):
    return c + jax.pure_callback(lambda a: np.asarray(a) * 2, F32, x, vmap_method="sequential"), c


def log(c, x):
    io_callback(lambda c: None, None, c)
    return c + x, c


@jax.custom_vjp
def doubled(x):
    return 2 * x


def _fails(residuals, cotangent):
    raise RuntimeError("the rule of the user")


doubled.defvjp(lambda x: (2 * x, None), _fails)


def broken(c, x):
    return 0.4 * doubled(c) + x, c


VERBS = {
    "scan": lambda body, xs, remat: treescan.scan(body, 0.5, xs, remat=remat),
    "fori": lambda body, xs, remat: treescan.fori(0, len(xs), lambda i, c: body(c, XS[i])[0], 0.5, remat=remat),
    "turns": lambda body, xs, remat: treescan.fold_layers(
        [lambda x, c: body(c, x)[0]] * 2, jnp.float32(0.5), (xs[::2], xs[1::2]), remat=remat
    ),
}
FORWARDS = [(solver, 40, "scan"), (host, 4, "fori"), (broken, 40, "turns"), (log, 4, "scan"), (log, 0, "scan")]


@pytest.mark.parametrize(("body", "steps", "verb"), FORWARDS)
def test_a_loop_that_only_runs_forwards_has_no_plan(body, steps, verb):
    run = VERBS[verb]
    want = run(body, XS[:steps], None)
    for remat in (FIT,) if verb == "turns" else (AUTO, FIT):
        if body is log and remat is FIT and steps:
            with pytest.raises(
                treescan.errors.ArgumentError, match="has an effect"
            ):  # as under any plan that recomputes
                run(body, XS[:steps], remat)
            continue
        got = jax.jit(lambda xs, r=remat: run(body, xs, r))(XS[:steps])
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), got, want)


def test_forward_mode_and_vmap():
    def run(c, remat):
        return treescan.scan(solver, c, XS, remat=remat)[0]

    want = jax.jvp(lambda c: jax.lax.scan(solver, c, XS)[0], (0.5,), (1.0,))
    for remat in (AUTO, FIT):
        np.testing.assert_allclose(jax.jvp(lambda c, r=remat: run(c, r), (0.5,), (1.0,)), want, rtol=1e-6)
        got = jax.vmap(lambda c, r=remat: run(c, r))(jnp.array([0.5, 1.0]))
        np.testing.assert_allclose(got[0], want[0], rtol=1e-6)


def test_a_gradient_is_refused_in_the_words_of_jax():
    for remat in (AUTO, FIT):
        with pytest.raises(ValueError, match="Reverse-mode differentiation does not work"):
            jax.grad(lambda c, r=remat: treescan.scan(solver, c, XS, remat=r)[0])(0.5)


def test_a_budget_counts_for_a_gradient_that_a_callback_on_xs_does_not_stop():
    """JAX cannot differentiate the callback, but a gradient of the carry does not ask for it."""
    weights = jnp.eye(8)

    def body(h, x):
        x = jax.pure_callback(lambda a: np.asarray(a), jax.ShapeDtypeStruct((8,), jnp.float32), x)
        return jnp.sin(h @ weights + x), None

    def run(h, remat):
        return jnp.sum(treescan.scan(body, h, jnp.ones((64, 8)), remat=remat)[0])

    gradients = [jax.grad(run)(jnp.ones(8), remat) for remat in (None, Remat.fit(2500))]
    np.testing.assert_allclose(*gradients, rtol=1e-6)
    with pytest.raises(treescan.errors.ArgumentError, match="no plan fits"):
        run(jnp.ones(8), Remat.fit(10))


# Symbolic sizes.


def test_a_symbolic_batch():
    (rows,) = jax.export.symbolic_shape("b")
    spec = jax.ShapeDtypeStruct((64, rows), jnp.float32)

    def run(x, remat):
        return treescan.scan(lambda h, x: (jnp.tanh(h + x), h), jnp.zeros(x.shape[1]), x, remat=remat)

    for remat in (None, "nested", AUTO):
        exported = jax.export.export(jax.jit(functools.partial(run, remat=remat)))(spec)
        x = jnp.ones((64, 3))
        for got, want in zip(exported.call(x), run(x, remat), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-6)


# Rules with symbolic zeros.


def rule_for_what_is_perturbed():
    """A product whose rule saves less if only x is perturbed. JAX runs it once for each trace."""

    @jax.custom_vjp
    def times(x, y):
        return x * y

    def forward(x, y):
        assert x.perturbed
        return x.value * y.value, ((x.value, y.value) if y.perturbed else (y.value,))

    def backward(kept, g):
        return (g * kept[1], g * kept[0]) if len(kept) == 2 else (g * kept[0], None)

    times.defvjp(forward, backward, symbolic_zeros=True)
    return times


def product(outer=lambda times: times, both=False):
    """A loop that calls such a product, within what `outer` makes of it, of x and y, or of two leaves of its carry."""
    times = outer(rule_for_what_is_perturbed())

    def of_both(x, y, remat):
        body = lambda c, _: ((times(c[0], c[1]), c[0] * 1.1), c[1])  # noqa: E731
        return treescan.scan(body, (x, jnp.float32(1)), y, remat=remat)[0][0]

    def of_one(x, y, remat):
        return treescan.scan(lambda c, y: (0.9 * times(c, y), None), x, y, remat=remat)[0]

    return of_both if both else of_one


X, Y = jnp.float32(1.01), jnp.linspace(1.0, 1.1, 40)


@pytest.mark.parametrize("outer", [lambda times: times, jax.jit], ids=["plain", "jit"])
@pytest.mark.parametrize("remat", ["nested", AUTO, FIT], ids=str)
def test_a_rule_with_symbolic_zeros_is_first_run_by_the_gradient(outer, remat):
    for both in (False, True):
        want = jax.grad(product(outer, both))(X, Y, None)
        run = product(outer, both)
        run(X, Y, remat)
        np.testing.assert_allclose(jax.grad(run)(X, Y, remat), want, rtol=1e-4)


def test_nor_is_it_run_by_what_describes_a_plan():
    times = rule_for_what_is_perturbed()

    def step(c, y):
        return 0.9 * times(c, y), None

    for remat in (None, AUTO, FIT):
        assert treescan.describe(treescan.scan, step, X, Y, remat=remat).plan.bytes
        assert treescan.plan_remat(step, X, Y, remat=remat).steps == 40
    got = jax.grad(lambda c: treescan.scan(step, c, Y, remat=AUTO)[0])(X)
    np.testing.assert_allclose(got, jax.grad(product())(X, Y, None), rtol=1e-4)


def test_such_a_rule_in_a_branch_cannot_be_counted():
    run = product(lambda times: lambda x, y: jax.lax.cond(y > -1, times, lambda x, y: x, x, y))
    np.testing.assert_allclose(jax.grad(run)(X, Y, AUTO), jax.grad(product())(X, Y, None), rtol=1e-4)
    with pytest.raises(treescan.errors.ArgumentError, match="symbolic zeros"):
        run(X, Y, FIT)


def test_a_body_that_auto_leaves_alone_is_not_differentiated():
    """Nor is a short loop: a trace of the derivative takes longer than the loop."""
    calls = []

    @jax.custom_jvp
    def watched(x):
        return 2 * x

    @watched.defjvp
    def rule(primals, tangents):
        calls.append(1)
        return watched(*primals), 2 * tangents[0]

    treescan.scan(lambda c, x: (0.1 * watched(c) + x, None), 0.5, XS[:4], remat=AUTO)
    assert not calls
