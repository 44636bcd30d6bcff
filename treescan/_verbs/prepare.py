"""The common start and end of every verb: checks the arguments, restores the user's trees, shows its progress."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from .._arguments import (
    check_key,
    check_keywords,
    check_length,
    check_offset,
    check_run,
    infer_length,
    refuse_unsliced,
    resolve_axes,
)
from .._avals import Array, ArrayLike, LeafAxes, PyTree, TreeDef, shape_of
from .._body.call import carry_name, check_callable, takes_keyword
from .._body.registered import refuse_unregistered
from .._body.signature import Convention
from .._body.traced import note_numbers
from .._errors import CarryError, Cure, Fault, Misuse, TreescanError
from .._loop.loop import Body, Result
from .._outputs.outputs import LAST, KeepOutputs, MoveOutputs, check_save, is_thinned
from .._program.program import Program, execute
from .._rows.axes import RowFlags
from .._rows.checks import check_rows
from .._rows.fill import KeepRows
from .._rows.find_rows import FindRows
from .._rows.mask import Mask
from .._rows.skip import Skip
from .._transforms.axes import OverAxes, by_part, static_axes
from .._transforms.call import Arguments, Call
from .._transforms.transform import REPORT, Transform, in_order
from .._tree import Prefix, freeze_static, thaw_static
from .._types import Axes, AxesOfRows, ProgressLike, RematLike, Returned, Save
from ..carries._registry import Adopted, adopt
from .options import (
    checking,
    dividing,
    keyword_of,
    of_strangers,
    recomputing,
    recording,
    restored_by,
    showing,
    strided,
    truncating,
)
from .progress import silent

if TYPE_CHECKING:
    from ..options import Option


def _of_batches() -> ModuleType | None:
    """The module of batches of sequences; None: it is not loaded, so that no value is one."""
    return sys.modules.get(f"{__name__.rpartition('._verbs')[0]}._batches.batch")


def take_batches_apart(xs: PyTree, flags: RowFlags, time_axis: int, in_axes: Axes) -> tuple[PyTree, RowFlags]:
    """The data of xs, and the rows of the batches in it; those of anything else as they were given.

    Raises:
        Fault: for an `ArgumentError` if something else says what the batches say, or if they differ in that.
    """
    known = _of_batches()
    return (xs, flags) if known is None else known.take_batches_apart(xs, flags, time_axis, in_axes)


def refuse_batches(xs: PyTree, in_axes: Axes, convention: Convention) -> None:
    """Refuses a `Padded` or a `Packed` as xs of a loop that does not know of them: its lengths have no steps."""
    known = _of_batches()
    if known is not None:
        known.refuse_batches(xs, in_axes, convention)


def spread_rows(row_axes: int | AxesOfRows) -> tuple[Prefix, Prefix, Prefix]:
    """Where rows are in the carry, in x and in y, as `row_axes` says."""
    if type(row_axes) is int:  # of all three, as in most calls
        one = Prefix.of(row_axes)
        return one, one, one
    each = by_part("row_axes", row_axes, ("carry", "x", "y"))
    carries, inputs, outputs = (static_axes(f'row_axes["{part}"]', axes, none=True) for part, axes in each.items())
    return carries, inputs, outputs


@dataclass(frozen=True, eq=False)
class Prepared:
    """A call that can run.

    Attributes:
        call: what the verb was told, less its arrays.
        given: the arrays.
        axes: for each leaf of xs the axis scanned over, or None; None as a whole: axis 0 for all.
        adopted: the values in init that became custom carries.
        alive: the body's function, which may be another object than the user's that is equal to it.
        cond: another function that the program calls: what is compiled goes with whichever of the two goes first.
        options: those of strangers.
        other_axes: the axes of the other calls that take turns.
    """

    call: Call
    given: Arguments
    axes: LeafAxes | None
    adopted: Adopted
    alive: object
    cond: Callable[..., object] | None = None
    options: Sequence[Option] = ()
    other_axes: tuple[LeafAxes | None, ...] = ()

    @property
    def over_axes(self) -> OverAxes | None:
        """The transform of `in_axes`, or None if there is nothing to do."""
        each = (self.axes, *self.other_axes)
        return OverAxes(each) if any(axes is not None for axes in each) else None

    def run(self, *transforms: Transform | None, compiles: bool = True, donates: bool = False) -> Any:
        """Runs the call with these transforms, in the order of their stages; None is skipped.

        Args:
            transforms: the transforms.
            compiles: whether an eager call compiles the program; else its steps are given values.
            donates: whether an eager call gives the arrays of `init` away; see `execute`.

        Returns:
            The last state and ys; a `Result` if there is more, as a report; see `REPORT`.
        """
        program = Program(self.call, in_order(*(of_strangers(self.options) if self.options else ()), *transforms))
        if self.given.offset is not None:
            for transform in program.transforms:
                transform.refuse_part(self.call, self.given)
        programs = self.call.programs
        programs = programs if self.cond is None else programs.joint(self.cond)
        with silent():
            try:
                result = execute(program, self.given, programs, donates=donates) if compiles else program(self.given)
            except Exception as error:
                self._note_numbers(error)
                if not self.options:
                    _refuse_exchanged(self.call, self.given, error)
                raise
        for transform in program.transforms:
            result = transform.delivered(result)
        return restored(result, self.call, self.adopted)

    def _note_numbers(self, error: Exception) -> None:
        """Adds what to do where a body takes a number of the carry or of xs, which is traced, for one of Python's."""
        call, (init, xs, *_) = self.call, self.given
        carries = [(carry_name(each.body, each.convention), init) for each in call.each]
        note_numbers(error, [*carries, (call.names[1], xs)], has_args=call.convention.spread)


