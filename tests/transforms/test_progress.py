"""`progress`: what the meter is told, that values and gradients are those without, and that gradients say nothing."""

import contextlib
import functools
import io
import sys
import time

import chex
import jax
import jax.numpy as jnp
import pytest
from bars import BATCH, LOG, TRANSFORMS, XS, D, H, Recorder, T, bars, init, noted, progress, step, steps_of
from hlo import Program
from jaxprs import equations
from thin import slow

import treescan
from treescan._options.progress.meters import RUNS, Report, Runs, Site
from treescan.carries import AbstractCarry, ema
from treescan.meters import Progress

pytestmark = pytest.mark.quick

ROWS, LENGTHS = jnp.stack([XS, XS + 1], 1), jnp.array([7, 4])


def shown(carry):
    return {"n": carry["n"], "mean": carry["h"].mean()}


# What is told.


@pytest.mark.parametrize(
    ("length", "updates", "reverse", "told"),
    [
        (0, 4, False, []),
        (1, 4, False, [1]),
        (5, 4, False, [2, 4, 5]),
        (12, 1, False, [12]),
        (12, 100, False, [*range(1, 13)]),
        (1, 4, True, [1]),
        (5, 4, True, [3, 5]),  # a remainder is reported with the chunk after it
        (12, 4, True, [3, 6, 9, 12]),
    ],
)
def test_the_steps_of_a_scan_are_multiples_of_its_chunks(length, updates, reverse, told):
    run = lambda: treescan.scan(step, init(), XS[:length], reverse=reverse, progress=progress(updates))  # noqa: E731
    assert steps_of(run) == (length, told)


def test_static_leaves_and_custom_carries_are_shown_as_the_body_sees_them():
    def average(carry, x):
        return {**carry, "ema": carry["act"](x)}, None

    given = {"ema": ema(H, 0.5), "act": jnp.sin}
    seen = progress(show=lambda carry: {"first": carry["act"](carry["ema"][0])})
    last = treescan.scan(average, given, XS)[0]["ema"].value
    _, steps = bars(lambda: treescan.scan(average, given, XS, progress=seen))[0]
    assert steps[-1] == (T, {"first": pytest.approx(float(jnp.sin(last[0])), abs=1e-6)})


def test_a_carry_that_cannot_be_shown_is_called_what_the_body_calls_it():
    """Without any step, it is shown before the body is traced."""

    @jax.tree_util.register_static
    class Unread(AbstractCarry):
        def read(self):
            raise NotImplementedError

        def write(self, returned, valid):
            return self

    with pytest.raises(treescan.errors.PluginError, match=r"custom carry at state\."):
        treescan.scan(lambda state, x: (state, None), Unread(), XS[:0], progress=progress(show=lambda state: {}))


def test_a_masked_scan_counts_the_steps_in_which_any_row_is_valid():
    rows = functools.partial(treescan.mask_scan, step, {"h": jnp.stack([H, H]), "n": jnp.zeros(2, int)}, ROWS)
    assert steps_of(lambda: rows(lengths=LENGTHS, progress=progress(12)))[0] == 7
    mask = jnp.zeros((T, 2), bool).at[jnp.array([1, 2, 9])].set(True)
    for reverse in (False, True):
        total, steps = steps_of(
            lambda reverse=reverse: rows(mask=mask, chunk=3, reverse=reverse, progress=progress(12))
        )
        assert (total, steps[-1]) == (3, 3)
        assert steps == sorted(set(steps))
    assert steps_of(lambda: rows(lengths=jnp.array([0, 0]), progress=progress())) == (0, [])
    assert steps_of(lambda: rows(resets=mask, progress=progress())) == (T, [3, 6, 9, 12])


def add(carry, x):
    return carry + x, carry


EMPTY = {
    "scan": lambda xs, n, **o: treescan.scan(add, jnp.zeros(xs.shape[1:]), xs, **o),
    "mask_scan": lambda xs, n, **o: treescan.mask_scan(add, jnp.zeros(xs.shape[1:]), xs, lengths=n, **o),
    "while_scan": lambda xs, n, **o: treescan.while_scan(lambda c: c < 3, add, jnp.zeros(xs.shape[1:]), xs, **o),
    "fori": lambda xs, n, **o: treescan.fori(0, len(xs), lambda i, c: c + i, jnp.zeros(xs.shape[1:]), **o),
}


