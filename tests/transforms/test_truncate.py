"""`truncate` against a Python loop that stops the gradient of its carry between stretches of steps."""

import functools

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from loops import TRANSFORMS, array, loss_of
from oracle import assert_bitwise
from thin import parametrize, slow
from unpadded import QUICKLY, assert_close

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


_compiled = functools.partial(jax.jit, static_argnums=0, compiler_options=QUICKLY)(_derived)


def assert_same_gradient(ours, theirs, *given, distinct=True):
    """Equal in values and gradients; and the loop that is not cut has another gradient, or this shows nothing."""
    got, want = _compiled(ours, *given), _derived(theirs, *given)
    assert_close(got, want)
    if distinct:
        whole = _derived(functools.partial(theirs, size=None), *given)
        gaps = jax.tree.map(lambda a, b: float(jnp.max(jnp.abs(a - b))), want[1], whole[1])
        assert max(gaps) > 1e-3


@parametrize("verb", VERBS)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("size", [1, 3])
def test_equals_the_loop_by_hand(verb, size, reverse):
    run, only = verb
    ours = functools.partial(run, truncate=size, reverse=reverse)
    theirs = functools.partial(oracle, size=size, only=only, reverse=reverse)
    assert_same_gradient(ours, theirs, *arguments(7))


@pytest.mark.parametrize(
    ("steps", "reverse"), [(1, False), (2, True), (7, False), (8, True), *slow((1, True), (2, False), (7, True))]
)
def test_lengths(steps, reverse):
    for size in (2, 7) if steps > 2 else (1, 2):
        ours = functools.partial(scanned, truncate=size, reverse=reverse)
        theirs = functools.partial(oracle, size=size, reverse=reverse)
        assert_same_gradient(ours, theirs, *arguments(steps), distinct=size < steps)


OPTIONS = {
    "step": {"remat": "step"},
    "nested": {"remat": "nested"},
    "levels": {"remat": Remat(levels=3)},
    "segment": {"remat": Remat(segment=5)},
    "policy": {"remat": Remat("everything_saveable", levels=2)},
    "save all": {"save": {"y": "all", "n": "all"}},
    "unroll": {"unroll": 3},
    "unrolled": {"unroll": True},
}


def each_way(names):
    """Every other one in reverse; slow: each in the other direction."""
    rows = [(name, i % 2 == 1) for i, name in enumerate(names)]
    return [*rows, *slow(*((name, not reverse) for name, reverse in rows))]


@pytest.mark.parametrize(("name", "reverse"), each_way(OPTIONS))
def test_options(name, reverse):
    ours = functools.partial(scanned, truncate=3, reverse=reverse, **OPTIONS[name])
    assert_same_gradient(ours, functools.partial(oracle, size=3, reverse=reverse), *arguments(8))


@pytest.mark.parametrize("reverse", [False, True])
def test_with_save(reverse):
    def ours(init, xs):
        return scanned(init, xs, truncate=4, save={"y": 3, "n": "last"}, reverse=reverse)

    def theirs(init, xs, size=4):
        final, _, ys = by_hand(functools.partial(cell, init["p"]), init["init"], xs, size, reverse=reverse)
        return final, {"y": ys["y"][2::3], "n": ys["n"][0 if reverse else -1]}

    assert_same_gradient(ours, theirs, *arguments(11))


@parametrize("transform", TRANSFORMS)
def test_transforms_of_jax(transform):
    given = arguments(7)
    got, want = (
        transform(run, *given) for run in (functools.partial(scanned, truncate=3), functools.partial(oracle, size=3))
    )
    assert_close(got, want)


@pytest.mark.parametrize("reverse", [False, True])
def test_gradients_under_disable_jit(reverse):
    given = arguments(5)
    loss, floats = loss_of(functools.partial(scanned, truncate=2, reverse=reverse), *given)
    with jax.disable_jit():
        got = jax.grad(loss)(floats)
    assert_close(got, _derived(functools.partial(oracle, size=2, reverse=reverse), *given)[1])


