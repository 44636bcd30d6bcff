"""Rows of unequal length: what their masks may be, and how short a loop. And folds with `lengths`.

`works` has each two options together, under each transform; random programs have any number of them.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from loops import array
from oracle import assert_bitwise
from works import plain, rows
from works.rows import LENGTHS, MASK, RESETS, B, T

import treescan


def run(lib, options, given):
    return [leaf for leaf in jax.tree.leaves(rows.program(lib, options, frozenset(), given)) if plain.is_array(leaf)]


def test_forward_values_do_not_depend_on_the_chunk():
    """To the last bit."""

    def values(chunk):
        options = {"mask": MASK, "resets": RESETS, "fill": "hold", "chunk": chunk}
        return jax.jit(functools.partial(run, treescan, options))(rows.GIVEN)

    whole = values(0)
    for chunk in (None, 1, 3, T + 1):
        assert_bitwise(values(chunk), whole)


def test_traced_lengths_out_of_range_are_clamped():
    xs = jnp.arange(2.0 * T).reshape(T, 2)

    @jax.jit
    def fold(lengths):
        return treescan.mask_scan(lambda c, x: (c + x, c), jnp.zeros(2), xs, lengths=lengths, chunk=2, compact=True)

    for out, within in (([-3, 99], [0, T]), ([T + 1, -1], [T, 0])):
        assert_bitwise(fold(jnp.array(out)), fold(jnp.array(within)))


def test_traced_lengths_that_int32_does_not_hold_are_clamped():
    xs = jnp.arange(2.0 * T).reshape(T, 2)

    def run(lengths, **options):
        scan = functools.partial(treescan.mask_scan, lambda c, x: (c + x, c), 0 * xs[0], xs, chunk=2, **options)
        return jax.jit(lambda lengths: scan(lengths=lengths))(lengths)

    for x64, dtype in ((False, np.uint32), (True, np.int64), (True, np.uint64)):
        with jax.enable_x64(x64):
            most = np.iinfo(dtype).max
            for options in ({}, {"offset": 0}):
                assert_bitwise(run(np.array([most, 3], dtype), **options), run(np.array([T, 3]), **options))
    least = np.array([-(2**31), 3], np.int32)
    assert_bitwise(run(least, offset=2), run(np.array([0, 3]), offset=2))


# `fold` and `accumulate` with `lengths`: their rows are those of the masked scan

INIT, DATA = array(B, 2, seed=1), array(T, B, 2)
XS = jnp.where(rows.VALID[..., None], DATA, jnp.nan)


def test_the_body_of_a_fold_may_take_valid():
    def centred(h, x, *, valid):
        mean = jnp.mean(x, 0, where=valid[:, None], keepdims=True)
        return h + x - jnp.where(jnp.any(valid), mean, 0.0)

    got = treescan.fold(centred, INIT, XS, lengths=LENGTHS)
    want = treescan.mask_scan(lambda h, x, *, valid: (centred(h, x, valid=valid), None), INIT, XS, lengths=LENGTHS)[0]
    np.testing.assert_allclose(got, want)
    with pytest.raises(TypeError, match="valid"):
        treescan.fold(centred, INIT, XS)