def _refuse_exchanged(call: Call, given: Arguments, error: Exception) -> None:
    """Refuses a call whose body fails, or changes the type of its carry, and runs if init and xs are exchanged.

    Not where init has fewer axes than xs, as it should, nor where something else than the body fails: an option.
    """
    fails = isinstance(error, _OF_OTHER_VALUES) and not isinstance(error, TreescanError)
    notes = {row.note for row in error.rows} if isinstance(error, Fault) and error.error is CarryError else set()
    differs = bool(notes - {"sharding", "dtype"})
    if not (fails or differs) or call.others or given.rows is not None:
        return
    spread, xs = call.convention.spread, given.xs
    if spread:  # the layers, beside which there may be xs and a state
        (xs,) = xs if len(xs) == 1 else (None,)
    shapes = [shape_of(leaf) for leaf in jax.tree.leaves(given.init)]
    steps = {shape[0] for shape in shapes if shape}
    if not jax.tree.leaves(xs) or len(steps) != 1 or not all(shapes):
        return
    axes = [max(len(shape_of(leaf) or ()) for leaf in jax.tree.leaves(tree)) for tree in (given.init, xs)]
    structures: list[TreeDef] = [jax.tree.structure(tree) for tree in (given.init, xs)]
    if axes[0] < axes[1] and structures[0] == structures[1]:
        return
    if fails and not _fails(call, given):
        return
    exchanged = given._replace(init=xs, xs=(given.init,) if spread else given.init)
    if _fails(dataclasses.replace(call, length=steps.pop()), exchanged):
        return
    cure = f"The order is `treescan.{call.convention.call}`. With `{{init}}` and `{'layers' if spread else 'xs'}` "
    cure += "exchanged, the {step} runs."
    if isinstance(error, Fault):
        error.cures = (*error.cures, Cure(cure))
        return
    raise Misuse(f"{{call}}: the {{step}} failed: {type(error).__name__}: {error}", cure, cause=error) from None


def _fails(call: Call, given: Arguments) -> bool:
    """Whether the loop cannot be traced without any option."""
    try:
        jax.eval_shape(Program(call, ()), given)
    except Exception:
        return True
    return False


_OF_OTHER_VALUES = (TypeError, ValueError, AttributeError, LookupError)
"""What a body raises of values of other types than it was written for."""


