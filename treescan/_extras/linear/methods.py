"""The methods. Each solves `h = a * before + b` for all steps, where `before` is the state of the step before.

Where a segment begins, the state before is selected away, because an infinity, or a product that overflows, would
survive a factor of 0.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp

from ..._avals import Array, PyTree
from ..._trace.smooth import zeros_like
from ..._types import RematLike
from ..._verbs.scan import scan
from .step import Given, How, but, compose, factor, joined, linear_step, step

_FEW = 8
"""How many steps a part has in "parallel": its pairs then take an eighth of the memory."""

S = TypeVar("S")
Y = TypeVar("Y")


def over_steps(
    how: How, body: Callable[..., tuple[S, Y]], state: S, *trees: PyTree, axis: int = 0, remat: RematLike | None = None
) -> tuple[S, Y]:
    """A scan of `body(state, *trees)` over an axis of all arrays, which has size 1 in those that all steps share.

    The latter are no stacks, so neither are their cotangents. Over axis 1, which is not to be transposed, arrays are
    not copied.
    """
    leaves, structure = jax.tree.flatten(trees)
    count = max(leaf.shape[axis] for leaf in leaves)
    of_all = [leaf.shape[axis] == 1 for leaf in leaves]
    xs = [jnp.take(leaf, 0, axis) if is_one else leaf for leaf, is_one in zip(leaves, of_all, strict=True)]

    def each(state: S, given: tuple[Array, list[Array]]) -> tuple[S, Y]:
        place, x = given
        if axis:
            picked = functools.partial(jax.lax.dynamic_index_in_dim, index=place, axis=axis, keepdims=False)
            x = [leaf if is_one else picked(leaf) for leaf, is_one in zip(x, of_all, strict=True)]
        return body(state, *jax.tree.unflatten(structure, x))

    axes = [None if is_one or axis else 0 for is_one in of_all]
    given = (jnp.arange(count), xs)
    # The steps are ours, so they show no progress, also within `treescan.progress`.
    return scan(each, state, given, reverse=how.reverse, in_axes=(0, axes), remat=remat, progress=False)


def shifted(how: How, hs: Array, start: Array) -> Array:
    """For each step the state before it; the first one's has an axis of size 1 in front."""
    return jnp.concatenate([hs[1:], start] if how.reverse else [start, hs[:-1]])


def summary(how: How, x: Given, axis: int = 0) -> Given:
    """The steps as one: their product, what they make of 0, and whether they are linked, as in `joined`."""
    zero = zeros_like(jax.lax.index_in_dim(x.b, 0, axis, keepdims=False))
    one = zero + 1
    if how.matrix:
        one = zero[..., None] + jnp.expand_dims(jnp.eye(zero.shape[-1], dtype=zero.dtype), range(zero.ndim - 1))

    def body(state: tuple[Array, Array], x: Given) -> tuple[tuple[Array, Array], None]:
        whole, h = state
        return (compose(how, factor(how, x), but(x.linked, whole, 0)), linear_step(how, h, x)), None

    (whole, h), _ = over_steps(how, body, (one, zero), x, axis=axis, remat="step")
    linked = None if x.linked is None else jnp.all(x.linked, axis)
    return Given(but(linked, whole, 0), h, linked=linked)


def solve(how: How, x: Given) -> Array:
    """The states from 0, as a linear function of b, which counts in each step; not for "sequential".

    Parts are taken side by side: what each makes of a state, then the states between them, then all states.
    """
    count = x.b.shape[0]
    root = math.isqrt(count)
    best = max(range(root // 2 + 1, root + 1), key=lambda size: (count % size == 0, size))
    size = best if how.method == "chunked" else _FEW
    number = -(-count // size)

    def split(each: Array) -> Array:
        """[parts, size, ...], filled up at the end; of what all steps share, [1, 1, ...]."""
        if len(each) == 1:
            return each[None]
        if count % size:
            left = (-count % size, *each.shape[1:])
            each = jnp.concatenate([each, jnp.broadcast_to(zeros_like(each[:1]), left)])
        return each.reshape(number, size, *each.shape[1:])  # a -1 is no number if there are no rows

    def body(h: Array, x: Given) -> tuple[Array, Array]:
        h = linear_step(how, h, x)
        return h, h

    parts: Given = jax.tree.map(split, x)
    whole = summary(how, parts, axis=1)
    zero = zeros_like(whole.b[0])
    if how.method == "chunked":
        between = over_steps(how, body, zero, whole)[1]
    else:
        later = functools.partial(joined, how)
        between = jax.lax.associative_scan(lambda one, two: later(two, one), whole, reverse=how.reverse).b
    hs = jnp.swapaxes(over_steps(how, body, shifted(how, between, zero[None]), parts, axis=1)[1], 0, 1)
    return hs.reshape(hs.shape[0] * hs.shape[1], *x.b.shape[1:])[:count]  # a single step is a part of one


def between_devices(how: How, axis_name: str, x: Given) -> Array:
    """The state before the first step of this device.

    Each device sends what it knows, a product and a state, to the one that is 1, 2, 4, ... later, so that each knows
    of twice as many devices after each exchange.
    """
    count, place = jax.lax.axis_size(axis_name), jax.lax.axis_index(axis_name)
    is_first, distance = place == (count - 1 if how.reverse else 0), 1
    start = jnp.where(is_first, x.start, 0)
    known = before = summary(how, driven(how, x._replace(start=start)))
    while distance < count:
        way = [(i + distance, i) if how.reverse else (i, i + distance) for i in range(count - distance)]
        came = jax.tree.map(functools.partial(jax.lax.ppermute, axis_name=axis_name, perm=way), known)
        before = came if distance == 1 else joined(how, before, came)
        known, distance = joined(how, known, came), 2 * distance
    return jnp.where(is_first, x.start, before.b[None])


def driven(how: How, x: Given) -> Given:
    """A recurrence from 0, to which is added what this one starts from, and what its segments begin from."""
    added = step(how, shifted(how, zeros_like(x.b).astype(how.state), x.start), x)
    return x._replace(b=added, start=None, target=None)
