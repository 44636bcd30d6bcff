"""Bodies with jaxtyping annotations: one scope of axis names over carry in, x, carry out and y, nothing to decorate."""

import __future__

import collections.abc
import dataclasses
import functools
import re
import sys
import types
import typing
from collections.abc import Callable
from typing import Annotated, Any, Generic, NamedTuple, Optional, TypedDict, TypeVar

import jax
import jax.numpy as jnp
import jaxtyping
import pytest
from beartype import beartype
from jaxtyping import Array, Float, Int, Key, PyTree, jaxtyped

import treescan
from treescan import accumulate, fold, fori, mask_scan, scan
from treescan.errors import SignatureError

pytestmark = pytest.mark.quick

N, M = Float[Array, " n"], Float[Array, " m"]
A, B = jnp.ones(3), jnp.ones(4)


class Cell(NamedTuple):
    h: N
    count: Int[Array, ""]


@functools.partial(jax.tree_util.register_dataclass, data_fields=["h", "inner"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Block:
    h: N
    inner: Cell


Item = TypeVar("Item")


class Pair(NamedTuple, Generic[Item]):
    first: Item
    others: list[Item]


class Named(TypedDict):
    h: N


def cell(h: Any) -> Cell:
    return Cell(h, jnp.int32(0))


def steps(x: Any, length: int = 2) -> Any:
    """xs of which every step sees x."""
    return jax.tree.map(lambda leaf: jnp.stack([leaf] * length), x)


def annotated(carry: Any = Any, x: Any = Any, out: Any = Any, y: Any = Any) -> Callable[..., Any]:
    """A body that returns its carry and, as y, its x; with these annotations."""

    def body(carry, x):
        return carry, x

    body.__annotations__ = {"carry": carry, "x": x, "return": tuple[out, y]}
    return body


def rows_of(error: SignatureError) -> list[str]:
    """The table's lines, each with single spaces; annotations in short, `Float[n]` for `Float[Array, "n"]`."""
    table = re.sub(r'(\w+)\[Array, "([^"]*)"\]', r"\1[\2]", str(error).split("\n\n")[1])
    return [" ".join(line.split()) for line in table.splitlines()[1:]]


def violation(body: Callable[..., Any], init: Any, xs: Any, **options: Any) -> list[str]:
    with pytest.raises(SignatureError) as info:
        scan(body, init, xs, **options)
    return rows_of(info.value)


# --- one scope --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "init", "x", "row"),
    [
        (annotated(x=Float[Array, " 4"]), A, A, "x Float[4] float32[3] axis 0: 4, is 3"),
        (annotated(carry=Cell, x=N), cell(A), B, "x Float[n] float32[4] n: 3 in carry.h, 4 in x"),
        (annotated(x=N, out=N), A, B, "returned carry Float[n] float32[3] n: 4 in x, 3 in returned carry"),
        (annotated(out=N, y=N), A, B, "y Float[n] float32[4] n: 3 in returned carry, 4 in y"),
        (annotated(out=Cell, y=N), cell(A), B, "y Float[n] float32[4] n: 3 in returned carry.h, 4 in y"),
        (annotated(carry=Key[Array, ""]), A, A, "carry Key[] float32[3] rank 0, is 1"),
        (annotated(carry=N, x=Float[Array, "*a n"]), A, B, "x Float[*a n] float32[4] n: 3 in carry, 4 in x"),
        (annotated(carry=N, x=Float[Array, "n ..."]), A, B, "x Float[n ...] float32[4] n: 3 in carry, 4 in x"),
        (annotated(x=Float[Array, "5 *a"]), A, B, "x Float[5 *a] float32[4] axis 0: 5, is 4"),
        (annotated(x=Float[Array, "m *a n"]), A, B, "x Float[m *a n] float32[4] rank 2 or more, is 1"),
        (annotated(carry=Float[Array, "_"], x=Float[Array, "_ n"]), A, B, "x Float[_ n] float32[4] rank 2, is 1"),
    ],
)
def test_the_scope_spans_the_step(body: Callable[..., Any], init: Any, x: Any, row: str) -> None:
    assert violation(body, init, steps(x)) == [row]


@pytest.mark.parametrize(
    ("body", "init", "x"),
    [
        (annotated(N, N, N, N), A, A),
        (annotated(N, M, N, M), A, B),
        (annotated(N, Float[Array, " n+1"], N, Float[Array, " n+1"]), A, B),
        (annotated(Float[Array, "*batch"], Float[Array, "*batch d"], Any, Any), A, jnp.ones((3, 7))),
        (annotated(Float[Array, "..."], Float[Array, "#n"], N, Any), A, A),
        (annotated(Cell, N, Cell, N), cell(A), A),
        (annotated(Key[Array, ""], N), jax.random.key(0), A),
        (annotated(Float[Array, ""], Float[Array, ""]), 0.0, jnp.float32(1)),
    ],
)
def test_what_holds_passes(body: Callable[..., Any], init: Any, x: Any) -> None:
    for context in (jax.disable_jit(False), jax.disable_jit(True)):
        with context:
            final, ys = scan(body, init, steps(x))
        assert jax.tree.structure(final) == jax.tree.structure(init)
        assert ys.shape == (2, *x.shape)


# --- where annotations stand ------------------------------------------------------------------------------------------


CONTAINERS: dict[str, tuple[Any, Any, Any, str]] = {
    "NamedTuple": (Cell, cell(A), cell(B), "x.h"),
    "generic": (Pair[N], Pair(A, [A]), Pair(A, [A, B]), "x.others[1]"),
    "dataclass": (Block, Block(A, cell(A)), Block(A, cell(B)), "x.inner.h"),
    "dict": (dict[str, N], {"a": A, "b": A}, {"a": A, "b": B}, 'x["b"]'),
    "tuple": (tuple[N, M], (A, B), (B, B), "x[0]"),
    "tuple_of_any_length": (tuple[N, ...], (A, A, A), (A, A, B), "x[2]"),
    "list": (list[N], [A] * 8, [*[A] * 7, B], "x[7]"),
    "Optional": (Optional[N], A, B, "x"),  # noqa: UP045, what is tested
    "union_of_arrays": (N | Int[Array, " n"], A, B, "x"),
    "tuple_or_None": (tuple[N, Cell] | None, (A, cell(A)), (A, cell(B)), "x[1].h"),
    "Mapping": (collections.abc.Mapping[str, N], {"a": A, "b": A}, {"a": A, "b": B}, 'x["b"]'),
    "Sequence": (collections.abc.Sequence[N], [A] * 8, [*[A] * 7, B], "x[7]"),
    "TypedDict": (Named, {"h": A}, {"h": B}, 'x["h"]'),
    "PyTree": (PyTree[N], {"a": [A, A]}, {"a": [A, B]}, 'x["a"][1]'),
    "Annotated": (Annotated[N, "metres"], A, B, "x"),
    "nested": (list[dict[str, tuple[Cell, N]]], [{"a": (cell(A), A)}], [{"a": (cell(A), B)}], 'x[0]["a"][1]'),
}


if sys.version_info >= (3, 12):  # which has `type` statements
    CONTAINERS["alias"] = (typing.TypeAliasType("alias", N), A, B, "x")


@pytest.mark.parametrize("name", CONTAINERS)
def test_annotations_inside_containers(name: str) -> None:
    hint, good, bad, path = CONTAINERS[name]
    body = annotated(carry=N, x=hint)
    scan(body, A, steps(good))
    (row,) = violation(body, A, steps(bad))
    assert row.startswith(f"{path} ")


class Typed:
    def __call__(self, carry: N, x: N) -> tuple[N, N]:
        return carry, x

    def method(self, carry: N, x: N) -> tuple[N, N]:
        return carry, x


def with_parameters(scale: Float[Array, ""], carry: N, x: N, offset: float = 0.0) -> tuple[N, N]:
    return carry * scale + offset, x


def quoted(carry: "N", x: "Float[Array, ' n']") -> "tuple[N, N]":
    return carry, x


@pytest.mark.parametrize(
    "body",
    [
        Typed(),
        Typed().method,
        functools.partial(functools.partial(with_parameters, jnp.float32(2)), offset=1.0),
        jax.jit(quoted),
        jax.checkpoint(quoted),
        quoted,
    ],
    ids=lambda body: str(body).split(" at ")[0],
)
def test_any_callable(body: Callable[..., Any]) -> None:
    scan(body, A, steps(A))
    assert violation(body, A, steps(B)) == ["x Float[n] float32[4] n: 3 in carry, 4 in x"]


FUTURE = """
def make():
    class Local(NamedTuple):
        h: N

    def body(carry: Local, x: N) -> tuple[Local, N]:
        return Local(carry.h), x

    return body, Local
"""


def test_annotations_from_the_future(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("model")
    monkeypatch.setitem(sys.modules, "model", module)
    vars(module).update(N=N, NamedTuple=NamedTuple)
    exec(compile(FUTURE, "model.py", "exec", flags=__future__.annotations.compiler_flag), vars(module))
    body, local = module.make()
    assert violation(body, local(A), steps(B)) == ["x Float[n] float32[4] n: 3 in carry.h, 4 in x"]


def test_a_name_that_cannot_be_found_leaves_the_other_annotations() -> None:
    def body(carry: "Nowhere", x: "N") -> "tuple[Nowhere, N]":  # noqa: F821
        return carry, x

    scan(body, A, steps(B))
    assert violation(body, A, steps(jnp.ones((4, 4)))) == ["x Float[n] float32[4,4] rank 1, is 2"]


@pytest.mark.parametrize(
    ("verb", "rows"),
    [
        (lambda: fold(folds, A, steps(B)), ["x Float[n] float32[4] n: 3 in carry, 4 in x"]),
        (lambda: accumulate(folds, A, steps(B)), ["x Float[n] float32[4] n: 3 in carry, 4 in x"]),
        (lambda: fori(0, 2, counts, A), ["i Float[] ~int32[] dtype"]),
        (lambda: fori(0, 2, shrinks, A), ["returned carry Float[n-1] float32[3]"]),
        (
            lambda: mask_scan(quoted, A, steps(B.astype(jnp.float32)), mask=jnp.ones((2,), bool)),
            ["x Float[n] float32[4] n: 3 in carry, 4 in x"],
        ),
        (lambda: scan(quoted, A, jnp.ones((4, 2)), in_axes=1), ["x Float[n] float32[4] n: 3 in carry, 4 in x"]),
    ],
)
def test_every_verb(verb: Callable[[], Any], rows: list[str]) -> None:
    with pytest.raises(SignatureError) as info:
        verb()
    assert rows_of(info.value) == rows


def folds(carry: N, x: N) -> N:
    return carry


def counts(i: Float[Array, ""], carry: N) -> N:
    return carry


def shrinks(i: Int[Array, ""], carry: N) -> Float[Array, " n-1"]:
    return carry


# --- scopes begin and end with a step ---------------------------------------------------------------------------------


def test_isinstance_in_the_body_shares_the_scope() -> None:
    seen = []

    def body(carry: N, x: M) -> tuple[N, Any]:
        seen.extend([isinstance(A, N), isinstance(B, N), isinstance(B, M), isinstance(jnp.ones(5), Float[Array, " k"])])
        return carry, None

    scan(body, A, steps(B))
    assert seen == [True, False, True, True]


def test_the_scope_is_not_the_callers() -> None:
    jaxtyped(typechecker=beartype)(with_own_scan)(B)


def with_own_scan(n: N) -> N:
    scan(quoted, A, steps(A))
    return n


def test_nested_scans_have_scopes_of_their_own() -> None:
    def outer(carry: N, x: N) -> tuple[N, N]:
        scan(quoted, B, steps(B))
        assert isinstance(A, N)
        assert not isinstance(B, N)
        return carry, x

    scan(outer, A, steps(A))
    with pytest.raises(SignatureError, match="`quoted`"):
        scan(lambda carry, x: scan(quoted, A, steps(B)), A, steps(A))


def test_transformations_show_what_one_element_sees() -> None:
    def call(scale: Any) -> Any:
        return scan(quoted, A * scale.sum(), steps(B))[0].sum()

    with pytest.raises(SignatureError) as info:
        jax.jit(jax.grad(lambda scales: sum(jax.vmap(call)(scales))))(jnp.ones((5, 2)))
    assert rows_of(info.value) == ["x Float[n] float32[4] n: 3 in carry, 4 in x"]


def fails(carry: N, x: N) -> tuple[N, N]:
    raise ZeroDivisionError


@pytest.mark.parametrize(
    ("body", "x", "error"), [(quoted, B, SignatureError), (fails, A, ZeroDivisionError), (quoted, A, None)]
)
def test_no_scope_is_left_behind(body: Callable[..., Any], x: Any, error: type[Exception] | None) -> None:
    with jaxtyped("context"):
        assert isinstance(jnp.ones(7), N)
        if error is None:
            scan(body, A, steps(x))
        else:
            with pytest.raises(error):
                scan(body, A, steps(x))
        assert isinstance(jnp.ones(7), N)
        assert not isinstance(A, N)


# --- who else checks, and what it costs -------------------------------------------------------------------------------


def test_a_decorated_body_is_left_alone() -> None:
    checked = jaxtyped(typechecker=beartype)(quoted)
    scan(checked, A, steps(A))
    with pytest.raises(jaxtyping.TypeCheckError):
        scan(checked, A, steps(B))


def untyped(carry, x):
    return carry, x


def plainly_typed(carry: Array, x: Array) -> tuple[Array, Array]:
    return carry, x


@pytest.mark.parametrize("body", [untyped, plainly_typed])
def test_without_annotations_nothing_is_checked(body: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **keywords: Any) -> Any:
        raise AssertionError("a scope was opened")

    monkeypatch.setattr(jaxtyping, "jaxtyped", refuse)
    scan(body, A, steps(B))
    with pytest.raises(AssertionError, match="a scope was opened"):
        scan(annotated(carry=N), A, steps(B))


def test_annotations_cost_no_operation() -> None:
    def body(carry: N, x: N) -> tuple[N, N]:
        return carry + x, carry

    def plain(carry, x):
        return carry + x, carry

    typed, bare = (jax.make_jaxpr(lambda f=f: scan(f, A, steps(A)))() for f in (body, plain))
    assert str(typed) == str(bare)


@pytest.mark.parametrize("show", [None, lambda carry, y: {"y": y}])
def test_no_other_order_is_advised_where_the_order_is_right(show):
    """The exchanged call would run, but init has fewer axes than xs; or it is not the body that fails."""

    def fails(h, x):
        return (h * 0.9 + x, None) if show is None else (h, None)

    meter = None if show is None else treescan.meters.Progress(show=show, meter=treescan.meters.Text())
    init = jnp.zeros(4) if show is None else jnp.zeros((3, 3))
    with pytest.raises(TypeError) as caught:
        treescan.scan(fails, init, jnp.ones((5, 3)), progress=meter)
    assert "The order is" not in str(caught.value)
