"""`mask_scan`: rows of unequal length in one batch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Unpack, overload

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ._arguments import check_options
from ._avals import describe_argument, dtype_of, shape_of
from ._errors import ArgumentError, ArgumentTypeError, Fault, explain, verb
from ._run import CALLS, run_verb
from ._transforms.axes import static_axes
from ._transforms.body import check_callable
from ._transforms.mask import MaskPlan, check_fill
from ._tree import Prefix
from ._types import (
    Array,
    ArrayLike,
    Axes,
    Carry,
    KeyedBody,
    KeyedValidBody,
    MaskOptions,
    Options,
    PyTree,
    ValidBody,
    X,
    Y,
)


@overload
def mask_scan(
    f: Callable[[Carry, X], tuple[Carry, Y]] | ValidBody[Carry, X, Y],
    init: Carry,
    xs: X,
    *,
    length: int | None = None,
    **options: Unpack[MaskOptions],
) -> tuple[Carry, Y]: ...
@overload
def mask_scan(
    f: Callable[[Carry, None], tuple[Carry, Y]] | ValidBody[Carry, None, Y],
    init: Carry,
    xs: None = None,
    *,
    length: int | None = None,
    **options: Unpack[MaskOptions],
) -> tuple[Carry, Y]: ...
@overload
def mask_scan(
    f: KeyedBody[Carry, X, Y],
    init: Carry,
    xs: X,
    *,
    length: int | None = None,
    key: Array,
    **options: Unpack[MaskOptions],
) -> tuple[Carry, Y]: ...
@overload
def mask_scan(
    f: KeyedBody[Carry, None, Y],
    init: Carry,
    xs: None = None,
    *,
    length: int | None = None,
    key: Array,
    **options: Unpack[MaskOptions],
) -> tuple[Carry, Y]: ...
@overload
def mask_scan(
    f: KeyedValidBody[Carry, X, Y],
    init: Carry,
    xs: X,
    *,
    length: int | None = None,
    key: Array,
    **options: Unpack[MaskOptions],
) -> tuple[Carry, Y]: ...
@overload
def mask_scan(
    f: KeyedValidBody[Carry, None, Y],
    init: Carry,
    xs: None = None,
    *,
    length: int | None = None,
    key: Array,
    **options: Unpack[MaskOptions],
) -> tuple[Carry, Y]: ...
@verb
def mask_scan(
    f: Callable[..., Any],
    init: PyTree,
    xs: PyTree = None,
    *,
    lengths: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    length: int | None = None,
    fill: PyTree = 0,
    carry_axes: Axes = 0,
    x_axes: Axes = 0,
    y_axes: Axes = 0,
    **options: Any,
) -> tuple[Any, Any]:
    """Scans a batch of rows of unequal length. Padding is never read, whatever stands in it.

    Values and every gradient are those of the unpadded rows, each scanned on its own, and gradients with respect to
    the padding are exactly 0, NaN or inf in the padding or not. This holds for bodies that treat rows independently;
    one that reduces over rows takes the keyword `valid` and leaves the others out. Steps are computed for all rows,
    padded or not; a batch without any valid step does not evaluate the body at all.

    Args:
        f: the body, `f(carry, x) -> (carry, y)`, run once a step on the whole batch. With a parameter `valid`
            behind these two it is given the step's mask, bool[*batch].
        init: the carry that each row starts from; leaves `[*batch, ...]`. It stays what it was in steps that are not
            valid, and a row of length 0 returns it.
        xs: what is scanned over; leaves `[T, *batch, ...]`. None needs `length`.
        lengths: int[*batch], traced or not: row b is valid in its first `lengths[b]` steps. The shape is the batch
            shape: () for a single row, several axes for nested batches. Concrete lengths must lie between 0 and T;
            traced ones are clamped to that.
        mask: bool[T, *batch], instead of lengths: which steps are valid, in any pattern.
        length: the number of steps T; needed without xs.
        fill: what y is on padded steps, a number, or a prefix tree of y with numbers.
        carry_axes: for each leaf of the carry (a prefix tree) the axis where the batch shape starts. None: the leaf is
            shared by all rows, and changes in steps in which any row is valid.
        x_axes: the same for each leaf of one step's x. None: shared by all rows, as a time index is. A leaf that is
            given whole (None in `in_axes`) has rows only where `x_axes` is a tree that says so.
        y_axes: the same for each leaf of one step's y. None: it has no rows, and is `fill` where no row is valid.
        **options: `reverse`, `unroll`, `in_axes`, `out_axes`, `key`, `name`, as for `treescan.scan`. In reverse each
            row runs from its own last valid step to its first; ys stay where their xs are.

    Returns:
        The carry after each row's last valid step, and the outputs `[T, *batch, ...]`.

    Raises:
        ArgumentError: as `treescan.scan`; also if neither or both of lengths and mask are given, if they do not fit
            xs, if the batch shape does not stand where the axes say, or if y cannot hold `fill`.
        BodyError: as `treescan.scan`.
        CarryError: as `treescan.scan`.
        SignatureError: as `treescan.scan`.

    Examples:
        >>> import jax.numpy as jnp
        >>> import treescan
        >>> xs = jnp.array([[1.0, 10.0], [2.0, 20.0], [3.0, jnp.nan]])  # [T, B], the second row has two steps
        >>> def step(total, x):
        ...     return total + x, total + x
        >>> total, sums = treescan.mask_scan(step, jnp.zeros(2), xs, lengths=jnp.array([3, 2]))
        >>> print(total)
        [ 6. 30.]
        >>> print(sums)
        [[ 1. 10.]
         [ 3. 30.]
         [ 6.  0.]]
    """
    try:
        check_options(options, _ACCEPTED, {})
        check_callable(f, CALLS["mask_scan"])
        plan = MaskPlan(
            static_axes("carry_axes", carry_axes, none=True),
            static_axes("x_axes", x_axes, none=True),
            static_axes("y_axes", y_axes, none=True),
            Prefix.of(check_fill(fill)),
            repr(fill),
        )
        rows = functools.partial(check_rows, lengths, mask)
        return run_verb("scan", f, init, xs, length, rows=rows, mask=plan, **options)
    except Exception as error:
        explained = explain(error, "mask_scan", f, init)
    raise explained


_ACCEPTED = (
    frozenset(Options.__annotations__) | {"lengths", "mask", "length", "fill"} | {"carry_axes", "x_axes", "y_axes"}
)


def check_rows(lengths: Any, mask: Any, steps: int) -> tuple[Any, Any]:
    """Exactly one of lengths (ints, in range if concrete) and mask (bools that lead with the steps)."""
    if (lengths is None) == (mask is None):
        both = "both are given" if mask is not None else "neither is given"
        raise Fault(
            ArgumentError,
            f"{{verb}} over {{body}}: pass either `lengths` or `mask`; {both}.",
            "`lengths` int[*batch] counts each row's steps from the first; `mask` bool[T, *batch] marks any pattern.",
        )
    return (_check_lengths(lengths, steps), None) if mask is None else (None, _check_mask(mask, steps))


def _check_lengths(lengths: Any, steps: int) -> Any:
    if isinstance(lengths, list | tuple):
        lengths = _as_array(lengths)
    dtype = dtype_of(lengths)
    if dtype is None or not jnp.issubdtype(dtype, jnp.integer):
        raise Fault(
            ArgumentTypeError,
            f"{{verb}} over {{body}}: `lengths` are ints, got {describe_argument(lengths)}.",
            "Give the number of valid steps of each row, int[*batch]; for a bool pattern, use `mask`.",
        )
    if isinstance(lengths, Tracer) or not getattr(lengths, "is_fully_addressable", True):
        return lengths
    values = np.asarray(lengths)
    if values.size and (values.min() < 0 or values.max() > steps):
        row = int(np.argmax((values < 0) | (values > steps)))
        where = list(map(int, np.unravel_index(row, values.shape))) or ""
        raise Fault(
            ArgumentError,
            f"{{verb}} over {{body}}: `lengths` must lie between 0 and the {steps} steps of xs, but lengths{where} is "
            f"{values.flat[row]}.",
            f"Cut the lengths, `jnp.clip(lengths, 0, {steps})`, or pad xs to the longest row.",
        )
    return jnp.asarray(lengths)


def _as_array(lengths: Any) -> Any:
    """A list of lengths as an array of ints; a ragged one as it is."""
    try:
        array = jnp.asarray(lengths)
    except (TypeError, ValueError):
        return lengths
    return array if array.size else array.astype(jnp.int32)


def _check_mask(mask: Any, steps: int) -> Any:
    if dtype_of(mask) != np.dtype(bool):
        raise Fault(
            ArgumentTypeError,
            f"{{verb}} over {{body}}: `mask` is a bool array, got {describe_argument(mask)}.",
            "Compare, as in `mask=tokens != pad`; for the number of valid steps of each row, use `lengths`.",
        )
    shape = shape_of(mask) or ()
    if not shape or shape[0] != steps:
        raise Fault(
            ArgumentError,
            f"{{verb}} over {{body}}: `mask` leads with the steps, bool[{steps}, *batch], but is "
            f"{describe_argument(mask)}.",
            "The batch stands in front there: pass `mask.T`."
            if len(shape) == 2 and shape[1] == steps
            else f"xs has {steps} steps: give the mask as many, along axis 0.",
        )
    return jnp.asarray(mask)
