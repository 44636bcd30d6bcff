"""What was read off a trace of a step. It holds no array, so a rule for derivatives may hold it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import jax
from jax.core import ShapedArray

from .._avals import Aval, Leaves, PyTree, TreeDef
from .._loop.feed import Feed
from .._tree import merge
from .equations import (
    NAMED_AXIS,
    PRODUCTS,
    branches_on_devices,
    called_without_rule,
    has_branches,
    has_primitives,
    has_reverse_rule,
    named_axes,
    origins,
    silenced,
)

if TYPE_CHECKING:
    from jax.core import Atom
    from jax.extend.core import ClosedJaxpr, Jaxpr

_NAMED_AXIS = frozenset({NAMED_AXIS})

_REPEATED = _NAMED_AXIS | {"DebugEffect", "OrderedDebugEffect", "ErrorEffect"}  # the last: checkify
"""JAX refuses all other effects under `jax.checkpoint`; it repeats those of `jax.debug`."""

_WRITES = frozenset({"AccumEffect", "WriteEffect"})


def _effects_of(jaxpr: Jaxpr) -> set[str]:
    """The kinds of the effects of a jaxpr."""
    return {type(effect).__name__ for effect in jaxpr.effects}


def is_ref(var: Atom) -> bool:
    """Whether a variable is a mutable array."""
    return not isinstance(var.aval, ShapedArray)


class Inputs(NamedTuple):
    """What a traced step is given, with the variables of its jaxpr in place of arrays.

    Attributes:
        consts: what all steps read.
        state: the leaves of the whole state.
        feed: what a step is fed.
        unchanged: the leaves of the state that the step does not change.
    """

    consts: PyTree
    state: Leaves
    feed: Feed
    unchanged: Sequence[object] = ()


_NOTHING = Inputs(None, [], Feed(None))


@dataclass(frozen=True, eq=False)
class Trace:
    """What was read off the trace of a step; of loops that take turns, off the traces of all.

    Attributes:
        fixed: for each leaf of the state of before whether no step changes it.
        structure: of that state.
        y: the types of one step's y; None if nothing was traced.
        y_avals: the same for each leaf, as JAX has them in a trace.
        inputs: the inputs of `jaxpr` by name.
        changing: for each leaf of the state of before whether something else than the step changes it.
        axes: the named axes of `jax.vmap` over which it computes.
        programs: the jaxprs, open, of the step and of what options have put around it; of turns those of all.
    """

    fixed: tuple[bool, ...]
    structure: TreeDef
    y: PyTree = None
    y_avals: Sequence[Aval] = ()
    inputs: Inputs = _NOTHING
    changing: tuple[bool, ...] = ()
    axes: frozenset[Hashable] = frozenset()
    programs: tuple[Jaxpr, ...] = ()

    @functools.cached_property
    def jaxpr(self) -> Jaxpr:
        """One step, open, of a loop that was traced and takes no turns with others."""
        return self.programs[0]

    def around(self, jaxpr: ClosedJaxpr) -> Trace:
        """The trace with what an option has put around the step, which is now this jaxpr."""
        return dataclasses.replace(self, axes=self.axes | named_axes(jaxpr), programs=(*self.programs, jaxpr.jaxpr))

    @functools.cached_property
    def _effects(self) -> set[str]:
        return set[str]().union(*map(_effects_of, self.programs))

    @property
    def effects(self) -> bool:
        """Whether the body has side effects, for example callbacks."""
        return not self._effects <= _NAMED_AXIS

    @property
    def once_only(self) -> bool:
        """Whether any of that is something that JAX refuses to do once more in the gradient."""
        return not self._effects <= _REPEATED

    @property
    def once_only_in_silence(self) -> bool:
        """Whether there is something like that beside the callbacks that return nothing."""
        return self.effects and any(not _effects_of(silenced(jaxpr)) <= _REPEATED for jaxpr in self.programs)

    @functools.cached_property
    def refs(self) -> bool:
        """Whether it reads or writes mutable arrays that it closes over."""
        return any(is_ref(var) for jaxpr in self.programs for var in jaxpr.constvars)

    @property
    def writes(self) -> bool:
        """Whether it writes one that it closes over; those that it makes itself do not count."""
        return self.refs and not self._effects.isdisjoint(_WRITES)

    @functools.cached_property
    def reverse_rule(self) -> bool:
        """Whether anything in it has a rule for reverse mode alone."""
        return any(map(has_reverse_rule, self.programs))

    @functools.cached_property
    def branches(self) -> bool:
        """Whether it branches."""
        return any(map(has_branches, self.programs))

    @functools.cached_property
    def products(self) -> bool:
        """Whether it multiplies matrices."""
        return any(has_primitives(jaxpr, PRODUCTS) for jaxpr in self.programs)

    @functools.cached_property
    def branches_on_devices(self) -> bool:
        """Whether JAX alone may differentiate it; see the function of this name."""
        return any(map(branches_on_devices, self.programs))

    @property
    def returned(self) -> tuple[bool, ...]:
        """For each leaf of the state of before whether the step returns it as it is.

        Such a leaf stays in the state without rewriting, and if a call returns it, as of a body under `jax.jit`.
        """
        found = origins(self.jaxpr, self.jaxpr.invars, called_without_rule)
        return tuple(a is b and not other for a, b, other in zip(self.inputs.state, found, self.changing, strict=False))

    @property
    def varying(self) -> tuple[bool, ...]:
        """For each input of `jaxpr` whether steps differ in it."""
        same = {*jax.tree.leaves(self.inputs.consts), *self.inputs.unchanged}
        return tuple([var not in same for var in self.jaxpr.invars])

    def whole(self, unchanged: Sequence[object], changed: Sequence[object]) -> Leaves:
        """The leaves of the whole state, from those that no step changes and the others."""
        return merge(self.fixed, unchanged, changed)

    def restore(self, unchanged: Sequence[object], changed: Sequence[object]) -> PyTree:
        """The whole state in its structure."""
        return jax.tree.unflatten(self.structure, self.whole(unchanged, changed))
