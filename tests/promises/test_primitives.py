"""Every primitive that is treated specially, enumerated from the tables: computed for many steps at once, moved before
the loop, on the way from a product to the carry, and saved or recomputed, against the step as it is written.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.core import eval_jaxpr
from jaxprs import equations
from oracle import compiled
from primitive_cases import CHUNK, ENTRIES, Example, _closed_call, examples, tables

import treescan
from treescan._trace import equations as equations_module
from treescan._trace.cost import TRANSCENDENTAL
from treescan._trace.dependence import _RULES, dependent
from treescan._transforms.checkpoint import (
    _COMPLEX_OF_REAL,
    _OF_ONE_ARRAY,
    _PRODUCTS,
    SaveDecisions,
    is_decision,
    save_costly,
)
from treescan._transforms.weights import deferred, products
from treescan._transforms.weights.deferred import compute_early
from treescan._transforms.weights.products import _CALLS, _OF_EACH_STEP, PRODUCTS

TABLES = tables()
EARLY = sorted((_OF_EACH_STEP | _CALLS) & ENTRIES.keys() - {"pvary"})  # that is for within a shard_map only
DTYPES = ("float32", "int32", "bool", "complex64", "bfloat16", "float64", "uint8")
TOLERANCES = {"float64": 1e-11, "bfloat16": 0.06}
STEPS = 2 * CHUNK + 1


def by_dtype(*everyday: str, of: tuple[str, ...] = DTYPES, exhaustive: tuple[str, ...] = ()) -> Any:
    """One test for each type; those that are not named are slow."""
    marks = {**dict.fromkeys(of, pytest.mark.slow), **dict.fromkeys(everyday, ())}
    marks |= dict.fromkeys(exhaustive, (pytest.mark.slow, pytest.mark.exhaustive))
    return pytest.mark.parametrize("dtype", [pytest.param(dtype, marks=marks[dtype]) for dtype in of])


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
    return sum(
        (jnp.sum(jnp.real(leaf * (leaf + k + 1))).astype(jnp.float32) for k, leaf in enumerate(leaves)), start=0.0
    )


ORDERS = ("values", "jvp", "vjp", "second")


def derived(function: Any, given: Any, orders: tuple[str, ...] = ORDERS) -> dict[str, Any]:
    """The values of a function and its derivatives with respect to its floating arguments, which paths name."""
    paths, structure = jax.tree_util.tree_flatten_with_path(given)
    leaves = {jax.tree_util.keystr(path): leaf for path, leaf in paths}
    floats = {path: leaf for path, leaf in leaves.items() if is_inexact(leaf)}
    directions = jax.tree.map(jnp.cos, floats)

    def outputs(floats: Any) -> Any:
        return function(*jax.tree.unflatten(structure, (leaves | floats).values()))

    def smooth(floats: Any) -> Any:
        return [leaf for leaf in jax.tree.leaves(outputs(floats)) if is_inexact(leaf)]

    slope = jax.grad(lambda floats: total(outputs(floats)))
    of = {
        "values": lambda: outputs(floats),
        "jvp": lambda: jax.jvp(smooth, (floats,), (directions,))[1],
        "vjp": lambda: slope(floats),
        "second": lambda: jax.jvp(slope, (floats,), (directions,))[1],
    }
    has_derivative = floats and jax.eval_shape(smooth, floats)
    return {order: of[order]() for order in orders if order == "values" or has_derivative}


# The registry.


def test_each_name_in_a_table_has_examples():
    missing = {table: sorted(names - ENTRIES.keys()) for table, names in TABLES.items() if names - ENTRIES.keys()}
    assert not missing, f"names without an example in tests/lib/primitive_cases.py: {missing}"
    assert len(TABLES) > 8
    assert all(entry.types for entry in ENTRIES.values())


def test_examples_hold_their_primitive():
    for name, entry in ENTRIES.items():
        for dtype in entry.types:
            with jax.enable_x64(dtype == "float64"):
                for example in examples(name, dtype):
                    names = {equation.primitive.name for equation in equations(example.jaxpr().jaxpr)}
                    assert name in names, (example.name, names)


# For many steps at once.


def places(example: Example) -> list[tuple[int, ...]]:
    """In which operands steps differ: in one of them, or in all."""
    numbers = range(len(example.operands))
    chosen = dict.fromkeys([*((i,) for i in numbers), tuple(numbers)])
    return [differ for differ in chosen if not is_broken(example, differ)]


def is_broken(example: Example, differ: tuple[int, ...]) -> bool:
    """What JAX itself does not map: see `test_a_bound_that_differs_from_step_to_step`."""
    return example.name.startswith("clamp") and example.operands[1].shape == () and 1 not in differ


def in_turn(cases: list[Example]) -> dict[str, Any]:
    """One of the places for each example: each in its turn."""
    return {example.name: (example, places(example)[i % len(places(example))]) for i, example in enumerate(cases)}


def both_ways(example: Example, differ: tuple[int, ...], steps: int = 2) -> tuple[Any, Any, list[Any]]:
    """Two functions of an example's operands for all steps: computed at once, and step by step."""
    closed = example.jaxpr()
    numbers = range(len(example.operands))
    same = [i for i in numbers if i not in differ]
    jaxpr = closed.jaxpr
    invars = [*jaxpr.constvars, *(jaxpr.invars[i] for i in same), *(jaxpr.invars[i] for i in differ)]
    program = jaxpr.replace(constvars=[], invars=invars)

    def at_once(*given: Any) -> list[Any]:
        reads = [*closed.consts, *(given[i] for i in same)]
        return compute_early(program, reads, [given[i] for i in differ])

    def step_by_step(*given: Any) -> list[Any]:
        each = [
            eval_jaxpr(jaxpr, closed.consts, *(given[i][step] if i in differ else given[i] for i in numbers))
            for step in range(steps)
        ]
        return [jnp.stack(values) for values in zip(*each, strict=True)]

    rng = np.random.default_rng(len(example.name))
    given = [operand.draw(rng, *([steps] if i in differ else [])) for i, operand in enumerate(example.operands)]
    return at_once, step_by_step, given


