"""The variables and rngs of a cell in the loop of an `RNN`, by the rules of flax.linen.scan."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax.core import lift
from flax.core.scope import CollectionFilter, PRNGSequenceFilter, Scope, intersect_filters, is_filter_empty

from ..._errors import GROUP_WORDS, ArgumentError, Fault, explain
from ..._loop.run import named_signature
from ..._progress import shown_as
from ..._tree import Root, named_roots
from ..._types import Array, FiniteCheck, ProgressLike, PyTree, RematLike
from ..._verbs.groups import Groups, GroupStep, Rngs, Roles, State, broadcast_of, carry_of, refuse_made, split_keys
from ..._verbs.mask_scan import mask_scan
from ..._verbs.scan import scan
from ._scopes import Axes, Group, ScopedCall, axes_of, copied, merged, parted_rngs, with_axes, without_axes

_NAME = "treescan.integrations.flax.RNN"


def refused(says: str, *cures: str, error: type[ArgumentError] = ArgumentError) -> Exception:
    """The error with which `RNN` refuses an argument; `{verb}` is its name."""
    return explain(Fault(error, says, *cures), _NAME)


@dataclass(frozen=True, eq=False)
class LoopPlan:
    """What one call of an `RNN` is told beside its carry and its inputs.

    Attributes:
        named: the function that errors are about.
        lengths: int32[*batch]: how many steps of each row are valid; None: all.
        time_axis: where the steps are in the inputs and the outputs.
        initializing: whether variables are being made.
        unroll: as for `treescan.scan`.
        remat: as for `treescan.scan`.
        chunk: as for `treescan.mask_scan`.
        compact: as for `treescan.mask_scan`.
        progress: as for `treescan.scan`.
        check_finite: as for `treescan.scan`.
        variable_axes: the collections of which each step has its own, and the axis of the steps in their variables.
        variable_broadcast: the collections that all steps share.
        variable_carry: the collections that one step hands to the next.
        split_rngs: the rngs that the cell is given, and whether each step has its own.
    """

    named: Callable[..., Any]
    lengths: Array | None
    time_axis: int
    initializing: bool
    unroll: int
    remat: RematLike | None
    chunk: int | None
    compact: bool | tuple[int, ...]
    progress: ProgressLike
    check_finite: FiniteCheck
    variable_axes: Mapping[CollectionFilter, Any]
    variable_broadcast: CollectionFilter
    variable_carry: CollectionFilter
    split_rngs: Mapping[PRNGSequenceFilter, bool]


class Loop(NamedTuple):
    """What is carried. Errors speak of it as of the cell's carry.

    Attributes:
        carry: the cell's carry.
        variables: the collections of `variable_carry`.
        constants: the collections of `variable_broadcast`, and the rngs that all steps share. No step changes them, so
            that they are constants of the loop, and lent where padding stands in for a whole batch.
    """

    carry: PyTree
    variables: Any
    constants: Any


class CellInputs(NamedTuple):
    """What one step receives.

    Attributes:
        inputs: the cell's.
        keys: those that each step has for itself.
        variables: the collections of `variable_axes`.
    """

    inputs: Any
    keys: Any
    variables: Any


named_roots(Loop, carry=Root("carry"), variables=Root("variables"), constants=Root("constants"))
named_roots(CellInputs, inputs=Root("inputs"), keys=Root("rngs"), variables=Root("variables"))


def lift_loop(cell: Callable[..., Any], plan: LoopPlan) -> Callable[..., Any]:
    """A function of scopes, carry and inputs that runs a function of scopes, carry and one step's inputs."""
    try:
        into, out = axes_of(plan.variable_axes)
    except Fault as error:
        raise explain(error, _NAME, plan.named) from None

    def run(scope_fn: Any, repack_fn: Any, groups: Any, rngs: Any, carry: PyTree, inputs: Array) -> Any:
        call = ScopedCall(scope_fn, repack_fn, cell, tuple(plan.split_rngs.values()))
        return _LiftedLoop(call, plan, into, out).run(groups, rngs, carry, inputs)

    first = (plan.variable_broadcast, plan.variable_carry)
    return lift.pack(run, (*first, *into.filters), (*first, *out.filters), tuple(plan.split_rngs), name="scan")


