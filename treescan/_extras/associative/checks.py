"""Checks of the arguments of `associative_scan`."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..._arguments import axis_spec
from ..._avals import Array, PyTree, describe_argument, describe_leaf, dtype_of, holds, is_key, shape_of
from ..._errors import Misuse, Row
from ..._rows.axes import RowFlags
from ..._transforms.axes import spread_prefix
from ..._tree import Root, leaves_with_path, named_roots


class Given(NamedTuple):
    """The elements as the user gave them, which messages name."""

    elements: PyTree


named_roots(Given, elements=Root("elements"))


def check_steps(elements: PyTree, time_axis: int) -> int:
    """How many steps there are; refuses leaves without, with others, or whose steps are spread over devices."""
    named = leaves_with_path("elements", elements)
    sizes: list[tuple[int, ...]] = [(shape_of(leaf) or ())[time_axis : time_axis + 1] for _, leaf in named]
    if not named or () in sizes or len(set(sizes)) > 1:
        says = "the leaves of elements do not have the same number of steps"
        raise Misuse(
            f"{{call}}: {says if named else 'elements holds no arrays'}.",
            f"Each leaf has the steps along axis {time_axis}.",
            header=("leaf", "steps", "is"),
            rows=[
                Row(path, str(*size) or "none", describe_argument(leaf))
                for (path, leaf), size in zip(named, sizes, strict=True)
            ],
        )
    keys = [(path, leaf) for path, leaf in named if is_key(leaf)]
    if keys:
        raise Misuse(
            "{call}: the elements have typed keys, which JAX does not join in rounds.",
            "Give their numbers, `jax.random.key_data`, and make keys of the results, `jax.random.wrap_key_data`.",
            rows=[Row(path, "", describe_leaf(leaf)) for path, leaf in keys],
            header=("leaf", "", "is"),
        )
    split = [(path, leaf) for path, leaf in named if axis_spec(leaf, time_axis) is not None]
    if split:
        raise Misuse(
            "{call}: steps are spread over devices, and each round reads those of others.",
            "Give every device all steps with `jax.sharding.reshard`, and spread rows or features instead.",
            rows=[Row(path, "not sharded", describe_leaf(leaf), f"axis {time_axis}") for path, leaf in split],
        )
    return sizes[0][0]


def check_has_rows(elements: PyTree, lead: tuple[int, ...], time_axis: int) -> None:
    """Refuses leaves without the rows of the flags; `lead` is the steps and the batch shape."""
    shape = (lead[1], lead[0], *lead[2:]) if time_axis else lead
    rows = [
        Row(path, f"[{', '.join(map(str, shape))}, ...]", describe_leaf(leaf))
        for path, leaf in leaves_with_path("elements", elements)
        if (shape_of(leaf) or ())[: len(shape)] != shape
    ]
    if rows:
        raise Misuse(
            "{call}: elements does not have the rows of `lengths`, `mask` or `resets`.",
            "Behind its steps, each leaf has one entry for each row. If the batch leads, [B,T,...]: {batch_first}.",
            rows=rows,
        )


def check_init(init: PyTree, elements: PyTree, flags: RowFlags) -> PyTree:
    """The element before the first ones, leaves `[1, *batch, ...]`; `[N, ...]` if a `Packed` has them. None: none."""
    table, name, lead = flags.inits is not None, "`init`", ""
    if table and init is not None:
        raise Misuse(
            "{call}: elements is a `Packed` with an `init` for each sequence, which already determines `init`.",
            "Leave `init` out, or leave it out of `pack`.",
        )
    if table:
        init, name, lead = flags.inits, "the `init` of the `Packed`", "N, "
    if init is None:
        return None
    cure = "Give one element: a number or an array for each leaf."
    named, rows, found = leaves_with_path("elements", elements), list[Row](), list[Array]()
    for value, (path, leaf) in zip(spread_prefix(name, init, elements, "elements", cure), named, strict=True):
        shape = (flags.spans[0].shape[0], *leaf.shape[2:]) if table and flags.spans is not None else leaf.shape[1:]
        fits = shape_of(value) in ((), shape) and _has_dtype(value, leaf.dtype)
        if fits:
            wide = jnp.broadcast_to(jnp.asarray(value, leaf.dtype), shape)
            found.append(wide if table else wide[None])
        else:
            rows.append(Row(path, describe_leaf(jax.ShapeDtypeStruct(shape, leaf.dtype)), describe_argument(value)))
    if rows:
        raise Misuse(
            f"{{call}}: {name} does not fit the elements.",
            f"Give a number, or an array `[{lead or '*batch, '}...]` of the dtype of the elements.",
            rows=rows,
        )
    return jax.tree.unflatten(jax.tree.structure(elements), found)


def _has_dtype(value: object, dtype: Any) -> bool:
    """Whether a value is of a dtype, or a number that it holds."""
    if isinstance(value, bool | int | float | complex):
        return holds(dtype, value)
    return bool(dtype_of(value) == dtype)
