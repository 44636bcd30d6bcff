"""`save` with positions: outputs of chosen steps, which the loop writes into an array that it carries."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from .._avals import Array, PyTree, describe_argument, place_like, stacked_type, vary_over, varying_axes
from .._errors import Misuse, TypeMisuse
from .._loop.feed import Feed
from .._loop.loop import Loop, Result, Step, is_untraced
from .._outputs.outputs import is_positions, spread_keeps
from .._trace.hoist import traced
from .._transforms.call import Arguments, Call
from .._transforms.transform import Stage, Transform
from .._tree import Prefix
from .._types import Save


@dataclass(frozen=True)
class Positions:
    """The steps whose outputs are kept.

    Attributes:
        at: ascending.
    """

    at: tuple[int, ...]

    def check_within(self, length: int) -> None:
        """Refuses positions that a loop of so many steps does not have."""
        if self.at and self.at[-1] >= length:
            raise Misuse(
                f"{{verb}} over {{body}}: `save` has the position {self.at[-1]}, but there are {length} {{unit}}s.",
                "Positions count from 0 and are those of xs, also in reverse.",
            )

    def slots(self, length: int) -> np.ndarray:
        """int32[T]: for each step the place of its output among those that are kept; their number: it has none."""
        slots = np.full(length, len(self.at), np.int32)
        slots[list(self.at)] = np.arange(len(self.at))
        return slots

    def pick(self, ys: Array) -> Array:
        """The outputs that are kept, from those of all steps."""
        self.check_within(ys.shape[0])
        return jnp.take(ys, np.array(self.at, np.int32), axis=0)


def positions_of(keep: range | np.ndarray) -> Positions:
    """The positions in a sequence of them.

    Raises:
        Fault: for an `ArgumentError` if they are not ints from 0 up, each larger than the last.
    """
    numbers = np.asarray(keep)
    numbers = numbers.astype(np.int64) if numbers.size == 0 else numbers
    if numbers.ndim != 1 or not np.issubdtype(numbers.dtype, np.integer):
        raise TypeMisuse(
            f"{{verb}} over {{body}}: the positions of `save` must be a `range` or one axis of ints, got "
            f"{describe_argument(keep)}.",
            "For example `np.array([4, 9, 99])`. `np.flatnonzero(mask)` are those where a mask is True.",
        )
    if numbers.size and (numbers[0] < 0 or np.any(np.diff(numbers.astype(np.int64)) <= 0)):
        raise Misuse(
            "{verb} over {body}: the positions of `save` must be at least 0 and ascend, each once.",
            "`np.unique(positions)` sorts them. Negative positions do not count from the end: the last one is T - 1.",
        )
    return Positions(tuple(numbers.tolist()))


def with_strides(save: Save, length: Any) -> Save:
    """What `save` says, with the number k in place of positions that are those of every k-th output."""

    def stride(keep: Any) -> Any:
        if not is_positions(keep) or not isinstance(length, int):
            return keep
        at = positions_of(keep).at
        return at[0] + 1 if at and at == tuple(range(at[0], length, at[0] + 1)) else keep

    return jax.tree.map(stride, save, is_leaf=lambda leaf: leaf is None)


@dataclass(frozen=True)
class Recorded:
    """The step that writes some outputs into arrays, [K, ...]. Its state is (the arrays, the inner state).

    Its x is (slots, the inner x): for each recorded leaf the place in its array where the step's output goes, K for
    none. What it returns for such a leaf is empty.
    """

    step: Step
    recorded: tuple[bool, ...]

    def __call__(self, consts: PyTree, state: tuple[list[Array], PyTree], feed: Feed) -> tuple[PyTree, PyTree]:
        (kept, inner), (slots, x) = state, feed.x
        inner, y = self.step(consts, inner, feed._replace(x=x))
        leaves, structure = jax.tree.flatten(y)
        each, now = zip(kept, slots, strict=True), list[Array]()
        for i, is_recorded in enumerate(self.recorded):
            if is_recorded:
                array, slot = next(each)
                now.append(_written(array, leaves[i], slot))
                leaves[i] = jnp.zeros((0,), bool)
        return (now, inner), jax.tree.unflatten(structure, leaves)


def _written(array: Array, value: Array, slot: Array) -> Array:
    """The array with a value at a place, which is that of the next one that is kept until there is none."""
    size = array.shape[0]
    at = jnp.minimum(slot, size - 1)
    old = jax.lax.dynamic_index_in_dim(array, at, keepdims=False)
    return jax.lax.dynamic_update_index_in_dim(array, jnp.where(slot < size, value, old), at, 0)


@dataclass(frozen=True)
class RecordOutputs(Transform):
    """Keeps outputs of chosen steps. `KeepOutputs` and `KeepRows` keep all that is left of them.

    What has no plain loop of its own stacks these outputs, and picks from the stack: rows, patterns, and steps
    that run one by one.

    Attributes:
        save: a prefix of y, with `Positions` for some of its leaves.
    """

    save: Prefix
    stage: ClassVar[Stage] = Stage.RECORDED

    @classmethod
    def of(cls, save: Any) -> RecordOutputs:
        """What the user said of `save`."""
        prefix = Prefix.of(save)
        leaves = (positions_of(leaf) if is_positions(leaf) else leaf for leaf in prefix.leaves)
        return cls(Prefix(tuple(leaves), prefix.structure))

    def refuse_part(self, call: Call, given: Arguments) -> None:
        raise Misuse(
            "{call}: `save` with positions cannot be combined with `offset`: they may be those of another part.",
            "Keep all outputs of the part, and index them.",
        )

    def __call__(self, loop: Loop) -> Loop:
        if not isinstance(loop.length, int):
            raise Misuse(
                "{verb} over {body}: `save` with positions needs to know the number of {unit}s, but it is symbolic.",
                "Leave it out, or export with a known number of {unit}s.",
            )
        by_itself = loop.runner is not None or loop.turns or loop.rows is not None
        if by_itself or is_untraced(loop):
            return loop.finished(ys=functools.partial(_put_back, self.save, ()))
        loop = traced(loop)
        keeps, avals = spread_keeps(self.save, loop.hoisted.y), loop.hoisted.y_avals
        arrays, slots, recorded = list[Array](), list[np.ndarray](), list[bool]()
        for keep, aval in zip(keeps, avals, strict=True):
            recorded.append(isinstance(keep, Positions) and bool(keep.at) and not _is_stacked(aval))
            if isinstance(keep, Positions) and recorded[-1]:
                keep.check_within(loop.length)
                slots.append(keep.slots(loop.length))
                kind = stacked_type(aval, len(keep.at))
                array = place_like(jax.lax.full(kind.shape, 0, kind.dtype), kind)
                arrays.append(vary_over(array, varying_axes(aval)))
        loop = loop.having(
            step=Recorded(loop.step, tuple(recorded)),
            state=(arrays, loop.state),
            xs=loop.xs._replace(x=(slots, loop.xs.x)),
            trace=None,  # what follows traces this step in its place
        )
        # What is dropped has no leaf in the end: those with positions are counted.
        flags = [flag for keep, flag in zip(keeps, recorded, strict=True) if isinstance(keep, Positions)]
        return loop.finished(lambda state: state[1], functools.partial(_put_back, self.save, flags))


def _put_back(save: Prefix, recorded: Sequence[bool], result: Result) -> PyTree:
    """The outputs, with those that were recorded. All others at positions were stacked, and are picked."""
    leaves, structure = jax.tree.flatten(result.ys)
    arrays = iter(result.state[0] if any(recorded) else ())
    flags = iter(recorded)
    for i, keep in enumerate(spread_keeps(save, result.ys)):
        if isinstance(keep, Positions):
            leaves[i] = next(arrays) if next(flags, False) else keep.pick(leaves[i])
    return jax.tree.unflatten(structure, leaves)


def _is_stacked(aval: Any) -> bool:
    """Whether no array can be filled with its values: keys, and Python's numbers, whose weak type it would lose."""
    return jnp.issubdtype(aval.dtype, jax.dtypes.prng_key) or aval.weak_type
