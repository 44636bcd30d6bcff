"""What skipping and `compact` keep in memory: weights stay constants of every loop, and gradients save chunks only."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hlo import Program
from jaxprs import equations, num_consts
from loops import array
from thin import parametrize

import treescan

STEPS, ROWS, WIDTH = 12, 3, 5
OPTIONS = {
    "chunk": {"chunk": 4},
    "remainder": {"chunk": 5},
    "reverse": {"chunk": 4, "reverse": True},
    "compact": {"chunk": 4, "compact": True},
    "tiers": {"chunk": 5, "compact": (1,)},
    "resets": {"chunk": 4, "resets": np.arange(STEPS)[:, None] % np.array([3, 4, 5]) == 0},
    "hold": {"chunk": 4, "fill": "hold"},
    "hold compact": {"chunk": 4, "fill": "hold", "compact": (2,)},
    "remat step": {"chunk": 4, "remat": "step"},
    "remat nested": {"chunk": 2, "remat": "nested"},
}


def run(carried, closed, xs, **options):
    """Weights of both kinds: in the carry, returned as they came, and closed over."""

    def step(carry, x):
        h = jnp.tanh(carry["h"] @ carry["w"] @ closed + x)
        return {"h": h, "w": carry["w"]}, h

    init = {"h": jnp.zeros(xs.shape[1:]), "w": carried}
    lengths = np.arange(xs.shape[1]) * 3
    return treescan.mask_scan(step, init, xs, lengths=lengths, carry_axes={"h": 0, "w": None}, **options)


def gradient(*args, **options):
    def total(*args):
        final, ys = run(*args, **options)
        return jnp.sum(final["h"]) + jnp.sum(ys * ys)

    return jax.grad(total, argnums=(0, 1))(*args)


def given(steps=STEPS, rows=ROWS, width=WIDTH):
    return array(width, width), array(width, width, seed=1), array(steps, rows, width, seed=2)


@parametrize("options", OPTIONS)
def test_weights_are_constants_of_the_inner_and_the_outer_loop(options):
    """And the gradient saves none for a step or a chunk."""
    jaxpr = jax.make_jaxpr(functools.partial(run, **options))(*given())
    loops = list(equations(jaxpr.jaxpr, "scan"))
    assert len(loops) >= 2
    for loop in loops:
        shapes = [var.aval.shape for var in loop.invars]
        assert shapes[: num_consts(loop)].count((WIDTH, WIDTH)) == 2
        assert (WIDTH, WIDTH) not in shapes[num_consts(loop) :]
        assert not stacks_of_weights(loop)
    jaxpr = jax.make_jaxpr(functools.partial(gradient, **options))(*given())
    loops = list(equations(jaxpr.jaxpr, "scan"))
    assert len(loops) >= 4
    for loop in loops:
        assert not stacks_of_weights(loop)


def stacks_of_weights(loop):
    shapes = [var.aval.shape for var in (*loop.invars, *loop.outvars)]
    return [shape for shape in shapes if len(shape) > 2 and shape[-2:] == (WIDTH, WIDTH)]


@pytest.mark.parametrize("name", ["chunk", "tiers", pytest.param("remat nested", marks=pytest.mark.slow)])
def test_large_weights_are_not_copied_once_a_chunk(name):
    steps, width = 128, 256
    options = OPTIONS[name] | {"chunk": 4}
    program = Program(functools.partial(gradient, **options), *given(steps, 2, width))
    a_copy_a_chunk = steps // 4 * width * width * 4
    assert program.temp_bytes < a_copy_a_chunk / 2


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
    def scan(body, init, xs, lengths):
        def step(carry, given):
            x, valid = given
            new, y = body(carry, x)
            held = jax.tree.map(lambda a, b: jnp.where(valid[:, None], a, b), new, carry)
            return held, jnp.where(valid[:, None], y, 0.0)

        return jax.lax.scan(step, init, (xs, jnp.arange(xs.shape[0])[:, None] < lengths[None]))

    return lstm_bytes(scan)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"compact": (2,)},
        *(pytest.param(o, marks=pytest.mark.slow) for o in ({"compact": True}, {"remat": "nested"})),
    ],
    ids=str,
)
def test_an_lstms_gradient_takes_a_fifth_of_the_memory(options):
    def scan(body, init, xs, lengths):
        return treescan.mask_scan(body, init, xs, lengths=lengths, **options)

    assert lstm_bytes(scan) <= bytes_by_hand() / 5
