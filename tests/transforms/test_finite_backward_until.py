"""`check_finite="backward"` of loops that end early: cotangents of steps that were taken are named, and no others."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nonfinite import caught, gradient, halve

import treescan

pytestmark = pytest.mark.quick

T, B = 8, 3
KINDS = ("xs", "no xs", "rows", "compact rows", "shared rows", "fori", "outputs")
WAYS = ("grad", "jit", "vmap of grad", "grad of jit", "disable_jit", "reverse")


def run(kind: str, check: Any, reverse: bool, lengths: Any, flags: Any, w: Any) -> Any:
    """`lengths`: how many steps each row takes, one for all without rows. `flags`: float[T] or float[T, B]."""
    rows, options = flags.shape[1:], {"check_finite": check, "reverse": reverse}
    h = {"cell": jnp.ones(rows) * w, "n": jnp.zeros(rows, jnp.int32), "same": jnp.ones((*rows, 2))}
    if kind == "fori":
        low = jnp.int32(2)
        body = lambda i, h: {**h, "cell": halve(h["cell"], flags[i - 2]) + h["same"].sum()}  # noqa: E731
        return treescan.fori(low, low + lengths, body, h, max_length=T, **options)["cell"].sum()

    def step(h: Any, x: Any) -> Any:
        place = T - 1 - h["n"] if reverse else h["n"]
        flag = x if x is not None else flags[jnp.clip(place, 0, T - 1)]
        new = {**h, "cell": halve(h["cell"], flag) + h["same"].sum(-1), "n": h["n"] + 1}
        return new, h["cell"] * 2

    if "rows" in kind:
        h["until"], options = lengths, {**options, "compact": kind == "compact rows"}
        axes: Any = 0
        if kind == "shared rows":
            h["all"], axes = jnp.float32(1), {**dict.fromkeys((*h, "all"), 0), "all": None}
            step = functools.partial(_share, step)
        ended = treescan.while_scan(lambda h: h["n"] < h["until"], step, h, flags, carry_axes=axes, **options)
        return ended.carry["cell"].sum() + ended.ys.sum()
    xs = {"max_length": T} if kind == "no xs" else {"xs": flags}
    ended = treescan.while_scan(lambda h: h["n"] < lengths, step, h, **xs, **options)
    return (0.0 if kind == "outputs" else ended.carry["cell"].sum()) + ended.ys.sum()


def _share(step: Any, h: Any, x: Any, valid: Any) -> Any:
    new, y = step({key: leaf for key, leaf in h.items() if key != "all"}, x)
    shared = h["all"] * 0.9 + jnp.where(valid, h["cell"], 0.0).sum() * 0.01
    return {**new, "cell": new["cell"] + h["all"] * 0.1, "all": shared}, y


def cases(count: int) -> list[Any]:
    draw = np.random.default_rng(12)
    found = []
    for i in range(count):
        kind, way = KINDS[i % len(KINDS)], WAYS[(i // len(KINDS)) % len(WAYS)]
        lengths = draw.integers(2, T + 1, (B,) if "rows" in kind else ())
        order = int(draw.integers(lengths.max() - 1 if kind == "outputs" else lengths.max()))
        marks = [] if i == 4 else [pytest.mark.slow]
        found.append(pytest.param(kind, way, lengths, order, id=f"{i}", marks=marks))
    return found


def go(way: str, call: Any, lengths: Any, flags: Any) -> Any:
    """The bounds of `fori` are traced in each way: a loop whose bounds are known does not end early."""
    derive = functools.partial(gradient, way, call)
    return (jax.jit(derive) if way == "vmap of grad" else derive)(lengths, flags)


@pytest.mark.parametrize(("kind", "way", "lengths", "order"), cases(84))
def test_a_step_that_was_taken_is_named(kind: str, way: str, lengths: Any, order: int) -> None:
    """Every row goes wrong in one step, and in all that no row takes. Rows that have stopped by then are not named."""
    if kind == "fori" and way in ("grad", "disable_jit"):
        way = "jit"
    reverse = way == "reverse"
    way = "jit" if reverse else way
    place = T - 1 - order if reverse else order
    flags = np.where(np.arange(T) < lengths.max(), 1.0, np.nan)
    flags = flags[::-1].copy() if reverse else flags
    if kind == "fori" and reverse:  # begins with the highest index that there is
        place = int(lengths) - 1 - order
        flags = np.where(np.arange(T) < lengths, 1.0, np.nan)
    flags[place] = np.nan
    rows = "rows" in kind
    flags = jnp.asarray(np.broadcast_to(flags[:, None], (T, B)) if rows else flags, jnp.float32)
    text = caught(lambda: go(way, functools.partial(run, kind, "backward", reverse), jnp.asarray(lengths), flags))
    record = treescan.last_nonfinite()
    assert record is not None and record.backward and record.ends_early
    hit = np.flatnonzero(lengths > order).tolist() if rows else []
    named = f" (row{'s' * (len(hit) > 1)} {' and '.join(', '.join(map(str, hit)).rsplit(', ', 1))})" if hit else ""
    name = '`h["cell"]`'
    assert f"the cotangent of {name} became NaN in step {place} of at most {T}{named}" in text
    assert (record.step, record.rows) == (place, tuple(hit))
    if kind == "fori":
        assert record.x == place + 2
    elif rows:
        assert np.asarray(record.carry["n"])[hit].tolist() == [order] * len(hit)
    else:
        assert record.carry["n"] == order


def twice(f: Any, place: int) -> Any:
    return jax.grad(jax.grad(f, place), place)


@pytest.mark.parametrize(
    ("kind", "derivative"),
    [
        pytest.param(kind, derivative, marks=[] if (kind, derivative) == ("fori", jax.grad) else pytest.mark.slow)
        for kind in KINDS
        for derivative in (jax.grad, twice)
    ],
)
def test_steps_not_taken_never_alarm_and_gradients_are_those_without_it(kind: str, derivative: Any) -> None:
    treescan.fold(lambda h, x: h, 1.0, jnp.ones(3), check_finite=True)
    before = treescan.last_nonfinite()
    rows = "rows" in kind
    lengths = jnp.array([2, 5, 3]) if rows else jnp.int32(4)
    flags = jnp.where(jnp.arange(T)[:, None] < lengths[None] if rows else jnp.arange(T) < lengths, 1.0, jnp.nan)
    plain, checked = (
        jax.jit(derivative(lambda *given, check=check: run(kind, check, False, *given) ** 2, 2))(
            lengths, flags, jnp.float32(0.7)
        )
        for check in (False, "backward")
    )
    np.testing.assert_allclose(plain, checked, rtol=1e-5)
    jax.effects_barrier()
    assert treescan.last_nonfinite() is before


def test_what_comes_from_the_result_is_no_step() -> None:
    def loss(h: Any) -> Any:
        ended = treescan.while_scan(lambda h: h < 3, lambda h, x: (h + x, h), h, jnp.ones(9), check_finite="backward")
        return jnp.sqrt(ended.carry * 0)

    text = caught(lambda: jax.grad(loss)(jnp.float32(0)))
    assert "the cotangent of `h` became NaN in step 2 of at most 9; it was so before that step, from what" in text


def test_the_gradient_of_a_vmap_is_refused() -> None:
    call = functools.partial(run, "xs", "backward", False, jnp.int32(4), jnp.ones(T))
    with pytest.raises(treescan.ArgumentError, match=r"Take `jax.vmap` of `jax.grad`"):
        jax.grad(lambda w: jax.vmap(call)(w).sum())(jnp.ones(2))
