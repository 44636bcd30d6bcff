"""`reset_to` and the inits of packed sequences, against the plain loop over the steps of each row."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpy.testing as npt
import pytest
from loops import array
from oracle import as_numpy, assert_close
from traces import compilations

import treescan
from treescan.carries import keys, window

T, B, H = 7, 3, 2
LENGTHS = np.array([7, 3, 0])
HOLES = np.array([[0, 1, 0], [1, 1, 0], [1, 0, 0], [0, 1, 0], [1, 1, 0], [1, 0, 0], [1, 1, 0]], bool)
RESETS = np.array([[1, 0, 1], [0, 1, 0], [1, 1, 0], [0, 0, 1], [0, 1, 0], [1, 0, 0], [0, 1, 0]], bool)
WEIGHTS = array(H, H, seed=1)
INIT = {"goal": 1 + abs(array(B, H, seed=2)), "h": array(B, H, seed=3), "n": jnp.arange(B)}
TO = {"goal": 2 + abs(array(B, H, seed=4)), "h": array(B, H, seed=5), "n": 10 * jnp.arange(B)}
XS = array(T, B, H, seed=6)


def step(w, carry, x):
    """A goal that no step changes, a state, and a count; what is divided by is 0 in a goal that must not be seen."""
    h = jnp.tanh(carry["h"] @ w + x) / carry["goal"]
    n = carry["n"] + 1
    return {"goal": carry["goal"], "h": h, "n": n}, h * n.astype(h.dtype)[..., None]


def test_an_init_that_is_not_seen_is_not_read():
    """A row whose first valid step is flagged starts from what is put back: not from its init, NaN say."""
    resets = RESETS | (np.cumsum(HOLES, 0) == 1)
    given = ({name: tree[name] for name in ("goal", "h")} for tree in (INIT, TO))
    lost, to = jax.tree.map(lambda leaf: leaf * jnp.nan, next(given)), next(given)

    def total(w, lost, to, **options):
        states = {**INIT, **lost}, {**TO, **to}
        result = treescan.mask_scan(
            functools.partial(step, w), states[0], XS, mask=HOLES, resets=resets, reset_to=states[1], **options
        )
        return jnp.sum(jnp.sin(result[1]))

    for options in ({}, {"chunk": 2, "compact": True}):
        grads = jax.jit(jax.grad(functools.partial(total, **options), (0, 1, 2)))(WEIGHTS, lost, to)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))


def test_what_may_be_said():
    """A number, a tree of numbers with None for what `init` has, a function of init: each means a tree."""

    def run(to, **options):
        return treescan.mask_scan(
            functools.partial(step, WEIGHTS), INIT, XS, resets=RESETS, lengths=LENGTHS, reset_to=to, **options
        )

    def of(goal, h, n):
        return run({"goal": jnp.broadcast_to(goal, (B, H)), "h": jnp.broadcast_to(h, (B, H)), "n": n})

    ones = jnp.ones(B, jnp.int32)
    assert_close(run(1), of(1.0, 1.0, ones))
    assert_close(run({"goal": 2, "h": None, "n": np.int32(1)}), of(2.0, INIT["h"], ones))
    assert_close(run(lambda init: {**init, "h": 0.5, "n": init["n"] * 0}), of(INIT["goal"], 0.5, 0 * ones))
    assert_close(run(lambda init: jax.tree.map(jnp.ones_like, init)), of(1.0, 1.0, ones))
    assert_close(run({"goal": None, "h": None, "n": None}), run(None))
    assert_close(run(lambda init: init), run(None))


def test_several_batch_axes():
    def run(init, to, *rows, **options):
        xs, mask, resets = rows
        body = lambda carry, x: (jnp.tanh(carry + x), carry)  # noqa: E731
        return treescan.mask_scan(body, init, xs, mask=mask, resets=resets, reset_to=to, **options)

    states, others = (array(B, H, seed=2), array(B, H, seed=3)), (array(T, B, H, seed=4), HOLES, RESETS)
    twice = [jnp.stack([part, part]) for part in states], [jnp.stack([part, part], 1) for part in others]
    final, ys = run(*twice[0], *twice[1], compact=True)
    assert_close((final[0], ys[:, 1]), run(*states, *others))


def test_shared_leaves_are_never_reset():
    def count(carry, x):
        totals, steps = carry
        return (totals + x, steps + 1), totals

    run = functools.partial(
        treescan.mask_scan, count, (jnp.ones(B), 0), XS[..., 0], resets=RESETS, row_axes={"carry": (0, None)}
    )
    want = treescan.mask_scan(lambda c, x: (c + x, c), jnp.ones(B), XS[..., 0], resets=RESETS, reset_to=5 * jnp.ones(B))
    for to in (5, (5.0, None), lambda init: (5 * init[0], init[1])):
        (totals, steps), ys = run(reset_to=to)
        assert_close((totals, ys), want)
        assert steps == T


def test_none_for_a_custom_carry():
    """It means the carry's own init, beside another that is put back to one of its class."""

    def body(carry, x):
        return {"m": x, "w": x}, carry["m"].sum(0) + carry["w"][0]

    init, other = ({name: window(value * jnp.ones((2, B))) for name in "mw"} for value in (1.0, 5.0))
    run = functools.partial(treescan.mask_scan, body, init, array(T, B), resets=RESETS, mask=HOLES)
    ours, want = run(reset_to={"m": None, "w": other["w"]}), run(reset_to={"m": init["m"], "w": other["w"]})
    assert_close(ours, want)
    assert float(jnp.abs(ours[1] - run()[1]).max()) > 1


