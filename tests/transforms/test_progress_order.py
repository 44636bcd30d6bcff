"""`progress`: the end of a run is reported last, so that a run has one bar, which is closed."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from bars import LOG, Recorder, progress, steps_of
from thin import all_pairs, slow

import treescan

pytestmark = pytest.mark.quick

T = 7
WAYS = {"eager": lambda f: f, "jit": jax.jit, "jit of grad": lambda f: jax.jit(jax.grad(f))}


def small(h: Any, x: Any) -> Any:
    return {**h, "small": jnp.sin(h["small"] * x)}


def layer(w: Any, h: Any) -> Any:
    return small(h, w)


def start(h: Any) -> Any:
    return {"small": h, "unchanged and larger": jnp.ones(9)}


FORMS = {
    "scan": lambda h, **o: treescan.fold(small, start(h), jnp.ones(T), **o)["small"],
    "reverse": lambda h, **o: treescan.fold(small, start(h), jnp.ones(T), reverse=True, **o)["small"],
    "a scalar": lambda h, **o: treescan.fold(lambda h, x: jnp.sin(h * x), h, jnp.ones(T), **o),
    "no carry": lambda h, **o: treescan.scan(lambda c, x: (c, h * x), None, jnp.ones(T), **o)[1].sum(),
    "rows": lambda h, **o: treescan.fold(lambda h, x: h * x, h * jnp.ones(2), jnp.ones((T, 2)), lengths=R, **o).sum(),
    "while_scan": lambda h, **o: treescan.while_scan(
        lambda h: h["small"] < 9, lambda h, x: (small(h, x), None), start(h), jnp.ones(T), **o
    ).carry["small"],
    "layers": lambda h, **o: treescan.fold_layers(layer, start(h), jnp.ones(T), **o)["small"],
    "turns": lambda h, **o: treescan.fold_layers([layer, layer], start(h), [jnp.ones(4), jnp.ones(3)], **o)["small"],
}
R = jnp.array([T, 2])


GRID = itertools.product(FORMS, (False, True, "backward"), WAYS)
ROWS = all_pairs([row for row in GRID if row[0] != "no carry" or not row[1]])


@pytest.mark.parametrize(("form", "check", "way"), [*ROWS[:5], *slow(*ROWS[5:])])
def test_a_run_has_one_bar_which_ends_last(form: str, check: Any, way: str) -> None:
    run = WAYS[way](lambda h: FORMS[form](h, check_finite=check, progress=progress(3)))
    total, steps = steps_of(lambda: run(jnp.float32(0.5)))
    assert total == (None if form == "while_scan" else T)
    assert steps == sorted(steps) and steps[-1] == T


def test_a_meter_whose_step_fails_is_closed_once() -> None:
    class Failing(Recorder):
        def step(self, bar: Any, done: int, shown: Any) -> None:
            raise OSError("no terminal")

    class FailsToClose(Failing):
        def close(self, bar: Any) -> None:
            super().close(bar)
            raise OSError("no terminal")

    for meter in (Failing(), FailsToClose()):
        LOG.clear()
        with pytest.warns(RuntimeWarning, match="failed: OSError") as given:
            bar = treescan.Progress("loop", updates=3, meter=meter)
            jax.block_until_ready(treescan.fold(lambda h, x: h * x, 1.0, jnp.ones(T), progress=bar))
            jax.effects_barrier()
        assert len(given) == 1
        assert [entry[1] for entry in LOG] == ["init", "close"]


def test_a_meter_that_fails_to_begin_is_not_closed() -> None:
    class Failing(Recorder):
        def init(self, label: str, total: int | None) -> Any:
            super().init(label, total)
            raise OSError("no terminal")

    LOG.clear()
    with pytest.warns(RuntimeWarning, match="failed: OSError"):
        bar = treescan.Progress("loop", updates=3, meter=Failing())
        jax.block_until_ready(treescan.fold(lambda h, x: h * x, 1.0, jnp.ones(T), progress=bar))
        jax.effects_barrier()
    assert [entry[1] for entry in LOG] == ["init"]


@pytest.mark.parametrize("disabled", [False, True])
@pytest.mark.parametrize("check", [True, "backward"])
@pytest.mark.parametrize("cond", [lambda h: h["h"].sum(-1) < 5, lambda h: h["h"].sum() < 9], ids=["rows", "all"])
def test_values_are_shown_of_a_checked_loop_that_ends_early(cond: Any, check: Any, *, disabled: bool) -> None:
    def step(h: Any, x: Any) -> Any:
        return {**h, "h": h["h"] + x}, h["h"]

    init = {"a": jnp.full((2, 3), 7.0), "h": jnp.zeros((2, 3)), "n": jnp.zeros(2)}
    bar = progress(8, show=lambda h: {"mean": h["h"].mean(), "a": h["a"].mean()})
    with jax.disable_jit(disabled):
        ended = lambda: treescan.while_scan(cond, step, init, jnp.ones((8, 2, 3)), check_finite=check, progress=bar)  # noqa: E731
        steps_of(ended)
    assert [entry[3] for entry in LOG if entry[1] == "step"] == [{"mean": n, "a": 7.0} for n in (1, 2)]
