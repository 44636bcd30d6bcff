"""What the gradient of a masked scan saves of its chunks: one carry each, or the steps where these are few and dear."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxprs import equations
from loops import array
from oracle import assert_close

import treescan

STEPS, ROWS, WIDTH = 40, 3, 4
LENGTHS = np.array([40, 17, 0])


def solving(w, h, x):
    """A step that is dear for what it saves."""
    matrix = jnp.broadcast_to(jnp.eye(WIDTH) + 0.1 * w, (*h.shape, WIDTH))
    h = jnp.linalg.solve(matrix, (h + x)[..., None])[..., 0]
    return jnp.sin(h), h


def widening(w, h, x):
    """One that saves a matrix for each row."""
    wide = jnp.sin(h[..., None] + w[None])
    return h + 0.1 * wide.sum(-1) + x, h


def loss(step, w, h, xs, **options):
    final, ys = treescan.mask_scan(functools.partial(step, w), h, xs, lengths=LENGTHS[: h.shape[0]], **options)
    return jnp.sum(final**2) + jnp.sum(ys**2)


def given(steps=STEPS, rows=ROWS, width=WIDTH):
    return array(width, width), array(rows, width, seed=1), array(steps, rows, width, seed=2)


def evaluations(step, args, **options):
    """How often the compiled derivative has the step's own sine: once for each time that the step is computed."""
    jaxpr = jax.make_jaxpr(jax.grad(functools.partial(loss, step, **options), argnums=(0, 1, 2)))(*args)
    return len(list(equations(jaxpr.jaxpr, "sin")))


def test_dear_steps_are_saved_and_not_computed_again():
    default, recomputed = (evaluations(solving, given(), **options) for options in ({}, {"chunk": 8}))
    assert default < recomputed


@pytest.mark.parametrize("options", [{"chunk": 8}, {"compact": True}, {"remat": "step"}], ids=str)
def test_what_the_user_asked_to_recompute_is_recomputed(options):
    assert evaluations(solving, given(), **options) > evaluations(solving, given())


def test_steps_without_products_are_saved_however_much_that_is():
    width, rows = 64, 3
    big = given(STEPS * 16, rows, width)
    assert evaluations(widening, given()) == evaluations(widening, big) < evaluations(widening, big, chunk=8)


def test_weights_are_not_saved_for_each_chunk():
    """Without a checkpoint around the branch they would be: 32 chunks of 1 MB here."""
    steps, width = 512, 512
    args = {"h": jnp.eye(width), "b": jnp.zeros(width)}, jnp.zeros((1, width)), jnp.ones((steps, 1, width))

    def step(p, h, x):
        return jnp.tanh(h @ p["h"] + x + p["b"][None]), None

    def memory(**options):
        def total(p, h, xs):
            return jnp.sum(treescan.fold(lambda h, x: step(p, h, x)[0], h, xs, lengths=jnp.array([steps]), **options))

        return jax.jit(jax.grad(total)).lower(*args).compile().memory_analysis().temp_size_in_bytes

    assert memory() < 3 * steps * width * 4 + 4 * width * width * 4


def test_padding_is_not_read_by_a_gradient_that_saves_its_steps():
    w, h, xs = given()
    padded = jnp.where((np.arange(STEPS)[:, None] < LENGTHS)[..., None], xs, jnp.nan)
    everything = (0, 1, 2)
    found = jax.grad(functools.partial(loss, solving), everything)(w, h, padded)
    assert_close(found, jax.grad(functools.partial(loss, solving), everything)(w, h, xs))
