"""`while_scan`: a scan that ends when a condition on the carry no longer holds."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, overload

import jax

from .._avals import describe_leaf
from .._axes import LeafAxes
from .._body.conventions import WHILE_SCAN
from .._checks.arguments import check_length, check_options, infer_length
from .._errors import ArgumentError, Fault, Row, explain, verb
from .._loop.body import Body
from .._transforms.outputs import MoveOutputs, check_save
from .._transforms.rows.fill import HOLD, check_fill
from .._transforms.until.condition import check_condition
from .._transforms.until.program import Until, remat_of
from .._tree import Prefix, leaves_with_path
from .._types import Array, Axes, Carry, KeyedBody, PyTree, RematLike, Save, X, Y
from .prepare import prepare, present

_ACCEPTED = frozenset(
    ("max_length", "fill", "reverse", "unroll", "in_axes", "out_axes", "key", "remat", "save", "name")
)
_TRACED_MOST = (
    "It is part of the compiled program: give an int, the most steps that there may ever be. For a limit that is known "
    'only at run time, carry a counter and let `cond` compare it, `lambda carry: (carry["step"] < limit) & ...`: the '
    "loop then ends there, and takes no step more."
)
_REFUSES = {"length": "how many steps it runs is what `cond` says; `max_length` is the most."}


class WhileResult(NamedTuple, Generic[Carry, Y]):
    """What `while_scan` returns.

    Attributes:
        carry: the carry after the last step that was taken, or `init`.
        ys: the outputs, `[max_length, ...]`, `fill` where no step was taken.
        steps: int32[], how many steps were taken.
        stopped: bool[], whether `cond` no longer held; else the loop ran into `max_length`.
    """

    carry: Carry
    ys: Y
    steps: Array
    stopped: Array


@overload
def while_scan(
    cond: Callable[[Carry], Any],
    f: Callable[[Carry, X], tuple[Carry, Y]],
    init: Carry,
    xs: X,
    *,
    max_length: int | None = None,
    fill: PyTree = 0,
    reverse: bool = False,
    unroll: int | bool = 1,
    in_axes: Axes = 0,
    out_axes: Axes = 0,
    key: None = None,
    remat: RematLike | None = None,
    save: Save = "all",
    name: str | None = None,
) -> WhileResult[Carry, Y]: ...
@overload
def while_scan(
    cond: Callable[[Carry], Any],
    f: Callable[[Carry, None], tuple[Carry, Y]],
    init: Carry,
    xs: None = None,
    *,
    max_length: int,
    fill: PyTree = 0,
    reverse: bool = False,
    unroll: int | bool = 1,
    in_axes: Axes = 0,
    out_axes: Axes = 0,
    key: None = None,
    remat: RematLike | None = None,
    save: Save = "all",
    name: str | None = None,
) -> WhileResult[Carry, Y]: ...
@overload
def while_scan(
    cond: Callable[[Carry], Any],
    f: KeyedBody[Carry, X, Y],
    init: Carry,
    xs: X,
    *,
    max_length: int | None = None,
    fill: PyTree = 0,
    reverse: bool = False,
    unroll: int | bool = 1,
    in_axes: Axes = 0,
    out_axes: Axes = 0,
    key: Array,
    remat: RematLike | None = None,
    save: Save = "all",
    name: str | None = None,
) -> WhileResult[Carry, Y]: ...
@overload
def while_scan(
    cond: Callable[[Carry], Any],
    f: KeyedBody[Carry, None, Y],
    init: Carry,
    xs: None = None,
    *,
    max_length: int,
    fill: PyTree = 0,
    reverse: bool = False,
    unroll: int | bool = 1,
    in_axes: Axes = 0,
    out_axes: Axes = 0,
    key: Array,
    remat: RematLike | None = None,
    save: Save = "all",
    name: str | None = None,
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
    reverse: bool = False,
    unroll: int | bool = 1,
    in_axes: Axes = 0,
    out_axes: Axes = 0,
    key: Array | None = None,
    remat: RematLike | None = None,
    save: Save = "all",
    name: str | None = None,
    **unknown: Any,
) -> WhileResult[Any, Any]:
    """Scans while a condition on the carry holds; differentiable both ways, at the cost of the steps that are taken.

    Steps that are not taken are not run, forwards or in the gradient, where each step that was taken is computed once
    more; in the chunk of about sqrt(max_length) steps in which the loop ends, twice. What is left of the cost of the
    others grows as the logarithm of `max_length`, in the gradient as its square root; with `xs` or ys, these take their
    time to be read and filled.

    Under `jax.vmap` each element stops by itself: it keeps its carry, and whatever the body would make of that, NaN
    included, is in no result and in no gradient. The loop goes on until all elements have stopped, and costs each of
    them as much.

    Args:
        cond: the condition, `cond(carry) -> bool[]`, asked before every step. It sees the carry as the body does.
        f: the body, `f(carry, x) -> (carry, y)`, as for `treescan.scan`.
        init: the carry that the first step is given.
        xs: what is scanned over: any pytree whose leaves are `[T, ...]`, T at least `max_length`; or None.
        max_length: the most steps to take; T where there are xs, of which else the first `max_length` are scanned.
        fill: for each leaf of y (a prefix tree of scalars) what it is where no step was taken.
        reverse: run from step max_length-1 down. Each y is at the position of its x.
        unroll: as for `treescan.scan`, within the chunks into which the loop is cut.
        in_axes: as for `treescan.scan`.
        out_axes: as for `treescan.scan`.
        key: as for `treescan.scan`.
        remat: the gradient saves the state before each of about sqrt(max_length) chunks in any case, and recomputes
            these. "step" recomputes each step in them as well, and a `treescan.Remat` says what else: its levels beyond
            two cut the chunks up. It takes no budget and offloads nothing.
        save: as for `treescan.scan`. "last" is the output of the last step that was taken, `fill` if none was; it is
            computed in every step.
        name: as for `treescan.scan`.

    Returns:
        The carry after the last step that was taken, ys `[max_length, ...]`, the number of steps that were taken, and
        whether `cond` no longer held.

    Raises:
        ArgumentError: as `treescan.scan`; also if there are fewer xs than `max_length`, or neither of them is given.
        BodyError: as `treescan.scan`; also if `cond` does not return one bool.
        CarryError: as `treescan.scan`.
        SignatureError: as `treescan.scan`.

    Examples:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import treescan
        >>> def sqrt(a):
        ...     def far(x):
        ...         return jnp.abs(x * x - a) > 1e-5 * a
        ...     def newton(x, _):
        ...         return (x + a / x) / 2, None
        ...     return treescan.while_scan(far, newton, a, max_length=50).carry
        >>> print(f"{sqrt(2.0):.4f} {jax.grad(sqrt)(2.0):.4f}")
        1.4142 0.3536
    """
    try:
        check_options(unknown, _ACCEPTED, _REFUSES)
        check_condition(cond)
        plan, kept = remat_of(remat), check_save(save)
        call = prepare(
            WHILE_SCAN,
            f,
            init,
            xs,
            measure=functools.partial(_check_max_length, max_length),
            reverse=reverse,
            unroll=unroll,
            in_axes=in_axes,
            key=key,
            name=name,
        )
        filled, condition = _check_fill(fill), Body.of(cond)
        asked = condition.function  # kept alive, as that of an equal condition may be another object
        transforms = present(call.over_axes, MoveOutputs.of(out_axes, save))
        program = Until(call.call, condition, transforms, plan, kept, Prefix.of(filled), repr(filled))
        ended = program.run(call.given)
        del asked
        carry, ys = call.restored((ended.state, ended.ys))
        return WhileResult(carry, ys, ended.steps, ended.stopped)
    except Exception as error:
        explained = explain(error, "while_scan", f, init)
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
                "Pass `max_length=`: the loop ends there if the condition still holds.",
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
        "Leave it out to take as many steps as there are xs, or give xs for each of the steps that may be taken.",
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
            "Give a scalar. The last output is in its place, `ys[steps - 1]`; or carry what is to last.",
        )
    return filled
