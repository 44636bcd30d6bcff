"""`RNN`: flax.linen.RNN on `mask_scan`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.core import FrozenDict, lift
from flax.core.scope import CollectionFilter, PRNGSequenceFilter, Scope, intersect_filters, is_filter_empty
from jax.core import Tracer

from ..._avals import Array, ArrayLike, PyTree, describe_argument, dtype_of, shape_of
from ..._errors import GROUP_WORDS, ArgumentError, ArgumentTypeError, Fault, explain, named_options
from ..._extras.lift.groups import (
    Groups,
    GroupStep,
    Rngs,
    Roles,
    State,
    broadcast_of,
    carry_of,
    refuse_made,
    split_keys,
)
from ..._loop.run import named_signature
from ..._options.progress.meters import shown_as
from ..._rows.checks import check_chunk, check_compact
from ..._tree import KeyPath, Root, leaves_with_path, named_roots
from ..._types import ProgressLike, RematLike
from ..._verbs.mask_scan import mask_scan
from ..._verbs.prepare import refuse_report
from ..._verbs.scan import scan
from ._scan import (
    Axes,
    Group,
    RepackFn,
    ScopedCall,
    ScopeFn,
    axes_of,
    copied,
    merged,
    parted_rngs,
    with_axes,
    without_axes,
)

_NAME = "treescan.integrations.flax.RNN"


def refused(says: str, *cures: str, error: type[ArgumentError] = ArgumentError) -> Exception:
    """The error with which `RNN` refuses an argument; `{verb}` is its name."""
    return explain(Fault(error, says, *cures), _NAME)


class Loop(NamedTuple):
    """What is carried. Errors speak of it as of the cell's carry.

    Attributes:
        carry: the cell's carry.
        variables: the collections of `variable_carry`.
        constants: the collections of `variable_broadcast`, and the rngs that all steps share. No step changes them, so
            that they are constants of the loop, and lent where padding stands in for a whole batch.
    """

    carry: PyTree
    variables: PyTree
    constants: PyTree


class CellInputs(NamedTuple):
    """What one step receives.

    Attributes:
        inputs: the cell's.
        keys: those that each step has for itself.
        variables: the collections of `variable_axes`.
    """

    inputs: PyTree
    keys: PyTree
    variables: PyTree


named_roots(Loop, carry=Root("carry"), variables=Root("variables"), constants=Root("constants"))
named_roots(CellInputs, inputs=Root("inputs"), keys=Root("rngs"), variables=Root("variables"))


def lift_loop(cell: Callable[..., object], rnn: RNN, lengths: Array | None, time_axis: int) -> Callable[..., Any]:
    """A function of scopes, carry and inputs that runs a function of scopes, carry and one step's inputs.

    Args:
        cell: the function of one step.
        rnn: the module whose options are those of the loop.
        lengths: int32[*batch]: how many steps of each row are valid; None: all.
        time_axis: where the steps are in the inputs and the outputs.
    """
    named, initializing = type(rnn.cell).__call__, rnn.is_initializing()
    try:
        refuse_report(rnn.check_finite)
        check_chunk(rnn.chunk, check_compact(rnn.compact, keyed=False))
        into, out = axes_of(rnn.variable_axes)
    except Fault as error:
        raise explain(error, _NAME, named) from None

    def run(
        scope_fn: ScopeFn,
        repack_fn: RepackFn,
        groups: Sequence[Group],
        rngs: Sequence[Group],
        carry: PyTree,
        inputs: Array,
    ) -> tuple[tuple[PyTree, PyTree], tuple[PyTree, ...]]:
        call = ScopedCall(scope_fn, repack_fn, cell, tuple(rnn.split_rngs.values()))
        loop = _LiftedLoop(call, rnn, named, lengths, time_axis, initializing, into, out)
        return loop.run(groups, rngs, carry, inputs)

    first = (rnn.variable_broadcast, rnn.variable_carry)
    return lift.pack(run, (*first, *into), (*first, *out), tuple(rnn.split_rngs), name="scan")


@dataclass(frozen=True, eq=False)
class _LiftedLoop:
    """One call of an `RNN`; errors are about the function `named`."""

    call: ScopedCall
    rnn: RNN
    named: Callable[..., object]
    lengths: Array | None
    time_axis: int
    initializing: bool
    into: Axes
    out: Axes

    def run(
        self, groups: Sequence[Group], rngs: Sequence[Group], carry: PyTree, inputs: Array
    ) -> tuple[tuple[PyTree, PyTree], tuple[PyTree, ...]]:
        """The loop: `((carry, outputs), groups)`."""
        broadcast, carried, *given = groups
        scanned = without_axes(given, self.into, {})
        variables, keys = Groups(broadcast, carried, scanned), parted_rngs(rngs, self.call.split)
        scopes = self.call.scopes(variables, keys)
        self._refuse(scopes)
        if any(scope.rngs for scope in scopes) or _any_mutable(scopes, self.rnn.variable_broadcast):
            broadcast = self._made(variables, keys, carry, inputs)
        self.call.counters = [copied(scope.rng_counters) for scope in scopes]
        steps = inputs.shape[self.time_axis]
        stacked = tuple(_move(group, axis, 0) for group, axis in zip(scanned, self.into.values(), strict=True))
        loop = Loop(carry, carried, (broadcast, keys.shared))
        last, (outputs, made) = self._scan(loop, CellInputs(inputs, split_keys(keys.split, steps), stacked))
        if self.lengths is not None and made:
            reached = jnp.arange(steps) < jnp.max(self.lengths, initial=0)
            made = _kept_where_no_row_is(reached, made, stacked)
        moved = [_move(group, 0, axis) for group, axis in zip(made, self.out.values(), strict=True)]
        made = with_axes(moved, self.out, {})
        return (last.carry, outputs), (broadcast, last.variables, *made)

    def _refuse(self, scopes: Sequence[Scope]) -> None:
        if self.rnn.compact and not self.initializing and any(scope.rngs for scope in scopes):
            raise refused(
                "{verb}: `compact` and rngs cannot be combined: the cell would draw different numbers.",
                "Leave `compact` out if the cell draws random numbers, for example for dropout. Otherwise remove "
                "its rngs from `split_rngs`.",
            )
        mutable = self.out and any(_any_mutable(scopes, group) for group in self.rnn.variable_axes)
        if self.initializing and self.lengths is not None and mutable:
            raise refused(
                "{verb}: `variable_axes` gives each step its own variables, and a step that no row reaches would "
                "not create them.",
                "Initialize without `seq_lengths`: variables do not depend on them.",
            )

    def _made(self, variables: Groups, keys: Rngs, carry: PyTree, inputs: Array) -> Group:
        """The broadcast variables with what the cell makes of them. Its rngs count on from there, as flax has them."""
        roles = Roles(tuple(self.into.values()), tuple(self.out.values()), self.time_axis)
        try:
            made = broadcast_of(GroupStep(self.call, self.named), roles, variables, keys, carry, (inputs,))
        except Exception as error:
            failure = explain(error, _NAME, self.named, State((), carry), GROUP_WORDS)
        else:
            return merged(variables.broadcast, made)
        raise failure

    def _scan(self, loop: Loop, xs: CellInputs) -> tuple[Loop, tuple[PyTree, tuple[PyTree, ...]]]:
        rnn = self.rnn
        into, out = CellInputs(self.time_axis, 0, 0), (self.time_axis, 0)
        options: dict[str, Any] = {"unroll": rnn.unroll, "remat": rnn.remat}
        if not self.initializing:
            options |= {"progress": shown_as(rnn.progress, carry_of), "check_finite": rnn.check_finite}

        def cell(loop: Loop, x: CellInputs) -> tuple[Loop, tuple[PyTree, tuple[PyTree, ...]]]:
            # However often it is traced, the rngs count from where they were before the loop: see `counters`.
            broadcast, shared = loop.constants
            groups, keys = Groups(broadcast, loop.variables, x.variables), Rngs(shared, x.keys)
            carry, y, returned = self.call(groups, keys, loop.carry, (x.inputs,))
            for before, after in zip(loop.variables, returned.carried, strict=True):
                refuse_made(before, after)
            return loop._replace(carry=carry, variables=returned.carried), (y, returned.scanned)

        functools.update_wrapper(cell, self.named, ("__name__", "__qualname__"), ())  # errors say where it was written
        vars(cell)["__signature__"] = named_signature("carry", "x")
        if self.lengths is None:
            return scan(cell, loop, xs, in_axes=into, out_axes=out, **options)
        options["time_axis"] = {"xs": into, "ys": out}
        options["row_axes"] = {"carry": Loop(0, None, None), "x": CellInputs(0, None, None), "y": (0, None)}
        return mask_scan(cell, loop, xs, lengths=self.lengths, chunk=rnn.chunk, compact=rnn.compact, **options)


def _move(tree: PyTree, source: int, target: int) -> PyTree:
    return tree if source == target else jax.tree.map(lambda leaf: jnp.moveaxis(leaf, source, target), tree)


def _any_mutable(scopes: Sequence[Scope], collections: CollectionFilter) -> bool:
    return any(not is_filter_empty(intersect_filters(scope.mutable, collections)) for scope in scopes)


def _kept_where_no_row_is(reached: Array, made: PyTree, given: PyTree) -> PyTree:
    """A step's variables stay what they were where no row reaches it; new ones are 0 there."""
    before = {path[1:]: leaf for path, leaf in jax.tree.leaves_with_path(given)}  # whatever group it is in

    def keep(path: KeyPath, leaf: Array) -> Array:
        old = before.get(path[1:])
        if old is None or jnp.shape(old) != jnp.shape(leaf):
            return leaf
        return jnp.where(reached.reshape(-1, *(1,) * (leaf.ndim - 1)), leaf, old)

    return jax.tree.map_with_path(keep, made)


