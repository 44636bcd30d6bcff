"""What is static of the evidence of a checked loop, and the record that is made of the two."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.tree_util as jtu
import numpy as np

from ..._axes import LeafAxes
from ..._body.carries import read_carries
from ..._finite import OF_RESULT, NonFinite, Within
from ..._loop.loop import Loop
from ..._trace.blame import INF, NAN, Operation, becomes_bad, is_checked, origin
from ..._tree import thaw_static
from ..._types import Array, PyTree, TreeDef

CONSTANT = "a constant of the body"


class Evidence(NamedTuple):
    """What is known of the first bad step.

    Attributes:
        first: int32[], how many steps ran before it; -1: there is none, and all else is zeros.
        position: int32[], its position in xs.
        before: all leaves of the state before it.
        after: those after it.
        x: what it was fed beside the state.
        valid: bool[*batch], which rows ran it; None: all.
        bits: int32[...], of each operation; see `Blame`.
        of_result: bool[], of cotangents: whether it was so before the step.
    """

    first: Array
    position: Array
    before: list[Array]
    after: list[Array]
    x: PyTree
    valid: Array | None
    bits: Array
    of_result: Array | None = None


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
        backward: whether it is the cotangent of the carry that is looked at.
        records: from a carry and an x to those that the record holds; None: the same.
    """

    call: str
    indexed: bool = False
    custom: bool = False
    ends_early: bool = False
    layers: int | None = None
    length: int | None = None
    blocks: int = 1
    backward: bool = False
    records: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]] | None = None

    def numbers(self, loop: Loop) -> str | None:
        """The call, if the loops within a step are told of the step: its position is known before the loop runs."""
        return None if self.ends_early or loop.rows is not None else self.call


class Bad(NamedTuple):
    """A leaf that is NaN or infinite.

    Attributes:
        leaf: its number.
        rows: its rows that are.
        is_nan: whether any element is NaN.
    """

    leaf: int
    rows: tuple[Any, ...]
    is_nan: bool


@jtu.register_static
@dataclass(frozen=True, eq=False)
class Case:
    """What is static of the evidence: the operations of a step, and what its leaves are called.

    Attributes:
        about: the words for messages about the loop.
        length: its steps, or the most that it may take.
        operations: those of one step, inputs first.
        results: for each leaf of the state the operation that makes it.
        inputs: what each input is called; of those of the state and x, their paths.
        paths: what each leaf of the state is called.
        fixed: for each leaf of the state whether no step changes it.
        axes: for each leaf of the state where the batch shape starts; None: it belongs to all rows.
        carry: for each leaf of the user's carry which leaf of the state it is.
        structure: of the user's carry.
        name: of the carry.
    """

    about: About
    length: int
    operations: tuple[Operation, ...]
    results: tuple[int | None, ...]
    inputs: tuple[str, ...]
    paths: tuple[str, ...]
    fixed: tuple[bool, ...]
    axes: LeafAxes
    carry: tuple[int, ...]
    structure: TreeDef
    name: str

    def record(self, evidence: Evidence, within: tuple[Within, ...] = ()) -> NonFinite:
        """The record, of values that are known; `within`: the steps of other loops in which this loop ran."""
        before = evidence.before
        carry = thaw_static(jax.tree.unflatten(self.structure, [before[i] for i in self.carry]))
        carry = read_carries(carry, self.name) if self.about.custom else carry
        x = before[0] if self.about.indexed else thaw_static(evidence.x)
        carry, x = (carry, x) if self.about.records is None else self.about.records(carry, x)
        return NonFinite(
            **self._diagnosis(evidence),
            step=int(evidence.position),
            steps=self.length,
            unit="step" if self.about.layers is None else "layer",
            place_in_stack=self._place(int(evidence.position)),
            ends_early=self.about.ends_early,
            was_finite=all(self._is_finite(evidence, i) for i, leaf in enumerate(before) if is_checked(leaf)),
            carry=carry,
            x=x,
            valid=evidence.valid,
            backward=self.about.backward,
            within=within,
        )

    def _place(self, position: int) -> tuple[int, int] | None:
        stack = self.about.layers
        return None if stack is None or self.about.blocks == 1 else (stack, position // self.about.blocks)

    def _is_finite(self, evidence: Evidence, leaf: int) -> bool:
        return bool((np.isfinite(_numbers(evidence.before[leaf])) | ~self._ran(evidence, leaf)).all())

    def _ran(self, evidence: Evidence, leaf: int) -> Any:
        """Which elements of a leaf belong to a row that ran the step, in as many axes as the leaf has."""
        valid, axis, ndim = evidence.valid, self.axes[leaf], evidence.before[leaf].ndim
        if valid is None or axis is None:
            return np.ones((1,) * ndim, bool)
        return valid.reshape((1,) * axis + valid.shape + (1,) * (ndim - axis - valid.ndim))

    def _diagnosis(self, evidence: Evidence) -> dict[str, Any]:
        """What became NaN or infinite, and why, if the steps came out as they did in the loop."""
        worst = self._worst(evidence)
        if worst is not None and evidence.of_result is not None and bool(evidence.of_result):
            kind = "NaN" if worst.is_nan else "inf"
            path = self.paths[worst.leaf]
            return {
                "path": path,
                "kind": kind,
                "rows": worst.rows,
                "operation": None,
                "place": None,
                "source": OF_RESULT,
            }
        if worst is None:
            return {"path": self.name, "kind": None, "rows": (), "operation": None, "place": None, "source": None}
        made, bits, bit = self.results[worst.leaf], np.asarray(evidence.bits).tolist(), NAN if worst.is_nan else INF
        number = None if made is None else origin(self.operations, bits, made, bit)
        found = Operation(None, None, ()) if number is None else self.operations[number]
        given = CONSTANT if number is None else self.inputs[number] if found.name is None else None
        return {
            "path": self.paths[worst.leaf],
            "kind": "NaN" if worst.is_nan else "inf",
            "rows": worst.rows,
            "operation": found.name,
            "place": found.place,
            "source": given,
        }

    def _worst(self, evidence: Evidence) -> Bad | None:
        """The first leaf that is bad; None: no leaf became so here.

        The steps that ran again may be rounded otherwise than in the loop, and a callback may return something else.
        """
        watched = [i for i, new in enumerate(evidence.before) if not self.fixed[i] and is_checked(new)]
        if self.about.backward:
            return next(self._bad_cotangents(evidence, watched), None)
        if int(evidence.first) and any(
            (np.isnan(_numbers(evidence.before[i])) & self._ran(evidence, i)).any() for i in watched
        ):
            return None
        return next(self._bad_leaves(evidence, watched), None)

    def _bad_leaves(self, evidence: Evidence, watched: list[int]) -> Iterator[Bad]:
        for i in watched:
            old, new, ran = evidence.before[i], evidence.after[i], self._ran(evidence, i)
            nan = np.isnan(_numbers(new)) & ran
            bad = nan if nan.any() else np.asarray(becomes_bad(old, new)) & ran
            if bad.any():
                yield Bad(i, _rows(bad, evidence.valid, self.axes[i]), bool(nan.any()))

    def _bad_cotangents(self, evidence: Evidence, watched: list[int]) -> Iterator[Bad]:
        for i in watched:
            numbers = _numbers(evidence.after[i])
            nan, bad = np.isnan(numbers), ~np.isfinite(numbers)
            if bad.any():
                yield Bad(i, _rows(nan if nan.any() else bad, evidence.valid, self.axes[i]), bool(nan.any()))


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
