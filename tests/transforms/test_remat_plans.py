"""Every plan of `Remat` shows in nothing but in what the gradient saves, how often it evaluates, and where it keeps."""

import functools
import itertools
import math

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from oracle import assert_close

import treescan
from treescan import Remat
from treescan._remat.checkpoint import count_parts, divide


def test_fori_of_a_traced_range():
    def total(w, n, remat=None):
        return jnp.sum(treescan.fori(0, n, lambda i, h: jnp.sin(h * w + i), w, max_length=16, remat=remat))

    w = jnp.linspace(0.1, 0.9, 5)
    for remat in ("step", "nested"):
        ours = jax.jit(jax.grad(functools.partial(total, remat=remat)))(w, 11)
        assert_close(ours, jax.jit(jax.grad(total))(w, 11))
    run = functools.partial(treescan.fori, 2, 30, lambda i, h: jnp.sin(h * w + i), w)
    with jax.disable_jit():  # a plan is chosen for what jit would run
        assert_close(run(remat=Remat.fit(10**6)), run())
    with pytest.raises(treescan.errors.ArgumentError, match="cannot choose a plan"):
        jax.jit(functools.partial(total, remat=treescan.Remat.fit(10**6)))(w, 11)


# Evaluations


def evaluations(remat, steps, **options):
    """How often a gradient runs the body, counted while it runs."""
    calls = []

    def host(c):
        calls.append(1)
        return np.sin(c)

    @jax.custom_jvp
    def sin(c):
        return jax.pure_callback(host, jax.ShapeDtypeStruct((), jnp.float32), c)

    sin.defjvp(lambda primals, tangents: (sin(*primals), jnp.cos(primals[0]) * tangents[0]))

    def body(c, x):
        h = sin(c + x)
        return h * h, None

    def loss(c):
        return treescan.scan(body, c, jnp.ones(steps), remat=remat, **options)[0]

    jax.block_until_ready(jax.jit(jax.grad(loss))(jnp.float32(0.5)))
    return len(calls)


@pytest.mark.parametrize(
    ("remat", "times", "reverse"),
    [
        *((Remat(levels=levels), levels + 1, levels == 2) for levels in (1, 2, 3)),
        (Remat("everything_saveable", levels=3), 3, True),
        (Remat("everything_saveable", chunk=4), 2, False),
        (Remat(chunk=2, levels=3), 4, False),
    ],
    ids=str,
)
def test_each_level_evaluates_once_more_and_a_segment_is_a_level(remat, times, reverse):
    assert evaluations(remat, 16, reverse=reverse) == times * 16


# Memory


WIDTH, ROWS = 64, 4096
CARRY = WIDTH * ROWS * 4


def product(c, w):
    return jnp.tanh(c @ w), None


VERBS = {
    "scan": lambda step, c, steps, **options: treescan.scan(step, c, None, steps, **options)[0],
    "mask_scan": lambda step, c, steps, **options: treescan.mask_scan(
        step, c, None, lengths=jnp.full(ROWS, steps), length=steps, chunk=0, **options
    )[0],
    "fori": lambda step, c, steps, **options: treescan.fori(0, steps, lambda i, c: step(c, i)[0], c, **options),
}


@functools.cache
def temp_bytes(remat, steps, reverse=False, verb="scan"):
    def loss(c, w):
        return jnp.sum(VERBS[verb](lambda c, _: product(c, w), c, steps, remat=remat, reverse=reverse))

    given = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((ROWS, WIDTH), (WIDTH, WIDTH)))
    return jax.jit(jax.grad(loss, (0, 1))).lower(*given).compile().memory_analysis().temp_size_in_bytes


def carries(remat, steps=1024, **options):
    """What the gradient needs more for `steps` steps than for one, in carries."""
    return (temp_bytes(remat, steps, **options) - temp_bytes(remat, 1, **options)) / CARRY


@pytest.mark.parametrize("verb", VERBS)
def test_carries_that_the_gradient_saves(verb):
    assert carries(None, verb=verb) > 1800  # the measure sees them
    assert 1000 < carries("step", verb=verb) < 1100
    assert carries("nested", verb=verb) <= 80


