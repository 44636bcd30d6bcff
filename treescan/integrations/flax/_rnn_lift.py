"""How a cell's variables and rngs come into the loop of an RNN, and out of it: flax.linen.scan's rules on this scan."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from flax.core import axes_scan, lift, meta
from flax.core.scope import CollectionFilter, PRNGSequenceFilter, Scope, intersect_filters, is_filter_empty
from flax.typing import In, Out

from ..._errors import ArgumentError, ArgumentTypeError, Fault, explain
from ..._loop import named_signature
from ..._mask_scan import mask_scan
from ..._scan import scan
from ..._types import Array, PyTree, RematLike

Group: TypeAlias = Sequence[Mapping[str, Any]]
"""Collections, or rngs, by their names, for each scope."""


def refused(says: str, *cures: str, error: type[ArgumentError] = ArgumentError) -> Exception:
    """The error with which `RNN` refuses an argument; `{verb}` stands for its name."""
    return explain(Fault(error, says, *cures), "treescan.integrations.flax.RNN")


@dataclass(frozen=True, eq=False)
class LoopPlan:
    """What one call of an `RNN` is told beside its carry and its inputs.

    Attributes:
        named: the function that errors are about.
        lengths: int32[*batch]: how many steps of each row are valid; None: all.
        time_axis: where the steps stand in the inputs and the outputs.
        initializing: whether variables are being made.
        unroll: as for `treescan.scan`.
        remat: as for `treescan.scan`.
        chunk: as for `treescan.mask_scan`.
        compact: as for `treescan.mask_scan`.
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
    variable_axes: Mapping[CollectionFilter, Any]
    variable_broadcast: CollectionFilter
    variable_carry: CollectionFilter
    split_rngs: Mapping[PRNGSequenceFilter, bool]


class Loop(NamedTuple):
    """What is carried; the name of the first field shows in errors about a cell that changes its carry's types.

    Attributes:
        carry: the cell's carry.
        variables: the collections of `variable_carry`.
        constants: the collections of `variable_broadcast`, and the rngs that all steps share. No step changes them, so
            that they are constants of the loop, and lent where padding stands in for a whole batch.
    """

    carry: PyTree
    variables: Group
    constants: tuple[Group, Sequence[Group]]


def lift_loop(cell: Callable[..., Any], plan: LoopPlan) -> Callable[..., Any]:
    """A function of scopes, carry and inputs that runs a function of scopes, carry and one step's inputs."""
    ins, in_axes = _axes(plan.variable_axes, Out)
    outs, out_axes = _axes(plan.variable_axes, In)

    def run(scope_fn: Any, repack_fn: Any, groups: Any, rngs: Any, carry: PyTree, inputs: Array) -> Any:
        lifted = _Lifted(cell, plan, scope_fn, repack_fn)
        return lifted.run(groups, rngs, carry, inputs, in_axes, out_axes)

    first = (plan.variable_broadcast, plan.variable_carry)
    return lift.pack(run, (*first, *ins), (*first, *outs), tuple(plan.split_rngs), name="scan")


def _axes(variable_axes: Mapping[CollectionFilter, Any], without: type) -> tuple[list[Any], list[int]]:
    """The filters of one direction and their axes; `without` is what marks the other direction."""
    found: dict[Any, int] = {}
    for collections, axis in variable_axes.items():
        inner = axis.axis if isinstance(axis, In | Out) else axis
        if not isinstance(inner, int) or isinstance(inner, bool):
            raise refused(
                f"{{verb}}: `variable_axes` gives {collections!r} the axis {inner!r}, which is not an int.",
                "Collections that all steps share belong in `variable_broadcast`, and those that one step hands to "
                "the next in `variable_carry`.",
                error=ArgumentTypeError,
            )
        if not isinstance(axis, without):
            found[collections] = inner
    return list(found), list(found.values())


