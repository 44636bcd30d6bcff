"""`check_finite` of rows of unequal length: what is planted in data is named, what is in padding is not."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nonfinite import ROW_OPTIONS, caught

import treescan
from treescan import carries

pytestmark = pytest.mark.quick

T, B = 9, 4
OPTIONS: dict[str, dict[str, Any]] = {
    **ROW_OPTIONS,
    "truncate": {"truncate": 2},
    "unroll": {"unroll": 2},
    "progress": {"progress": treescan.Progress(updates=2, meter=treescan.Text())},
    "time last": {"time_axis": 1},
}
WAYS = ("eager", "jit", "grad", "vmap", "disable_jit")


def spoil(leaf: Any, hit: Any) -> Any:
    return jnp.log(jnp.where(hit, -1.0, 2.0)) + leaf * 0.5


def burst(leaf: Any, hit: Any) -> Any:
    return leaf * 0.5 / jnp.where(hit, 0.0, 2.0)


def step(kind: str, leaf: str, h: Any, x: Any) -> Any:
    """The cell that is named goes wrong where its flag is set. `best` starts from an infinity, in each segment too."""
    flag, u = (each[None] if leaf == "wide" else each for each in x)
    new = (spoil(h[leaf], flag) if kind == "NaN" else burst(h[leaf] + 1.0, flag)) + u * 0
    u = x[1]
    best = jnp.maximum(h["best"], u)
    return {**h, "count": h["count"] + 1, "best": best, leaf: new}, new.sum(0) if leaf == "wide" else new


def start() -> dict[str, Any]:
    return {
        "best": jnp.full(B, -jnp.inf),
        "cell": jnp.ones(B),
        "count": jnp.zeros(B, jnp.int32),
        "weight": jnp.ones((B, 2)),
        "wide": jnp.ones((2, B)),
    }


AXES = {"best": 0, "cell": 0, "count": 0, "weight": 0, "wide": 1}


def draw_case(seed: int) -> Any:
    """Lengths, resets and what goes wrong where; all of it in padding too, in which everything is NaN."""
    draw = np.random.default_rng(seed)
    lengths = draw.integers(0, T + 1, B)
    lengths[draw.integers(B)] = T
    bad = draw.random((T, B)) < 0.04
    row = draw.choice(np.flatnonzero(lengths))
    bad[draw.integers(lengths[row]), row] = True
    valid = np.arange(T)[:, None] < lengths
    flags = jnp.asarray(bad | ~valid)
    u = jnp.where(jnp.asarray(valid), jnp.asarray(draw.normal(size=(T, B)), jnp.float32), jnp.nan)
    resets = jnp.asarray(draw.random((T, B)) < 0.2) if draw.random() < 0.5 else None
    return lengths, bad & valid, flags, u, resets


def expected(bad: Any, *, reverse: bool) -> tuple[int, list[int]]:
    """The first bad step in the order of the run, and its rows."""
    steps = np.flatnonzero(bad.any(axis=1))
    first = int(steps[-1] if reverse else steps[0])
    return first, np.flatnonzero(bad[first]).tolist()


def run(kind: str, leaf: str, options: Any, lengths: Any, resets: Any, flags: Any, u: Any, h: Any) -> Any:
    if "time_axis" in options:
        flags, u, resets = flags.T, u.T, None if resets is None else resets.T
    given = {} if resets is None else {"resets": resets}
    if resets is not None and options.get("save") == 2:
        given["reset_to"] = {"best": None, "cell": 0.5, "count": None, "weight": None, "wide": None}
    body = functools.partial(step, kind, leaf)
    xs = (flags, u)
    return treescan.mask_scan(
        body, h, xs, lengths=jnp.asarray(lengths), carry_axes=AXES, check_finite=True, **given, **options
    )


def go(way: str, call: Any, flags: Any, u: Any) -> Any:
    if way == "disable_jit":
        with jax.disable_jit():
            return call(flags, u, start())
    if way == "jit":
        return jax.jit(call)(flags, u, start())
    if way == "vmap":
        return jax.vmap(call, (0, None, None))(jnp.stack([flags, flags]), u, start())
    if way == "grad":

        def loss(w: Any) -> Any:
            h = jax.tree.map(lambda a: a * w if jnp.issubdtype(a.dtype, jnp.floating) else a, start())
            h["best"] = start()["best"]
            return call(flags, u, h)[0]["cell"].sum()

        return jax.grad(loss)(1.0)
    return call(flags, u, start())


def plantings(count: int) -> list[Any]:
    draw = np.random.default_rng(1)
    cases = []
    for i in range(count):
        name = list(OPTIONS)[i % len(OPTIONS)]
        way = WAYS[(i // len(OPTIONS)) % len(WAYS)]
        if way == "disable_jit" and name == "progress":
            way = "eager"
        leaf, kind = ("cell", "wide")[draw.integers(2)], ("NaN", "inf")[draw.integers(2)]
        everyday = i % 61 == 0
        cases.append(
            pytest.param(name, way, leaf, kind, i, id=f"{i}-{name}-{way}", marks=[] if everyday else pytest.mark.slow)
        )
    return cases


@pytest.mark.parametrize(("name", "way", "leaf", "kind", "seed"), plantings(140))
def test_what_is_planted_in_a_row_is_named(name: str, way: str, leaf: str, kind: str, seed: int) -> None:
    lengths, bad, flags, u, resets = draw_case(seed)
    options = OPTIONS[name]
    at, rows = expected(bad, reverse=options.get("reverse", False))
    text = caught(lambda: go(way, functools.partial(run, kind, leaf, options, lengths, resets), flags, u))
    named = f"row{'s' * (len(rows) > 1)} {' and '.join(', '.join(map(str, rows)).rsplit(', ', 1))}"
    operation, line = {"NaN": ("log", spoil), "inf": ("div", burst)}[kind]
    place = f"test_finite_rows.py:{line.__code__.co_firstlineno + 1}"
    assert "`mask_scan` over `" in text
    assert f'`h["{leaf}"]` became {kind} in step {at} of {T} ({named}), first in `{operation}` at' in text
    assert place in text
    record = treescan.last_nonfinite()
    assert record is not None
    assert (record.path, record.kind, record.step, record.rows) == (f'h["{leaf}"]', kind, at, tuple(rows))
    assert np.asarray(record.valid).tolist() == (at < lengths).tolist()
    again, _ = step(kind, leaf, record.carry, record.x)
    found = ~np.isfinite(again[leaf]) & np.asarray(record.valid)
    assert np.flatnonzero(found.any(axis=0) if leaf == "wide" else found).tolist() == rows


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("compact", "jit"),
        ("plain", "disable_jit"),
        *(pytest.param("compact", way, marks=pytest.mark.slow) for way in WAYS if way != "jit"),
        *(pytest.param(name, "jit", marks=pytest.mark.slow) for name in OPTIONS if name != "compact"),
    ],
)
def test_padding_never_alarms(name: str, way: str) -> None:
    treescan.fold(lambda h, x: h, 1.0, jnp.ones(3), check_finite=True)
    before = treescan.last_nonfinite()
    lengths, bad, flags, u, resets = draw_case(3)
    flags = flags & ~jnp.asarray(bad)
    jax.block_until_ready(go(way, functools.partial(run, "NaN", "cell", OPTIONS[name], lengths, resets), flags, u))
    jax.effects_barrier()
    assert treescan.last_nonfinite() is before


def test_a_row_without_a_step_may_hold_nan() -> None:
    h = {**start(), "cell": jnp.array([1.0, jnp.nan, 1.0, 1.0])}
    lengths = jnp.array([T, 0, 3, 3])
    flags = jnp.zeros((T, B), bool)
    run("NaN", "cell", {}, lengths, None, flags, jnp.zeros((T, B)), h)
    text = caught(lambda: run("NaN", "cell", {}, lengths, None, flags.at[5, 0].set(True), jnp.zeros((T, B)), h))
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
        "carry_axes": {"rows": 0, "total": None},
        "x_axes": {"u": 0, "scale": None},
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


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("inits", [pytest.param(False, marks=pytest.mark.slow), True])
def test_packed_sequences(*, reverse: bool, inits: bool) -> None:
    sequences = [np.ones(3, np.float32), np.array([1, 1, -9, 1], np.float32), np.ones(2, np.float32)]
    starts = [np.float32(1)] * 3
    packed = treescan.pack(sequences, rows=2, **({"init": starts} if inits else {}))

    def body(h: Any, x: Any) -> Any:
        return jnp.log(h * 0 + jnp.where(x == 0, 0, x)), None

    text = caught(
        lambda: treescan.mask_scan(body, jnp.ones(2), packed, reverse=reverse, save="last", check_finite=True)
    )
    record = treescan.last_nonfinite()
    assert record is not None
    (row,) = record.rows
    assert packed.data[record.step, row] == -9 and "first in `log`" in text
    clean = treescan.pack([np.ones(3, np.float32)] * 3, rows=2, **({"init": starts} if inits else {}))
    checked, plain = (
        treescan.mask_scan(body, jnp.ones(2), clean, reverse=reverse, check_finite=on)[0] for on in (True, False)
    )
    np.testing.assert_array_equal(checked, plain)


@pytest.mark.parametrize("verb", ["fold", "accumulate"])
def test_lengths_of_other_verbs(verb: str) -> None:
    xs = jnp.ones((5, 3)).at[3, 1].set(-9).at[2:, 2].set(jnp.nan)
    call = functools.partial(getattr(treescan, verb), lambda h, x: jnp.log(h + x), jnp.ones(3), xs, check_finite=True)
    assert f"`{verb}` over" in (text := caught(lambda: call(lengths=jnp.array([5, 5, 2]))))
    assert "`h` became NaN in step 3 of 5 (row 1), first in `log`" in text
    call(lengths=jnp.array([5, 3, 2]))


def test_a_body_that_reduces_over_rows() -> None:
    def body(h: Any, x: Any, valid: Any) -> Any:
        return h + jnp.sum(jnp.where(valid, x, 0)), None

    xs = jnp.ones((4, 2)).at[2:, 1].set(jnp.nan)
    treescan.mask_scan(body, jnp.ones(2), xs, lengths=jnp.array([4, 2]), check_finite=True)
    text = caught(
        lambda: treescan.mask_scan(
            body, jnp.ones(2), xs.at[3, 0].set(jnp.inf), lengths=jnp.array([4, 2]), check_finite=True
        )
    )
    assert "`h` became inf in step 3 of 4 (row 0), which got it from `x`" in text


def test_what_is_given_whole_is_named() -> None:
    xs = (jnp.array([1.0, jnp.nan]), jnp.ones((2, 4)))
    text = caught(
        lambda: treescan.mask_scan(
            lambda h, x: (h + x[0] * x[1], None),
            jnp.ones(2),
            xs,
            lengths=jnp.array([4, 2]),
            in_axes=(None, 1),
            x_axes=(0, 0),
            check_finite=True,
        )
    )
    assert "in step 0 of 4 (row 1), which got it from `x[0]`" in text
    record = treescan.last_nonfinite()
    assert record is not None and [leaf.shape for leaf in record.x] == [(2,), (2,)]


@pytest.mark.parametrize("name", ["hold", *(pytest.param(n, marks=pytest.mark.slow) for n in ("plain", "compact"))])
def test_results_and_gradients_are_those_without_it(name: str) -> None:
    lengths, bad, flags, u, resets = draw_case(5)
    flags = flags & ~jnp.asarray(bad)
    options = OPTIONS[name]

    def loss(w: Any, *, on: bool) -> Any:
        h = {**start(), "cell": start()["cell"] * w}
        kwargs: Any = {} if resets is None else {"resets": resets}
        body = functools.partial(step, "NaN", "cell")
        h, ys = treescan.mask_scan(
            body, h, (flags, u), lengths=jnp.asarray(lengths), carry_axes=AXES, check_finite=on, **kwargs, **options
        )
        return (h["cell"] ** 2).sum() + (ys**2).sum()

    for way in (lambda f: f, jax.jit):
        results = [way(jax.value_and_grad(functools.partial(loss, on=on)))(0.7) for on in (False, True)]
        np.testing.assert_allclose(*results, rtol=1e-6)


def test_a_custom_carry_of_rows() -> None:
    init = {"mean": carries.ema(jnp.zeros((2, 1)), 0.9)}
    xs = jnp.ones((4, 2, 1)).at[2, 1].set(jnp.inf).at[3, 0].set(jnp.nan)
    text = caught(
        lambda: treescan.mask_scan(
            lambda h, x: ({"mean": x}, None), init, xs, lengths=jnp.array([3, 4]), check_finite=True
        )
    )
    assert "in step 2 of 4 (row 1)" in text
    record = treescan.last_nonfinite()
    assert record is not None and record.carry["mean"].shape == (2, 1)


@pytest.mark.parametrize("check", [True, "backward"])
def test_a_batch_without_rows_has_nothing_to_look_at(check):
    h, xs = jnp.zeros((0, 3)), jnp.ones((4, 0, 3))
    step = lambda h, x: (h + x, h)  # noqa: E731
    run = lambda h: treescan.mask_scan(step, h, xs, lengths=jnp.zeros(0, int), check_finite=check)  # noqa: E731
    for carry, ys in (
        run(h),
        jax.jit(run)(h),
        treescan.while_scan(lambda h: h[:, 0] < 1, step, h, xs, check_finite=check)[:2],
    ):
        assert (carry.shape, ys.shape) == (h.shape, xs.shape)
    assert jax.grad(lambda h: run(h)[0].sum())(h).shape == h.shape
