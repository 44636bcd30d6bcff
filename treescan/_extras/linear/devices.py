"""Steps that are split over devices."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from ..._avals import Array, PyTree
from ..._errors import Misuse
from ..._rows.axes import RowFlags
from ..._rows.fill import HOLD
from ..._tree import Prefix
from .methods import shifted, summary
from .step import Given, How, joined, step


def refuse_part(flags: RowFlags, fill: PyTree, *, reverse: bool) -> None:
    """Refuses what a device cannot know of its own steps alone."""
    if flags.spans is not None:
        raise Misuse(
            "{call}: the steps of a `Packed` cannot be split over devices: its index counts the steps of all.",
            "Split its rows, without `axis_name`. Or pass its `data`, `mask` and `resets`.",
        )
    if flags.resets is not None and reverse:
        raise Misuse(
            "{call}: `resets` and `axis_name` cannot be combined in reverse: where the last segment of a device ends "
            "is known to the next device.",
            "Run forward, or keep all steps on each device.",
        )
    if HOLD in Prefix.of(fill).leaves:
        cure = "Give a number."
        raise Misuse('{call}: `fill="hold"` cannot be combined with `axis_name`.', cure)


def lengths_of_device(lengths: Any, count: int, axis_name: str) -> Array:
    """The lengths of rows within the steps of this device, of which there are `count`."""
    return jnp.clip(jnp.asarray(lengths) - jax.lax.axis_index(axis_name) * count, 0, count)


def between_devices(how: How, axis_name: str, x: Given, h0: Array) -> Array:
    """The state before the first step of this device.

    Each device sends what it knows, a product and a state, to the one that is 1, 2, 4, ... later, so that each knows
    of twice as many devices after each exchange.
    """
    count, place = jax.lax.axis_size(axis_name), jax.lax.axis_index(axis_name)
    is_first = place == (count - 1 if how.reverse else 0)
    zeros = jnp.zeros_like(x.b, how.state)
    driven = step(how, shifted(how, zeros, jnp.where(is_first, h0, 0)), x)
    known = before = summary(how, x._replace(b=driven, target=None))
    distance = 1
    while distance < count:
        way = [(i + distance, i) if how.reverse else (i, i + distance) for i in range(count - distance)]
        came = jax.tree.map(functools.partial(jax.lax.ppermute, axis_name=axis_name, perm=way), known)
        before = came if distance == 1 else joined(how, before, came)
        known, distance = joined(how, known, came), 2 * distance
    return jnp.where(is_first, h0, before.b)


def last_of_devices(last: Array, axis_name: str, *, reverse: bool) -> Array:
    """The last state of all steps, on each device."""
    final = 0 if reverse else jax.lax.axis_size(axis_name) - 1
    return jax.lax.psum(jnp.where(jax.lax.axis_index(axis_name) == final, last, 0), axis_name)