def test_vmap_of_a_gradient():
    init, xs = arguments(7, 3)

    def slopes(run, init, xs):
        loss, floats = loss_of(run, init, xs)
        return jax.grad(loss)(floats)

    def mapped(run):
        return jax.vmap(functools.partial(slopes, run), in_axes=(0, 1))(init, xs)

    assert_close(mapped(functools.partial(scanned, truncate=3)), mapped(functools.partial(oracle, size=3)))


@pytest.mark.parametrize(("size", "reverse"), [(7, False), (100, True), *slow((7, True), (8, False))])
def test_a_stretch_as_long_as_the_loop_cuts_nothing(size, reverse):
    init, xs = arguments(7)
    derived = [
        _compiled(functools.partial(scanned, reverse=reverse, **options), init, xs)
        for options in ({"truncate": size}, {})
    ]
    assert_close(*derived, rtol=1e-6, atol=1e-6)


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


@pytest.mark.slow
def test_keys_and_other_dtypes_in_the_carry():
    def body(carry, x):
        key, use = jax.random.split(carry["key"])
        h = jnp.sin(carry["h"] + x + 0.1 * jax.random.normal(use, (2,)))
        flag = jnp.logical_xor(carry["flag"], h[0] > 0)
        half = (carry["half"] + h.astype(jnp.bfloat16)) * jnp.bfloat16(0.5)
        z = carry["z"] * jnp.exp(jax.lax.complex(jnp.zeros_like(h[:1]), h[:1]))
        return {"h": h, "key": key, "flag": flag, "half": half, "z": z}, h + half.astype(jnp.float32) + jnp.abs(z)

    def loss(run, h, xs):
        init = {
            "h": h,
            "key": jax.random.key(0),
            "flag": jnp.array(False),
            "half": jnp.ones(2, jnp.bfloat16),
            "z": jnp.ones(1, jnp.complex64),
        }
        final, ys = run(body, init, xs)
        total = jnp.sum(ys**2) + jnp.sum(final["half"]).astype(jnp.float32) + jnp.sum(jnp.real(final["z"]))
        return total, (ys, jax.random.key_data(final["key"]), final["flag"])

    def theirs(body, init, xs):
        final, _, ys = by_hand(body, init, xs, 3, stop=functools.partial(stops, changing=("h", "half", "z")))
        return final, ys

    def ours(body, init, xs):
        return treescan.scan(body, init, xs, truncate=3)

    given = array(2, seed=5), array(8, 2, seed=6)
    got, want = (jax.grad(functools.partial(loss, run), (0, 1), has_aux=True)(*given) for run in (ours, theirs))
    assert_close(got, want, rtol=1e-2, atol=1e-2)  # bfloat16


def test_weak_and_half_carries_stay_what_they_are():
    """`where` would promote them."""
    final, _ = treescan.scan(lambda c, x: (c * x, None), jnp.bfloat16(1), jnp.ones(5, jnp.bfloat16), truncate=2)
    assert final.dtype == jnp.bfloat16


def test_forward_values_are_the_same_bits():
    init, xs = arguments(7)
    assert_bitwise(jax.jit(functools.partial(scanned, truncate=2))(init, xs), jax.jit(scanned)(init, xs))


# The masked scan


def rows_by_hand(body, init, xs, valid, resets, size, *, reverse=False, hold=False):
    """Each row by itself: its gradient is cut where two of its valid steps, one after the other, lie apart.

    A row's steps before its first valid one, and after its last, cut nothing: they are no steps.
    """
    steps, rows = valid.shape
    finals, columns = [], []
    for b in range(rows):
        start = carry = jax.tree.map(lambda leaf, b=b: leaf[b], init)
        segment, last, ys = np.cumsum(resets[:, b] & valid[:, b]), None, [None] * steps
        for t in range(steps)[::-1] if reverse else range(steps):
            if valid[t, b]:
                if last is not None and size and last // size != t // size:
                    carry = stops(carry)
                if last is not None and segment[last] != segment[t]:
                    carry = start
                carry, ys[t] = body(b, carry, xs[t, b])
                last = t
            elif hold and last is not None:
                ys[t] = ys[last]
        finals.append(carry)
        columns.append(ys)
    like = jax.tree.map(jnp.zeros_like, body(0, *jax.tree.map(lambda leaf: leaf[0], (init, xs[0])))[1])
    columns = [
        jax.tree.map(lambda *leaves: jnp.stack(leaves), *(like if y is None else y for y in ys)) for ys in columns
    ]
    return (
        jax.tree.map(lambda *leaves: jnp.stack(leaves), *finals),
        jax.tree.map(lambda *leaves: jnp.stack(leaves, 1), *columns),
    )


