"""`save` in a loop that ends early."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..._avals import is_key, place_like, vary_over
from ..._axes import LeafAxes
from ..._loop.loop import Feed, Loop
from ..._trace.hoist import Hoisted, Repeatable
from ..._tree import Prefix
from ..._types import Array, PyTree
from ..outputs import ALL, LAST, Keep, kept_leaves, spread_keeps, without_dropped
from ..rows.batch_axes import spread_batch_axes, with_axes
from ..rows.fill import fill_leaves
from ..rows.leaves import pick_steps, select_valid
from .early_exit import StepOutputs


@dataclass(frozen=True, eq=False)
class Keeping:
    """The step that puts some outputs into the state, before its own leaves, and returns the others that are kept."""

    step: Repeatable
    last: tuple[int, ...]
    stacked: tuple[int, ...]

    def __call__(self, consts: Any, state: list[Any], feed: Feed) -> tuple[list[Any], list[Any]]:
        state, y = self.step(consts, state[len(self.last) :], feed)
        leaves = jax.tree.leaves(y)
        return [*(_strong(leaves[i]) for i in self.last), *state], [leaves[i] for i in self.stacked]

    @property
    def once_only(self) -> bool:
        """Whether it has effects that JAX refuses to repeat."""
        return self.step.once_only

    def silenced(self) -> Keeping:
        """The same without the callbacks of the body."""
        return dataclasses.replace(self, step=self.step.silenced())


def _strong(leaf: Any) -> Array:
    """The leaf, whose type does not give way to others."""
    return leaf if is_key(leaf) else jax.lax.convert_element_type(leaf, jax.typeof(leaf).dtype)


class Kept(NamedTuple):
    """Which outputs of a loop are kept.

    Attributes:
        keeps: for each leaf of y.
        structure: of y.
        save: what the user said.
    """

    keeps: tuple[Keep, ...]
    structure: Any
    save: Prefix

    @classmethod
    def of(cls, hoisted: Hoisted, save: Prefix) -> Kept:
        """As `save` says of a loop's outputs."""
        return cls(spread_keeps(save, hoisted.y), jax.tree.structure(hoisted.y), save)

    @property
    def last(self) -> tuple[int, ...]:
        """The leaves of y of which the last one is kept."""
        return tuple(i for i, keep in enumerate(self.keeps) if keep == LAST)

    @property
    def stacked(self) -> tuple[int, ...]:
        """The leaves of y that are stacked."""
        return tuple(i for i, keep in enumerate(self.keeps) if keep not in (LAST, None))

    def stride(self, length: int, *, reverse: bool) -> int:
        """Every how many steps outputs leave a chunk where they are not all kept.

        In reverse the steps that fill up the last chunk come first: all are kept where these would shift the others.
        """
        stride = math.gcd(*(keep for keep in self.keeps if keep and 1 < keep <= length)) or 1
        return 1 if reverse and length % stride else stride

    def restrict(
        self, hoisted: Hoisted, fill: Prefix, varying: frozenset[str], stride: int
    ) -> tuple[Hoisted, StepOutputs]:
        """The loop with these outputs, as a list, and their types. `fill` is what the user said of y."""
        fills = fill.spread(hoisted.y, "y")
        values = fill_leaves(fill, hoisted.y)
        avals = [hoisted.y_avals[i] for i in self.last]
        first = [
            vary_over(place_like(jnp.broadcast_to(values[i], aval.shape), aval), varying)
            for i, aval in zip(self.last, avals, strict=True)
        ]
        step = Keeping(hoisted.repeatable, self.last, self.stacked)
        loop = dataclasses.replace(hoisted.loop, step=step, state=[*first, *hoisted.loop.state])
        if loop.rows is not None:
            axes = loop.rows.axes.y
            loop = with_outputs(loop, tuple(axes[i] for i in self.last), tuple(axes[i] for i in self.stacked))
        types = tuple(hoisted.y_avals[i] for i in self.stacked)
        every = tuple(1 if self.keeps[i] == ALL else stride for i in self.stacked)
        outputs = StepOutputs(types, Prefix.of([fills[i] for i in self.stacked]), varying, every)
        return hoisted._replace(loop=loop, fixed=(*(False for _ in first), *hoisted.fixed)), outputs

    def assemble(
        self, leaves: list[Any], ys: list[Any], every: tuple[int, ...], length: int
    ) -> tuple[list[Any], PyTree]:
        """The leaves of the state without outputs, and the tree of ys.

        Args:
            leaves: the leaves of the last state.
            ys: the outputs that were stacked, one in `every` so many steps of each.
            every: see `StepOutputs`.
            length: the most steps.
        """
        held, leaves = leaves[: len(self.last)], leaves[len(self.last) :]
        thinned = [
            _thin(y[: length // n], self.keeps[i] or ALL, n) for y, i, n in zip(ys, self.stacked, every, strict=True)
        ]
        whole = dict(zip((*self.last, *self.stacked), (*held, *thinned), strict=True))
        kept = kept_leaves([whole[i] for i in sorted(whole)], self.keeps)
        return leaves, without_dropped(kept, self.structure, self.save)


def _thin(ys: Array, keep: int, every: int) -> Array:
    if keep == every:
        return ys
    stride = keep // every
    return ys[stride - 1 :: stride]


def with_outputs(loop: Loop, held: LeafAxes, stacked: LeafAxes) -> Loop:
    """The loop whose state is led by outputs, and which stacks others; and where their rows are."""
    axes = loop.rows.axes
    rows = loop.rows._replace(y_axes=Prefix.of(list(stacked)))
    return with_axes(dataclasses.replace(loop, rows=rows), state=(*held, *axes.state), y=stacked)


def axes_of_outputs(loop: Loop, ys: PyTree) -> LeafAxes:
    """Where the rows are in each leaf of one step's y, from the outputs of all steps."""
    assert loop.xs.valid is not None
    one = jax.tree.map(lambda y: jax.ShapeDtypeStruct(y.shape[1:], y.dtype), ys)
    return spread_batch_axes("y_axes", loop.rows.y_axes, one, "y", loop.xs.valid.shape[1:])


def keep_what_ran(ys: PyTree, save: Prefix, fill: Prefix, steps: Array, y_axes: LeafAxes, *, reverse: bool) -> PyTree:
    """What is kept, from the outputs of all steps; those after the last one that was taken are filled.

    `steps` is int32[*batch], and `y_axes` says where the rows are in one step's y, if there are any.
    """
    leaves, structure = jax.tree.flatten(ys)
    keeps = spread_keeps(save, ys)

    def last_of(leaf: Array, value: Array, axis: int | None) -> Array:
        if not leaf.shape[0]:
            return jnp.broadcast_to(value, leaf.shape[1:])
        own, axis = (jnp.max(steps), 0) if axis is None else (steps, axis)
        at = jnp.clip(leaf.shape[0] - own if reverse else own - 1, 0, leaf.shape[0] - 1)
        picked = pick_steps(leaf, at, axis)
        return select_valid(own > 0, picked, jnp.broadcast_to(value, picked.shape), axis)

    def kept(leaf: Array, keep: Keep, value: Array, axis: int | None) -> Array | None:
        if keep is None:
            return None
        return last_of(leaf, value, axis) if keep == LAST else leaf[keep - 1 :: keep]

    given = zip(leaves, keeps, fill_leaves(fill, ys), y_axes or (None,) * len(leaves), strict=True)
    return without_dropped([kept(*each) for each in given], structure, save)
