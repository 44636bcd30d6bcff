"""`check_finite`: a NaN that is planted is named, and nothing else is."""

import functools
import gc
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nonfinite import caught

import treescan
from treescan import carries

pytestmark = pytest.mark.quick

T, B = 7, 3
LEAVES = ("cell", "norm")
VERBS = ("scan", "fold", "accumulate", "fori")
WAYS = ("eager", "jit", "grad", "vmap", "disable_jit", "reverse", "remat", "unroll")


def spoil(leaf: Any, hit: Any) -> Any:
    return jnp.log(jnp.where(hit, -1.0, 2.0)) + leaf * 0.5


def burst(leaf: Any, hit: Any) -> Any:
    return leaf * 0.5 / jnp.where(hit, 0.0, 2.0)


def plant(kind: str, leaf: str, flag: Any, h: Any) -> Any:
    spoiled = spoil(h[leaf], flag) if kind == "NaN" else burst(h[leaf] + 1.0, flag)
    return {**h, "count": h["count"] + 1, "other": h["other"] * 0.5, leaf: spoiled}


def run(verb: str, leaf: str, kind: str, flags: Any, h: Any, **options: Any) -> Any:
    """A loop in which `flags`, bool[T, B], say which rows of a leaf go wrong."""
    if verb == "fori":
        return treescan.fori(0, T, lambda i, h: plant(kind, leaf, flags[i], h), h, check_finite=True, **options)
    if verb == "scan":
        body = lambda h, flag: (plant(kind, leaf, flag, h), None)  # noqa: E731
        return treescan.scan(body, h, flags, check_finite=True, **options)[0]
    return getattr(treescan, verb)(lambda h, flag: plant(kind, leaf, flag, h), h, flags, check_finite=True, **options)


def start() -> dict[str, Any]:
    return {"cell": jnp.ones(B), "count": jnp.int32(0), "norm": jnp.ones(B), "other": jnp.ones(2)}


def go(way: str, call: Any, flags: Any) -> Any:
    options = {"reverse": {"reverse": True}, "remat": {"remat": "nested"}, "unroll": {"unroll": 2}}.get(way, {})
    call = functools.partial(call, h=start(), **options)
    if way == "disable_jit":
        with jax.disable_jit():
            return call(flags)
    if way == "jit":
        return jax.jit(call)(flags)
    if way == "vmap":
        return jax.vmap(call)(jnp.stack([flags, flags]))
    if way == "grad":
        return jax.grad(lambda w: call(flags, h=jax.tree.map(lambda a: a * w if a.ndim else a, start()))["cell"].sum())(
            1.0
        )
    return call(flags)


