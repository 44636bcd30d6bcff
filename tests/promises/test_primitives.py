"""Every primitive that is treated specially, enumerated from the tables: computed for many steps at once, moved before
the loop, on the way from a product to the carry, and saved or recomputed, against the step as it is written.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxprs import equations
from oracle import compiled
from primitive_cases import CHUNK, ENTRIES, Example, _closed_call, examples, tables

import treescan
from treescan._faster import in_bulk, products
from treescan._faster.in_bulk import compute_early
from treescan._faster.products import _CALLS, _OF_EACH_STEP, PRODUCTS
from treescan._remat.checkpoint import (
    _COMPLEX_OF_REAL,
    SaveDecisions,
    is_decision,
)
from treescan._trace import equations as equations_module
from treescan._trace.cost import TRANSCENDENTAL
from treescan._trace.dependence import _RULES, dependent
from treescan._until.tangents import _OF_ONE_ARRAY, _PRODUCTS, save_costly

TABLES = tables()
EARLY = sorted((_OF_EACH_STEP | _CALLS) & ENTRIES.keys() - {"pvary"})  # that is for within a shard_map only
DTYPES = ("float32", "int32", "bool", "complex64", "bfloat16", "float64", "uint8")
TOLERANCES = {"float64": 1e-11, "bfloat16": 0.06}
STEPS = 2 * CHUNK + 1


def assert_close(got: Any, expected: Any, dtype: str) -> None:
    """Equal types and values but for rounding; what differs is told by its path, which begins with the example."""
    paths, wanted = jax.tree_util.tree_flatten_with_path(expected)[0], jax.tree.leaves(got)
    assert len(paths) == len(wanted)
    wrong = []
    for (path, right), ours in zip(paths, wanted, strict=True):
        a, b = (np.asarray(x if x.dtype != jnp.bfloat16 else x.astype(jnp.float32)) for x in (ours, right))
        fits = (a.shape, ours.dtype) == (b.shape, right.dtype)
        finite = np.isfinite(b).all()
        # An operand of an example may be of bfloat16, whatever the type of the others: its name says so.
        in_bfloat16 = any("bfloat16" in text for text in (jax.tree_util.keystr(path), str(right.dtype)))
        tolerance = TOLERANCES["bfloat16"] if in_bfloat16 else TOLERANCES.get(dtype, 2e-5)
        if not fits or not finite or np.max(abs(a - b * 1), initial=0) > tolerance * max(1, np.max(abs(b), initial=0)):
            wrong.append(f"{jax.tree_util.keystr(path)}: {a} is not {b}")
    assert not wrong, "\n".join(wrong)


def is_inexact(leaf: Any) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jnp.inexact))


def total(tree: Any) -> Any:
    """A number that all floating leaves count for."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if is_inexact(leaf)]
    return sum((jnp.sum(jnp.real(a * (a + k + 1))).astype(jnp.float32) for k, a in enumerate(leaves)), start=0.0)


ORDERS = ("values", "jvp", "vjp", "second")


def derived(function: Any, given: Any, order: str) -> Any:
    """The values of a function, or a derivative with respect to its floating arguments, which paths name."""
    paths, structure = jax.tree_util.tree_flatten_with_path(given)
    leaves = {jax.tree_util.keystr(path): leaf for path, leaf in paths}
    floats = {path: leaf for path, leaf in leaves.items() if is_inexact(leaf)}
    directions = jax.tree.map(jnp.cos, floats)

    def outputs(floats: Any) -> Any:
        return function(*jax.tree.unflatten(structure, (leaves | floats).values()))

    def smooth(floats: Any) -> Any:
        return [leaf for leaf in jax.tree.leaves(outputs(floats)) if is_inexact(leaf)]

    slope = jax.grad(lambda floats: total(outputs(floats)))
    if order == "values":
        return outputs(floats)
    if order == "vjp":
        return slope(floats)
    return jax.jvp(smooth if order == "jvp" else slope, (floats,), (directions,))[1]


# The registry.


def test_each_name_in_a_table_has_examples_that_hold_it():
    missing = {table: sorted(names - ENTRIES.keys()) for table, names in TABLES.items() if names - ENTRIES.keys()}
    assert not missing, f"names without an example in tests/lib/primitive_cases.py: {missing}"
    assert len(TABLES) > 8
    for name, entry in ENTRIES.items():
        assert entry.types
        for dtype in entry.types:
            with jax.enable_x64(dtype == "float64"):
                for example in examples(name, dtype):
                    names = {equation.primitive.name for equation in equations(example.jaxpr().jaxpr)}
                    assert name in names, (example.name, names)


