"""`compact`: each chunk's live rows run alone, on the smallest tier that holds them; the user's order is kept."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bars import noted
from by_hand import masked_by_hand
from loops import array
from thin import parametrize

import treescan

STEPS, ROWS, WIDTH, CHUNK = 9, 8, 2, 2  # a remainder of one step, which runs on all rows
TIERS = (1, 2, 4, 8)


def cell(carry, x):
    """Rows differ in their own weights, and count their steps."""
    h = jnp.tanh(carry["w"] * carry["h"] + jnp.log(x))
    return {"h": h, "w": carry["w"], "n": carry["n"] + 1}, {"y": h * x, "n": carry["n"]}


RAN = []


def telling(carry, x):
    """`cell` that notes at run time how many rows it is run on."""
    rows = x.shape[0]
    jax.debug.callback(lambda: RAN.append(rows))
    return cell(carry, x)


def data(mask, seed=0):
    """Good where the mask is set; the padding's logarithm is NaN."""
    rng = np.random.default_rng(seed)
    batch = mask.shape[1:]
    xs = np.where(mask[..., None], rng.uniform(0.5, 2.0, (*mask.shape, WIDTH)), -1.0)
    init = {"h": array(*batch, WIDTH, seed=seed), "w": array(*batch, WIDTH, seed=seed + 1), "n": jnp.zeros(batch, int)}
    return init, jnp.asarray(xs, jnp.float32)


def by_hand(init, xs, mask, **options):
    return masked_by_hand(cell, init, jnp.where(jnp.asarray(mask)[..., None], xs, 1.0), mask, **options)


def ours(init, xs, mask, *, body=cell, chunk=CHUNK, compact=True, **options):
    return treescan.mask_scan(body, init, xs, mask=mask, chunk=chunk, compact=compact, **options)


# Results.


BY_HAND = jax.jit(by_hand)


# What the body is run on.


def lengths_mask(*lengths):
    return np.arange(STEPS)[:, None] < np.array(lengths)


RUNS = {  # a mask, and for each step that is run the rows it is run on
    "all": (lengths_mask(*[STEPS] * ROWS), [8] * 9),
    "falling": (lengths_mask(8, 6, 6, 4, 2, 2, 0, 0), [8, 8, 4, 4, 4, 4, 1, 1]),
    "one row": (lengths_mask(0, 0, 0, 0, 0, 0, 3, 0), [1] * 4),
    "three rows": (lengths_mask(0, 2, 0, 1, 0, 0, 0, 2), [4] * 2),
    "the remainder": (lengths_mask(0, 0, 0, 0, 0, 0, 0, 9), [1] * 8 + [8]),
    "a hole": (np.isin(np.arange(STEPS), [0, 6])[:, None] & np.array([1, 0, 0, 0, 1, 0, 0, 0], bool), [2] * 4),
    "taking turns": (np.eye(ROWS, dtype=bool)[np.arange(STEPS) % ROWS], [2] * 8 + [8]),
    "nothing": (lengths_mask(*[0] * ROWS), []),
}


@parametrize("case", RUNS)
def test_each_chunk_runs_on_the_smallest_tier_that_holds_its_rows(case):
    mask, rows = case
    ran, got = noted(RAN, lambda: ours(*data(mask), mask, body=telling))
    assert ran == rows
    chex.assert_trees_all_close(got, BY_HAND(*data(mask), mask), rtol=1e-5, atol=1e-6)


def test_mapped_batches_run_on_what_the_fullest_needs():
    masks = np.stack([RUNS["three rows"][0], RUNS["one row"][0], RUNS["nothing"][0]])
    inits, xs = jax.tree.map(lambda *leaves: jnp.stack(leaves), *map(data, masks))
    run = jax.jit(jax.vmap(functools.partial(ours, body=telling, compact=(1, 4))))
    ran, got = noted(RAN, lambda: run(inits, xs, masks))
    assert ran == [4, 4, 1, 1]
    chex.assert_trees_all_close(got, jax.vmap(by_hand)(inits, xs, masks), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("compact", "tiers"),
    [(True, TIERS), ((3,), (3, 8)), ((5, 2, 8, 5), (2, 5, 8)), ((8,), (8,)), ((4, 8), (4, 8)), (False, (8,))],
    ids=str,
)
def test_the_body_is_traced_once_for_each_tier(compact, tiers):
    seen = []

    def body(carry, x):
        seen.append(x.shape[0])
        return cell(carry, x)

    mask = RUNS["falling"][0]
    jax.make_jaxpr(functools.partial(ours, mask=mask, body=body, compact=compact))(*data(mask))
    assert sorted(seen) == list(tiers)


@pytest.mark.parametrize(("repeats", "tiers"), [(1, [1, 2, 4, 8, 16, 32]), (60, [2, 16, 32])])
def test_a_large_step_has_three_tiers(repeats, tiers):
    traced = set()

    def body(h, x):
        traced.add(len(h))
        for _ in range(repeats):
            h = jnp.tanh(h + x)
        return h, None

    xs, lengths = array(32, 32), jnp.arange(32)
    h, _ = treescan.mask_scan(body, jnp.zeros(32), xs, lengths=lengths, compact=True)
    assert sorted(traced) == tiers
    np.testing.assert_array_equal(h, treescan.mask_scan(body, jnp.zeros(32), xs, lengths=lengths)[0])


# What it cannot do.


class Refused(Exception):
    """An error of the user's own."""


def test_an_error_of_the_users_within_compact_stays_theirs():
    def body(carry, x):
        if x.shape[0] != ROWS:
            raise Refused
        return carry, x

    mask = RUNS["falling"][0]
    with pytest.raises(Refused) as caught:
        ours(*data(mask), mask, body=body)
    assert caught.value.__notes__[0] == "This happened when `compact` called it with 1 of the 8 rows."


def counts_if_all(carry, x):
    return (carry | {"n": carry["n"] + 1} if x.shape[0] == ROWS else carry), None


BODIES = {
    "state": counts_if_all,
    "dtype of y": lambda c, x: (c, x if x.shape[0] == ROWS else x.astype(jnp.bfloat16)),
    "structure of y": lambda c, x: (c, x if x.shape[0] == ROWS else (x, x)),
    "shape of y": lambda c, x: (c, x[:, 0][:, None] * x[:, 0][None]),
}


@parametrize("body", BODIES)
def test_a_body_that_does_something_else_on_fewer_rows_is_found_out(body):
    mask = RUNS["falling"][0]
    with pytest.raises(treescan.errors.BodyError, match=r"behaved differently when `compact` called it with 1 of the"):
        ours(*data(mask), mask, body=body)
