"""`check_finite` blames what made the elements that became bad, whatever other elements hold."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxprs import equations
from nonfinite import caught, named
from primitive_cases import ENTRIES, GRID, Operand, examples
from thin import parametrize, shares, slow

import treescan
from treescan._options.finite import blame

pytestmark = pytest.mark.quick

B, D = 3, 4
NAN, INF = jnp.nan, jnp.inf


def largest(h: Any, x: Any) -> Any:
    low = jnp.log(jnp.zeros_like(x))
    high = jnp.maximum(low, jnp.exp(x))
    return h + jnp.max(jnp.concatenate([low, high], -1), -1, keepdims=True)


def moved(h: Any, x: Any) -> Any:
    both = jnp.concatenate([h, jnp.exp(x)])[::-1]
    return jnp.flip(both[B - 1 :: -1][::-1], 0)[jnp.arange(B)] + jnp.pad(h, ((1, 0), (0, 0)))[1:]


BODIES = {
    "mixed": lambda h, x: h + jnp.exp(x).sum(-1, keepdims=True),  # all of a row is bad
    "multiplied": lambda h, x: h + jnp.exp(x) @ jnp.full((D, D), 0.5),
    "chosen": lambda h, x: jnp.where(h < 5, h + jnp.exp(x), jnp.log(h - 1e6)),
    "largest": largest,
    "moved": moved,
    "sorted": lambda h, x: h + jnp.sort(jnp.exp(x), -1),
    "branched": lambda h, x: h + jax.lax.cond(x.sum() > 0, lambda e: e, lambda e: -e, jnp.exp(x)),
}
WAYS = [
    *(("mixed", "jit"), ("multiplied", "eager"), ("moved", "eager"), ("largest", "eager")),
    *slow(*((name, "eager") for name in ("branched", "chosen", "sorted"))),
    *slow(*(("mixed", way) for way in ("vmap", "disable_jit", "rows"))),
]


def data() -> Any:
    """An infinity of the init is in row 0, and x overflows `exp` in row 2 of step 1."""
    h = jnp.zeros((B, D)).at[0].set(-INF)
    return h, jnp.zeros((2, B, D)).at[1, 2, 3].set(1000.0)


@pytest.mark.parametrize(("name", "way"), WAYS)
def test_an_infinity_of_another_row_is_not_blamed(name: str, way: str) -> None:
    h, xs = data()
    options = {"lengths": jnp.array([2, 1, 2])} if way == "rows" else {}
    run = lambda h, xs: treescan.fold(BODIES[name], h, xs, check_finite=True, **options)  # noqa: E731
    if way == "vmap":
        h, xs = (jnp.stack([leaf, leaf]) for leaf in (h, xs))
    calls = {"jit": jax.jit(run), "vmap": jax.vmap(run)}
    with jax.disable_jit(way == "disable_jit"):
        text, record = named(lambda: calls.get(way, run)(h, xs))
    assert "became inf in step 1 of 2 (row 2), first in `exp` at" in text
    assert (record.operation, record.source, record.one_of) == ("exp", None, ())


def guarded(h: Any, x: Any) -> Any:
    wide = jnp.where(h < 5, jnp.sqrt(x) + h, jnp.log(h - 5))
    return jax.lax.select_n(jnp.array([0, 1, 0, 1]), wide, wide * 2)


def through_a_loop(h: Any, x: Any) -> Any:
    return jax.lax.scan(lambda h, x: (h + x, None), h, x)[0]


def made_in_a_loop(h: Any, x: Any) -> Any:
    low = jnp.where(h > 2, jnp.log(x - 9), 1.0)  # NaN in places, and dropped in the loop
    return jax.lax.scan(lambda h, x: (jnp.sqrt(h - x), None), h, jnp.stack([x, jnp.where(h > 2, low, x)]))[0]


def called_back(h: Any, x: Any) -> Any:
    return h + jax.pure_callback(lambda x: x[::-1], jax.ShapeDtypeStruct((2,), jnp.float32), jnp.log(x))


def ended_by_a_nan(h: Any, x: Any) -> Any:
    """With 1 in place of NaN, the loop within would not end."""
    return jax.lax.while_loop(lambda h: (h > 0.5).any(), lambda h: h, jnp.log(x)) + h


ONES = jnp.ones((3, 2))
CASES: dict[str, tuple[Any, Any, Any, tuple[str, ...]]] = {  # a body, its init and xs, and texts of its error
    "a NaN that is dropped": (
        guarded,
        jnp.ones(4),
        jnp.ones((2, 4)).at[1, jnp.array([1, 3])].set(-1.0),
        ("became NaN in step 1 of 2 (rows 1 and 3), first in `sqrt` at",),
    ),
    "through a loop within": (
        through_a_loop,
        jnp.zeros(3).at[0].set(-INF),
        jnp.zeros((2, 2, 3)).at[1, 0, 2].set(NAN),
        ("became NaN in step 1 of 2 (row 2), which got it from `x`",),
    ),
    "made in a loop within": (
        made_in_a_loop,
        jnp.ones(3),
        jnp.array([[0.0] * 3, [0.5, 2.0, 0.5]]),
        ("became NaN in step 1 of 2 (row 1), first in `scan` at",),
    ),
    "a callback may have made it": (
        called_back,
        jnp.zeros(2),
        ONES.at[2, 0].set(-1.0),
        ("(row 1), which comes from one of `log` at", "and `pure_callback` at"),
    ),
    "a loop that a NaN ended": (
        ended_by_a_nan,
        jnp.zeros(2),
        ONES.at[2, 0].set(-1.0),
        ("(row 0), which comes from one of `log` at", "and `while` at"),
    ),
    "a constant": (
        lambda h, x: NAN * x + h,
        jnp.ones(2),
        jnp.ones(3),
        ("became NaN in step 0 of 3 (row", "which got it from `a constant of the body`"),
    ),
    "an infinite carry is not called finite": (
        lambda h, x: (jnp.log(h[0] + x), h[1] - x),
        (jnp.float32(1), jnp.float32(-INF)),
        jnp.array([1.0, -9.0]),
        ("in step 1 of 2, first in `log`",),
    ),
    "rows that became infinite are not called NaN": (
        lambda h, x: jnp.array([jnp.exp(-x * 20), jnp.log(h[1] + x)]),
        jnp.ones(2),
        jnp.array([2.0, -50.0]),
        ("became NaN in step 1 of 2 (row 1), first in `log`",),
    ),
}


@parametrize("case", CASES)
def test_what_is_blamed(case: Any) -> None:
    body, h, xs, said = case
    text = caught(lambda: treescan.fold(body, h, xs, check_finite=True))
    assert all(each in text for each in said), text
    assert "within" not in text and ("the carry before it was finite" in text) == (
        "first in" in text and not isinstance(h, tuple)
    )


def test_what_cannot_be_decided_is_one_of_several() -> None:
    """The loop within drops what `log` made of row 0; from outside this cannot be seen."""

    def step(h: Any, x: Any) -> Any:
        first, second = jnp.log(x["a"]), jnp.sqrt(x["b"])
        return jax.lax.scan(lambda h, _: (h + jnp.where(jnp.arange(2) == 1, first, 0.0), None), h, second)[0]

    xs = {"a": ONES.at[2].set(-1.0), "b": ONES.at[2].set(-1.0)}
    text, record = named(lambda: treescan.fold(step, jnp.zeros(2), xs, check_finite=True))
    assert "became NaN in step 2 of 3 (row 1), which comes from one of `log` at" in text and "and `sqrt` at" in text
    assert (record.operation, record.place, record.source) == (None, None, None)
    assert [name.partition(" at ")[0] for name in record.one_of] == ["`log`", "`sqrt`"]


def test_a_primitive_that_looks_otherwise_is_taken_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Releases of JAX may change the parameters of primitives."""
    unknown: Any = lambda *_: {}["axes"]  # noqa: E731
    monkeypatch.setattr(blame, "_by_derivative", unknown)
    h, xs = data()
    text = caught(lambda: treescan.fold(BODIES["mixed"], jnp.zeros_like(h), xs, check_finite=True))
    assert "(row 2), first in `exp` at" in text