class RNN(nn.Module):
    """Applies a cell over sequences. It is a drop-in replacement for flax.linen.RNN without effects of padding.

    It has the fields, the arguments and the variables of `flax.linen.RNN`, and without `seq_lengths` its results. With
    `seq_lengths`, each row runs as if it were alone:

    - Padding has no effect. A NaN there reaches no output, carry or gradient, and gradients with respect to padding
      are exactly 0.
    - Chunks of steps that no row reaches do not run, neither in the forward nor in the backward pass.
    - Outputs at padding are exactly 0. flax returns what the cell computes there.
    - The carry is the one after each row's last valid step, with any number of batch axes. A row of length 0 returns
    its initial carry. No history of carries is kept.

    Rows must be independent. If a cell computes across rows, for example the mean of a normalization, it sees another
    row instead of a row that has ended.

    Variables of `variable_carry` are shared by all rows. They change in steps in which any row is valid, and must exist
    before the first step. Variables of `variable_axes` keep their value in steps that no row reaches; variables made
    there are 0.

    Attributes:
        cell: an instance of `flax.linen.RNNCellBase`.
        time_major: True: inputs and outputs are `[T, *batch, *features]`; False: `[*batch, T, *features]`.
        return_carry: whether to return `(carry, outputs)` instead of only the outputs.
        reverse: run each row from its last valid step to its first. Outputs are in the order of the run, with padding
            at the end.
        keep_order: with `reverse`, outputs are in the order of the inputs.
        unroll: how many steps are compiled into one iteration of the loop.
        variable_axes: collections of which each step has its own variables, and the axis of the steps in them.
        variable_broadcast: collections that all steps share.
        variable_carry: collections that are carried from step to step.
        split_rngs: the rngs of the cell. True: each step has its own; False: all steps share one.
        remat: as for `treescan.scan`.
        chunk: the number of steps that are skipped together if no row has them, as for `treescan.mask_scan`. Without
            `seq_lengths`, nothing is skipped.
        compact: whether to run the cell only on rows that have not ended, as for `treescan.mask_scan`. Not for cells
            that draw random numbers. Without `seq_lengths`, all rows run to the end.
        progress: as for `treescan.scan`. `show` receives the cell's carry, and `init` shows nothing.
        check_finite: as for `treescan.scan`, of the cell's carry and the carried variables; `init` does not check.

    Examples:
        >>> import flax.linen as nn
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from treescan.integrations.flax import RNN
        >>> # [B, T, F]: the second row has two steps.
        >>> x = jnp.ones((2, 5, 3)).at[1, 2:].set(jnp.nan)
        >>> rnn = RNN(nn.GRUCell(4), return_carry=True)
        >>> lengths = jnp.array([5, 2])
        >>> variables = rnn.init(jax.random.key(0), x, seq_lengths=lengths)
        >>> carry, y = rnn.apply(variables, x, seq_lengths=lengths)
        >>> print(
        ...     carry.shape,
        ...     y.shape,
        ...     bool((carry[1] == y[1, 1]).all()),
        ...     bool((y[1, 2:] == 0).all()),
        ... )
        (2, 4) (2, 5, 4) True True
    """

    cell: nn.RNNCellBase
    time_major: bool = False
    return_carry: bool = False
    reverse: bool = False
    keep_order: bool = False
    unroll: int = 1
    variable_axes: Mapping[CollectionFilter, Any] = FrozenDict()
    variable_broadcast: CollectionFilter = "params"
    variable_carry: CollectionFilter = False
    split_rngs: Mapping[PRNGSequenceFilter, bool] = FrozenDict({"params": False})
    remat: RematLike | None = dataclasses.field(default=None, kw_only=True)
    chunk: int | None = dataclasses.field(default=None, kw_only=True)
    compact: bool | tuple[int, ...] = dataclasses.field(default=False, kw_only=True)
    progress: ProgressLike = dataclasses.field(default=None, kw_only=True)
    check_finite: bool = dataclasses.field(default=False, kw_only=True)

    @named_options
    def __call__(
        self,
        inputs: Array,
        *,
        initial_carry: PyTree | None = None,
        init_key: Array | None = None,
        seq_lengths: ArrayLike | None = None,
        return_carry: bool | None = None,
        time_major: bool | None = None,
        reverse: bool | None = None,
        keep_order: bool | None = None,
    ) -> Any:
        """Applies the cell over the inputs.

        Args:
            inputs: `[*batch, T, *features]`, or `[T, *batch, *features]` if `time_major`.
            initial_carry: the carry that each row starts from, leaves `[*batch, ...]`; by default the result of the
                cell's `initialize_carry`.
            init_key: the key for `initialize_carry`; by default `jax.random.key(0)`.
            seq_lengths: int[*batch]: how many steps of each row are valid, 0 to T; by default all.
            return_carry: replaces the field.
            time_major: replaces the field.
            reverse: replaces the field.
            keep_order: replaces the field.

        Returns:
            The outputs, with the steps where the inputs have them; or the carry after each row's last valid step, and
            the outputs.

        Raises:
            ArgumentError: if the inputs have too few axes, if `seq_lengths` have another shape than the batch or are
                out of range, if the carry has no rows, or if the fields cannot be combined.
            ArgumentTypeError: if `seq_lengths` are not ints, or an axis of `variable_axes` is not.
            BodyError: if the cell makes broadcast variables of anything but constants and keys that all steps share,
                or makes variables that are carried.
            CarryError: if the cell returns a carry of another structure, shape or dtype than it was given.
            NonFiniteError: if `check_finite` finds something.
        """
        if not isinstance(self.cell, nn.Module) or not hasattr(self.cell, "num_feature_axes"):
            raise refused(
                f"{{verb}}: `cell` must be a `flax.linen.RNNCellBase`, got {describe_argument(self.cell)}.",
                "Pass an instance: `RNN(nn.GRUCell(features))`.",
                error=ArgumentTypeError,
            )
        time_major = self.time_major if time_major is None else time_major
        reverse = self.reverse if reverse is None else reverse
        keep_order = self.keep_order if keep_order is None else keep_order
        time_axis, batch = _layout(inputs, self.cell.num_feature_axes, time_major=time_major)
        lengths = None if seq_lengths is None else _checked(seq_lengths, batch, inputs.shape[time_axis])
        carry = initial_carry
        if carry is None:
            key = jax.random.key(0) if init_key is None else init_key
            carry = self.cell.initialize_carry(key, inputs.shape[:time_axis] + inputs.shape[time_axis + 1 :])
        if lengths is not None:
            _check_rows(carry, batch)
        if reverse:
            inputs = _flipped(inputs, lengths, time_axis)
        run: Any = nn.transforms.lift_transform(lift_loop, _apply_cell, self, lengths, time_axis)
        carry, outputs = run(self.cell, carry, inputs)
        if reverse and keep_order:
            outputs = jax.tree.map(lambda leaf: _flipped(leaf, lengths, time_axis), outputs)
        return (carry, outputs) if (self.return_carry if return_carry is None else return_carry) else outputs


