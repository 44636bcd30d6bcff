"""Takes a, b and init apart: one recurrence for each leaf of b, of types and shapes that fit."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..._arguments import infer_length
from ..._avals import Array, PyTree, as_arrays, describe_argument, describe_leaf, is_weak, shape_of
from ..._errors import Misuse, Row, TypeMisuse
from ..._transforms.axes import spread_prefix
from ..._tree import Root, leaves_with_path, named_roots


class Both(NamedTuple):
    """a and b as the user gave them."""

    a: PyTree
    b: PyTree


named_roots(Both, a=Root("a"), b=Root("b"))


class Leaf(NamedTuple):
    """One recurrence.

    Attributes:
        path: of its leaf of b.
        a: its factors, with the steps in front.
        b: what it adds, with the steps in front.
        h0: what it starts from, of the dtype of the state.
    """

    path: str
    a: Array
    b: Array
    h0: Array


def leaves_of(given: Both, init: PyTree, time_axis: int, *, matrix: bool) -> tuple[int, list[Leaf]]:
    """The number of steps, and the recurrences, checked."""
    named_a, named_b = leaves_with_path("a", given.a), leaves_with_path("b", given.b)
    _check_dtypes([*named_a, *named_b])
    count = infer_length(given.b, None, (time_axis,) * len(named_b))
    prefix = "Give one a for all leaves of b, or a prefix tree of b."
    paths = iter(range(len(named_a)))
    chosen = spread_prefix("`a`", jax.tree.map(lambda _: next(paths), given.a), given.b, "b", prefix)
    inits = [None] * len(named_b)
    if init is not None:
        inits = spread_prefix("`init`", init, given.b, "b", "Give one init for all leaves of b, or a prefix tree of b.")
    found = list[Leaf]()
    for (path, b), number, own in zip(named_b, chosen, inits, strict=True):
        a_path, a = named_a[number]
        a, b = _moved(a, time_axis), _moved(b, time_axis)
        _check_shapes(a_path, a, path, b, matrix, time_axis)
        dtype = promoted(a, b, jnp.float32)
        if jnp.iscomplexobj(a) and not jnp.iscomplexobj(b):
            raise TypeMisuse(
                f"{{call}}: {a_path} is {describe_leaf(a)}, but {path} is {describe_leaf(b)}. The states are complex, "
                "and outputs have the dtype of b.",
                f"Cast it: `{path}.astype(jnp.{dtype})`.",
            )
        a = a.reshape((1,) * (b.ndim + matrix)) if not a.ndim else a
        found.append(Leaf(path, a, b, _start(own, b, dtype)))
    return count, found


def promoted(*values: Any) -> Any:
    """The dtype of all together, whether or not JAX is told to promote none."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.result_type(*values)


def _moved(leaf: Any, time_axis: int) -> Array:
    leaf = as_arrays(leaf)
    return jnp.moveaxis(leaf, time_axis, 0) if leaf.ndim > time_axis > 0 else leaf


def _check_dtypes(named: list[tuple[str, Any]]) -> None:
    rows = [
        Row(path, "a float or complex dtype", describe_argument(leaf))
        for path, leaf in named
        if not (jnp.issubdtype(jnp.result_type(leaf), jnp.inexact) or (is_weak(leaf) and path.startswith("a")))
    ]
    if rows:
        raise TypeMisuse(
            "{call}: a and b must be real or complex.",
            "Cast them, for example `b.astype(jnp.float32)`.",
            rows=rows,
        )


def _check_shapes(a_path: str, a: Array, path: str, b: Array, matrix: bool, time_axis: int) -> None:
    """Refuses factors that do not fit what is added."""
    both = f"{a_path} is {describe_leaf(a)}, and {path} is {describe_leaf(b)}"
    both += " (with the steps in front)" * time_axis
    if not matrix and not a.ndim:
        return
    wanted = b.ndim + matrix
    other = "b and a matrix" if matrix else "b"
    if a.ndim < wanted:
        ahead, behind = ", ".join(["None"] * (wanted - a.ndim)), ", ".join([":", *["None"] * (wanted - a.ndim)])
        raise Misuse(
            f"{{call}}: {both}. a has fewer axes than {other}, so it is not clear which axis has the steps.",
            f"If it has an entry for each step, write `{a_path}[{behind}]`. If it is the same in all steps, write "
            f"`{a_path}[{ahead}]`.",
        )
    if a.ndim > wanted:
        cure = "For matrices, `[T, ..., n, n]`, pass `matrix=True`." if a.ndim == b.ndim + 1 else "Drop axes of a."
        raise Misuse(f"{{call}}: {both}. a has more axes than b.", cure)
    if matrix and (a.ndim < 3 or a.shape[-1] != a.shape[-2] or a.shape[-1] != b.shape[-1]):
        n = b.shape[-1] if b.ndim > 1 else "n"
        raise Misuse(
            f"{{call}}: {both}. With `matrix=True`, the last two axes of a must be [{n}, {n}].",
            f"The states of b are vectors, [T, ..., {n}], and a must hold a square matrix for each.",
        )
    wide = (*a.shape[:-2], a.shape[-1]) if matrix else a.shape
    if wide[0] not in (1, b.shape[0]):
        raise Misuse(
            f"{{call}}: {both}. a has {wide[0]} steps, and b has {b.shape[0]}.",
            "Give a as many steps as b, or a single one that holds for all.",
        )
    if any(own not in (1, size) for own, size in zip(wide[1:], b.shape[1:], strict=True)):
        raise Misuse(
            f"{{call}}: {both}. a does not broadcast to b.",
            "Each axis of a must be of size 1 or of the size that b has there.",
        )


def _start(init: Any, b: Array, dtype: Any) -> Array:
    """The first state, as large as a step of b."""
    if init is None:
        return jnp.zeros(b.shape[1:], dtype)
    if shape_of(init) not in ((), b.shape[1:]) or promoted(init, dtype) != dtype:
        raise Misuse(
            f"{{call}}: a leaf of init is {describe_argument(init)}, but a state is "
            f"{describe_leaf(jax.ShapeDtypeStruct(b.shape[1:], dtype))}.",
            "Give a number, or an array of that shape and dtype: the dtype is that of a and b together, at least "
            "float32.",
        )
    return jnp.asarray(init, dtype)
