"""Takes a, b and init apart, one recurrence for each leaf of b; and refuses what does not fit."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..._arguments import axis_spec
from ..._avals import (
    Array,
    PyTree,
    as_arrays,
    describe_argument,
    describe_leaf,
    dtype_of,
    is_weak,
    shape_of,
    spec_parts,
)
from ..._errors import Misuse, Row, TypeMisuse
from ..._options.reset_to import check_targets
from ..._rows.axes import RowFlags
from ..._rows.checks import batch_of, check_lengths, check_rows, leads
from ..._rows.fill import HOLD
from ..._transforms.axes import spread_prefix
from ..._tree import Prefix, Root, leaves_with_path, named_roots
from ...carries._registry import Adopted


class Both(NamedTuple):
    """a and b as the user gave them."""

    a: PyTree
    b: PyTree


named_roots(Both, a=Root("a"), b=Root("b"))


def leaves_of(given: Both, init: PyTree, time_axis: int, *, matrix: bool) -> list[tuple[Array, Array, Array]]:
    """For each leaf of b its factors, what it adds, both with the steps in front, and its first state."""
    named_a, named_b = leaves_with_path("a", given.a), leaves_with_path("b", given.b)
    rows = [
        Row(path, "a float or complex dtype", describe_argument(leaf))
        for path, leaf in (*named_a, *named_b)
        if not (_is_inexact(leaf) or (is_weak(leaf) and path.startswith("a")))
    ]
    if rows:
        cure = "Cast them, for example `b.astype(jnp.float32)`."
        if any(callable(leaf) for _, leaf in named_a):
            cure = "It takes arrays and no body: `linear_scan(a, b, init)`."
        raise TypeMisuse("{call}: a and b must be real or complex.", cure, rows=rows)
    _check_steps(named_b, time_axis)
    _refuse_split(named_a, named_b, time_axis)
    named = jax.tree.unflatten(jax.tree.structure(given.a), itertools.starmap(_Named, named_a))
    cure = "Give one {} for all leaves of b, or a prefix tree of b."
    factors = spread_prefix("`a`", named, given.b, "b", cure.format("a"))
    inits = [0] * len(named_b)
    if init is not None:
        inits = spread_prefix("`init`", init, given.b, "b", cure.format("init"))
    each = zip(factors, itertools.starmap(_Named, named_b), inits, strict=True)
    return [_checked(factor, added, own, time_axis, matrix) for factor, added, own in each]


def _check_steps(named: list[tuple[str, Any]], time_axis: int) -> None:
    """Refuses leaves of b without steps, or with different numbers of them."""
    sizes = [(shape_of(leaf) or ())[time_axis : time_axis + 1] for _, leaf in named]
    if named and () not in sizes and len(set(sizes)) == 1:
        return
    says = "leaves of b have no steps" if () in sizes else "the leaves of b do not have the same number of steps"
    raise Misuse(
        f"{{call}}: {says if named else 'b holds no arrays'}.",
        f"b is what each step adds, with the steps along axis {time_axis}.",
        *["If b is a list of numbers, give `jnp.asarray(b)`."] * (() in sizes),
        header=("leaf", "steps", "is"),
        rows=[
            Row(path, str(*size) or "none", describe_argument(leaf))
            for (path, leaf), size in zip(named, sizes, strict=True)
        ],
    )


def _refuse_split(named_a: list[tuple[str, Any]], named_b: list[tuple[str, Any]], time_axis: int) -> None:
    """Refuses leaves whose steps are spread over devices, where shardings are part of the type."""
    bad = [(path, leaf) for path, leaf in (*named_a, *named_b) if axis_spec(leaf, time_axis) is not None]
    if not bad:
        return
    (path, leaf), name = bad[0], axis_spec(bad[0][1], time_axis)
    free = list(map(repr, spec_parts(jax.typeof(leaf).sharding.spec)))
    free[time_axis] = "None"
    solved = f"`jax.shard_map(lambda a, b: linear_scan(a, b, axis_name={name!r}), ...)`"
    raise Misuse(
        "{call}: steps are spread over devices, so that no device has the state before each of its steps.",
        *[f"Let each device solve its own, and hand states on: {solved}."] * isinstance(name, str),
        f"Or give every device all steps: `jax.sharding.reshard({path}, jax.P({', '.join(free)}))`.",
        rows=[Row(path, "not sharded", describe_leaf(leaf), f"axis {time_axis}") for path, leaf in bad],
    )


def _is_inexact(leaf: object) -> bool:
    dtype = dtype_of(leaf)
    return dtype is not None and bool(jnp.issubdtype(dtype, jnp.inexact))


@dataclass(frozen=True)
class _Named:
    path: str
    leaf: Any


_EXCHANGED = "With a and b exchanged, the shapes fit. The order is `linear_scan(a, b, init)`, of `a * h + b`."


def _checked(factor: _Named, added: _Named, init: object, time_axis: int, matrix: bool) -> tuple[Array, Array, Array]:
    """Refuses factors and a first state that do not fit what is added."""
    a, b = (_in_front(each.leaf, time_axis) for each in (factor, added))
    both = f"{factor.path} is {describe_leaf(a)}, and {added.path} is {describe_leaf(b)}"
    both += " (with the steps in front)" * time_axis
    if not a.ndim and not matrix:
        a = a.reshape((1,) * b.ndim)
    shape = (*b.shape, b.shape[-1]) if matrix else b.shape
    inner = a.shape[-2:] == shape[-2:] and b.ndim > 1 if matrix else True
    if not _fits(a.shape, shape) or not inner:
        raise Misuse(
            f"{{call}}: {both}. a must be of shape {list(shape)}. Any axis{' before the last two' * matrix} may be 1.",
            *_with_axes(factor.path, a.shape, shape),
            *[_EXCHANGED] * (not matrix and a.ndim == b.ndim and _fits(b.shape, a.shape)),
            *["For matrices, `[T, ..., n, n]`, pass `matrix=True`."] * (not matrix and a.ndim == b.ndim + 1),
            *["With `matrix=True`, b holds vectors, `[T, ..., n]`."] * matrix,
        )
    dtype = promoted(a, b, jnp.float32)
    if jnp.iscomplexobj(a) and not jnp.iscomplexobj(b):
        raise TypeMisuse(
            f"{{call}}: {both}. The states are complex, and outputs have the dtype of b.",
            f"Cast it: `{added.path}.astype(jnp.{dtype})`.",
        )
    if shape_of(init) not in ((), b.shape[1:]) or promoted(init, dtype) != dtype:
        raise Misuse(
            f"{{call}}: a leaf of init is {describe_argument(init)}, but a state is "
            f"{describe_leaf(jax.ShapeDtypeStruct(b.shape[1:], dtype))}.",
            "Give a number, or an array of that shape and dtype: the dtype is that of a and b together, at least "
            "float32.",
            *[f"Perhaps {leads(time_axis)}"] * (shape_of(init) == (len(b), *b.shape[2:])),
        )
    return a, b, jnp.broadcast_to(jnp.asarray(init, dtype), b.shape[1:])


def _fits(own: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    return len(own) == len(shape) and all(size in (1, n) for size, n in zip(own, shape, strict=True))


def _with_axes(path: str, own: tuple[int, ...], shape: tuple[int, ...]) -> list[str]:
    """The advice to add axes to factors that lack some, where they then fit."""
    none = (1,) * (len(shape) - len(own))
    added, axes = len(none), ", ".join(["None"] * len(none))
    cures = list[str]()
    if added and _fits((*own[:1], *none, *own[1:]), shape):
        cures.append(f"If a has an entry for each step, write `{path}[:, {axes}]`.")
    if added and _fits((*none, *own), shape):
        cures.append(f"If it is the same in all steps, write `{path}[{axes}]`.")
    if added and len(own) > 1 and _fits((*own, *none), shape):
        cures.append(f"If its axes are the first ones of b, write `{path}[..., {axes}]`.")
    return [" ".join(cures)] * bool(cures)


def promoted(*values: object) -> np.dtype:
    """The dtype of all together, whether or not JAX is told to promote none. It promotes no float8 by itself."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.result_type(*(jnp.float32 if _is_narrow(value) else value for value in values))


