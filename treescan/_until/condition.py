"""The condition of `while_scan`: its arguments, its result and its traces."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.core import eval_jaxpr

from .._avals import (
    Array,
    LeafAxes,
    PyTree,
    TreeDef,
    as_arrays,
    describe_node,
    describe_traced,
    dtype_of,
    promoted,
    types_of,
    vary_over,
    varying_axes,
)
from .._body.call import call_user
from .._body.carry import read_carries
from .._body.traced import rename
from .._errors import BodyFault, Fault, speaking_of
from .._loop.loop import Body, Loop
from .._loop.run import named_signature
from .._rows.compact import failed_with_fewer_rows, refuse_shared_draws, take_rows
from .._trace.equations import named_axes
from .._trace.hoist import whole_state
from .._trace.raw_keys import raw
from .._tree import is_static, merge, thaw_static


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
            try:
                holds = _called(self.body.function, carry)
            except Exception as error:
                rename(error, [(self.name, carry)])
                raise
            _check_flags(holds)
        return jnp.asarray(holds, bool)


def _called(cond: Callable[..., Any], carry: PyTree) -> Any:
    """What a condition returns.

    Raises:
        Fault: for a `BodyError` if it asks whether an array is true, as `and` does.
    """
    try:
        return call_user(cond, carry)
    except (jax.errors.TracerBoolConversionError, ValueError) as error:
        if isinstance(error, ValueError) and "truth value of an array" not in str(error):
            raise
        raise BodyFault(
            "{body}, the condition, asks in Python whether an array is true, as `and`, `or`, `not`, `if` and "
            "`a < b < c` do. Python cannot know: the array has its values only when the program runs, or has several.",
            "Use `&` for `and`, `|` for `or` and `~` for `not`, with each comparison in parentheses: "
            "`(carry[0] < 3) & (carry[1] > 0)`. Use `jnp.where` for `if`.",
            cause=error,
        ) from None


def _check_flags(holds: Any) -> None:
    """Refuses what is not one array of bools."""
    is_array = jtu.all_leaves([holds]) and not is_static(holds)
    if not is_array or dtype_of(holds) != np.bool_:
        raise BodyFault(
            "{body}, the condition, must return one bool, or one for each row of a batch, but returned "
            f"{describe_node(holds)}.",
            "Return a comparison, `carry > 0`: an array of dtype bool, of shape [] or of the batch shape; or a Python "
            "bool.",
        )


def check_condition(cond: Any) -> None:
    """Refuses a condition that cannot be called."""
    if not callable(cond):
        raise BodyFault(
            f"{{verb}} needs a function as its condition, but got {describe_traced(cond)}.",
            "The condition comes first, and the body after it: `treescan.while_scan(cond, step, init)`.",
        )
    parameters = Body.of(cond).parameters
    if parameters is not None and not _takes_one(parameters):
        with speaking_of(cond):
            raise BodyFault(
                f"{{body}}, the condition, takes ({', '.join(map(_spelled, parameters))}), but {{verb}} calls it with "
                "(carry).",
                "Write it as `def cond(carry): ...`, and take the carry apart inside of it, `i, h = carry`. If it "
                "needs the x of a step, let the step put that into the carry.",
                "The condition comes first, and the body after it: `treescan.while_scan(cond, step, init)`.",
            )


def _takes_one(parameters: tuple[inspect.Parameter, ...]) -> bool:
    """Whether a function can be called with one positional argument."""
    try:
        inspect.Signature(parameters).bind(None)
    except TypeError:
        return False
    return True


def _spelled(parameter: inspect.Parameter) -> str:
    stars: dict[Any, str] = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}
    only = " (keyword only)" if parameter.kind is parameter.KEYWORD_ONLY else ""
    return f"{stars.get(parameter.kind, '')}{parameter.name}{only}"


@dataclass(frozen=True, eq=False)
class Condition:
    """Whether another step is taken: from (what the condition closes over, the leaves of the state) to its bools.

    Attributes:
        call: calls it; None: it always holds.
        structure: of the user's state, whose leaves are the last ones of the state.
        jaxprs: its traces, one for each number of rows; none where steps run on values.
    """

    call: CallCondition | None
    structure: TreeDef
    jaxprs: tuple[Any, ...] = ()

    @classmethod
    def of(cls, call: CallCondition | None, state: PyTree, *, traced: bool) -> Condition:
        """The condition of a loop with this state, traced once and for all if its steps are."""
        jaxprs = (jax.make_jaxpr(call)(state),) if traced and call is not None else ()
        return cls(call, jax.tree.structure(state), jaxprs)

    def __call__(self, closed: list[list[Any]], leaves: Sequence[Any]) -> Array:
        if self.call is None:
            return jnp.ones((), bool)
        if not self.jaxprs:
            return self.call(self.state_of(leaves))
        given = self._own(leaves)
        number = [_shapes(jaxpr.in_avals) for jaxpr in self.jaxprs].index(_shapes(map(jax.typeof, given)))
        (holds,) = eval_jaxpr(self.jaxprs[number].jaxpr, closed[number], *given, propagate_source_info=True)
        return jnp.asarray(holds, bool)

    def _own(self, leaves: Sequence[Any]) -> list[Any]:
        return list(leaves[len(leaves) - self.structure.num_leaves :])

    def state_of(self, leaves: Sequence[Any]) -> PyTree:
        """The user's state, from the leaves of the state."""
        return jax.tree.unflatten(self.structure, self._own(leaves))

    @property
    def closed(self) -> list[list[Any]]:
        """What each trace closes over."""
        return [list(jaxpr.consts) for jaxpr in self.jaxprs]

    @property
    def axes(self) -> frozenset[Hashable]:
        """The named axes of `jax.vmap` over which it computes."""
        return frozenset[Hashable]().union(*map(named_axes, self.jaxprs))

    def settled(self, state: PyTree, loop: Loop) -> PyTree | None:
        """The user's state as the trace of the loop has it, if it takes on another type in there; else None.

        A weak type becomes another, and what names no mesh is spread over one. The condition is asked only after that.
        """
        if self.call is None:
            return None
        leaves = jax.tree.leaves(state)
        pairs = [promoted(leaf, of) for leaf, of in zip(leaves, self._own(whole_state(loop)), strict=True)]
        changed = any(is_changed for _, is_changed in pairs)
        return jax.tree.unflatten(self.structure, [leaf for leaf, _ in pairs]) if changed else None

    def fitted(self, loop: Loop, state: PyTree) -> Condition:
        """The condition, traced for the manual axes that the state varies over in the loop, and for fewer rows.

        Args:
            loop: the loop over rows.
            state: the user's, settled. It keeps a weak type that the body is given too.
        """
        call, rows = self.call, loop.masked
        if call is None:
            return self
        pairs = zip(jax.tree.leaves(as_arrays(raw(state))), self._own(whole_state(loop)), strict=True)
        given = [vary_over(leaf, varying_axes(jax.typeof(of))) for leaf, of in pairs]
        state = jax.tree.unflatten(self.structure, given)
        fits = list(map(jax.typeof, given)) == list(self.jaxprs[0].in_avals)
        condition = self if fits else Condition.of(call, state, traced=True)
        axes = tuple(merge(loop.hoisted.fixed, rows.fixed, rows.axes.state)[-len(given) :])
        others = [condition.with_fewer_rows(state, axes, tier, max(rows.tiers)) for tier in rows.tiers[:-1]]
        return dataclasses.replace(condition, jaxprs=(*condition.jaxprs, *others))

    def with_fewer_rows(self, state: PyTree, axes: LeafAxes, tier: int, rows: int) -> Any:
        """The trace for fewer rows; `axes` says where these are in each leaf of the user's state."""
        call = self.call
        assert call is not None
        given = types_of(lambda tree: take_rows(tree, axes, jnp.arange(tier)), state)
        try:
            traced = jax.make_jaxpr(call)(given)
        except Fault:
            raise
        except Exception as error:
            with speaking_of(call.body.function):
                raise failed_with_fewer_rows(error, "{body}, the condition,", tier, rows, _ONE_EACH) from None
        batch = traced.out_avals[0].shape
        if batch == (tier, *self.jaxprs[0].out_avals[0].shape[1:]):
            with speaking_of(call.body.function):
                refuse_shared_draws(self.jaxprs[0].jaxpr, traced.jaxpr, tier, rows)
            return traced
        with speaking_of(call.body.function):
            raise BodyFault(
                f"{{body}}, the condition, returned bool[{','.join(map(str, batch))}] when `compact` called it with "
                f"{tier} of the {rows} rows.",
                _ONE_EACH,
            )


_ONE_EACH = (
    "It must return one bool for each row of the carry that it receives. `compact` cannot select the rows of an array "
    "that the condition closes over: pass such an array through the carry."
)


def _shapes(avals: Iterable[Any]) -> list[tuple[int, ...]]:
    return [aval.shape for aval in avals]
