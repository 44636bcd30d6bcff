"""`EndEarly`: a loop ends when its condition no longer holds, or with a range that is known at run time."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Generator, Hashable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._avals import Array, ArrayLike, LeafAxes, PyTree, as_arrays
from .._body.call import CallBody, needs_keyword
from .._errors import BodyFault, Misuse
from .._loop.feed import Feed
from .._loop.loop import Body, Loop, Step, is_jit_disabled, is_untraced, under_a_trace
from .._rows.axes import RowFlags
from .._rows.find_rows import FindRows
from .._rows.leaves import select
from .._transforms.axes import count_from
from .._transforms.transform import Stage, Transform
from .._tree import Prefix, map_leaves
from .condition import CallCondition, Condition
from .derivative import is_forward_mode
from .run import Going, reverse_only


class Bounds(NamedTuple):
    """The range of indices of a `fori` with traced bounds."""

    lower: ArrayLike
    upper: ArrayLike

    @property
    def first(self) -> ArrayLike:
        """The first index, in a type that holds all of them: `lower` may be of a smaller type than `upper`."""
        lower, upper = self.lower, self.upper
        if isinstance(lower, int) or jnp.result_type(lower).itemsize > 2:
            return lower
        largest = upper if isinstance(upper, int) else jnp.iinfo(jnp.result_type(upper)).max
        return lower if largest <= jnp.iinfo(jnp.result_type(lower)).max else jnp.asarray(lower, jnp.int32)

    def steps(self, most: int) -> Array:
        """int32[]: upper - lower, between 0 and `most`."""
        lower, upper = (jnp.asarray(bound) for bound in self)
        wide = any(bound.dtype.itemsize > 4 for bound in (lower, upper))
        signed, unsigned = (jnp.int64, jnp.uint64) if wide else (jnp.int32, jnp.uint32)
        are_unsigned = all(jnp.issubdtype(bound.dtype, jnp.unsignedinteger) for bound in (lower, upper))
        common = unsigned if are_unsigned else signed
        largest = jnp.iinfo(common).max

        def fitted(bound: Array) -> Array:
            if jnp.iinfo(bound.dtype).max > largest:  # it would wrap
                bound = jnp.minimum(bound, jnp.asarray(largest, bound.dtype))
            return jax.lax.convert_element_type(bound, common)

        lower, upper = fitted(lower), fitted(upper)
        apart = jax.lax.convert_element_type(upper - lower, unsigned)  # the difference may not fit the signed type
        within = jnp.minimum(apart, jnp.asarray(most, unsigned)).astype(jnp.int32)
        return jnp.where(upper > lower, within, jnp.zeros_like(within))


@contextlib.contextmanager
def refusing_forward_mode() -> Generator[None]:
    """Says what JAX refuses of a loop whose body has a rule for reverse mode alone.

    Raises:
        Fault: for an `ArgumentError` if it is differentiated in forward mode.
    """
    try:
        yield
    except TypeError as error:
        if not is_forward_mode(error):
            raise
        raise reverse_only() from None


@contextlib.contextmanager
def staging_without_values() -> Generator[None]:
    """Within something that stages under `jax.disable_jit` too, a loop without values is staged, as `while_loop` is.

    For example `jax.make_jaxpr`, `jax.checkpoint`, or a branch on a traced value.
    """
    with jax.disable_jit(False) if is_jit_disabled() and under_a_trace() else contextlib.nullcontext():
        yield


_LEADS = Prefix.of(0)
_FALLING = (1 / 32, 1 / 10, 1 / 5, 1 / 3, 1 / 2, 3 / 4)
"""The parts of a batch that `compact=True` makes tiers for: while rows stop, most steps are taken by many of them."""


@dataclass(frozen=True)
class EndEarly(Transform):
    """Ends a loop early. It becomes a loop over rows that stop independently; one bool is rows of shape [].

    Attributes:
        cond: the condition, by its handle; None: it always holds.
        carry_axes: a prefix of the carry: where the batch shape starts; None: shared by all rows.
        x_axes: the same for one step's x.
        y_axes: the same for one step's y.
        in_axes: for each leaf of xs the axis scanned over, or None; None as a whole: axis 0 for all.
        compact: whether to order rows, or the numbers of rows to choose from.
    """

    cond: Body | None = None
    carry_axes: Prefix = _LEADS
    x_axes: Prefix = _LEADS
    y_axes: Prefix = _LEADS
    in_axes: LeafAxes | None = None
    compact: bool | tuple[int, ...] = False
    stage: ClassVar[Stage] = Stage.FED

    def __call__(self, loop: Loop) -> Loop:
        known = dict[Hashable, Loop]()
        ended, going = self._ended(loop, known)
        if is_untraced(loop):
            return ended
        state = going.condition.settled(loop.state, ended)
        if state is not None:
            ended, going = self._ended(loop.having(state=state), known)
        condition = going.condition.fitted(ended, loop.state if state is None else state)
        return ended.having(runner=going._replace(condition=condition))

    def _ended(self, loop: Loop, known: dict[Hashable, Loop]) -> tuple[Loop, Going]:
        """The loop over rows, and what runs it; `known` has the traces of its body."""
        assert loop.given is not None
        bounds = loop.given.bounds
        body, compact, limit = loop.callee.call, self.compact, jnp.asarray(np.int32(loop.length))
        limit = limit if bounds is None else bounds.steps(loop.length)
        call = None if self.cond is None else CallCondition(self.cond, loop.names[0], body.frozen, bool(body.custom))
        condition = Condition.of(call, loop.state, traced=not is_untraced(loop))
        holds = condition(condition.closed, jax.tree.leaves(as_arrays(loop.state)))
        loop = cut(loop, self.in_axes)
        if not holds.ndim:
            loop = _with_count(self._without_rows(loop, body), bounds, limit)
        elif compact is True and isinstance(holds.shape[0], int):
            rows = holds.shape[0]
            compact = tuple(sorted({rows, *(math.ceil(rows * part) for part in _FALLING)}))
        # A row whose condition does not hold to begin with takes no step. Any other begins with the first that runs.
        most, none = jnp.full(holds.shape, loop.length, jnp.int32), jnp.zeros(holds.shape, jnp.int32)
        lengths = select(holds & (limit > 0), most, none)
        going = Going(condition, holds, limit, None if bounds is None else limit, body.convention.verb)
        assert loop.given is not None  # by the verb
        loop = loop.having(given=loop.given._replace(rows=RowFlags(lengths=lengths)), runner=going)
        return FindRows(self.carry_axes, self.x_axes, self.y_axes, 0, self.in_axes, compact)(loop, known), going

    def _without_rows(self, loop: Loop, body: CallBody) -> Loop:
        """The loop, if no option and no body asks for rows. Its body is told of none.

        Raises:
            Fault: for an `ArgumentError` or a `BodyError` if one does.
        """
        asked = ["row_axes"] if {self.carry_axes, self.x_axes, self.y_axes} != {_LEADS} else []
        asked += ["compact"] if self.compact else []
        if asked:
            raise Misuse(
                f"{{verb}} over {{body}}: `{asked[0]}` is for rows that stop independently, but the condition "
                "returned a single bool.",
                "Let the condition return one bool for each row, bool[*batch], without reducing over the rows. Or "
                f"leave `{asked[0]}` out.",
            )
        for name in ("valid", "first"):
            if needs_keyword(body.body, name):
                raise BodyFault(
                    f"{{body}} needs the keyword `{name}`, which {{verb}} passes only if the condition returns one "
                    "bool for each row. It returned a single bool.",
                    f"Let the condition return bool[*batch], or give `{name}` a default.",
                )
        untold = dataclasses.replace(body, sees_valid=False, keyword=None)
        return loop.having(step=Untold(loop.step), callee=dataclasses.replace(loop.callee, call=untold))


@dataclass(frozen=True)
class Untold:
    """The step that does not tell another which rows take it."""

    step: Step

    def __call__(self, consts: Any, state: PyTree, feed: Feed) -> tuple[PyTree, PyTree]:
        return self.step(consts, state, feed._replace(valid=None))


def _with_count(loop: Loop, bounds: Bounds | None, limit: Array) -> Loop:
    """The loop with positions and indices in the state: without xs, nothing in it is as long as the loop."""
    if loop.xs.position is not None:
        loop = loop.having(xs=loop.xs._replace(position=None))
        loop = count_from(loop, limit - 1 if loop.reverse else 0, "position")
    if bounds is not None:
        first, others = bounds.first, limit - 1
        others = others if isinstance(first, int) else others.astype(jnp.result_type(first))
        loop = count_from(loop, first + others if loop.reverse else first)
    return loop


def cut(loop: Loop, axes: LeafAxes | None) -> Loop:
    """The loop, with xs cut to its length."""

    def short(leaf: Any, axis: int | None) -> Any:
        return leaf if axis is None else jax.lax.slice_in_dim(leaf, 0, loop.length, axis=axis)

    x = map_leaves(short, loop.xs.x, axes or (0,) * len(jax.tree.leaves(loop.xs.x)))
    return loop.having(xs=loop.xs._replace(x=x))
