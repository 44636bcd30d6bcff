"""What `plan_remat` estimates, from the trace alone, is about what XLA plans, and `Remat.fit` fits its budget."""

import functools

import jax
import jax.numpy as jnp
import pytest
from plan_bytes import PLANS, cases, compiled, layers_case, mlp, mlp_stack, plain, plain_stack, sine, steps_case
from thin import slow

import treescan
from treescan import Remat

DAILY = ("recurrence", Remat(levels=3))
CASES = [  # 36 of 72: each program with every other plan
    pytest.param(c, marks=() if (c.name, c.remat) == DAILY else pytest.mark.slow, id=f"{c.name}, {c.remat!r}")
    for c in list(cases())[1::2]
]


@pytest.mark.parametrize("case", CASES)
def test_the_prediction_is_within_15_percent(case):
    assert 0.85 <= case.predicted / case.compiled <= 1.15


# Remat.fit

LARGE = functools.partial(layers_case, "", plain, (16, 256), plain_stack(128, 256))  # 33.6 MB, a carry of 16 kB
MIXED = functools.partial(layers_case, "", [mlp, mlp, sine], (128, 64), [mlp_stack(n, 64) for n in (17, 16, 16)])
LONG = functools.partial(steps_case, "", 256, 64, 128)
SMALL = functools.partial(layers_case, "", mlp, (64, 16), mlp_stack(36, 16))
FAMILY = [
    *PLANS,
    *(Remat(policy, levels, size) for policy in (None, "everything_saveable") for levels in (2, 3) for size in (2, 6)),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "budgets"),
    [(SMALL, [1e5, 3e5, 1e6]), (LARGE, [2e6, 2.6e6, 9e6]), (MIXED, [4e6, 6e6, 2e7]), (LONG, [9e5, 2e6, 3e7])],
    ids=["small", "large parameters", "pattern", "steps"],
)
def test_fit_stays_within_its_budget(make, budgets):
    """Where it finds no plan, there is none: none that is compiled here fits with 15 % to spare."""
    least = []
    for budget in map(int, budgets):
        case = make(Remat.fit(budget))
        try:
            plan = case.plan(case.remat)
        except treescan.errors.ArgumentError as error:
            assert "no plan fits" in str(error)
            least = least or [make(remat).compiled for remat in FAMILY]
            assert 1.15 * min(least) > budget
        else:
            assert case.compiled <= budget
            assert make(plan.remat).compiled == case.compiled


def test_large_parameters_are_not_nested():
    """Where slices of parameters are larger than carries, a level costs more than it saves."""
    assert LARGE(None).plan(Remat.fit(3_000_000)).remat == Remat(levels=1)
    plans = [LARGE(None).plan(remat) for remat in (Remat(), Remat(levels=2), Remat(levels=3))]
    assert [plan.needed_bytes for plan in plans] == sorted(plan.needed_bytes for plan in plans)
    assert [plan.saved_bytes for plan in plans] == sorted((plan.saved_bytes for plan in plans), reverse=True)


def test_a_pattern_saves_a_carry_for_each_block():
    plan = MIXED(None).plan(Remat())
    assert plan.steps == 16
    assert plan.carry_bytes == 128 * 64 * 4
    assert 48 * plan.carry_bytes < plan.saved_bytes < 48 * plan.carry_bytes + plan.step_bytes
    assert plan.copied_bytes == 16 * 2 * 64 * 256 * 4  # of the stack that leads


def test_layers_are_planned_as_the_steps_that_they_are():
    x, layers = jax.ShapeDtypeStruct((16, 64), jnp.float32), plain_stack(32, 64)
    for remat in PLANS:
        ours = treescan.plan_remat(plain, x, layers=layers, remat=remat, pair=False)
        assert ours == treescan.plan_remat(lambda x, w: plain(w, x), x, layers, remat=remat, pair=False)
    with_y = treescan.plan_remat(
        lambda layer, x, scale: (plain(layer, x) * scale, x), x, layers=layers, args=(2.0,), remat=None
    )
    assert with_y.step_bytes >= ours.step_bytes


