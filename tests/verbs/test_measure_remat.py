"""`measure_remat`: what it measures is the compiled gradient of the call, and its time is bounded."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plots import Axes

import treescan
from treescan import Remat, measure_remat
from treescan._extras.describe import measured as module
from treescan._program.program import take

T, B, F = 12, 3, 4
H, XS = jnp.zeros((B, F)), jnp.linspace(0.0, 1.0, T * B * F).reshape(T, B, F)
WEIGHTS = jnp.eye(F) * 0.5


def step(h: Any, x: Any) -> Any:
    h = jnp.tanh(h @ WEIGHTS + x)
    return h, h.sum(-1)


def gradient(h: Any, xs: Any, weights: Any, remat: Any = None) -> Any:
    """That of the sum of squares, with respect to all that the loop reads."""

    def loss(h: Any, xs: Any, weights: Any) -> Any:
        def body(h: Any, x: Any) -> Any:
            h = jnp.tanh(h @ weights + x)
            return h, h.sum(-1)

        return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(treescan.scan(body, h, xs, remat=remat)))

    return jax.grad(loss, (0, 1, 2))(h, xs, weights)


def test_bytes_are_those_of_the_compiled_gradient() -> None:
    found = measure_remat(treescan.scan, step, H, XS, plans=[None, "step"], progress=False)
    for plan in found.plans:
        compiled = jax.jit(functools.partial(gradient, remat=plan.remat)).lower(H, XS, WEIGHTS).compile()
        assert plan.bytes == pytest.approx(compiled.memory_analysis().temp_size_in_bytes, rel=0.1)
        assert plan.refusal is None and plan.fastest <= plan.seconds <= plan.slowest and plan.rounds


VERBS: dict[str, tuple[Any, ...]] = {
    "while_scan": (treescan.while_scan, lambda h: jnp.all(h < 9), step, H, XS),
    "scan_layers": (treescan.scan_layers, lambda w, h: step(h, w), jnp.zeros(F), jnp.ones((T, F))),
}


@pytest.mark.parametrize("name", VERBS)
def test_each_verb(name: str) -> None:
    """With more time than a slow machine needs: each plan is timed so many rounds at most."""
    found = measure_remat(*VERBS[name], plans=["step", "nested"], seconds=3600, progress=False)
    assert [plan.remat for plan in found.plans] == ["step", "nested"]
    assert all(plan.refusal is None for plan in found.plans), str(found)
    assert found.best in ("step", "nested") and name in str(found)


def test_plans_that_make_one_program_are_measured_once() -> None:
    found = measure_remat(treescan.scan, step, H, XS, plans=["nested", Remat(levels=2), None], progress=False)
    first, second, other = found.plans
    assert (first.seconds, first.bytes) == (second.seconds, second.bytes) and first.seconds != other.seconds


def test_a_plan_that_the_verb_refuses_is_listed_with_the_reason() -> None:
    found = measure_remat(treescan.scan, step, H, XS, plans=[Remat.fit(1), None], progress=False)
    assert found.plans[0].seconds is None and "no plan fits" in (found.plans[0].refusal or "")
    assert "Not measured: Remat(budget=1). " in str(found) and found.best is None


def test_what_is_wrong_under_every_plan_is_raised() -> None:
    with pytest.raises(treescan.errors.CarryError, match="returned a carry that differs"):
        measure_remat(treescan.scan, lambda h, x: (h.sum(), x), H, XS, progress=False)
    with pytest.raises(treescan.errors.ArgumentError, match=r"the batch shape \[2\]"):
        measure_remat(treescan.mask_scan, step, H, XS, lengths=jnp.ones(2, int), progress=False)


def test_a_call_without_a_gradient() -> None:
    def rounds(n: Any, x: Any) -> Any:
        return n + x, None

    found = measure_remat(treescan.scan, rounds, 0, jnp.arange(4), progress=False)
    assert {plan.refusal for plan in found.plans} == {"There is no gradient: nothing in it is floating-point."}
    with pytest.raises(treescan.errors.ArgumentError, match="no plan was measured"):
        found.best  # noqa: B018, it raises


def test_the_time_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that goes on by a second whenever it is read."""
    clock = itertools.count()
    monkeypatch.setattr(module.time, "perf_counter", lambda: float(next(clock)))
    found = measure_remat(treescan.scan, step, H, XS, plans=[None, "step", "nested"], seconds=9, progress=False)
    assert [plan.rounds for plan in found.plans] == [1, 1, 0]
    assert found.plans[2].refusal == "the time was over. `seconds=` allows more."
    assert "Times are medians of one round." in str(found)


