"""`check_finite="return"`: a report in place of an error, of every verb and through transformations of JAX."""

import threading

import chex
import jax
import jax.numpy as jnp
import pytest
from thin import slow

import treescan
from scripts import printed

pytestmark = pytest.mark.quick

XS = jnp.array([1.0, 2.0, -9.0, 1.0])
H = jnp.float32(1.0)
RETURN = {"check_finite": "return"}


def step(h, x):
    h = jnp.log(h + x)
    return h, h


def add(h, x):
    return jnp.log(h + x)


ROWS = {"lengths": jnp.array([2, 4])}
LOOPS = {
    "scan": lambda **o: treescan.scan(step, H, XS, **o),
    "reverse": lambda **o: treescan.scan(step, H, XS, reverse=True, save="last", remat="nested", **o),
    "fold": lambda **o: treescan.fold(add, H, XS, **o),
    "accumulate": lambda **o: treescan.accumulate(add, H, XS, **o),
    "fori": lambda **o: treescan.fori(0, 4, lambda i, h: add(h, XS[i]), H, **o),
    "mask_scan": lambda **o: treescan.mask_scan(step, jnp.ones(2), jnp.stack([XS, XS], 1), **ROWS, **o),
    "while_scan": lambda **o: treescan.while_scan(lambda h: h < 9, step, H, XS, **o),
    "fold_layers": lambda **o: treescan.fold_layers(lambda w, h: add(h, w), H, XS, **o),
    "scan_layers": lambda **o: treescan.scan_layers(lambda w, h: step(h, w), H, XS, **o),
    "turns": lambda **o: treescan.scan_layers([lambda w, h: step(h, w)] * 2, H, [XS[::2], XS[1::2]], **o),
    "state": lambda **o: treescan.fold_layers(lambda w, h, s: (add(h, w), s + 1), H, XS, state=XS, **o),
}
PAIRS = ("scan", "reverse", "mask_scan", "scan_layers", "turns", "state")


def error_of(run):
    with pytest.raises(treescan.errors.NonFiniteError) as caught:
        run()
    assert caught.value.record is treescan.last_nonfinite()
    return str(caught.value), str(treescan.last_nonfinite())


JITTED = ("scan", "mask_scan", "while_scan")
CASES = [("jit", name) for name in JITTED] + [("eager", name) for name in ("fori", "turns", "state")]
OTHERS = [(way, name) for way in ("jit", "eager") for name in LOOPS if (way, name) not in CASES]


@pytest.mark.parametrize(("way", "name"), [*CASES, *slow(*OTHERS)])
def test_the_report_follows_the_results_and_raises_what_true_raises(way, name):
    run = LOOPS[name]
    *results, report = (jax.jit if way == "jit" else lambda f: f)(lambda: run(**RETURN))()
    chex.assert_trees_all_close(tuple(results) if name in PAIRS else results[0], run())
    assert (bool(report.ok), int(report.step)) == (False, 2)
    assert error_of(report.check) == error_of(lambda: run(check_finite=True))
    assert "callback" not in jax.jit(lambda: run(**RETURN)).lower().as_text()


def test_a_good_loop_and_one_without_steps_are_ok():
    for count in (2, 0):
        report = treescan.fold(add, H, XS[:count], **RETURN)[1]
        assert (bool(report.ok), int(report.step)) == (True, -1)
        assert report.check() is None


def test_a_batch_of_reports_names_the_element():
    run = jax.vmap(lambda x: treescan.fold(add, H, jnp.array([1.0, 1.0]) * x, **RETURN))
    for way in (run, jax.jit(run)):
        report = way(jnp.array([1.0, -1.0, 2.0, -9.0]))[1]
        assert report.ok.tolist() == [True, False, True, False]
        assert report.step.tolist() == [-1, 0, -1, 0]
        text, record = error_of(report.check)
        assert "element [1] of a batch of reports, of which 2 of 4 are not ok" in " ".join(text.split())
        alone = treescan.fold(add, H, jnp.array([1.0, 1.0]) * -1, **RETURN)[1]
        assert error_of(alone.check)[1] == record
    assert jax.vmap(lambda x: treescan.fold(add, x, XS[:0], **RETURN))(XS)[1].ok.shape == (4,)


@pytest.mark.parametrize("disabled", [False, True])
def test_a_report_is_an_output_of_an_outer_loop_and_of_branches(disabled):
    def outer(h, x):
        return treescan.fold(add, h, XS[:2] * x, **RETURN)

    with jax.disable_jit(disabled):
        reports = treescan.scan(outer, H, jnp.array([1.0, -1.0]))[1]
    assert reports.ok.tolist() == [True, False]
    either = jax.jit(lambda p: jax.lax.cond(p, outer, outer, H, 1.0)[1])
    assert bool(either(True).ok)


@pytest.mark.parametrize("checks", [True, "return"])
def test_errors_of_several_threads_have_records_of_their_own(checks):
    at, errors, both = {"one": 1, "two": 2}, {}, threading.Barrier(2)

    def run(name):
        xs = jnp.ones(4).at[at[name]].set(-jnp.inf)
        try:
            found = treescan.fold(add, H, xs, check_finite=checks)
            found[1].check()
        except treescan.errors.NonFiniteError as error:
            both.wait()  # by now, both have made their records, and the last one is one of them
            errors[name] = error, treescan.last_nonfinite()

    threads = [threading.Thread(target=run, args=(name,)) for name in at]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name, (error, _) in errors.items():
        assert error.record.step == at[name] and error.record.x == -jnp.inf
        assert str(error.record) in " ".join(str(error).split())
    assert errors["one"][1] is errors["two"][1]


def test_an_error_of_a_batch_of_reports_has_the_record_of_the_element():
    _, reports = jax.vmap(lambda x: treescan.fold(add, H, x * XS**2, **RETURN))(jnp.array([1.0, -1.0]))
    with pytest.raises(treescan.errors.NonFiniteError, match=r"element \[1\]") as caught:
        reports.check()
    assert caught.value.record is treescan.last_nonfinite()
    assert caught.value.record.step == reports.step[1]


def test_keys_in_the_carry_are_in_the_record():
    def draw(carry, x):
        key, h = carry
        return jax.random.split(key, 1)[0], add(h, x)

    report = jax.jit(lambda: treescan.fold(draw, (jax.random.key(1), H), XS, **RETURN)[1])()
    error_of(report.check)
    assert jnp.issubdtype(treescan.last_nonfinite().carry[0].dtype, jax.dtypes.prng_key)


PROGRAM = """
import sys, jax, jax.numpy as jnp, treescan
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
hits = []
jax.monitoring.register_event_listener(lambda e, **_: hits.append(e) if e.endswith("cache_hits") else None)
step, xs = lambda h, x: jnp.tanh(h + x), jnp.ones(9)
jitted = jax.jit(lambda h: treescan.fold(step, h, xs, check_finite="return"))
for run in (lambda: jitted(1.0), lambda: treescan.fold(step, 1.0, xs, check_finite=True)):
    before = len(hits)
    jax.block_until_ready(run())
    print(len(hits) - before)
"""


@pytest.mark.slow
def test_a_second_process_finds_the_program_in_the_persistent_cache(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    first, second = (printed(str(program), str(tmp_path)).split() for _ in range(2))
    assert first == ["0", "0"]
    assert all(int(hits) >= 1 for hits in second)
