"""The bytes that a program needs at one time, from its trace alone. `test_plan_bytes.py` has what XLA plans."""

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from thin import parametrize

from treescan._trace.cost import Buffer, held_at_most, packed_size, temporary_bytes, timeline

KIB = 1024
X = jnp.ones((64, 64))  # 16 KiB


def bytes_of(function, *args):
    return temporary_bytes(jax.make_jaxpr(function)(*args).jaxpr)


def last(x):
    return ((jnp.sin(x) @ x) @ x) @ x


def unread(x):
    jnp.sin(x) @ x
    return x + 1


def branches(x):
    return jax.lax.cond(x[0, 0] > 0, lambda x: jnp.sin(x) @ x, lambda x: jnp.cos(x) @ x, x)


HELD = {  # programs, and how many arrays they hold at one time
    "elementwise operations write nothing of their own": (lambda x: jnp.sin(x) * 2 + x, 0),
    "a product reads arrays": (lambda x: jnp.sin(x) @ x, 1),
    "a product is written over": (lambda x: jnp.tanh(x @ x) @ x, 1),
    "what nobody reads is not there": (unread, 0),
    "what is dead has its place": (lambda x: jnp.sum(last(x)), 2),
    "or where a result is written later": (lambda x: jnp.concatenate([last(x)] * 2), 1),
    "branches share what they need": (branches, 1),
    "calls are looked into": (jax.jit(lambda x: jax.jit(jnp.sin)(x) @ x), 1),
}


@parametrize("case", HELD)
def test_what_is_held(case):
    program, arrays = case
    assert bytes_of(program, X) == pytest.approx(arrays * 16 * KIB, abs=8)


def test_a_loop_stacks_what_its_gradient_reads():
    xs = jnp.ones((100, 64, 64))
    loss = lambda x: jnp.sum(jax.lax.scan(lambda h, x: (jnp.sin(h) + x, None), x, xs)[0])  # noqa: E731
    assert bytes_of(loss, X) == 16 * KIB
    assert 100 * 16 * KIB <= bytes_of(jax.grad(loss), X) <= 103 * 16 * KIB


def test_results_are_not_counted():
    assert bytes_of(lambda x: jax.lax.scan(lambda h, _: (h, h + 1), x, jnp.arange(100))[1], X) <= 2 * 16 * KIB


def test_a_while_loop_holds_what_its_body_needs():
    def program(x):
        return jax.lax.while_loop(lambda h: h[0, 0] < 1, lambda h: jnp.sin(h) @ h, x)

    assert bytes_of(program, X) >= 16 * KIB


# How it is packed

buffers = st.lists(
    st.builds(
        lambda size, start, duration: Buffer(size, start, start + duration),
        st.integers(1, 50),
        st.integers(0, 20),
        st.integers(0, 20),
    ),
    max_size=20,
)


@given(buffers)
def test_a_heap_is_as_large_as_what_it_holds_or_larger(found):
    size = packed_size(found)
    assert held_at_most(found) <= size <= sum(buffer.size for buffer in found)


@given(buffers)
def test_what_is_never_held_together_shares_its_place(found):
    apart = [Buffer(buffer.size, 2 * i, 2 * i) for i, buffer in enumerate(found)]
    assert packed_size(apart) == max((buffer.size for buffer in found), default=0)


def test_a_gap_between_two_is_used():
    assert packed_size([Buffer(4, 0, 9), Buffer(3, 0, 4), Buffer(2, 5, 9), Buffer(1, 5, 9)]) == 7


def test_small_buffers_are_added():
    large, small = [Buffer(2**20, 0, 9)], [Buffer(4, i, i) for i in range(9)]
    assert packed_size([*large, *small]) == 2**20 + 4


def test_the_timeline_of_nothing_is_empty():
    assert timeline(jax.make_jaxpr(lambda x: x)(X).jaxpr).buffers == ()
