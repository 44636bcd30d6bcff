"""`check_finite`, in particular: records, rows, loops within loops. `test_finite.py` has all loops."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bars import bars, progress
from nonfinite import caught, go, named
from thin import slow

import treescan
from treescan import carries

pytestmark = pytest.mark.quick

# --- what the record holds --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{}, {"lengths": jnp.array([4, 2]), "row_axes": {"x": (0, 0)}}], ids=["steps", "rows"]
)
def test_what_is_given_whole_is_in_the_record(options: Any) -> None:
    xs = (jnp.ones((2, 4)), jnp.array([1.0, jnp.nan]))
    verb: Any = treescan.mask_scan if options else treescan.scan
    options |= {"time_axis": {"xs": (1, None)}} if options else {"in_axes": (1, None)}
    call = functools.partial(verb, lambda h, x: (h + x[0] * x[1], None), jnp.ones(2), xs)
    text, record = named(lambda: call(check_finite=True, **options))
    assert "in step 0 of 4 (row 1), which got it from `x[1]`" in text
    assert [leaf.shape for leaf in record.x] == [(2,), (2,)]
    assert (record.source, record.operation) == ("x[1]", None)


def test_a_leaf_that_no_step_changes_is_never_blamed() -> None:
    def step(h: Any, x: Any) -> Any:
        return {"a": h["a"], "b": jnp.log(h["b"] + x)}

    init = {"a": jnp.float32(jnp.nan), "b": jnp.float32(1)}
    text = caught(lambda: treescan.fold(step, init, jnp.array([2.0, 3.0, -50.0]), check_finite=True))
    assert '`h["b"]` became NaN in step 2 of 3, first in `log`' in text


@pytest.mark.parametrize("rows", [False, True])
def test_a_custom_carry_is_read(rows: bool) -> None:
    init = {"mean": carries.ema(jnp.zeros((2, 1)), 0.9)}
    xs = jnp.ones((4, 2, 1)).at[2, 1].set(jnp.inf).at[3, 0].set(jnp.nan)
    options = {"lengths": jnp.array([3, 4])} if rows else {}
    text, record = named(lambda: treescan.fold(lambda h, x: {"mean": x}, init, xs, check_finite=True, **options))
    assert "in step 2 of 4 (row 1)" in text
    assert record.carry["mean"].shape == (2, 1)


def test_keys_stay_keys_in_the_record() -> None:
    def body(carry: Any, x: Any) -> Any:
        key, h = carry
        return (jax.random.split(key)[0], jnp.sqrt(h) - h), jax.random.uniform(x)

    def call(h: Any) -> Any:
        keys = jax.random.split(jax.random.key(1), 7)
        return treescan.scan(body, (jax.random.key(0), h), keys, check_finite=True)[0][1]

    _, record = named(lambda: jax.jit(call)(jnp.float32(2)))
    for key in (record.carry[0], record.x):
        assert jnp.issubdtype(key.dtype, jax.dtypes.prng_key) and key.shape == ()
    assert (
        jax.random.key_data(record.x).tolist()
        == jax.random.key_data(jax.random.split(jax.random.key(1), 7)[record.step]).tolist()
    )


def test_a_parameter_that_is_nan_is_named() -> None:
    w = jnp.ones((5, 3)).at[3, 1].set(jnp.nan)
    text = caught(
        lambda: treescan.scan_layers(lambda layer, x: (x + layer["w"], x), jnp.ones(3), {"w": w}, check_finite=True)
    )
    assert '`x` became NaN in layer 3 of 5 (row 1), which got it from `layer["w"]`' in text


# --- the program ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("again", "jitted"), [(None, True), (0, False)])  # finite the second time, or NaN too early
def test_steps_that_come_out_otherwise_the_second_time_are_not_explained(again: int | None, jitted: bool) -> None:
    seen: list[int] = []

    def value(x: Any) -> Any:
        seen.append(int(x))
        bad = seen[-1] == (1 if seen.count(seen[-1]) == 1 else again)
        return np.float32(np.nan if bad else 1)

    def step(h: Any, x: Any) -> Any:
        return h + jax.pure_callback(value, jax.ShapeDtypeStruct((), jnp.float32), x)

    run = lambda xs: treescan.fold(step, jnp.float32(1), xs, check_finite=True)  # noqa: E731
    text, record = named(lambda: (jax.jit(run) if jitted else run)(jnp.arange(3.0)))
    assert "`h` became NaN or infinite in step 1 of 3. Running the steps once more did not repeat it" in text
    assert (record.kind, record.operation, record.rows) == (None, None, ())


def test_leaves_of_one_type_are_reduced_together() -> None:
    def run(h: Any) -> Any:
        return treescan.fold(lambda h, x: jax.tree.map(jnp.tanh, h), h, jnp.arange(4.0), check_finite=True)

    def step_of(h: Any) -> str:
        return str(next(each for each in jax.make_jaxpr(run)(h).eqns if each.primitive.name == "scan"))

    assert step_of([jnp.ones((2, 3))] * 5).count("reduce_or") == 1
    assert step_of([jnp.ones((2, 3)), jnp.ones(3), jnp.ones((2, 3))]).count("reduce_or") == 2


def test_a_derivative_does_not_run_through_the_evidence() -> None:
    def sines(on: bool) -> int:
        def loss(w: Any) -> Any:
            return treescan.fold(lambda h, x: jnp.sin(h * w + x), jnp.float32(1), jnp.arange(4.0), check_finite=on)

        return str(jax.make_jaxpr(jax.grad(loss))(0.5)).count(" cos ")

    assert sines(True) == sines(False) > 0


def test_a_body_that_prints_prints_once(capsys: pytest.CaptureFixture[str]) -> None:
    def step(h: Any, x: Any) -> Any:
        jax.debug.print("seen {}", x)
        return jnp.log(x)

    with pytest.raises(treescan.errors.NonFiniteError):
        treescan.fold(step, jnp.float32(0), jnp.array([1.0, -1.0]), check_finite=True)
    jax.effects_barrier()
    assert capsys.readouterr().out.split("\n")[:-1] == ["seen 1.0", "seen -1.0"]


# --- what is given whole ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_eager", [False, True])
def test_an_array_that_lift_gives_whole(is_eager: bool) -> None:
    """A value that all steps share is computed before the loop, and leads to no other name and no other x."""

    def fn(variables: Any, rngs: Any, carry: Any, x: Any, whole: Any) -> Any:
        made = jax.random.uniform(jax.random.key(0), (2,))
        return (carry * x * whole["w"] + made.sum(), made), {}

    run = treescan.lifting.lift(fn, in_axes=(0, None), out_axes=None, check_finite=True)
    whole = {"w": jnp.float32(jnp.nan)}
    with jax.disable_jit(is_eager):
        text, record = named(
            lambda: jax.grad(lambda carry: run({}, {}, carry, jnp.ones(3), whole)[0][0])(jnp.float32(2))
        )
    assert 'which got it from `args[1]["w"]`' in text
    assert record.x.args[0] == 1 and np.isnan(record.x.args[1]["w"])


def test_an_array_given_whole_beside_a_key_that_is_checked_for_reuse() -> None:
    def body(h: Any, x: Any) -> Any:
        key, scale = x
        return h * scale * jax.random.uniform(key), None

    def run(h: Any) -> Any:
        xs = (jax.random.split(jax.random.key(0), 3), jnp.float32(jnp.nan))
        return treescan.scan(body, h, xs, in_axes=(0, None), check_finite=True)[0]

    with jax.debug_key_reuse(True):
        assert "which got it from `x[1]`" in caught(lambda: jax.grad(run)(jnp.float32(1)))


# --- rows -------------------------------------------------------------------------------------------------------------


def test_a_row_without_a_step_may_hold_nan() -> None:
    h, lengths = jnp.array([1.0, jnp.nan, 1.0]), jnp.array([9, 0, 3])
    call = functools.partial(treescan.fold, lambda h, x: jnp.log(x) + h * 0.5, h, lengths=lengths, check_finite=True)
    call(jnp.ones((9, 3)))
    text = caught(lambda: call(jnp.ones((9, 3)).at[5, 0].set(-1.0)))
    assert "in step 5 of 9 (row 0), first in `log`" in text and "the carry before it was finite" in text


def test_what_a_padded_row_computes_is_not_blamed() -> None:
    """Row 1 is shown its own first pair where it is padded, and that pair goes wrong."""

    def body(h: Any, x: Any) -> Any:
        bad, worse = x
        other = jnp.sqrt(jnp.where(worse, -1.0, 1.0))
        return h * 0.5 + other + jnp.log(jnp.where(bad, -1.0, 1.0)), None

    xs = (jnp.zeros((5, 2), bool).at[1, 0].set(True), jnp.zeros((5, 2), bool).at[4, 1].set(True))
    mask = jnp.ones((5, 2), bool).at[:4, 1].set(False)
    text = caught(lambda: treescan.mask_scan(body, jnp.ones(2), xs, mask=mask, check_finite=True))
    assert "in step 1 of 5 (row 0), first in `log`" in text


def test_rows_in_several_axes_and_a_leaf_that_all_share() -> None:
    def body(h: Any, x: Any) -> Any:
        total = h["total"] + jnp.log(x["scale"])
        return {"rows": jnp.log(h["rows"] + x["u"]), "total": total}, None

    h = {"rows": jnp.ones((2, 3)), "total": jnp.float32(0)}
    xs = {"u": jnp.ones((4, 2, 3)).at[2, 1, 0].set(-50).at[2, 0, 2].set(-50), "scale": jnp.ones(4)}
    options: Any = {
        "lengths": jnp.array([[4, 4, 4], [3, 4, 4]]),
        "row_axes": {"carry": {"rows": 0, "total": None}, "x": {"u": 0, "scale": None}},
        "check_finite": True,
    }
    text = caught(lambda: treescan.mask_scan(body, h, xs, **options))
    assert '`h["rows"]` became NaN in step 2 of 4 (rows (0, 2) and (1, 0)), first in `log`' in text
    xs = {"u": jnp.ones((4, 2, 3)), "scale": jnp.ones(4).at[3].set(-1)}
    assert '`h["total"]` became NaN in step 3 of 4, first in `log`' in caught(
        lambda: treescan.mask_scan(body, h, xs, **options)
    )


def test_a_single_row() -> None:
    def body(h: Any, x: Any) -> Any:
        return jnp.log(h + x), h

    xs = jnp.ones(5).at[3].set(-9).at[4].set(jnp.nan)
    call = functools.partial(treescan.mask_scan, body, jnp.float32(1), xs, check_finite=True)
    assert "in step 3 of 5, first in `log`" in caught(lambda: call(lengths=jnp.int32(4)))
    call(lengths=jnp.int32(3))


@pytest.mark.parametrize(("reverse", "inits"), [(True, True), *slow((False, False))])
def test_packed_sequences(reverse: bool, inits: bool) -> None:
    sequences = [np.ones(3, np.float32), np.array([1, 1, -9, 1], np.float32), np.ones(2, np.float32)]
    packed = treescan.pack(sequences, rows=2, **({"init": [np.float32(1)] * 3} if inits else {}))

    def body(h: Any, x: Any) -> Any:
        return jnp.log(h * 0 + jnp.where(x == 0, 0, x)), None

    text, record = named(
        lambda: treescan.mask_scan(body, jnp.ones(2), packed, reverse=reverse, save="last", check_finite=True)
    )
    (row,) = record.rows
    assert packed.data[record.step, row] == -9 and "first in `log`" in text


def test_a_batch_without_rows_has_nothing_to_look_at():
    h, xs = jnp.zeros((0, 3)), jnp.ones((4, 0, 3))
    step = lambda h, x: (h + x, h)  # noqa: E731
    run = lambda h: treescan.mask_scan(step, h, xs, lengths=jnp.zeros(0, int), check_finite=True)  # noqa: E731
    for carry, ys in (
        run(h),
        jax.jit(run)(h),
        treescan.while_scan(lambda h: h[:, 0] < 1, step, h, xs, check_finite=True)[:2],
    ):
        assert (carry.shape, ys.shape) == (h.shape, xs.shape)
    assert jax.grad(lambda h: run(h)[0].sum())(h).shape == h.shape


# --- loops within loops -----------------------------------------------------------------------------------------------


N, T, B = 4, 3, 2


def mark(h: Any, flag: Any) -> Any:
    return h * 0.5 + jnp.log(flag)


INNER: dict[str, Any] = {  # loops of T steps over flags [T, B], from h [B]
    "fold": lambda h, flags, **o: treescan.fold(mark, h, flags, **o),
    "rows": lambda h, flags, **o: treescan.fold(mark, h, flags, lengths=jnp.full(B, T), **o),
    "layers": lambda h, flags, **o: treescan.fold_layers(lambda flag, h: mark(h, flag), h, flags, **o),
    "while": lambda h, flags, **o: (
        treescan.while_scan(lambda h: jnp.all(h < 99), lambda h, x: (mark(h, x), None), h, flags, **o).carry
    ),
}
OUTER: dict[str, Any] = {  # loops of N steps over flags [N, T, B]
    "fold": lambda step, h, flags, **o: treescan.fold(step, h, flags, **o),
    "scan": lambda step, h, flags, **o: treescan.scan(lambda h, x: (step(h, x), h), h, flags, **o)[0],
    "fori": lambda step, h, flags, **o: treescan.fori(0, N, lambda i, h: step(h, flags[i]), h, **o),
    "reverse": lambda step, h, flags, **o: treescan.fold(step, h, flags, reverse=True, **o),
}
NESTED = [
    ("fold", "fold", "jit", (1, 2, 1)),
    *slow(("scan", "layers", "vmap", (2, 0, 0)), ("fori", "while", "eager", (0, 2, 1))),
    *slow(("reverse", "rows", "disable_jit", (1, 1, 1))),
]


@pytest.mark.parametrize(("outer", "inner", "way", "at"), NESTED)
def test_both_steps_are_named(outer: str, inner: str, way: str, at: tuple[int, int, int]) -> None:
    def total(flags: Any, h: Any) -> Any:
        step = functools.partial(INNER[inner], check_finite=True)
        return OUTER[outer](step, jnp.ones(B) * h, flags, check_finite=True).sum()

    text, record = named(lambda: go(way, total, jnp.ones((N, T, B)).at[at].set(-1.0)))
    assert (record.step, record.rows) == (at[1], (at[2],))
    assert [(within.step, within.steps) for within in record.within] == [(at[0], N)]
    assert f"within step {at[0]} of {N} of `{'fold' if outer == 'reverse' else outer}` over" in text
    unit, most = "layer" if inner == "layers" else "step", "at most " if inner == "while" else ""
    assert f"became NaN in {unit} {at[1]} of {most}{T} (row {at[2]}), within step" in text


@pytest.mark.parametrize("keyed", [False, *slow((True,))])
def test_both_steps_are_named_of_a_carry(keyed: bool) -> None:
    def inner(h: Any, x: Any) -> Any:
        return jnp.sqrt(h * x)

    def outer(h: Any, x: Any, key: Any = None) -> Any:
        assert (key is not None) == keyed
        return treescan.fold(lambda h, x: (inner(h[0], x), h[1]), (h, x), x, check_finite=True)[0]

    def outermost(h: Any, xs: Any) -> Any:
        options = {"key": jax.random.key(0)} if keyed else {}
        return treescan.fold(outer if keyed else lambda h, x: outer(h, x), h, xs, check_finite=True, **options)

    xs = jnp.ones((2, 4, 5)).at[1, 3, 2].set(-1.0)
    with jax.disable_jit(keyed):
        text, record = named(lambda: treescan.fold(outermost, jnp.float32(1), xs, check_finite=True))
    assert "`h[0]` became NaN in step 2 of 5, within step 3 of 4 of `fold` over" in text
    assert "within step 1 of 2 of `fold` over `outermost`" in text and "first in `sqrt` at" in text
    assert [(each.step, each.steps) for each in record.within] == [(3, 4), (1, 2)]
    np.testing.assert_allclose(record.x, -1)


@pytest.mark.slow
def test_a_compiled_function_with_a_loop_serves_several_outer_loops() -> None:
    """JAX keeps its trace, which may hold no position of the step that called it first."""

    @jax.jit
    def inner(h: Any) -> Any:
        return treescan.fold(lambda h, x: jnp.sqrt(h + x), h, jnp.ones(3), check_finite=True)

    def outer(h: Any, steps: int, check: Any) -> Any:
        return treescan.fold(lambda h, x: inner(h) + x, h, jnp.arange(float(steps)), check_finite=check)

    for steps in (4, 5):
        for derive in (lambda f: f, jax.grad, jax.jit):
            got = derive(functools.partial(outer, steps=steps, check=True))(jnp.float32(2))
            expected = derive(functools.partial(outer, steps=steps, check=False))(jnp.float32(2))
            np.testing.assert_allclose(got, expected, rtol=1e-6)
    text = caught(lambda: outer(jnp.float32(-9), 4, True))
    assert "`h` became NaN" in text and "within" not in text


# --- lift -------------------------------------------------------------------------------------------------------------


def lifted(w: Any, **options: Any) -> Any:
    def fn(variables: Any, rngs: Any, carry: Any, x: Any) -> Any:
        made = {"w": 2 * variables["params"]["w"]}
        return (jnp.sin(carry * made["w"] + x), {"h": carry, "w": made["w"]}), {"made": made}

    run = treescan.lifting.lift(
        fn, variable_broadcast=["params", "made"], **{"out_axes": {"h": 0, "w": None}, **options}
    )
    return run({"params": {"w": w}}, {}, w, jnp.ones(6))


def test_values_that_all_steps_share_are_still_computed_once() -> None:
    (_, ys), updates = lifted(jnp.float32(0.5), check_finite=True)
    assert updates["made"]["w"] == 1 and ys["w"].shape == () and ys["h"].shape == (6,)


def test_a_bar_of_lift() -> None:
    show = progress(1, show=lambda carry: {"h": carry})
    ((total, steps),) = bars(lambda: lifted(jnp.float32(0.9), progress=show, check_finite=True))
    assert (total, steps[-1][0]) == (6, 6) and "h" in steps[-1][1]
