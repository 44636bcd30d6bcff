"""What a checked loop is run from once more: its trace, its rows, and what it is fed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from ..._axes import LeafAxes
from ..._loop.body import Memo
from ..._loop.loop import Loop, Transform
from ..._loop.run import is_jit_disabled
from ..._trace.hoist import Hoisted, hoist, lift
from ..._tree import leaves_with_path
from ..._types import Array, PyTree, TreeDef
from ..axes import MergeWhole
from ..once import DroppingOnce
from .rows import in_rows, without_tangents
from .within import numbered


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
        first, second = iter(whole), iter(sliced)
        return jax.tree.unflatten(self.structure, [next(first if axis is None else second) for axis in self.axes])


@dataclass(frozen=True, eq=False)
class Site:
    """A loop before it was checked.

    Attributes:
        given: the loop; in the names and the structure of the user's.
        hoisted: its trace; what the body closes over is lifted.
        slices: what is scanned over, where some leaves are given whole; None: none are.
        whole: these leaves.
        around: what is put around a step of rows.
        last: the position of the step that runs first, in reverse.
        roots: what the items of x are called, where x is a tuple of arguments.
    """

    given: Loop
    hoisted: Hoisted
    slices: Slices | None
    whole: list[Array]
    around: tuple[Transform, ...]
    last: Any
    roots: tuple[str, ...] | None = None

    @property
    def fixed(self) -> tuple[bool, ...]:
        """For each leaf of the state whether no step changes it."""
        return self.hoisted.fixed

    @property
    def keyed(self) -> bool:
        """Whether a step is fed its position."""
        return self.given.xs.position is not None

    def once_more(self) -> Loop:
        """The traced loop without tangents: else a derivative would run through what is run once more."""
        loop = self.hoisted.loop
        consts, state, xs = jax.lax.stop_gradient((loop.consts, loop.state, loop.xs))
        step, rows = self.hoisted.repeatable.silenced(), without_tangents(loop.rows)
        bare = dataclasses.replace(loop, trace=None, finish=(), wishes=(), unroll=1, lowering=(), runner=None)
        return dataclasses.replace(bare, step=step, consts=consts, state=state, xs=xs, rows=rows, memo=Memo())

    def x_of(self, x: PyTree) -> PyTree:
        """The user's x, of one that a step is fed."""
        return x if self.slices is None else self.slices.join(jax.lax.stop_gradient(self.whole), jax.tree.leaves(x))

    @property
    def structure(self) -> TreeDef:
        """Of the state that is the user's; there may be indices around it."""
        return self.hoisted.structure if self.given.rows is None else self.given.trace.structure

    def carry_of(self, leaves: Sequence[Any]) -> PyTree:
        """The user's carry, of the leaves of the state."""
        state = jax.tree.unflatten(self.structure, leaves)
        return self.given.carry_of(state) if self.given.rows is None else state

    def names_of_state(self) -> tuple[str, ...]:
        """What each leaf of the state is called; one that is not the carry's is the index, which the body sees as x."""
        carry, x = self.given.names
        found = {place: path for path, place in leaves_with_path(carry, self.carry_of(range(len(self.fixed))))}
        return tuple(found.get(i, x) for i in range(len(self.fixed)))

    def names_of_feed(self) -> tuple[list[str], list[str]]:
        """What the leaves that are given whole are called, and those that a step is fed."""
        xs, name = self.given.xs, self.given.names[1]
        x = self.x_of(xs.x)
        trees = [(name, x)] if self.roots is None else zip(self.roots, x, strict=False)
        named = [path for root, tree in trees for path, _ in leaves_with_path(root, tree)]
        whole: list[str] = []
        if self.slices is not None:
            pairs = list(zip(named, self.slices.axes, strict=True))
            whole = [path for path, axis in pairs if axis is None]
            named = [path for path, axis in pairs if axis is not None]
        fed, others = self.hoisted.loop.xs, {"position": "the position", "valid": "valid"}
        return whole, [*named, *(text for field, text in others.items() if getattr(fed, field) is not None)]


def site_of(
    loop: Loop, slices: Slices | None, around: tuple[Transform, ...], last: Any, call: str | None = None
) -> Site:
    """The site of a loop, whose body is traced here unless it was already.

    Args:
        loop: the loop.
        slices: what is scanned over, where some leaves are given whole; None: none are.
        around: what is put around a step of rows.
        last: the position of the step that runs first, in reverse.
        call: the verb and the body, where loops within a step are told of it; None: they are not.
    """
    with jax.disable_jit(False):
        hoisted = _traced(loop if call is None else numbered(loop, call))
    return Site(loop, hoisted, slices, whole_of(loop) if slices is not None else [], around, last)


def _traced(loop: Loop) -> Hoisted:
    if loop.rows is None:
        return lift(hoist(loop))
    if loop.rows.unchanged is None:
        return loop.trace._replace(loop=loop)
    changing = [not fixed for fixed in loop.rows.unchanged()]
    return in_rows(loop, lift(hoist(loop, changing)))


def whole_of(loop: Loop) -> list[Array]:
    """The leaves of xs that are given whole, which lead the consts that the body's own step is given."""
    if isinstance(loop.step, MergeWhole | DroppingOnce):
        return loop.consts[0]
    _, inner = loop.consts
    return inner[0] if is_jit_disabled() else inner[1][0]