def _is_narrow(value: Any) -> bool:
    """Whether a value, or a dtype, is of floats of 8 bits and fewer."""
    dtype = np.dtype(dtype_of(value) or value)
    return bool(jnp.issubdtype(dtype, jnp.floating)) and dtype.itemsize < 2


def _in_front(leaf: object, time_axis: int) -> Array:
    array: Array = as_arrays(leaf)
    return jnp.moveaxis(array, time_axis, 0) if array.ndim > time_axis > 0 else array


def check_flags(
    flags: RowFlags, reset_to: PyTree, init: PyTree, b: PyTree, time_axis: int, axis_name: str | None
) -> RowFlags:
    """The flags, which fit b, with what resets restore, for each leaf; `init` has all leaves of b.

    With an axis, lengths are given for the steps of all devices. Those that are returned are the device's.
    """
    if any(each is not None for each in flags):
        named = leaves_with_path("b", b)
        steps, first = named[0][1].shape[0], None
        if axis_name is not None and flags.lengths is not None:
            check_lengths(flags.lengths, steps * jax.lax.axis_size(axis_name), time_axis=time_axis)
            first = steps * jax.lax.axis_index(axis_name)
        flags = check_rows(flags, time_axis, steps, first)
        steps_and_rows = (named[0][1].shape[0], *batch_of(flags, time_axis))
        rows = [
            Row(path, f"[{', '.join(map(str, steps_and_rows))}, ...]", describe_leaf(leaf))
            for path, leaf in named
            if leaf.shape[: len(steps_and_rows)] != steps_and_rows
        ]
        if rows:
            raise Misuse(
                "{call}: b does not have the rows of `lengths`, `mask` or `resets`.",
                "Behind its steps, each leaf has one entry for each row. If the batch leads, [B,T,...]: {batch_first}.",
                rows=rows,
            )
    if reset_to is None and flags.inits is None:
        return flags
    return check_targets(flags, reset_to, init, Prefix.of(0), time_axis, Adopted(init), init, "init")


def refuse_part(flags: RowFlags, fill: PyTree, *, reverse: bool) -> None:
    """Refuses what a device cannot know of its own steps alone."""
    for name, given in (
        ("a `Packed`", flags.spans is not None),
        ("`resets` in reverse", flags.resets is not None and reverse),
        ('`fill="hold"`', HOLD in Prefix.of(fill).leaves),
    ):
        if given:
            raise Misuse(
                f"{{call}}: {name} and `axis_name` cannot be combined: a device does not know the steps of the others.",
                "Keep all steps on each device, and leave `axis_name` out.",
            )