@pytest.mark.parametrize("verb", EMPTY)
@pytest.mark.parametrize(("shape", "compiled"), [((0, 2), False), ((4, 0), True)], ids=str)
def test_a_batch_without_steps_or_without_rows_has_a_bar(verb, shape, compiled):
    xs, lengths = jnp.zeros(shape), jnp.zeros(shape[1], int)
    for option in (Progress("loop", meter=Recorder()), progress()):
        run = lambda option=option: EMPTY[verb](xs, lengths, progress=option)  # noqa: E731
        assert len(bars(jax.jit(run) if compiled else run)) == 1
        chex.assert_trees_all_equal(EMPTY[verb](xs, lengths), run())


def halve(carry, _):
    return carry / 2, carry


@pytest.mark.parametrize("most", [7, 1000])
def test_a_loop_that_ends_early_has_no_total(most):
    run = lambda: treescan.while_scan(lambda c: c > 1, halve, 1000.0, max_length=most, progress=progress(20))  # noqa: E731
    total, steps = steps_of(run)
    assert (total, steps[-1]) == (None, min(10, most))
    assert steps == sorted(set(steps))
    assert len(steps) <= 21
    assert most > 20 or steps == list(range(1, 1 + most))


def test_reports_are_no_more_than_asked_for_where_outputs_are_seldom_kept():
    """Each is of whole numbers of the steps between two outputs."""
    ends = {"max_length": 20, "save": 5}
    run = lambda: treescan.while_scan(lambda c: c > 0, halve, 1.0, **ends, progress=progress(3))  # noqa: E731
    assert steps_of(run) == (None, [10, 20])


def test_a_range_with_traced_bounds_has_a_total():
    run = jax.jit(lambda n: treescan.fori(0, n, lambda i, c: c + i, 0, max_length=40, progress=progress(10)))
    assert steps_of(lambda: run(13)) == (13, [7, 13])
    assert steps_of(lambda: treescan.fori(2, 9, lambda i, c: c + i, 0, progress=progress(3))) == (7, [3, 6, 7])


def test_the_bar_is_there_before_the_first_step():
    def speaking(carry, x):
        jax.debug.callback(lambda: LOG.append(("body", "said")))
        return step(carry, x)

    run = jax.jit(lambda xs: treescan.scan(speaking, init(), xs, progress=progress()))
    kinds = [entry[1] for entry in noted(LOG, lambda: run(XS))[0]]
    assert kinds[:4] == ["init", "said", "said", "said"]
    assert kinds.count("said") == T


# Values, and what transforms make of it.


def both(make, h, way, **options):
    """The values and the gradient with progress and without; the number of bars of the former."""

    def loss(h, **options):
        out = make(h, **options)
        floats = [leaf for leaf in jax.tree.leaves(out) if jnp.issubdtype(leaf.dtype, jnp.floating)]
        return sum(jnp.sum(jnp.sin(leaf)) for leaf in floats), out

    run = way(jax.value_and_grad(functools.partial(loss, progress=progress(), **options), has_aux=True))
    found = []
    told = bars(lambda: found.append(run(h)) or found)
    chex.assert_trees_all_close(found[0], jax.jit(jax.value_and_grad(loss, has_aux=True))(h), rtol=1e-5, atol=1e-5)
    return told


def law(told):
    ((total, steps),) = told
    done = [n for n, _ in steps]
    assert done == sorted(set(done))
    assert done[-1] == total or total is None
    return len(done)


def scanned(**form):
    return lambda h, **more: treescan.scan(step, init(h), XS, **form, **more)


def masked(**form):
    def rows(h, **more):
        start = {"h": jnp.stack([h, 2 * h]), "n": jnp.zeros(2, int)}
        return treescan.mask_scan(step, start, ROWS, lengths=LENGTHS, **form, **more)

    return rows


def until(cond, body, **form):
    """Rows that stop each by itself, or if `form` says one, a loop without rows."""
    start = (lambda h: h) if form.pop("one", False) else lambda h: jnp.stack([h, h * 3])
    return lambda h, **more: treescan.while_scan(cond, body, start(h), max_length=50, **form, **more)[:2]


def layer(w, x):
    return {**x, "h": jnp.sin(x["h"] * w)}


def beside_a_larger(h):
    """A state whose larger leaf no step changes."""
    return {"h": h, "unchanged": jnp.ones(9)}


