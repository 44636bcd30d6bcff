"""`check_finite` of loops that end early: a step that was taken is named, and none that was not."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nonfinite import caught

import treescan

pytestmark = pytest.mark.quick

T, B = 8, 3
KINDS = ("xs", "no xs", "rows", "compact rows", "fori")
WAYS = ("eager", "jit", "grad", "vmap", "disable_jit")


def spoil(leaf: Any, hit: Any) -> Any:
    return jnp.log(jnp.where(hit, -1.0, 2.0)) + leaf * 0.5


def run(kind: str, options: Any, lengths: Any, flags: Any, w: Any, **others: Any) -> Any:
    """`lengths`: how many steps each row takes, one for all without rows. `flags`: bool[T] or bool[T, B]."""
    rows = flags.shape[1:]
    h = {"cell": jnp.ones(rows) * w, "n": jnp.zeros(rows, jnp.int32), "same": jnp.ones((*rows, 2))}

    def body(h: Any, x: Any) -> Any:
        place = (T - 1 - h["n"] if options.get("reverse") else h["n"]).astype(jnp.int32)
        hit = x if x is not None else flags[jnp.clip(place, 0, T - 1)]
        return {**h, "cell": spoil(h["cell"], hit), "n": h["n"] + 1}, h["cell"]

    if kind == "fori":
        low = jnp.int32(2)
        body = lambda i, h: {**h, "cell": spoil(h["cell"], flags[i - 2])}  # noqa: E731
        return treescan.fori(low, low + lengths, body, h, max_length=T, **options, **others)["cell"]
    if "rows" in kind:
        h["until"] = lengths
        options = {**options, "compact": kind == "compact rows"}
        return treescan.while_scan(lambda h: h["n"] < h["until"], body, h, flags, **options, **others).carry["cell"]
    xs = {"xs": flags} if kind == "xs" else {"max_length": T}
    return treescan.while_scan(lambda h: h["n"] < lengths, body, h, **xs, **options, **others).carry["cell"]


def go(way: str, call: Any, lengths: Any, flags: Any) -> Any:
    if way == "disable_jit":
        with jax.disable_jit():
            return call(lengths, flags, 1.0)
    if way == "jit":
        return jax.jit(call)(lengths, flags, 1.0)
    if way == "vmap":
        return jax.vmap(call, (0, None, None))(jnp.stack([lengths, lengths - 1]), flags, 1.0)
    if way == "grad":
        return jax.grad(lambda w: call(lengths, flags, w).sum())(1.0)
    return call(lengths, flags, 1.0)


def cases(count: int) -> list[Any]:
    draw = np.random.default_rng(2)
    found = []
    for i in range(count):
        kind, way = KINDS[i % len(KINDS)], WAYS[(i // len(KINDS)) % len(WAYS)]
        rows = "rows" in kind
        lengths = draw.integers(2, T + 1, (B,) if rows else ())
        order = int(draw.integers(lengths.max() - (way == "vmap")))
        hit = np.flatnonzero(lengths - (way == "vmap") > order).tolist() if rows else []
        marks = [] if i % 31 == 2 else [pytest.mark.slow]
        found.append(pytest.param(kind, way, lengths, order, hit, bool(draw.integers(2)), id=f"{i}", marks=marks))
    return found


@pytest.mark.parametrize(("kind", "way", "lengths", "order", "hit", "reverse"), cases(75))
def test_a_step_that_was_taken_is_named(
    kind: str, way: str, lengths: Any, order: int, hit: list[int], *, reverse: bool
) -> None:
    """Every row is hit in one step; those that have stopped by then are not named. After the last step all are."""
    if kind == "fori" and way in ("eager", "disable_jit", "grad"):
        way = "jit"
    place = T - 1 - order if reverse else order
    if kind == "fori" and reverse:  # begins with the highest index that there is
        place = int(lengths) - 1 - order
    flags = np.zeros((T, B) if hit else (T,), bool)
    flags[place] = True
    options = {"reverse": True} if reverse else {}
    call = functools.partial(run, kind, options, check_finite=True)
    text = caught(lambda: go(way, call, jnp.asarray(lengths), jnp.asarray(flags)))
    record = treescan.last_nonfinite()
    assert record is not None
    named = f" (row{'s' * (len(hit) > 1)} {' and '.join(', '.join(map(str, hit)).rsplit(', ', 1))})" if hit else ""
    if way == "vmap":  # either of the elements may be the first to tell
        assert "became NaN in step" in text
        return
    name = '`h["cell"]`'
    assert f"{name} became NaN in step {place} of at most {T}{named}, first in `log` at" in text
    assert f"test_finite_until.py:{spoil.__code__.co_firstlineno + 1}; the carry before it was finite." in text
    assert (record.step, record.rows, record.ends_early) == (place, tuple(hit), True)
    if kind == "fori":
        assert record.x == place + 2
    else:
        assert (record.carry["n"] >= (order if not hit else 0)).all() and record.carry["n"].max() == order


EVERY_DAY = {("rows", "jit"), ("compact rows", "eager"), ("fori", "vmap"), ("no xs", "disable_jit")}


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        pytest.param(kind, way, marks=[] if (kind, way) in EVERY_DAY else pytest.mark.slow)
        for kind in KINDS
        for way in WAYS
    ],
)
def test_a_step_that_was_not_taken_never_alarms(kind: str, way: str) -> None:
    if kind == "fori" and way == "disable_jit":
        way = "jit"
    treescan.fold(lambda h, x: h, 1.0, jnp.ones(3), check_finite=True)
    before = treescan.last_nonfinite()
    rows = "rows" in kind
    lengths = jnp.array([2, 5, 3]) if rows else jnp.int32(4)
    flags = jnp.arange(T)[:, None] >= lengths[None] if rows else jnp.arange(T) >= lengths
    jax.block_until_ready(go(way, functools.partial(run, kind, {}, check_finite=True), lengths, flags))
    jax.effects_barrier()
    assert treescan.last_nonfinite() is before


@pytest.mark.parametrize("kind", ["xs", *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS[1:])])
def test_results_and_gradients_are_those_without_it(kind: str) -> None:
    rows = "rows" in kind
    lengths = jnp.array([2, 5, 3]) if rows else jnp.int32(4)
    flags = jnp.zeros((T, B) if rows else T, bool)

    def loss(w: Any, *, on: bool) -> Any:
        return (jax.jit(functools.partial(run, kind, {}, check_finite=on))(lengths, flags, w) ** 2).sum()

    for derivative in (jax.grad, jax.jacfwd):
        plain, checked = (derivative(functools.partial(loss, on=on))(0.7) for on in (False, True))
        np.testing.assert_allclose(plain, checked, rtol=1e-6)


def test_off_is_the_same_program() -> None:
    def program(**options: Any) -> str:
        return str(jax.make_jaxpr(functools.partial(run, "rows", {}, **options))(jnp.array([2, 3, 4]), flags, 1.0))

    flags = jnp.zeros((T, B), bool)
    assert program() == program(check_finite=False)


def test_outputs_and_keys_beside_it() -> None:
    def body(h: Any, x: Any, key: Any) -> Any:
        return h + jnp.log(x) + jax.random.uniform(key), h

    xs = jnp.ones(6).at[3].set(-1)
    call = functools.partial(treescan.while_scan, f=body, init=jnp.float32(0), xs=xs, key=jax.random.key(0))
    options: Any = {"save": 2, "out_axes": -1}
    plain, checked = (call(lambda h: h < 1.2, **options, check_finite=on) for on in (False, True))
    jax.tree.map(np.testing.assert_array_equal, plain, checked)
    assert "in step 3 of at most 6, first in `log`" in caught(lambda: call(lambda h: h < 99, check_finite=True))
