"""The condition of `while_scan`: its arguments, its result and its trace; conditions for each row."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.core import eval_jaxpr

from ..._avals import describe_node, describe_traced, dtype_of
from ..._axes import LeafAxes
from ..._body.call import CallBody, call_user, needs_keyword
from ..._body.carry import read_carries
from ..._errors import ArgumentError, BodyError, Fault, speaking_of
from ..._loop.body import Body
from ..._loop.loop import Loop
from ..._loop.run import named_signature
from ..._tree import Prefix, is_static, thaw_static
from ..._types import Array, PyTree
from ..axes import scan_over_axes
from ..rows.axes import RowFlags
from ..rows.leaves import select
from ..rows.over_rows import OverRows


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
            holds = call_user(self.body.function, carry)
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
    parameters = Body.of(cond).parameters
    if parameters is not None and not _takes_one(parameters):
        with speaking_of(cond):
            raise Fault(
                BodyError,
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


_LEADS = Prefix.of(0)
_FALLING = (1 / 32, 1 / 10, 1 / 5, 1 / 3, 1 / 2, 3 / 4)
"""The parts of a batch that tiers are made for: while rows stop, most steps are taken by many of them."""


@dataclass(frozen=True)
class StopRows:
    """Arranges the rows of a loop whose rows stop independently. In a loop without rows, only the axes of xs.

    Attributes:
        carry_axes: a prefix of the carry: where the batch shape starts; None: shared by all rows.
        x_axes: the same for one step's x.
        y_axes: the same for one step's y.
        in_axes: for each leaf of xs the axis scanned over, or None; None as a whole: axis 0 for all.
        compact: whether to order rows, or the numbers of rows to choose from.
    """

    carry_axes: Prefix
    x_axes: Prefix
    y_axes: Prefix
    in_axes: LeafAxes | None
    compact: bool | tuple[int, ...]
    moves = True

    def __call__(self, loop: Loop) -> Loop:
        loop = cut(loop, self.in_axes)
        if loop.rows is None:
            loop = self._without_rows(loop)
            return loop if self.in_axes is None else scan_over_axes(loop, self.in_axes)
        rows = loop.rows.lengths.shape[0]
        compact = falling_tiers(rows) if self.compact is True and isinstance(rows, int) else self.compact
        return OverRows(self.carry_axes, self.x_axes, self.y_axes, 0, self.in_axes, compact, ends_early=True)(loop)

    def _without_rows(self, loop: Loop) -> Loop:
        """The loop, if no option and no body asks for rows.

        Raises:
            Fault: for an `ArgumentError` or a `BodyError` if one does.
        """
        axes = {"carry_axes": self.carry_axes, "x_axes": self.x_axes, "y_axes": self.y_axes}
        asked = [name for name, prefix in axes.items() if prefix != _LEADS]
        asked += ["compact"] if self.compact else []
        if asked:
            raise Fault(
                ArgumentError,
                f"{{verb}} over {{body}}: `{asked[0]}` is for rows that stop independently, but the condition "
                "returned a single bool.",
                "Let the condition return one bool for each row, bool[*batch], without reducing over the rows. Or "
                f"leave `{asked[0]}` out.",
            )
        step = loop.step
        assert isinstance(step, CallBody)
        if not step.sees_valid:
            return loop
        if needs_keyword(step.body, "valid"):
            raise Fault(
                BodyError,
                "{body} needs the keyword `valid`, which {verb} passes only if the condition returns one bool for "
                "each row. It returned a single bool.",
                "Let the condition return bool[*batch], or give `valid` a default.",
            )
        return dataclasses.replace(loop, step=dataclasses.replace(step, sees_valid=False))


def falling_tiers(rows: int) -> tuple[int, ...]:
    """The numbers of rows that `compact=True` makes the body for: closer together where they are large."""
    return tuple(sorted({rows, *(math.ceil(rows * part) for part in _FALLING)}))


def with_rows(loop: Loop, holds: Array) -> Loop:
    """The loop, for `StopRows`: rows whose condition does not hold to begin with take no step."""
    lengths = select(holds, jnp.full(holds.shape, loop.length, jnp.int32), jnp.zeros(holds.shape, jnp.int32))
    return dataclasses.replace(loop, rows=RowFlags(lengths=lengths))


def cut(loop: Loop, axes: LeafAxes | None) -> Loop:
    """The loop, with xs cut to its length."""
    leaves, structure = jax.tree.flatten(loop.xs.x)
    short = [
        leaf if axis is None else jax.lax.slice_in_dim(leaf, 0, loop.length, axis=axis)
        for leaf, axis in zip(leaves, axes or (0,) * len(leaves), strict=True)
    ]
    return dataclasses.replace(loop, xs=loop.xs._replace(x=jax.tree.unflatten(structure, short)))