class _Lifted:
    """One cell under one plan: makes its scopes from groups of variables and rngs, and takes them apart again."""

    def __init__(self, cell: Callable[..., Any], plan: LoopPlan, scope_fn: Any, repack_fn: Any) -> None:
        self.cell, self.plan, self.scope_fn, self.repack_fn = cell, plan, scope_fn, repack_fn
        self.splits = tuple(plan.split_rngs.values())
        self.counters: list[dict[Any, Any]] = []

    def run(
        self,
        groups: Sequence[Group],
        rngs: Sequence[Group],
        carry: PyTree,
        inputs: Array,
        in_axes: list[int],
        out_axes: list[int],
    ) -> tuple[tuple[PyTree, PyTree], tuple[Any, ...]]:
        """The loop: `((carry, outputs), groups)`."""
        broadcast, variables, *stacked = groups
        steps = inputs.shape[self.plan.time_axis]
        stacked = [
            _move(meta.remove_axis(group, axis, {}), axis, 0) for group, axis in zip(stacked, in_axes, strict=True)
        ]
        shared: Sequence[Group] = tuple(() if split else group for group, split in zip(rngs, self.splits, strict=True))
        own = tuple(_split(group, steps) if split else () for group, split in zip(rngs, self.splits, strict=True))
        loop, xs = Loop(carry, variables, (broadcast, shared)), (inputs, (own, tuple(stacked)))
        scopes: list[Scope] = self.scope_fn(groups, rngs)
        self._refuse(scopes, has_own=len(out_axes) > 0)
        if any(scope.rngs for scope in scopes) or _any_mutable(scopes, self.plan.variable_broadcast):
            broadcast = self.shared_by_all(loop, xs)
            loop = loop._replace(constants=(broadcast, shared))
        self.counters = [_copied(scope.rng_counters) for scope in scopes]
        last, (outputs, made) = self._scan(loop, xs)
        if self.plan.lengths is not None and made:
            reached = jnp.arange(steps) < jnp.max(self.plan.lengths, initial=0)
            made = _kept_where_no_row_is(reached, made, tuple(stacked))
        made = [meta.add_axis(_move(group, 0, axis), axis, {}) for group, axis in zip(made, out_axes, strict=True)]
        return (last.carry, outputs), (broadcast, last.variables, *made)

    def _refuse(self, scopes: list[Scope], *, has_own: bool) -> None:
        if self.plan.compact and not self.plan.initializing and any(scope.rngs for scope in scopes):
            raise refused(
                "{verb}: `compact` and rngs exclude each other: the cell would draw for other rows.",
                "Leave `compact` out where the cell draws, as dropout does, or drop its rngs from `split_rngs`.",
            )
        mutable = has_own and any(_any_mutable(scopes, group) for group in self.plan.variable_axes)
        if self.plan.initializing and self.plan.lengths is not None and mutable:
            raise refused(
                "{verb}: `variable_axes` gives each step variables of its own, and those of a step that no row reaches "
                "would not be made.",
                "Initialize without `seq_lengths`: variables do not depend on them.",
            )

    def _scan(self, loop: Loop, xs: PyTree) -> tuple[Loop, tuple[PyTree, Any]]:
        plan = self.plan
        axes: dict[str, Any] = {"in_axes": (plan.time_axis, 0), "out_axes": (plan.time_axis, 0)}
        options: dict[str, Any] = {"unroll": plan.unroll, "remat": plan.remat, **axes}

        def cell(loop: Loop, x: PyTree) -> tuple[Loop, Any]:
            return self.step(loop, x)

        functools.update_wrapper(cell, plan.named, ("__name__", "__qualname__"), ())  # errors say where it was written
        vars(cell)["__signature__"] = named_signature("loop", "x")
        if plan.lengths is None:
            return scan(cell, loop, xs, **options)
        rows: dict[str, Any] = {"carry_axes": Loop(0, None, (None, None)), "x_axes": (0, None), "y_axes": (0, None)}  # type: ignore[arg-type]
        return mask_scan(
            cell, loop, xs, lengths=plan.lengths, chunk=plan.chunk, compact=plan.compact, **rows, **options
        )

    def step(self, loop: Loop, x: PyTree) -> tuple[Loop, Any]:
        """One step of the loop. However often it is traced, the rngs count from where they stood before the loop."""
        scopes, inputs = self._scopes(loop, x)
        for scope, counters in zip(scopes, self.counters, strict=True):
            _rewind(scope.rng_counters, counters)
        carry, y = self.cell(scopes, loop.carry, inputs)
        _, returned, *made = self.repack_fn(scopes)
        variables = _merged(loop.variables, returned)
        before: Any = jax.tree.structure(loop.variables)
        if before != jax.tree.structure(variables):
            raise refused(
                "{verb}: the cell makes variables of a collection that `variable_carry` names. What one step hands to "
                "the next has to be there before the first.",
                "Initialize the cell by itself, `cell.init(key, carry, x)`, and give the RNN its variables.",
            )
        return loop._replace(carry=carry, variables=variables), (y, tuple(made))

    def shared_by_all(self, loop: Loop, xs: PyTree) -> Group:
        """What the cell makes of the collections that all steps share, from rngs and shapes alone.

        Traces the cell once, as flax.linen.scan does before its loop: its rngs count from there.
        """
        inputs, own = xs
        first = jax.lax.slice_in_dim(inputs, 0, min(1, inputs.shape[self.plan.time_axis]), axis=self.plan.time_axis)
        xs = (jnp.moveaxis(first, self.plan.time_axis, 0), jax.tree.map(lambda leaf: leaf[:1], own))
        done: list[bool] = []

        def make(broadcast: Group, state: tuple[PyTree, Group], x: PyTree) -> Any:
            if done:  # the loop that follows the trace has nothing to do
                return broadcast, state, ()
            done.append(True)
            carry, variables = state
            scopes, now = self._scopes(Loop(carry, variables, (broadcast, loop.constants[1])), x)
            self.cell(scopes, carry, now)
            return _merged(broadcast, self.repack_fn(scopes)[0]), state, ()

        try:
            broadcast, _, _ = axes_scan.scan(make, (0,), 0)(loop.constants[0], (loop.carry, loop.variables), xs)
        except ValueError as error:
            if "data dependency" not in str(error):
                raise
            raise refused(
                "{verb}: the cell makes variables of a collection that all steps share from what is another in each "
                "step: its carry, its inputs, or a split rng.",
                "Do not split the rng that makes them, `split_rngs={'params': False}`, or give each step its own, "
                "`variable_axes={'params': 0}` and `variable_broadcast=False`.",
            ) from error
        return broadcast

    def _scopes(self, loop: Loop, x: PyTree) -> tuple[list[Scope], PyTree]:
        inputs, (own, stacked) = x
        broadcast, shared = loop.constants
        rngs = tuple(mine if split else ours for mine, ours, split in zip(own, shared, self.splits, strict=True))
        return self.scope_fn((broadcast, loop.variables, *stacked), rngs), inputs


