"""`compact`: each chunk's live rows run alone, on the smallest tier that holds them; the user's order is kept."""

import dataclasses
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
from treescan.options import Around, Option, Slot

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


@pytest.mark.parametrize(("repeats", "tiers"), [(1, [2, 8, 16, 32]), (60, [2, 16, 32])])
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


# Random numbers.


@dataclasses.dataclass(frozen=True)
class Noise(Option):
    """Adds random numbers to the carry, from a key that all rows share."""

    KEY = Slot("test.key", rows=False)

    def __call__(self, step, consts, state, feed):
        state, y = step(consts, state, feed)
        return state + jax.random.normal(self.KEY.of(feed), state.shape), y

    def feeds(self, length):
        return {self.KEY: shared(length, typed=True)}


class NoiseOutside(Noise):
    around = Around.MASK

    def __call__(self, step, consts, state, feed):
        (total,), y = step(consts, state, feed)
        return [total + jax.random.normal(self.KEY.of(feed), total.shape)], y


def shared(length, *, typed):
    """A key for each step."""
    return jax.random.split(jax.random.key(0) if typed else jax.random.PRNGKey(0), length)


def drawn(h, x):
    return h + x[0] + jax.random.normal(x[1], h.shape), None


def drawn_once(h, x):
    """All rows are given the same number."""
    return h + x[0] + jax.random.normal(x[1]), None


def drawn_by_name(h, x):
    """Each row makes its own key, of the number that x gives it."""
    row_keys = jax.vmap(jax.random.fold_in, (None, 0))(x[1], x[2])
    return h + x[0] + jax.vmap(jax.random.normal)(row_keys), None


def drawn_in_a_loop(h, x):
    return jax.lax.scan(lambda h, key: (h + jax.random.uniform(key, h.shape), None), h, shared(3, typed=True))[0], None


def drawn_of_the_carry(carry, x):
    (h, key), _ = carry, x
    now, later = jax.random.split(key)
    return (h + jax.random.normal(now, h.shape), later), None


def split_by_rows(h, x):
    return h + jax.vmap(jax.random.normal)(jax.random.split(x[1], len(h))), None


def add_up(h, x):
    return h + x, None


OF_XS = {"row_axes": {"x": (0, None)}}
OF_CARRY = {"row_axes": {"carry": (0, None)}}
ZEROS = jnp.zeros((STEPS, ROWS))
DOORS = {
    "xs": (drawn, None, (ZEROS, shared(STEPS, typed=True)), OF_XS),
    "raw keys in xs": (drawn, None, (ZEROS, shared(STEPS, typed=False)), OF_XS),
    "split within": (split_by_rows, None, (ZEROS, shared(STEPS, typed=True)), OF_XS),
    "a whole leaf of xs": (drawn, None, (ZEROS, jax.random.key(0)), {**OF_XS, "time_axis": {"xs": (0, None)}}),
    "the carry": (drawn_of_the_carry, jax.random.key(0), ZEROS, OF_CARRY),
    "raw keys in the carry": (drawn_of_the_carry, jax.random.PRNGKey(0), ZEROS, OF_CARRY),
    "a closure": (drawn_in_a_loop, None, ZEROS, {}),
    "a slot": (add_up, None, ZEROS, {"options": [Noise()]}),
    "a slot around the mask": (add_up, None, ZEROS, {"options": [NoiseOutside()]}),
}


@pytest.mark.parametrize("door", DOORS)
def test_numbers_that_all_rows_draw_at_once_are_refused_by_every_door(door):
    body, key, xs, options = DOORS[door]
    init = jnp.zeros(ROWS) if key is None else (jnp.zeros(ROWS), key)
    run = functools.partial(treescan.mask_scan, body, init, xs, lengths=jnp.arange(ROWS) + 1, **options)
    run()
    with pytest.raises(treescan.TreescanError, match=r"random numbers that are drawn\s+for all rows"):
        run(compact=True)


def test_a_condition_that_draws_for_all_rows_at_once_is_refused():
    def holds(h):
        return h < 3 + jax.random.uniform(jax.random.key(0), h.shape)

    run = functools.partial(treescan.while_scan, holds, lambda h, _: (h + 1, None), jnp.zeros(ROWS), max_length=20)
    run()
    with pytest.raises(treescan.TreescanError, match=r"random numbers that are drawn\s+for all rows"):
        run(compact=True)


@pytest.mark.parametrize("body", [drawn_once, drawn_by_name])
def test_numbers_that_do_not_depend_on_the_rows_are_the_same(body):
    names = jnp.broadcast_to(jnp.arange(ROWS), (STEPS, ROWS))
    xs = ZEROS, shared(STEPS, typed=True), names
    options = {"lengths": jnp.arange(ROWS) + 1, "row_axes": {"x": (0, None, 0)}}
    plain, _ = treescan.mask_scan(body, jnp.zeros(ROWS), xs, **options)
    ordered, _ = treescan.mask_scan(body, jnp.zeros(ROWS), xs, compact=True, **options)
    chex.assert_trees_all_close(ordered, plain)
