"""`progress` without a number of updates: how often a run reports, and that values and transforms are unharmed."""

import functools
import itertools
import threading
import time
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bars import TRANSFORMS, Recorder, bars, progress, steps_of
from jax.sharding import Mesh, PartitionSpec
from jaxprs import equations
from thin import slow

import treescan
from treescan._options.progress.meters import GROWTH, INTERVAL, NEVER, RUNS, SHARE, Pace
from treescan.meters import Progress

pytestmark = pytest.mark.quick

T = 200
XS = jnp.sin(jnp.arange(float(T)))
PACED = Progress("loop", meter=Recorder(), show=lambda c: {"c": c})
LABEL = Progress("label", meter=Recorder())
RARE, OFTEN = [2, 20, T], [*range(2, T, 2), T]
"""The reports of a run of 100 chunks: those whose distance `GROWTH` alone bounds, and all that there can be."""


def step(c, x):
    c = jnp.tanh(c + x)
    return c, c * 2


def loss(c, **options):
    carry, ys = treescan.scan(step, c, XS, progress=PACED, **options)
    return carry + jnp.sum(ys)


@pytest.fixture(autouse=True)
def no_loop_has_run_before(monkeypatch):
    """As if each loop ran for the first time: eager calls of one body share a loop, and tests share the body."""
    monkeypatch.setattr(RUNS, "_first_due", weakref.WeakKeyDictionary())


@pytest.fixture
def rare(monkeypatch):
    """As if each run took no time."""
    monkeypatch.setattr("treescan._options.progress.meters.INTERVAL", 1e6)


@pytest.fixture
def often(monkeypatch):
    """As if each chunk took longer than it is to take between two reports."""
    monkeypatch.setattr("treescan._options.progress.meters.INTERVAL", 0.0)
    monkeypatch.setattr("treescan._options.progress.meters.SHARE", np.inf)


# The pace.


def dues(monkeypatch, seconds_of, *, shows=0.0, steps=10_000, size=100):
    """When a run reports, and after how many steps, if step i takes `seconds_of(i)` and a meter `shows`."""
    now, due, told = 100.0, 0, []
    monkeypatch.setattr(time, "monotonic", lambda: now)
    pace = Pace(began=now)
    for done in range(size, steps, size):
        now += sum(map(seconds_of, range(done - size, done)))
        if done >= due:
            heard, now = now, now + shows
            told.append((now - 100.0, done))
            due = pace.next_due(done, heard)
    return told


def test_a_run_reports_five_times_a_second_if_its_steps_take_equally_long(monkeypatch):
    told = dues(monkeypatch, lambda i: 1e-3)
    assert [done for _, done in told[:3]] == [100, 300, 500]
    assert max(b - a for (a, _), (b, _) in itertools.pairwise(told)) <= INTERVAL + 1e-3 * 100
    assert len(told) == pytest.approx(10 / INTERVAL, abs=3)


def test_a_fast_run_reports_a_few_times_and_a_slow_one_after_each_chunk(monkeypatch):
    assert [done for _, done in dues(monkeypatch, lambda i: 1e-7)] == [100, 1000]
    assert [done for _, done in dues(monkeypatch, lambda i: 0.1)] == [*range(100, 10_000, 100)]


def test_a_run_whose_steps_become_slower_is_seen_to_move(monkeypatch):
    told = dues(monkeypatch, lambda i: 1e-5 if i < 500 else 1e-2)
    assert all(after <= GROWTH * before for (_, before), (_, after) in itertools.pairwise(told))
    assert len(told) > 60


def test_a_slow_meter_is_told_less_often(monkeypatch):
    told = dues(monkeypatch, lambda i: 1e-3, shows=0.05, steps=30_000)
    apart = [after - before for (before, _), (after, _) in itertools.pairwise(told)]
    assert apart[2:] == [pytest.approx(0.05 + 0.05 / SHARE, abs=0.11)] * len(apart[2:])


def test_the_next_run_first_reports_after_the_steps_that_this_one_makes_between_two_reports(monkeypatch):
    """Never after more than fit an int."""
    monkeypatch.setattr(time, "monotonic", lambda: 102.0)
    assert Pace(began=100.0).due_of_the_next_run(1000) == 1000 * INTERVAL / 2
    assert Pace(began=100.0).due_of_the_next_run(1) == 1
    assert Pace(began=102.0).due_of_the_next_run(1) == INTERVAL / 1e-9
    assert Pace(began=102.0).due_of_the_next_run(2**30) == Pace(began=102.0).next_due(2**30, 102.0) == NEVER


# The runs.


def test_a_run_that_takes_long_reports_each_chunk(often):
    assert steps_of(lambda: loss(0.0)) == (T, OFTEN)
    assert steps_of(lambda: treescan.scan(step, 0.0, XS[:1], progress=PACED)) == (1, [1])
    assert steps_of(lambda: treescan.scan(step, 0.0, XS[:0], progress=PACED)) == (0, [])
    run = lambda: treescan.scan(step, 0.0, XS[:103], reverse=True, progress=PACED)  # noqa: E731
    assert steps_of(run) == (103, [*range(3, 103, 2), 103])


