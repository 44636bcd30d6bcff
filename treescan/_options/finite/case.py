"""The record of a carry that became NaN or infinite: `NonFinite`, what is static of it, and what cannot be checked."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.core
import jax.extend.core
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from ..._avals import Array, LeafAxes, PyTree, TreeDef, describe_argument
from ..._body.carry import read_carries
from ..._errors import Fault, Misuse, TypeMisuse, named_options
from ..._loop.feed import Consts, Feed, Slot
from ..._loop.loop import Loop, Step
from ..._rows.leaves import select
from ..._trace.smooth import is_smooth
from ..._trace.trace import Trace
from ..._tree import merge, thaw_static
from .blame import MADE, UNSURE, Operation


class Within(NamedTuple):
    """A step of a loop, in which another loop ran.

    Attributes:
        call: the verb and the body, for example "`fold` over `step` (model.py:7)".
        step: the position of the step; with `offset`, in the whole run.
        steps: the steps of the loop; with `offset`, of the run up to the end of this part.
    """

    call: str
    step: int
    steps: int

    def after(self, step: Any, offset: Any) -> Within:
        """The step, counted over the whole run, of a part of it that begins at `offset`; None: at 0."""
        first = 0 if offset is None else int(offset)
        return self._replace(step=first + int(step), steps=first + self.steps)

    def __str__(self) -> str:
        return f"step {self.step:,} of {self.steps:,} of {self.call}"


@dataclass(frozen=True, eq=False)
class NonFinite:
    """The first step of a loop with `check_finite` in which a leaf of the carry became NaN or infinite.

    For a verb over layers, a step is a layer, the carry is the block's x, and `x` what a layer has of its own.

    Attributes:
        path: the leaf, for example `h.cell`.
        kind: whether it became NaN or infinite; None: the step was run again to find out, with another result. Then
            `path` is the whole carry, and the operation is not known.
        step: the position of the step, counted from 0, in reverse too: that of its x in xs. With `offset`, it is that
            in the whole run.
        steps: the steps of the loop; with `offset`, those of the run up to the end of this part.
        ends_early: whether these are the most that it may take.
        rows: the rows that did; in a loop without rows the entries along the leaf's first axis. Empty for a leaf that
            has none. Where rows are in several axes, each is a tuple.
        operation: the first operation with such a result, as JAX names it; None: the value was there before the step.
        place: the line of that operation, for example `model.py:31`; None if it is not known.
        source: the leaf of the carry or of x that the value came from, if no operation of this step made it.
        one_of: operations and leaves of which one made the value, if it cannot be decided which. Then `operation`,
            `place` and `source` are None.
        was_finite: whether all of the carry before the step was finite.
        carry: the carry before the step, as the body sees it.
        x: the x of the step.
        valid: which rows ran the step; None: all.
        unit: what a step is: "step", or "layer".
        within: the steps of other checked loops in which this loop ran, the innermost first.
        place_in_stack: for layers of several blocks, which of their stacks this layer is in, and where. Otherwise None.
    """

    path: str
    kind: Literal["NaN", "inf"] | None
    step: int
    steps: int
    rows: tuple[int, ...] | tuple[tuple[int, ...], ...]
    operation: str | None
    place: str | None
    source: str | None
    was_finite: bool
    carry: PyTree
    x: PyTree
    ends_early: bool = False
    valid: Array | None = None
    unit: Literal["step", "layer"] = "step"
    place_in_stack: tuple[int, int] | None = None
    within: tuple[Within, ...] = ()
    one_of: tuple[str, ...] = ()

    def __str__(self) -> str:
        stack = ["layer {1} of `layers[{0}]`".format(*self.place_in_stack)] if self.place_in_stack else []
        rows = [f"row{'s' * (len(self.rows) > 1)} {_listed(list(map(str, self.rows)))}"] if self.rows else []
        where = f" ({'; '.join([*stack, *rows])})" if stack or rows else ""
        became = f"`{self.path}` became {self.kind or 'NaN or infinite'}"
        most = "at most " if self.ends_early else ""
        outer = "".join(f", within {step}" for step in self.within)
        return f"{became} in {self.unit} {self.step:,} of {most}{self.steps:,}{where}{outer}{self._origin()}"

    def _origin(self) -> str:
        if self.kind is None:
            return ". Running the steps once more did not repeat it: rounding may decide, or a callback"
        if self.one_of:
            return f", which comes from one of {_listed(self.one_of)}"
        if self.source is not None:
            return f", which got it from `{self.source}`"
        place = "" if self.place is None else f" at {self.place}"
        before = "; the carry before it was finite" if self.was_finite else ""
        return f", first in `{self.operation}`{place}{before}"


def _listed(names: Sequence[str]) -> str:
    """Some names: `3, 4 and 9`."""
    first, last = (names[:4], f"{len(names) - 4} others") if len(names) > 5 else (names[:-1], names[-1])
    return f"{', '.join(first)} and {last}" if first else last


_last: list[NonFinite | None] = [None]


def note(record: NonFinite) -> None:
    """Keeps a record for `last_nonfinite`."""
    _last[0] = record


@named_options
def last_nonfinite() -> NonFinite | None:
    """Returns the last record of `check_finite` in this process, also under `jax.jit`.

    It is one for all threads. A `NonFiniteError` has its own, `error.record`.

    Returns:
        The record, or None if there is none yet. Its `carry` and `x` are those of that step, so you can call the body
        on them. They are kept until the next record.

    Examples:
        >>> import jax.numpy as jnp
        >>> import treescan
        >>> def step(h, x):
        ...     return jnp.log(h + x)
        >>> xs = jnp.array([1.0, 2.0, -9.0, 1.0])
        >>> try:
        ...     h = treescan.fold(step, jnp.float32(1.0), xs, check_finite=True)
        ... except treescan.errors.NonFiniteError:
        ...     record = treescan.last_nonfinite()
        >>> print(record.step, record.operation, step(record.carry, record.x))
        2 log nan
    """
    return _last[0]


def check_value(value: Any) -> None:
    """Refuses what `check_finite` does not take.

    Raises:
        Fault: for an `ArgumentError` if it asks for cotangents, or an `ArgumentTypeError` for anything else.
    """
    if isinstance(value, str) and value == "backward":
        raise Misuse(
            '{verb} over {body}: `check_finite` looks at the carry, not at its cotangents: there is no "backward".',
            "The gradient in zeros that each step adds to the carry, as xs, is the cotangents of all steps: see "
            '"Gradients per step" in the guide to debugging.',
        )
    if not isinstance(value, bool) and (not isinstance(value, str) or value != "return"):
        raise TypeMisuse(
            f'{{verb}} over {{body}}: `check_finite` is True, False or "return", got {describe_argument(value)}.',
            'True looks at the carry after each step, and "return" does so too, but returns a report in place of an '
            "error.",
        )


def refuse_effects(trace: Trace) -> None:
    """Refuses bodies that cannot be run once more."""
    if trace.refs or trace.once_only:
        why = "closes over a mutable array (a `Ref`)" if trace.refs else "has an effect that JAX refuses to repeat"
        says = f"runs steps again to find out what went wrong, but the body {why}."
        raise _refused(says, "Leave it out. `jax.debug_nans` stops at the operation.")


def refuse_devices() -> None:
    """Refuses loops within a `jax.shard_map`. JAX makes one of a `jax.pmap`, too."""
    if jax.sharding.get_abstract_mesh().manual_axes:
        cure = "Check the loop outside of it, for example under `jax.jit` with sharded arrays."
        raise _refused("does not work within `jax.shard_map` or `jax.pmap`.", cure)


def _refused(says: str, cure: str) -> Fault:
    return Misuse(f"{{verb}} over {{body}}: `check_finite` {says}", cure)


class OuterSteps(NamedTuple):
    """The steps in which a loop runs, the innermost first.

    Attributes:
        loops: the loops; their positions are beside them.
        positions: of each (int32[], the step; int32[] or None, the offset that it is counted from).
        trace: the trace in which the innermost step runs.
    """

    loops: tuple[Within, ...] = ()
    positions: tuple[tuple[Array, Any], ...] = ()
    trace: Any = None


_outer: contextvars.ContextVar[OuterSteps] = contextvars.ContextVar("outer", default=OuterSteps())  # noqa: B039


def _trace_state() -> Any:
    """What equals itself within one trace of JAX, and nothing of another."""
    home = jax.extend.core if hasattr(jax.extend.core, "get_opaque_trace_state") else jax.core  # JAX 0.8 has it there
    return getattr(home, "get_opaque_trace_state")()  # noqa: B009, an attribute that checkers do not see


def outer_steps() -> OuterSteps:
    """The steps of checked loops in which a loop runs that is traced now; none within a function that JAX traces apart.

    JAX keeps the trace of such a function, for example of one under `jax.jit`, for calls from other steps, whose
    positions it does not know.
    """
    steps = _outer.get()
    return steps if steps.loops and steps.trace == _trace_state() else OuterSteps()


OFFSET: Slot[Array] = Slot("offset")
"""int32[], the position of the first step of a part of a longer loop."""


@dataclass(frozen=True)
class Numbered:
    """A step that tells the loops within it of its position.

    Attributes:
        step: the inner step.
        keyed: whether that is fed its position too.
        call: the verb and the body, as messages name them.
        length: the steps of the loop.
        follows: whether the loop itself runs in a step whose position is known.
    """

    step: Step
    keyed: bool
    call: str
    length: Any
    follows: bool

    def __call__(self, consts: Consts | None, state: PyTree, feed: Feed) -> tuple[PyTree, PyTree]:
        offset, consts = (None, None) if consts is None else OFFSET.take(consts)
        outer = _outer.get() if self.follows else OuterSteps()
        loops = (Within(self.call, -1, self.length), *outer.loops)
        token = _outer.set(OuterSteps(loops, ((feed.position, offset), *outer.positions), _trace_state()))
        try:
            return self.step(consts, state, feed if self.keyed else feed._replace(position=None))
        finally:
            _outer.reset(token)


def numbered(loop: Loop, call: str) -> Loop:
    """The loop, whose steps tell the loops within them of their positions."""
    keyed = loop.xs.position is not None
    xs = loop.xs if keyed else loop.xs._replace(position=jnp.arange(loop.length, dtype=jnp.int32))
    step = Numbered(loop.step, keyed, call, loop.length, bool(outer_steps().loops))
    consts = loop.consts if loop.offset is None else OFFSET.put(loop.consts or Consts(), loop.offset)
    return loop.having(step=step, xs=xs, consts=consts)


CONSTANT = "a constant of the body"


class Bad(NamedTuple):
    """The elements of a leaf that are bad.

    Attributes:
        nan: bool[...], those that are NaN.
        bad: bool[...], those and others that are infinite.
    """

    nan: Array
    bad: Array


class Worst(NamedTuple):
    """The first leaf that is bad.

    Attributes:
        leaf: int32[], its number; -1: there is none.
        is_nan: bool[], whether any of its elements is NaN; otherwise some are infinite.
    """

    leaf: Array
    is_nan: Array

    @classmethod
    def of(cls, leaves: Sequence[Bad | None]) -> Worst:
        """Of the elements of each leaf; None: of a leaf that is not looked at."""
        leaf, is_nan = jnp.int32(-1), jnp.zeros((), bool)
        for i, elements in reversed(list(enumerate(leaves))):
            if elements is not None:
                found = jnp.any(elements.bad)
                leaf, is_nan = select(found, jnp.int32(i), leaf), select(found, jnp.any(elements.nan), is_nan)
        return cls(leaf, is_nan)

    def pick(self, leaves: Sequence[Bad | None]) -> list[Array | None]:
        """The elements that are blamed: those of that leaf, and only NaN if there is any."""
        return [
            None if elements is None else (self.leaf == i) & (elements.nan | (elements.bad & ~self.is_nan))
            for i, elements in enumerate(leaves)
        ]


class Evidence(NamedTuple):
    """What is known of the first bad step.

    Attributes:
        first: int32[], how many steps ran before it; -1: there is none, and all else is zeros.
        position: int32[], its position in xs.
        before: all leaves of the state before it.
        after: those after it.
        x: what it was fed beside the state.
        valid: bool[*batch], which rows ran it; None: all.
        worst: which leaf is blamed.
        bits: int32[...], of each operation; see `Blame.bits`.
        offset: int32[], the position of the loop's first step in the whole run; None: 0.
    """

    first: Array
    position: Array
    before: list[Array]
    after: list[Array]
    x: PyTree
    valid: Array | None
    worst: Worst
    bits: Array
    offset: Any = None


@dataclass(frozen=True)
class Slices:
    """What is scanned over, where some leaves are given whole.

    Attributes:
        axes: for each leaf of xs the axis that is scanned over; None: it is given whole.
        structure: of xs.
    """

    axes: LeafAxes
    structure: TreeDef

    def join(self, whole: Sequence[Any], sliced: Sequence[Any]) -> PyTree:
        """The tree of xs, of the leaves that are given whole and of the others."""
        return jax.tree.unflatten(self.structure, merge([axis is None for axis in self.axes], whole, sliced))


class About(NamedTuple):
    """The words for messages about a checked loop.

    Attributes:
        call: the verb and the body, as messages name them.
        indexed: whether x is an index that leads the state, as that of `fori` does.
        custom: whether the carry holds custom carries.
        ends_early: whether the loop may end before its last step.
        layers: which of the stacks its layers are in, for a verb over layers; -1 for a single one. None: it has steps.
        length: the steps, or layers, of all; None: those of the loop.
        blocks: how many blocks take turns.
        records: from a carry and an x to those that the record holds; None: the same.
        slices: what is scanned over, where some leaves are given whole; None: none are.
        roots: what the items of x are called, where x is a tuple of arguments.
    """

    call: str
    indexed: bool = False
    custom: bool = False
    ends_early: bool = False
    layers: int | None = None
    length: int | None = None
    blocks: int = 1
    records: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]] | None = None
    slices: Slices | None = None
    roots: tuple[str, ...] | None = None


@jtu.register_static
@dataclass(frozen=True)
class Case:
    """What is static of the evidence: the operations of a step, and what its leaves are called.

    Attributes:
        about: the words for messages about the loop.
        length: its steps, or the most that it may take.
        operations: those of one step, inputs first.
        inputs: what each input is called; of those of the state and x, their paths. What is constant is the last.
        paths: what each leaf of the state is called.
        fixed: for each leaf of the state whether no step changes it.
        axes: for each leaf of the state where the batch shape starts; None: it belongs to all rows.
        carry: for each leaf of the user's carry which leaf of the state it is.
        structure: of the user's carry.
        name: of the carry.
        mesh: over which the arrays of the loop are spread, or None.
    """

    about: About
    length: int
    operations: tuple[Operation, ...]
    inputs: tuple[str, ...]
    paths: tuple[str, ...]
    fixed: tuple[bool, ...]
    axes: LeafAxes
    carry: tuple[int, ...]
    structure: TreeDef
    name: str
    mesh: Any = None

    def record(self, evidence: Evidence, within: tuple[Within, ...] = ()) -> NonFinite:
        """The record, of values that are known; `within`: the steps of other loops in which this loop ran."""
        before, about, position = evidence.before, self.about, int(evidence.position)
        carry = thaw_static(jax.tree.unflatten(self.structure, [before[i] for i in self.carry]))
        carry = read_carries(carry, self.name) if about.custom else carry
        x = before[0] if about.indexed else thaw_static(evidence.x)
        carry, x = (carry, x) if about.records is None else about.records(carry, x)
        finite = [
            (np.isfinite(_numbers(leaf)) | ~self._ran(evidence, i)).all()
            for i, leaf in enumerate(before)
            if is_smooth(leaf)
        ]
        place = None if about.layers is None or about.blocks == 1 else (about.layers, position // about.blocks)
        offset = 0 if evidence.offset is None else int(evidence.offset)
        return NonFinite(
            **self._diagnosis(evidence),
            step=offset + position,
            steps=offset + self.length,
            unit="step" if about.layers is None else "layer",
            place_in_stack=place,
            ends_early=about.ends_early,
            was_finite=all(map(bool, finite)),
            carry=carry,
            x=x,
            valid=evidence.valid,
            within=within,
        )

    def _ran(self, evidence: Evidence, leaf: int) -> Any:
        """Which elements of a leaf belong to a row that ran the step, in as many axes as the leaf has."""
        valid, axis, ndim = evidence.valid, self.axes[leaf], evidence.before[leaf].ndim
        if valid is None or axis is None:
            return np.ones((1,) * ndim, bool)
        return valid.reshape((1,) * axis + valid.shape + (1,) * (ndim - axis - valid.ndim))

    def _diagnosis(self, evidence: Evidence) -> dict[str, Any]:
        """What became NaN or infinite, and why, if the steps came out as they did in the loop."""
        leaf = self._worst(evidence)
        found: dict[str, Any] = {"operation": None, "place": None, "source": None}
        if leaf is None:
            return {"path": self.name, "kind": None, "rows": (), **found}
        is_nan, new = bool(evidence.worst.is_nan), _numbers(evidence.after[leaf])
        bad = np.isnan(new) if is_nan else np.isinf(new) & ~np.isinf(_numbers(evidence.before[leaf]))
        rows = _rows(bad & self._ran(evidence, leaf), evidence.valid, self.axes[leaf])
        found |= {"path": self.paths[leaf], "kind": "NaN" if is_nan else "inf", "rows": rows}
        return {**found, **self._origin(np.asarray(evidence.bits))}

    def _origin(self, bits: Any) -> dict[str, Any]:
        """The first operation or input that made what is bad; or several, if one of them did."""
        numbers = np.flatnonzero(bits & MADE).tolist()
        if not numbers:
            return {"source": CONSTANT}
        if len(numbers) > 1 and (bits & UNSURE).any():
            return {"one_of": tuple(dict.fromkeys(map(self._named, numbers)))}
        name, place = self.operations[numbers[0]]
        return {"operation": name, "place": place, "source": self.inputs[numbers[0]] if name is None else None}

    def _named(self, number: int) -> str:
        name, place = self.operations[number]
        return f"`{self.inputs[number]}`" if name is None else f"`{name}`" + ("" if place is None else f" at {place}")

    def _worst(self, evidence: Evidence) -> int | None:
        """The first leaf that is bad; None: no leaf became so here.

        The steps that ran again may be rounded otherwise than in the loop, and a callback may return something else.
        """
        watched = [i for i, new in enumerate(evidence.before) if not self.fixed[i] and is_smooth(new)]
        was_nan = (np.isnan(_numbers(evidence.before[i])) & self._ran(evidence, i) for i in watched)
        if int(evidence.first) and any(nan.any() for nan in was_nan):
            return None
        leaf = int(evidence.worst.leaf)
        return None if leaf < 0 else leaf


def _rows(bad: Any, valid: Any, axis: int | None) -> tuple[Any, ...]:
    """The rows in which a leaf is bad: numbers, or a tuple of numbers for several axes of rows.

    Where a loop has no rows, these are the entries along the leaf's first axis.
    """
    if valid is None or not valid.ndim:
        return tuple(np.flatnonzero(bad.reshape(bad.shape[0], -1).any(axis=1)).tolist()) if bad.ndim else ()
    if axis is None:
        return ()
    others = tuple(i for i in range(bad.ndim) if not axis <= i < axis + valid.ndim)
    found = np.argwhere(bad.any(axis=others)).tolist()
    return tuple(row[0] if valid.ndim == 1 else tuple(row) for row in found)


def _numbers(leaf: Any) -> Any:
    """A leaf in a dtype that NumPy has functions for."""
    return np.asarray(leaf).astype(complex)