def test_one_number_for_all_leaves_a_custom_carry_at_its_own_start():
    def body(carry, x):
        return {"m": x, "h": carry["h"] + x}, carry["m"].sum(0) + carry["h"]

    init = {"m": window(jnp.ones((2, B))), "h": jnp.full(B, 7.0)}
    run = functools.partial(treescan.mask_scan, body, init, array(T, B), resets=RESETS, mask=HOLES)
    assert_close(run(reset_to=0.0), run(reset_to={"m": None, "h": 0.0}))


def test_keys_are_put_back():
    first, second = (jax.random.split(jax.random.key(i), B) for i in range(2))

    def draw(carry, _):
        return carry, jax.vmap(jax.random.normal)(carry)

    _, ys = treescan.mask_scan(draw, keys(first), length=T, resets=RESETS, reset_to=keys(second))
    _, of_second = treescan.mask_scan(draw, keys(second), length=T, resets=RESETS)
    begun = np.cumsum(RESETS, 0) > 0
    npt.assert_array_equal(np.asarray(ys)[begun], np.asarray(of_second)[begun])
    raw = treescan.mask_scan(lambda k, x: (k, k), first, length=T, resets=RESETS, reset_to=second)[1]
    want = np.where(begun[..., None], as_numpy(second), as_numpy(first))
    npt.assert_array_equal(as_numpy(raw), want)


# Packed sequences, each with an init.

LONG = [3, 1, 0, 4, 2]
INITS = [
    {"goal": 1 + abs(array(H, seed=20 + i)), "h": array(H, seed=30 + i), "n": jnp.int32(i)} for i in range(len(LONG))
]
SEQUENCES = [array(n, H, seed=40 + i) for i, n in enumerate(LONG)]


def test_rows_before_their_first_sequence_have_the_scans_init():
    packed = treescan.pack([np.ones(2, np.float32)], rows=2, init=[5.0])
    _, ys = treescan.mask_scan(lambda c, x: (c + x, c), jnp.array([1.0, 2.0]), packed)
    npt.assert_array_equal(ys.T, [[5, 6], [0, 0]])


def test_none_in_an_init_stands_for_the_scans():
    packed = treescan.pack(SEQUENCES, rows=2, init=[{**init, "goal": None} for init in INITS])
    same = jax.tree.map(lambda leaf: jnp.stack([leaf[0]] * 2), INIT)
    whole = treescan.pack(SEQUENCES, rows=2, init=[{**init, "goal": INIT["goal"][0]} for init in INITS])
    body = functools.partial(step, WEIGHTS)
    assert_close(treescan.mask_scan(body, same, packed)[1], treescan.mask_scan(body, same, whole)[1])