def in_all(cases: list[Example]) -> dict[str, Any]:
    """Each example with each of its places."""
    return {f"{example.name} {differ}": (example, differ) for example in cases for differ in places(example)}


def compare_early(cases: dict[str, Any], dtype: str, orders: tuple[str, ...] = ("values",)) -> None:
    programs = {name: both_ways(*case) for name, case in cases.items()}

    def run(which: int, given: dict[str, list[Any]]) -> dict[str, Any]:
        return {name: derived(programs[name][which], values, orders) for name, values in given.items()}

    given = {name: program[2] for name, program in programs.items()}
    ours, expected = compiled(lambda given: (run(0, given), run(1, given)), given)
    assert_close(ours, expected, dtype)


def early_examples(dtype: str) -> list[Example]:
    return [example for name in EARLY for example in examples(name, dtype)]


def test_computed_for_many_steps_at_once():
    compare_early(in_turn(one_each("float32")), "float32")


@by_dtype()
def test_computed_for_many_steps_at_once_in_each_place(dtype):
    with jax.enable_x64(dtype == "float64"):
        compare_early(in_all(early_examples(dtype)), dtype)


@by_dtype(of=("float32", "complex64", "bfloat16", "float64"), exhaustive=("bfloat16",))  # which takes two minutes
def test_derivatives_of_what_is_computed_for_many_steps_at_once(dtype):
    with jax.enable_x64(dtype == "float64"):
        compare_early(in_turn(early_examples(dtype)), dtype, ORDERS)


# In a loop over rows.


def flat(results: Any, dtype: Any) -> jax.Array:
    """All results of an example as one vector of the weights' type."""
    leaves = [leaf for leaf in jax.tree.leaves(results) if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)]
    parts = [jnp.ravel(leaf) for leaf in leaves]
    if not jnp.issubdtype(dtype, jnp.complexfloating):
        parts = [jnp.real(part) for part in parts]
    return jnp.concatenate([part.astype(dtype) for part in parts])


