"""The steps that run a trace of the body, and one in the same form that does not."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.core import eval_jaxpr

from .._avals import Array, Aval, Leaves, PyTree, TreeDef, as_arrays
from .._loop.feed import Consts, Feed, Flag
from .._loop.loop import Step
from .._tree import merge, split
from .equations import silenced

if TYPE_CHECKING:
    from jax.extend.core import ClosedJaxpr

Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, eq=False)
class Traced:
    """A step that was traced already. Its state are the leaves that it changes.

    Attributes:
        jaxprs: the step, flat, for the shapes of its arguments: (`Consts.inner`, state, feed) to (state, y).
        fixed: for each leaf of the state whether it is unchanged.
        y: the structure of y.
    """

    jaxprs: dict[Shapes, ClosedJaxpr]
    fixed: tuple[bool, ...]
    y: TreeDef

    def __call__(self, consts: Consts, state: Leaves, feed: Feed) -> tuple[Leaves, PyTree]:
        return self.evaluate(None, consts, state, feed)

    def evaluate(self, closed: Leaves | None, consts: Consts, state: Leaves, feed: Feed) -> tuple[Leaves, PyTree]:
        """Runs the trace; `closed` is what the body closes over; None: what it closed over in the trace."""
        leaves = self._leaves(consts, state, feed)
        jaxpr = self.jaxprs[shapes_of(leaves)]
        closed = jaxpr.consts if closed is None else closed
        out = eval_jaxpr(jaxpr.jaxpr, closed, *leaves, propagate_source_info=True)
        out = list(map(array_of, out, jaxpr.out_avals))
        new, y = out[: len(self.fixed)], out[len(self.fixed) :]
        return split(self.fixed, new)[1], jax.tree.unflatten(self.y, y)

    def shapes(self, consts: Consts, state: Leaves, feed: Feed) -> Shapes:
        """Under which a trace is found."""
        return shapes_of(self._leaves(consts, state, feed))

    def _leaves(self, consts: Consts, state: Leaves, feed: Feed) -> Leaves:
        return jax.tree.leaves((consts.inner, merge(self.fixed, consts.unchanged, state), feed))


SILENT = Flag("silent")
"""Said to a traced step that runs once more: its callbacks have been called."""


@dataclass(frozen=True, eq=False)
class Lifted:
    """A traced step that is given what its body closes over, in its consts.

    Attributes:
        traced: the step.
        places: which of them its trace for arguments of certain shapes closes over; None: a mutable array, which the
            trace goes on to close over.
    """

    traced: Traced
    places: dict[Shapes, tuple[int | None, ...]]

    def __call__(self, consts: Consts, state: Leaves, feed: Feed) -> tuple[Leaves, PyTree]:
        traced = self.silenced().traced if SILENT.on(consts) else self.traced
        shapes, closed = traced.shapes(consts, state, feed), consts.closed or ()
        pairs = zip(self.places[shapes], traced.jaxprs[shapes].consts, strict=True)
        return traced.evaluate([ref if i is None else closed[i] for i, ref in pairs], consts, state, feed)

    def silenced(self) -> Lifted:
        """The step without its callbacks, for a second run that must not report again."""
        jaxprs = {shapes: silenced(jaxpr) for shapes, jaxpr in self.traced.jaxprs.items()}
        return dataclasses.replace(self, traced=dataclasses.replace(self.traced, jaxprs=jaxprs))


@dataclass(frozen=True)
class Untraced:
    """A step in the same form that is not traced, for `jax.disable_jit`. Nothing leaves its state."""

    step: Step
    structure: TreeDef

    def __call__(self, consts: Consts, state: Leaves, feed: Feed) -> tuple[Leaves, PyTree]:
        new, y = as_arrays(self.step(consts.inner, jax.tree.unflatten(self.structure, state), feed))
        return jax.tree.leaves(new), y


def array_of(value: object, aval: Aval) -> Array:
    """A constant that a step returns comes out of its jaxpr as a plain number."""
    if isinstance(value, jax.Array):
        return value
    return jnp.asarray(value) if aval.weak_type else jnp.asarray(value, aval.dtype)


def shapes_of(leaves: Sequence[Any]) -> Shapes:
    return tuple([tuple(leaf.shape) if hasattr(leaf, "shape") else jax.typeof(leaf).shape for leaf in leaves])
