"""What skipping and `compact` keep in memory: weights stay constants of every loop, and gradients save chunks only."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from by_hand import masked_by_hand
from hlo import Program
from loops import array
from thin import slow

import treescan


def run(carried, closed, xs, **options):
    """Weights of both kinds: in the carry, returned as they came, and closed over."""

    def step(carry, x):
        h = jnp.tanh(carry["h"] @ carry["w"] @ closed + x)
        return {"h": h, "w": carry["w"]}, h

    init = {"h": jnp.zeros(xs.shape[1:]), "w": carried}
    lengths = np.arange(xs.shape[1]) * 3
    return treescan.mask_scan(step, init, xs, lengths=lengths, row_axes={"carry": {"h": 0, "w": None}}, **options)


def gradient(*args, **options):
    def total(*args):
        final, ys = run(*args, **options)
        return jnp.sum(final["h"]) + jnp.sum(ys * ys)

    return jax.grad(total, argnums=(0, 1))(*args)


@pytest.mark.parametrize(
    "options",
    [{}, {"chunk": None}, {"compact": (1,)}, {"fill": "hold"}, *slow(({"reverse": True, "remat": "nested"},))],
    ids=str,
)
def test_large_weights_are_not_copied_once_a_chunk(options):
    """`test_same_program.py` shows that those in the carry are constants of each loop."""
    steps, width = 128, 256
    given = array(width, width), array(width, width, seed=1), array(steps, 2, width, seed=2)
    program = Program(functools.partial(gradient, **{"chunk": 4} | options), *given)
    a_copy_a_chunk = steps // 4 * width * width * 4
    assert program.temp_bytes < a_copy_a_chunk / 2


def bytes_with_callbacks(on, **options):
    def total(w, xs):
        def body(h, x):
            if on:
                jax.debug.callback(lambda _: None, h[0, 0])
            return jnp.tanh(jnp.tanh(h * w) * w + x[:, None]), None

        return treescan.mask_scan(body, jnp.zeros((2, 500)), xs, lengths=np.array([256, 100]), **options)[0].sum()

    return Program(jax.grad(total), jnp.ones((1, 500)), jnp.ones((256, 2))).temp_bytes


@pytest.mark.parametrize("options", [{"remat": "step"}, {"remat": "nested"}])
def test_remat_recomputes_chunks_that_call_back(options):
    assert bytes_with_callbacks(True, **options) <= 1.01 * bytes_with_callbacks(False, **options)


@pytest.mark.parametrize("options", [{}, {"chunk": 16}, {"compact": True}])
def test_callbacks_are_repeated_by_remat_alone(options):
    called = []

    def total(h, xs):
        def body(h, x):
            jax.debug.callback(lambda _: called.append(1), h[0])
            return jnp.tanh(h + x), None

        return treescan.mask_scan(body, h, xs, lengths=np.array([64, 64]), **options)[0].sum()

    jax.block_until_ready(jax.jit(jax.grad(total))(jnp.zeros(2), jnp.ones((64, 2))))
    jax.effects_barrier()
    assert len(called) == 64


def lstm(params, carry, x):
    h, c = carry
    i, f, g, o = jnp.split(x @ params["x"] + h @ params["h"] + params["b"], 4, -1)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    h = jax.nn.sigmoid(o) * jnp.tanh(c)
    return (h, c), h


def lstm_bytes(scan):
    """Of a gradient's temporaries, for 512 steps of 64 rows."""
    steps, rows, width = 512, 64, 32  # beyond what the gradient saves in small programs

    def total(params, xs, lengths):
        init = (jnp.zeros((rows, width)), jnp.zeros((rows, width)))
        _, ys = scan(functools.partial(lstm, params), init, xs, lengths)
        return jnp.sum(ys * ys)

    params = {"x": array(width, 4 * width), "h": array(width, 4 * width), "b": array(1, 4 * width)}
    return Program(jax.grad(total), params, array(steps, rows, width), jnp.full(rows, 100)).temp_bytes


@functools.cache
def bytes_by_hand():
    return lstm_bytes(lambda body, init, xs, n: masked_by_hand(body, init, xs, jnp.arange(len(xs))[:, None] < n[None]))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"compact": (2,)},
        *slow(({"compact": True},), ({"remat": "nested"},)),
    ],
    ids=str,
)
def test_an_lstms_gradient_takes_a_fifth_of_the_memory(options):
    def scan(body, init, xs, lengths):
        return treescan.mask_scan(body, init, xs, lengths=lengths, **options)

    assert lstm_bytes(scan) <= bytes_by_hand() / 5