def prepare(
    convention: Convention,
    f: Callable[..., object],
    init: PyTree,
    xs: PyTree = None,
    length: int | None = None,
    *,
    measure: Callable[[PyTree, LeafAxes | None], int] | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    in_axes: Axes = 0,
    key: Array | None = None,
    offset: ArrayLike | None = None,
    lowering: tuple[tuple[str, object], ...] = (),
    masked: bool = False,
    has_segments: bool = False,
    options: Sequence[Option] = (),
) -> Prepared:
    """Checks what all verbs are told, and takes static leaves and values of registered types out of the arrays.

    Args:
        convention: how the verb calls the body, and what the body returns.
        f: the body.
        init: the carry that the first step is given.
        xs: what is scanned over.
        length: the number of steps.
        measure: tells the number of steps from xs and the axes, where that is not `length` and the size of xs.
        reverse: as for `treescan.scan`.
        unroll: as for `treescan.scan`.
        in_axes: as for `treescan.scan`.
        key: as for `treescan.scan`.
        offset: as for `treescan.scan`.
        lowering: further keyword arguments of `jax.lax.scan`.
        masked: whether the body may take `valid`.
        has_segments: whether it may take `first`.
        options: as for `treescan.scan`.

    Raises:
        Fault: as `treescan.scan`.
    """
    body, alive = body_of(f, convention)
    adopted = adopt(init)
    key = check_key(key)
    frozen_init, frozen_xs = freeze_static(adopted.init), freeze_static(xs)
    if frozen_init is not adopted.init or frozen_xs is not xs:
        refuse_unregistered({"init": adopted.init, "xs": xs})
        refuse_unsliced(xs)
    axes = resolve_axes(in_axes, frozen_xs)
    steps = measure(frozen_xs, axes) if measure else infer_length(frozen_xs, check_length(length), axes)
    sees_valid = masked and takes_keyword(body, "valid", len(convention.takes))
    keyword = keyword_of(body, len(convention.takes)) if has_segments else None
    passed = {"key": "the option `key`"} if key is not None else {}
    passed |= {"valid": "mask_scan"} if sees_valid else {}
    check_keywords(body, passed | ({} if keyword is None else {keyword.slot.name: "mask_scan"}), convention)
    call = Call(
        body,
        convention,
        frozen=frozen_init is not adopted.init or frozen_xs is not xs,
        custom=adopted.custom,
        sees_valid=sees_valid,
        keyword=keyword,
        lowering=lowering,
        **check_run(steps, reverse, unroll),
    )
    given = Arguments(frozen_init, frozen_xs, key, offset=None if offset is None else check_offset(offset, steps))
    return Prepared(call, given, axes, adopted, alive, options=options)


def body_of(f: Callable[..., object], convention: Convention) -> tuple[Body, Callable[..., object]]:
    """A body's handle, and the function that it refers to: that of an equal body may be another object."""
    check_callable(f, convention.call)
    body = Body.of(f)
    return body, body.function


def restored(result: Any, call: Call, adopted: Adopted) -> Any:
    """The result with static leaves and values of registered types in their places."""
    if not (call.frozen or adopted.back):
        return result
    state, ys, *_ = result
    state = adopted.restore(thaw_static(state) if call.frozen else state)
    both = state, (adopted.restore(ys) if call.convention.stacks else ys)
    return result._replace(state=both[0], ys=both[1]) if isinstance(result, Result) else both


def returned(result: Any, place: int | None = None) -> Any:
    """The pair of a result, or one of the two, and a report if there is one."""
    part = result if place is None else result[place]
    report = REPORT.of(result) if isinstance(result, Result) else None
    if report is None:
        return part
    return (*result[:2], report) if place is None else (part, report)


def refuse_report(check_finite: object) -> None:
    """Refuses a report of `check_finite` where the results have the form that flax gives them."""
    if isinstance(check_finite, str) and check_finite == "return":
        raise Misuse(
            '{call}: `check_finite="return"` does not work here, because the results have the form that flax gives '
            "them.",
            "True raises an error.",
        )


_ZERO = Prefix.of(0)