LOOPS = {  # those in which a bar changes what is run; `works` has it with every option, for the numbers alone
    "levels": scanned(remat=treescan.Remat(levels=3)),
    "truncate": scanned(truncate=5, save="last"),
    "rows": masked(),
    "whole": masked(chunk=0),
    "compact": masked(compact=True, chunk=2),
    "rows in reverse": masked(reverse=True, chunk=3, fill="hold"),
    "weak": lambda h, **more: treescan.fold(lambda c, x: c + jnp.sum(jnp.sin(x)), 0.0, XS * h[None], **more),
    "while": lambda h, **more: treescan.while_scan(lambda c: c["n"] < 7, step, init(h), XS, save="last", **more)[:2],
    "while state": until(lambda c: jnp.sum(c) > 0.3, lambda c, _: (c * 0.8, None), one=True),
    "while rows": until(lambda c: c.sum(-1) > 0.3, lambda c, _: (c * 0.8, c)),
    "while compact": until(lambda c: c.sum(-1) > 0.3, lambda c, _: (c * 0.8, c), compact=True),
    "layers": lambda h, **more: treescan.fold_layers(layer, beside_a_larger(h), XS, **more),
    "turns": lambda h, **more: treescan.fold_layers([layer] * 2, beside_a_larger(h), [XS[:4], XS[:3]], **more),
}
# What a check looks at is reported too, and the end of the run still comes last; eagerly here.
CHECKED = [("levels", True), *slow(("while", True), ("while rows", True), ("turns", True))]


@pytest.mark.parametrize(("name", "check"), [*((name, False) for name in LOOPS), *CHECKED], ids=str)
def test_a_run_has_one_bar_which_ends_last_and_the_numbers_without(name, check):
    way = (lambda f: f) if check else jax.jit
    assert 1 <= law(both(LOOPS[name], H, way, check_finite=check)) <= 6


def _loss(h, **options):
    return jnp.sum(treescan.scan(step, init(h), XS, progress=progress(), **options)[0]["h"])


WITH_REMAT = [("jit of grad", {"remat": remat}) for remat in ("step", "nested", "auto")]


@pytest.mark.parametrize(("transform", "option"), [*((name, {}) for name in TRANSFORMS), *WITH_REMAT], ids=str)
def test_every_transform_has_one_bar_and_the_gradient_says_nothing(transform, option):
    told = bars(lambda: TRANSFORMS[transform](functools.partial(_loss, **option)))
    assert [(total, [done for done, _ in steps]) for total, steps in told] == [(T, [3, 6, 9, 12])]


def test_under_vmap_the_values_beside_the_bar_are_those_of_the_first_element():
    def run(h):
        return treescan.scan(step, init(h), XS, progress=progress(1, show=shown))[0]["h"]

    ((_, [(_, values)]),) = bars(lambda: jax.vmap(run)(BATCH))
    assert values == {"n": T, "mean": pytest.approx(float(run(BATCH[0]).mean()), abs=1e-6)}
    assert bars(lambda: jax.vmap(run)(jnp.zeros((0, D))))[0][0] == T


# Runs.


def test_each_run_of_a_program_has_a_bar_of_its_own():
    run = jax.jit(lambda h: treescan.scan(step, init(h), XS, progress=progress())[0]["h"])
    for calls in (lambda: [run(H + i) for i in range(2)], lambda: jax.jit(lambda h: run(h) + run(h * 2))(H)):
        assert [[done for done, _ in steps] for _, steps in bars(calls)] == [[3, 6, 9, 12]] * 2


def test_loops_within_loops_have_bars_within_bars():
    def outer(h, x):
        return treescan.scan(step, init(h), XS, progress=progress(2))[0]["h"] + x, None

    for transform in (lambda f: f, jax.grad):
        run = transform(lambda h: treescan.scan(outer, h, jnp.ones(3), progress=progress(3))[0].sum())
        told = bars(lambda run=run: run(H))
        assert [(total, [done for done, _ in steps]) for total, steps in told] == [
            (3, [1, 2, 3]),
            *[(T, [6, 12])] * 3,
        ]
        kinds = [(entry[1], entry[0] - LOG[0][0]) for entry in LOG]
        assert kinds[:5] == [("init", 0), ("init", 1), ("step", 1), ("step", 1), ("close", 1)]
        assert kinds[-1] == ("close", 0)


