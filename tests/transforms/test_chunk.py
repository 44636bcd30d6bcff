"""`chunk` against the plain loop: any length, and any sizes."""

import dataclasses
import itertools
import math

import chex
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from thin import all_pairs, everyday

from treescan._body.call import CallBody
from treescan._loop.chunk import Level, Wish, plan_sizes, run_chunked as run_levels
from treescan._loop.loop import Body, Feed, Loop
from treescan._loop.run import run


def body(carry, x):
    """`fixed` comes back as it was given."""
    h = jnp.tanh(carry["h"] * carry["fixed"] + x)
    return {"h": h, "fixed": carry["fixed"]}, h * x


def make_loop(length, *, reverse=False):
    xs = jnp.sin(jnp.arange(2.0 * length)).reshape(length, 2)
    state = {"h": jnp.array([0.1, 0.2]), "fixed": jnp.array([0.7, 1.3])}
    handle = Body.of(body)
    return Loop(handle, CallBody(handle), None, state, Feed(xs), length, reverse)


def run_chunked(loop, sizes):
    return run_levels(loop, tuple(map(Level, sizes)))


GRID = list(itertools.product([0, 12, 41], [(3,), (2, 4, 12), (64,)], [False, True]))


@pytest.mark.parametrize(("length", "sizes", "reverse"), everyday(all_pairs(GRID)))
def test_equals_the_plain_loop_in_value_and_gradient(length, sizes, reverse):
    loop = make_loop(length, reverse=reverse)

    def loss(runner, state, xs):
        final, ys = runner(dataclasses.replace(loop, state=state, xs=Feed(xs)))
        return jnp.sum(final["h"] ** 2) + jnp.sum(jnp.cos(ys)), (final, ys)

    grad = jax.value_and_grad(loss, argnums=(1, 2), has_aux=True)
    chunked = grad(lambda loop: run_chunked(loop, sizes), loop.state, loop.xs.x)
    plain = grad(run, loop.state, loop.xs.x)
    chex.assert_trees_all_close(chunked, plain, rtol=1e-5, atol=1e-6)
    chex.assert_trees_all_equal(chunked[0][1], plain[0][1])  # the operations of the forward pass are the same


def test_chunks_divide_and_remain_in_reverse_at_the_same_positions():
    """Boundaries lie at multiples of the size, whatever the direction: the rest is at the highest positions."""
    seen = []

    def body(carry, x):
        jax.debug.callback(lambda i: seen.append(int(i)), x, ordered=True)
        return carry, x

    handle = Body.of(body)
    loop = Loop(handle, CallBody(handle), None, jnp.zeros(()), Feed(jnp.arange(7)), 7, reverse=True)
    _, ys = run_chunked(loop, (3,))
    jax.effects_barrier()
    assert seen == [6, 5, 4, 3, 2, 1, 0]
    assert ys.tolist() == list(range(7))


def test_planner_by_example():
    assert plan_sizes(100, []) == ()
    assert plan_sizes(100, [Wish(10)]) == (10,)
    assert plan_sizes(100, [Wish(10), Wish(12)]) == (10,)  # near enough: one chunk serves both
    assert plan_sizes(100, [Wish(6, exact=True), Wish(7)]) == (6,)
    assert plan_sizes(1000, [Wish(6, exact=True), Wish(40)]) == (6, 42)
    assert plan_sizes(1000, [Wish(96, exact=True), Wish(7)]) == (8, 96)
    assert plan_sizes(1000, [Wish(6, exact=True), Wish(4, exact=True)]) == (2,)
    assert plan_sizes(8, [Wish(8), Wish(200)]) == ()  # a chunk as long as the loop is no chunk


@given(
    st.integers(0, 5000),
    st.lists(
        st.builds(
            Wish, size=st.integers(1, 600), exact=st.booleans(), around=st.none(), schedule=st.none(), ticks=st.none()
        ),
        max_size=5,
    ),
)
def test_planner_laws(length, wishes):
    sizes = plan_sizes(length, wishes)
    assert all(1 < size < length for size in sizes)
    assert all(large % small == 0 and small < large for small, large in itertools.pairwise(sizes))
    exact = [wish.size for wish in wishes if wish.exact]
    if exact and sizes and math.gcd(*exact) > 1:
        for wish in exact:  # every exact boundary is a boundary of some chunk
            assert wish >= length or any(wish % size == 0 for size in sizes)
