"""The condition of `while_scan`: its arguments, its result, and its trace."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.core import eval_jaxpr

from ..._avals import describe_node, describe_traced, dtype_of, shape_of
from ..._body.carries import read_carries
from ..._errors import BodyError, Fault, speaking_of
from ..._loop.body import Body
from ..._loop.run import named_signature
from ..._tree import is_static, thaw_static
from ..._types import Array, PyTree


@dataclass(frozen=True)
class CallCondition:
    """Calls the user's condition on the carry as the body sees it. Looks like the condition to JAX.

    Attributes:
        body: the condition, by its handle.
        name: what the carry is called.
        frozen: whether the state holds static leaves.
        custom: whether it holds custom carries.
    """

    body: Body
    name: str
    frozen: bool
    custom: bool

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self.body.function

    @property
    def __signature__(self) -> inspect.Signature:
        return named_signature(self.name)

    def __call__(self, state: PyTree) -> Array:
        carry = jtu.tree_unflatten(jtu.tree_structure(state), jtu.tree_leaves(state))  # it may change containers
        with speaking_of(self.body.function):
            carry = thaw_static(carry) if self.frozen else carry
            carry = read_carries(carry, self.name) if self.custom else carry
            holds = self.body.function(carry)
            _check_flag(holds)
        return jnp.asarray(holds, bool)


def _check_flag(holds: Any) -> None:
    """Refuses what is not one bool."""
    if not jtu.all_leaves([holds]) or is_static(holds):
        is_flag = False
    else:
        is_flag = shape_of(holds) == () and dtype_of(holds) == np.bool_
    if not is_flag:
        raise Fault(
            BodyError,
            f"{{body}}, the condition, must return one bool, but returned {describe_node(holds)}.",
            _flag_cure(holds),
        )


def _flag_cure(holds: Any) -> str:
    if dtype_of(holds) == np.bool_:
        return (
            "Reduce it, `jnp.any(...)` or `jnp.all(...)`; or, for rows that stop each by itself, `jax.vmap` the loop."
        )
    return "Return a comparison, `carry > 0`: an array of shape [] and dtype bool, or a Python bool."


def check_condition(cond: Any) -> None:
    """Refuses a condition that cannot be called."""
    if not callable(cond):
        raise Fault(
            BodyError,
            f"{{verb}} needs a function as its condition, but got {describe_traced(cond)}.",
            "The condition comes first, and the body after it: `treescan.while_scan(cond, step, init)`.",
        )


@dataclass(frozen=True, eq=False)
class Condition:
    """A condition that was traced already: from (what it closes over, the leaves of the state) to one bool.

    Attributes:
        jaxpr: the trace; None for a condition that always holds.
        count: how many leaves of the state, its last, are the user's.
    """

    jaxpr: Any
    count: int

    def __call__(self, closed: list[Any], leaves: Sequence[Any]) -> Array:
        if self.jaxpr is None:
            return jnp.ones((), bool)
        given = leaves[len(leaves) - self.count :]
        (holds,) = eval_jaxpr(self.jaxpr.jaxpr, closed, *given, propagate_source_info=True)
        return jnp.asarray(holds, bool)

    @property
    def closed(self) -> list[Any]:
        """What the condition closes over."""
        return [] if self.jaxpr is None else list(self.jaxpr.consts)

    def fits(self, leaves: Sequence[Any]) -> bool:
        """Whether it was traced for leaves of these types."""
        if self.jaxpr is None:
            return True
        return list(map(jax.typeof, leaves[len(leaves) - self.count :])) == list(self.jaxpr.in_avals)


def trace_condition(call: CallCondition | None, state: PyTree) -> Condition:
    """Traces a condition, once and for all; None is one that always holds."""
    count = len(jax.tree.leaves(state))
    return Condition(None if call is None else jax.make_jaxpr(call)(state), count)
