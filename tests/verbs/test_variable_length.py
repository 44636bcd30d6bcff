"""Rows of unequal length with several options at once, and masks that mean something: against the plain loop.

`works` has each two options together, under each transform; random programs have any number of them.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import assert_bitwise
from works import plain, rows
from works.example import KEY, State, Y, has
from works.rows import LENGTHS, MASK, RESETS, B, T
from works.table import TRANSFORMS, difference

import treescan

SEGMENTS = {"mask": MASK, "resets": RESETS}


def run(lib, options, how, given):
    return [leaf for leaf in jax.tree.leaves(rows.program(lib, options, how, given)) if plain.is_array(leaf)]


def assert_right(options, how=frozenset(), transform="grad"):
    ours, by_hand = TRANSFORMS[transform]
    mine, theirs = (functools.partial(run, lib, options, how) for lib in (treescan, plain))
    assert difference(ours(mine, rows.GIVEN), by_hand(theirs, rows.GIVEN)) is None


SETUPS = {
    "keys, chunks of 3": ({"key": KEY, "chunk": 3, "fill": Y(7, -1)}, has("key")),
    "whole, held": ({"chunk": 0, "reverse": True, "fill": "hold"},),
    "held, recomputed": ({"mask": MASK, "fill": Y("hold", -1), "chunk": 3, "remat": "step"},),
    "resets alone": ({"resets": RESETS, "chunk": 2}, has("no lengths")),
    "resets alone in reverse": ({"resets": RESETS, "reverse": True, "save": "last"}, has("no lengths")),
    "resets in reverse": ({"resets": RESETS, "reverse": True, "chunk": 1},),
    "compact, last": ({"compact": True, "chunk": 2, "save": "last", "reverse": True},),
    "compact, held": ({**SEGMENTS, "compact": (1,), "chunk": 2, "reverse": True, "fill": "hold"},),
    "compact, shared": ({"carry_axes": State(0, None), "compact": (2,), "chunk": 3}, has("shared count")),
    "nested": ({**SEGMENTS, "remat": "nested", "chunk": 1, "unroll": 2},),
    "batch leads": ({**SEGMENTS, "time_axis": 1, "chunk": 4},),
    "batch leads, compact": ({"time_axis": 1, "compact": True, "chunk": 2, "reverse": True},),
    "single row": ({**SEGMENTS, "chunk": 2, "fill": "hold"}, has("one row")),
    "cut": ({**SEGMENTS, "truncate": 2, "chunk": 3},),
    "cut in reverse": ({**SEGMENTS, "truncate": 2, "reverse": True},),
    "cut, compact": ({"resets": RESETS, "truncate": 1, "compact": True, "chunk": 2, "remat": "step"},),
    "static, reset": ({**SEGMENTS, "reset_to": "another state", "chunk": 2, "compact": True}, has("static")),
}


EVERY_DAY = ("keys, chunks of 3", "resets alone", "resets in reverse", "compact, held", "batch leads", "cut in reverse")


def daily(names, chosen):
    return [name if name in chosen else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize("transform", daily(("grad", "jvp", "grad of grad"), ("grad",)))
@pytest.mark.parametrize("name", daily(SETUPS, EVERY_DAY))
def test_several_options_at_once(name, transform):
    assert_right(*SETUPS[name], transform=transform)


@pytest.mark.parametrize("transform", daily(("vmap of grad", "grad of vmap"), ("vmap of grad",)))
@pytest.mark.parametrize("name", daily(("compact, held", "resets in reverse"), ("compact, held",)))
def test_several_options_mapped(name, transform):
    assert_right(*SETUPS[name], transform=transform)


def patterns():
    """Masks that mean something: [T, B]."""
    at, row = np.mgrid[:T, :B]
    return {
        "left padding": at >= 2 + row,
        "holes": (at + row) % 2 == 0,
        "one step each, the last": at == T - 1,
        "one chunk in the middle": (at >= 2) & (at < 4),
        "a row that pauses for a chunk": (row > 0) ^ (at // 2 == 1),
        "one live row": row == 1,
        "rows take turns": at // 2 == row,
        "nothing": at < 0,
    }


@pytest.mark.parametrize("name", daily(patterns(), ("holes", "a row that pauses for a chunk", "nothing")))
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
