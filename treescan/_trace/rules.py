"""A function with a rule for its derivative, which may be staged, mapped and differentiated in any order.

If a function is staged before it is mapped, as `jax.jit` and loops do, JAX asks the function alone which of its results
are mapped, and along which axis. It takes the results of the rule to be mapped in the same way
(https://github.com/jax-ml/jax/pull/39444). A rule that maps one more, or another axis, gives wrong numbers without an
error: `jax.grad` of `jax.vmap` of `jax.jit`. A rule of this package solves for all tangents together, or runs another
loop, so it would. Here each result is tied to all arguments, and to the named axes that the function reads. So all
results are mapped or none is, along axis 0.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from typing import Any

import jax

from .ties import tie


def with_rule(
    function: Callable[..., Any],
    rule: Callable[[Any, Any], tuple[Any, Any]],
    axes: Collection[Hashable] = (),
    sources: Callable[[Any], Any] = lambda given: given,
    *,
    call: bool = False,
) -> Callable[..., Any]:
    """`jax.custom_jvp` of a function of trees, whose rule is given symbolic zeros.

    Args:
        function: the function. It may not close over tracers; no more may the rule.
        rule: (primals, tangents), tuples of the arguments, to the results and their tangents.
        axes: the named axes over which the function computes, as `named_axes` finds them.
        sources: the first argument without what of it is computed from the rest alone.
        call: whether JAX differentiates it in several rounds; see `tie`.
    """

    def results(*given: Any) -> Any:
        return tie(function(*given), (sources(given[0]), given[1:]), axes, call=call)

    def derivative(primals: Any, tangents: Any) -> tuple[Any, Any]:
        return tie(rule(primals, tangents), (sources(primals[0]), primals[1:]), axes, call=call)

    ruled = jax.custom_jvp(results)
    ruled.defjvp(derivative, symbolic_zeros=True)
    return ruled
