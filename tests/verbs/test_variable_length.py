"""Rows of unequal length with several options at once, and masks that mean something: against the plain loop.

`works` has each two options together, under each transform; random programs have any number of them.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from loops import array
from oracle import assert_bitwise, assert_close
from thin import slow
from works import plain, rows
from works.example import KEY, Y, has
from works.rows import LENGTHS, MASK, RESETS, B, T
from works.table import TRANSFORMS, difference
from works.transforms import gradient

import treescan
from treescan.carries import ema

SEGMENTS = {"mask": MASK, "resets": RESETS}


def run(lib, options, how, given):
    return [leaf for leaf in jax.tree.leaves(rows.program(lib, options, how, given)) if plain.is_array(leaf)]


def assert_right(options, how=frozenset(), transform="grad"):
    ours, by_hand = TRANSFORMS[transform]
    mine, theirs = (functools.partial(run, lib, options, how) for lib in (treescan, plain))
    assert difference(ours(mine, rows.GIVEN), by_hand(theirs, rows.GIVEN)) is None


SETUPS = {
    "keys, chunks of 3": ({"key": KEY, "chunk": 3, "fill": Y(7, -1)}, has("key")),
    "resets alone": ({"resets": RESETS, "chunk": 2}, has("no lengths")),
    "resets in reverse": ({"resets": RESETS, "reverse": True, "chunk": 1},),
    "compact, held": ({**SEGMENTS, "compact": (1,), "chunk": 2, "reverse": True, "fill": "hold"},),
    "batch leads": ({**SEGMENTS, "time_axis": 1, "chunk": 4},),
    "cut in reverse": ({**SEGMENTS, "truncate": 2, "reverse": True},),
    "static, reset": ({**SEGMENTS, "reset_to": "another state", "chunk": 2, "compact": True}, has("static")),
}
MAPPED = [("compact, held", "vmap of grad"), *slow(("compact, held", "grad of vmap"))]


@pytest.mark.parametrize(("name", "transform"), [*((name, "grad") for name in SETUPS), *MAPPED])
def test_several_options_at_once(name, transform):
    assert_right(*SETUPS[name], transform=transform)


def patterns():
    """Masks that mean something: [T, B]."""
    at, row = np.mgrid[:T, :B]
    return {
        "left padding": at >= 2 + row,
        "holes": (at + row) % 2 == 0,
        "one chunk in the middle": (at >= 2) & (at < 4),
        "a row that pauses for a chunk": (row > 0) ^ (at // 2 == 1),
        "rows take turns": at // 2 == row,
        "nothing": at < 0,
    }


EVERY_DAY = ("holes", "a row that pauses for a chunk", "nothing")


@pytest.mark.parametrize("name", [*EVERY_DAY, *slow(*((name,) for name in patterns() if name not in EVERY_DAY))])
def test_patterns_of_a_mask(name):
    reverse = len(name) % 2 == 0
    resets = np.random.default_rng(0).random((T, B)) < 0.5
    options = {"mask": patterns()[name], "resets": resets, "fill": "hold", "reverse": reverse}
    assert_right({**options, "compact": (1,), "chunk": 2})


@pytest.mark.parametrize("given", [SEGMENTS, {}], ids=["segments", "lengths"])
def test_forward_values_do_not_depend_on_the_chunk(given):
    """To the last bit."""

    def values(chunk):
        options = {**given, "fill": "hold", "chunk": chunk}
        return jax.jit(functools.partial(run, treescan, options, frozenset()))(rows.GIVEN)

    whole = values(0)
    for chunk in (None, 1, 2, 3, T, T + 1):
        assert_bitwise(values(chunk), whole)


def test_traced_lengths_out_of_range_are_clamped():
    xs = jnp.arange(2.0 * T).reshape(T, 2)

    @jax.jit
    def fold(lengths):
        return treescan.mask_scan(lambda c, x: (c + x, c), jnp.zeros(2), xs, lengths=lengths, chunk=2, compact=True)

    for out, within in (([-3, 99], [0, T]), ([T + 1, -1], [T, 0])):
        assert_bitwise(fold(jnp.array(out)), fold(jnp.array(within)))


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("options", [{"chunk": 1}, {"compact": True}, {"remat": "nested", "reverse": True}], ids=str)
def test_short_loops(options, steps):
    def cell(h, x):
        return jnp.tanh(h) / x, h * x

    def loss(lib, h, xs):
        valid = np.arange(steps)[:, None] < LENGTHS
        final, ys = lib.mask_scan(cell, h, xs, mask=valid, fill="hold", **options)
        return jnp.sum(final) + jnp.sum(ys), (final, ys)

    h, xs = rows.GIVEN["h"][:, 0], jnp.full((steps, B), 2.0)
    ours, want = (jax.value_and_grad(functools.partial(loss, lib), has_aux=True)(h, xs) for lib in (treescan, plain))
    assert difference(ours, want) is None


# `fold` and `accumulate` with `lengths`: their rows are those of the masked scan

W = 0.5 * jnp.eye(2) + 0.1
INIT, DATA = array(B, 2, seed=1), array(T, B, 2)
XS = jnp.where(rows.VALID[..., None], DATA, jnp.nan)


@pytest.mark.parametrize("options", [{}, {"reverse": True, "remat": "step"}, {"unroll": 2}], ids=str)
def test_folds_are_the_masked_scan(options):
    options = {"lengths": LENGTHS, **options}

    def step(h, x):
        return jnp.tanh(h @ W + x)

    def masked(given):
        return treescan.mask_scan(lambda h, x: (step(h, x),) * 2, *given, **options)

    def folds(given):
        return treescan.fold(step, *given, **options), treescan.accumulate(step, *given, **options)

    assert_close(*(jax.jit(functools.partial(gradient, run))((INIT, XS)) for run in (folds, masked)))


def test_folds_of_custom_carries():
    def average(verb, *shape, xs, **options):
        return verb(lambda seen, x: x, ema(jnp.zeros(shape), 0.5), xs, **options)

    found = average(treescan.fold, B, 2, xs=XS, lengths=LENGTHS).read()
    alone = [average(treescan.fold, 2, xs=DATA[:length, b]).read() for b, length in enumerate(LENGTHS)]
    assert_close(found, jnp.stack(alone))
    stacked = average(treescan.accumulate, B, 2, xs=XS, lengths=LENGTHS)
    np.testing.assert_allclose(stacked.value[LENGTHS[0] - 1, 0], found[0])


def test_the_body_of_a_fold_may_take_valid():
    def centred(h, x, *, valid):
        mean = jnp.mean(x, 0, where=valid[:, None], keepdims=True)
        return h + x - jnp.where(jnp.any(valid), mean, 0.0)

    got = treescan.fold(centred, INIT, XS, lengths=LENGTHS)
    want = treescan.mask_scan(lambda h, x, *, valid: (centred(h, x, valid=valid), None), INIT, XS, lengths=LENGTHS)[0]
    np.testing.assert_allclose(got, want)
    with pytest.raises(TypeError, match="valid"):
        treescan.fold(centred, INIT, XS)