def weights_type(dtype: str) -> Any:
    return jnp.dtype(dtype if jnp.issubdtype(dtype, jnp.inexact) else "float32")


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


def run_all(cases: list[Example], w: Any, h: Any, xs: Any, length: Any, **options: Any) -> Any:
    """A scan whose body evaluates all examples, each with its own carry and weights."""

    def body(carry, x):
        steps = {e.name: step_of(e, w[e.name], carry[e.name], x[e.name]) for e in cases}
        return {name: step[0] for name, step in steps.items()}, {name: step[1] for name, step in steps.items()}

    return treescan.mask_scan(body, h, xs, lengths=length, **options)


def compare_scans(cases: list[Example], dtype: str, orders: tuple[str, ...]) -> None:
    kind = weights_type(dtype)
    rng = np.random.default_rng(len(cases))
    w = {e.name: weights_of(e, kind, rng) for e in cases}
    h = {e.name: np.asarray(rng.uniform(-0.5, 0.5, WIDTH), kind) for e in cases}
    xs = {e.name: [operand.draw(rng, STEPS) for operand in e.operands] for e in cases}

    def run(given: Any, rewritten: bool) -> dict[str, Any]:
        def outputs(*given: Any) -> Any:
            return run_all(cases, *given, STEPS - 2, chunk=CHUNK if rewritten else 0)

        with treescan.rewriting(rewritten):
            return derived(outputs, given, orders)

    got, expected = compiled(lambda given: (run(given, True), run(given, False)), (w, h, xs))
    assert_close(got, expected, dtype)


def one_each(dtype: str) -> list[Example]:
    """One example of each primitive, of another rank for the next."""
    found = [list(examples(name, dtype)) for name in EARLY]
    return [each[i % len(each)] for i, each in enumerate(found) if each]


def test_in_the_steps_of_a_scan():
    """An eighth of the primitives; all are in the next test."""
    compare_scans(one_each("float32")[::8], "float32", ("vjp",))


FURTHER = [("float32", order) for order in ("values", "jvp", "vjp", "second")]
FURTHER += [("complex64", "vjp"), ("bfloat16", "vjp"), ("complex64", "jvp")]
FURTHER += [(dtype, "jvp") for dtype in ("float64", "int32", "uint8", "bool")]


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize(("dtype", "order"), FURTHER)
def test_derivatives_in_the_steps_of_a_scan(dtype, order, part, monkeypatch):
    """One example of each primitive in each type, and all in the derivative that most is rewritten for."""
    monkeypatch.setattr(products, "LARGE", 1)  # products of small weights too are early where nothing is differentiated
    with jax.enable_x64(dtype == "float64"):
        cases = early_examples(dtype) if (dtype, order) == ("float32", "vjp") else one_each(dtype)
        compare_scans(cases[part::4], dtype, (order,))


def test_a_bound_that_differs_from_step_to_step():
    """JAX itself does not map a `clamp` of rank 0 over a bound alone."""
    bounds, w = jnp.linspace(0.2, 0.9, STEPS), jnp.linspace(0.1, 0.5, WIDTH)

    def loss(w: Any, low: Any, a: Any) -> Any:
        def body(h: Any, bound: Any) -> Any:
            both = jax.lax.clamp(low, a, bound) * w @ jnp.outer(w, w) + jax.lax.clamp(bound, a, 1.0) * w @ jnp.outer(
                w, w
            )
            return jnp.tanh(h + both), None

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


@pytest.mark.parametrize("process", ["one device", pytest.param("many devices", marks=pytest.mark.devices)])
@by_dtype("float32", of=("float32", "complex64", "bfloat16", "int32", "uint8", "float64"))
def test_products_of_many_steps(dtype, process):
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
                got[name] = deferred.product_of_steps(equation, stacked, same, place)
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
       for name, how in (("jit", jax.jit), ("remat2", jax.checkpoint), ("closed_call", _closed_call),
                         ("custom_jvp_call", _with_some_jvp), ("custom_vjp_call", _with_some_vjp))},
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


