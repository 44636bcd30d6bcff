"""Parts of a recurrence, one after the other: those that the gradient computes again, and those of several devices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ..._avals import Array
from ..._verbs.scan import scan
from .products import How, Steps, but, compose, one, times, turned, varying
from .rule import recurrence


def in_parts(
    how: How, every: int | None, steps: Steps, a: Array, b: Array, h0: Array, target: Array | None
) -> tuple[Array, Array]:
    """The last state and all states. The gradient saves the state before each part of so many steps, and no other."""
    count = b.shape[0]
    if every is None or every >= count:
        whole = recurrence if every is None else jax.checkpoint(recurrence, static_argnums=0)
        return whole(how, steps, a, b, h0, target)
    left, shared = count % every, a.shape[0] == 1
    xs = (steps, None if shared else a, b)
    cut = left if how.reverse else count - left
    rest, most = (jax.tree.map(lambda leaf: leaf[:cut], xs), jax.tree.map(lambda leaf: leaf[cut:], xs))
    rest, most = (rest, most) if how.reverse else (most, rest)

    def part(h: Array, x: Any) -> tuple[Array, Array]:
        steps, own, b = x
        return recurrence(how, steps, a if shared else own, b, h, target)

    split = jax.tree.map(lambda leaf: leaf.reshape(-1, every, *leaf.shape[1:]), most)
    h, hs = scan(part, h0, split, reverse=how.reverse, remat="step")
    hs = hs.reshape(-1, *hs.shape[2:])
    if not left:
        return h, hs
    h, others = jax.checkpoint(part)(h, rest)
    return h, jnp.concatenate([others, hs] if how.reverse else [hs, others])


def steps_of_device(lengths: Any, count: int, axis_name: str) -> Any:
    """The lengths of rows within the steps of this device."""
    if lengths is None:
        return None
    return jnp.clip(jnp.asarray(lengths) - jax.lax.axis_index(axis_name) * count, 0, count)


def between_devices(
    how: How, every: int | None, axis_name: str, steps: Steps, a: Array, b: Array, h0: Array, target: Array | None
) -> Array:
    """The state before the first step of this device.

    Each device sends what it knows, a product and a state, to the one that is 1, 2, 4, ... later, so that each knows
    of twice as many devices after each exchange. Rows with a cut have no product: what comes before it is not read.
    """
    count, place = jax.lax.axis_size(axis_name), jax.lax.axis_index(axis_name)
    is_first = place == (count - 1 if how.reverse else 0)
    state, _ = in_parts(how, every, steps, a, b, jnp.where(is_first, h0, 0), target)
    none = None if steps.cut is None else ~jnp.any(steps.cut, 0)
    known = but(none, _product(how, every, steps, a, b), 0), state, none
    before = (
        jnp.broadcast_to(one(how, a[0]), known[0].shape),
        jnp.zeros_like(state),
        None if none is None else jnp.ones_like(none),
    )
    distance = 1
    while distance < count:
        way = [(i + distance, i) if how.reverse else (i, i + distance) for i in range(count - distance)]
        came = jax.tree.map(lambda leaf, way=way: jax.lax.ppermute(leaf, axis_name, way), known)
        known, before = _after(how, known, came), _after(how, before, came)
        distance *= 2
    return jnp.where(is_first, h0, before[1])


def _product(how: How, every: int | None, steps: Steps, a: Array, b: Array) -> Array:
    """The product of all factors: the last state of the recurrence that starts from 1 and adds nothing."""
    unit, wide = jnp.ones(b.shape[1:], how.state), jnp.zeros_like(b, how.state)
    if how.matrix:  # of the columns of 1, which are states in rows
        a, wide = a[..., None, :, :], jnp.broadcast_to(wide[..., None, :], (*b.shape, b.shape[-1]))
        unit = jnp.broadcast_to(jnp.eye(b.shape[-1], dtype=how.state), wide.shape[1:])
    plain, steps = how._replace(out=how.state), Steps(steps.valid)
    return turned(how, in_parts(plain, every, steps, a, wide, varying(unit, a, b, *steps), None)[0])


def _after(how: How, later: Any, earlier: Any) -> Any:
    """What is known of devices, and of those before them."""
    product, state, none = later
    entered = times(how, product, but(none, earlier[1], 0))
    both = None if none is None else none & earlier[2]
    return but(both, compose(how, product, earlier[0]), 0), entered + state, both


def last_of_devices(last: Array, axis_name: str, *, reverse: bool) -> Array:
    """The last state of all steps, on each device."""
    final = 0 if reverse else jax.lax.axis_size(axis_name) - 1
    return jax.lax.psum(jnp.where(jax.lax.axis_index(axis_name) == final, last, 0), axis_name)
