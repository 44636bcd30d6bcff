"""What a scan over a packed batch ends with: of each sequence what it gives alone, in either direction."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import numpy.testing as npt
import pytest
from loops import array
from oracle import as_numpy, assert_close
from thin import all_pairs, slow
from works.transforms import gradient, tangent

import treescan
from treescan.carries import window

H, ROWS = 2, 3
LONG = [3, 1, 0, 4, 2, 0, 5]
N = len(LONG)
WEIGHTS = array(H, H, seed=1)
SEQUENCES = [array(n, H, seed=40 + i) for i, n in enumerate(LONG)]
PACKED = treescan.pack(SEQUENCES, rows=ROWS, length=7, fill=np.nan)
MASK = np.asarray(PACKED.mask)
START = {"goal": 1 + abs(array(ROWS, H, seed=2)), "h": array(ROWS, H, seed=3), "n": jnp.arange(ROWS)}
TO = {"goal": 1 + abs(array(ROWS, H, seed=5)), "h": array(ROWS, H, seed=6), "n": 5 + jnp.arange(ROWS)}
INITS = {"goal": 1 + abs(array(N, H, seed=7)), "h": array(N, H, seed=8), "n": jnp.arange(N)}


def step(w, carry, x):
    """A goal that no step changes, a state, and a count."""
    h = jnp.tanh(carry["h"] @ w + x) / carry["goal"]
    return {"goal": carry["goal"], "h": h, "n": carry["n"] + 1}, {"h": h, "before": carry["h"]}


def alone(w, starts, data, mask=MASK, *, reverse=False):
    """Each sequence by itself, from its own start: its last carry and its last y, 0 if it has none."""
    carries, lasts = [], []
    for i, (row, first, n) in enumerate(zip(*map(np.asarray, PACKED.index), strict=True)):
        carry = jax.tree.map(lambda leaf, i=i: leaf[i], starts)
        steps, y = [t for t in range(first, first + n) if mask[t, row]], {"h": jnp.zeros(H), "before": jnp.zeros(H)}
        for t in steps[::-1] if reverse else steps:
            carry, y = step(w, carry, data[t, row])
        carries.append(carry)
        lasts.append(y)
    return tuple(jax.tree.map(lambda *leaves: jnp.stack(leaves), *each) for each in (carries, lasts))


def of_rows(tree):
    """For each sequence what its row has."""
    return jax.tree.map(lambda leaf: leaf[PACKED.index.row], tree)


FROM = {
    "init": lambda start, to, inits: (start, {}, None, of_rows(start)),
    "reset_to": lambda start, to, inits: (start, {"reset_to": to}, None, of_rows(to)),
    "inits": lambda start, to, inits: (start, {}, inits, inits),
}
OPTIONS = {
    "plain": {},
    "chunk": {"chunk": 2},
    "no chunk": {"chunk": 0},
    "compact": {"chunk": 2, "compact": True},
    "remat": {"remat": "nested", "chunk": 2},
    "step": {"remat": "step"},
}


def floats(tree):
    return {name: leaf for name, leaf in tree.items() if name != "n"}


GIVEN = WEIGHTS, floats(START), floats(TO), floats(INITS), PACKED.data


def packed_run(begin, option, reverse):
    def run(given):
        w, start, to, inits, data = given
        start, options, inits, _ = FROM[begin]({**START, **start}, {**TO, **to}, {**INITS, **inits})
        batch = PACKED._replace(data=data, init=inits)
        options = {**options, **OPTIONS[option], "reverse": reverse, "save": "last"}
        return jax.tree.leaves(treescan.mask_scan(functools.partial(step, w), start, batch, **options))

    return run


def plain_run(begin, reverse):
    def run(given):
        w, start, to, inits, data = given
        starts = FROM[begin]({**START, **start}, {**TO, **to}, {**INITS, **inits})[3]
        return jax.tree.leaves(alone(w, starts, data, reverse=reverse))

    return run


@functools.cache
def expected(begin, reverse):
    return jax.jit(functools.partial(gradient, plain_run(begin, reverse)))(GIVEN)


GRID = all_pairs(list(itertools.product(OPTIONS, FROM, [False, True])))


@pytest.mark.parametrize(("option", "begin", "reverse"), [*GRID[:2], *slow(*GRID[2:])])
def test_each_sequence_ends_with_what_it_gives_alone(option, begin, reverse):
    derived = functools.partial(gradient, packed_run(begin, option, reverse))
    assert_close(jax.jit(derived)(GIVEN), expected(begin, reverse))
    if (option, begin) == ("plain", "init"):
        with jax.disable_jit():
            assert_close(packed_run(begin, option, reverse)(GIVEN), expected(begin, reverse)[0])


def test_under_vmap_and_forwards():
    twice = jax.tree.map(lambda leaf: jnp.stack([leaf, -leaf]), GIVEN)
    runs = packed_run("inits", "chunk", True), plain_run("inits", True)
    assert_close(*(jax.jit(jax.vmap(functools.partial(tangent, run)))(twice) for run in runs))


def test_batches_of_a_vmap_end_each_their_own():
    """Packed batches whose sequences are elsewhere, and have other lengths."""
    lists = [[3, 2, 2], [1, 5, 1]]
    batches = [
        treescan.pack([array(n, seed=n + 9 * i) for n in long], rows=2, length=5) for i, long in enumerate(lists)
    ]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *batches)

    def run(batch):
        return treescan.mask_scan(lambda c, x: (0.5 * c + x, c), jnp.zeros(2), batch)

    want = [run(batch) for batch in batches]
    assert_close(jax.vmap(run)(stacked), jax.tree.map(lambda *leaves: jnp.stack(leaves), *want))


@pytest.mark.parametrize("reverse", [False, True])
def test_last_is_what_the_run_ended_with_and_in_the_other_direction_began_with(reverse):
    def body(carry, x):
        return carry + x, (carry, carry + x)

    some = np.array(LONG) > 0
    for batch, rows in ((PACKED, ROWS), (treescan.pad(SEQUENCES), N)):
        run = functools.partial(treescan.mask_scan, body, jnp.ones((rows, H)), batch, reverse=reverse)
        final, (before, after) = run()
        npt.assert_array_equal(treescan.last(after, batch, reverse=reverse)[some], final[some])
        npt.assert_array_equal(treescan.last(before, batch, reverse=not reverse), np.where(some[:, None], [[1, 1]], 0))
        assert_close(run(save="last")[1][1], treescan.last(after, batch, reverse=reverse))


def test_what_else_is_kept():
    """`save` leaf by leaf, and a fill that is held or that empty sequences have."""

    def body(carry, x):
        return carry + x.sum(-1), {"a": carry, "b": x, "c": carry + 1}

    run = functools.partial(treescan.mask_scan, body, jnp.zeros(ROWS), PACKED)
    last = treescan.last(run()[1]["a"], PACKED, reverse=False)
    for fill, empty, disabled in ((-1, -1, True), ("hold", 0, False), ({"a": "hold", "b": -1, "c": 7}, 0, False)):
        with jax.disable_jit(disabled):
            carry, kept = run(save={"a": "last", "b": None, "c": 3}, fill=fill)
        npt.assert_allclose(kept["a"], np.where(np.array(LONG) > 0, last, empty), rtol=1e-6)
        assert kept["b"] is None
        npt.assert_allclose(kept["c"], run(fill=fill)[1]["c"][2::3], rtol=1e-6)
        npt.assert_allclose(carry, [sequence.sum() for sequence in SEQUENCES], rtol=1e-5, atol=1e-6)


def test_entries_stand_where_rows_stood():
    """In a carry whose rows do not lead, in a custom carry, in leaves without rows, and beside static leaves."""

    def body(carry, x):
        h, keys = jnp.tanh(carry["h"] + x.T), jax.vmap(jax.random.split)(carry["k"])[:, 0]
        new = {**carry, "h": h, "k": keys, "w": x[:, 0], "steps": carry["steps"] + 1}
        return new, {"h": h, "steps": carry["steps"]}

    keys = jax.random.split(jax.random.key(0), ROWS)
    init = {"act": jnp.tanh, "h": START["h"].T, "k": keys, "steps": 0, "w": window(array(2, ROWS))}
    axes = {"act": None, "h": 1, "k": 0, "steps": None, "w": 0}
    options = {"row_axes": {"carry": axes, "y": {"h": 1, "steps": None}}, "save": "last"}
    ends = []
    for row, sequence in zip(np.asarray(PACKED.index.row), SEQUENCES, strict=True):
        h, w, key = START["h"][row], init["w"].values[:, row], keys[row]
        for x in sequence:
            h, w, key = jnp.tanh(h + x), jnp.stack([w[1], x[0]]), jax.random.split(key)[0]
        ends.append((h, w, key))
    h, w, key = (jnp.stack(leaves, axis) for leaves, axis in zip(zip(*ends, strict=True), (1, 1, 0), strict=True))
    for disabled in (False, True):
        with jax.disable_jit(disabled):
            carry, ys = treescan.mask_scan(body, init, PACKED, **options)
        npt.assert_allclose(carry["h"], h, rtol=1e-5, atol=1e-6)
        npt.assert_allclose(ys["h"], np.asarray(h) * (np.array(LONG) > 0), rtol=1e-5, atol=1e-6)
        npt.assert_array_equal(carry["w"].values, w)
        npt.assert_array_equal(as_numpy(carry["k"]), as_numpy(key))
        assert carry["act"] is jnp.tanh
        assert carry["steps"].shape == ys["steps"].shape == ()


def test_a_truncated_gradient_ends_in_each_sequence():
    """What an earlier sequence of a row ended with is not cut by the stretches that follow it."""

    def final(data, truncate, **options):
        batch = PACKED._replace(data=data)
        return jnp.sum(
            treescan.mask_scan(lambda c, x: (c + x, None), START["h"], batch, truncate=truncate, **options)[0]
        )

    data = jnp.nan_to_num(PACKED.data)
    for options in ({}, {"chunk": 2, "compact": True}):
        got = jax.grad(functools.partial(final, **options))(data, 3)
        want = np.zeros(data.shape)
        for row, start, n in zip(*map(np.asarray, PACKED.index), strict=True):
            first = max(start, start + (n - 1) // 3 * 3)  # counted from the sequence's own first step
            want[first : start + n, row] = 1
        npt.assert_array_equal(got, want)


def test_nothing_but_empty_sequences():
    for rows in (1, 2):
        batch = treescan.pack([np.zeros((0, H), np.float32)] * 2, rows=rows)
        final, last = treescan.mask_scan(lambda c, x: (c + x, x), jnp.ones((rows, H)), batch, save="last", fill=3)
        npt.assert_array_equal(final, np.ones((2, H)))
        npt.assert_array_equal(last, np.full((2, H), 3))
    longer = treescan.pack([np.zeros((0, H), np.float32)] * 2, length=4, init=[np.ones(H), np.zeros(H)])
    npt.assert_array_equal(treescan.mask_scan(lambda c, x: (c + x, x), jnp.ones((1, H)), longer)[0], [[1, 1], [0, 0]])


@pytest.mark.parametrize(("begin", "reverse"), [("reset_to", True), ("inits", False), ("inits", True)])
def test_steps_that_are_left_out_of_the_mask(begin, reverse):
    """A sequence begins with its first step that is left, and ends with its last; one without any ends as it begins."""
    left = MASK & (np.random.default_rng(3).random(PACKED.mask.shape) < 0.5)
    start, options, inits, starts = FROM[begin](START, TO, INITS)
    batch = PACKED._replace(mask=jnp.asarray(left), init=inits)
    run = functools.partial(treescan.mask_scan, functools.partial(step, WEIGHTS), start, batch, save="last")
    results = [run(reverse=reverse, **options, **more) for more in ({"chunk": 2, "compact": True}, {})]
    with jax.disable_jit():
        assert_close(run(reverse=reverse, **options), results[-1])
    want = alone(WEIGHTS, starts, PACKED.data, left, reverse=reverse)
    for got in results:
        assert_close(got, want)
