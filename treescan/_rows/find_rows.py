"""The first transform of a masked scan: finds the valid steps, and the rows in each leaf."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from .._avals import Array, LeafAxes, PyTree, as_arrays, vary_over, varying_axes
from .._errors import Cure, Fault, Misuse
from .._loop.feed import Consts
from .._loop.loop import Loop, is_untraced
from .._loop.run import checks_key_reuse, debugs_nans
from .._trace.equations import is_for_data_alone, variables_of
from .._trace.hoist import fixed_leaves, flatten_only, hoist, hoist_once, lift, settled
from .._trace.trace import Trace
from .._transforms.axes import WHOLE, scan_over_axes
from .._transforms.refuse import refuse_refs_in_skipped_steps, refuse_with_refs
from .._transforms.transform import Stage, Transform
from .._tree import Prefix
from .axes import (
    OF_Y,
    RowAxes,
    RowFlags,
    Segments,
    Spans,
    flags_given,
    rows_after_trace,
    rows_of_x,
    spread_batch_axes,
    spread_carry_axes,
)
from .checks import check_slots, leads
from .leaves import mask_of_lengths, substitute_rows, without_false_alarms


@dataclass(frozen=True)
class FindRows(Transform):
    """`lengths` or `mask`, and the axes: gives each step its mask, and traces the body for the rows that it runs on.

    Attributes:
        carry_axes: a prefix of the carry: where the batch shape starts; None: shared by all rows.
        x_axes: the same for one step's x.
        y_axes: the same for one step's y; None: y is the carry.
        time_axis: where the steps are in the mask and the resets.
        in_axes: for each leaf of xs the axis scanned over, or None; None as a whole: axis 0 for all.
        compact: whether to order rows, or the numbers of rows to choose from.
        others: the other options that the user gave, and that a body with a mutable array cannot have.
    """

    carry_axes: Prefix
    x_axes: Prefix
    y_axes: Prefix | None
    time_axis: int
    in_axes: LeafAxes | None
    compact: bool | tuple[int, ...]
    others: tuple[str, ...] = ()
    stage: ClassVar[Stage] = Stage.FED

    def __call__(self, loop: Loop, known: dict[Hashable, Loop] | None = None) -> Loop:
        """The transformed loop; `known` has traces of bodies that may be of its kind, and then its own."""
        given = flags_given(loop)
        valid, resets = self._flags(given, loop.length)
        all_valid, changing = given[:2] == (None, None), _changing(given)
        call = loop.callee.call
        tells = all_valid or call.sees_valid
        loop, axes = self._lay(loop, valid, lends=not all_valid)
        if call.keyword is not None:
            from .keyword import pass_keyword

            loop, axes = pass_keyword(loop, axes, call.keyword, resets)
        y_axes = self.y_axes or Prefix.of(jax.tree.unflatten(jax.tree.structure(loop.state), axes.state))
        tiers = self._tiers(loop, valid) if self.compact and not all_valid else (0,)
        unchanged = None
        if is_untraced(loop):
            loop = loop if changing is None else settled(loop)  # what is put back has to fit
            before, loop = loop, flatten_only(loop)
            unchanged = lambda: fixed_leaves(before, changing)  # noqa: E731
        else:
            loop = without_false_alarms(loop, axes.x)
            if checks_key_reuse():
                from .._trace.raw_keys import raw, with_raw_keys

                given = given._replace(to=raw(given.to), inits=raw(given.inits))
                loop = with_raw_keys(loop)
                assert loop.given is not None
                loop = loop.having(given=loop.given._replace(rows=given))
            before, loop = loop, hoist(loop, changing) if known is None else hoist_once(loop, known, changing)
            trace = loop.hoisted
            if loop.limit is not None:
                refuse_refs_in_skipped_steps(trace)
            _refuse_refs(trace, tiers, self.others, told=tells)
            axes = axes._replace(y=spread_batch_axes(OF_Y, y_axes, trace.y, "y", valid.shape[1:]))
            if len(tiers) > 1:
                from .compact import fewer_tiers, trace_tiers

                tiers = fewer_tiers(tiers, trace.jaxpr) if self.compact is True else tiers
                trace_tiers(loop, before, axes, tiers)
            loop = lift(loop)
        trace, unchanging = loop.hoisted, loop.consts.unchanged
        rows = rows_after_trace(trace, axes, y_axes)._replace(
            unchanged=unchanged, all_valid=all_valid, was_fixed=trace.fixed
        )
        rows = rows._replace(tiers=tiers, own_values=not is_untraced(loop) and _see_own_values(trace, rows.axes))
        segments = None if resets is None else Segments(resets)
        loop = loop.having(rows=rows, segments=segments)
        return loop.finished(lambda state: _restored(trace, rows.fixed, given.spans, unchanging, state))

    def _tiers(self, loop: Loop, valid: Array) -> tuple[int, ...]:
        """The numbers of rows that the body is traced for."""
        from .compact import refuse_tiers, tiers_of

        tiers = tiers_of(self.compact, valid.shape[1:])
        refuse_tiers(tiers, loop)
        return tiers

    def _flags(self, flags: RowFlags, length: int) -> tuple[Array, Array | None]:
        """bool[T, *batch]: which steps of which rows are data, and which begin a segment."""
        resets = None if flags.resets is None else jnp.moveaxis(jnp.asarray(flags.resets), self.time_axis, 0)
        if flags.lengths is not None:
            return mask_of_lengths(flags.lengths, length), resets
        if flags.mask is not None:
            return jnp.moveaxis(jnp.asarray(flags.mask), self.time_axis, 0), resets
        assert resets is not None
        return jnp.ones_like(resets), resets

    def _lay(self, loop: Loop, valid: Array, *, lends: bool) -> tuple[Loop, RowAxes]:
        """The loop with its mask, and where its rows are. It follows `in_axes`, as these are told of the user's x."""
        batch = valid.shape[1:]
        try:
            carry_axes, x_axes, whole_axes = self._axes(loop, batch, self.in_axes)
        except Fault as fault:
            if layouts := self._other_layouts(loop, batch):
                fault.cures = (*map(Cure, layouts), fault.cures[-1])
            raise
        check_slots(loop.xs, batch)
        varying = varying_axes(jax.typeof(valid))
        state = jax.tree.map(lambda leaf: vary_over(leaf, varying), as_arrays(loop.state))
        loop = loop.having(state=state, xs=loop.xs._replace(valid=valid))
        if self.in_axes is not None:
            loop = scan_over_axes(loop, self.in_axes)
        if whole_axes and lends:
            whole = substitute_rows(WHOLE.read(loop.consts), whole_axes, valid)
            loop = loop.having(consts=WHOLE.put(loop.consts, list(whole)))
        axes = Consts(inner=WHOLE.note(Consts(), whole_axes) if whole_axes else None)  # of the loop once it is traced
        return loop, RowAxes(axes, carry_axes, x_axes, ())

    def _axes(self, loop: Loop, batch: tuple[int, ...], in_axes: LeafAxes | None) -> tuple[LeafAxes, ...]:
        """Where the rows of a batch are: in the carry, in what is sliced of x, and in what is given whole."""
        carry, x = loop.names
        axes: LeafAxes = (0,) * len(jax.tree.leaves(loop.state))
        if batch or loop.limit is None:  # a condition that is one bool is not for rows, so no carry is asked for any
            axes = spread_carry_axes(self.carry_axes, loop.state, carry, batch)
        return axes, *rows_of_x(loop.xs.x, self.x_axes, in_axes, x, batch)

    def _other_layouts(self, loop: Loop, batch: tuple[int, ...]) -> list[str]:
        """Advice for a batch that is not everywhere: in which other layout it is.

        A mask may have a last axis of 1, as it is multiplied with features. The batch may lead in the data.
        """
        flags, leaves, other, found = flags_given(loop), jax.tree.leaves(loop.xs.x), 1 - self.time_axis, list[str]()
        has_last = len(batch) > 1 and batch[-1] == 1 and loop.limit is None
        may_turn = bool(leaves) and set(self.in_axes or (0,)) == {self.time_axis} and flags.spans is None
        for cuts, turns in ((True, False), (False, True), (True, True)):
            if found or cuts > has_last or turns > may_turn:
                continue
            rows, axes = batch[:-1] if cuts else batch, self.in_axes
            if turns:
                sizes, axes = {np.shape(leaf)[other : other + 1] for leaf in leaves}, (other,) * len(leaves)
                if flags.lengths is None:
                    sizes, rows = sizes | {rows[:1]}, (loop.length, *rows[1:])
                if len(sizes) > 1 or () in sizes:
                    continue
            try:
                self._axes(loop, rows, axes)
            except Fault:
                continue
            names = [f"`{name}[..., 0]`" for name in ("lengths", "mask", "resets") if getattr(flags, name) is not None]
            cut = f" with {' and '.join(names)}" if cuts else ""
            found.append(f"All shapes fit{cut}{f' if {leads(self.time_axis)}' if turns else '.'}")
        return found