class RowPlan(NamedTuple):
    """What a verb is told of its rows.

    Attributes:
        flags: where they are valid, and where segments begin.
        carries: the axis of the batch in each leaf of the carry, a prefix of it.
        inputs: that in each leaf of a step's x.
        outputs: that in each leaf of a step's y; None: it has none.
        time_axis: the axis of the steps in the mask and the resets.
        reset_to: what a reset restores.
        fill: the y of padded steps.
        chunk: the number of steps that are skipped together.
        compact: the numbers of rows that the body runs on.
    """

    flags: RowFlags
    carries: Prefix = _ZERO
    inputs: Prefix = _ZERO
    outputs: Prefix | None = _ZERO
    time_axis: int = 0
    reset_to: PyTree = None
    fill: PyTree = 0
    chunk: int | None = None
    compact: bool | tuple[int, ...] = False

    def over(self, axes: LeafAxes | None, others: tuple[str, ...]) -> FindRows:
        """The transform, of the axes over which xs are scanned, and of other options; see `FindRows`."""
        return FindRows(self.carries, self.inputs, self.outputs, self.time_axis, axes, self.compact, others)

    def restoring(self, flags: RowFlags, init: PyTree, call: Prepared) -> RowFlags:
        """Checked flags, with what a reset restores if that is not the init."""
        if self.reset_to is None and flags.inits is None:
            return flags
        arrays, root = call.given.init, call.call.names[0]
        return restored_by(flags, self.reset_to, init, self.carries, self.time_axis, call.adopted, arrays, root)


def _without_refs(
    chunk: int | None, remat: RematLike | None, kept: Prefix | None, check_finite: bool | Returned
) -> tuple[str, ...]:
    """Which of these options are given and need a body without mutable arrays."""
    given = {
        "chunk": bool(chunk),
        "remat": remat not in (None, "auto"),
        "save": kept is not None and is_thinned([keep for keep in kept.leaves if keep != LAST]),
        "check_finite": check_finite is not False,
    }
    return tuple(name for name, is_given in given.items() if is_given)


def run_scan(
    convention: Convention,
    f: Callable[..., object],
    init: PyTree,
    xs: PyTree,
    length: int | None,
    *,
    lengths: ArrayLike | None = None,
    rows: RowPlan | None = None,
    out_axes: Axes = 0,
    remat: RematLike | None = None,
    save: Save = "all",
    truncate: int | None = None,
    progress: ProgressLike = None,
    check_finite: bool | Returned = False,
    donates: bool = False,
    **options: Any,
) -> Any:
    """Runs a scan: its pair, or a `Result` with a report; see `returned`.

    Args:
        convention: how the verb calls the body, and what the body returns.
        f: the body.
        init: the carry that the first step is given.
        xs: what is scanned over.
        length: the number of steps.
        lengths: as for `treescan.mask_scan`.
        rows: what else the verb is told of its rows, whose xs hold no batch.
        out_axes: as for `treescan.scan`.
        remat: as for `treescan.scan`.
        save: as for `treescan.scan`.
        truncate: as for `treescan.scan`.
        progress: as for `treescan.scan`.
        check_finite: as for `treescan.scan`.
        donates: whether an eager call gives the arrays of `init` away, as for the parts of a longer run: with an
            `offset`, parts of one length share one program.
        **options: those of `prepare`.
    """
    if rows is None:
        refuse_batches(xs, options.get("in_axes", 0), convention)
    if lengths is not None:
        rows = RowPlan(RowFlags(lengths), outputs=None if convention.stacks else _ZERO)
    call = prepare(convention, f, init, xs, length, masked=rows is not None, has_segments=rows is not None, **options)
    save = strided(save, call)
    if rows is None:
        of_outputs: tuple[Transform | None, ...] = (call.over_axes, KeepOutputs.of(save))
    else:
        flags = check_rows(rows.flags, rows.time_axis, call.call.length, call.given.offset)
        flags = rows.restoring(flags, init, call)
        filled, kept = Prefix.of(rows.fill), check_save(save)
        call = dataclasses.replace(call, given=call.given._replace(rows=flags))
        of_outputs = (
            rows.over(call.axes, _without_refs(rows.chunk, remat, kept, check_finite)),
            Mask(filled),
            *dividing(flags),
            KeepRows(kept, filled),
            Skip(rows.chunk, rows.compact),
        )
    return call.run(
        *of_outputs,
        checking(check_finite, call),
        MoveOutputs.of(out_axes, save),
        truncating(truncate),
        recording(save),
        recomputing(remat),
        showing(progress, call),
        donates=donates,
    )
