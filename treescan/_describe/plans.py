"""What a gradient needs, under what a call says of `remat` and under other plans."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import eval_jaxpr

from .._errors import TreescanError
from .._loop.loop import Loop
from .._remat import Remat
from .._trace.buffers import bytes_of
from .._trace.hoist import traced
from .._trace.peak import temporary_bytes
from .._trace.smooth import is_smooth
from .._transforms.checkpoint import Checkpointed, remat_sizes
from .._transforms.layers.pattern import Pattern
from .._transforms.nest import plan, recomputes
from .._transforms.program import Taken, Transformed
from .._transforms.until.program import Until
from .facts import Plan

OTHERS = (None, "auto", "step", "nested", Remat(levels=3))
"""The plans that are shown beside that of the call."""


class Shape(NamedTuple):
    """How a loop is cut.

    Attributes:
        sizes: the steps of the nested chunks, innermost first.
        tiers: the numbers of rows that the body is made for; empty where there are no rows.
        evaluations: how often the gradient evaluates each step, the forward pass included.
    """

    sizes: tuple[int, ...]
    tiers: tuple[int, ...]
    evaluations: int


def plan_of(taken: Taken, remat: Any, *, used: bool) -> tuple[Plan, tuple[int, ...]]:
    """What a call needs under its `remat`, and the numbers of rows that its body is made for."""
    shape = _shape_of(taken)
    needed, refusal = gradient_bytes(taken.program, taken.given)
    return Plan(remat, used, shape.sizes, needed, shape.evaluations, refusal), shape.tiers


def other_plans(own: Plan, retake: Callable[[Any], Taken]) -> Iterator[Plan]:
    """What the same call needs under other plans, as far as its verb takes them. Those that differ in nothing are one.

    Args:
        own: that of the call.
        retake: the same call with another `remat`.
    """
    seen = {(own.sizes, own.bytes, own.evaluations)}
    for other in (other for other in OTHERS if not _same(other, own.remat)):
        with contextlib.suppress(Exception):  # the verb or JAX does not take it, and nobody asked for it
            plan, _ = plan_of(retake(other), other, used=False)
            key = (plan.sizes, plan.bytes, plan.evaluations)
            if key not in seen:
                seen.add(key)
                yield plan


def _same(one: Any, other: Any) -> bool:
    return _spelled_out(one) == _spelled_out(other)


def _spelled_out(remat: Any) -> Any:
    plans = {"step": Remat(levels=1), "nested": Remat(levels=2)}
    remat = plans.get(remat, remat) if isinstance(remat, str) else remat
    return dataclasses.replace(remat, levels=1) if remat == Remat() else remat


def forward_bytes(program: Any, given: Any) -> tuple[int, int]:
    """What a program needs beside its arguments and results, and what its results take."""
    jaxpr = jax.make_jaxpr(program)(given).jaxpr
    return temporary_bytes(jaxpr), sum(bytes_of(var.aval) for var in jaxpr.outvars)


def gradient_bytes(program: Any, given: Any) -> tuple[int | None, str | None]:
    """What the gradient needs beside its arguments and results, or why there is none.

    It is that of the sum of the squares of all results, with respect to all floating-point arrays that the program
    reads.
    """
    closed = jax.make_jaxpr(program)(given)
    leaves, count = [*closed.consts, *jax.tree.leaves(given)], len(closed.consts)
    floats = [is_smooth(leaf) for leaf in leaves]
    if not any(floats) or not any(map(is_smooth, (jax.ShapeDtypeStruct(v.shape, v.dtype) for v in closed.out_avals))):
        return None, "nothing in it is floating-point"

    def loss(smooth: list[Any]) -> Any:
        mine = iter(smooth)
        whole = [next(mine) if is_float else leaf for leaf, is_float in zip(leaves, floats, strict=True)]
        results = eval_jaxpr(closed.jaxpr, whole[:count], *whole[count:])
        squares = [jnp.square(jnp.real(leaf)).sum(dtype=jnp.float32) for leaf in results if is_smooth(leaf)]
        return sum(squares[1:], squares[0])

    try:
        gradient = jax.grad(loss)
        jaxpr = jax.make_jaxpr(gradient)([leaf for leaf, is_float in zip(leaves, floats, strict=True) if is_float])
    except Exception as error:  # it is refused, as in the call
        says = " ".join(str(error).split("\n\n")[0].split())
        return None, says if isinstance(error, TreescanError) else f"JAX says, {says}"
    return temporary_bytes(jaxpr.jaxpr), None


def _shape_of(taken: Taken) -> Shape:
    found = list[Shape]()

    def look(given: Any) -> None:
        found.append(_SHAPES[type(taken.program)](taken.program, given))

    jax.eval_shape(look, taken.given)
    return found[0]


def _of_transformed(program: Transformed, given: Any) -> Shape:
    loop = program.call.lay(given)
    for transform in program.transforms:
        loop = transform(loop)
    loop, levels = plan(loop)
    evaluations = 1 + _recomputes_steps(loop.step) + sum(recomputes(level.around) for level in levels)
    return Shape(tuple(level.size for level in levels if level.size < loop.length), _tiers_of(loop), evaluations)


def _recomputes_steps(step: Any) -> bool:
    while step is not None and not isinstance(step, Checkpointed):
        step = getattr(step, "step", None)
    return step is not None


def _of_until(program: Until, given: Any) -> Shape:
    loop = traced(program.lay(given))
    tiers = _tiers_of(loop)
    chunks = program.chunks(loop.trace, tiers)
    return Shape((*chunks.inner, chunks.size), tiers, 2 + len(chunks.inner) + _steps_too(program.remat))


def _tiers_of(loop: Loop) -> tuple[int, ...]:
    """The numbers of rows that a body is made for, where that is several."""
    tiers = getattr(loop.rows, "tiers", ())
    return tiers if len(tiers) > 1 else ()


def _of_pattern(program: Pattern, given: Any) -> Shape:
    if isinstance(program.remat, Remat):
        remat = program.remat if program.remat.budget is None else program.plan(given).remat
        sizes = remat_sizes(program.blocks[-1].length, remat if isinstance(remat, Remat) else None)
        return Shape(sizes, (), 1 + len(sizes) + _steps_too(remat))
    return Shape((), (), 1 + (program.prefetch is not None or any(program.remat or ())))


def _steps_too(remat: Any) -> int:
    """Whether each step is evaluated a last time, from the carry before it."""
    whole = jax.checkpoint_policies.everything_saveable
    return int(isinstance(remat, Remat) and remat.policy is not whole)


_SHAPES: dict[type, Callable[[Any, Any], Shape]] = {
    Transformed: _of_transformed,
    Until: _of_until,
    Pattern: _of_pattern,
}
