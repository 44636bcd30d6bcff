"""A linear function that is told its transpose, as `jax.custom_derivatives.linear_call` would have it.

`linear_call` cannot be mapped, and cannot be differentiated by what the function reads beside its argument. Once JAX
has both rules, `with_transpose(push, pull, given, ...)` is `linear_call(push, pull, read, given)`, and this file goes.
Until then, one function of JAX takes a transpose and has all rules: `jax.lax.custom_linear_solve`. It is told a linear
equation, how to solve it, and how to solve the transposed one. With `L(given, out) = (given, out + push(given))` and
its transpose `L*(given, out) = (given + pull(out), out)`, we ask for the solution (v, w) of

    L^-1 w = (b, 0),    L*^-1 v = 0,    where L^-1 and L*^-1 subtract what L and L* add. So w = (b, push(b)).

For any right sides (r, s), the solution is (L* s, L r). The equation is its own transpose, so JAX neither
differentiates nor transposes `push` to make that of it, and reverse mode solves the same equation again. A derivative
by what `push` reads is JAX's own, of the equation.

Saved steps write their transpose themselves. Steps that branch have that of JAX, made early: see `mapped_later`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax

from .._avals import Leaves, PyTree
from .smooth import fill_in, nonzero_part, smooth_part, zeros_like
from .ties import tie

Given = TypeVar("Given")
Out = TypeVar("Out")

_tied = functools.partial(tie, call=True)


def with_transpose(push: Callable[[Given], Out], pull: Callable[[Out], Given], given: Given, like: Out) -> Out:
    """`push(given)`, a linear function whose transpose is `pull`.

    Args:
        push: the function. It may close over what it reads.
        pull: its transpose, from the cotangents of what it returns to those of what it is given.
        given: a tree of arrays.
        like: zeros of the types that it returns.
    """
    push, pull = jax.jit(push), jax.jit(pull)  # each is traced and lowered once

    def equation(unknown: tuple[Any, Any]) -> tuple[Any, Any]:
        (given, out), (pushed, result) = unknown
        right = (pushed, _each(jax.lax.sub, result, push(pushed))), (_each(jax.lax.sub, given, pull(out)), out)
        return _tied(right, right)

    def solve(_: Any, right: tuple[Any, Any]) -> tuple[Any, Any]:
        (given, out), (pushed, result) = right
        return (_each(jax.lax.add, pushed, pull(result)), result), (given, _each(jax.lax.add, out, push(given)))

    right = (given, like), (jax.tree.map(zeros_like, given), like)
    # JAX transposes a solution only if all of the right side has a tangent, and all of the solution a cotangent.
    solution = jax.lax.custom_linear_solve(equation, _tied(right, right), solve, symmetric=True)
    return _tied(solution, solution)[1][1]


def _each(function: Callable[[Any, Any], Any], a: Any, b: Any) -> Any:
    return jax.tree.map(function, a, b)


def mapped_later(push: Callable[..., Out], *given: Any) -> Out:
    """`push(*given)`, a linear function with branches, in a form that JAX can map and then transpose.

    `jax.vmap` turns a branch on a mapped index into a selection, and stops the gradient of all that a branch reads, for
    a derivative that is taken later. In a rule of `jax.custom_jvp` the derivative was taken before, and what a branch
    reads are tangents: JAX has no transpose of a stopped one, and fails. So it is transposed before anything is mapped.

    Nothing may vary over the devices of a `shard_map`, see `branches_on_devices`.
    """
    like = jax.tree.map(zeros_like, jax.eval_shape(push, *given))

    def pull(out: Out) -> tuple[Any, ...]:
        return jax.linear_transpose(push, *given)(out)

    return with_transpose(lambda given: push(*given), pull, given, like)


def push_plainly(function: Callable[[Any], Any], given: PyTree, d_given: PyTree, *, branches: bool) -> tuple[Any, Any]:
    """The results of a function of one tree and their tangents, as JAX differentiates it, `branches` if it branches."""
    part, d_on = nonzero_part(given, d_given)
    on, off = part.split(given)

    def of_smooth(on: Leaves) -> tuple[Leaves, Any]:
        result = function(part.join(on, off))
        return smooth_part(result).split(result)[0], result

    if branches:
        _, push, result = jax.linearize(of_smooth, on, has_aux=True)
        return result, fill_in(result, mapped_later(push, d_on))
    _, d_result, result = jax.jvp(of_smooth, (on,), (d_on,), has_aux=True)
    return result, fill_in(result, d_result)
