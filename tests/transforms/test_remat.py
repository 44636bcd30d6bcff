"""`remat` shows in nothing but in what the gradient saves, and in how often it evaluates the body."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from loops import array
from oracle import assert_close
from thin import parametrize

import treescan


def cell(params, carry, x):
    h = checkpoint_name(jnp.tanh(params["w"] * carry["h"] + x["a"]), "h")
    return {"h": h, "n": carry["n"] + 1, "w": carry["w"]}, {"y": h * h + jnp.sin(carry["w"]), "n": x["i"]}


def arguments(steps):
    params = {"w": array(3, seed=1)}
    init = {"h": array(3, seed=2), "n": jnp.int32(0), "w": array(3, seed=5)}
    return params, init, {"a": array(steps, 3, seed=3), "i": jnp.arange(steps, dtype=jnp.int32)}


def both(verb, params, init, xs):
    """The outputs of a scan, and the gradients of params, of init and of xs."""
    ones = jax.tree.map(jnp.ones_like, (init["h"], xs["a"]))

    def loss(params, h, w, a):
        out = verb(functools.partial(cell, params), init | {"h": h, "w": w}, xs | {"a": a})
        floats = [leaf for leaf in jax.tree.leaves(out) if leaf.dtype == ones[0].dtype]
        return sum(jnp.sum(jnp.sin((k + 1) * leaf)) for k, leaf in enumerate(floats)), out

    return jax.grad(loss, (0, 1, 2, 3), has_aux=True)(params, init["h"], init["w"], xs["a"])


def assert_same(verb, oracle, given):
    got, want = (jax.jit(functools.partial(both, each))(*given) for each in (verb, oracle))
    assert_close(got, want, rtol=1e-5, atol=1e-6)


def evaluations(remat, steps, **options):
    """How often a gradient runs the body, counted while it runs."""
    calls = []

    def host(c):
        calls.append(1)
        return np.sin(c)

    @jax.custom_jvp
    def sin(c):
        return jax.pure_callback(host, jax.ShapeDtypeStruct((), jnp.float32), c)

    sin.defjvp(lambda primals, tangents: (sin(*primals), jnp.cos(primals[0]) * tangents[0]))

    def body(c, x):
        h = sin(c + x)
        return h * h, None

    def loss(c):
        return treescan.scan(body, c, jnp.ones(steps), remat=remat, **options)[0]

    jax.block_until_ready(jax.jit(jax.grad(loss))(jnp.float32(0.5)))
    return len(calls)


@parametrize("verb", {"scan": treescan.scan, "mask_scan": functools.partial(treescan.mask_scan, lengths=256, chunk=0)})
def test_what_the_gradient_saves(verb):
    """With "step" the carry of each step, with "nested" that of about two times 16 of 256."""
    steps, width = 256, 64
    xs, w = jnp.ones((steps, 2)), array(width, width)

    def body(w, c, x):
        h = c
        for _ in range(4):
            h = jnp.tanh(h @ w + jnp.sum(x))
        return h, None

    def saved(remat):
        def loss(w):
            return jnp.sum(verb(functools.partial(body, w), jnp.ones(width), xs, remat=remat)[0])

        return jax.jit(jax.grad(loss)).lower(w).compile().memory_analysis().temp_size_in_bytes

    none, step, nested = map(saved, (None, "step", "nested"))
    carries = steps * width * 4
    assert nested < step < none
    assert step - nested > carries / 2
    assert none - step > 2 * carries


@pytest.mark.parametrize(
    ("remat", "reverse"),
    [("step", False), ("nested", True), (treescan.Remat(levels=3), False), (treescan.Remat.fit(10**6), True)],
)
def test_fori(remat, reverse):
    def power(w, remat=None):
        return jnp.sum(treescan.fori(2, 30, lambda i, h: jnp.sin(h * w + i), w, remat=remat, reverse=reverse))

    w = jnp.linspace(0.1, 0.9, 5)
    plain, ours = jax.value_and_grad(power)(w), jax.value_and_grad(functools.partial(power, remat=remat))(w)
    assert_close(ours, plain)
    with jax.disable_jit():
        assert_close(power(w, remat), plain[0])


def test_fori_of_a_traced_range():
    def total(w, n, remat=None):
        return jnp.sum(treescan.fori(0, n, lambda i, h: jnp.sin(h * w + i), w, max_length=16, remat=remat))

    w = jnp.linspace(0.1, 0.9, 5)
    for remat in ("step", "nested"):
        ours = jax.jit(jax.grad(functools.partial(total, remat=remat)))(w, 11)
        assert_close(ours, jax.jit(jax.grad(total))(w, 11))
    with pytest.raises(treescan.ArgumentError, match="cannot choose a plan"):
        jax.jit(functools.partial(total, remat=treescan.Remat.fit(10**6)))(w, 11)


def test_fori_saves_less():
    def total(w, remat=None):
        return jnp.sum(treescan.fori(0, 256, lambda i, h: jnp.sin(jnp.cos(h @ w)), w, remat=remat))

    w = jnp.ones((32, 32))
    plain, ours = (
        jax.jit(jax.grad(functools.partial(total, remat=remat))).lower(w).compile().memory_analysis().temp_size_in_bytes
        for remat in (None, "nested")
    )
    assert ours < plain / 4
