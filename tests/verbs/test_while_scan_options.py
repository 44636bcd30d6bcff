"""`save` and `remat` of `while_scan`: against a Python loop, and what its outputs take of memory."""

import functools

import jax
import jax.numpy as jnp
import pytest
from hlo import Program
from loops import array, loss_of
from thin import slow
from unpadded import assert_close

import treescan
from treescan import Remat

LENGTH = 11
FILL = -1.0


def step(weights, carry, x):
    n, h = carry
    h = jnp.tanh(h @ weights + (0.1 if x is None else x))
    return (n + 1, h), {"a": 2 * h, "b": jnp.sum(jnp.sin(h))}


def ours(stop, options, h, weights, xs=None):
    body = functools.partial(step, weights)
    carry, ys, steps, stopped = treescan.while_scan(
        lambda carry: carry[0] < stop, body, (0, h), xs, max_length=LENGTH, fill=FILL, **options
    )
    return carry, ys, steps, stopped


def kept(save, ys, last):
    if save is None:
        return None
    if isinstance(save, dict):
        return {name: kept(save[name], ys[name], last[name]) for name in save}
    if save == "last":
        return last
    return ys if save == "all" else jax.tree.map(lambda leaf: leaf[save - 1 :: save], ys)


def by_hand(stop, options, h, weights, xs=None):
    """The loop in Python. Steps that are not taken are `FILL` wherever they stand."""
    places = range(LENGTH)[::-1] if options.get("reverse") else range(LENGTH)
    carry, none = (jnp.int32(0), h), {"a": jnp.full(h.shape, FILL), "b": jnp.array(FILL)}
    ys, last = [none] * LENGTH, none
    for t in places[:stop]:
        carry, last = step(weights, carry, None if xs is None else xs[t])
        ys[t] = last
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *ys)
    ended = jnp.int32(min(stop, LENGTH)), jnp.array(stop <= LENGTH)
    return carry, kept(options.get("save", "all"), stacked, last), *ended


def derived(run, *floats):
    loss, leaves = loss_of(run, *floats)
    return run(*floats), jax.grad(loss)(leaves)


def assert_same(stop, *, with_xs, **options):
    given = (array(2, seed=1), array(2, 2, seed=2), *([array(LENGTH, 2, seed=3)] if with_xs else []))
    mine = functools.partial(derived, functools.partial(ours, stop, options))
    got = jax.jit(mine)(*given)
    want = derived(functools.partial(by_hand, stop, options), *given)
    assert_close(got, want)


SAVES = {
    "last": "last",
    "each": 1,
    "third": 3,
    "beyond": 12,
    "none": None,
    "tree": {"a": 4, "b": "all"},
    "last in a tree": {"a": "last", "b": None},
    "two sizes": {"a": 4, "b": 6},
    "last and a size": {"a": "last", "b": 5},
}


EVERYDAY = [("last", True), ("third", False), ("none", True), ("tree", True), ("last and a size", False)]
OTHERS = [("each", False), ("beyond", True), ("last in a tree", False), ("two sizes", True)]


@pytest.mark.parametrize(("save", "reverse"), [*EVERYDAY, *slow(*OTHERS)])
def test_save(save, reverse):
    assert_same(7, with_xs=True, save=SAVES[save], reverse=reverse)


@pytest.mark.parametrize(("save", "stop"), [("last", 0), ("third", 6)])
def test_save_without_xs(save, stop):
    assert_same(stop, with_xs=False, save=SAVES[save], reverse=stop == 6)


@pytest.mark.parametrize(("save", "stop"), [("tree", LENGTH), ("third", LENGTH + 5), ("last", 1)])
def test_save_at_the_ends(save, stop):
    """Of one step, and of a loop that takes all that there are; with or without a condition that still holds."""
    assert_same(stop, with_xs=True, save=SAVES[save])


REMATS = {
    "step": "step",
    "levels": Remat(levels=3),
    "segment": Remat(segment=4),
    "policy": Remat("dots_saveable"),
    "policy and levels": Remat("everything_saveable", levels=3),
}


MIXED = [("step", True), ("levels", False), ("segment", False), ("policy", True), ("policy and levels", False)]


@pytest.mark.parametrize(("remat", "mixed"), MIXED)
def test_remat(remat, mixed):
    """With everything kept, in reverse, or with two kinds of `save` and no xs."""
    save = {"a": 3, "b": "last"} if mixed else "all"
    assert_same(7, with_xs=not mixed, save=save, remat=REMATS[remat], reverse=not mixed)


