"""`describe`: bytes, planted faults, and that nothing is run."""

import gc
import re
import sys
import weakref
from xml.etree import ElementTree

import chex
import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
import pytest
from describe_cases import FAULTS, cache_of_rows, until
from hlo import Program
from jax.sharding import AxisType, PartitionSpec
from jaxprs import equations
from plots import Axes
from thin import parametrize
from widths import too_wide

import treescan
from treescan import Remat, describe
from treescan._describe.findings import FINDINGS


def step(h, x):
    return jnp.tanh(h + x["a"]), {"h": h, "none": None}


INIT, XS = jnp.zeros((8, 64)), {"a": jnp.ones((1000, 8, 64))}


@pytest.fixture(autouse=True)
def _no_plans_but_its_own(request, monkeypatch):
    """Each further plan is two more traces; tests of plans have them in their names."""
    if "plan" not in request.node.name:
        monkeypatch.setattr(treescan._describe.plans, "OTHERS", ())


# Bytes


def test_plans_save_less_and_evaluate_more():
    plans = {str(plan.remat): plan for plan in describe(treescan.scan, step, INIT, XS).plans}
    assert plans["None"].used
    assert [plans[name].evaluations for name in ("None", "step", "nested", "Remat(levels=3)")] == [1, 2, 3, 4]
    assert min(plans["None"].bytes, plans["step"].bytes) > plans["nested"].bytes
    assert plans["nested"].sizes == treescan.plan_remat(step, INIT, XS, remat="nested").sizes


def test_a_budget_is_a_plan():
    found = describe(treescan.scan, step, INIT, XS, remat=Remat.fit(20_000_000))
    assert found.plan.used and found.plan.bytes <= 20_000_000


# Findings

NAMES = [pytest.param(n, marks=pytest.mark.devices) if n == "gathered weights" else n for n in FAULTS]


@pytest.mark.parametrize("name", NAMES)
def test_a_fault_is_found(name):
    fault = FAULTS[name]
    with jax.numpy_dtype_promotion("standard"):
        description = fault.describe(True)
    (finding,) = description.findings
    assert (finding.code, fault.says in finding.says) == (fault.code, True), finding
    assert finding.code in str(description) and finding.code in description._repr_html_()


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_without_the_fault_there_is_no_finding(name):
    with jax.numpy_dtype_promotion("standard"):
        assert FAULTS[name].describe(False).findings == ()


def test_every_code_has_a_planted_fault():
    assert {fault.code for fault in FAULTS.values()} == set(FINDINGS)


@pytest.mark.parametrize("fault", [True, False])
def test_a_cache_that_all_rows_share_is_not_copied(fault):
    """What the finding advises: the loop then selects nothing of the size of the cache. The results are the same."""
    lengths, xs, (step, init, options) = jnp.array([5, 0, 40, 17]), jnp.ones((40, 4, 16)), cache_of_rows(fault)

    def run(init, xs):
        return treescan.while_scan(until(lengths), step, init, xs, **options)[:3]

    selects = [line for text in Program(run, init, xs).loops() for line in text.splitlines() if "select(" in line]
    assert any("= f32[4,512,16]" in line for line in selects) == fault
    # A mask by hand has the copy too: what is written is selected from, and from what was there before.
    assert Program(run, init, xs).copies_in_loops(4, 512, 16) == fault
    (plain, y, _), expected = run(init, xs), cache_of_rows(True)
    (carry, ys) = treescan.mask_scan(expected[0], init, xs, lengths=lengths)
    chex.assert_trees_all_equal((plain, y), (carry, ys))


def _write(cache, x, i):
    return jax.vmap(lambda own, x, i: jax.lax.dynamic_update_slice(own, x[None], (i, 0)))(cache, x, i)


WRITES = {
    "slices": (_write, True),
    "in a function that is compiled": (jax.jit(lambda *given: _write(*given)), True),
    "twice": (lambda cache, x, i: _write(_write(cache, x, i), x, i + 1), True),
    "all of it": (lambda cache, x, i: cache + x[:, None], False),
    "half of it": (lambda cache, x, i: cache.at[:, 256:].set(x[:, None]), False),
}


