"""The condition of `while_scan`: its arguments, its result, and its trace."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.core import eval_jaxpr

from ..._avals import describe_node, describe_traced, dtype_of
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
            _check_flags(holds)
        return jnp.asarray(holds, bool)


def _check_flags(holds: Any) -> None:
    """Refuses what is not one array of bools."""
    is_array = jtu.all_leaves([holds]) and not is_static(holds)
    if not is_array or dtype_of(holds) != np.bool_:
        raise Fault(
            BodyError,
            "{body}, the condition, must return one bool, or one for each row of a batch, but returned "
            f"{describe_node(holds)}.",
            "Return a comparison, `carry > 0`: an array of dtype bool, of shape [] or of the batch shape; or a Python "
            "bool.",
        )


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
    """A condition that was traced already: from (what it closes over, the leaves of the state) to its bools.

    Attributes:
        jaxprs: the traces, one for each number of rows; none for a condition that always holds.
        count: how many leaves of the state, its last, are the user's.
    """

    jaxprs: tuple[Any, ...]
    count: int

    def __call__(self, closed: list[list[Any]], leaves: Sequence[Any]) -> Array:
        if not self.jaxprs:
            return jnp.ones((), bool)
        given = self._given(leaves)
        number = [_shapes(jaxpr.in_avals) for jaxpr in self.jaxprs].index(_shapes(map(jax.typeof, given)))
        (holds,) = eval_jaxpr(self.jaxprs[number].jaxpr, closed[number], *given, propagate_source_info=True)
        return jnp.asarray(holds, bool)

    def _given(self, leaves: Sequence[Any]) -> list[Any]:
        return list(leaves[len(leaves) - self.count :])

    @property
    def closed(self) -> list[list[Any]]:
        """What each trace closes over."""
        return [list(jaxpr.consts) for jaxpr in self.jaxprs]

    @property
    def avals(self) -> list[Any]:
        """The types of what it returns, for each trace."""
        return [aval for jaxpr in self.jaxprs for aval in jaxpr.out_avals]

    @property
    def batch(self) -> tuple[int, ...]:
        """The shape of its bools: [] for one."""
        return self.avals[0].shape if self.jaxprs else ()

    def fits(self, leaves: Sequence[Any]) -> bool:
        """Whether it was traced for leaves of these types."""
        return not self.jaxprs or list(map(jax.typeof, self._given(leaves))) == list(self.jaxprs[0].in_avals)


def _shapes(avals: Iterable[Any]) -> list[tuple[int, ...]]:
    return [aval.shape for aval in avals]


def trace_condition(call: CallCondition | None, state: PyTree) -> Condition:
    """Traces a condition, once and for all; None is one that always holds."""
    count = len(jax.tree.leaves(state))
    return Condition(() if call is None else (jax.make_jaxpr(call)(state),), count)