def test_what_is_shown_is_the_carry_after_the_steps_that_are_done(rare):
    carries = treescan.accumulate(lambda c, x: step(c, x)[0], 0.0, XS)
    ((_, told),) = bars(lambda: jax.jit(loss)(0.0))
    assert told == [(done, {"c": pytest.approx(float(carries[done - 1]), abs=1e-6)}) for done in RARE]


@pytest.mark.parametrize("options", [{"reverse": True}, *slow(({"compact": True, "chunk": 4},))], ids=str)
def test_a_masked_scan_paces_the_steps_in_which_any_row_is_valid(options, often):
    rows = functools.partial(treescan.mask_scan, step, jnp.zeros(2), jnp.stack([XS, XS], 1), progress=LABEL, **options)
    total, steps = steps_of(lambda: rows(lengths=jnp.array([3, 90])))
    assert (total, steps[-1]) == (90, 90)
    assert steps == sorted(set(steps))
    assert steps_of(lambda: rows(lengths=jnp.array([0, 0]))) == (0, [])


def test_a_gradient_says_nothing(rare):
    """A paced loop differs in its chunks alone: `test_progress.py` has all transforms."""
    assert steps_of(lambda: TRANSFORMS["vmap of grad of checkpoint"](lambda h: loss(h[0]))) == (T, RARE)


@pytest.mark.devices
def test_one_device_of_a_shard_map_reports(rare):
    mesh, spec = Mesh(np.array(jax.devices()[:2]), ("d",)), PartitionSpec("d")
    for check in (True, False):
        run = jax.shard_map(lambda c: loss(c[0])[None], mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check)
        assert steps_of(lambda run=run: jax.jit(jax.grad(lambda c: jnp.sum(run(c))))(jnp.ones(2))) == (T, RARE)


def test_threads_and_loops_within_loops_have_bars_of_their_own(rare):
    run = jax.jit(lambda c: treescan.scan(lambda c, _: (jnp.sin(c), None), c, None, T, progress=LABEL)[0])

    def all_at_once():
        threads = [threading.Thread(target=lambda i=i: jax.block_until_ready(run(i / 9))) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    told = bars(lambda: all_at_once() or jnp.zeros(()))
    each = [[done for done, _ in steps] for _, steps in told]
    assert len(each) == 4 and all(steps in (RARE, [T]) for steps in each)  # those that begin after one has ended know
    nested = lambda c, _: (treescan.scan(step, c, XS, progress=PACED)[0], None)  # noqa: E731
    told = bars(lambda: jax.grad(lambda c: treescan.scan(nested, c, None, 3, progress=LABEL)[0])(0.1))
    assert [[done for done, _ in steps] for _, steps in told] == [[1, 3], RARE, [T], [T]]


def test_a_run_after_another_first_reports_when_the_pace_of_that_one_says(rare, monkeypatch):
    run = jax.jit(lambda c: treescan.scan(step, c, XS, progress=PACED)[0])
    dues = iter([50, 1, NEVER, 1, 1])
    monkeypatch.setattr(Pace, "due_of_the_next_run", lambda *_: next(dues))
    assert [steps_of(lambda: run(0.1))[1] for _ in range(4)] == [RARE, [50, T], RARE, [T]]
    other = jax.jit(lambda c: treescan.scan(lambda c, x: step(c, x), c, XS, progress=PACED)[0])
    assert steps_of(lambda: other(0.1))[1][0] == 2


def test_what_cannot_be_paced_has_twenty_updates():
    half = XS[: T // 2]
    run = lambda c: treescan.scan_layers([lambda x, c: step(c, x)] * 2, c, [half, half], progress=PACED)[0]  # noqa: E731
    assert len(steps_of(lambda: run(0.1))[1]) == 20


@pytest.mark.parametrize(("given", "branches"), [(progress(), []), (PACED, [["int32[]"]])], ids=["updates", "paced"])
def test_no_step_has_a_branch_or_a_callback_and_no_state_passes_through_one(given, branches):
    jaxpr = jax.make_jaxpr(lambda c: treescan.scan(step, c, XS, progress=given))(0.1).jaxpr
    (chunks,) = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan"]
    body = chunks.params["jaxpr"].jaxpr
    (steps,) = [eqn for eqn in body.eqns if eqn.primitive.name == "scan"]
    inside = {eqn.primitive.name for eqn in equations(steps.params["jaxpr"].jaxpr)}
    assert not {"cond", "pure_callback", "debug_callback", "custom_vmap_call"} & inside
    found = [eqn for eqn in body.eqns if eqn.primitive.name == "cond"]
    assert [[var.aval.str_short() for var in branch.outvars] for branch in found] == branches


def test_the_steps_of_a_weak_init_are_one_program():
    """Its weak type settles before the chunks that are reported: else the first step is compiled by itself."""

    def run(init):
        last = lambda c, x: (c + x, c)  # noqa: E731
        return jax.make_jaxpr(lambda xs: treescan.scan(last, init, xs, save=2, progress=PACED))(XS).jaxpr

    def programs(jaxpr):
        return len({equation.params["jaxpr"] for equation in equations(jaxpr, "jit")})

    assert programs(run(0.0)) == programs(run(jnp.float32(0)))