def one_each(dtype: str) -> list[Example]:
    """One example of each primitive, of another rank for the next."""
    found = [list(examples(name, dtype)) for name in EARLY]
    return [each[i % len(each)] for i, each in enumerate(found) if each]


def early_examples(dtype: str) -> list[Example]:
    return [example for name in EARLY for example in examples(name, dtype)]


# For many steps at once.


def places(example: Example) -> list[tuple[int, ...]]:
    """In which operands steps differ: in one of them, or in all."""
    numbers = range(len(example.operands))
    # JAX itself does not map a bound alone: see `test_a_bound_that_differs_from_step_to_step`.
    broken = example.name.startswith("clamp") and example.operands[1].shape == ()
    chosen = dict.fromkeys([*((i,) for i in numbers), tuple(numbers)])
    return [differ for differ in chosen if not broken or 1 in differ]


def early(example: Example, differ: tuple[int, ...], given: list[Any]) -> tuple[list[Any], list[Any]]:
    """The results of two steps, which differ in these operands: computed at once, and step by step."""
    closed = example.jaxpr()
    same = [i for i in range(len(given)) if i not in differ]
    invars = [*closed.jaxpr.constvars, *(closed.jaxpr.invars[i] for i in (*same, *differ))]
    reads = [*closed.consts, *(given[i] for i in same)]
    at_once = compute_early(closed.jaxpr.replace(constvars=[], invars=invars), reads, [given[i] for i in differ])
    steps = [[operand if i in same else operand[step] for i, operand in enumerate(given)] for step in range(2)]
    each = [jax.tree.leaves(example.function(*step)) for step in steps]
    return at_once, [jnp.stack(values) for values in zip(*each, strict=True)]


def compare_early(cases: list[tuple[Example, tuple[int, ...]]], dtype: str) -> None:
    rng, named = np.random.default_rng(len(cases)), {f"{case[0].name} {case[1]}": case for case in cases}
    given = {
        name: [operand.draw(rng, *([2] if i in differ else [])) for i, operand in enumerate(example.operands)]
        for name, (example, differ) in named.items()
    }
    found = compiled(lambda given: {name: early(*named[name], values) for name, values in given.items()}, given)
    assert_close(*({name: pair[which] for name, pair in found.items()} for which in (0, 1)), dtype)


def test_computed_for_many_steps_at_once():
    cases = one_each("float32")
    compare_early([(each, places(each)[i % len(places(each))]) for i, each in enumerate(cases)], "float32")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_computed_for_many_steps_at_once_in_each_place(dtype):
    with jax.enable_x64(dtype == "float64"):
        compare_early([(each, differ) for each in early_examples(dtype) for differ in places(each)], dtype)


# In a loop over rows.


def flat(results: Any, dtype: Any) -> jax.Array:
    """All results of an example as one vector of the weights' type."""
    leaves = [leaf for leaf in jax.tree.leaves(results) if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)]
    parts = [jnp.ravel(leaf) for leaf in leaves]
    if not jnp.issubdtype(dtype, jnp.complexfloating):
        parts = [jnp.real(part) for part in parts]
    return jnp.concatenate([part.astype(dtype) for part in parts])


WIDTH = CHUNK  # of each carry: as many as steps in a chunk


def weights_of(example: Example, dtype: Any, rng: np.random.Generator) -> dict[str, Any]:
    """For the results, moved early and not, and for each floating operand."""
    closed = example.jaxpr()
    size = sum(math.prod(aval.shape) for aval in closed.out_avals)

    def draw(*shape: int) -> np.ndarray:
        values = rng.uniform(-0.3, 0.3, shape)
        if jnp.issubdtype(dtype, jnp.complexfloating):
            values = values + 0.1j * rng.uniform(-1, 1, shape)
        return np.asarray(values, dtype)

    into = {str(i): draw(WIDTH, *o.shape) for i, o in enumerate(example.operands) if o.is_inexact}
    return {"early": draw(size, WIDTH), "late": draw(size, WIDTH), "own": draw(WIDTH, WIDTH), "into": into}


