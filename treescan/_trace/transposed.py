"""A linear function that is told its transpose, as `jax.custom_derivatives.linear_call` would have it.

`linear_call` cannot be mapped, and cannot be differentiated by what the function reads beside its argument. Once JAX
has both rules, `with_transpose(push, pull, given, ...)` is `linear_call(push, pull, read, given)`, and this file goes.
Until then, one function of JAX takes a transpose and has all rules: `jax.lax.custom_linear_solve`. It is told a linear
equation, how to solve it, and how to solve the transposed one. So we ask for the solution of

    (given, out - push(given)) = (b, 0),    which is    given = b, out = push(b).

For any right side (b, c), the solution is (b, c + push(b)), and that of the transposed equation is (b + pull(c), c).
Reverse mode solves the latter. A derivative by what `push` reads is JAX's own, of the equation.

Saved steps write their transpose themselves. Steps that branch have that of JAX, made early: see `mapped_later`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax

from .._avals import PyTree
from .hoist import fill_in, nonzero_part, smooth_part, zeros_like
from .ties import tie

Given = TypeVar("Given")
Out = TypeVar("Out")


def with_transpose(push: Callable[[Given], Out], pull: Callable[[Out], Given], given: Given, like: Out) -> Out:
    """`push(given)`, a linear function whose transpose is `pull`.

    Args:
        push: the function. It may close over what it reads.
        pull: its transpose, from the cotangents of what it returns to those of what it is given.
        given: a tree of arrays.
        like: zeros of the types that it returns.
    """

    def equation(both: tuple[Given, Out]) -> tuple[Given, Out]:
        given, out = tie(both, both)  # JAX transposes a solution only if all of the right side has a tangent
        # The tangent of a linear function is the function. JAX 0.8 transposes a loop only as such a tangent.
        _, pushed = jax.jvp(push, (jax.tree.map(zeros_like, given),), (given,))
        rest = given, jax.tree.map(jax.lax.sub, out, pushed)
        return tie(rest, rest)

    def solve(_: Any, right: tuple[Given, Out]) -> tuple[Given, Out]:
        given, out = right
        return given, jax.tree.map(jax.lax.add, out, push(given))

    def solve_transposed(_: Any, right: tuple[Given, Out]) -> tuple[Given, Out]:
        given, out = right
        return jax.tree.map(jax.lax.add, given, pull(out)), out

    right = given, like
    solution = jax.lax.custom_linear_solve(equation, tie(right, right), solve, solve_transposed)
    return tie(solution, solution)[1]


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

    def of_smooth(on: list[Any]) -> tuple[list[Any], Any]:
        result = function(part.join(on, off))
        return smooth_part(result).split(result)[0], result

    if branches:
        _, push, result = jax.linearize(of_smooth, on, has_aux=True)
        return result, fill_in(result, mapped_later(push, d_on))
    _, d_result, result = jax.jvp(of_smooth, (on,), (d_on,), has_aux=True)
    return result, fill_in(result, d_result)
