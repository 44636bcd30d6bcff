"""`describe`: bytes, planted faults, and that nothing is run."""

import functools
import gc
import re
import sys
import weakref
from xml.etree import ElementTree

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
import pytest
from plots import Axes
from thin import parametrize
from widths import too_wide

import treescan
from treescan import Remat, describe


def step(h, x):
    return jnp.tanh(h + x["a"]), {"h": h, "none": None}


INIT, XS = jnp.zeros((8, 64)), {"a": jnp.ones((1000, 8, 64))}


@pytest.fixture(autouse=True)
def _no_plans_but_its_own(request, monkeypatch):
    """Each further plan is two more traces; tests of plans have them in their names."""
    if "plan" not in request.node.name:
        monkeypatch.setattr(treescan._extras.describe.plans, "OTHERS", ())


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

KEY, RAW = jax.random.key(0), jax.random.PRNGKey(0)


def noise(key):
    return jax.random.normal(key, (8, 64))


def closes_over(key):
    return describe(treescan.fold, lambda h, x: h + x["a"] + noise(key), INIT, XS)


def carries(key, step):
    return describe(treescan.scan, step, (INIT, key), XS)


def split(c, x):
    key, use = jax.random.split(c[1])
    return (c[0] + x["a"] + noise(use), key), None


def in_a_loop(h, x):
    return jax.lax.fori_loop(0, 3, lambda _, c: (c[0] + noise(c[1]), jax.random.split(c[1])[0]), (h + x["a"], KEY))[0]


def drawn(h, x, key=KEY):
    return h + x["a"] + noise(key)


def in_a_branch(h, x):
    return jax.lax.cond(x["a"].sum() > 0, lambda: h + noise(KEY), lambda: h)


STACK = {"w": jnp.ones((6, 64, 64))}
LAYERS = functools.partial(describe, treescan.fold_layers, lambda w, x, k: x @ w["w"] + noise(k), INIT, STACK)
DRAWS = {  # whether each step draws the same
    "closed over": (lambda: closes_over(KEY), True),
    "raw, closed over": (lambda: closes_over(RAW), True),
    "in args": (lambda: LAYERS(args=(KEY,)), True),
    "raw, in args": (lambda: LAYERS(args=(RAW,)), True),
    "carried unchanged": (lambda: carries(KEY, lambda c, x: ((c[0] + x["a"] + noise(c[1]), c[1]), None)), True),
    "split, but always in the same way": (lambda: closes_over(jax.random.split(KEY)[1]), True),
    "folded with a number": (
        lambda: describe(treescan.fold, lambda h, x: h + x["a"] + noise(jax.random.fold_in(KEY, 3)), INIT, XS),
        True,
    ),
    "in a loop": (lambda: describe(treescan.fold, in_a_loop, INIT, XS), True),
    "in a branch": (lambda: describe(treescan.fold, in_a_branch, INIT, XS), True),
    "rows": (
        lambda: describe(treescan.mask_scan, lambda h, x: (drawn(h, x), None), INIT, XS, lengths=np.arange(8) * 100),
        True,
    ),
    "while": (
        lambda: describe(treescan.while_scan, stops, lambda h, x: (h + x["a"] + noise(KEY), None), INIT, XS),
        True,
    ),
    "carried and split": (lambda: carries(KEY, split), False),
    "raw, carried and split": (lambda: carries(RAW, split), False),
    "of the verb": (
        lambda: describe(treescan.fold, lambda h, x, key: drawn(h, x, key), INIT, XS, key=KEY),
        False,
    ),
    "in xs": (lambda: describe(treescan.fold, lambda h, k: h + noise(k), INIT, jax.random.split(KEY, 9)), False),
    "folded with x": (
        lambda: describe(treescan.fold, lambda h, i: h + noise(jax.random.fold_in(KEY, i)), INIT, jnp.arange(9)),
        False,
    ),
    "folded with the index": (
        lambda: describe(treescan.fori, 0, 9, lambda i, h: h + noise(jax.random.fold_in(RAW, i)), INIT),
        False,
    ),
}