def step_of(example: Example, w: dict[str, Any], h: jax.Array, x: list[jax.Array]) -> tuple[jax.Array, Any]:
    """A step in which the primitive waits for x alone, and is on the way from a product to the carry, in each place."""
    first = example.function(*x)
    late = jnp.zeros(WIDTH, h.dtype)
    for place, weights in w["into"].items():
        operand = example.operands[int(place)]
        product = jnp.tensordot(h.astype(weights.dtype), weights, 1)
        given = list(x)
        own = product if operand.is_anything else x[int(place)] + product / 8
        given[int(place)] = own.astype(operand.dtype)
        late = late + flat(example.function(*given), h.dtype) @ w["late"]
    h = jnp.tanh((flat(first, h.dtype) @ w["early"] + late + h @ w["own"]) / 4)
    return h, first


def compare_scans(cases: list[Example], dtype: str, order: str) -> None:
    """Of a scan whose body evaluates all examples, each with its own carry and weights."""
    kind = jnp.dtype(dtype if jnp.issubdtype(dtype, jnp.inexact) else "float32")
    rng = np.random.default_rng(len(cases))
    w = {e.name: weights_of(e, kind, rng) for e in cases}
    h = {e.name: np.asarray(rng.uniform(-0.5, 0.5, WIDTH), kind) for e in cases}
    xs = {e.name: [operand.draw(rng, STEPS) for operand in e.operands] for e in cases}

    def outputs(chunk: int, w: Any, h: Any, xs: Any) -> Any:
        def body(carry: Any, x: Any) -> Any:
            steps = {e.name: step_of(e, w[e.name], carry[e.name], x[e.name]) for e in cases}
            return {name: step[0] for name, step in steps.items()}, {name: step[1] for name, step in steps.items()}

        return treescan.mask_scan(body, h, xs, lengths=STEPS - 2, chunk=chunk)

    def run(given: Any, rewritten: bool) -> Any:
        with treescan.rewriting(rewritten):
            return derived(functools.partial(outputs, CHUNK if rewritten else 0), given, order)

    got, expected = compiled(lambda given: (run(given, True), run(given, False)), (w, h, xs))
    assert_close(got, expected, dtype)


FURTHER = [("float32", order) for order in ORDERS]
FURTHER += [("complex64", "vjp"), ("bfloat16", "vjp"), ("complex64", "jvp")]
FURTHER += [(dtype, "jvp") for dtype in ("float64", "int32", "uint8", "bool")]


def test_in_the_steps_of_a_scan():
    """An eighth of the primitives; all are in the next test."""
    compare_scans(one_each("float32")[::8], "float32", "vjp")


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize(("dtype", "order"), FURTHER)
def test_derivatives_in_the_steps_of_a_scan(dtype, order, part, monkeypatch):
    """One example of each primitive in each type, and all in the derivative that most is rewritten for."""
    monkeypatch.setattr(products, "LARGE", 1)  # products of small weights too are early where nothing is differentiated
    with jax.enable_x64(dtype == "float64"):
        cases = early_examples(dtype) if (dtype, order) == ("float32", "vjp") else one_each(dtype)
        compare_scans(cases[part::4], dtype, order)


def test_a_bound_that_differs_from_step_to_step():
    """JAX itself does not map a `clamp` of rank 0 over a bound alone."""
    bounds, w = jnp.linspace(0.2, 0.9, STEPS), jnp.linspace(0.1, 0.5, WIDTH)

    def loss(w: Any, low: Any, a: Any) -> Any:
        def body(h: Any, bound: Any) -> Any:
            both = jax.lax.clamp(low, a, bound) * w + jax.lax.clamp(bound, a, 1.0) * w
            return jnp.tanh(h + both @ jnp.outer(w, w)), None

        return total(treescan.mask_scan(body, jnp.zeros(WIDTH), bounds, lengths=STEPS - 2, chunk=CHUNK)[0])

    got = jax.grad(loss, (0, 1, 2))(w, 0.1, 0.6)
    with treescan.rewriting(False):
        assert_close(got, jax.grad(loss, (0, 1, 2))(w, 0.1, 0.6), "float32")