@pytest.mark.parametrize("dtype", [jnp.bfloat16, *slow((jnp.float16,), (jnp.complex64,))])
def test_every_dtype(dtype: Any) -> None:
    def step(h: Any, x: Any) -> Any:
        return (h + jnp.exp(x * 1000)) @ jnp.eye(2, dtype=dtype) + h * 0

    h = jnp.zeros((3, 2), dtype)
    xs = jnp.zeros((2, 3, 2), dtype).at[1, 2, 0].set(jnp.asarray(1, dtype))
    text = caught(lambda: treescan.fold(step, h, xs, check_finite=True))
    assert "in step 1 of 2 (row 2), first in `" in text


def example_of(name: str) -> Any:
    """A function that evaluates a primitive, and two draws of its operands."""
    if name in ENTRIES:
        found = examples(name, ENTRIES[name].types[0])
        function, operands = next(e[1:] for e in found if all(operand.shape == GRID for operand in e.operands))
    else:  # nothing else treats it specially
        function = getattr(jax.lax, name)
        operands = [Operand(GRID, "float32", 0.5, 1.5)] * (1 + (name == "nextafter"))
    rng = np.random.default_rng(0)
    return function, *([jnp.asarray(operand.draw(rng)) for operand in operands] for _ in range(2))


HERE = {name for name in blame.ELEMENTWISE if name in ENTRIES or hasattr(jax.lax, name)}  # a release may lack some


@pytest.mark.parametrize("names", shares(HERE - {"name"}))
def test_what_counts_as_elementwise_is(names: list[str]) -> None:
    for name in names:
        function, given, other = example_of(name)
        assert name in {each.primitive.name for each in equations(jax.make_jaxpr(function)(*given).jaxpr)}
        mixed = [jnp.concatenate([a[:1], b[1:]]) for a, b in zip(given, other, strict=True)]
        np.testing.assert_array_equal(function(*mixed)[:1], function(*given)[:1], name)
        np.testing.assert_array_equal(function(*mixed)[1:], function(*other)[1:], name)