@parametrize(("write", "found"), WRITES)
def test_how_much_a_step_writes(write, found):
    def cell(carry, x):
        return {"cache": write(carry["cache"], x, carry["i"]), "i": carry["i"] + 1}, None

    _, init, _ = cache_of_rows(True)
    options = {"lengths": jnp.arange(4) * 9}
    findings = describe(treescan.mask_scan, cell, init, jnp.ones((40, 4, 16)), **options).findings
    assert [each.code for each in findings] == ["TS011"] * found


def test_a_constant_is_found_where_what_a_step_runs_reads_it():
    data, carry, xs = jnp.ones(1024), jnp.ones(1024), jnp.ones((100, 1024))
    add = lambda h, data: jnp.cumsum(h) + data  # noqa: E731
    ways = {
        "a loop": lambda h, x: jax.lax.scan(lambda h, _: (add(h, data), None), h, None, length=2)[0],
        "a branch": lambda h, x: jax.lax.cond(x[0] > 0, add, lambda h, _: h, h, data),
        "a function that is compiled": lambda h, x: jax.jit(add)(h, data),
    }
    for way, step in ways.items():
        assert [each.code for each in describe(treescan.fold, step, carry, xs).findings] == ["TS004"], way


def test_a_constant_that_is_made_to_vary_over_devices_is_found():
    """JAX marks it with an equation of its own, which reads it in place of the sum."""
    mesh, spec, found = jax.make_mesh((1,), ("rows",), axis_types=(AxisType.Auto,)), PartitionSpec("rows"), []

    def run(data, carry, xs):
        found.append(describe(treescan.fold, lambda h, x: h[::-1] + x + data, carry, xs))
        return carry

    whole = jax.shard_map(run, mesh=mesh, in_specs=(PartitionSpec(), spec, PartitionSpec(None, "rows")), out_specs=spec)
    jax.eval_shape(whole, jnp.ones(1024), jnp.ones(1024), jnp.ones((100, 1024)))
    assert [each.code for each in found[0].findings] == ["TS004"]


def test_loops_count_all_their_steps_and_branches_as_the_dearest():
    bodies = {
        20: lambda h, x: jax.lax.scan(lambda h, _: (h + x, None), h, None, length=5)[0],
        9: lambda h, x: jax.lax.switch(1, [lambda: h + x, lambda: h * x + h]),  # and its index
    }
    for operations, body in bodies.items():
        (finding,) = describe(treescan.fold, body, jnp.zeros(4), jnp.ones((3, 4))).findings
        assert f"of about {operations} operations each" in finding.says


REASONS = {
    "`remat` recomputes each of them": {"remat": "step"},
    "`save` keeps outputs within a chunk": {"save": 10},
    "`chunk=0`": {"chunk": 0},
}


@pytest.mark.parametrize("reason", [*REASONS, "the body has a side effect", "rewriting is off"])
def test_why_products_are_not_taken_together(reason):
    w, lengths = jnp.ones((64, 64)), np.full(8, 900)

    def cell(h, x):
        if reason.startswith("the body"):
            jax.debug.callback(lambda: None)
        h = jnp.tanh(h @ w + x)
        return h, h

    with treescan.rewriting(reason != "rewriting is off"):
        found = describe(treescan.mask_scan, cell, INIT, XS["a"], lengths=lengths, **REASONS.get(reason, {}))
    assert [finding.code for finding in found.findings] == ["TS008"]
    assert reason in found.findings[0].says


@pytest.mark.parametrize("save", ["last", 11, 100, None])
def test_products_are_taken_together_where_outputs_are_kept_at_most_once_per_chunk(save):
    w, lengths = jnp.ones((64, 64)), np.full(8, 900)

    def cell(h, x):
        h = jnp.tanh(h @ w + x)
        return h, h

    for verb, options in ((treescan.mask_scan, {"lengths": lengths}), (treescan.scan, {"remat": "auto"})):
        assert not describe(verb, cell, INIT, XS["a"], save=save, **options).findings

        def loss(w, verb=verb, options=options):
            last, ys = verb(lambda h, x: (jnp.tanh(h @ w + x),) * 2, INIT, XS["a"], save=save, **options)
            return last.sum() + sum(y.sum() for y in jax.tree.leaves(ys))

        products = equations(jax.make_jaxpr(jax.grad(loss))(w).jaxpr, "dot_general")
        assert any(each.invars[0].aval.shape[0] > len(lengths) for each in products)  # of the steps of a chunk


