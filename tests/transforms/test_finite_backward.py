"""`check_finite="backward"`: a cotangent that goes wrong is named, with the step that made it so."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nonfinite import caught, halve

import treescan

pytestmark = pytest.mark.quick

T, B = 7, 3
LEAVES = ("cell", "norm")
VERBS = ("scan", "fold", "accumulate", "fori")
WAYS = ("grad", "jit", "vmap of grad", "grad of vmap", "disable_jit", "reverse", "remat", "unroll", "weight")


def step(leaf: str, h: Any, bad: Any) -> Any:
    w = h["w"]
    return {**h, "count": h["count"] + 1, "other": h["other"] * 0.5, leaf: halve(h[leaf] * w, bad) + 1.0}


def start(w: Any) -> dict[str, Any]:
    ones = {name: jnp.ones(B) for name in LEAVES}
    return {**ones, "count": jnp.int32(0), "other": jnp.ones(2), "w": w}


def run(verb: str, leaf: str, bad: Any, w: Any, scale: Any, **options: Any) -> Any:
    h = {**start(w), leaf: jnp.ones(B) * scale}
    options = {"check_finite": "backward", **options}
    if verb == "fori":
        h = treescan.fori(0, T, lambda i, h: step(leaf, h, bad[i]), h, **options)
    elif verb == "scan":
        h, ys = treescan.scan(lambda h, b: (step(leaf, h, b), h[leaf]), h, bad, **options)
        return (h[leaf] ** 2).sum() + ys.sum()
    else:
        h = getattr(treescan, verb)(functools.partial(step, leaf), h, bad, **options)
    return (h[leaf] ** 2).sum()


def go(way: str, call: Any, bad: Any) -> Any:
    options = {"reverse": {"reverse": True}, "remat": {"remat": "nested"}, "unroll": {"unroll": 2}}.get(way, {})
    call = functools.partial(call, **options)
    one = jnp.float32(1)
    if way == "disable_jit":
        with jax.disable_jit():
            return jax.grad(call, 2)(bad, one, one)
    if way == "jit":
        return jax.jit(jax.grad(call, 2))(bad, one, one)
    if way == "vmap of grad":
        return jax.vmap(jax.grad(call, 2), (None, 0, None))(bad, jnp.ones(2), one)
    if way == "grad of vmap":
        return jax.grad(lambda s: jax.vmap(call, (None, 0, None))(bad, jnp.ones(2), s).sum())(one)
    return jax.grad(call, 1 if way == "weight" else 2)(bad, one, one)


def plantings(count: int) -> list[Any]:
    draw = np.random.default_rng(6)
    cases = []
    for i in range(count):
        verb, way = VERBS[i % len(VERBS)], WAYS[(i // len(VERBS)) % len(WAYS)]
        rows = sorted(draw.choice(B, size=draw.integers(1, B + 1), replace=False).tolist())
        case = (verb, way, LEAVES[draw.integers(2)], ("NaN", "inf")[draw.integers(2)], int(draw.integers(T)), rows)
        marks = [] if i % 41 == 0 else pytest.mark.slow
        cases.append(pytest.param(*case, id=f"{i}-{verb}-{way}", marks=marks))
    return cases


@pytest.mark.parametrize(("verb", "way", "leaf", "kind", "place", "rows"), plantings(108))
def test_a_planted_cotangent_is_named(verb: str, way: str, leaf: str, kind: str, place: int, rows: list[int]) -> None:
    bad = jnp.ones((T, B)).at[place, jnp.array(rows)].set({"NaN": jnp.nan, "inf": jnp.inf}[kind])
    text = caught(lambda: go(way, functools.partial(run, verb, leaf), bad))
    named = f"row{'s' * (len(rows) > 1)} {' and '.join(', '.join(map(str, rows)).rsplit(', ', 1))}"
    assert f'the cotangent of `h["{leaf}"]` became {kind} in step {place} of {T} ({named})' in text
    record = treescan.last_nonfinite()
    assert record is not None and record.backward
    assert (record.path, record.kind, record.step, record.rows) == (f'h["{leaf}"]', kind, place, tuple(rows))
    assert int(record.carry["count"]) == (T - 1 - place if way == "reverse" else place)
    if verb != "fori":
        np.testing.assert_array_equal(record.x, bad[place])


def test_the_operation_is_named() -> None:
    def step(h: Any, x: Any) -> Any:
        return jnp.sqrt(h * x) + 1.0

    xs = jnp.ones((5, 2)).at[3, 1].set(0.0)
    text = caught(lambda: jax.grad(lambda h: treescan.fold(step, h, xs, check_finite="backward").sum())(jnp.ones(2)))
    assert "the cotangent of `h` became NaN in step 3 of 5 (row 1), first in `mul` at" in text
    assert f"test_finite_backward.py:{step.__code__.co_firstlineno + 1}; the carry in that step was finite" in text


def test_a_cotangent_of_an_output_is_named() -> None:
    def loss(h: Any) -> Any:
        _, ys = treescan.scan(lambda h, x: (h * 0.5, h * x), h, xs, check_finite="backward")
        return jnp.sqrt(ys).sum()

    xs = jnp.ones(5).at[2].set(0.0)
    text = caught(lambda: jax.grad(loss)(jnp.float32(1)))
    assert "the cotangent of `h` became NaN in step 2 of 5" in text or "became inf" in text
    assert "`mul`" in text or "from `the cotangent of y`" in text


def test_what_comes_from_the_result_is_no_step() -> None:
    def loss(h: Any) -> Any:
        return jnp.sqrt(treescan.fold(lambda h, x: h * x, h, jnp.ones(4), check_finite="backward") * 0)

    text = caught(lambda: jax.grad(loss)(jnp.float32(1)))
    assert (
        "the cotangent of `h` became NaN in step 3 of 4; it was so before that step, from what is computed of" in text
    )


@pytest.mark.parametrize("verb", VERBS)
def test_gradients_are_those_without_it(verb: str) -> None:
    bad = jnp.ones((T, B))
    for derivative in (jax.grad, lambda f, n: jax.grad(lambda *a: jax.grad(f, n)(*a), n)):
        plain, checked = (
            derivative(functools.partial(run, verb, "cell", check_finite=value), 2)(
                bad, jnp.float32(0.7), jnp.float32(2)
            )
            for value in (False, "backward")
        )
        np.testing.assert_allclose(plain, checked, rtol=1e-6)


def test_nothing_is_raised_where_all_is_finite_nor_where_nothing_is_differentiated() -> None:
    treescan.fold(lambda h, x: h, 1.0, jnp.ones(3), check_finite=True)
    before = treescan.last_nonfinite()
    go("jit", functools.partial(run, "fold", "cell"), jnp.ones((T, B)))
    run("fold", "cell", jnp.full((T, B), jnp.nan), jnp.float32(1), jnp.float32(1))
    jax.effects_barrier()
    assert treescan.last_nonfinite() is before