def test_what_ys_and_integers_add():
    x = jax.ShapeDtypeStruct((4, 8), jnp.float32)
    ints, floats = (jax.ShapeDtypeStruct((64, 1000), dtype) for dtype in (jnp.int32, jnp.float32))

    def copied(xs, body):
        return treescan.plan_remat(body, x, xs, remat=Remat(levels=2)).copied_bytes

    assert (
        copied(ints, lambda h, x: (jnp.sin(h) + x.sum().astype(h.dtype), None)) == 8 * 4000
    )  # which have no gradients
    assert copied(floats, lambda h, x: (jnp.sin(h) + x.sum().astype(h.dtype), None)) == 8 * 8000
    assert copied(ints, lambda h, x: (jnp.sin(h) + x.sum().astype(h.dtype), h)) == 8 * (4000 + 128)


def test_offload_says_where_it_changes_nothing():
    for call in (
        lambda remat: treescan.fold(lambda c, x: c + x, 0.0, jnp.ones(4), remat=remat),
        lambda remat: treescan.plan_remat(lambda c, x: (c + x, None), 0.0, jnp.ones(4), remat=remat),
    ):
        with pytest.warns(UserWarning, match="has no effect on this device") as caught:
            call(Remat(levels=2, offload="pinned_host"))
        assert caught[0].filename == __file__
        assert "treescan explain" not in str(caught[0].message)  # which knows treescan's own kinds alone


# States of layers


def attends(layer, x, cache):
    new = jnp.tanh(x @ layer["w"])
    cache = jax.lax.dynamic_update_slice_in_dim(cache, new[:, None], 3, 1)
    weights = jax.nn.softmax(jnp.einsum("bd,bsd->bs", x, cache))
    return x + jnp.tanh(jnp.einsum("bs,bsd->bd", weights, cache) @ layer["w"]), cache


def averages(layer, x, mean):
    mean = jnp.tanh(mean * 0.9 + (x @ layer["w"])[:, None])
    return x + jnp.tanh(mean.mean(1) @ layer["w"]), mean


@pytest.mark.parametrize(
    ("blocks", "remat", "most"),
    [
        (averages, None, 1.15),
        *slow((attends, None, 1.15), ([attends, averages], None, 1.15), (attends, "nested", 1.15)),
        *slow((averages, "step", 3)),  # XLA writes gradients over what it has read
    ],
)
def test_states_count(blocks, remat, most):
    one, own = plain_stack(12, 64), jax.ShapeDtypeStruct((12, 8, 256, 64), jnp.float32)
    layers, state = ([one, one], [own, own]) if isinstance(blocks, list) else (one, own)
    x = jax.ShapeDtypeStruct((8, 64), jnp.float32)
    plan = treescan.plan_remat(blocks, x, layers=layers, state=state, remat=remat, pair=False)
    run = functools.partial(treescan.fold_layers, blocks, remat=remat)
    needed = compiled(lambda x, layers, state: run(x, layers, state=state), x, layers, state)
    assert 0.85 <= plan.needed_bytes / needed <= most


def test_counts_among_the_states_have_no_gradient():
    def counts(layer, x, calls):
        return plain(layer, x), calls + 1

    x, calls = jnp.ones((4, 16)), jnp.zeros((6, 1000), int)
    layers = {"w": jnp.ones((6, 16, 16))}
    plan = treescan.plan_remat(counts, x, layers=layers, state=calls, remat=None, pair=False)
    assert plan.needed_bytes < calls.nbytes


# Leaves of the state that a step only adds to

