"""`save` and `remat` of `while_scan`: what its outputs, and what the gradient saves, take of memory.

That values and gradients are those of a loop in Python is in the table of what works."""

import functools

import jax
import jax.numpy as jnp
import pytest
from hlo import Program

import treescan
from treescan import Remat


def test_each_level_of_remat_is_a_loop_within_the_others():
    def loss(w, levels):
        body = lambda carry, _: ((jnp.sin(carry[0] * w), carry[1] + 1), None)  # noqa: E731
        run = functools.partial(treescan.while_scan, lambda c: c[1] < 9, body, max_length=500)
        return run((w, 0), remat=Remat(levels=levels)).carry[0]

    two, three = (len(Program(jax.grad(functools.partial(loss, levels=n)), 0.5).loops()) for n in (2, 3))
    assert two < three


# Memory

WIDTH = 4096


def memory(save, steps, *, gradient=False):
    """Bytes of outputs and of temporaries, in outputs of one step."""

    def run(c):
        result = treescan.while_scan(
            lambda c: c[0] < 1e9, lambda c, _: (c * 1.1, jnp.sin(c)), c, max_length=steps, save=save
        )
        return result.carry, result.ys

    def loss(c):
        return sum(jnp.sum(leaf * leaf) for leaf in jax.tree.leaves(run(c)))

    found = jax.jit(jax.grad(loss) if gradient else run).lower(jnp.ones(WIDTH)).compile().memory_analysis()
    return (found.output_size_in_bytes + found.temp_size_in_bytes) / (4 * WIDTH)


@pytest.mark.parametrize(("steps", "copies"), [(1024, 0), (1021, 1)])
def test_memory_falls_with_what_is_kept(steps, copies):
    """Of a length that `save` does not divide, XLA copies what is kept once."""
    nothing = memory(None, steps)
    assert memory("all", steps) >= steps  # the measure sees them
    for every in (16, 64):
        assert steps // every <= memory(every, steps) - nothing <= (1.1 + copies) * steps / every + 2


@pytest.mark.parametrize(("save", "steps"), [("last", 1021), (None, 1024)])
def test_without_stacked_outputs_nothing_grows(save, steps):
    assert memory(save, steps) - memory(save, 16) <= 1


@pytest.mark.parametrize("save", ["last", None, 64])
def test_memory_of_the_gradient(save):
    """The carries of about sqrt(max_length) chunks, and of the steps of one; not one output per step."""
    assert memory(save, 1024, gradient=True) <= 1024 / 4 < 1024 <= memory("all", 1024, gradient=True)


def test_the_gradient_saves_of_a_step_what_is_not_had_for_nothing():
    """Of 1,024 steps in chunks of 32: the carry before each chunk, and within one each step's carry and tanh."""

    def loss(w, c):
        run = treescan.while_scan(lambda c: c[0, 0] < 2, lambda c, _: (jnp.tanh(c @ w), None), c, max_length=1024)
        return jnp.sum(run.carry)

    w, c = jnp.eye(8), jnp.ones((4096, 8))
    saved = (
        jax.jit(jax.grad(loss, argnums=(0, 1))).lower(w, c).compile().memory_analysis().temp_size_in_bytes / c.nbytes
    )
    least = 32 + 2 * 32
    assert least <= saved <= least + 6
