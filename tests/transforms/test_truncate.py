"""`truncate` against a Python loop that stops the gradient of its carry between stretches of steps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from loops import array, loss_of
from oracle import assert_bitwise, assert_close

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


def _derived(run, init, xs):
    loss, floats = loss_of(run, init, xs)
    return run(init, xs), jax.grad(loss)(floats)


_compiled = functools.partial(jax.jit, static_argnums=0)(_derived)


def assert_same_gradient(ours, theirs, *given, distinct=True):
    """Equal in values and gradients; and the loop that is not cut has another gradient, or this shows nothing."""
    got, want = _compiled(ours, *given), _derived(theirs, *given)
    assert_close(got, want)
    if distinct:
        whole = _derived(functools.partial(theirs, size=None), *given)
        gaps = jax.tree.map(lambda a, b: float(jnp.max(jnp.abs(a - b))), want[1], whole[1])
        assert max(gaps) > 1e-3


@pytest.mark.parametrize(
    ("verb", "size", "reverse", "remat"),
    [
        ("scan", 1, False, None),
        ("scan", 3, True, "nested"),
        ("fold", 3, True, "step"),
        ("accumulate", 3, False, Remat("everything_saveable", levels=2)),
    ],
)
def test_equals_the_loop_by_hand(verb, size, reverse, remat):
    run, only = VERBS[verb]
    ours = functools.partial(run, truncate=size, reverse=reverse, remat=remat)
    theirs = functools.partial(oracle, size=size, only=only, reverse=reverse)
    assert_same_gradient(ours, theirs, *arguments(7))


@pytest.mark.parametrize(("steps", "reverse"), [(1, False), (2, True), (7, False), (8, True)])
def test_lengths(steps, reverse):
    for size in (2, 7) if steps > 2 else (1, 2):
        ours = functools.partial(scanned, truncate=size, reverse=reverse)
        theirs = functools.partial(oracle, size=size, reverse=reverse)
        assert_same_gradient(ours, theirs, *arguments(steps), distinct=size < steps)


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


def masked(init, xs, **options):
    def body(carry, x):
        h = jnp.sin(carry["h"] * carry["w"] + init["p"] + x)
        return {"h": h, "w": carry["w"], "n": carry["n"] + 1}, {"y": h * carry["w"], "n": carry["n"]}

    return treescan.mask_scan(body, init["init"], xs, **options)


def test_padding_cuts_nothing():
    """The gradient of a row's last carry does not depend on how far the row is padded."""
    init, xs = arguments(20, 1)

    def last(init, xs):
        return masked(init, xs, lengths=np.array([3]), truncate=2, reverse=True)[0]["h"]

    for steps in (3, 4, 20):
        loss, floats = loss_of(last, init, xs[:steps])
        slopes = jax.grad(loss)(floats)
        *rest, of_xs = slopes
        if steps == 3:
            want = rest, of_xs
        assert_close((rest, of_xs[:3]), want)
        assert not np.any(of_xs[3:])
    assert np.any(want[1])


def leaky(h, x):
    h = jnp.sin(0.9 * h + x)
    return h, h * x


def alone(h, xs, size, *, reverse):
    """The outputs of one sequence, [T], as by hand."""
    if not len(xs):
        return xs
    return by_hand(leaky, h, xs, size, reverse=reverse, stop=jax.lax.stop_gradient)[2]


def segments_of(valid, resets):
    """The positions of each segment: (row, positions in time)."""
    for row in range(valid.shape[1]):
        steps, number = np.flatnonzero(valid[:, row]), np.cumsum(resets[:, row] & valid[:, row])
        for segment in np.unique(number[steps]):
            yield row, steps[number[steps] == segment]


def slopes_alone(h, xs, valid, resets, size, *, reverse):
    """The gradient of xs, of a sum over all outputs, each segment scanned by itself."""
    slopes = np.zeros(xs.shape, np.float32)
    for row, steps in segments_of(valid, resets):
        total = jax.grad(lambda x, row=row: jnp.sum(alone(h[row], x, size, reverse=reverse)))
        slopes[steps, row] = total(xs[steps, row])
    return slopes


@pytest.mark.parametrize(("reverse", "holes"), [(False, False), (False, True), (True, True)])
def test_packed_sequences_are_cut_as_they_would_be_alone(reverse, holes):
    """Also where the user removed steps of them from the mask, the first ones too."""
    random = np.random.default_rng(3)
    packed = treescan.pack([array(n, seed=n) for n in (8, 4, 5, 1, 7)], length=12)
    keep = random.random(packed.mask.shape) < 0.6 if holes else np.ones(packed.mask.shape, bool)
    mask, number = np.asarray(packed.mask) & keep, np.cumsum(np.asarray(packed.resets), 0)
    first = mask & (np.cumsum(mask, 0) == 1)
    for t in range(1, 12):  # a sequence begins with its first step that is left
        for row in range(packed.rows):
            seen = np.flatnonzero(mask[:t, row])
            first[t, row] |= bool(mask[t, row] and seen.size and number[seen[-1], row] != number[t, row])
    h = jnp.zeros(packed.rows)
    want = slopes_alone(h, packed.data, mask, first, 3, reverse=reverse)

    def run(data):
        batch = packed._replace(data=data, mask=jnp.asarray(mask))
        return jnp.sum(treescan.mask_scan(leaky, h, batch, truncate=3, reverse=reverse)[1])

    assert_close(jax.jit(jax.grad(run))(packed.data), want)


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