def test_an_abandoned_run_is_closed_by_the_next_one(monkeypatch):
    monkeypatch.setattr("treescan._options.progress.meters.PATIENCE", 0)
    monkeypatch.setattr("treescan._options.progress.meters.RATIO", 0)

    def failing(carry, x):
        def check(n):
            if n == 7 and fail:
                raise ValueError("this is meant")

        jax.debug.callback(check, carry["n"])
        return step(carry, x)

    run = jax.jit(lambda h: treescan.scan(failing, init(h), XS, progress=progress())[0]["h"])
    LOG.clear()
    fail = True
    with pytest.raises(Exception, match="this is meant"):
        jax.block_until_ready(run(H))
        jax.effects_barrier()
    fail = False
    with contextlib.suppress(Exception):  # what the failed run left
        jax.effects_barrier()
    assert [entry[1] for entry in LOG] == ["init", "step", "step"]
    jax.block_until_ready(run(H))
    jax.effects_barrier()
    first, second = LOG[0][0], LOG[3][0]
    assert [entry[:2] for entry in LOG[3:]] == [
        (second, "init"), *[(second, "step")] * 4, (second, "close"), (first, "close"),
    ]  # fmt: skip


class Clock:
    """A clock that the test moves."""

    def __init__(self, monkeypatch):
        self.now = time.monotonic()
        monkeypatch.setattr("treescan._options.progress.meters.time", self)

    def monotonic(self):
        return self.now


def report(runs, site, number, done, *, last=False):
    runs.step(site, number, Report(12, done, first=done == 1, last=last), {})


def test_a_slow_run_is_not_closed_by_the_end_of_a_fast_one(monkeypatch):
    """As of one program in two threads: it is not known that the slow one runs, but how slow it was."""
    clock, runs, site = Clock(monkeypatch), Runs(), Site("step", Recorder())
    LOG.clear()
    slow = runs.begin(site, 12)
    clock.now += 2
    report(runs, site, slow, 1)
    fast = runs.begin(site, 12)
    for done in range(1, 7):
        clock.now += 0.3
        report(runs, site, fast, done, last=done == 6)
    clock.now += 0.5
    report(runs, site, slow, 2)
    runs.close_all()
    assert [entry[1] for entry in LOG if entry[0] == LOG[0][0]] == ["init", "step", "step", "close"]


@pytest.mark.parametrize("ends", [False, True])
def test_a_run_that_was_taken_for_abandoned_is_shown_again_when_it_reports(ends, monkeypatch):
    clock, runs, site = Clock(monkeypatch), Runs(), Site("step", Recorder())
    LOG.clear()
    slow = runs.begin(site, 12)
    clock.now += 0.5
    report(runs, site, slow, 1)
    fast = runs.begin(site, 12)
    for done in range(1, 13):
        clock.now += 1
        report(runs, site, fast, done, last=done == 12)
    first = LOG[0][0]
    assert [entry[1] for entry in LOG if entry[0] == first] == ["init", "step", "close"]
    LOG.clear()
    report(runs, site, slow, 5)
    if ends:
        report(runs, site, slow, 6, last=True)
        report(runs, site, slow, 6)  # one that comes late
    else:
        runs.close_all()
    assert [entry[1:3] for entry in LOG] == [
        ("init", "step"), ("step", 5), *[("step", 6)] * ends, ("close",),
    ]  # fmt: skip


def test_what_is_open_at_the_end_of_the_process_is_closed():
    LOG.clear()
    RUNS.begin(Site("left", Recorder()), 3)
    RUNS.close_all()
    assert [entry[1] for entry in LOG] == ["init", "close"]


class Failing(Recorder):
    def step(self, bar, done, shown):
        raise OSError("no terminal")


class FailsToClose(Failing):
    def close(self, bar):
        super().close(bar)
        raise OSError("no terminal")


class FailsToBegin(Recorder):
    def init(self, label, total):
        super().init(label, total)
        raise OSError("no terminal")


@pytest.mark.parametrize(
    ("meter", "told"),
    [(Failing, ["init", "close"]), (FailsToClose, ["init", "close"]), (FailsToBegin, ["init"])],
)
def test_a_meter_that_fails_is_one_warning_and_the_loop_goes_on(meter, told):
    words = rf"the progress of `loop` is shown no further.*`{meter.__name__}` failed: OSError"
    LOG.clear()
    with pytest.warns(RuntimeWarning, match=words) as given:
        carry, _ = treescan.scan(step, init(), XS, progress=Progress("loop", updates=3, meter=meter()))
        jax.block_until_ready(carry)
        jax.effects_barrier()
    assert len(given) == 1 and carry["n"] == T
    assert [entry[1] for entry in LOG] == told