# What is shown


def test_leaves_have_the_paths_of_the_user():
    w = jnp.ones((64, 64))

    def cell(carry, x, key):
        h = carry["h"] @ w + x["a"] + jax.random.normal(key, (8, 64))
        return {**carry, "h": h}, {"y": h[0], "z": (h, None)}

    init = {"h": INIT, "scale": jnp.ones(3)}
    xs = {**XS, "b": jnp.ones(5)}
    found = describe(treescan.scan, cell, init, xs, in_axes={"a": 0, "b": None}, key=jax.random.key(0), reverse=True)
    assert [(leaf.path, leaf.type, leaf.bytes, leaf.changes) for leaf in found.carry] == [
        ('carry["h"]', "float32[8,64]", 2048, True),
        ('carry["scale"]', "float32[3]", 12, False),
    ]
    assert [(leaf.path, leaf.type) for leaf in found.x] == [('x["a"]', "float32[8,64]")]
    assert [(leaf.path, leaf.bytes) for leaf in found.y] == [('y["y"]', 256), ('y["z"][0]', 2048)]
    assert [leaf.path for leaf in found.constants] == ["w", 'x["b"]', "key"]
    assert "1,000 steps in reverse" in str(found)


def test_what_is_saved_is_told_by_line():
    found = describe(treescan.scan, step, INIT, XS)
    line = step.__code__.co_firstlineno + 1
    places = {each.place: each for each in found.saved}
    (place,) = [place for place in places if place.endswith(f"test_describe.py:{line}")]
    assert set(places[place].operations) <= {"tanh", "sub", "one_minus_square"}
    assert sum(each.bytes for each in found.saved) == treescan.plan_remat(step, INIT, XS, remat=None).step_bytes


def stops(h):
    return jnp.all(h < 3)


def block(layer, x, scale):
    return jnp.tanh(x @ layer["w"]) * scale


STACK = {"w": jnp.ones((6, 64, 64))}
CALLS = {
    "scan": (treescan.scan, (step, INIT, XS), {"save": {"h": 10, "none": "all"}}),
    "fold": (treescan.fold, (lambda h, x: h + x["a"], INIT, XS), {"lengths": np.arange(8)}),
    "accumulate": (treescan.accumulate, (lambda h, x: h + x["a"], INIT, XS), {"remat": "auto"}),
    "fori": (treescan.fori, (0, 50, lambda i, h: h * i, INIT), {}),
    "mask_scan": (treescan.mask_scan, (step, INIT, XS), {"lengths": np.arange(8), "compact": True}),
    "while_scan": (treescan.while_scan, (stops, step, INIT, XS), {}),
    "rows that stop": (treescan.while_scan, (lambda h: h[:, 0] < 3, step, INIT, XS), {"compact": True}),
    "scan_layers": (treescan.scan_layers, (lambda w, x: (x @ w["w"], x), INIT, STACK), {"remat": "nested"}),
    "fold_layers": (treescan.fold_layers, (block, INIT, STACK), {"args": (jnp.ones(()),)}),
    "pattern": (treescan.fold_layers, ([block, block], INIT, [STACK, STACK]), {"args": (2.0,), "remat": "step"}),
    "layers with state": (
        treescan.fold_layers,
        (lambda w, x, state: (x @ w["w"], state + x), INIT, STACK),
        {"state": jnp.zeros((6, 8, 64))},
    ),
}
FAST = ("mask_scan", "while_scan", "pattern")


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in CALLS]
)
def test_every_verb(name, monkeypatch):
    monkeypatch.setattr(treescan._text, "WIDTH", 78)
    monkeypatch.setattr(treescan._describe.description, "WIDTH", 78)
    verb, args, options = CALLS[name]
    found = describe(verb, *args, **options)
    assert found.plan.bytes > 0 and found.plan.refusal is None and found.plan.evaluations >= 1
    assert found.findings == ()
    assert [leaf.bytes for leaf in found.carry] == [2048]
    assert list(too_wide(str(found))) == []
    assert_well_formed(found._repr_html_())
    assert repr(found).startswith(f"<Description of `{verb.__name__}` over ")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["scan", "mask_scan", "layers with state"])