def _refuse_refs(trace: Trace, tiers: tuple[int, ...], others: tuple[str, ...], *, told: bool) -> None:
    """Refuses a body that would write a mutable array in padding, or that would read one with fewer rows.

    Args:
        trace: the trace of the body.
        tiers: the numbers of rows that the body runs on.
        others: see `FindRows`.
        told: whether the body knows which rows are valid, or all are.
    """
    compact = trace.refs and len(tiers) > 1
    if not told and trace.writes:
        options = ", ".join(f"`{option}`" for option in (*["compact"] * compact, *others))
        raise Misuse(
            "{verb} over {body}: the body writes a mutable array (a `Ref`), and would do so in padding too.",
            "Let the body take the keyword `valid`, and write only what is valid: "
            "`ref[...] = jnp.where(valid, new, ref[...])`."
            + (f" Leave out {options} as well, which no body with a `Ref` can have." if options else "")
            + " Or carry its value instead.",
        )
    if compact:
        refuse_with_refs("compact")


def _see_own_values(trace: Trace, axes: RowAxes) -> bool:
    """The contract of `mask_scan`: whether padded rows see their own values where nothing is differentiated.

    Their results are discarded, and the body treats rows independently. So only a gradient could show what they saw.
    Rows may meet where the body reads the mask, and in leaves that all of them share.
    """
    jaxpr = trace.jaxpr
    read = {atom for equation in jaxpr.eqns for atom in variables_of(equation.invars)}
    may_meet = None in (*axes.state, *axes.x) or trace.inputs.feed.valid in read
    return not (may_meet or is_for_data_alone(jaxpr) or trace.effects or trace.reverse_rule or debugs_nans())


def _restored(
    trace: Trace, axes: LeafAxes, spans: Spans | None, unchanged: Sequence[Array], state: list[Array]
) -> PyTree:
    """The whole state; that of packed sequences has an entry for each of them, in its unchanged leaves too."""
    if spans is not None and axes:
        from .spans import at_rows

        unchanged = [at_rows(leaf, spans, axis) for leaf, axis in zip(unchanged, axes, strict=True)]
    return trace.restore(unchanged, state)


def _changing(rows: RowFlags) -> list[bool] | None:
    """For each leaf of init whether resets change it, also where no step does; None: they put its init back."""
    targets = rows.to if rows.inits is None else rows.inits
    return None if targets is None else [target is not None for target in targets]