def test_carries_that_the_gradient_saves_in_levels_and_segments():
    assert carries(Remat(levels=4)) <= carries(Remat(levels=3), reverse=True) <= 36
    assert carries(Remat(levels=2), 1021) <= 90  # a prime
    assert carries(Remat(levels=3), 1021) <= 50
    assert carries(Remat(chunk=128)) <= 1024 / 128 + 128 + 16


def test_policies_save_what_they_say():
    """Of a step with two products: nothing, the products, or everything."""

    def saved(remat):
        def loss(c, w):
            def step(c, _):
                return jnp.tanh(jnp.sin(jnp.tanh(c @ w) @ w)), None

            return jnp.sum(treescan.scan(step, c, None, 64, remat=remat)[0])

        given = jnp.ones((256, WIDTH)), jnp.ones((WIDTH, WIDTH))
        count = jax.jit(jax.grad(loss, (0, 1))).lower(*given).compile().memory_analysis().temp_size_in_bytes
        return count / (64 * 256 * WIDTH * 4)

    nothing, dots, everything = saved("step"), saved(Remat("dots_saveable")), saved(Remat("everything_saveable"))
    assert saved(Remat("nothing_saveable")) == nothing < 1.5
    assert 2.5 < dots < 3.5  # the carry and two products
    assert dots < everything == saved(None)
    assert saved(Remat("dots_saveable", levels=2)) < 0.6


# Offloading