def plantings(count: int) -> list[Any]:
    """Where a value goes wrong: every verb in every way, and all else by chance."""
    draw = np.random.default_rng(0)
    cases = []
    for i in range(count):
        verb, way = VERBS[i % len(VERBS)], WAYS[(i // len(VERBS)) % len(WAYS)]
        if (verb, way) in {("accumulate", "grad")}:
            way = "eager"
        rows = sorted(draw.choice(B, size=draw.integers(1, B + 1), replace=False).tolist())
        case = (verb, way, LEAVES[draw.integers(2)], ("NaN", "inf")[draw.integers(2)], int(draw.integers(T)), rows)
        everyday = i % 29 == 0
        cases.append(pytest.param(*case, id=f"{i}-{verb}-{way}", marks=[] if everyday else pytest.mark.slow))
    return cases


@pytest.mark.parametrize(("verb", "way", "leaf", "kind", "step", "rows"), plantings(200))
def test_a_planted_value_is_named(verb: str, way: str, leaf: str, kind: str, step: int, rows: list[int]) -> None:
    flags = jnp.zeros((T, B), bool).at[step, jnp.array(rows)].set(True)
    text = caught(lambda: go(way, functools.partial(run, verb, leaf, kind), flags))
    named = f"row{'s' * (len(rows) > 1)} {' and '.join(', '.join(map(str, rows)).rsplit(', ', 1))}"
    operation, line = {"NaN": ("log", spoil), "inf": ("div", burst)}[kind]
    place = f"test_finite.py:{line.__code__.co_firstlineno + 1}"
    assert f"`{verb}` over `" in text
    assert f'`h["{leaf}"]` became {kind} in step {step} of {T} ({named}), first in `{operation}` at' in text
    assert f"{place}; the carry before it was finite." in text
    record = treescan.last_nonfinite()
    assert record is not None
    assert (record.path, record.kind, record.step, record.steps) == (f'h["{leaf}"]', kind, step, T)
    assert record.rows == tuple(rows) and record.operation == operation
    assert record.place is not None and record.place.endswith(place) and record.source is None
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(record.carry))
    again = plant(kind, leaf, flags[record.x] if verb == "fori" else record.x, record.carry)
    assert np.flatnonzero(~np.isfinite(again[leaf])).tolist() == rows
    assert int(record.carry["count"]) == (T - 1 - step if way == "reverse" else step)


def test_a_nan_of_x_is_no_operation() -> None:
    xs = {"a": jnp.ones(4), "b": jnp.array([1.0, 1.0, jnp.nan, 1.0])}
    with pytest.raises(treescan.NonFiniteError, match=r"`x\[\"b\"\]`"):
        treescan.fold(lambda h, x: h * x["a"] + x["b"], jnp.float32(1), xs, check_finite=True)
    record = treescan.last_nonfinite()
    assert record is not None
    assert (record.step, record.source, record.operation) == (2, 'x["b"]', None)


def test_a_nan_of_what_is_closed_over_is_no_operation() -> None:
    @jax.jit
    def run(w: Any) -> Any:
        return treescan.fold(lambda h, x: h * w + x, jnp.float32(1), jnp.ones(3), check_finite=True)

    assert "from `a constant of the body`" in caught(lambda: run(jnp.nan))


def test_x_is_that_of_the_axes() -> None:
    xs = (jnp.ones((2, 5)), jnp.array([1.0, -9.0]))
    with pytest.raises(treescan.NonFiniteError):
        treescan.fold(lambda h, x: jnp.log(h + x[0] * x[1]), jnp.ones(2), xs, in_axes=(1, None), check_finite=True)
    record = treescan.last_nonfinite()
    assert record is not None and record.step == 0 and record.rows == (1,)
    assert [leaf.shape for leaf in record.x] == [(2,), (2,)]


def test_a_carry_that_was_not_finite_is_not_called_so() -> None:
    init = (jnp.float32(1), jnp.float32(-jnp.inf))
    xs = jnp.array([1.0, -9.0])
    text = caught(lambda: treescan.fold(lambda h, x: (jnp.log(h[0] + x), h[1] - x), init, xs, check_finite=True))
    assert "in step 1 of 2, first in `log`" in text and "the carry before it" not in text


@pytest.mark.parametrize("disabled", [False, True])
def test_a_leaf_that_no_step_changes_is_never_blamed(disabled: bool) -> None:
    def step(h: Any, x: Any) -> Any:
        return {"a": h["a"], "b": jnp.log(h["b"] + x)}

    init = {"a": jnp.float32(jnp.nan), "b": jnp.float32(1)}
    with jax.disable_jit(disabled):
        text = caught(lambda: treescan.fold(step, init, jnp.array([2.0, 3.0, -50.0]), check_finite=True))
    assert '`h["b"]` became NaN in step 2 of 3, first in `log`' in text


def test_rows_that_became_infinite_are_not_called_nan() -> None:
    def step(h: Any, x: Any) -> Any:
        return jnp.array([jnp.exp(-x * 20), jnp.log(h[1] + x)])

    text = caught(lambda: treescan.fold(step, jnp.ones(2), jnp.array([2.0, -50.0]), check_finite=True))
    assert "became NaN in step 1 of 2 (row 1), first in `log`" in text


@pytest.mark.parametrize("again", [None, 0], ids=["finite the second time", "NaN too early the second time"])
@pytest.mark.parametrize("jitted", [False, True])
def test_steps_that_come_out_otherwise_the_second_time_are_not_explained(again: int | None, jitted: bool) -> None:
    seen: list[int] = []

    def value(x: Any) -> Any:
        seen.append(int(x))
        bad = seen[-1] == (1 if seen.count(seen[-1]) == 1 else again)
        return np.float32(np.nan if bad else 1)

    def step(h: Any, x: Any) -> Any:
        return h + jax.pure_callback(value, jax.ShapeDtypeStruct((), jnp.float32), x)

    run = lambda xs: treescan.fold(step, jnp.float32(1), xs, check_finite=True)  # noqa: E731
    text = caught(lambda: (jax.jit(run) if jitted else run)(jnp.arange(3.0)))
    assert "`h` became NaN or infinite in step 1 of 3. Run once more, the steps came out otherwise" in text
    record = treescan.last_nonfinite()
    assert record is not None and (record.kind, record.operation, record.rows) == (None, None, ())


def test_a_derivative_does_not_run_through_the_evidence() -> None:
    def sines(on: bool) -> int:
        def loss(w: Any) -> Any:
            return treescan.fold(lambda h, x: jnp.sin(h * w + x), jnp.float32(1), jnp.arange(4.0), check_finite=on)

        return str(jax.make_jaxpr(jax.grad(loss))(0.5)).count(" cos ")

    assert sines(True) == sines(False) > 0


def test_an_infinity_of_init_is_let_through() -> None:
    xs = jnp.arange(4.0)
    best = treescan.fold(jnp.maximum, jnp.float32(-jnp.inf), xs, check_finite=True)
    assert best == 3
    least = treescan.fold(lambda h, x: (h[0], h[1] + x), (jnp.float32(jnp.inf), jnp.float32(0)), xs, check_finite=True)
    assert least == (jnp.inf, 6)


@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_raised_where_all_is_finite(way: str) -> None:
    treescan.fold(lambda h, x: h, 1.0, jnp.ones(3), check_finite=True)
    before = treescan.last_nonfinite()
    flags = jnp.zeros((T, B), bool)
    jax.block_until_ready(go(way, functools.partial(run, "scan", "cell", "NaN"), flags))
    jax.effects_barrier()
    assert treescan.last_nonfinite() is before


@pytest.mark.parametrize("verb", VERBS)
def test_results_and_gradients_are_those_without_it(verb: str) -> None:
    def loss(w: Any, **options: Any) -> Any:
        init = (w, jnp.int32(0))
        if verb == "fori":
            h = treescan.fori(0, 5, lambda i, h: (jnp.sin(h[0] * w + jnp.float32(i)), h[1] + i), init, **options)
        else:
            body = lambda h, x: (jnp.sin(h[0] * w + x), h[1] + 1)  # noqa: E731
            given = (lambda h, x: (body(h, x), None)) if verb == "scan" else body
            h = getattr(treescan, verb)(given, init, jnp.arange(5.0), **options)
        return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(h) if jnp.issubdtype(leaf.dtype, jnp.floating))

    plain, checked = (jax.value_and_grad(functools.partial(loss, check_finite=on))(0.7) for on in (False, True))
    np.testing.assert_allclose(plain, checked, rtol=1e-6)


