"""Rows that are all on one device: gathered at once, joined, and written where a fusion computes them twice."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._avals import Array, ArrayLike, is_sharded
from . import backend


def in_one_place(*leaves: Any) -> bool:
    """Whether no row of these leaves can be on another device than the rest.

    A masked loop on one device needs to know. There, a row is a slice at a number that is computed, and the rows that
    padding is shown are one gather per leaf. That is less to trace than a slice, its broadcast and a selection. A step
    whose rows are spread over devices must not be hurt: XLA would send all rows of the step to each device for a gather
    or such a slice. A trace does not tell where the axes of a mesh are not explicit. So with several devices the answer
    is no.
    """
    return not any(map(is_sharded, leaves)) and jax.device_count() == 1


def written(leaf: Array) -> Array:
    """A selection in an array of its own, where XLA may otherwise fuse it with what reads it.

    A step that compares a value with itself, as a maximum and its derivative do, needs it. XLA's CPU backend may
    compute a fused value twice, with two roundings, and then the comparison is wrong:
    https://github.com/jax-ml/jax/issues/40564. It removes barriers, and writes what is gathered. A step that decides
    nothing must not be hurt, for which this is a copy of each leaf: callers ask for it only where a body compares or
    chooses, or where it was measured to be faster.
    """
    known = leaf.ndim and all(isinstance(size, int) and size for size in leaf.shape)
    known = known and jnp.issubdtype(leaf.dtype, jnp.inexact)
    fused = backend.on_cpu() and in_one_place(leaf)
    return _written(leaf, np.arange(leaf.shape[0], dtype=np.uint32)[:, None]) if known and fused else leaf


@jax.custom_jvp
def _written(leaf: Array, rows: ArrayLike) -> Array:  # of an array within, checkify would make an argument of the rule
    return gather_rows(leaf, rows, 0, distinct=True)


@_written.defjvp
def _written_rule(primals: tuple[Array, Array], tangents: tuple[Array, Any]) -> tuple[Array, Array]:
    return _written(*primals), tangents[0]  # the transpose of a gather would be a scatter


def gather_rows(
    leaf: Array, rows: ArrayLike, axis: int, *, distinct: bool = False, of_first_step: bool = False
) -> Array:
    """The given rows of a leaf; `rows` is int[N, 1], each within the leaf.

    Args:
        leaf: rows at `axis`.
        rows: which rows; unsigned numbers are not asked whether they count from the end.
        axis: where the rows are.
        distinct: whether all rows differ, which the gradient then relies on.
        of_first_step: the leaf is `[T, ...]`, and the rows are those of the entry 0, where they are at `axis`.
    """
    collapsed = (0, axis + 1) if of_first_step else (axis,)
    others = (*range(axis), *range(axis + 1, leaf.ndim - of_first_step))
    sizes = list(leaf.shape)
    for each in collapsed:
        sizes[each] = 1
    return jax.lax.gather(
        leaf,
        rows,
        jax.lax.GatherDimensionNumbers(others, collapsed, collapsed[-1:]),
        tuple(sizes),
        unique_indices=distinct,
        mode="clip",
    )


def as_one_matrix(stacked: Array, leading: int) -> Array:
    """The operand of a product of many steps, its leading axes, steps and rows, joined to one.

    A step needs it that multiplies a batch with weights, since the cotangent of the weights adds up over all these
    axes: with several of them, XLA's CPU backend copies what the transposed product reads. A step whose rows are
    spread over devices must not be hurt: axes that are joined cannot be spread.
    """
    if not in_one_place(stacked):
        return stacked
    return stacked.reshape(math.prod(stacked.shape[:leading]), *stacked.shape[leading:])
