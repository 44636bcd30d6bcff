"""`truncate` against a Python loop that stops the gradient of its carry between stretches of steps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from by_hand import assert_same, derived
from loops import array
from oracle import assert_bitwise, assert_close
from thin import slow

import treescan
from treescan import Remat


def cell(p, carry, x):
    """A state, a counter, and weights that no step changes; `p` is closed over."""
    h = jnp.sin(carry["h"] * carry["w"] + p + x)
    return {"h": h, "w": carry["w"], "n": carry["n"] + 1}, {"y": h * carry["w"], "n": carry["n"]}


def arguments(steps, *batch):
    init = {"h": array(*batch, 2, seed=1), "w": 1 + array(*batch, 2, seed=2), "n": jnp.zeros(batch, jnp.int32)}
    return {"p": array(*batch, 2, seed=3), "init": init}, array(steps, *batch, 2, seed=4)


def stops(carry, changing=("h",)):
    return {name: jax.lax.stop_gradient(leaf) if name in changing else leaf for name, leaf in carry.items()}


def by_hand(body, init, xs, size, *, reverse=False, stop=stops):
    """All carries and all outputs, [T, ...], and the last carry."""
    steps, carry = len(xs), init
    carries, ys = [None] * steps, [None] * steps
    for t in range(steps)[::-1] if reverse else range(steps):
        edge = t + 1 if reverse else t  # where this step's stretch and the one before it meet
        if size and edge % size == 0 and 0 < edge < steps:
            carry = stop(carry)
        carry, ys[t] = body(carry, xs[t])
        carries[t] = carry
    carries, ys = (jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees) for trees in (carries, ys))
    return carry, carries, ys


def scanned(init, xs, **options):
    return treescan.scan(functools.partial(cell, init["p"]), init["init"], xs, **options)


def folded(init, xs, **options):
    return treescan.fold(lambda c, x: cell(init["p"], c, x)[0], init["init"], xs, **options)


def accumulated(init, xs, **options):
    return treescan.accumulate(lambda c, x: cell(init["p"], c, x)[0], init["init"], xs, **options)


def oracle(init, xs, size, *, only=(0, 2), reverse=False):
    results = by_hand(functools.partial(cell, init["p"]), init["init"], xs, size, reverse=reverse)
    return tuple(results[i] for i in only) if len(only) > 1 else results[only[0]]


VERBS = {"scan": (scanned, (0, 2)), "fold": (folded, (0,)), "accumulate": (accumulated, (1,))}


@pytest.mark.parametrize(
    ("verb", "steps", "size", "reverse", "remat"),
    [
        ("scan", 7, 1, False, None),
        ("scan", 7, 3, True, "nested"),
        ("fold", 7, 3, True, "step"),
        ("accumulate", 7, 3, False, Remat("everything_saveable", levels=2)),
        *slow(("scan", 8, 2, True, None), ("scan", 8, 7, False, None), ("scan", 2, 1, True, None)),
        ("scan", 2, 2, True, None),  # and here nothing is cut
    ],
)
def test_equals_the_loop_by_hand(verb, steps, size, reverse, remat):
    run, only = VERBS[verb]
    ours = functools.partial(run, truncate=size, reverse=reverse, remat=remat)
    theirs = functools.partial(oracle, size=size, only=only, reverse=reverse)
    given = arguments(steps)
    assert_same(ours, theirs, *given)
    gradients = [derived(functools.partial(theirs, size=each), *given)[1] for each in (size, None)]
    gaps = jax.tree.map(lambda a, b: float(jnp.max(jnp.abs(a - b))), *gradients)
    assert (max(gaps) > 1e-3) == (size < steps)  # or this shows nothing


def test_no_steps():
    init, xs = arguments(0)
    final, ys = scanned(init, xs, truncate=3)
    assert_bitwise(final, init["init"])
    assert ys["y"].shape == (0, 2)


def test_weights_keep_their_whole_gradient():
    """That of a carry which no step changes counts every step, as of one that is closed over."""
    init, xs = arguments(9)

    def through(carried, closed, size):
        def body(carry, x):
            h = jnp.sin(carry["h"] * carry["w"] * closed + x)
            return {"h": h, "w": carry["w"]}, h

        return jnp.sum(treescan.scan(body, {"h": init["p"], "w": carried}, xs, truncate=size)[1])

    one = jnp.ones(2)
    carried, closed = jax.grad(through, (0, 1))(init["init"]["w"], one, 3)
    np.testing.assert_allclose(carried * init["init"]["w"], closed, rtol=1e-5)


def test_weak_and_half_carries_stay_what_they_are():
    """`where` would promote them."""
    final, _ = treescan.scan(lambda c, x: (c * x, None), jnp.bfloat16(1), jnp.ones(5, jnp.bfloat16), truncate=2)
    assert final.dtype == jnp.bfloat16


# The masked scan


@pytest.mark.parametrize("reverse", [False, *slow((True,))])
def test_packed_sequences_are_cut_as_they_would_be_alone(reverse):
    """Neither padding nor the sequence before one moves its boundaries."""
    sequences = [array(n, seed=n) for n in (8, 4, 5, 1, 7)]
    packed = treescan.pack(sequences, length=12)

    def total(w, verb, h, xs):
        def leaky(h, x):
            h = jnp.sin(w * h + x)
            return h, h * x

        return jnp.sum(verb(leaky, h, xs, truncate=3, reverse=reverse)[1])

    alone = sum(jax.grad(total)(0.9, treescan.scan, 0.0, xs) for xs in sequences)
    whole = jax.grad(total)(0.9, treescan.mask_scan, jnp.zeros(packed.rows), packed)
    assert_close(whole, alone)


@pytest.mark.slow
@pytest.mark.parametrize("start", [0, 1])
def test_shared_leaves_of_the_carry_count_the_steps_in_which_any_row_is_valid(start):
    """A row that begins later does not cut them."""

    def body(carry, x, *, valid):
        total = carry["total"] * 0.9 + jnp.sum(jnp.where(valid, jnp.sin(x + carry["h"]), 0.0))
        return {"h": jnp.cos(carry["h"] + carry["total"][None] * x), "total": total}, None

    valid = (np.arange(6)[:, None] < np.array([6, 2 + start])) & (np.arange(6)[:, None] >= np.array([0, start]))
    cuts = {0: (2, 4), 1: (2 + start, 4 + start)}

    def ours(h, total, xs):
        axes = {"h": 0, "total": None}
        init = {"h": h, "total": total}
        return treescan.mask_scan(body, init, xs, mask=valid, carry_axes=axes, truncate=2)[0]

    def theirs(h, total, xs):
        carry = {"h": h, "total": total}
        for t in range(6):
            before = {
                "h": jnp.where(
                    valid[t] & jnp.array([t in cuts[0], t in cuts[1]]), jax.lax.stop_gradient(carry["h"]), carry["h"]
                ),
                "total": jax.lax.stop_gradient(carry["total"]) if t in (2, 4) else carry["total"],
            }
            new, _ = body(before, xs[t], valid=jnp.asarray(valid[t]))
            carry = {"h": jnp.where(valid[t], new["h"], before["h"]), "total": new["total"]}
        return carry

    given = array(2, seed=1), array(seed=2), array(6, 2, seed=3)
    got, want = (jax.jacobian(run, (0, 1, 2))(*given) for run in (ours, theirs))
    assert_close(got, want)


def test_a_step_that_resets_keeps_the_gradient_of_init():
    """Also where it begins a stretch: it begins from `init`, and not from the carry that is cut."""
    xs, nothing = jnp.ones((6, 1)), jnp.zeros((6, 1), bool)

    def leaky(h, x):
        return (0.5 * h + x,) * 2

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
