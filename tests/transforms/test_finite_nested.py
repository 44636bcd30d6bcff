"""`check_finite` of loops within loops: what goes wrong in the inner one is named with the step of the outer one."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nonfinite import caught, halve

import treescan

pytestmark = pytest.mark.quick

N, T, B = 4, 3, 2
OUTER = ("scan", "fold", "accumulate", "fori", "reverse")
INNER = ("fold", "rows", "layers", "while")
WAYS = ("eager", "jit", "grad", "vmap", "disable_jit")


def inside(inner: str, check: Any, h: Any, flags: Any) -> Any:
    """A loop of T steps over flags [T, B], from h [B]."""
    if inner == "rows":
        return treescan.fold(halve, h, flags, lengths=jnp.full(B, T), check_finite=check)
    if inner == "layers":
        return treescan.fold_layers(lambda flag, h: halve(h, flag), h, flags, check_finite=check)
    if inner == "while":
        ended = treescan.while_scan(
            lambda h: jnp.all(h < 99), lambda h, x: (halve(h, x), None), h, flags, check_finite=check
        )
        return ended.carry
    return treescan.fold(halve, h, flags, check_finite=check)


def run(outer: str, inner: str, checks: tuple[Any, Any], flags: Any, h: Any) -> Any:
    """Loops over flags [N, T, B]."""
    step = functools.partial(inside, inner, checks[1])
    h = jnp.ones(B) * h
    options: dict[str, Any] = {"check_finite": checks[0]}
    if outer == "fori":
        return treescan.fori(0, N, lambda i, h: step(h, flags[i]), h, **options).sum()
    if outer == "scan":
        return treescan.scan(lambda h, x: (step(h, x), h), h, flags, key=None, **options)[0].sum()
    if outer == "reverse":
        return treescan.fold(step, h, flags, reverse=True, in_axes=1, **options).sum()
    return getattr(treescan, outer)(step, h, flags, **options).sum()


def go(way: str, call: Any, flags: Any) -> Any:
    one = jnp.float32(1)
    if way == "disable_jit":
        with jax.disable_jit():
            return jax.grad(call, 1)(flags, one)
    if way == "vmap":
        return jax.vmap(jax.grad(call, 1), (None, 0))(flags, jnp.ones(2))
    gradient = jax.grad(call, 1)
    return (jax.jit(gradient) if way == "jit" else gradient)(flags, one)


def cases(count: int) -> list[Any]:
    draw = np.random.default_rng(21)
    found = []
    for i in range(count):
        outer, inner = OUTER[i % len(OUTER)], INNER[(i // len(OUTER)) % len(INNER)]
        way = WAYS[(i // 3) % len(WAYS)]
        at = tuple(int(draw.integers(size)) for size in (N, T, B))
        marks = [] if i == 1 else pytest.mark.slow
        found.append(pytest.param(outer, inner, way, at, id=f"{i}-{outer}-{inner}-{way}", marks=marks))
    return found


@pytest.mark.parametrize(("outer", "inner", "way", "at"), cases(40))
def test_both_steps_are_named(outer: str, inner: str, way: str, at: tuple[int, int, int]) -> None:
    """A cotangent, of which the outer loop is asked for either thing."""
    flags = jnp.ones((N, T, B)).at[at].set(jnp.nan)
    flags = jnp.moveaxis(flags, 0, 1) if outer == "reverse" else flags
    checks = (True, "backward") if at[0] % 2 else ("backward", "backward")
    text = caught(lambda: go(way, functools.partial(run, outer, inner, checks), flags))
    record = treescan.last_nonfinite()
    assert record is not None and record.backward
    assert (record.step, record.rows) == (at[1], (at[2],))
    (within,) = record.within
    assert (within.step, within.steps) == (at[0], N)
    verb = {"reverse": "fold"}.get(outer, outer)
    assert f"within step {at[0]} of {N} of `{verb}` over" in text
    unit, most = "layer" if inner == "layers" else "step", "at most " if inner == "while" else ""
    assert f"became NaN in {unit} {at[1]} of {most}{T} (row {at[2]}), within step" in text


@pytest.mark.parametrize("keyed", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("way", ["eager", pytest.param("disable_jit", marks=pytest.mark.slow)])
def test_both_steps_are_named_of_a_carry(way: str, *, keyed: bool) -> None:
    def inner(h: Any, x: Any) -> Any:
        return jnp.sqrt(h * x)

    def outer(h: Any, x: Any, key: Any = None) -> Any:
        assert (key is not None) == keyed
        return treescan.fold(lambda h, x: (inner(h[0], x), h[1]), (h, x), x, check_finite=True)[0]

    def outermost(h: Any, xs: Any) -> Any:
        options = {"key": jax.random.key(0)} if keyed else {}
        return treescan.fold(outer if keyed else lambda h, x: outer(h, x), h, xs, check_finite=True, **options)

    xs = jnp.ones((2, 4, 5)).at[1, 3, 2].set(-1.0)
    with jax.disable_jit(way == "disable_jit"):
        text = caught(lambda: treescan.fold(outermost, jnp.float32(1), xs, check_finite=True))
    assert "`h[0]` became NaN in step 2 of 5, within step 3 of 4 of `fold` over" in text
    assert "within step 1 of 2 of `fold` over `outermost`" in text and "first in `sqrt` at" in text
    record = treescan.last_nonfinite()
    assert record is not None and [(each.step, each.steps) for each in record.within] == [(3, 4), (1, 2)]
    np.testing.assert_allclose(record.x, -1)


@pytest.mark.parametrize("check", [True, "backward"])
def test_a_compiled_function_with_a_loop_serves_several_outer_loops(check: Any) -> None:
    """JAX keeps its trace, which may hold no position of the step that called it first."""

    @jax.jit
    def inner(h: Any) -> Any:
        return treescan.fold(lambda h, x: jnp.sqrt(h + x), h, jnp.ones(3), check_finite=check)

    def outer(h: Any, steps: int, check: Any) -> Any:
        return treescan.fold(lambda h, x: inner(h) + x, h, jnp.arange(float(steps)), check_finite=check)

    for steps in (4, 5):
        for derive in (lambda f: f, jax.grad, jax.jit):
            got = derive(functools.partial(outer, steps=steps, check=check))(jnp.float32(2))
            expected = derive(functools.partial(outer, steps=steps, check=False))(jnp.float32(2))
            np.testing.assert_allclose(got, expected, rtol=1e-6)
    text = caught(lambda: outer(jnp.float32(-9), 4, True))
    assert "`h` became NaN" in text and "within" not in text


def test_without_a_check_of_its_own_the_inner_loop_is_an_operation() -> None:
    xs = jnp.ones((4, 5)).at[3, 2].set(-1.0)
    call = functools.partial(treescan.fold, lambda h, x: treescan.fold(lambda h, x: jnp.sqrt(h * x), h, x))
    text = caught(lambda: call(jnp.float32(1), xs, check_finite=True))
    assert "`h` became NaN in step 3 of 4, first in `scan` at" in text and "within" not in text


def test_results_are_those_without_it() -> None:
    flags = 1 + jnp.arange(N * T * B, dtype=jnp.float32).reshape(N, T, B) / 9
    off, on = (
        jax.jit(jax.grad(functools.partial(run, "scan", "fold", checks), 1))(flags, jnp.float32(0.7))
        for checks in ((False, False), (True, "backward"))
    )
    np.testing.assert_allclose(off, on, rtol=1e-6)
