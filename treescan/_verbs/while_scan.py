"""`while_scan`: a scan that ends when a condition on the carry becomes false."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, Unpack, overload

import jax

from .._arguments import check_length, check_options, infer_length, rows_of_steps
from .._avals import Array, LeafAxes, PyTree
from .._body.signature import WHILE_SCAN
from .._errors import WHILE_WORDS, Misuse, explain, in_own_words, verb
from .._loop.loop import Body
from .._outputs.outputs import MoveOutputs, check_save
from .._rows.checks import check_compact
from .._rows.fill import HOLD, KeepRows, check_fill
from .._rows.mask import Mask
from .._transforms.transform import REPORT
from .._tree import short_html, short_repr
from .._types import (
    AxesOfRows,
    Carry,
    Cond,
    FirstBody,
    KeyedBody,
    KeyedNone,
    KeyedValidBody,
    KeyedXs,
    ProgressLike,
    RematLike,
    Returned,
    Save,
    ScanBody,
    ValidBody,
    ValidFirstBody,
    WhileNone,
    WhileOptions,
    WhileXs,
    X,
    Y,
)
from .options import checking, recomputing, recording, showing
from .prepare import prepare, refuse_batches, spread_rows

_ACCEPTED = frozenset(WhileOptions.__annotations__) | {"max_length", "key"}
_TRACED_MOST = (
    "It is part of the compiled program: give an int, the largest number of steps that the loop may take. For a "
    'limit that is known only at run time, carry a counter and let `cond` compare it, `lambda carry: (carry["step"] '
    "< limit) & ...`: the loop then ends there."
)
_REFUSES = {"length": "`cond` decides how many steps it runs, at most `max_length`."}


class WhileResult(NamedTuple, Generic[Carry, Y]):
    """The result of `while_scan`.

    Attributes:
        carry: the carry after the last step that was taken, or `init`.
        ys: the outputs, `[max_length, ...]`, `fill` where no step was taken.
        steps: int32[], how many steps were taken; int32[*batch] if rows stop independently.
        stopped: bool[], True if `cond` became false; False if the loop reached `max_length`. bool[*batch] for rows.
    """

    carry: Carry
    ys: Y
    steps: Array
    stopped: Array

    def __repr__(self) -> str:
        return short_repr("WhileResult", **self._asdict())

    def _repr_html_(self) -> str:
        return short_html("WhileResult", **self._asdict())


# One overload for each kind of body and of xs, as for `mask_scan`.
@overload
def while_scan(
    cond: Cond[Carry], f: ScanBody[Carry, X, Y], init: Carry, xs: X, **options: Unpack[WhileXs]
) -> WhileResult[Carry, Y]: ...
@overload
def while_scan(
    cond: Cond[Carry], f: ScanBody[Carry, None, Y], init: Carry, xs: None = None, **options: Unpack[WhileNone]
) -> WhileResult[Carry, Y]: ...
@overload
def while_scan(
    cond: Cond[Carry], f: ValidBody[Carry, X, Y], init: Carry, xs: X, **options: Unpack[WhileXs]
) -> WhileResult[Carry, Y]: ...
@overload
def while_scan(
    cond: Cond[Carry], f: ValidBody[Carry, None, Y], init: Carry, xs: None = None, **options: Unpack[WhileNone]
) -> WhileResult[Carry, Y]: ...
@overload
def while_scan(
    cond: Cond[Carry], f: FirstBody[Carry, X, Y], init: Carry, xs: X, **options: Unpack[WhileXs]
) -> WhileResult[Carry, Y]: ...
@overload
def while_scan(
    cond: Cond[Carry], f: FirstBody[Carry, None, Y], init: Carry, xs: None = None, **options: Unpack[WhileNone]
) -> WhileResult[Carry, Y]: ...
@overload
def while_scan(
    cond: Cond[Carry], f: ValidFirstBody[Carry, X, Y], init: Carry, xs: X, **options: Unpack[WhileXs]
) -> WhileResult[Carry, Y]: ...
@overload
def while_scan(
    cond: Cond[Carry], f: ValidFirstBody[Carry, None, Y], init: Carry, xs: None = None, **options: Unpack[WhileNone]
) -> WhileResult[Carry, Y]: ...
@overload
def while_scan(
    cond: Cond[Carry], f: KeyedBody[Carry, X, Y], init: Carry, xs: X, **options: Unpack[KeyedXs]
) -> WhileResult[Carry, Y]: ...
@overload
def while_scan(
    cond: Cond[Carry], f: KeyedBody[Carry, None, Y], init: Carry, xs: None = None, **options: Unpack[KeyedNone]
) -> WhileResult[Carry, Y]: ...
@overload
def while_scan(
    cond: Cond[Carry], f: KeyedValidBody[Carry, X, Y], init: Carry, xs: X, **options: Unpack[KeyedXs]
) -> WhileResult[Carry, Y]: ...
@overload
def while_scan(
    cond: Cond[Carry], f: KeyedValidBody[Carry, None, Y], init: Carry, xs: None = None, **options: Unpack[KeyedNone]
) -> WhileResult[Carry, Y]: ...
@overload
def while_scan(
    cond: Cond[Any], f: Callable[..., Any], init: Any, xs: Any = None, *, check_finite: Returned, **options: Any
) -> Any: ...
@verb
def while_scan(
    cond: Callable[[Any], Any],
    f: Callable[..., Any],
    init: PyTree,
    xs: PyTree = None,
    *,
    max_length: int | None = None,
    fill: PyTree = 0,
    remat: RematLike | None = None,
    save: Save = "all",
    row_axes: int | AxesOfRows = 0,
    compact: bool | tuple[int, ...] = False,
    progress: ProgressLike = None,
    check_finite: bool | Returned = False,
    **options: Any,
) -> Any:
    """Scans while a condition on the carry is true; differentiable both ways, at the cost of the steps that are taken.

    Steps that are not taken are not run, in the forward or the backward pass. The gradient computes each step that was
    taken once more, and twice in the chunk of about sqrt(max_length) steps in which the loop ends. The remaining cost
    of the other steps grows with the logarithm of `max_length`, in the gradient with its square root. xs and ys take
    the time to be read and filled.

    A condition that returns `bool[*batch]` stops each row of a batch independently. The loop ends when the last row has
    stopped. Until then, rows that have stopped keep their carry, and their ys are `fill`. The body receives another
    step in their place, as in `treescan.mask_scan`, and its results for these rows are discarded.

    Under `jax.vmap`, each element stops independently too. It keeps its carry, and nothing that the body computes after
    that, including NaN, reaches a result or a gradient. Checks and callbacks in the body then see the element's own
    first step. The loop ends when all elements have stopped, and every element costs as much as the slowest.

    Args:
        cond: the condition, `cond(carry) -> bool[]`, or `bool[*batch]` for rows that stop independently. It is
            evaluated before every step, on the same carry that the body receives. A row that has stopped stays stopped.
        f: the body, `f(carry, x) -> (carry, y)`, as for `treescan.scan`; it runs once per step, on the whole batch. If
            rows stop independently, a body with a third parameter `valid` receives bool[*batch]: True for the rows that
            take this step. One with a parameter `first` receives which rows take their first step.
        init: the carry that the first step receives; leaves `[*batch, ...]` if rows stop independently.
        xs: the inputs to scan over: any pytree with leaves `[T, ...]`, T at least `max_length`; or None. Leaves are
            `[T, *batch, ...]` if rows stop independently.
        max_length: the most steps to take. With xs it defaults to T, and otherwise only the first `max_length` of them
            are scanned.
        fill: the value of y for steps that were not taken, for each leaf (a prefix tree of scalars).
        remat: the gradient always saves the state before each of about sqrt(max_length) chunks (with `compact`, before
            about every 16 steps), and recomputes the chunks. "step" also recomputes each step within them. A
            `treescan.Remat` sets a policy; its levels beyond two divide the chunks further. A budget and offloading are
            not supported.
        save: as for `treescan.scan`. "last" is the output of the last step that was taken, per row if rows stop
            independently, or `fill` if there was none; it is computed in every step.
        row_axes: as for `treescan.mask_scan`. A leaf of the carry that all rows share changes in every step that any
            row takes. Like `compact`, it needs a condition that returns `bool[*batch]`.
        compact: True: about every 16 steps, the rows that continue are moved to the front, along the first axis of the
            batch, and the body runs on the smallest tier that holds them. Neither the body nor the condition may close
            over arrays that have rows (pass them through the carry or xs), and both must accept any number of rows.
            Tiers are the batch and 3/4, 1/2, 1/3, 1/5, 1/10 and 1/32 of it; a tuple sets other tiers. The body is
            traced and compiled once per tier. Results return in the order of the rows.
        progress: as for `treescan.scan`. It shows the steps that were taken, because their number is not known before.
        check_finite: as for `treescan.scan`. Rows that have stopped are not checked.
        **options: `reverse` (from step max_length-1 down; each y is at the position of its x), `unroll` (within the
            chunks into which the loop is cut), `in_axes`, `out_axes`, `key`, `offset`, `options`, as for
            `treescan.scan`. `key` and `compact` cannot be combined.

    Returns:
        The carry after the last step that was taken, ys `[max_length, ...]`, the number of steps that were taken, and
        whether `cond` became false. The last two are `[*batch]` if rows stop independently.

    Raises:
        ArgumentError: as `treescan.scan`; also if there are fewer xs than `max_length`, or neither of them is given, if
            the batch shape of the condition is not where the axes say, if y cannot hold `fill`, if `cond` returns one
            bool but an option is for rows, or if `compact` cannot order the rows (with `key`, with rows spread over an
            explicit mesh, or in a `jax.shard_map` with `check_vma=False`).
        BodyError: as `treescan.scan`; also if `cond` returns anything but bools, or joins them with `and` or `or`.
        CarryError: as `treescan.scan`.
        NonFiniteError: if `check_finite` finds something.
        SignatureError: as `treescan.scan`.

    Examples:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import treescan
        >>> def sqrt(a):
        ...     def far(x):
        ...         return jnp.abs(x * x - a) > 1e-5 * a
        ...
        ...     def newton(x, _):
        ...         return (x + a / x) / 2, None
        ...
        ...     return treescan.while_scan(far, newton, a, max_length=50).carry
        >>> print(f"{sqrt(2.0):.4f} {jax.grad(sqrt)(2.0):.4f}")
        1.4142 0.3536

        Rows that stop independently:

        >>> def halve(x, _):
        ...     return x / 2, x
        >>> halved = treescan.while_scan(
        ...     lambda x: x > 1, halve, jnp.array([8.0, 0.5, 2.0]), max_length=5
        ... )
        >>> print(halved.carry, halved.steps)
        [1.  0.5 1. ] [3 0 1]
    """
    try:
        # Here, not above: only loops that end early load what runs them.
        from .._until.condition import check_condition
        from .._until.end_early import EndEarly, refusing_forward_mode, staging_without_values

        check_options(options, _ACCEPTED, _REFUSES)
        check_condition(cond)
        refuse_batches(xs, options.get("in_axes", 0), WHILE_SCAN)
        plan, out_axes = _check_remat(remat), options.pop("out_axes", 0)
        measure = functools.partial(_check_max_length, max_length)
        call = prepare(WHILE_SCAN, f, init, xs, measure=measure, masked=True, has_segments=True, **options)
        rows, condition = spread_rows(row_axes), Body.of(cond)
        compact, filled = check_compact(compact, keyed=options.get("key") is not None), _check_fill(fill)
        # The function of an equal condition may be another object, so that the call keeps it alive.
        call = dataclasses.replace(call, cond=condition.function)
        with refusing_forward_mode(), staging_without_values():
            result = call.run(
                EndEarly(condition, *rows, call.axes, compact),
                checking(check_finite, call, ends_early=True),
                MoveOutputs.of(out_axes, save),
                Mask.of(filled),
                recording(save),
                KeepRows.of(check_save(save), filled),
                recomputing(plan),
                showing(progress, call),
            )
        found = WhileResult(result.state, result.ys, result.steps, result.stopped)
        report = REPORT.of(result)
        return found if report is None else (found, report)
    except Exception as error:
        explained = explain(in_own_words(error), "while_scan", f, init, WHILE_WORDS)
    raise explained


def _check_remat(remat: RematLike | None) -> RematLike | None:
    if remat is None:
        return None
    from .._remat.remat import check_remat

    return check_remat(remat)


def _check_max_length(max_length: int | None, xs: PyTree, axes: LeafAxes | None) -> int:
    """The most steps to take: what is given, which xs must have at least, else what xs have."""
    most = check_length(max_length, "max_length", _TRACED_MOST)
    scanned = axes or (0,) * len(jax.tree.leaves(xs))
    if all(axis is None for axis in scanned):
        if most is None:
            raise Misuse(
                "{verb} over {body}: the maximum number of steps is unknown. No `max_length` is given, and there "
                "are no xs to scan over.",
                "Pass `max_length=`: the loop ends there even if the condition is still true.",
            )
        return most
    there = infer_length(xs, None, axes)
    if not isinstance(there, int):
        raise Misuse(
            "{verb} over {body}: the number of steps in xs is symbolic.",
            "The loop is split into chunks, so export it with a known number of steps.",
        )
    if most is not None and most > there:
        raise Misuse(
            f"{{verb}} over {{body}}: `max_length` is {most}, but xs has {there} steps.",
            "Leave it out to stop at the end of xs, or give xs for all `max_length` steps.",
            header=("leaf", "steps", "is"),
            rows=rows_of_steps(xs, axes),
        )
    return there if most is None else most


def _check_fill(fill: PyTree) -> PyTree:
    """The fill, less "hold": no output is held where the loop has ended."""
    filled = check_fill(fill, may_hold=False)
    if HOLD in jax.tree.leaves(filled):
        raise Misuse(
            '{verb} over {body}: `fill` cannot be "hold".',
            "Give a scalar. The last output is `ys[steps - 1]`. Or keep the value in the carry.",
        )
    return filled