@parametrize(("call", "found"), DRAWS)
def test_what_draws_the_same_in_each_step_is_found(call, found):
    findings = call().findings
    assert len(findings) == found
    if found:
        assert re.match(r".*test_describe\.py:\d+: each (step|layer) draws the same random numbers", findings[0].says)


def test_a_finding_names_the_key():
    found = closes_over(KEY)
    assert "because the key `key` is" in found.findings[0].says
    assert "Findings" in str(found) and "same random numbers" in found._repr_html_()


@pytest.mark.parametrize(("functions", "name"), [(3, "`key`"), (4, "`constant 0`")])
def test_a_finding_names_what_is_a_few_functions_away(functions, name):
    """It is not looked for further away than that."""

    def around(inner):
        return lambda h, x: inner(h, x)

    body = (lambda key: lambda h, x: drawn(h, x, key))(jax.random.key(7))
    for _ in range(functions):
        body = around(body)
    assert f"because the key {name} is" in describe(treescan.fold, body, INIT, XS).findings[0].says


def test_an_x_that_is_ignored_is_found():
    (finding,) = describe(treescan.fold, lambda h, x: jnp.sin(h), INIT, XS).findings
    assert finding.says == "x: nothing that a step returns depends on it."
    called = jax.jit(lambda h, x: (jnp.sin(h), 2 * x))
    (finding,) = describe(treescan.fold, lambda h, x: called(h, x["a"])[0], INIT, XS).findings
    assert finding.says == "x: nothing that a step returns depends on it."
    for body in (lambda h, _: jnp.sin(h), lambda h, x: h * x["a"], lambda h, x: (jax.debug.print("{}", x["a"]), h)[1]):
        assert not describe(treescan.fold, body, INIT, XS).findings


def test_a_carry_that_is_multiplied_and_added_to_is_found():
    def found(body, init=INIT):
        return ["matrix" in each.cure for each in describe(treescan.scan, body, init, XS).findings]

    def ema(h, x):
        h = 0.9 * h + (1 - 0.9) * x["a"]
        return h, jnp.sin(h)

    assert found(ema) == [False]
    assert found(lambda h, x: (h @ jnp.ones((64, 64)) + x["a"], None)) == [True]
    assert not found(lambda h, x: (h @ h.T @ h + x["a"], None))
    assert not found(lambda h, x: (h * jnp.tanh(h) + x["a"], None))
    assert not found(lambda h, x: (h + x["a"], None))
    assert not found(lambda h, x: ((h[0] * h[1] + x["a"], h[1] + 1), None), (INIT, INIT))


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
    monkeypatch.setattr(treescan._extras.describe.description, "WIDTH", 78)
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


def test_it_says_which_leaves_were_taken_for_rows():
    def count_on(c, _):  # a cache [L, B] of as many layers as rows: its layers are taken for rows
        return (c[0] + 1, c[1] + 1), None

    def told(**options):
        init = jnp.zeros(2, int), jnp.zeros((2, 2))
        limit = jnp.array([1, 4])
        return describe(treescan.while_scan, lambda c: c[0] < limit, count_on, init, max_length=9, **options)

    found, meant = told(), told(row_axes={"carry": (0, 1)})
    assert found.batch == (2,)
    assert [[leaf.rows for leaf in each.carry] for each in (found, meant)] == [[0, 0], [0, 1]]
    assert "c[1]  float32[2,2]  16 B, rows at axis 1" in str(meant)

    def mixed(h, x):
        return (h[0] + (x[1] @ x[0])[:, None], h[1]), (h[0], h[1])

    xs, lengths = (jnp.zeros((5, 2)), jnp.zeros((3, 2))), jnp.array([1, 4, 2])
    rows = {"x": (None, 0), "y": (0, None), "carry": (0, None)}
    init = jnp.zeros((3, 2)), jnp.ones(2)
    found = describe(treescan.mask_scan, mixed, init, xs, lengths=lengths, time_axis={"xs": (0, None)}, row_axes=rows)
    leaves = [*found.carry, *found.x, *found.y, *found.constants]
    assert [leaf.rows for leaf in leaves] == [0, None, None, 0, None, 0]
    assert "no step changes it, all rows share it" in str(found)
    assert "rows at" not in str(describe(treescan.scan, step, INIT, XS))