def _apply_cell(
    cell: Callable[[PyTree, Array], tuple[PyTree, PyTree]], carry: PyTree, x: Array
) -> tuple[PyTree, PyTree]:
    return cell(carry, x)


def _layout(inputs: Array, features: int, *, time_major: bool) -> tuple[int, tuple[int, ...]]:
    """Where the steps are, and the batch shape."""
    shape = shape_of(inputs)
    batch_axes = -1 if shape is None else len(shape) - features - 1
    if batch_axes < 0:
        axes = "axis" if features == 1 else "axes"
        order = "[T, *batch, *features]" if time_major else "[*batch, T, *features]"
        raise refused(
            f"{{verb}}: inputs must be {order}, with {features} {axes} of features for this cell, but are "
            f"{describe_argument(inputs)}.",
            f"Give one array with at least {features + 1} axes.",
        )
    return (0, inputs.shape[1 : 1 + batch_axes]) if time_major else (batch_axes, inputs.shape[:batch_axes])


def _checked(seq_lengths: Any, batch: tuple[int, ...], steps: int) -> Array:
    """The lengths as int32[*batch], between 0 and the steps: concrete ones are held to that, traced ones clamped."""
    lengths = seq_lengths
    if isinstance(seq_lengths, list | tuple | int):
        with contextlib.suppress(TypeError, ValueError):  # ragged, or with tracers in it: refused as it is
            lengths = np.asarray(seq_lengths)
    dtype = dtype_of(lengths)
    if dtype is None or not jnp.issubdtype(dtype, jnp.integer):
        raise refused(
            f"{{verb}}: `seq_lengths` must be ints, got {describe_argument(seq_lengths)}.",
            "Give the number of valid steps of each row as an array, int[*batch]. From a bool mask, compute "
            "`mask.sum(axis)` along the steps.",
            error=ArgumentTypeError,
        )
    if lengths.shape != batch:
        raise refused(
            f"{{verb}}: `seq_lengths` must have the batch shape of the inputs, {batch}, but are "
            f"{describe_argument(seq_lengths)}.",
            "Give one length for each row. Where the steps lead, `[T, *batch, *features]`, set `time_major=True`.",
        )
    if not isinstance(lengths, Tracer) and getattr(lengths, "is_fully_addressable", True):
        values = np.asarray(lengths)
        if values.size and (values.min() < 0 or values.max() > steps):
            bad = values[(values < 0) | (values > steps)].flat[0]
            raise refused(
                f"{{verb}}: `seq_lengths` must lie between 0 and the {steps} steps of the inputs, but one is {bad}.",
                f"Cut them, `jnp.clip(seq_lengths, 0, {steps})`, or pad the inputs to the longest row.",
            )
    return jnp.clip(jnp.asarray(lengths), 0, steps).astype(jnp.int32)


