"""The one rule for derivatives, of all methods: the derivative of a recurrence is the same recurrence.

Each step's derivative is that of `step`, at the state that is found in the states themselves. So a and the states are
all that is saved. In sequence, it is a scan, which JAX transposes: what all steps share has one cotangent, which the
loop sums. By the other methods, it is the solution of linear equations, which JAX is told how to solve.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from ..._avals import Array
from ..._types import Remat
from .methods import over_steps, shifted, solve
from .step import Given, How, like_step, linear_step, step


def run(how: How, x: Given, h0: Array) -> tuple[Array, Array]:
    """The last state, and all states in the dtype that is kept, without the rule.

    Args:
        how: how it is computed.
        x: what the steps read.
        h0: the state before the first step.
    """
    if how.method == "sequential":

        def body(h: Array, x: Given) -> tuple[Array, Array]:
            h = step(how, h, x)
            return h, h.astype(how.out)

        remat = None if how.remat is None else Remat(segment=how.remat)
        return over_steps(how, body, h0, x, remat=remat)
    zeros = jnp.zeros_like(x.b, how.state)
    hs = solve(how, x._replace(b=step(how, shifted(how, zeros, h0), x)))
    return hs[0 if how.reverse else -1], hs.astype(how.out)


recurrence = jax.custom_jvp(run, nondiff_argnums=(0,))
"""`run`, with the rule."""


@functools.partial(recurrence.defjvp, symbolic_zeros=True)
def _rule(how: How, primals: Any, tangents: Any) -> tuple[Any, Any]:
    x, h0 = primals
    *dx, dh0 = (None if isinstance(each, SymbolicZero) else each for each in (*tangents[0][:3], tangents[1]))
    last, hs = recurrence(how, x, h0)
    moving = {name: each for name, each in zip(x._fields, dx, strict=False) if each is not None}
    if how.method == "sequential":
        return (last, hs), _in_sequence(how, x, h0, hs, moving, dh0)
    dh = _solution(how, x, _driven(how, x, h0, hs, moving, dh0))
    return (last, hs), (dh[0 if how.reverse else -1], dh.astype(how.out))


def _driven(how: How, x: Given, h0: Array, hs: Array, dx: dict[str, Array], dh0: Any = None) -> Array:
    """What all steps make of the tangents of what they read, but for those of the states before them."""

    @jax.checkpoint  # so that neither the states before, nor selections of a, are saved
    def driven(dx: Any, x: Given, h0: Array, hs: Array) -> Array:
        def of(own: dict[str, Array], h0: Array) -> Array:
            return step(how, shifted(how, hs.astype(how.state), h0), x._replace(**own))

        dx, dh0 = dx
        own = {name: getattr(x, name) for name in dx}
        if dh0 is None:
            return jax.jvp(lambda own: of(own, h0), (own,), (dx,))[1]
        return jax.jvp(of, (own, h0), (dx, dh0))[1]

    return driven((dx, dh0), x, h0, hs)


def _in_sequence(how: How, x: Given, h0: Array, hs: Array, dx: dict[str, Array], dh0: Any) -> tuple[Array, Array]:
    """A scan, which JAX transposes. The loop itself sums the cotangents of what all steps share.

    It finds the state before each step by its place, because shifted states would be a copy of them.
    """
    stacks = {name: each for name, each in dx.items() if each.size >= x.b.size}
    shared = {name: each for name, each in dx.items() if each.size < x.b.size}
    u = _driven(how, x, h0, hs, stacks) if stacks else None
    first, back = (len(hs) - 1, 1) if how.reverse else (0, -1)

    def body(dh: Array, x: Given, dx: dict[str, Array], place: Array, u: Array | None) -> tuple[Array, Array]:
        before = jax.lax.dynamic_index_in_dim(hs, jnp.clip(place + back, 0, len(hs) - 1), 0, keepdims=False)
        h = jnp.where(place == first, h0, before.astype(how.state))
        own = {name: getattr(x, name) for name in dx}
        dh = jax.jvp(lambda h, own: step(how, h, x._replace(**own)), (h, own), (dh, dx))[1]
        dh = dh if u is None else dh + u
        return dh, dh.astype(how.out)

    dh0 = like_step(0, x.b, how.state, h0, *x) if dh0 is None else dh0
    return over_steps(how, body, dh0, x, shared, jnp.arange(len(hs)), u, remat="step")


def _solution(how: How, x: Given, u: Array) -> Array:
    """The states from 0 that add u, as the solution of `dh - factor * before = u`."""
    back = how._replace(reverse=not how.reverse)

    def residual(dh: Array) -> Array:
        return dh - linear_step(how, shifted(how, dh, jnp.zeros_like(dh[0])), x._replace(b=0))

    def transposed(_: Any, right: Array) -> Array:
        def later(each: Array) -> Array:
            return each if len(each) == 1 else shifted(back, each, jnp.zeros_like(each[0]))

        turned = jnp.swapaxes(x.a, -1, -2) if how.matrix else x.a
        return solve(back, jax.tree.map(later, x._replace(a=turned, b=None))._replace(b=right))

    return jax.lax.custom_linear_solve(residual, u, lambda _, u: solve(how, x._replace(b=u)), transposed)
