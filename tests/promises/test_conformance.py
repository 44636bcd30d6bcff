"""`fori` is `jax.lax.fori_loop` in what the table of what works does not have: its ranges, and the type of the index.

That the program of `scan` is that of `jax.lax.scan` is in `test_same_program.py`.
"""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from loops import TRANSFORMS, State, array
from oracle import assert_bitwise

import treescan


def index_body(i, carry):
    t = i.astype(jnp.float32)
    return State(jnp.sin(carry.h + t * carry.c), carry.c + 0.1 * jnp.cos(t))


@pytest.mark.parametrize("transform", ["eager", "grad", "disable_jit"])
def test_any_range_is_that_of_fori_loop(transform):
    reference = TRANSFORMS["jit" if transform == "disable_jit" else transform]  # where fori_loop gives Python ints
    init = State(array(3), array(3, seed=1))
    for lower, upper in ((-2, 3), (3, 4), (5, 1)):
        actual, expected = (
            by(lambda c, _, loop=loop, a=lower, b=upper: loop(a, b, index_body, c), init, None)
            for by, loop in ((TRANSFORMS[transform], treescan.fori), (reference, jax.lax.fori_loop))
        )
        chex.assert_trees_all_close(actual, expected, rtol=1e-6, atol=1e-6)
        assert jax.tree.map(jax.typeof, actual) == jax.tree.map(jax.typeof, expected)


def test_index_has_the_type_that_fori_loop_gives_it():
    def type_of_index(loop, *bounds):
        seen = []
        loop(*bounds, lambda i, carry: seen.append(jax.typeof(i)) or carry, jnp.float32(0))
        return seen[0]

    for bounds in ((0, 3), (np.int8(0), np.int8(3)), (0, np.int16(3)), (jnp.uint32(1), jnp.uint32(3))):
        assert type_of_index(treescan.fori, *bounds) == type_of_index(jax.lax.fori_loop, *bounds)


def test_index_mixes_with_a_narrow_carry_as_in_fori_loop():
    """Its type is weak: it takes on the carry's, also under strict promotion."""
    for dtype in (jnp.int8, jnp.float16):
        assert_bitwise(*(loop(0, 3, lambda i, c: c + i, dtype(0)) for loop in (treescan.fori, jax.lax.fori_loop)))


def test_length_of_a_fold_may_stand_fourth():
    assert treescan.fold(lambda c, x: c + 1, 0, None, 4) == 4
    assert treescan.accumulate(lambda c, x: c + 1, 0, None, 4).tolist() == [1, 2, 3, 4]