def _check_rows(carry: PyTree, batch: tuple[int, ...]) -> None:
    """Refuses a carry of which some part belongs to no row: nobody could tell when it is held."""
    for path, leaf in leaves_with_path("carry", carry):
        if jnp.shape(leaf)[: len(batch)] != batch:
            raise refused(
                "{verb}: with `seq_lengths` each row has its own carry, so every leaf must lead with the batch "
                f"shape {batch}, but {path} is {describe_argument(leaf)}.",
                "Give each row its own entry, for example `jnp.zeros(batch, jnp.int32)` for a counter.",
            )


def _flipped(leaf: Array, lengths: Array | None, time_axis: int) -> Array:
    """Each row with its valid steps in the opposite order, and its padding behind them."""
    if lengths is None:
        return jnp.flip(leaf, time_axis)
    steps = leaf.shape[time_axis]
    shape = [1] * (lengths.ndim + 1)
    shape[time_axis] = steps
    back = jnp.arange(steps - 1, -1, -1, dtype=jnp.int32).reshape(shape)
    rows = jnp.expand_dims(lengths, time_axis)
    where = (jnp.broadcast_to(back, np.broadcast_shapes(back.shape, rows.shape)) + rows) % max(steps, 1)
    where = where.reshape(*where.shape, *(1,) * (leaf.ndim - where.ndim))
    return jnp.take_along_axis(leaf, where, time_axis, mode="clip")
