"""`check_finite="backward"` of rows of unequal length: cotangents of data are named, and none of padding."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nonfinite import ROW_OPTIONS, caught, gradient, halve

import treescan

pytestmark = pytest.mark.quick

T, B = 9, 4
OPTIONS: dict[str, dict[str, Any]] = {
    **ROW_OPTIONS,
    "unroll": {"unroll": 2},
    "shared": {"chunk": 3},
    "shared in reverse": {"reverse": True, "remat": "step"},
    "fold": {},
    "accumulate": {},
    "scan": {},
}
WAYS = ("grad", "jit", "vmap of grad", "grad of vmap", "disable_jit", "weight")
AXES = {"cell": 0, "count": 0, "weight": 0, "wide": 1, "shared": None}


def step(leaf: str, h: Any, x: Any) -> Any:
    """The derivative of one leaf goes wrong where its flag is not 1. In padding, u is NaN."""
    bad, u = x
    wide = leaf == "wide"
    more = u * h["weight"].sum(-1) * h["shared"]
    new = halve(h[leaf], bad[None] if wide else bad) + (more[None] if wide else more)
    return {**h, "count": h["count"] + 1, leaf: new}, (new.sum(0) if wide else new, h["shared"])


def share(leaf: str, h: Any, x: Any, valid: Any) -> Any:
    """The same, where a leaf that all rows share changes with those that are valid."""
    h, y = step(leaf, h, x)
    return {**h, "shared": h["shared"] * 0.9 + jnp.where(valid, x[1], 0.0).mean() * 0.1}, y


def start(w: Any) -> dict[str, Any]:
    return {
        "cell": jnp.ones(B) * w,
        "count": jnp.zeros(B, jnp.int32),
        "weight": jnp.ones((B, 2)) * w,
        "wide": jnp.ones((2, B)) * w,
        "shared": jnp.ones(()) * w,
    }


def draw_case(seed: int, name: str) -> Any:
    """Lengths or a mask with holes, resets, and what goes wrong where. In padding every flag is NaN."""
    draw = np.random.default_rng(seed)
    lengths = draw.integers(0, T + 1, B)
    lengths[draw.integers(B)] = T
    valid = np.arange(T)[:, None] < lengths
    holes = name not in ("fold", "accumulate", "scan") and draw.random() < 0.4
    if holes:
        valid = draw.random((T, B)) < 0.6
        valid[draw.integers(T)] = True
    bad = draw.random((T, B)) < 0.04
    places = np.argwhere(valid)
    bad[tuple(places[draw.integers(len(places))])] = True
    resets = draw.random((T, B)) < 0.2 if draw.random() < 0.5 and name not in ("fold", "accumulate", "scan") else None
    u = np.where(valid, draw.normal(size=(T, B)), np.nan).astype(np.float32)
    return {"mask": valid} if holes else {"lengths": lengths}, valid, bad & valid, u, resets


def flags_of(kind: str, bad: Any, valid: Any) -> Any:
    flags = np.where(bad, {"NaN": np.nan, "inf": np.inf}[kind], 1.0)
    return jnp.asarray(np.where(valid, flags, np.nan), jnp.float32)


def expected(bad: Any, *, reverse: bool) -> tuple[int, list[int]]:
    """The step that the gradient finds first, and its rows."""
    steps = np.flatnonzero(bad.any(axis=1))
    last = int(steps[0] if reverse else steps[-1])
    return last, np.flatnonzero(bad[last]).tolist()


def loss(name: str, leaf: str, rows: Any, resets: Any, check: Any, flags: Any, u: Any, w: Any) -> Any:
    """The sum of all that comes out. Within a segment, the cotangent is finite until a flag says otherwise."""
    given: dict[str, Any] = {} if resets is None else {"resets": jnp.asarray(resets)}
    if resets is not None and name == "every second":
        given["reset_to"] = {"cell": 0.5, "count": None, "weight": None, "wide": None, "shared": None}
    body, h = functools.partial(share if "shared" in name else step, leaf), start(w)
    if name in ("fold", "accumulate", "scan"):
        h = {**{key: h[key] for key in ("cell", "count", "weight")}, "shared": jnp.ones(B)}
        own = functools.partial(step, "cell")
        if name == "scan":
            h, ys = treescan.mask_scan(own, h, (flags, u), **rows, check_finite=check)
            return (h["cell"] ** 2).sum() + ys[0].sum()
        f = lambda h, x: own(h, x)[0]  # noqa: E731
        return (getattr(treescan, name)(f, h, (flags, u), **rows, check_finite=check)["cell"] ** 2).sum()
    h, ys = treescan.mask_scan(
        body, h, (flags, u), carry_axes=AXES, y_axes=(0, None), check_finite=check, **rows, **given, **OPTIONS[name]
    )
    return (h[leaf] ** 2).sum() + ys[0].sum() + ys[1].sum()


def go(way: str, call: Any, flags: Any, u: Any) -> Any:
    if way == "weight":
        return jax.grad(call, 1)(flags, jnp.nan_to_num(u), jnp.float32(1))
    return gradient(way, call, flags, u)


def plantings(count: int) -> list[Any]:
    draw = np.random.default_rng(8)
    cases = []
    for i in range(count):
        name, way = list(OPTIONS)[i % len(OPTIONS)], WAYS[(i // len(OPTIONS)) % len(WAYS)]
        leaf = "cell" if name in ("fold", "accumulate", "scan") else ("cell", "wide")[draw.integers(2)]
        marks = [] if i == 20 else pytest.mark.slow
        cases.append(pytest.param(name, way, leaf, ("NaN", "inf")[draw.integers(2)], i, id=f"{i}", marks=marks))
    return cases


@pytest.mark.parametrize(("name", "way", "leaf", "kind", "seed"), plantings(96))
def test_what_is_planted_in_a_row_is_named(name: str, way: str, leaf: str, kind: str, seed: int) -> None:
    rows, valid, bad, u, resets = draw_case(seed, name)
    reverse = OPTIONS[name].get("reverse", False)
    at, named = expected(bad, reverse=reverse)
    call = functools.partial(loss, name, leaf, rows, resets, "backward")
    text = caught(lambda: go(way, call, flags_of(kind, bad, valid), jnp.asarray(u)))
    listed = f"row{'s' * (len(named) > 1)} {' and '.join(', '.join(map(str, named)).rsplit(', ', 1))}"
    kinds = (
        (kind, "NaN") if resets is not None else (kind,)
    )  # before a reset a cotangent may be 0, and 0 times inf is NaN
    assert any(f'the cotangent of `h["{leaf}"]` became {k} in step {at} of {T} ({listed})' in text for k in kinds)
    record = treescan.last_nonfinite()
    assert record is not None and record.backward
    assert (record.path, record.step, record.rows) == (f'h["{leaf}"]', at, tuple(named))
    np.testing.assert_array_equal(record.valid, valid[at])
    ran = valid[at:] if reverse else valid[: at + 1]
    np.testing.assert_array_equal(np.asarray(record.carry["count"])[named] <= ran.sum(0)[named] - 1, True)


@pytest.mark.parametrize(
    "name", ["chunk", *(pytest.param(name, marks=pytest.mark.slow) for name in OPTIONS if name != "chunk")]
)
def test_padding_never_alarms_and_gradients_are_those_without_it(name: str) -> None:
    treescan.fold(lambda h, x: h, 1.0, jnp.ones(3), check_finite=True)
    before = treescan.last_nonfinite()
    for seed in range(1 if name == "chunk" else 2):
        rows, valid, _, u, resets = draw_case(seed, name)
        flags = flags_of("NaN", np.zeros((T, B), bool), valid)
        plain, checked = (
            jax.jit(jax.grad(functools.partial(loss, name, "cell", rows, resets, check), (1, 2)))(
                flags, jnp.asarray(u), jnp.float32(1)
            )
            for check in (False, "backward")
        )
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-6), plain, checked)
    jax.effects_barrier()
    assert treescan.last_nonfinite() is before


def test_rows_of_packed_sequences_are_named() -> None:
    """Each sequence has a carry of its own in the result, whose cotangent enters where the sequence ends."""
    packed = treescan.pack([jnp.ones((n, 2)) for n in (3, 4, 2, 5)], rows=2, length=8)

    def loss(kind: str, h: Any) -> Any:
        def body(h: Any, x: Any) -> Any:
            flag = jnp.where((h[:, 0] > 1.7) & (kind == "step"), jnp.nan, 1.0)
            return halve(h, flag[:, None] * x) + x, h.sum(-1)

        ends, _ = treescan.mask_scan(body, h, packed, check_finite="backward")
        return (jnp.sqrt(ends[1] * 0) if kind == "result" else ends).sum()

    h = jnp.ones((2, 2))
    assert "the cotangent of `h` became NaN in step" in caught(lambda: jax.grad(functools.partial(loss, "step"))(h))
    text = caught(lambda: jax.grad(functools.partial(loss, "result"))(h))
    assert "it was so before that step, from what is computed of the result" in text
    last = treescan.last_nonfinite()
    assert last is not None and isinstance(row := last.rows[0], int) and bool(packed.mask[last.step, row])
    assert last.step + 1 == 8 or bool(packed.resets[last.step + 1, row]) or not packed.mask[last.step + 1, row]


def test_truncate_is_refused() -> None:
    with pytest.raises(treescan.ArgumentError, match="does not look at cotangents that `truncate` cuts"):
        treescan.mask_scan(
            lambda h, x: (h, x), jnp.ones(2), jnp.ones((3, 2)), lengths=[1, 2], truncate=2, check_finite="backward"
        )


def test_off_is_the_same_program() -> None:
    rows, _, _, u, _ = draw_case(0, "chunk")
    plain = functools.partial(treescan.mask_scan, lambda h, x: (h * x, h), **rows)
    jaxprs = [
        str(jax.make_jaxpr(lambda h, u, o=o: plain(h, u, **o))(jnp.ones(B), jnp.asarray(u)))
        for o in ({}, {"check_finite": False}, {"check_finite": "backward"})
    ]
    assert jaxprs[0] == jaxprs[1] != jaxprs[2]