def test_a_sequence_without_an_init_of_a_leaf_begins_from_its_rows():
    packed = treescan.pack([np.ones(2, np.float32)] * 4, rows=2, init=[{"h": 0.0, "n": None}] * 4)
    first = np.array([10.0, 20.0], np.float32)
    body = lambda c, x: ({"h": c["h"] + x, "n": c["n"] + x}, c["n"])  # noqa: E731
    _, ys = treescan.mask_scan(body, {"h": jnp.zeros(2), "n": jnp.asarray(first)}, packed)
    assert sorted(packed.index.row.tolist()) == [0, 0, 1, 1]
    for row, own in zip(packed.index.row, treescan.unpack(ys, packed), strict=True):
        npt.assert_array_equal(own, first[row] + np.arange(2))


def test_inits_of_custom_carries_and_keys():
    of = jax.random.split(jax.random.key(0), 3)
    sequences = [np.ones(n, np.float32) for n in (2, 3, 1)]
    inits = [{"w": window(jnp.array([1.0, 2.0]) * i), "k": of[i]} for i in range(3)]
    packed = treescan.pack(sequences, rows=2, init=inits)
    rows = {"w": window(jnp.zeros((2, 2))), "k": jax.random.split(jax.random.key(1), 2)}

    def body(carry, x):
        return {"w": x, "k": carry["k"]}, (carry["w"][0], carry["k"])

    _, (oldest, drawn) = treescan.mask_scan(body, rows, packed)
    assert [part.tolist() for part in treescan.unpack(oldest, packed)] == [[0, 0], [1, 2, 1], [2]]
    for i, part in enumerate(treescan.unpack(drawn, packed)):
        npt.assert_array_equal(as_numpy(part), as_numpy(jnp.stack([of[i]] * len(sequences[i]))))


def test_pack_of_inits_compiles_nothing():
    on_the_host = [np.asarray(sequence) for sequence in SEQUENCES]
    inits = [{"h": np.zeros(31, np.float32), "n": i} for i in range(len(LONG))]
    assert not compilations(lambda: treescan.pack(on_the_host, init=inits))


def test_resets_within_packed_sequences():
    """They put back what the sequence began from: its own init, or what `reset_to` says."""
    ones = [np.ones(4, np.float32), np.ones(3, np.float32)]
    for reverse, want in ((False, [[11, 12, 11, 12], [21, 22, 23]]), (True, [[12, 11, 12, 11], [23, 22, 21]])):
        packed = treescan.pack(ones, rows=1, init=[10.0, 20.0])
        within = packed._replace(resets=packed.resets.at[packed.index.start[0] + 2, 0].set(True))
        run = functools.partial(treescan.mask_scan, lambda c, x: (c + x, c + x), jnp.zeros(1), reverse=reverse)
        _, ys = run(within)
        assert [y.tolist() for y in treescan.unpack(ys, packed)] == want
        _, ys = run(within._replace(init=None), reset_to=10.0)
        assert [y.tolist() for y in treescan.unpack(ys, packed)] == [want[0], [y - 10 for y in want[1]]]


@pytest.mark.parametrize("how", [contextlib.nullcontext, jax.disable_jit])
@pytest.mark.parametrize(
    ("init", "to", "dtype"),
    [
        (0, 0.5, "float32"),
        (0, jnp.float32(0.5), "float32"),
        (0, lambda init: init + 0.5, "float32"),
        (0.0, 0.5, "bfloat16"),
        (0, 3, "bfloat16"),
        (0, True, "float32"),
        (0, 2**40, "float32"),
        (0, -3, "int8"),
        (0, 5, "int8"),
        (0, 5, "uint8"),
        (0, 200, "uint8"),
        (0, 1000, "uint32"),
        (0, 70_000, "int32"),
        (0, jnp.int8(3), "int8"),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_what_is_put_back_has_the_type_that_a_weak_init_settles_in(init, to, dtype, how):
    def body(c, x):
        c = c + x.astype(dtype)
        return c, c

    def run(**options):
        return treescan.mask_scan(body, init, jnp.ones(4), resets=jnp.array([0, 0, 1, 0], bool), **options)

    with how():
        carry, ys = run(reset_to=to)
    assert carry.dtype == ys.dtype == jnp.dtype(dtype)
    begun = jnp.asarray(float(to(init) if callable(to) else to)).astype(dtype)
    npt.assert_array_equal(ys.astype(float), [1, 2, *map(float, [begun + 1, begun + 2])])
