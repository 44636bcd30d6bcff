"""The methods: each solves `h[t] = factor[t] * h[t-1] + u[t]`, or the transposed equations, which run the other way.

The factor of a step that is not valid is 1. Where a segment begins, the state before is not read: it is selected away,
because an infinity or a product that overflows would survive a factor of 0.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp

from ..._avals import Array
from ..._verbs.scan import scan
from .products import How, Steps, but, compose, like_step, one, times, turned, where


def run(how: How, steps: Steps, a: Array, b: Array, h0: Array, target: Array | None) -> tuple[Array, Array]:
    """The last state, and all states in the dtype that is kept.

    Args:
        how: how it is computed.
        steps: which steps are valid, and where segments begin.
        a: the factors, [T, ...] or [1, ...].
        b: what is added, [T, ...].
        h0: the state before the first step.
        target: what segments begin from; None: 0.
    """
    if how.method == "sequential":
        return _in_sequence(how, steps, a, b, h0, target)
    u = but(steps.valid, b.astype(how.state), 0)
    if steps.cut is not None and target is not None:
        u = u + but(steps.cut, times(how, but(steps.cut, a.astype(how.state), 0), target[None]), 0)
    first = -1 if how.reverse else 0
    factor = _factors(how, steps, a)[first]
    enters = where(None if steps.cut is None else steps.cut[first], jnp.zeros((), how.state), times(how, factor, h0))
    hs = solve(how, steps, a, u.at[first].add(enters))
    return hs[0 if how.reverse else -1], hs.astype(how.out)


def solve(how: How, steps: Steps, a: Array, u: Array, *, transposed: bool = False) -> Array:
    """The states from 0, a linear function of u in the dtype of the state; or its transpose.

    Here u counts in each step, valid or not.
    """
    if how.method == "sequential":
        zero = like_step(0, u, how.state, a, *steps)
        if transposed:
            return _backwards(how, steps, a, u, zero)
        return _in_sequence(how._replace(out=how.state), Steps(None, steps.cut), a, u, zero, None, steps.valid)[1]
    factor, cut, backwards = _factors(how, steps, a), steps.cut, how.reverse != transposed
    if transposed:
        factor = _later(how, turned(how, factor)) if factor.shape[0] > 1 else turned(how, factor)
        cut = None if cut is None else _later(how, cut)
    if backwards:
        factor, u, cut = jnp.flip(factor, 0), jnp.flip(u, 0), None if cut is None else jnp.flip(cut, 0)
    hs = (_chunked if how.method == "chunked" else _parallel)(how, factor, u, cut)
    return jnp.flip(hs, 0) if backwards else hs


def _factors(how: How, steps: Steps, a: Array) -> Array:
    return but(steps.valid, a.astype(how.state), one(how, a))


def _later(how: How, each: Array) -> Array:
    """For each step what the step after it has, in the order of the run; nothing comes after the last one."""
    end = jnp.zeros_like(each[:1])
    return jnp.concatenate([end, each[:-1]] if how.reverse else [each[1:], end])


def _in_sequence(
    how: How, steps: Steps, a: Array, u: Array, h0: Array, target: Array | None, holds: Array | None = None
) -> tuple[Array, Array]:
    """A scan. Flags are selected by in its step, which makes no copies of a and u.

    In steps where `holds` is not set, the state before is not multiplied, but u is added.
    """
    shared = a.shape[0] == 1
    zero = jnp.zeros((), how.state) if target is None else target

    def step(h: Array, x: Any) -> tuple[Array, Array]:
        a_t, u_t, valid, cut, multiplied = x
        before = where(cut, zero, h)
        now = times(how, (a[0] if shared else a_t).astype(how.state), before)
        h = but(valid, but(multiplied, now, h) + u_t.astype(how.state), h)
        return h, h.astype(how.out)

    return scan(step, h0, (None if shared else a, u, *steps, holds), reverse=how.reverse)


def _backwards(how: How, steps: Steps, a: Array, u: Array, zero: Array) -> Array:
    """The transpose of `_in_sequence`. Its carry is what the state before is given, so that no factor is shifted."""
    shared = a.shape[0] == 1

    def step(back: Array, x: Any) -> tuple[Array, Array]:
        a_t, u_t, valid, cut = x
        now = back + u_t
        factor = turned(how, (a[0] if shared else a_t).astype(how.state))
        return but(valid, where(cut, jnp.zeros((), how.state), times(how, factor, now)), now), now

    return scan(step, zero, (None if shared else a, u, *steps), reverse=not how.reverse)[1]


def _parallel(how: How, a: Array, u: Array, cut: Array | None) -> Array:
    """Pairs of steps are composed, which is the same problem of half the length, and gives every other state."""
    n = u.shape[0]
    if n == 1:
        return u
    (first, second), (cut_first, cut_second) = _halves(a, n), _halves(cut, n)
    both = None if cut is None else cut_first | cut_second
    entered = where(cut_second, jnp.zeros((), how.state), times(how, second, u[0 : n - 1 : 2]))
    odd = _parallel(how, compose(how, second, first), entered + u[1::2], both)
    before, later = (odd if n % 2 else odd[:-1]), a if a.shape[0] == 1 else a[2::2]
    entered = times(how, later, before)
    entered = where(None if cut is None else cut[2::2], jnp.zeros((), how.state), entered)
    even = jnp.concatenate([u[:1], entered + u[2::2]])
    odd = jnp.concatenate([odd, jnp.zeros_like(odd[:1])]) if n % 2 else odd
    return jnp.stack([even, odd], 1).reshape(-1, *u.shape[1:])[:n]


def _halves(each: Any, n: int) -> tuple[Any, Any]:
    """Those of the even steps that have an odd one after them, and those of the odd steps."""
    return (each, each) if each is None or each.shape[0] == 1 < n else (each[0 : n - 1 : 2], each[1::2])


def _chunked(how: How, a: Array, u: Array, cut: Array | None) -> Array:
    """About sqrt(T) parts side by side: what each makes of a state, then the states between them, then all states."""
    n, shared = u.shape[0], a.shape[0] == 1
    size = -(-n // math.isqrt(n))

    def split(each: Array | None) -> Array | None:
        """[size, parts, ...], filled up at the end."""
        if each is None:
            return None
        left = jnp.zeros((-n % size, *each.shape[1:]), each.dtype)
        each = jnp.concatenate([each, left]) if left.shape[0] else each
        return jnp.swapaxes(each.reshape(-1, size, *each.shape[1:]), 0, 1)

    xs = (None if shared else split(a), split(u), split(cut))
    plain = How("sequential", how.matrix, False, how.state, how.state)
    u_parts = xs[1]
    assert u_parts is not None
    zero = jnp.zeros_like(u_parts[0])
    factor = a[:1] if shared else split(a)[0]  # type: ignore[index]
    whole = jnp.broadcast_to(one(how, a), (u_parts.shape[1], *factor.shape[1:])) + jnp.zeros_like(factor)

    def compose_part(state: Any, x: Any) -> tuple[Any, None]:
        product, h, any_cut = state
        a_t, u_t, cut_t = x
        a_t = a if shared else a_t
        h = where(cut_t, jnp.zeros((), how.state), times(how, a_t, h)) + u_t
        return (compose(how, a_t, product), h, None if cut_t is None else any_cut | cut_t), None

    none = None if xs[2] is None else jnp.zeros_like(xs[2][0])
    (product, ends, any_cut), _ = scan(compose_part, (whole, zero, none), xs)
    product = where(any_cut, jnp.zeros((), how.state), product)
    between = _in_sequence(plain, Steps(None, any_cut), product, ends, zero[0], None)[1]
    starts = jnp.concatenate([zero[:1], between[:-1]])

    def step(h: Array, x: Any) -> tuple[Array, Array]:
        a_t, u_t, cut_t = x
        h = where(cut_t, jnp.zeros((), how.state), times(how, a if shared else a_t, h)) + u_t
        return h, h

    hs = scan(step, starts, xs)[1]
    return jnp.swapaxes(hs, 0, 1).reshape(-1, *u.shape[1:])[:n]