def _split(rngs: Any, steps: int) -> Any:
    return jax.tree.map(lambda key: jax.random.split(jax.random.clone(key), steps), rngs)


def _move(tree: PyTree, source: int, target: int) -> PyTree:
    return tree if source == target else jax.tree.map(lambda leaf: jnp.moveaxis(leaf, source, target), tree)


def _merged(given: Group, returned: Group) -> Group:
    """Collections that the cell may not change are not returned."""
    return tuple({**before, **after} for before, after in zip(given, returned, strict=True))


def _any_mutable(scopes: list[Scope], collections: CollectionFilter) -> bool:
    return any(not is_filter_empty(intersect_filters(scope.mutable, collections)) for scope in scopes)


def _kept_where_no_row_is(reached: Array, made: Any, given: Any) -> Any:
    """A step's variables stay what they were where no row reaches it; new ones are 0 there."""
    before = {path[1:]: leaf for path, leaf in jax.tree_util.tree_leaves_with_path(given)}  # whatever group it is in

    def keep(path: Any, leaf: Array) -> Array:
        old = before.get(path[1:])
        if old is None or jnp.shape(old) != jnp.shape(leaf):
            return leaf
        return jnp.where(reached.reshape(-1, *(1,) * (leaf.ndim - 1)), leaf, old)

    return jax.tree_util.tree_map_with_path(keep, made)


def _copied(counters: dict[Any, Any]) -> dict[Any, Any]:
    return {key: _copied(value) if isinstance(value, dict) else value for key, value in counters.items()}


def _rewind(counters: dict[Any, Any], saved: dict[Any, Any]) -> None:
    """Sets counters back, in place: submodules hold on to those that are nested in others."""
    for key, value in counters.items():
        if isinstance(value, dict):
            _rewind(value, saved.get(key, {}))
        else:
            counters[key] = saved.get(key, 0)
