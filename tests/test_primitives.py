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
from helpers import equations
from jax.core import eval_jaxpr
from primitive_cases import CHUNK, ENTRIES, Example, examples, tables
from unpadded import compiled

import treescan
from treescan._transforms import products, steps_at_once
from treescan._transforms.products import _CALLS, _OF_EACH_STEP, PRODUCTS
from treescan._transforms.steps_at_once import compute_early

TABLES = tables()
EARLY = sorted((_OF_EACH_STEP | _CALLS) & ENTRIES.keys() - {"pvary"})  # that is for within a shard_map only
DTYPES = ("float32", "int32", "bool", "complex64", "bfloat16", "float64", "uint8")
TOLERANCES = {"float64": 1e-11, "bfloat16": 0.06}
STEPS = 2 * CHUNK + 1


def by_dtype(*everyday: str, of: tuple[str, ...] = DTYPES) -> Any:
    """One test for each type; those that are not named are slow."""
    params = [pytest.param(dtype, marks=() if dtype in everyday else pytest.mark.slow) for dtype in of]
    return pytest.mark.parametrize("dtype", params)


def assert_close(got: Any, expected: Any, dtype: str) -> None:
    """Equal types and values but for rounding; what differs is told by its path, which begins with the example."""
    tolerance = TOLERANCES.get(dtype, 2e-5)
    paths, wanted = jax.tree_util.tree_flatten_with_path(expected)[0], jax.tree.leaves(got)
    assert len(paths) == len(wanted)
    wrong = []
    for (path, right), ours in zip(paths, wanted, strict=True):
        a, b = (np.asarray(x if x.dtype != jnp.bfloat16 else x.astype(jnp.float32)) for x in (ours, right))
        fits = (a.shape, ours.dtype) == (b.shape, right.dtype)
        finite = np.isfinite(b).all()
        if not fits or not finite or np.max(abs(a - b * 1), initial=0) > tolerance * max(1, np.max(abs(b), initial=0)):
            wrong.append(f"{jax.tree_util.keystr(path)}: {a} is not {b}")
    assert not wrong, "\n".join(wrong)


def is_inexact(leaf: Any) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jnp.inexact))


def total(tree: Any) -> Any:
    """A number that all floating leaves count for."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if is_inexact(leaf)]
    return sum((jnp.sum(jnp.real(leaf * (leaf + k + 1))).astype(jnp.float32) for k, leaf in enumerate(leaves)), start=0.0)


def derived(function: Any, given: list[Any], order: int = 2) -> dict[str, Any]:
    """The values of a function and its derivatives with respect to its floating arguments."""
    results = {"values": function(*given)}
    places = [i for i, leaf in enumerate(given) if is_inexact(leaf)]
    smooth = any(is_inexact(leaf) for leaf in jax.tree.leaves(results))
    if not places or not smooth or not order:
        return results

    def loss(floats: list[Any]) -> Any:
        whole = list(given)
        for i, leaf in zip(places, floats, strict=True):
            whole[i] = leaf
        return total(function(*whole))

    floats = [given[i] for i in places]
    directions = [jnp.cos(leaf) for leaf in floats]
    results["jvp"] = jax.jvp(loss, (floats,), (directions,))[1]
    results["vjp"] = jax.grad(loss)(floats)
    if order > 1:
        results["second"] = jax.jvp(jax.grad(loss), (floats,), (directions,))[1]
    return results


# The registry.


def test_each_name_in_a_table_has_examples():
    missing = {table: sorted(names - ENTRIES.keys()) for table, names in TABLES.items() if names - ENTRIES.keys()}
    assert not missing, f"names without an example in tests/primitive_cases.py: {missing}"
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


def compare_early(cases: dict[str, Any], dtype: str, order: int) -> None:
    programs = {name: both_ways(*case) for name, case in cases.items()}

    def run(which: int, given: dict[str, list[Any]]) -> dict[str, Any]:
        return {name: derived(programs[name][which], values, order) for name, values in given.items()}

    given = {name: program[2] for name, program in programs.items()}
    ours, expected = compiled(lambda given: (run(0, given), run(1, given)), given)
    assert_close(ours, expected, dtype)


def early_examples(dtype: str) -> list[Example]:
    return [example for name in EARLY for example in examples(name, dtype)]


def test_computed_for_many_steps_at_once():
    compare_early(in_turn(early_examples("float32")), "float32", 0)


@by_dtype()
def test_computed_for_many_steps_at_once_in_each_place(dtype):
    with jax.enable_x64(dtype == "float64"):
        compare_early(in_all(early_examples(dtype)), dtype, 0)


@by_dtype(of=("float32", "complex64", "bfloat16", "float64"))
def test_derivatives_of_what_is_computed_for_many_steps_at_once(dtype):
    with jax.enable_x64(dtype == "float64"):
        compare_early(in_turn(early_examples(dtype)), dtype, 2)


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

    def run(given: Any, chunk: int) -> dict[str, Any]:
        w, h, xs = given
        smooth, structure = jax.tree.flatten(xs)
        on = [i for i, leaf in enumerate(smooth) if is_inexact(leaf)]

        def outputs(floats: Any) -> Any:
            leaves = list(smooth)
            for i, leaf in zip(on, floats[2], strict=True):
                leaves[i] = leaf
            return run_all(cases, floats[0], floats[1], jax.tree.unflatten(structure, leaves), STEPS - 2, chunk=chunk)

        floats = (w, h, [smooth[i] for i in on])
        directions = jax.tree.map(jnp.cos, floats)
        results: dict[str, Any] = {}
        if "values" in orders:
            results["values"] = outputs(floats)
        if "jvp" in orders:
            smooth_outputs = lambda floats: [leaf for leaf in jax.tree.leaves(outputs(floats)) if is_inexact(leaf)]  # noqa: E731
            results["jvp"] = jax.jvp(smooth_outputs, (floats,), (directions,))[1]
        if "vjp" in orders:
            results["vjp"] = named_xs(jax.grad(lambda floats: total(outputs(floats)))(floats), on, xs)
        if "second" in orders:
            slope = jax.grad(lambda floats: total(outputs(floats)))
            results["second"] = named_xs(jax.jvp(slope, (floats,), (directions,))[1], on, xs)
        return results

    got, expected = compiled(lambda given: (run(given, CHUNK), run(given, 0)), (w, h, xs))
    assert_close(got, expected, dtype)


def named_xs(cotangents: Any, on: list[int], xs: Any) -> Any:
    """The cotangents of xs by the examples' names."""
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(xs)[0]]
    return (*cotangents[:2], {paths[i]: leaf for i, leaf in zip(on, cotangents[2], strict=True)})


@by_dtype("float32")
def test_in_the_steps_of_a_scan(dtype, monkeypatch):
    monkeypatch.setattr(products, "LARGE", 1)  # products of small weights too are early where nothing is differentiated
    with jax.enable_x64(dtype == "float64"):
        compare_scans(early_examples(dtype), dtype, ("vjp",) if dtype == "float32" else ("values", "vjp"))


@by_dtype()
def test_further_derivatives_in_the_steps_of_a_scan(dtype):
    with jax.enable_x64(dtype == "float64"):
        compare_scans(early_examples(dtype), dtype, ("jvp",))


@by_dtype(of=("float32", "complex64"))
def test_second_derivatives_in_the_steps_of_a_scan(dtype):
    with jax.enable_x64(dtype == "float64"):
        compare_scans(early_examples(dtype), dtype, ("second",))