# Calls, rules for derivatives, and what is saved.


def test_what_is_called():
    for name in sorted(equations_module._CALLS | equations_module._CALLS_WITH_RULES):
        for example in examples(name, "float32"):
            closed = example.jaxpr()
            given = [operand.draw(np.random.default_rng(0)) for operand in example.operands]
            assert any(equations_module.called(equation) is not None for equation in closed.eqns), name
            got = equations_module.evaluate_inlined(closed.jaxpr, closed.consts, given, equations_module.called)
            assert_close(got, jax.tree.leaves(example.function(*given)), "float32")


def test_which_have_a_rule_for_reverse_mode_alone():
    assert {name for name in ENTRIES if any(has_rule(e) for e in examples(name, *DTYPES[:4]))} == {
        *equations_module._REVERSE_RULES
    }


def has_rule(example: Example) -> bool:
    return equations_module.has_reverse_rule(example.jaxpr().jaxpr)


def kept(policy: Any, example: Example, name: str) -> list[bool]:
    """What a policy says of the example's equations of this primitive."""
    return [
        bool(policy(equation.primitive, *(atom.aval for atom in equation.invars), **equation.params))
        for equation in equations(example.jaxpr().jaxpr, name)
    ]


def is_decision_of(prim: Any, *avals: Any, **params: Any) -> bool:
    return is_decision(prim, avals, params)


QUARTERS = pytest.mark.parametrize("names", [sorted(ENTRIES)[part::4] for part in range(4)], ids=range(4))


@QUARTERS
def test_decisions_are_those_that_make_bools_and_ints_of_floats(names):
    for name in names:
        check_decisions(name)


def check_decisions(name: str) -> None:
    for example in examples(name, *DTYPES[:4]):
        for equation in equations(example.jaxpr().jaxpr, name):
            avals = [atom.aval for atom in equation.invars]
            discrete = all(not jnp.issubdtype(var.aval.dtype, jnp.inexact) for var in equation.outvars)
            of_floats = any(jnp.issubdtype(aval.dtype, jnp.inexact) for aval in avals)
            decides = is_decision_of(equation.primitive, *avals, **equation.params)
            if discrete and of_floats and not equation.effects:
                assert decides, example.name
            elif decides:
                assert name in {"ceil", "floor", "round", "sign"}, example.name


@QUARTERS
def test_what_the_policies_save(names):
    for name in names:
        check_policies(name)


def check_policies(name: str) -> None:
    """Nothing complex is saved; of real numbers all but what is had again sooner."""
    own = {"steps": deferred.save_all_but_cheap, "chunks": save_costly}
    for example in examples(name, *DTYPES[:4]):
        complex_out = [
            any(jnp.issubdtype(var.aval.dtype, jnp.complexfloating) for var in equation.outvars)
            for equation in equations(example.jaxpr().jaxpr, name)
        ]
        within = kept(own["steps"], example, name)
        assert within == [name not in products.ELEMENTWISE or name in TRANSCENDENTAL] * len(within)
        for policy in own.values():
            saved = kept(SaveDecisions(policy), example, name)
            decided = kept(is_decision_of, example, name)
            plain = [a or b for a, b in zip(kept(policy, example, name), decided, strict=True)]
            assert not any(a and b for a, b in zip(saved, complex_out, strict=True)), example.name
            reads_complex = any(operand.dtype == "complex64" for operand in example.operands)
            if not reads_complex and not any(complex_out) and name not in _COMPLEX_OF_REAL:
                assert saved == plain, example.name
    if name in _PRODUCTS:
        assert not any(any(kept(save_costly, example, name)) for example in examples(name, "float32"))
    elif name in _OF_ONE_ARRAY:
        whole = [example for example in examples(name, "float32") if all(o.shape for o in example.operands)]
        for example in whole:
            assert set(kept(save_costly, example, name)) == {len(example.operands) > 1}, example.name
    else:
        assert all(all(kept(save_costly, example, name)) for example in examples(name, "float32"))
