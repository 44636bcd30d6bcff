"""The one rule for derivatives, of all methods: the derivative of a recurrence is the same recurrence.

Each step's derivative is that of `step`, at the state that is found in the states themselves. So a and the states are
all that is saved. In sequence, it is a scan, which JAX transposes: what all steps share has one cotangent, which the
loop sums. By the other methods, it is the solution of linear equations, which JAX is told how to solve.
"""

from __future__ import annotations

import functools
from typing import TypeGuard

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from ..._avals import Array, ArrayLike
from ..._trace.rules import with_rule
from ..._trace.smooth import zeros_like
from ..._types import Remat
from .methods import driven, over_steps, shifted, solve
from .step import Given, How, but, like_step, linear_step, step


def run(how: How, x: Given) -> tuple[Array, Array]:
    """The last state, and all states in the dtype that is kept, filled, without the rule."""
    if how.method != "sequential":
        hs = _solution(how, driven(how, x._replace(fill=None)))
        return hs[0 if how.reverse else -1], _filled(x, hs.astype(how.out))

    def body(h: Array, x: Given) -> tuple[Array, Array]:
        own = x._replace(valid=None) if how.remat is None else x  # with the rule, padding may be multiplied
        h = but(x.valid, step(how, h, own), h)
        return h, _filled(x, h.astype(how.out))

    remat = None if how.remat is None else Remat(chunk=how.remat)
    return over_steps(how, body, x.start[0], x._replace(start=None), remat=remat)


def _filled(x: Given, hs: Array, fill: ArrayLike | None = None) -> Array:
    return hs if x.fill is None else but(x.valid, hs, x.fill if fill is None else fill)


def recurrence(how: How, x: Given) -> tuple[Array, Array]:
    """`run`, with the rule."""
    return with_rule(functools.partial(run, how), functools.partial(_rule, how))(x)


def _rule(how: How, primals: tuple[Given], tangents: tuple[Given]) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    (x,), (dx,) = primals, tangents
    # Of padding too, as the step after a gap reads it; and not rounded to what is kept, as no step reads that.
    last, hs = recurrence(how._replace(out=how.state), x._replace(fill=None))
    named = zip(("a", "b", "start", "target"), dx[:4], strict=True)
    moving = {name: tangent for name, tangent in named if _moves(tangent)}
    derivative = _in_sequence if how.method == "sequential" else _by_solution
    d_last, d_hs = derivative(how, x._replace(fill=None), hs, moving)
    return (last, _filled(x, hs.astype(how.out))), (d_last, _filled(x, d_hs, 0))


def _moves(tangent: object) -> TypeGuard[Array]:
    return not (tangent is None or isinstance(tangent, SymbolicZero))


def _in_sequence(how: How, x: Given, hs: Array, dx: dict[str, Array]) -> tuple[Array, Array]:
    """A scan, which JAX transposes. The loop itself sums the cotangents of what all steps share.

    It finds the state before each step by its place, because shifted states would be a copy of them.
    """
    large = {name: each for name, each in dx.items() if each.size >= x.b.size and name != "start"}
    small = {name: each for name, each in dx.items() if name not in large and name != "start"}
    dh0 = dx["start"][0] if "start" in dx else like_step(0, x.b, how.state, *x)
    u = _moved(how, x, hs, large) if large else None
    first, back = (len(hs) - 1, 1) if how.reverse else (0, -1)

    def body(dh: Array, x: Given, dx: dict[str, Array], u: Array | None, place: Array) -> tuple[Array, Array]:
        before = jax.lax.dynamic_index_in_dim(hs, jnp.clip(place + back, 0, len(hs) - 1), 0, keepdims=False)
        h = jnp.where(place == first, x.start, before)
        own = {name: getattr(x, name) for name in dx}
        dh = jax.jvp(lambda h, own: step(how, h, x._replace(**own)), (h, own), (dh, dx))[1]
        dh = dh if u is None else dh + u
        return dh, dh.astype(how.out)

    def push(given: tuple[Array, dict[str, Array], Array | None]) -> tuple[Array, Array]:
        dh0, small, u = given
        return over_steps(how, body, dh0, x, small, u, jnp.arange(len(hs)), remat="step")

    # That the loop is linear is written into it where JAX takes its derivative: JAX 0.8 transposes it only then.
    given = dh0, small, u
    return jax.jvp(push, (jax.tree.map(zeros_like, given),), (given,))[1]


def _by_solution(how: How, x: Given, hs: Array, dx: dict[str, Array]) -> tuple[Array, Array]:
    """The solution of `dh - factor * before = u`, where u is what all steps make of the tangents of what they read."""
    dh = _solution(how, x._replace(b=_moved(how, x, hs, dx), start=None, target=None))
    return dh[0 if how.reverse else -1], dh.astype(how.out)


def _solution(how: How, x: Given) -> Array:
    """The states from 0, as `solve` has them: a linear function of b, whose transpose is the recurrence in reverse."""
    back, x, given = how._replace(reverse=not how.reverse), x._replace(b=None), x.b

    def residual(h: Array) -> Array:
        return h - linear_step(how, shifted(how, h, zeros_like(h[:1])), x._replace(b=0))

    def transposed(_: object, right: Array) -> Array:
        def later(each: Array) -> Array:
            return each if len(each) == 1 else shifted(back, each, zeros_like(each[:1]))

        turned = x._replace(a=jnp.swapaxes(x.a, -1, -2) if how.matrix else x.a)
        return solve(back, jax.tree.map(later, turned)._replace(b=right))

    return jax.lax.custom_linear_solve(residual, given, lambda _, b: solve(how, x._replace(b=b)), transposed)


@functools.partial(jax.checkpoint, static_argnums=0)  # neither the states before, nor selections of a, are saved
def _moved(how: How, x: Given, hs: Array, dx: dict[str, Array]) -> Array:
    """What all steps make of the tangents of what they read, but for those of the states before them."""

    def of(own: dict[str, Array]) -> Array:
        moved = x._replace(**own)
        return step(how, shifted(how, hs, moved.start), moved)

    return jax.jvp(of, ({name: getattr(x, name) for name in dx},), (dx,))[1]