def masked(init, xs, **options):
    def body(carry, x):
        h = jnp.sin(carry["h"] * carry["w"] + init["p"] + x)
        return {"h": h, "w": carry["w"], "n": carry["n"] + 1}, {"y": h * carry["w"], "n": carry["n"]}

    return treescan.mask_scan(body, init["init"], xs, **options)


def masked_oracle(init, xs, size, valid, resets, *, reverse, hold):
    def body(b, carry, x):
        return cell(init["p"][b], carry, x)

    return rows_by_hand(body, init["init"], xs, valid, resets, size, reverse=reverse, hold=hold)


STEPS = 7
LENGTHS = np.array([7, 0, 3])
NO_RESETS = np.zeros((STEPS, 3), bool)
PREFIXES = np.arange(STEPS)[:, None] < LENGTHS
GAPS = np.random.default_rng(7).random((STEPS, 3)) < 0.6
RESETS = np.random.default_rng(8).random((STEPS, 3)) < 0.3

ROWS = {
    "lengths": ({"lengths": LENGTHS}, PREFIXES, NO_RESETS),
    "lengths and resets": ({"lengths": LENGTHS, "resets": RESETS}, PREFIXES, RESETS),
    "gaps": ({"mask": GAPS}, GAPS, NO_RESETS),
    "gaps and resets": ({"mask": GAPS, "resets": RESETS}, GAPS, RESETS),
}
WAYS = {
    "default": {},
    "unskipped": {"chunk": 0},
    "chunk": {"chunk": 5},
    "hold": {"chunk": 3, "fill": "hold"},
    "remat": {"chunk": 2, "remat": "nested"},
    "step": {"chunk": 0, "remat": "step"},
    "levels": {"remat": Remat(levels=2)},
}


@pytest.mark.parametrize(
    ("rows", "reverse"),
    [
        *[("lengths", False), ("gaps and resets", True)],
        *slow(("lengths", True), ("lengths and resets", False), ("gaps", False), ("gaps and resets", False)),
    ],
)
def test_masked(rows, reverse):
    flags, valid, resets = ROWS[rows]
    ours = functools.partial(masked, truncate=3, reverse=reverse, **flags)
    theirs = functools.partial(masked_oracle, size=3, valid=valid, resets=resets, reverse=reverse, hold=False)
    assert_same_gradient(ours, theirs, *arguments(STEPS, 3))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "reverse"),
    [
        *[("chunk", False), ("hold", True), ("remat", False)],
        *slow(("default", True), ("unskipped", True), ("chunk", True), ("hold", False), ("remat", True)),
        *slow(("step", False), ("levels", True)),
    ],
)
def test_masked_in_all_ways(way, reverse):
    way = WAYS[way]
    flags, valid, resets = ROWS["lengths and resets"]
    ours = functools.partial(masked, truncate=3, reverse=reverse, **flags, **way)
    theirs = functools.partial(masked_oracle, size=3, valid=valid, resets=resets, reverse=reverse, hold="fill" in way)
    assert_same_gradient(ours, theirs, *arguments(STEPS, 3))