def test_types_and_traced_arrays_will_do(name):
    verb, args, options = CALLS[name]
    want, found = describe(verb, *args, **options), []
    jax.jit(lambda h: found.append(describe(verb, *_put(args, h), **options)))(INIT)
    types = jax.ShapeDtypeStruct(INIT.shape, INIT.dtype)
    for got in (found[0], describe(verb, *_put(args, types), **options)):
        assert (got.plan.bytes, got.plan.sizes, got.saved) == (want.plan.bytes, want.plan.sizes, want.saved)


def _put(args, init):
    return tuple(init if arg is INIT else arg for arg in args)


def test_nothing_is_run():
    ran = []

    def cell(h, x):
        jax.debug.callback(ran.append, 1)
        return h + x["a"], None

    describe(treescan.scan, cell, INIT, XS)
    describe(treescan.while_scan, stops, cell, INIT, XS)
    jax.effects_barrier()
    assert not ran
    treescan.scan(cell, INIT, {"a": XS["a"][:2]})  # the next call of the verb runs
    jax.effects_barrier()
    assert len(ran) == 2


def test_under_disable_jit():
    want = describe(treescan.scan, step, INIT, XS).plan
    with jax.disable_jit():
        assert describe(treescan.scan, step, INIT, XS).plan == want


def test_what_has_no_gradient_says_why():
    found = describe(treescan.fori, 0, 100, lambda i, total: total + i, 0)
    assert (found.plan.bytes, found.plan.refusal) == (None, "nothing in it is floating-point")
    assert found.plan.refusal in str(found) and found.findings == ()


def test_what_jax_refuses_to_differentiate_is_told():
    def cell(h, x):
        return h + jax.experimental.io_callback(
            lambda a: a, jax.ShapeDtypeStruct(x["a"].shape, x["a"].dtype), x["a"]
        ), None

    found = describe(treescan.scan, cell, INIT, XS)
    assert (found.plan.bytes, found.saved) == (None, ())
    assert "JAX says, IO callbacks do not support JVP" in str(found)


def assert_well_formed(text):
    ElementTree.fromstring(f"<div>{text}</div>")


def test_describing_keeps_no_body_alive():
    def described():
        w = jnp.ones(64)
        body = lambda h, x: (h * w[None] + x["a"], None)  # noqa: E731
        describe(treescan.scan, body, INIT, XS)
        return weakref.ref(body)

    body = described()
    gc.collect()
    assert body() is None


def test_html_is_escaped():
    found = describe(treescan.scan, lambda h, x: (h + x["<b>"], None), 0.0, {"<b>": jnp.ones(500)})
    assert "<b>&quot;" not in found._repr_html_() and "&lt;b&gt;" in found._repr_html_()
    assert_well_formed(found._repr_html_())


def test_rich_shows_the_same_text(capsys):
    rich = pytest.importorskip("rich.console")
    found = describe(treescan.fold, lambda h, x: h + x, 0.0, jnp.ones(3))
    console = rich.Console(width=200, force_terminal=True, color_system="standard")
    with console.capture() as captured:
        console.print(found)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", captured.get())
    assert plain != captured.get() and plain.split() == str(found).split()
    found.show()
    assert capsys.readouterr().out.split() == str(found).split()


def test_show_without_rich(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    found = describe(treescan.fold, lambda h, x: h + x, 0.0, jnp.ones(3))
    found.show()
    assert capsys.readouterr().out == f"{found}\n"


def test_plot_draws_each_plan():
    found, axes = describe(treescan.scan, step, INIT, XS), Axes()
    assert found.plot(axes) is axes
    ((names, widths),) = axes.calls["barh"]
    assert widths == [plan.bytes for plan in found.plans]
    assert names[0] == "None\n1 evaluations" and names[1] == '"step"\n2 evaluations'


def test_it_is_drawn_with_matplotlib():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    axes = describe(treescan.scan, step, INIT, XS).plot()
    assert len(axes.patches) == 1