def test_the_fastest_plan_within_a_budget() -> None:
    plans = [("step", 3.0, 10), ("nested", 4.0, 5), (None, 1.0, 100), ("auto", None, None)]
    found = module.Measurements("call", "cpu", tuple(module.Measured(r, s, bytes=b) for r, s, b in plans))
    assert found.best is None
    assert (found.within(99), found.within(9)) == ("step", "nested")
    with pytest.raises(treescan.errors.ArgumentError, match="the least that a measured plan needs is 5 bytes"):
        found.within(4)
    assert repr(found) == "<Measurements of call: 3 of 4 plans>"


def test_a_bar_counts_the_plans(capsys: pytest.CaptureFixture[str]) -> None:
    progress = treescan.meters.Progress("plans", meter=treescan.meters.Text())
    measure_remat(treescan.scan, step, H, XS, plans=[None, "step"], progress=progress)
    assert "plans: 100%, 2/2" in capsys.readouterr().err


def test_a_meter_that_fails_stops_nothing() -> None:
    class Broken(treescan.meters.Text):
        def step(self, bar: Any, done: int, shown: Any) -> None:
            raise OSError("closed")

    with pytest.warns(RuntimeWarning, match="`Broken` failed"):
        found = measure_remat(
            treescan.scan, step, H, XS, plans=[None], progress=treescan.meters.Progress(meter=Broken())
        )
    assert found.best is None
    assert found.device == f"1 x {jax.devices()[0].device_kind}"


def test_what_is_shown() -> None:
    of = module.Measured
    plans = (
        of(None, 0.0123, 0.011, 0.5, 2**20, 1.25, 15),
        of("step", 2e-5, 1e-5, 3e-5, None, 0.5, 15),
        of("x", refusal="no."),
    )
    found = module.Measurements("`scan` over `step` (model.py:3)", "1 x cpu", plans)
    assert str(found) == (
        "The gradient of `scan` over `step` (model.py:3), on 1 x cpu\n\n"
        "  time     range            memory   to compile  remat\n"
        "  12.3 ms  11 ms to 500 ms  1.0 MiB  1.2 s       None\n"
        '  20 us    10 us to 30 us   ?        0.5 s       "step"\n\n'
        'The fastest: `remat="step"`. Times are medians of 15 rounds.\n\n'
        'Not measured: "x". no.'
    )
    assert "12.3 ms" in found._repr_html_()


def test_it_is_drawn() -> None:
    plans = (module.Measured(None, 0.002, bytes=3 * 2**20), module.Measured("step", None))
    axes = Axes()
    assert module.Measurements("call", "cpu", plans).plot(axes) is axes
    assert axes.calls["scatter"] == [(2.0, 3.0)]


def test_values_do_not_change() -> None:
    taken: Any = take(treescan.scan, step, H, XS, remat="nested")
    function, smooth, others = module.gradient_of(taken.program, taken.given)
    got = {leaf.shape: leaf for leaf in function(smooth, others)}
    for leaf in gradient(H, XS, WEIGHTS):
        np.testing.assert_allclose(got[leaf.shape], leaf, rtol=1e-5, atol=1e-6)
