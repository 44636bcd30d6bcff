"""The common start and end of every verb: checks the arguments, restores the user's trees."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from .._axes import LeafAxes
from .._body.call import check_callable, takes_keyword
from .._body.conventions import Convention
from .._checks.arguments import (
    check_key,
    check_keywords,
    check_length,
    check_name,
    check_reverse,
    check_unroll,
    infer_length,
    resolve_axes,
)
from .._errors import describe_body
from .._loop.body import Body
from .._loop.loop import Transform
from .._loop.retrace import note_types
from .._transforms.axes import OverAxes
from .._transforms.backward import no_forward_mode
from .._transforms.finite.backward import CheckCotangents, in_reverse_mode
from .._transforms.finite.case import About
from .._transforms.finite.check import CheckFinite
from .._transforms.finite.deliver import deliver
from .._transforms.finite.refuse import looks_backward
from .._transforms.finite.site import Slices
from .._transforms.program import Arguments, Call, Program, Transformed, execute
from .._transforms.progress import ShowProgress
from .._transforms.refuse import in_reverse_alone
from .._transforms.rows.mask import Mask
from .._transforms.rows.resets import ResetRows
from .._tree import Prefix, freeze_static, thaw_static
from .._types import Array, Axes, ProgressLike, PyTree
from ..carries._registry import Adopted, adopt

AROUND_ROWS: tuple[Transform, ...] = (Mask(Prefix.of(0), "0"), ResetRows())
"""Surrounds each step of rows if its y is not kept."""


@dataclass(frozen=True, eq=False)
class Prepared:
    """A call that can run.

    Attributes:
        call: what the verb was told, less its arrays.
        given: the arrays.
        axes: for each leaf of xs the axis scanned over, or None; None as a whole: axis 0 for all.
        adopted: the values in init that became custom carries.
        alive: the body's function, which may be another object than the user's that is equal to it.
    """

    call: Call
    given: Arguments
    axes: LeafAxes | None
    adopted: Adopted
    alive: Callable[..., Any]

    @property
    def over_axes(self) -> OverAxes | None:
        """The transform of `in_axes`, or None if there is nothing to do."""
        return None if self.axes is None else OverAxes(self.axes)

    def run(self, *transforms: Transform | None) -> tuple[Any, Any]:
        """Runs the call with these transforms, innermost first; None is skipped."""
        return self.run_program(Transformed(self.call, present(*transforms)), present(*transforms))

    def showing(self, progress: ProgressLike) -> ShowProgress | None:
        """The transform of `progress`, or None if nothing is shown."""
        call = self.call
        return ShowProgress.of(progress, call.body, call.convention.verb, custom=bool(call.custom))

    def checking(
        self, value: Any, *, indexed: bool = False, ends_early: bool = False, around: tuple[Transform, ...] = ()
    ) -> CheckFinite | CheckCotangents | None:
        """The transform of what `check_finite` says, or None if nothing is looked at; see `CheckFinite`."""
        backward = looks_backward(value)
        if backward is None:
            return None
        call = self.call
        over = f"`{call.convention.verb}` over {describe_body(call.body.function)}"
        whole = self.axes is not None and None in self.axes
        slices = Slices(self.axes or (), jax.tree.structure(self.given.xs)) if whole else None
        records = call.convention.records
        about = About(over, indexed, bool(call.custom), ends_early, backward=backward, records=records)
        return (CheckCotangents if backward else CheckFinite)(about, slices, around)

    def with_rows(self, rows: Any) -> Prepared:
        """The same, with what a masked scan was told of its rows."""
        return dataclasses.replace(self, given=self.given._replace(rows=rows))

    def run_program(
        self, program: Program[tuple[PyTree, PyTree]], transforms: tuple[Transform, ...], *, compiles: bool = True
    ) -> tuple[Any, Any]:
        """Runs a program of this call.

        Args:
            program: the program.
            transforms: those of its transforms that may tell something while it runs.
            compiles: whether an eager call compiles it; else its steps are given values.
        """
        moves = program.moves or self.given.key is not None
        with _in_reverse_alone(transforms):
            state, ys = result = (
                execute(program, self.given, self.call.body.programs, moves=moves) if compiles else program(self.given)
            )
        told = deliver(ys)
        return self.restored(result if told is ys else (state, told))

    def restored(self, result: tuple[PyTree, PyTree]) -> tuple[Any, Any]:
        """The result with static leaves and values of registered types in their places."""
        return restored(result, self.call, self.adopted)


def _in_reverse_alone(transforms: tuple[Transform, ...]) -> contextlib.AbstractContextManager[None]:
    """Says in the words of the option why forward mode is refused, if one of these has reverse mode alone."""
    if any(isinstance(transform, CheckCotangents) for transform in transforms):
        return in_reverse_mode()
    shows = any(isinstance(transform, ShowProgress) and transform.progress.backward for transform in transforms)
    return in_reverse_alone(no_forward_mode) if shows else contextlib.nullcontext()


def present(*transforms: Transform | None) -> tuple[Transform, ...]:
    """The transforms that have something to do."""
    return tuple(transform for transform in transforms if transform is not None)


def prepare(
    convention: Convention,
    f: Callable[..., Any],
    init: PyTree,
    xs: PyTree = None,
    length: int | None = None,
    *,
    measure: Callable[[PyTree, LeafAxes | None], int] | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    in_axes: Axes = 0,
    key: Array | None = None,
    name: str | None = None,
    lowering: tuple[tuple[str, Any], ...] = (),
    masked: bool = False,
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
        name: as for `treescan.scan`.
        lowering: further keyword arguments of `jax.lax.scan`.
        masked: whether the body may take `valid`.

    Raises:
        Fault: as `treescan.scan`.
    """
    body, alive = body_of(f, convention)
    adopted = adopt(init)
    key = check_key(key)
    frozen_init, frozen_xs = freeze_static(adopted.init), freeze_static(xs)
    axes = resolve_axes(in_axes, frozen_xs)
    steps = measure(frozen_xs, axes) if measure else infer_length(frozen_xs, check_length(length), axes)
    call = Call(
        body,
        convention,
        steps,
        sees_valid=check_body(body, convention, keyed=key is not None, masked=masked),
        reverse=check_reverse(reverse),
        unroll=check_unroll(unroll, steps),
        frozen=frozen_init is not adopted.init or frozen_xs is not xs,
        custom=adopted.custom,
        name=check_name(name),
        lowering=lowering,
    )
    note_types(alive, body.memo, convention.verb, {"init": init, "xs": xs, "length": steps})
    return Prepared(call, Arguments(frozen_init, frozen_xs, key), axes, adopted, alive)


def body_of(f: Callable[..., Any], convention: Convention) -> tuple[Body, Callable[..., Any]]:
    """A body's handle, and the function that it refers to: that of an equal body may be another object."""
    check_callable(f, convention.call)
    body = Body.of(f)
    return body, body.function


def restored(result: tuple[PyTree, PyTree], call: Call, adopted: Adopted) -> tuple[Any, Any]:
    """The result with static leaves and values of registered types in their places."""
    if not (call.frozen or adopted.back):
        return result
    state, ys = result
    if call.frozen:
        state = thaw_static(state)
    return adopted.restore(state), (adopted.restore(ys) if call.convention.stacks else ys)


def check_body(body: Body, convention: Convention, *, keyed: bool, masked: bool = False) -> bool:
    """Checks a body's parameters against its arguments; returns whether it takes `valid`."""
    sees_valid = masked and takes_keyword(body, "valid")
    passed = {"key": "the option `key`"} if keyed else {}
    passed |= {"valid": "mask_scan"} if sees_valid else {}
    check_keywords(body, passed, convention)
    return sees_valid
