"""Makes the branches of a step safe for `jax.vmap` of a derivative.

`jax.vmap` turns a branch on a mapped index into a selection. Its rule puts `stop_gradient` on what each branch reads,
for the sake of a derivative that is taken later. Where the derivative was taken before, as in a rule of
`jax.custom_jvp`, these are tangents, and `stop_gradient` has no transpose: the gradient of a mapped loop would fail.

So a step that runs under such a rule asks beforehand. Its branches have one more beside them, which computes all of
them and selects. It is taken where the index is mapped: then the number of the branch is the same for all elements.

The same failure in JAX alone: https://github.com/jax-ml/jax/issues/39219.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray, eval_jaxpr
from jax.custom_batching import custom_vmap

from ..._avals import varying_axes
from ..._loop.loop import Feed, Loop, Step
from ..._trace.equations import alone, has_branches, jaxprs_within, values_of
from ..._trace.hoist import array_of
from ..._types import Array, PyTree
from ..rows.leaves import select

_MIXED = -1
"""In place of the index of a branch: elements differ in it."""


@custom_vmap
def _ask(index: Array) -> tuple[Array, Array]:
    """The index for all elements, and each element's own. int32[] to int32[], int32[]."""
    return index, index


@_ask.def_vmap
def _ask_rule(axis_size: int, in_batched: list[bool], index: Array) -> tuple[tuple[Array, Array], tuple[bool, bool]]:
    del axis_size
    if not in_batched[0]:
        return _ask(index), (False, False)
    return (jnp.full((), _MIXED, index.dtype), index), (False, True)


@dataclass(frozen=True)
class MappedLater:
    """A step whose branches JAX can map after it was differentiated."""

    step: Step

    def __call__(self, consts: PyTree, state: PyTree, feed: Feed) -> tuple[PyTree, PyTree]:
        leaves, structure = jax.tree.flatten((consts, state, feed))

        def flat(*leaves: Any) -> tuple[PyTree, PyTree]:
            return self.step(*jax.tree.unflatten(structure, leaves))

        traced, out = jax.make_jaxpr(flat, return_shape=True)(*leaves)
        results = _evaluate(traced.jaxpr, traced.consts, leaves)
        typed = [array_of(value, aval) for value, aval in zip(results, traced.out_avals, strict=True)]
        return jax.tree.unflatten(jax.tree.structure(out), typed)


def with_safe_branches(loop: Loop) -> Loop:
    """The loop, whose trace tells whether its step branches, with that step made safe to map."""
    return dataclasses.replace(loop, step=MappedLater(loop.step)) if loop.trace.branches else loop


def _evaluate(jaxpr: Any, consts: Any, given: Any) -> list[Any]:
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *given], strict=True))
    for equation in jaxpr.eqns:
        if _is_plain(equation):
            results = _choose(equation, *values_of(equation.invars, values))
        else:
            inner = any(map(has_branches, jaxprs_within(equation)))
            taken, program = alone(jaxpr, _with_safe_parts(equation) if inner else equation)
            results = eval_jaxpr(program, [], *(values[var] for var in taken), propagate_source_info=True)
        values.update(zip(equation.outvars, results, strict=True))
    return values_of(jaxpr.outvars, values)


def _is_plain(equation: Any) -> bool:
    """Whether an equation is a branch that only computes; one with effects or mutable arrays cannot be mapped."""
    if equation.primitive.name != "cond" or equation.effects:
        return False
    avals = [atom.aval for atom in equation.invars]
    return all(isinstance(aval, ShapedArray) and not varying_axes(aval) for aval in avals)


def _choose(equation: Any, index: Array, *operands: Any) -> list[Any]:
    """A branch that is one of several, or all of them where elements differ in the index."""
    avals = [var.aval for var in equation.outvars]

    def evaluate(branch: Any, own: Array, *operands: Any) -> list[Any]:
        del own
        return list(map(array_of, _evaluate(branch.jaxpr, branch.consts, operands), avals))

    def mixed(own: Array, *operands: Any) -> list[Any]:
        results = list[Any]()
        for number, branch in enumerate(branches):
            chosen = own == number
            shown = [select(chosen, operand, jax.lax.stop_gradient(operand)) for operand in operands]
            now = evaluate(branch, own, *shown)
            results = [select(chosen, new, old) for new, old in zip(now, results, strict=True)] if number else now
        return results

    branches = equation.params["branches"]
    shared, own = _ask(index)
    single: list[Callable[..., list[Any]]] = [_bound(evaluate, branch) for branch in branches]
    return jax.lax.switch(jnp.where(shared == _MIXED, len(branches), shared), [*single, mixed], own, *operands)


def _bound(evaluate: Callable[..., list[Any]], branch: Any) -> Callable[..., list[Any]]:
    return lambda own, *operands: evaluate(branch, own, *operands)


def _with_safe_parts(equation: Any) -> Any:
    """A loop or a call with the branches in it made safe."""
    params = {name: _safe_value(value) for name, value in equation.params.items()}
    return equation.replace(params=params)


def _safe_value(value: Any) -> Any:
    if type(value) in (tuple, list):
        return type(value)(map(_safe_value, value))
    closed = hasattr(value, "jaxpr")
    jaxpr, consts = (value.jaxpr, value.consts) if closed else (value, [])
    if not hasattr(jaxpr, "eqns") or not has_branches(jaxpr):
        return value

    def safe(*given: Any) -> list[Any]:
        return list(map(array_of, _evaluate(jaxpr, consts, given), [atom.aval for atom in jaxpr.outvars]))

    avals = [var.aval for var in jaxpr.invars]
    traced = jax.make_jaxpr(safe)(*(jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in avals))
    if closed:
        return traced
    return value if traced.consts else traced.jaxpr  # an open one has no place for constants