def test_masked_in_compact_tiers():
    def body(carry, x):
        h = jnp.sin(carry["h"] * carry["w"] + carry["p"] + x)
        return carry | {"h": h, "n": carry["n"] + 1}, {"y": h * carry["w"], "n": carry["n"]}

    def ours(init, xs):
        carry = init["init"] | {"p": init["p"]}
        final, ys = treescan.mask_scan(body, carry, xs, lengths=LENGTHS, chunk=2, compact=True, truncate=3)
        return {name: final[name] for name in init["init"]}, ys

    theirs = functools.partial(masked_oracle, size=3, valid=PREFIXES, resets=NO_RESETS, reverse=False, hold=False)
    assert_same_gradient(ours, theirs, *arguments(STEPS, 3))


@pytest.mark.parametrize("reverse", [True, *slow((False,))])
def test_padding_cuts_nothing(reverse):
    """The gradient of a row's last carry does not depend on how far the row is padded."""
    init, xs = arguments(20, 1)

    def last(init, xs):
        return masked(init, xs, lengths=np.array([3]), truncate=2, reverse=reverse)[0]["h"]

    for steps in (3, 4, 20):
        loss, floats = loss_of(last, init, xs[:steps])
        slopes = jax.grad(loss)(floats)
        *rest, of_xs = slopes
        if steps == 3:
            want = rest, of_xs
        assert_close((rest, of_xs[:3]), want)
        assert not np.any(of_xs[3:])
    assert np.any(want[1])


@pytest.mark.slow
def test_masked_under_disable_jit():
    given = arguments(5, 3)
    valid, resets = PREFIXES[:5], NO_RESETS[:5]
    loss, floats = loss_of(functools.partial(masked, mask=valid, truncate=2, fill="hold"), *given)
    with jax.disable_jit():
        got = jax.grad(loss)(floats)
    theirs = functools.partial(masked_oracle, size=2, valid=valid, resets=resets, reverse=False, hold=True)
    assert_close(got, _derived(theirs, *given)[1])


@pytest.mark.slow
def test_shared_leaves_of_the_carry_are_cut_where_any_row_goes_on():
    def body(carry, x, *, valid):
        total = carry["total"] * 0.9 + jnp.sum(jnp.where(valid, jnp.sin(x + carry["h"]), 0.0))
        return {"h": jnp.cos(carry["h"] + carry["total"][None] * x), "total": total}, None

    valid = np.arange(6)[:, None] < np.array([6, 2])

    def ours(h, total, xs):
        axes = {"h": 0, "total": None}
        init = {"h": h, "total": total}
        return treescan.mask_scan(body, init, xs, mask=valid, carry_axes=axes, truncate=2)[0]

    def theirs(h, total, xs):
        carry = {"h": h, "total": total}
        for t in range(6):
            before = {
                "h": jnp.where(valid[t] & (t in (2, 4)), jax.lax.stop_gradient(carry["h"]), carry["h"]),
                "total": jax.lax.stop_gradient(carry["total"]) if t in (2, 4) else carry["total"],
            }
            new, _ = body(before, xs[t], valid=jnp.asarray(valid[t]))
            carry = {"h": jnp.where(valid[t], new["h"], before["h"]), "total": new["total"]}
        return carry

    given = array(2, seed=1), array(seed=2), array(6, 2, seed=3)
    got, want = (jax.jacobian(run, (0, 1, 2))(*given) for run in (ours, theirs))
    assert_close(got, want)


# At random


@pytest.mark.slow
@settings(max_examples=10)
@given(
    steps=st.integers(1, 9),
    size=st.integers(1, 10),
    reverse=st.booleans(),
    remat=st.sampled_from([None, "step", "nested", Remat(segment=2)]),
    unroll=st.sampled_from([1, 2, True]),
)
def test_at_random(steps, size, reverse, remat, unroll):
    init, xs = arguments(steps)
    ours = functools.partial(scanned, truncate=size, reverse=reverse, remat=remat, unroll=unroll)
    theirs = functools.partial(oracle, size=size, reverse=reverse)
    assert_same_gradient(ours, theirs, init, xs, distinct=False)


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
    assert gradient_of(nothing.at[3].set(True), 2) == 0.5 + 0.25 + 0.5
