"""A function with a rule for its derivative, which may be staged, mapped and differentiated in any order.

If a function is staged before it is mapped, as `jax.jit` and loops do, JAX asks the function alone which of its results
are mapped, and along which axis. It takes the results of the rule to be mapped in the same way
(https://github.com/jax-ml/jax/pull/39444). A rule that maps one more, or another axis, gives wrong numbers without an
error: `jax.grad` of `jax.vmap` of `jax.jit`. A rule of this package solves for all tangents together, or runs another
loop, so it would. Here each result depends on all arguments. So all results are mapped or none is, along axis 0. XLA
removes what this adds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from .._avals import Array, PyTree, place_like, varying_axes
from .hoist import is_smooth


def with_rule(function: Callable[..., Any], rule: Callable[[Any, Any], tuple[Any, Any]]) -> Callable[..., Any]:
    """`jax.custom_jvp` of a function of trees, whose rule is given symbolic zeros.

    Args:
        function: the function. It may not close over tracers; no more may the rule.
        rule: (primals, tangents), tuples of the arguments, to the results and their tangents.
    """

    def results(*given: Any) -> Any:
        depend = _Depending(given)
        return jax.tree.map(depend.value, function(*given))

    def derivative(primals: Any, tangents: Any) -> tuple[Any, Any]:
        depend = _Depending(primals)
        out, d_out = rule(primals, tangents)
        return jax.tree.map(depend.value, out), jax.tree.map(depend.tangent, d_out)

    ruled = jax.custom_jvp(results)
    ruled.defjvp(derivative, symbolic_zeros=True)
    return ruled


class _Depending:
    """Makes values depend on all arrays of a tree that vary over no other manual axes than they do."""

    def __init__(self, given: PyTree) -> None:
        self._leaves = jax.tree.leaves(given)
        self._is_manual = AxisType.Manual in jax.sharding.get_abstract_mesh().axis_types
        self._of_all = None if self._is_manual else _flag_of(self._leaves)

    def value(self, leaf: Array) -> Array:
        """The value itself, of any type: a selection among two that are the same."""
        flag = self._flag(leaf) if self._is_manual else self._of_all
        return leaf if flag is None else jax.lax.select_n(flag, leaf, leaf)

    def tangent(self, leaf: Array) -> Array:
        """The value itself, a tangent, whose transpose is itself too."""
        if not is_smooth(leaf):
            return leaf
        flag = self._flag(leaf) if self._is_manual else self._of_all
        if flag is None:
            return leaf
        other = place_like(jnp.broadcast_to(flag.astype(leaf.dtype), leaf.shape), jax.typeof(leaf))
        return jax.lax.select_n(np.ones((), np.bool_), other, leaf)

    def _flag(self, leaf: Array) -> Array | None:
        axes = varying_axes(jax.typeof(leaf))
        return _flag_of([each for each in self._leaves if varying_axes(jax.typeof(each)) <= axes])


def _flag_of(leaves: list[Any]) -> Array | None:
    """A bool that depends on each of some arrays; None: there are none.

    No sum: of padding, that could be NaN, which `checkify` and `jax_debug_nans` would report.
    """
    flags = [jnp.any(jax.lax.eq(leaf, leaf)) for leaf in leaves]
    return functools.reduce(jax.lax.bitwise_or, flags) if flags else None