@pytest.mark.parametrize("levels", [1, 3])
def test_carries_go_to_the_memory_of_the_host(levels):
    def loss(c, xs, remat):
        return jnp.sum(treescan.scan(lambda c, x: (jnp.sin(c * x), None), c, xs, remat=remat)[0])

    def text(remat):
        traced = jax.jit(jax.grad(functools.partial(loss, remat=remat))).trace(jnp.ones(5), jnp.ones((27, 5)))
        return traced.lower(lowering_platforms=("cuda",)).as_text()

    assert "pinned_host" not in text(Remat(levels=levels))
    moved = [line for line in text(Remat(levels=levels, offload="pinned_host")).splitlines() if "pinned_host" in line]
    parts = divide(27, levels)
    shapes = {f"tensor<{size}x5xf32>" for size in (27 // parts[-1] if parts else 27,)} | {"tensor<5xf32>"}
    assert moved
    assert any(shape in line for line in moved for shape in shapes)


# Remat.fit


def planned(budget):
    c, w = jnp.zeros((ROWS, WIDTH)), jnp.ones((WIDTH, WIDTH))
    return treescan.plan_remat(lambda c, _: product(c, w), c, None, 1024, remat=Remat.fit(budget))


def test_more_bytes_take_fewer_evaluations():
    budgets = [3300, 1500, 500, 100, 60, 35, 25]  # in carries
    plans = [planned(budget * CARRY) for budget in budgets]
    counts = [plan.evaluations for plan in plans]
    assert counts == sorted(counts)
    assert counts[0] == 1
    assert counts[-1] > 2
    assert all(plan.saved_bytes <= budget * CARRY for plan, budget in zip(plans, budgets, strict=True))


@pytest.mark.parametrize("steps", [13, 16])
def test_the_plan_is_what_is_run(steps):
    """The evaluations that it tells are those that are counted."""

    def body(c, x):
        h = jnp.sin(c + x)
        return h * h, None

    for budget in (90, 110, 130, 160, 1000):
        plan = treescan.plan_remat(body, jnp.float32(0), jnp.ones(steps), remat=Remat.fit(budget))
        rest = steps % plan.sizes[-1] if plan.sizes else 0
        assert plan.saved_bytes <= budget
        count = evaluations(plan.remat, steps)
        assert steps * plan.evaluations - 2 * rest * len(plan.sizes) <= count <= steps * plan.evaluations


@functools.cache
def fewest(steps, slots):
    """How many steps are evaluated to go forward, at least, while as many carries are saved, the first included."""
    if steps <= 1:
        return 0
    if slots == 1:
        return steps * (steps - 1) // 2
    return min(first + fewest(steps - first, slots - 1) + fewest(first, slots) for first in range(1, steps))


WHOLE = Remat("everything_saveable", levels=3, chunk=2)


@pytest.mark.parametrize(
    ("steps", "remat", "size"),
    [(27, Remat(levels=3), 1), (40, Remat(levels=2, chunk=8), 1), (40, "step", 1), (50, WHOLE, 2)],
    ids=str,
)
def test_a_plan_tells_how_few_evaluations_there_could_be(steps, remat, size):
    """A chunk that is saved whole is one step of the fewest."""
    plan = treescan.plan_remat(lambda c, x: jnp.sin(c + x), jnp.float32(0), jnp.ones(steps), remat=remat, pair=False)
    parts = plan.parts if size == 1 else plan.parts[:-1]
    assert math.prod(parts) == steps // size
    assert plan.least_evaluations == 1 + fewest(steps // size, sum(parts)) / (steps // size)
    assert ("at least" in str(plan)) == (plan.evaluations > 2)


def tower(carry, w):
    return {"h": jnp.tanh(carry["h"] @ w), "n": carry["n"] + 1, "scale": carry["scale"]}, carry["h"]


def tower_types(steps):
    carry = {
        "h": jax.ShapeDtypeStruct((8, 64), jnp.float32),
        "n": jax.ShapeDtypeStruct((), jnp.int32),
        "scale": jax.ShapeDtypeStruct((9,), jnp.float32),
    }
    return carry, jax.ShapeDtypeStruct((steps, 64, 64), jnp.float32)


@pytest.mark.skipif(jax.__version_info__ >= (0, 11), reason="tanh saves less")
def test_a_plan_tells_what_it_is():
    plan = treescan.plan_remat(tower, *tower_types(1000), remat=Remat(levels=3))
    assert (plan.steps, plan.sizes, plan.evaluations) == (1000, (10, 100), 4)
    assert plan.carry_bytes == 8 * 64 * 4  # `scale` never changes, and no derivative reads `n`
    assert plan.step_bytes == 3 * 8 * 64 * 4  # the carry, and of tanh what it returns, y, and 1 - y
    assert plan.saved_bytes == 30 * plan.carry_bytes + plan.step_bytes
    assert plan.remat == Remat(levels=3)
    everything = treescan.plan_remat(tower, *tower_types(1000), remat=None)
    assert (everything.remat, everything.sizes, everything.evaluations) == (None, (), 1)
    assert everything.least_evaluations == 1
    assert everything.saved_bytes == 1000 * everything.step_bytes


@pytest.mark.parametrize("remat", [None, "step", "nested", Remat(chunk=4)], ids=str)
def test_plans_of_other_verbs_and_keys(remat):
    def fold_step(c, x, *, key):
        return jnp.sin(c + x + jax.random.normal(key))

    plan = treescan.plan_remat(fold_step, 0.0, jnp.ones(16), remat=remat, key=jax.random.key(0), pair=False)
    assert plan.evaluations == (1 if remat is None else 2 if remat == "step" else 3)
    assert plan.steps == 16


@pytest.mark.parametrize("steps", [0, 1])
def test_plans_of_hardly_any_steps(steps):
    plan = treescan.plan_remat(tower, *tower_types(steps), remat="nested")
    assert plan.sizes == ()
    assert "one loop" in str(plan)


# Sizes


@given(st.integers(0, 20_000), st.integers(1, 6), st.none() | st.integers(2, 200))
@example(3, 2, 2)
@settings(max_examples=200)
def test_sizes(length, levels, segment):
    segment = None if levels == 1 else segment
    sizes = divide(length, levels, segment)
    assert all(1 < size < length for size in sizes)
    assert all(small < large and large % small == 0 for small, large in itertools.pairwise(sizes))
    if segment is not None:
        assert segment >= length or sizes[0] == segment
        return
    assert len(sizes) <= levels - 1
    if len(sizes) == levels - 1 and length >= 4**levels:
        assert count_parts(length, sizes) <= 1.35 * levels * length ** (1 / levels) + 2
    if length >= 4**levels:
        assert len(sizes) == levels - 1


def test_sizes_by_example():
    assert divide(1024, 2) == (32,)
    assert divide(1000, 3) == (10, 100)
    assert divide(4096, 4) == (8, 64, 512)
    assert divide(3, 2) == divide(100, 1) == ()
    assert count_parts(1000, (10, 100)) == 30
    assert count_parts(1001, (10, 100)) == 31