H, W = jnp.ones((8, 128)), jnp.full((128, 128), 1 / 128)
ADDS = {  # per body: what it carries beside h, and that after a step
    "sum of products": (jnp.zeros((128, 128)), lambda s, h, x: s + h.T @ h),
    "sum in float": (0.0, lambda s, h, x: s + jnp.mean(h**2)),
    "two sums": ((0 * H, 0 * W), lambda s, h, x: (s[0] - h, s[1] + x.T @ h)),
    "average": (0 * H, lambda s, h, x: 0.9 * s + 0.1 * h),
    "running mean": (0 * H, lambda s, h, x: s + (h - s) / 8),
    "average of an average": ((H, H), lambda s, h, x: (0.9 * s[0] + h, s[1] + s[0])),
    "average of many": (jnp.zeros((64, 8, 128)), lambda s, h, x: 0.9 * s + h),
    "histogram": (jnp.zeros((8, 128, 64)), lambda s, h, x: s + jnp.sin(h)[..., None]),
    "buffer": ((jnp.zeros((256, 8, 128)), 0), lambda s, h, x: (s[0].at[s[1]].set(h), s[1] + 1)),
    "ring": ((jnp.zeros((16, 8, 128)), 0), lambda s, h, x: (s[0].at[s[1] % 16].set(h), s[1] + 1)),
    "shift": (jnp.zeros((16, 8, 128)), lambda s, h, x: jnp.roll(s, 1, 0).at[0].set(h)),
    "trace of a linear unit": (jnp.zeros((32, 8, 128)), lambda s, h, x: 0.5 * s + h),
    "trace of a gated unit": (jnp.zeros((32, 8, 128)), lambda s, h, x: (1 - h**2) * s + x),
    "sum that moves": (0 * W, lambda s, h, x: jnp.roll(s, 1, 0) + h.T @ h),
    "maximum": (0 * H, lambda s, h, x: jnp.maximum(s, h)),
    "counts": (jnp.zeros((8, 128), int), lambda s, h, x: s + (h > 0)),
    "fast weights": (jnp.zeros((8, 128, 128)), lambda s, h, x: 0.9 * s + h[:, :, None] * x[:, None]),
    "sum of squares": (0 * H, lambda s, h, x: s + h**2),
    "product": (H, lambda s, h, x: s * h),
    "step number": (0, lambda s, h, x: s + 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ADDS)
def test_what_a_step_only_adds_to_is_not_saved(name):
    """And for `describe` as for `plan_remat`: the same number."""
    other, after = ADDS[name]
    init, xs = (H, jax.tree.map(jnp.asarray, other)), jnp.ones((256, 8, 128))

    def loss(h, w, xs, remat):
        step = functools.partial(adding, after, w)
        last = treescan.fold(step, (h, init[1]), xs, remat=remat)
        return sum(jnp.sum(leaf.astype(float) ** 2) for leaf in jax.tree.leaves(last))

    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        for remat in (None, "step", "nested"):
            step = functools.partial(adding, after, W)
            plan = treescan.plan_remat(step, init, xs, remat=remat, pair=False)
            assert plan.needed_bytes == treescan.describe(treescan.fold, step, init, xs, remat=remat).plan.bytes
            gradient = jax.jit(jax.grad(functools.partial(loss, remat=remat), (0, 1, 2))).lower(H, W, xs)
            needed = gradient.compile().memory_analysis().temp_size_in_bytes
            most = 2.5 if name == "histogram" else 1.35  # XLA computes the last value where it is read
            assert 0.75 <= plan.needed_bytes / needed <= most, (name, remat, plan.needed_bytes, needed)


def adding(after, w, carry, x):
    h = jnp.tanh(carry[0] @ w + x)
    return h, after(carry[1], h, x)


def test_kept_outputs_and_sums_fit_a_budget():
    """Each was refused, or took four evaluations more."""
    step = lambda h, x: (jnp.sin(h) + x,) * 2  # noqa: E731
    adds = lambda c, x: ((jnp.sin(c[0]) + x, c[1] + jnp.outer(c[0], x)), None)  # noqa: E731
    h, xs, fit = jnp.ones(256), jnp.ones((1024, 256)), Remat.fit(1_300_000)
    found = treescan.describe(treescan.scan, step, h, xs, save=range(15, 1024, 17), remat=fit).plan
    assert found.evaluations == 1 and found.bytes < 1_300_000
    found = treescan.describe(treescan.scan, adds, (h, jnp.zeros((256, 256))), xs, remat=fit).plan
    assert found.evaluations == 2 and found.bytes < 1_300_000


def test_a_plan_says_what_it_assumes():
    plan = treescan.plan_remat(lambda h, x: (jnp.sin(h) * x, None), jnp.ones(4), jnp.ones((9, 4)), remat="step")
    assert "everything floating-point" in str(plan) and "everything floating-point" in plan._repr_html_()
