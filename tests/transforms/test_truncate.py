"""`truncate` stops the gradient of the carry between stretches of steps, and nothing else."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from loops import array
from oracle import assert_close
from thin import slow

import treescan


def leaky(h, x):
    return (0.5 * h + x,) * 2


@pytest.mark.parametrize("way", ["traced", "rows", "disable_jit", "as written", "rows as written", "jit", "rows jit"])
def test_weights_keep_their_whole_gradient(way):
    """That of a carry which no step changes counts every step, as of one that is closed over."""
    verb = functools.partial(treescan.mask_scan, lengths=jnp.array([9, 7])) if "rows" in way else treescan.scan

    def through(carried, closed):
        def body(carry, x):
            h = jnp.sin(carry["h"] * carry["w"] * closed + x)
            return {"h": h, "w": carry["w"]}, h

        init = {"h": array(2), "w": carried}
        body = jax.jit(body) if "jit" in way.split() else body
        return jnp.sum(verb(body, init, array(9, 2, seed=1), truncate=3)[1])

    w = 1 + array(2, seed=2)
    with jax.disable_jit(way == "disable_jit"), treescan.rewriting("as written" not in way):
        carried, closed = jax.grad(through, (0, 1))(w, jnp.ones(2))
    np.testing.assert_allclose(carried * w, closed, rtol=1e-5)


def test_weak_and_half_carries_stay_what_they_are():
    """`where` would promote them."""
    final, _ = treescan.scan(lambda c, x: (c * x, None), jnp.bfloat16(1), jnp.ones(5, jnp.bfloat16), truncate=2)
    assert final.dtype == jnp.bfloat16


@pytest.mark.parametrize(("reverse", "steps"), [(False, 3), (True, 2)])
def test_the_first_stretch_keeps_the_gradient_of_init(reverse, steps):
    """In reverse it begins at the last of 8 positions, and ends where 3 divides one."""

    def total(init):
        return jnp.sum(treescan.scan(leaky, init, jnp.ones(8), truncate=3, reverse=reverse)[1])

    assert jax.grad(total)(jnp.float32(0)) == sum(0.5**n for n in range(1, steps + 1))


# The masked scan


@pytest.mark.parametrize(("reverse", "holes"), [(False, True), *slow((False, False), (True, True))])
def test_packed_sequences_are_cut_as_they_would_be_alone(reverse, holes):
    """Also where the user removed steps of them from the mask, the first ones too."""
    sequences = [array(n, seed=n) for n in (8, 4, 5, 1, 7)]
    packed = treescan.pack(sequences, length=12)
    if holes:
        keep = np.arange(12)[:, None] % 4 != np.array([0, 2, 3])
        sequences = [xs[left] for xs, left in zip(sequences, treescan.unpack(keep, packed), strict=True)]
        packed = packed._replace(mask=packed.mask & keep)

    def total(w, verb, h, xs):
        def leaky(h, x):
            h = jnp.sin(w * h + x)
            return h, h * x

        return jnp.sum(verb(leaky, h, xs, truncate=3, reverse=reverse)[1])

    alone = sum(jax.grad(total)(0.9, treescan.scan, 0.0, xs) for xs in sequences)
    whole = jax.grad(total)(0.9, treescan.mask_scan, jnp.zeros(packed.rows), packed)
    assert_close(whole, alone)


def test_a_leaf_that_all_rows_share_counts_the_steps_in_which_any_row_is_valid():
    """A row that begins later does not cut it."""
    mask = np.array([[1, 0], [1, 1], [0, 0], [1, 1], [1, 1], [0, 1], [1, 0]], bool)

    def of_all(xs):
        body = lambda h, x, *, valid: leaky(h, jnp.sum(jnp.where(valid, x, 0.0)))  # noqa: E731
        options = {"mask": mask, "row_axes": {"carry": None, "y": None}, "truncate": 2}
        return jnp.sum(treescan.mask_scan(body, jnp.float32(0), xs, **options)[1])

    def of_steps(xs):
        return jnp.sum(treescan.scan(leaky, jnp.float32(0), xs, truncate=2)[1])

    want = np.zeros(mask.shape, np.float32)
    want[mask.any(1)] = jax.grad(of_steps)(jnp.ones(6))[:, None]
    np.testing.assert_array_equal(jax.grad(of_all)(jnp.ones(mask.shape)), want * mask)


def test_a_step_that_resets_keeps_the_gradient_of_init():
    """Also where it begins a stretch: it begins from `init`, and not from the carry that is cut."""
    xs, nothing = jnp.ones((6, 1)), jnp.zeros((6, 1), bool)

    @functools.partial(jax.jit, static_argnames="size")
    def gradient_of(resets, size):
        def loss(init):
            return jnp.sum(treescan.mask_scan(leaky, init, xs, resets=resets, truncate=size)[1])

        return jax.grad(loss)(jnp.zeros(1))[0]

    stretch = 0.5 + 0.25 + 0.125
    assert gradient_of(nothing, 3) == stretch
    assert gradient_of(nothing.at[3].set(True), 3) == 2 * stretch
    assert gradient_of(nothing.at[3].set(True), None) == 2 * stretch
    assert gradient_of(nothing.at[3].set(True), 2) == 2 * (0.5 + 0.25)
