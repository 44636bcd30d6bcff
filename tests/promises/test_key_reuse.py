"""JAX's key-reuse checker finds what a body does with its keys, and nothing in what treescan does with them."""

import functools
import itertools

import jax
import jax.numpy as jnp
import pytest
from by_hand import derived
from oracle import assert_bitwise, assert_close
from thin import all_pairs, slow

import treescan
from treescan.carries import keys

pytestmark = pytest.mark.quick

KEY_REUSE = "jax_debug_key_reuse"
LENGTHS, XS = jnp.array([3, 1]), jnp.linspace(0.0, 1.0, 8).reshape(4, 2)


@pytest.fixture
def checked():
    """Turns the checker on and off."""
    yield functools.partial(jax.config.update, KEY_REUSE)
    jax.config.update(KEY_REUSE, False)


def key():
    return jax.random.key(0)


def of_rows(*shape):
    return jax.random.split(key(), shape)


def noisy(c, x, *, key):
    return c * jax.random.normal(key, jnp.shape(x)) + x, c


def with_keys(c, xs):
    x, k = xs
    return jnp.sin(c) + x * jax.vmap(jax.random.normal)(k), c


def carried(c, x):
    return {"h": c["h"] * 0.9 + x * jax.random.normal(c["k"], x.shape), "k": None}, c["h"]


def split(c, x):
    """A key that the body carries by itself, one per row."""
    pairs = jax.vmap(jax.random.split)(c["k"])
    return {"h": c["h"] * 0.9 + x * jax.vmap(jax.random.normal)(pairs[:, 0]), "k": pairs[:, 1]}, c["h"]


def run_keyed(verb, h, **options):
    return verb(noisy, h, XS, key=key(), **options)


def run_of_xs(verb, h, **options):
    return verb(with_keys, h, (XS, of_rows(4, 2)), **options)


def run_carried(verb, h, **options):
    final, ys = verb(carried, {"h": h, "k": keys(key())}, XS, **options)
    return final["h"], ys


def run_split(verb, h, **options):
    final, ys = verb(split, {"h": h, "k": of_rows(2)}, XS, **options)
    return final["h"], jax.random.key_data(final["k"]), ys


RUNS = {"key=": run_keyed, "xs": run_of_xs, "keys()": run_carried, "carry": run_split}
ROWS = functools.partial(treescan.mask_scan, lengths=LENGTHS)
VERBS = {"scan": treescan.scan, "mask_scan": ROWS, "reverse": functools.partial(ROWS, reverse=True)}
OPTIONS = {
    "plain": {},
    "step": {"remat": "step"},
    "nested": {"remat": "nested"},
    "save": {"save": "last"},
    "truncate": {"truncate": 2},
    "check_finite": {"check_finite": True},
}
GRID = all_pairs(list(itertools.product(RUNS, VERBS, OPTIONS)))


@pytest.mark.parametrize(("form", "verb", "option"), [*GRID[:3], *slow(*GRID[3:])])
def test_a_loop_that_uses_each_key_once_passes(form, verb, option, checked):
    if option != "plain" and jax.__version_info__ < (0, 10):
        pytest.skip("JAX 0.8 does not compile a branch that is given keys and recomputed, under the checker")
    run = functools.partial(RUNS[form], VERBS[verb], **OPTIONS[option])
    want = derived(run, jnp.ones(2))
    checked(True)
    assert_close(derived(run, jnp.ones(2)), want)
    assert_close(run(jnp.ones(2)), want[0])


def test_so_do_tiers_resets_layers_and_a_vmap(checked):
    resets = jnp.zeros((4, 2), bool).at[2].set(True)

    def block(layer, x, *, key):
        return jnp.sin(x) + layer * jax.random.normal(key, x.shape)

    def runs():
        for remat in (None, "nested"):
            layers = functools.partial(treescan.fold_layers, block, layers=XS, key=key(), remat=remat)
            yield jax.value_and_grad(lambda h, of=layers: of(h).sum())(jnp.ones(2))
        rows = functools.partial(ROWS, split)
        init = {"h": jnp.ones(2), "k": of_rows(2)}
        again = {"h": jnp.zeros(2), "k": jax.random.split(jax.random.key(1), 2)}
        yield run_of_xs(ROWS, jnp.ones(2), compact=True, chunk=2)
        yield run_split(ROWS, jnp.ones(2), compact=True, chunk=2)
        yield run_split(ROWS, jnp.ones(2), resets=resets)
        yield rows(init, XS, resets=resets, reset_to=again)[0]["h"]
        yield jax.vmap(lambda h: run_split(ROWS, h))(jnp.ones((3, 2)))
        yield treescan.fold(lambda c, x, *, key: noisy(c, x, key=key)[0], jnp.ones(2), XS, key=key(), lengths=LENGTHS)

    want = list(runs())
    checked(True)
    assert_bitwise(list(runs()), want)


@pytest.mark.parametrize("verb", VERBS)
def test_a_body_that_uses_a_key_twice_is_found(verb, checked):
    def twice(c, x, *, key):
        return c + jax.random.normal(key, x.shape) + jax.random.uniform(key, x.shape), None

    run = functools.partial(VERBS[verb], twice, jnp.zeros(2), XS, remat="step")
    run(key=key())
    checked(True)
    with pytest.raises(jax.errors.KeyReuseError):
        run(key=key())


def test_a_closed_over_key_is_refused_under_nested_checkpoints_as_in_jax(checked):
    """No key is used twice here, but JAX says so: the gradient computes the chunk, and its keys, once more."""

    def step_of(w):
        closed = key()
        return lambda c, n: (c * w * jax.random.normal(jax.random.fold_in(closed, n)), None)

    def by_hand(w):
        step = step_of(w)
        chunk = jax.checkpoint(lambda c, numbers: jax.lax.scan(step, c, numbers))
        return jax.lax.scan(chunk, 1.0, jnp.arange(16).reshape(4, 4))[0]

    def ours(w):
        return treescan.scan(step_of(w), 1.0, jnp.arange(16), remat="nested")[0]

    assert_close(jax.grad(ours)(1.0), jax.grad(by_hand)(1.0))
    checked(True)
    for run in (by_hand, ours):
        with pytest.raises(jax.errors.KeyReuseError):
            jax.grad(run)(1.0)
