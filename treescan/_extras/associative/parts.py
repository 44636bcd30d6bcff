"""Parts of rows, and how an operator joins them: a part is consecutive steps of each row, as one element."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ..._avals import Array, PyTree, describe_leaf, describe_node
from ..._errors import BodyFault, Row
from ..._rows.leaves import expand, select
from ..._tree import leaves_with_path, same_structure

Operator = Callable[[PyTree, PyTree], PyTree]


class Part(NamedTuple):
    """A part of each row; leaves `[n, *batch, ...]`, n parts that follow each other.

    Attributes:
        value: its steps as one element; of a part with several segments, those of the last.
        some: bool[n, *batch]: whether a step of it is valid; None: all are.
        begins: bool[n, *batch]: whether a segment begins in it; None: none does.
    """

    value: PyTree
    some: Array | None = None
    begins: Array | None = None


class Pair(NamedTuple):
    """Two elements that follow each other, leaves `[1, ...]`, with size 1 for each axis of the rows."""

    before: PyTree
    here: PyTree


def join(operator: Operator, asked: Pair | None, before: Part, here: Part) -> Part:
    """Two parts that follow each other as one. The operator is given `asked` for entries that are not joined."""
    joined = _all_of(before.some, here.some, None if here.begins is None else ~here.begins)
    if joined is None or asked is None:
        return Part(apply(operator, before.value, here.value))
    value = apply(operator, choose(joined, before.value, asked.before), choose(joined, here.value, asked.here))
    alone = here.value if here.some is None else choose(here.some, here.value, before.value)
    some = None if before.some is None or here.some is None else before.some | here.some
    begins = None if before.begins is None or here.begins is None else before.begins | here.begins
    return Part(choose(joined, value, alone), some, begins)


def apply(operator: Operator, before: PyTree, here: PyTree) -> PyTree:
    """What the operator makes of stacks of elements, which it must return as they came."""
    value = operator(before, here)
    came, given = (leaves_with_path("y", tree) for tree in (value, here))
    if not same_structure(here, value):
        rows = [Row("y", describe_node(here), describe_node(value))]
    else:
        rows = [
            Row(path, describe_leaf(leaf), describe_leaf(other))
            for (path, leaf), (_, other) in zip(given, came, strict=True)
            if _type(leaf) != _type(other)
        ]
    if rows:
        raise BodyFault(
            "{body} does not return elements of the type that it is given.",
            "It is given two stacks of elements, with the same leaves `[n, ...]`, and returns one. To write it for two "
            "single elements, map it: `jax.vmap(operator)`, once for each axis that leads.",
            rows=rows,
        )
    return value


def _type(leaf: object) -> object:
    return getattr(leaf, "shape", None), getattr(leaf, "dtype", None)


def choose(flags: Array, new: PyTree, old: PyTree) -> PyTree:
    """`new` where rows are flagged, `old` elsewhere; the flags' axes lead."""
    return jax.tree.map(lambda a, b: select(expand(flags, a, 0), a, b), new, old)


def _all_of(*flags: Array | None) -> Array | None:
    known = [each for each in flags if each is not None]
    return functools.reduce(jnp.logical_and, known) if known else None