@pytest.mark.devices
def test_within_a_shard_map():
    """What is the same on all devices is made to vary: `pvary` is for there only."""
    mesh = jax.make_mesh((1,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    rng = np.random.default_rng(0)
    w, xs = (np.asarray(rng.uniform(-1, 1, shape), np.float32) for shape in ((WIDTH, WIDTH), (STEPS, WIDTH)))

    def loss(w: Any, xs: Any) -> Any:
        def body(h: Any, x: Any) -> Any:
            h = jnp.tanh(h @ w + jnp.sin(jax.lax.pcast(x, "rows", to="varying")) @ w)
            return h, h

        h = jax.lax.pcast(jnp.zeros(WIDTH), "rows", to="varying")
        return total(treescan.mask_scan(body, h, xs, lengths=STEPS - 2, chunk=CHUNK))[None]

    def gradient(w: Any, xs: Any) -> Any:
        local = jax.shard_map(loss, mesh=mesh, in_specs=jax.P(), out_specs=jax.P("rows"))
        return jax.grad(lambda *given: jnp.sum(local(*given)), (0, 1))(w, xs)

    jaxpr = jax.make_jaxpr(gradient)(w, xs).jaxpr
    assert any(equation.primitive.name == "pvary" for equation in equations(jaxpr))
    got = compiled(gradient, w, xs)
    with treescan.rewriting(False):
        assert_close(got, compiled(gradient, w, xs), "float32")


# Products of many steps.


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ("float32", "complex64", "bfloat16", "int32", "uint8", "float64"))
def test_products_of_many_steps(dtype):
    """Each form of each product, the weights in either place, as one product and step by step."""
    with jax.enable_x64(dtype == "float64"):
        rng = np.random.default_rng(1)
        cases = {}
        for example in (example for name in sorted(PRODUCTS) for example in examples(name, dtype)):
            (equation,) = example.jaxpr().jaxpr.eqns
            for place in (0, 1):
                stacked, same = (example.operands[i] for i in (1 - place, place))
                cases[f"{example.name} {place}"] = equation, place, stacked.draw(rng, CHUNK), same.draw(rng)

        def run(given: Any) -> Any:
            got, expected = {}, {}
            for name, (equation, place, *_) in cases.items():
                stacked, same = given[name]
                got[name] = in_bulk.product_of_steps(equation, stacked, same, place)
                steps = [(same, one) if place == 0 else (one, same) for one in stacked]
                expected[name] = jnp.stack([equation.primitive.bind(*pair, **equation.params) for pair in steps])
            return got, expected

        assert_close(*compiled(run, {name: case[2:] for name, case in cases.items()}), dtype)


# What depends on what.


def _with_some_jvp(function: Any) -> Any:
    wrapped = jax.custom_jvp(function)
    wrapped.defjvp(lambda primals, tangents: (function(*primals), function(*tangents)))
    return wrapped


def _with_some_vjp(function: Any) -> Any:
    wrapped = jax.custom_vjp(function)
    wrapped.defvjp(lambda *given: (function(*given), None), lambda _, cotangents: tuple(cotangents[:2]))
    return wrapped


# fmt: off
DEPENDS: dict[str, list[tuple[Any, list[Any], list[str]]]] = {
    # of each output, the numbers of the inputs that it depends on
    "scan": [
        (lambda w, a, b, x: jax.lax.scan(lambda s, x: ((s[0] * w, s[1] + x), (s[0], x)), (a, b), x),
         [1.0, 1.0, 1.0, np.ones(2, np.float32)], ["01", "23", "01", "3"]),
        (lambda a, b, c: jax.lax.scan(lambda s, _: ((s[1], s[2], s[2]), None), (a, b, c), None, 3)[0],
         [1.0, 1.0, 1.0], ["012", "12", "2"]),
    ],
    "while": [
        (lambda *s: jax.lax.while_loop(lambda s: s[2] < 3, lambda s: (s[0] * 2, s[1] + s[0], s[2] + 1), s),
         [1.0, 1.0, 0], ["02", "012", "2"]),
        (lambda *s: jax.lax.while_loop(lambda s: s[2] < 3, lambda s: (s[0] * 2, s[1] + s[0], s[2] + 1), (*s, 0))[:2],
         [1.0, 1.0], ["0", "01"]),
    ],
    "cond": [
        (lambda i, *given: jax.lax.cond(i > 0, lambda a, b: (a, b + b), lambda a, b: (b, b), *given),
         [1, 1.0, 1.0], ["012", "02"]),
        (lambda a, b: jax.lax.cond(jnp.zeros(()) > 0, lambda a, b: (a, b), lambda a, b: (b, b), a, b),
         [1.0, 1.0], ["01", "1"]),
    ],
    **{name: [(how(lambda a, b: [jnp.sin(a), a * b, b]), [1.0, 1.0], ["0", "01", "1"])]
       for name, how in (("jit", jax.jit), ("remat2", jax.checkpoint), ("closed_call", _closed_call))},
    # their rules may take the derivative of an input that the value ignores
    **{name: [(how(lambda a, b: [jnp.sin(a), a * b, b]), [1.0, 1.0], ["01", "01", "01"])]
       for name, how in (("custom_jvp_call", _with_some_jvp), ("custom_vjp_call", _with_some_vjp))},
}
# fmt: on


def test_what_depends_on_what_has_examples():
    assert _RULES.keys() | equations_module._CALLS | equations_module._CALLS_WITH_RULES <= DEPENDS.keys()


@pytest.mark.parametrize("name", DEPENDS)
def test_what_depends_on_what(name):
    for function, given, expected in DEPENDS[name]:
        jaxpr = jax.make_jaxpr(function)(*given).jaxpr
        assert name in {equation.primitive.name for equation in jaxpr.eqns}
        for i in range(len(given)):
            found = dependent(jaxpr, [i == j for j in range(len(given))])
            flags = [not hasattr(atom, "val") and atom in found for atom in jaxpr.outvars]
            assert flags == [str(i) in numbers for numbers in expected], (function, i)


def test_nothing_that_matters_is_independent():
    """The results of an example do not change where they are said not to depend on an operand."""
    for name in ENTRIES.keys() - {"scan", "while", "cond", "iota"}:  # these have their own tests
        for example in examples(name, ENTRIES[name].types[0]):
            jaxpr = example.jaxpr().jaxpr
            for place in range(len(example.operands)):
                found = dependent(jaxpr, [place == i for i in range(len(example.operands))])
                assert any(not hasattr(a, "val") and a in found for a in jaxpr.outvars), (example.name, place)


# Rules for derivatives, and what is saved.


def test_which_have_a_rule_for_reverse_mode_alone():
    with_a_rule = lambda example: equations_module.has_reverse_rule(example.jaxpr().jaxpr)  # noqa: E731
    found = {name for name in ENTRIES if any(map(with_a_rule, examples(name, *DTYPES[:4])))}
    assert found == {"custom_lin", "custom_vjp_call"}


def kept(policy: Any, example: Example, name: str) -> list[bool]:
    """What a policy says of the example's equations of this primitive."""
    return [
        bool(policy(equation.primitive, *(atom.aval for atom in equation.invars), **equation.params))
        for equation in equations(example.jaxpr().jaxpr, name)
    ]


def decisions(example: Example, name: str) -> list[bool]:
    return kept(lambda prim, *avals, **params: is_decision(prim, avals, params), example, name)


def each_of(names: list[str]) -> list[tuple[str, Example]]:
    return [(name, example) for name in names for example in examples(name, *DTYPES[:4])]


QUARTERS = pytest.mark.parametrize("names", [sorted(ENTRIES)[part::4] for part in range(4)], ids=range(4))


@QUARTERS
def test_decisions_are_those_that_make_bools_and_ints_of_floats(names):
    for name, example in each_of(names):
        found = equations(example.jaxpr().jaxpr, name)
        for equation, decides in zip(found, decisions(example, name), strict=True):
            discrete = not any(is_inexact(var.aval) for var in equation.outvars)
            if discrete and any(is_inexact(atom.aval) for atom in equation.invars) and not equation.effects:
                assert decides, example.name
            elif decides:
                jumps = {"atan2", "ceil", "floor", "rem", "round", "sign"}
                assert name in jumps | {"approx_top_k", "sort", "top_k"}, example.name


@QUARTERS
def test_what_the_policies_save(names):
    """Nothing complex is saved; of real numbers all but what is had again sooner."""
    for name, example in each_of(names):
        complex_out = [
            any(jnp.issubdtype(var.aval.dtype, jnp.complexfloating) for var in equation.outvars)
            for equation in equations(example.jaxpr().jaxpr, name)
        ]
        decided = decisions(example, name)
        within = kept(in_bulk.save_all_but_cheap, example, name)
        costly = kept(save_costly, example, name)
        assert within == [name not in products.ELEMENTWISE or name in TRANSCENDENTAL] * len(within)
        reads_complex = any(operand.dtype == "complex64" for operand in example.operands)
        for policy, plain in ((in_bulk.save_all_but_cheap, within), (save_costly, costly)):
            saved = kept(SaveDecisions(policy), example, name)
            assert not any(a and b for a, b in zip(saved, complex_out, strict=True)), example.name
            if not reads_complex and not any(complex_out) and name not in _COMPLEX_OF_REAL:
                assert saved == [a or b for a, b in zip(plain, decided, strict=True)], example.name
        if reads_complex or "float32" not in example.name.split():
            continue
        if name in _PRODUCTS:
            assert not any(costly), example.name
        elif name not in _OF_ONE_ARRAY:
            assert all(costly), example.name
        elif all(operand.shape for operand in example.operands):
            assert set(costly) == {len(example.operands) > 1}, example.name