def test_each_level_of_remat_is_a_loop_within_the_others():
    def loss(w, levels):
        body = lambda carry, _: ((jnp.sin(carry[0] * w), carry[1] + 1), None)  # noqa: E731
        run = functools.partial(treescan.while_scan, lambda c: c[1] < 9, body, max_length=500)
        return run((w, 0), remat=Remat(levels=levels)).carry[0]

    two, three = (len(Program(jax.grad(functools.partial(loss, levels=n)), 0.5).loops()) for n in (2, 3))
    assert two < three


@pytest.mark.parametrize("save", [3])
def test_each_element_of_vmap_keeps_its_own(save):
    given = array(3, 2, seed=1), array(2, 2, seed=2), array(LENGTH, 2, seed=3)
    stops = [0, 4, 9]

    def run(stop, h, weights, xs):
        return derived(functools.partial(ours, stop, {"save": save}), h, weights, xs)

    got = jax.jit(jax.vmap(run, (0, 0, None, None)))(jnp.array(stops), *given)
    want = [
        derived(functools.partial(by_hand, stop, {"save": save}), h, *given[1:])
        for stop, h in zip(stops, given[0], strict=True)
    ]
    assert_close(got, jax.tree.map(lambda *leaves: jnp.stack(leaves), *want))


@pytest.mark.parametrize("save", [{"a": 4, "b": "last"}])
def test_save_under_disable_jit(save):
    given = array(2, seed=1), array(2, 2, seed=2), array(LENGTH, 2, seed=3)
    options = {"save": save, "remat": Remat(levels=3)}
    with jax.disable_jit():
        got = ours(5, options, *given)
    assert_close(jax.tree.map(jnp.asarray, tuple(got)), by_hand(5, options, *given))


# Memory

WIDTH = 4096


def memory(save, steps, *, gradient=False):
    """Bytes of outputs and of temporaries, in outputs of one step."""

    def run(c):
        result = treescan.while_scan(
            lambda c: c[0] < 1e9, lambda c, _: (c * 1.1, jnp.sin(c)), c, max_length=steps, save=save
        )
        return result.carry, result.ys

    def loss(c):
        return sum(jnp.sum(leaf * leaf) for leaf in jax.tree.leaves(run(c)))

    found = jax.jit(jax.grad(loss) if gradient else run).lower(jnp.ones(WIDTH)).compile().memory_analysis()
    return (found.output_size_in_bytes + found.temp_size_in_bytes) / (4 * WIDTH)


@pytest.mark.parametrize(("steps", "copies"), [(1024, 0), (1021, 1)])
def test_memory_falls_with_what_is_kept(steps, copies):
    """Of a length that `save` does not divide, XLA copies what is kept once."""
    nothing = memory(None, steps)
    assert memory("all", steps) >= steps  # the measure sees them
    for every in (16, 64):
        assert steps // every <= memory(every, steps) - nothing <= (1.1 + copies) * steps / every + 2


@pytest.mark.parametrize("save", ["last", None])
@pytest.mark.parametrize("steps", [1024, 1021])
def test_without_stacked_outputs_nothing_grows(save, steps):
    assert memory(save, steps) - memory(save, 16) <= 1


@pytest.mark.parametrize("save", ["last", None, 64])
def test_memory_of_the_gradient(save):
    """The carries of about sqrt(max_length) chunks, and of the steps of one; not one output per step."""
    assert memory(save, 1024, gradient=True) <= 1024 / 4 < 1024 <= memory("all", 1024, gradient=True)


def test_the_gradient_saves_of_a_step_what_is_not_had_for_nothing():
    """Of 1,024 steps in chunks of 32: the carry before each chunk, and within one each step's carry and tanh."""

    def loss(w, c):
        run = treescan.while_scan(lambda c: c[0, 0] < 2, lambda c, _: (jnp.tanh(c @ w), None), c, max_length=1024)
        return jnp.sum(run.carry)

    w, c = jnp.eye(8), jnp.ones((4096, 8))
    saved = (
        jax.jit(jax.grad(loss, argnums=(0, 1))).lower(w, c).compile().memory_analysis().temp_size_in_bytes / c.nbytes
    )
    least = 32 + 2 * 32
    assert least <= saved <= least + 6
