"""`mask_scan`: rows of unequal length in one batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias, Unpack, overload

import jax

from .._arguments import check_options
from .._avals import Array, ArrayLike, PyTree, shape_of
from .._body.call import check_callable
from .._body.signature import MASK_SCAN
from .._errors import MASK_WORDS, explain, in_own_words, verb
from .._rows.axes import RowFlags
from .._rows.checks import check_chunk, check_compact, check_time_axis
from .._rows.fill import check_fill
from .._transforms.axes import by_part
from .._types import (
    Axes,
    AxesOfRows,
    AxesOfTime,
    Carry,
    FirstBody,
    KeyedBody,
    KeyedValidBody,
    MaskOptions,
    Returned,
    ScanBody,
    ValidBody,
    ValidFirstBody,
    X,
    Y,
)
from .prepare import RowPlan, returned, run_scan, spread_rows, take_batches_apart

if TYPE_CHECKING:
    from .._batches.batch import Packed, Padded

    Rows: TypeAlias = Padded[X] | Packed[X]
    """A batch of rows: xs that say of which lengths they are."""


# One overload for each kind of body. mypy mistakes a union of bodies here once it has seen another kind.
@overload
def mask_scan(
    f: Callable[[Carry, X], tuple[Carry, Y]], init: Carry, xs: Rows[X] | X, **options: Unpack[MaskOptions]
) -> tuple[Carry, Y]: ...
@overload
def mask_scan(
    f: Callable[[Carry, None], tuple[Carry, Y]], init: Carry, xs: None = None, **options: Unpack[MaskOptions]
) -> tuple[Carry, Y]: ...
@overload
def mask_scan(
    f: ValidBody[Carry, X, Y], init: Carry, xs: Rows[X] | X, **options: Unpack[MaskOptions]
) -> tuple[Carry, Y]: ...
@overload
def mask_scan(
    f: ValidBody[Carry, None, Y], init: Carry, xs: None = None, **options: Unpack[MaskOptions]
) -> tuple[Carry, Y]: ...
@overload
def mask_scan(
    f: FirstBody[Carry, X, Y], init: Carry, xs: Rows[X] | X, **options: Unpack[MaskOptions]
) -> tuple[Carry, Y]: ...
@overload
def mask_scan(
    f: FirstBody[Carry, None, Y], init: Carry, xs: None = None, **options: Unpack[MaskOptions]
) -> tuple[Carry, Y]: ...
@overload
def mask_scan(
    f: ValidFirstBody[Carry, X, Y], init: Carry, xs: Rows[X] | X, **options: Unpack[MaskOptions]
) -> tuple[Carry, Y]: ...
@overload
def mask_scan(
    f: ValidFirstBody[Carry, None, Y], init: Carry, xs: None = None, **options: Unpack[MaskOptions]
) -> tuple[Carry, Y]: ...
@overload
def mask_scan(
    f: KeyedBody[Carry, X, Y], init: Carry, xs: Rows[X] | X, *, key: Array, **options: Unpack[MaskOptions]
) -> tuple[Carry, Y]: ...
@overload
def mask_scan(
    f: KeyedBody[Carry, None, Y], init: Carry, xs: None = None, *, key: Array, **options: Unpack[MaskOptions]
) -> tuple[Carry, Y]: ...
@overload
def mask_scan(
    f: KeyedValidBody[Carry, X, Y], init: Carry, xs: Rows[X] | X, *, key: Array, **options: Unpack[MaskOptions]
) -> tuple[Carry, Y]: ...
@overload
def mask_scan(
    f: KeyedValidBody[Carry, None, Y], init: Carry, xs: None = None, *, key: Array, **options: Unpack[MaskOptions]
) -> tuple[Carry, Y]: ...
@overload
def mask_scan(
    f: ScanBody[Carry, Any, Y], init: Carry, xs: tuple[Rows[Any], *tuple[Any, ...]], **options: Unpack[MaskOptions]
) -> tuple[Carry, Y]: ...
@overload
def mask_scan(f: Callable[..., Any], init: Any, xs: Any = None, *, check_finite: Returned, **options: Any) -> Any: ...
@verb
def mask_scan(
    f: Callable[..., Any],
    init: PyTree,
    xs: PyTree = None,
    *,
    lengths: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    resets: ArrayLike | None = None,
    reset_to: PyTree = None,
    time_axis: int | AxesOfTime = 0,
    length: int | None = None,
    fill: PyTree = 0,
    row_axes: int | AxesOfRows = 0,
    chunk: int | None = None,
    compact: bool | tuple[int, ...] = False,
    **options: Any,
) -> tuple[Any, Any]:
    """Scans a batch of rows of unequal length. Padding has no effect, and chunks that are only padding are skipped.

    Values and gradients are those of the unpadded rows, each scanned on its own. Gradients with respect to the padding
    are exactly 0. Both hold whatever the padding contains, including NaN and inf, for bodies that treat rows
    independently. A body that reduces over rows must take the keyword `valid` and leave the other rows out. Chunks of
    steps in which no row is valid are skipped, forward, in the gradient, in reverse and under `jax.vmap`. With
    `compact=True`, the other chunks run only the rows that are valid.

    Where nothing is differentiated, the body may see padding itself, whose results are discarded. Under `grad`, padded
    rows get a valid step's values instead. They always do if the body takes `valid`, if all rows share a leaf of
    the carry or of x, if it has an inner `while`, a `jax.custom_vjp`, a callback or another effect, or under
    `jax_debug_nans`.

    Args:
        f: the body, `f(carry, x) -> (carry, y)`, which runs once per step, on the whole batch. A body with a third
            parameter `valid` receives the step's mask, bool[*batch]. One with a parameter `first` receives which rows
            take the first valid step of their segment (of the row, without `resets`), in the order of the run. At
            padding, `first` is that of the step which padding is shown: combine it with `valid` across rows.
        init: the carry that each row starts from; leaves `[*batch, ...]`. The carry of a row does not change in steps
            that are not valid, and a row of length 0 returns its init.
        xs: the inputs; leaves `[T, *batch, ...]`. None needs `length`. A `treescan.Padded` or a `treescan.Packed`
            contains data together with lengths, or with mask and resets. It may also be a part of a tree,
            `(packed, extra)`: `f` then receives a step of its data in its place. Several of them must have the same
            rows.
        lengths: int[*batch], traced or not: row b is valid in its first `lengths[b]` steps. The shape is the batch
            shape: () for a single row, several axes for nested batches. Concrete lengths must lie between 0 and T;
            traced ones are clamped to that. With `offset`, they count from the first step of the whole run, so all
            parts take the same lengths, which may exceed T.
        mask: bool[T, *batch], instead of lengths: which steps are valid, in any pattern.
        resets: bool[T, *batch]: True where a segment begins (an episode, or one of several sequences in a row). Before
            that step, `init` is restored and the gradient is cut; in reverse, before the segment's last valid step. If
            `init` is a state that was stored in the middle of an episode, use `reset_to`: otherwise later segments
            start from the stored state too. Flags at steps that are not valid have no effect, and shared leaves are
            never reset. Without lengths and mask, every step is valid: nothing is masked or skipped, and the gradient
            follows `remat="auto"` of `treescan.scan`, or recomputes chunks of `chunk` steps if that is given.
        reset_to: the value that a reset restores instead of `init`: a number, an array for each leaf of init, a prefix
            tree of these (None for the value of `init`), or a function of init that returns one of these. It receives
            the gradient of the steps that follow. A flag at a row's first valid step resets it too. In reverse, the
            last segment of a row starts from `init`, and earlier ones from `reset_to`. All sequences of a `Packed`
            start from `reset_to`, in both directions. A `Packed` with an `init` for each sequence restores those
            instead, and `init` only in the parts that are None there.
        time_axis: the axis of the steps in xs, ys, `mask` and `resets`: 0, or 1 for data with the batch first. Or a
            mapping with any of the keys "xs", "ys" and "mask" (with which `resets` go), each 0 if it is not there:
            `{"xs": (0, None)}`. "xs" is a prefix tree of xs, as `in_axes` of `treescan.scan`: with None, every step
            receives the whole leaf. "ys" is a prefix tree of ys, as `out_axes`.
        length: the number of steps T; needed without xs, if only `lengths` are given.
        fill: the value of y at padded steps: a number; or "hold", the row's last valid y in the order of the run, and 0
            before there is one; or a prefix tree of y with these.
        row_axes: the axis where the batch shape starts, in all leaves of the carry, of one step's x and of one step's
            y. Or a mapping with any of the keys "carry", "x" and "y", each a prefix tree, and 0 if it is not there:
            `{"carry": (0, None)}`. With None, all rows share a leaf. One of the carry then changes in every step in
            which any row is valid; one of y is `fill` if no row is valid. A leaf of xs that every step receives whole
            has rows only if "x" is a tree that says so.
        chunk: the number of steps that are skipped together if no row is valid. None: about 16, fewer for short loops,
            and on a GPU an eighth of a long loop. 0: nothing is skipped, unless no step at all is valid. Results do not
            depend on it.
        compact: True: in each chunk, the rows that have a valid step are moved to the front, along the first axis of
            the batch, and the body runs on the smallest tier that holds them. The body must not close over arrays that
            have rows (pass them through the carry or xs), and must accept any number of rows. Tiers are B/16, B/4, B/2
            and B rows, or B/16, B/2 and B if a step has more than 100 equations; a tuple sets other tiers. The body is
            traced and compiled once per tier. Steps at the end that fill no chunk run on all rows, if they run on any.
            Results return in the order of the rows.
        **options: `reverse`, `unroll`, `key`, `offset`, `remat`, `save`, `truncate`, `progress`,
            `check_finite`, `options`, as for `treescan.scan`. Padding is not checked. Progress counts the steps in
            which any row is valid. In reverse, each row runs from its own last valid step to its first, and ys stay
            where their xs are. `key` cannot be combined with `compact`. The gradient saves the steps, or follows
            `remat="auto"` of `treescan.scan` where that is faster. With `chunk`, `compact` or `remat` it saves the
            carry before each chunk, and recomputes the chunk, one with `jax.debug` callbacks only with `remat`; that
            also saves less within a chunk. With `save="last"`,
            each row has its own last valid y, and `fill` if it has none. With `offset`, `mask` and `resets` are those
            of the part, and `save="last"` is `fill` for a row that ended in another part. Refused are `fill="hold"`, a
            `Packed`, `resets` in reverse or without `reset_to`, and `truncate` with `mask` or `resets`.

    Returns:
        The carry after each row's last valid step, and the outputs `[T, *batch, ...]`. A scan over a `Packed` returns
        the carry of each sequence instead: leaves `[N, ...]`, with an entry per sequence where init has one per row.
        `save="last"` keeps the last y of each sequence in the same form. A sequence of 0 steps ends with the carry that
        it starts from.

    Raises:
        ArgumentError: as `treescan.scan`; also if none of lengths, mask and resets is given, or lengths and mask both,
            if they do not fit xs, if the batch shape is not where the axes say, if `reset_to` or the inits of a
            `Packed` do not fit init, if y cannot hold `fill`, or if `compact` cannot order the rows (with
            `key`, `chunk=0`, a single row, rows spread over an explicit mesh, a mutable array in the body, random
            numbers that are drawn for all rows at once, or in a `jax.shard_map` with `check_vma=False`).
        BodyError: as `treescan.scan`.
        CarryError: as `treescan.scan`.
        NonFiniteError: if `check_finite` finds something.
        SignatureError: as `treescan.scan`.

    Examples:
        >>> import jax.numpy as jnp
        >>> import treescan
        >>> # [T, B]: the second row has two steps.
        >>> xs = jnp.array([[1.0, 10.0], [2.0, 20.0], [3.0, jnp.nan]])
        >>> def step(total, x):
        ...     return total + x, total + x
        >>> total, sums = treescan.mask_scan(
        ...     step, jnp.zeros(2), xs, lengths=jnp.array([3, 2])
        ... )
        >>> print(total)
        [ 6. 30.]
        >>> print(sums)
        [[ 1. 10.]
         [ 3. 30.]
         [ 6.  0.]]
    """
    try:
        check_options(options, _ACCEPTED, _REFUSES, time_axis=time_axis)
        check_callable(f, MASK_SCAN.call)
        (sliced, stacked, steps), axes = _spread_time(time_axis, xs), spread_rows(row_axes)
        fill, chunk = check_fill(fill), check_chunk(chunk, compact)
        compact = check_compact(compact, keyed=options.get("key") is not None)
        told = time_axis.get("xs") if isinstance(time_axis, Mapping) else None
        xs, flags = take_batches_apart(xs, RowFlags(lengths, mask, resets), steps, told)
        if length is None and not jax.tree.leaves(xs):  # the mask has the steps, as that of a `Packed` without data
            of_steps = [shape_of(each) or () for each in (flags.mask, flags.resets)]
            length = next((shape[steps] for shape in of_steps if len(shape) > steps), None)
        rows = RowPlan(flags, *axes, steps, reset_to, fill, chunk, compact)
        result = run_scan(MASK_SCAN, f, init, xs, length, rows=rows, in_axes=sliced, out_axes=stacked, **options)
        return returned(result)
    except Exception as error:
        explained = explain(in_own_words(error), "mask_scan", f, init, MASK_WORDS)
    raise explained


_ACCEPTED = frozenset(MaskOptions.__annotations__) | {"key"}
_REFUSES = {
    "in_axes": '`time_axis={"xs": ...}` says where the steps are in xs.',
    "out_axes": '`time_axis={"ys": ...}` says where the steps are in ys.',
}


def _spread_time(time_axis: int | AxesOfTime, xs: PyTree) -> tuple[Axes, Axes, int]:
    """Where the steps are in xs, in ys, and in the mask and the resets."""
    each = by_part("time_axis", time_axis, ("xs", "ys", "mask"))
    if isinstance(time_axis, Mapping):
        return each["xs"], each["ys"], check_time_axis(each["mask"], 'time_axis["mask"]')
    others = 'For other layouts, give a mapping: `time_axis={"xs": ..., "ys": ..., "mask": ...}`.'
    axis = check_time_axis(time_axis, "time_axis", others)
    return 0 if xs is None else axis, axis, axis
