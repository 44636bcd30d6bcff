"""The one rule for derivatives, of all methods.

The derivative of a recurrence is the same recurrence, of `u = db + da * before`. So it is the solution of linear
equations, `h - factor * before = u`. JAX is told how to solve these, and that the transposed ones are solved by the
recurrence that runs the other way. All transformations and higher derivatives follow; a and h are all that is saved.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from ..._avals import Array
from .methods import run, solve
from .products import How, Steps, but, times, varying, where


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def recurrence(how: How, steps: Steps, a: Array, b: Array, h0: Array, target: Array | None) -> tuple[Array, Array]:
    """The last state and all states, with the rule; see `run`."""
    return run(how, steps, a, b, h0, target)


@functools.partial(recurrence.defjvp, symbolic_zeros=True)
def _rule(how: How, primals: Any, tangents: Any) -> tuple[Any, Any]:
    steps, a, b, h0, target = primals
    _, da, db, dh0, dtarget = (None if isinstance(each, SymbolicZero) else each for each in tangents)
    last, hs = recurrence(how, *primals)
    first = -1 if how.reverse else 0
    u = jnp.zeros_like(b, how.state) if db is None else db.astype(how.state)
    if da is not None:
        before = _before(how, steps, h0, target, hs)
        da = but(steps.valid, da.astype(how.state), 0)
        u = u + times(how, da, before)
    u = but(steps.valid, u, 0)
    if dtarget is not None and steps.cut is not None:
        u = u + but(steps.cut, times(how, but(steps.cut, a.astype(how.state), 0), dtarget[None]), 0)
    if dh0 is not None:
        valid, cut = (None if each is None else each[first] for each in steps)
        enters = but(valid, times(how, but(valid, a[first].astype(how.state), 0), dh0), dh0)
        u = u.at[first].add(where(cut, jnp.zeros((), how.state), enters))
    dh = _solution(how, steps, a, varying(u, a, b, h0, target, *steps))
    return (last, hs), (dh[0 if how.reverse else -1], dh.astype(hs.dtype))


def _before(how: How, steps: Steps, start: Array, target: Any, hs: Array) -> Array:
    """The state that each step is given, of all states."""
    start, hs = start[None], hs.astype(how.state)
    before = jnp.concatenate([hs[1:], start] if how.reverse else [start, hs[:-1]])
    return where(steps.cut, jnp.zeros((), how.state) if target is None else target[None], before)


def _solution(how: How, steps: Steps, a: Array, u: Array) -> Array:
    """The states from 0, as a linear function of u; differentiable by a too."""

    def residual(h: Array) -> Array:
        zero = jnp.zeros_like(h[0])
        product = times(how, but(steps.valid, a.astype(how.state), 0), _before(how, steps, zero, None, h))
        return h - but(steps.valid, product, _before(how, Steps(), zero, None, h))

    return jax.lax.custom_linear_solve(
        residual,
        u,
        solve=lambda _, right: solve(how, steps, a, right),
        transpose_solve=lambda _, right: solve(how, steps, a, right, transposed=True),
    )
