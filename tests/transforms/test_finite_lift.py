"""`check_finite` of `lift`: a NaN that is planted in the carry, a collection or a cotangent is named."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxprs import equations, shapes
from nonfinite import caught, gradient, halve

import treescan
from treescan import In

pytestmark = pytest.mark.quick

T, B = 6, 3
PLACES = ("carry", "collection")
WAYS = ("eager", "jit", "vmap", "grad", "disable_jit")
BACKWARD = ("grad", "jit", "grad of jit", "vmap of grad", "disable_jit")
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "reverse": {"reverse": True},
    "remat": {"remat": "nested"},
    "last": {"save": "last"},
    "unroll": {"unroll": 2},
    "axis": {"variable_axes": {"flags": In(1)}},
    "whole": {"in_axes": (0, None)},
}
PATHS = {"carry": 'carry["h"]', "collection": 'variables["sums"]["s"]'}


def forwards(leaf: Any, flag: Any) -> Any:
    return jnp.log(jnp.where(flag, -1.0, 2.0)) + leaf * 0.5


def backwards(leaf: Any, bad: Any) -> Any:
    return halve(leaf, bad) + 1.0


LINES = {forwards: forwards.__code__.co_firstlineno + 1}


def step(place: str, rule: Any, variables: Any, rngs: Any, carry: Any, x: Any, scale: Any) -> Any:
    h, sums, flag = carry["h"], variables["sums"]["s"], variables["flags"]["f"]
    h, sums = (rule(h, flag), sums * 0.5) if place == "carry" else (h * 0.5, rule(sums, flag))
    noise = jax.random.uniform(rngs["noise"], (B,))
    out = {**carry, "h": h * variables["params"]["w"] * scale + 0 * noise + 0 * x, "count": carry["count"] + 1}
    return (out, {"h": h, "w": variables["params"]["w"]}), {
        "sums": {"s": sums},
        "made": {"w": 2 * variables["params"]["w"]},
    }


def run(place: str, rule: Any, flags: Any, check: Any, scale: Any = 1.0, **options: Any) -> Any:
    axes = options.pop("variable_axes", {"flags": In(0)})
    split = {"noise": True}

    def fn(variables: Any, rngs: Any, carry: Any, x: Any, scale: Any) -> Any:
        return step(place, rule, variables, rngs, carry, x, scale)

    loop = treescan.lift(
        fn, variable_axes=axes, variable_broadcast=["params", "made"],
        variable_carry="sums", split_rngs=split, check_finite=check,
        **{"in_axes": (0, None), "out_axes": {"h": 0, "w": 0}, **options},
    )  # fmt: skip
    flags = jnp.moveaxis(flags, 0, axes["flags"].axis)
    variables = {"params": {"w": jnp.ones(B) * scale}, "sums": {"s": jnp.ones(B) * scale}, "flags": {"f": flags}}
    carry = {"h": jnp.ones(B) * scale, "count": jnp.int32(0), "kept": jnp.ones(2)}
    return loop(variables, {"noise": jax.random.key(0)}, carry, jnp.ones((T, B)), 1.0)


def loss(result: Any) -> Any:
    (carry, _), updates = result
    return (carry["h"] ** 2).sum() + (updates["sums"]["s"] ** 2).sum()


def go(way: str, call: Any, flags: Any) -> Any:
    if way == "disable_jit":
        with jax.disable_jit():
            return call(flags)
    if way == "vmap":
        return jax.vmap(call)(jnp.stack([flags, flags]))
    if way == "grad":
        return jax.grad(lambda scale: loss(call(flags, scale=scale)))(jnp.float32(1))
    return (jax.jit(call) if way == "jit" else call)(flags)


def plantings(count: int, seed: int, ways: tuple[str, ...]) -> list[Any]:
    draw, cases, names = np.random.default_rng(seed), [], list(OPTIONS)
    for i in range(count):
        way, options = ways[i % len(ways)], names[(i // len(ways)) % len(names)]
        rows = sorted(draw.choice(B, size=draw.integers(1, B + 1), replace=False).tolist())
        case = way, options, PLACES[draw.integers(2)], int(draw.integers(T)), rows
        marks = [] if i in (0, 13) else pytest.mark.slow
        cases.append(pytest.param(*case, id=f"{i}-{way}-{options}", marks=marks))
    return cases


def named(rows: list[int]) -> str:
    return f"row{'s' * (len(rows) > 1)} {' and '.join(', '.join(map(str, rows)).rsplit(', ', 1))}"


@pytest.mark.parametrize(("way", "options", "place", "at", "rows"), plantings(70, 3, WAYS))
def test_a_planted_value_is_named(way: str, options: str, place: str, at: int, rows: list[int]) -> None:
    flags = jnp.zeros((T, B), bool).at[at, jnp.array(rows)].set(True)
    text = caught(lambda: go(way, functools.partial(run, place, forwards, check=True, **OPTIONS[options]), flags))
    assert "`lift` over `fn` (" in text
    line = f"test_finite_lift.py:{LINES[forwards]}; the carry before it was finite."
    assert (
        f"`{PATHS[place]}` became NaN in step {at} of {T} ({named(rows)}), first in `log` at" in text and line in text
    )
    record = treescan.last_nonfinite()
    assert record is not None and (record.path, record.step, record.rows) == (PATHS[place], at, tuple(rows))
    assert int(record.carry.carry["count"]) == (T - 1 - at if options == "reverse" else at)
    # The function can be called on what the record holds: the same rows go wrong.
    variables = {"params": {"w": jnp.ones(B)}, **record.carry.variables, **record.x.variables}
    (carry, _), updates = step(place, forwards, variables, record.x.rngs, record.carry.carry, *record.x.args)
    again = carry["h"] if place == "carry" else updates["sums"]["s"]
    assert np.flatnonzero(np.isnan(again)).tolist() == rows


@pytest.mark.parametrize(("way", "options", "place", "at", "rows"), plantings(50, 4, BACKWARD))
def test_a_planted_cotangent_is_named(way: str, options: str, place: str, at: int, rows: list[int]) -> None:
    bad = jnp.ones((T, B)).at[at, jnp.array(rows)].set(jnp.nan)

    def call(bad: Any, scale: Any) -> Any:
        return loss(run(place, backwards, bad, "backward", scale, **OPTIONS[options]))

    text = caught(lambda: gradient(way, call, bad))
    assert f"the cotangent of `{PATHS[place]}` became NaN in step {at} of {T} ({named(rows)})" in text
    record = treescan.last_nonfinite()
    assert record is not None and record.backward
    assert (record.path, record.step, record.rows) == (PATHS[place], at, tuple(rows))
    np.testing.assert_array_equal(record.x.variables["flags"]["f"], bad[at])


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("check", [True, "backward"])
def test_results_and_gradients_are_those_without_it(options: str, check: Any) -> None:
    flags = jnp.zeros((T, B), bool) if check is True else jnp.ones((T, B))
    rule = forwards if check is True else backwards

    def of(check: Any) -> Any:
        def call(scale: Any) -> Any:
            result = run("carry", rule, flags, check, scale, **OPTIONS[options])
            return loss(result), result

        return jax.jit(jax.value_and_grad(call, has_aux=True))(jnp.float32(0.9))

    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), of(False), of(check))


def test_off_is_the_same_program() -> None:
    flags = jnp.zeros((T, B), bool)

    def program(check: Any, **more: Any) -> Any:
        return jax.make_jaxpr(functools.partial(run, "carry", forwards, check=check, **more))(flags)

    off = program(False)
    assert str(off) == str(program(False, progress=None)) == str(program(False, progress=False))
    assert "callback" not in str(off)
    assert "callback" in str(program(True)) and "callback" in str(program(False, progress=True))
    (loop,) = equations(off.jaxpr, "scan")
    assert len(shapes(loop)[1]) == 6  # carried: h, count and s; scanned: flags, keys and x


def test_values_that_all_steps_share_are_still_computed_once() -> None:
    (_, ys), updates = run("carry", forwards, jnp.zeros((T, B), bool), True, out_axes={"h": 0, "w": None})
    np.testing.assert_array_equal(updates["made"]["w"], 2 * jnp.ones(B))
    assert ys["w"].shape == (B,) and ys["h"].shape == (T, B)


def test_a_bar_of_lift(capsys: pytest.CaptureFixture[str]) -> None:
    bar = treescan.Progress("sums", show=lambda carry: {"h": carry["h"].sum()}, meter=treescan.Text(), updates=T)
    run("carry", forwards, jnp.zeros((T, B), bool), False, progress=bar)
    jax.effects_barrier()
    said = capsys.readouterr().err
    assert "sums: 0%, 0/6" in said and "sums: 100%, 6/6" in said and "h=" in said


def test_a_bar_of_the_gradient_of_lift(capsys: pytest.CaptureFixture[str]) -> None:
    bar = treescan.Progress("sums", backward=True, meter=treescan.Text(), updates=T)
    jax.grad(lambda scale: loss(run("carry", forwards, jnp.zeros((T, B), bool), False, scale, progress=bar)))(0.9)
    jax.effects_barrier()
    assert "sums (backward): 100%, 6/6" in capsys.readouterr().err


def test_forward_mode_is_refused_in_these_words() -> None:
    with pytest.raises(treescan.ArgumentError, match=r'`check_finite="backward"` looks at cotangents'):
        jax.jvp(lambda scale: loss(run("carry", backwards, jnp.ones((T, B)), "backward", scale)), (1.0,), (1.0,))