def test_nothing_keeps_the_body() -> None:
    def run() -> Any:
        w = jnp.ones(3)

        def step(h: Any, x: Any) -> Any:
            return h * w + x

        treescan.fold(step, jnp.ones(3), jnp.ones((2, 3)), check_finite=True)
        return weakref.ref(step)

    gone = run()
    gc.collect()
    assert gone() is None


def test_an_inner_loop_of_jax_is_one_operation() -> None:
    def step(h: Any, x: Any) -> Any:
        return jax.lax.fori_loop(0, 2, lambda i, h: jnp.log(h), h + x)

    assert "first in `scan`" in caught(lambda: treescan.fold(step, jnp.float32(1), jnp.ones(3), check_finite=True))


def test_off_is_the_same_program() -> None:
    def programs(**options: Any) -> str:
        return str(jax.make_jaxpr(lambda xs: treescan.scan(step, 0.0, xs, **options))(jnp.arange(3.0)))

    def step(h: Any, x: Any) -> Any:
        return h + x, h

    assert programs(check_finite=False) == programs()
    assert programs(check_finite=True) != programs()


def test_a_body_that_prints_prints_once(capsys: pytest.CaptureFixture[str]) -> None:
    def step(h: Any, x: Any) -> Any:
        jax.debug.print("seen {}", x)
        return jnp.log(x)

    with pytest.raises(treescan.NonFiniteError):
        treescan.fold(step, jnp.float32(0), jnp.array([1.0, -1.0]), check_finite=True)
    jax.effects_barrier()
    assert capsys.readouterr().out.split("\n")[:-1] == ["seen 1.0", "seen -1.0"]


def test_the_inner_loop_names_its_own_step() -> None:
    def outer(h: Any, x: Any) -> Any:
        return treescan.fold(lambda g, u: jnp.log(g + u), h, x, check_finite=True)

    xs = jnp.ones((3, 4)).at[1, 2].set(-9.0)
    assert "`g` became NaN in step 2 of 4" in caught(lambda: treescan.fold(outer, jnp.float32(1), xs))


def test_a_custom_carry_is_read() -> None:
    init = {"mean": carries.ema(jnp.zeros(2), 0.9)}
    xs = jnp.ones((4, 2)).at[2, 1].set(jnp.inf)
    text = caught(lambda: treescan.fold(lambda h, x: {"mean": x}, init, xs, check_finite=True))
    assert "in step 2 of 4 (row 1)" in text
    record = treescan.last_nonfinite()
    assert record is not None and record.carry["mean"].shape == (2,)


@pytest.mark.parametrize("way", ["eager", "jit"])
@pytest.mark.parametrize("check", [True, "backward"])
def test_keys_stay_keys_in_the_record(way: str, check: Any) -> None:
    def body(carry: Any, x: Any) -> Any:
        key, h = carry
        return (jax.random.split(key)[0], jnp.sqrt(h) - h), jax.random.uniform(x)

    def call(h: Any) -> Any:
        keys = jax.random.split(jax.random.key(1), T)
        return treescan.scan(body, (jax.random.key(0), h), keys, check_finite=check)[0][1]

    call = call if check is True else jax.grad(call)
    caught(lambda: (jax.jit(call) if way == "jit" else call)(jnp.float32(2)))
    record = treescan.last_nonfinite()
    assert record is not None
    for key in (record.carry[0], record.x):
        assert jnp.issubdtype(key.dtype, jax.dtypes.prng_key) and key.shape == ()
    assert (
        jax.random.key_data(record.x).tolist()
        == jax.random.key_data(jax.random.split(jax.random.key(1), T)[record.step]).tolist()
    )
