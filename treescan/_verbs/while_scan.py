"""`while_scan`: a scan that ends when a condition on the carry no longer holds."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, Unpack, overload

import jax

from .._avals import describe_leaf
from .._axes import LeafAxes, static_axes
from .._body.conventions import WHILE_SCAN
from .._checks.arguments import check_length, check_options, infer_length
from .._checks.rows import check_compact
from .._errors import WHILE_WORDS, ArgumentError, Fault, Row, explain, verb
from .._loop.body import Body
from .._transforms.finite import UNCHECKED
from .._transforms.outputs import MoveOutputs, check_save
from .._transforms.progress import check_progress
from .._transforms.rows.fill import HOLD, check_fill
from .._transforms.until.condition import check_condition
from .._transforms.until.program import Until, remat_of
from .._transforms.until.stop_rows import StopRows
from .._tree import Prefix, leaves_with_path
from .._types import (
    Array,
    Axes,
    Carry,
    KeyedBody,
    KeyedValidBody,
    ProgressLike,
    PyTree,
    RematLike,
    Save,
    ValidBody,
    WhileOptions,
    X,
    Y,
)
from .prepare import prepare, present

_ACCEPTED = frozenset(WhileOptions.__annotations__) | {"max_length", "key"}
_TRACED_MOST = (
    "It is part of the compiled program: give an int, the most steps that the loop may ever take. For a limit that is "
    'known only at run time, carry a counter and let `cond` compare it, `lambda carry: (carry["step"] < limit) & ...`: '
    "the loop then ends there."
)
_REFUSES = UNCHECKED | {"length": "`cond` decides how many steps it runs, at most `max_length`."}


class WhileResult(NamedTuple, Generic[Carry, Y]):
    """What `while_scan` returns.

    Attributes:
        carry: the carry after the last step that was taken, or `init`.
        ys: the outputs, `[max_length, ...]`, `fill` where no step was taken.
        steps: int32[], how many steps were taken; int32[*batch] where rows stop each by itself.
        stopped: bool[], whether `cond` no longer held; else the loop ran into `max_length`. bool[*batch] for rows.
    """

    carry: Carry
    ys: Y
    steps: Array
    stopped: Array


# One overload for each kind of body and of xs, as for `mask_scan`.
@overload
def while_scan(
    cond: Callable[[Carry], Any],
    f: Callable[[Carry, X], tuple[Carry, Y]],
    init: Carry,
    xs: X,
    *,
    max_length: int | None = None,
    **options: Unpack[WhileOptions],
) -> WhileResult[Carry, Y]: ...
@overload
def while_scan(
    cond: Callable[[Carry], Any],
    f: Callable[[Carry, None], tuple[Carry, Y]],
    init: Carry,
    xs: None = None,
    *,
    max_length: int,
    **options: Unpack[WhileOptions],
) -> WhileResult[Carry, Y]: ...
@overload
def while_scan(
    cond: Callable[[Carry], Any],
    f: ValidBody[Carry, X, Y],
    init: Carry,
    xs: X,
    *,
    max_length: int | None = None,
    **options: Unpack[WhileOptions],
) -> WhileResult[Carry, Y]: ...
@overload
def while_scan(
    cond: Callable[[Carry], Any],
    f: ValidBody[Carry, None, Y],
    init: Carry,
    xs: None = None,
    *,
    max_length: int,
    **options: Unpack[WhileOptions],
) -> WhileResult[Carry, Y]: ...
@overload
def while_scan(
    cond: Callable[[Carry], Any],
    f: KeyedBody[Carry, X, Y],
    init: Carry,
    xs: X,
    *,
    max_length: int | None = None,
    key: Array,
    **options: Unpack[WhileOptions],
) -> WhileResult[Carry, Y]: ...
@overload
def while_scan(
    cond: Callable[[Carry], Any],
    f: KeyedBody[Carry, None, Y],
    init: Carry,
    xs: None = None,
    *,
    max_length: int,
    key: Array,
    **options: Unpack[WhileOptions],
) -> WhileResult[Carry, Y]: ...
@overload
def while_scan(
    cond: Callable[[Carry], Any],
    f: KeyedValidBody[Carry, X, Y],
    init: Carry,
    xs: X,
    *,
    max_length: int | None = None,
    key: Array,
    **options: Unpack[WhileOptions],
) -> WhileResult[Carry, Y]: ...
@overload
def while_scan(
    cond: Callable[[Carry], Any],
    f: KeyedValidBody[Carry, None, Y],
    init: Carry,
    xs: None = None,
    *,
    max_length: int,
    key: Array,
    **options: Unpack[WhileOptions],
) -> WhileResult[Carry, Y]: ...
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
    carry_axes: Axes = 0,
    x_axes: Axes = 0,
    y_axes: Axes = 0,
    compact: bool | tuple[int, ...] = False,
    progress: ProgressLike = None,
    **options: Any,
) -> WhileResult[Any, Any]:
    """Scans while a condition on the carry holds; differentiable both ways, at the cost of the steps that are taken.

    Steps that are not taken are not run, forwards or in the gradient, where each step that was taken is computed once
    more; in the chunk of about sqrt(max_length) steps in which the loop ends, twice. What is left of the cost of the
    others grows as the logarithm of `max_length`, in the gradient as its square root; with `xs` or ys, these take their
    time to be read and filled.

    A condition that returns `bool[*batch]` stops each row of a batch by itself. The loop goes on until the last row has
    stopped. Until then the rows that have stopped keep their carry, and their ys are `fill`; the body is shown another
    step in their place, as in `treescan.mask_scan`, of which nothing is in any result or gradient.

    Under `jax.vmap` each element stops by itself too: it keeps its carry, and whatever the body would make of that, NaN
    included, is in no result and in no gradient. The loop goes on until all elements have stopped, and costs each of
    them as much.

    Args:
        cond: the condition, `cond(carry) -> bool[]`, or `bool[*batch]` for rows that stop each by itself. It is asked
            before every step, and sees the carry as the body does. Of a row that has stopped it is not asked again.
        f: the body, `f(carry, x) -> (carry, y)`, as for `treescan.scan`; run once a step on the whole batch. Where rows
            stop each by itself, and it has a parameter `valid` behind these two, it is given bool[*batch]: which rows
            take this step.
        init: the carry that the first step is given; leaves `[*batch, ...]` where rows stop each by itself.
        xs: what is scanned over: any pytree whose leaves are `[T, ...]`, T at least `max_length`; or None. Leaves are
            `[T, *batch, ...]` where rows stop each by itself.
        max_length: the most steps to take; T where there are xs, of which else the first `max_length` are scanned.
        fill: for each leaf of y (a prefix tree of scalars) what it is where no step was taken.
        remat: the gradient saves the state before each of about sqrt(max_length) chunks in any case (with `compact`,
            before every 16 steps or so), and recomputes these. "step" recomputes each step in them as well, and a
            `treescan.Remat` says what else: its levels beyond two cut the chunks up. It takes no budget and offloads
            nothing.
        save: as for `treescan.scan`. "last" is the output of the last step that was taken, of each row its own, `fill`
            if none was; it is computed in every step.
        carry_axes: for each leaf of the carry (a prefix tree) the axis where the batch shape starts. None: the leaf is
            shared by all rows, and changes in steps that any row takes. As all row options, it needs a condition that
            returns `bool[*batch]`.
        x_axes: the same for each leaf of one step's x. None: shared by all rows. A leaf that is given whole (None in
            `in_axes`) has rows only where `x_axes` is a tree that says so.
        y_axes: the same for each leaf of one step's y. None: it has no rows, and is `fill` where no row takes a step.
        compact: True: neither the body nor the condition may close over arrays that have rows (these are to come
            through the carry or xs), and both must take any number of rows. Every 16 steps or so the rows that go on
            are brought together along the first axis of the batch, and the body is run on the smallest tier that holds
            them. Tiers are the batch and 3/4, 1/2, 1/3, 1/5, 1/10 and 1/32 of it; a tuple names them instead. The body
            is traced and compiled once a tier. Results are in their places.
        progress: as for `treescan.scan`: of the steps that were taken, as their number is not known before.
        **options: `reverse` (from step max_length-1 down; each y is at the position of its x), `unroll` (within the
            chunks into which the loop is cut), `in_axes`, `out_axes`, `key`, `name`, as for `treescan.scan`. `key`
            excludes `compact`.

    Returns:
        The carry after the last step that was taken, ys `[max_length, ...]`, the number of steps that were taken, and
        whether `cond` no longer held; the latter two `[*batch]` where rows stop each by itself.

    Raises:
        ArgumentError: as `treescan.scan`; also if there are fewer xs than `max_length`, or neither of them is given, if
            the batch shape of the condition is not where the axes say, if y cannot hold `fill`, if an option is about
            rows and `cond` returns one bool, or if `compact` cannot order the rows (with `key`, rows spread over an
            explicit mesh, or in a `jax.shard_map` with `check_vma=False`).
        BodyError: as `treescan.scan`; also if `cond` returns anything but bools.
        CarryError: as `treescan.scan`.
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

        Rows that stop each by itself:

        >>> def halve(x, _):
        ...     return x / 2, x
        >>> halved = treescan.while_scan(
        ...     lambda x: x > 1, halve, jnp.array([8.0, 0.5, 2.0]), max_length=5
        ... )
        >>> print(halved.carry, halved.steps)
        [1.  0.5 1. ] [3 0 1]
    """
    try:
        check_options(options, _ACCEPTED, _REFUSES)
        check_condition(cond)
        plan, kept, out_axes = remat_of(remat), check_save(save), options.pop("out_axes", 0)
        measure = functools.partial(_check_max_length, max_length)
        call = prepare(WHILE_SCAN, f, init, xs, measure=measure, masked=True, **options)
        carries, inputs, outputs = (
            static_axes(name, axes, none=True)
            for name, axes in (("carry_axes", carry_axes), ("x_axes", x_axes), ("y_axes", y_axes))
        )
        compact = check_compact(compact, keyed=options.get("key") is not None)
        filled, condition = _check_fill(fill), Body.of(cond)
        asked = condition.function  # kept alive, as that of an equal condition may be another object
        transforms = present(StopRows(carries, inputs, outputs, call.axes, compact), MoveOutputs.of(out_axes, save))
        shown = check_progress(progress, call.call.body, "while_scan")
        program = Until(call.call, condition, transforms, plan, kept, Prefix.of(filled), repr(filled), shown)
        ended = program.run(call.given)
        del asked
        carry, ys = call.restored((ended.state, ended.ys))
        return WhileResult(carry, ys, ended.steps, ended.stopped)
    except Exception as error:
        explained = explain(error, "while_scan", f, init, WHILE_WORDS)
    raise explained


def _check_max_length(max_length: Any, xs: PyTree, axes: LeafAxes | None) -> int:
    """The most steps to take: what is given, which xs must have at least, else what xs have."""
    most = check_length(max_length, "max_length", _TRACED_MOST)
    leaves = jax.tree.leaves(xs)
    scanned = [axis is not None for axis in axes or (0,) * len(leaves)]
    if not any(scanned):
        if most is None:
            raise Fault(
                ArgumentError,
                "{verb} over {body}: how many steps at most? No `max_length` is given, and there are no xs to scan "
                "over.",
                "Pass `max_length=`: the loop ends there even if the condition is still true.",
            )
        return most
    there = infer_length(xs, None, axes)
    if not isinstance(there, int):
        raise Fault(
            ArgumentError,
            "{verb} over {body}: the number of steps in xs is symbolic.",
            "The loop is cut into chunks: export for a number of steps that is known.",
        )
    if most is not None and most > there:
        raise _too_short(xs, most, axes or (0,) * len(leaves))
    return there if most is None else most


def _too_short(xs: PyTree, most: int, axes: LeafAxes) -> Fault:
    named = leaves_with_path("xs", xs)
    rows = [
        Row(path, str(leaf.shape[axis]), describe_leaf(leaf), f"axis {axis}")
        for (path, leaf), axis in zip(named, axes, strict=True)
        if axis is not None
    ]
    return Fault(
        ArgumentError,
        f"{{verb}} over {{body}}: `max_length` is {most}, but xs has {rows[0].expected} steps.",
        "Leave it out to run at most as many steps as xs has, or give xs for all `max_length` steps.",
        header=("leaf", "steps", "is"),
        rows=rows,
    )


def _check_fill(fill: PyTree) -> PyTree:
    """The fill, less "hold": no output is held where the loop has ended."""
    filled = check_fill(fill)
    if HOLD in jax.tree.leaves(filled):
        raise Fault(
            ArgumentError,
            '{verb} over {body}: `fill` cannot be "hold".',
            "Give a scalar. The last output is in its place, `ys[steps - 1]`; or keep the value in the carry.",
        )
    return filled