@pytest.mark.parametrize(("check", "disabled"), [(True, False), (True, True)])
@pytest.mark.parametrize("cond", [lambda h: h["h"].sum(-1) < 5, lambda h: h["h"].sum() < 9], ids=["rows", "all"])
def test_values_are_shown_of_a_checked_loop_that_ends_early(cond, check, disabled):
    def add(h, x):
        return {**h, "h": h["h"] + x}, h["h"]

    start = {"a": jnp.full((2, 3), 7.0), "h": jnp.zeros((2, 3)), "n": jnp.zeros(2)}
    bar = progress(8, show=lambda h: {"mean": h["h"].mean(), "a": h["a"].mean()})
    with jax.disable_jit(disabled):
        ended = lambda: treescan.while_scan(cond, add, start, jnp.ones((8, 2, 3)), check_finite=check, progress=bar)  # noqa: E731
        steps_of(ended)
    assert [entry[3] for entry in LOG if entry[1] == "step"] == [{"mean": n, "a": 7.0} for n in (1, 2)]


# What it costs.


def test_a_callback_has_one_operand_however_many_values_are_shown():
    kinds = {"f": jnp.float32(0.1), "b": jnp.bfloat16(1.5), "h": jnp.float16(-2.5), "inf": jnp.float32(jnp.inf)}
    kinds |= {"i": jnp.int32(-7), "u": jnp.uint32(2**32 - 1), "s": jnp.int8(-3), "t": jnp.bool_(True)}
    given = progress(1, show=lambda carry: {**kinds, "n": carry["n"]})
    run = lambda h: treescan.scan(step, init(h), XS, progress=given)  # noqa: E731
    callbacks = [e for e in equations(jax.make_jaxpr(run)(H).jaxpr) if e.primitive.name == "debug_callback"]
    assert [len(eqn.invars) for eqn in callbacks] == [1]
    ((_, [(_, values)]),) = bars(lambda: run(H))
    assert values == {name: value.item() for name, value in kinds.items()} | {"n": T}
    with jax.enable_x64(True):
        wide = progress(1, show=lambda carry: {"d": jnp.float64(0.1), "n": carry["n"], "l": jnp.int64(2**40)})
        ((_, [(_, values)]),) = bars(lambda: treescan.scan(step, init(H), XS, progress=wide))
    assert values == {"d": 0.1, "n": T, "l": 2**40}


def test_paced_reports_in_64_bits():
    with jax.enable_x64(True):
        assert bars(lambda: treescan.scan(step, init(H), XS, progress=progress(None)))


@pytest.mark.parametrize("updates", [10, None])
def test_no_state_is_copied_for_an_update(updates):
    def copies(show):
        run = lambda w: treescan.scan(lambda w, x: (jnp.tanh(w @ w + x), None), w, jnp.ones(40), progress=show)[0]  # noqa: E731
        program = Program(run, jnp.zeros((96, 96)))
        assert any("callback" in line for line in program) == (show is not None)
        return program.copies_in_loops(96, 96)

    assert copies(progress(updates, show=lambda w: {"first": w[0, 0]})) == copies(None)


# The meters.


def test_text_is_a_line_for_each_tenth(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    treescan.scan(step, init(), XS, progress=Progress("loop", meter=treescan.meters.Text(), show=shown))
    jax.effects_barrier()
    lines = stream.getvalue().splitlines()
    assert lines[0] == "loop: 0%, 0/12"
    assert lines[-1].startswith("loop: 100%, 12/12, ")
    assert "n=12, mean=" in lines[-1]
    assert len(lines) <= 11
    treescan.while_scan(lambda c: c["n"] < 2, step, init(), XS, progress=Progress("open", meter=treescan.meters.Text()))
    jax.effects_barrier()
    assert stream.getvalue().splitlines()[-1] == "open: 2"


def test_tqdm_is_the_default_where_it_is_installed(monkeypatch):
    pytest.importorskip("tqdm")
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    treescan.scan(step, init(), XS, progress=Progress("loop", show=shown))
    jax.effects_barrier()
    assert "loop: 100%" in stream.getvalue()
    assert "12/12" in stream.getvalue()
    assert "n=12, mean=" in stream.getvalue()


def test_text_is_the_default_where_tqdm_is_not_installed(monkeypatch):
    monkeypatch.setattr("treescan._options.progress.show.has_tqdm", lambda: False)
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    treescan.scan(step, init(), XS, progress=True)
    jax.effects_barrier()
    assert stream.getvalue().startswith("step: 0%, 0/12\n")


def test_a_bar_within_another_goes_when_it_is_done_and_the_outermost_stays(monkeypatch):
    pytest.importorskip("tqdm")
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    outer, inner = (treescan.meters.Tqdm().init(label, 3) for label in ("epochs", "steps"))
    assert (outer.leave, inner.leave) == (True, False)
    for bar in (inner, outer):
        treescan.meters.Tqdm().close(bar)