@dataclass(frozen=True, eq=False)
class _LiftedLoop:
    """One cell under one plan."""

    call: ScopedCall
    plan: LoopPlan
    into: Axes
    out: Axes

    def run(
        self, groups: Sequence[Group], rngs: Sequence[Group], carry: PyTree, inputs: Array
    ) -> tuple[tuple[PyTree, PyTree], tuple[Any, ...]]:
        """The loop: `((carry, outputs), groups)`."""
        broadcast, carried, *given = groups
        scanned = without_axes(given, self.into, {})
        variables, keys = Groups(broadcast, carried, scanned), parted_rngs(rngs, tuple(self.plan.split_rngs.values()))
        scopes: list[Scope] = self.call.scopes(variables, keys)
        self._refuse(scopes)
        if any(scope.rngs for scope in scopes) or _any_mutable(scopes, self.plan.variable_broadcast):
            broadcast = self._made(variables, keys, carry, inputs)
        self.call.counters = [copied(scope.rng_counters) for scope in scopes]
        steps = inputs.shape[self.plan.time_axis]
        stacked = tuple(_move(group, axis, 0) for group, axis in zip(scanned, self.into.axes, strict=True))
        loop = Loop(carry, carried, (broadcast, keys.shared))
        last, (outputs, made) = self._scan(loop, CellInputs(inputs, split_keys(keys.split, steps), stacked))
        if self.plan.lengths is not None and made:
            reached = jnp.arange(steps) < jnp.max(self.plan.lengths, initial=0)
            made = _kept_where_no_row_is(reached, made, stacked)
        made = with_axes([_move(group, 0, axis) for group, axis in zip(made, self.out.axes, strict=True)], self.out, {})
        return (last.carry, outputs), (broadcast, last.variables, *made)

    def _refuse(self, scopes: list[Scope]) -> None:
        if self.plan.compact and not self.plan.initializing and any(scope.rngs for scope in scopes):
            raise refused(
                "{verb}: `compact` and rngs cannot be combined: the cell would draw different numbers.",
                "Leave `compact` out if the cell draws random numbers, for example for dropout. Otherwise remove "
                "its rngs from `split_rngs`.",
            )
        mutable = self.out.axes and any(_any_mutable(scopes, group) for group in self.plan.variable_axes)
        if self.plan.initializing and self.plan.lengths is not None and mutable:
            raise refused(
                "{verb}: `variable_axes` gives each step its own variables, and a step that no row reaches would "
                "not create them.",
                "Initialize without `seq_lengths`: variables do not depend on them.",
            )

    def _made(self, variables: Groups, keys: Rngs, carry: PyTree, inputs: Array) -> Group:
        """The broadcast variables with what the cell makes of them. Its rngs count on from there, as flax has them."""
        roles = Roles(self.into.axes, self.out.axes, self.plan.time_axis)
        try:
            made = broadcast_of(GroupStep(self.call, self.plan.named), roles, variables, keys, carry, (inputs,))
        except Exception as error:
            failure = explain(error, _NAME, self.plan.named, State((), carry), GROUP_WORDS)
        else:
            return merged(variables.broadcast, made)
        raise failure

    def _scan(self, loop: Loop, xs: CellInputs) -> tuple[Loop, tuple[PyTree, Any]]:
        plan = self.plan
        axes: dict[str, Any] = {"in_axes": CellInputs(plan.time_axis, 0, 0), "out_axes": (plan.time_axis, 0)}
        options: dict[str, Any] = {"unroll": plan.unroll, "remat": plan.remat, **axes}
        if not plan.initializing:
            options |= {"progress": shown_as(plan.progress, carry_of), "check_finite": plan.check_finite}

        def cell(loop: Loop, x: CellInputs) -> tuple[Loop, Any]:
            return self.step(loop, x)

        functools.update_wrapper(cell, plan.named, ("__name__", "__qualname__"), ())  # errors say where it was written
        vars(cell)["__signature__"] = named_signature("carry", "x")
        if plan.lengths is None:
            return scan(cell, loop, xs, **options)
        rows: dict[str, Any] = {"carry_axes": Loop(0, None, None), "x_axes": CellInputs(0, None, None)}
        rows["y_axes"] = (0, None)
        return mask_scan(
            cell, loop, xs, lengths=plan.lengths, chunk=plan.chunk, compact=plan.compact, **rows, **options
        )

    def step(self, loop: Loop, x: CellInputs) -> tuple[Loop, Any]:
        """One step of the loop. However often it is traced, the rngs count from where they were before the loop."""
        inputs, own, stacked = x
        broadcast, shared = loop.constants
        groups = Groups(broadcast, loop.variables, stacked)
        carry, y, returned = self.call(groups, Rngs(shared, own), loop.carry, (inputs,))
        for before, after in zip(loop.variables, returned.carried, strict=True):
            refuse_made(before, after)
        return loop._replace(carry=carry, variables=returned.carried), (y, returned.scanned)


def _move(tree: PyTree, source: int, target: int) -> PyTree:
    return tree if source == target else jax.tree.map(lambda leaf: jnp.moveaxis(leaf, source, target), tree)


def _any_mutable(scopes: list[Scope], collections: CollectionFilter) -> bool:
    return any(not is_filter_empty(intersect_filters(scope.mutable, collections)) for scope in scopes)


def _kept_where_no_row_is(reached: Array, made: Any, given: Any) -> Any:
    """A step's variables stay what they were where no row reaches it; new ones are 0 there."""
    before = {path[1:]: leaf for path, leaf in jax.tree.leaves_with_path(given)}  # whatever group it is in

    def keep(path: Any, leaf: Array) -> Array:
        old = before.get(path[1:])
        if old is None or jnp.shape(old) != jnp.shape(leaf):
            return leaf
        return jnp.where(reached.reshape(-1, *(1,) * (leaf.ndim - 1)), leaf, old)

    return jax.tree.map_with_path(keep, made)
