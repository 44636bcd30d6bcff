"""The verbs over steps: `scan`, `fold`, `accumulate`, `fori` over a range of indices, `mask_scan` over rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, Unpack, overload

import jax.numpy as jnp
from jax.core import Tracer

from .._avals import describe_traced
from .._body.call import check_callable
from .._body.signature import ACCUMULATE, FOLD, FORI, MASK_SCAN, SCAN
from .._checks.arguments import check_options, check_positional
from .._checks.rows import check_bound, check_chunk, check_compact, check_length, check_time_axis
from .._data.batches import Packed, Padded
from .._errors import ArgumentTypeError, Fault, Misuse, explain, verb
from .._transforms.axes import Count
from .._transforms.finite.check import deliver
from .._transforms.progress import check_progress, refuse_backward
from .._transforms.refuse import in_own_words
from .._transforms.remat import Recompute
from .._transforms.rows.axes import RowFlags
from .._transforms.rows.fill import check_fill
from .._types import (
    Array,
    ArrayLike,
    Axes,
    Carry,
    FiniteCheck,
    FoldBody,
    ForiOptions,
    KeyedBody,
    KeyedFold,
    KeyedFoldBody,
    KeyedIndexBody,
    KeyedRange,
    KeyedRows,
    KeyedScan,
    KeyedValidBody,
    MaskOptions,
    Options,
    ProgressLike,
    PyTree,
    RaggedFold,
    RaggedOptions,
    RangeOptions,
    RematLike,
    Save,
    ScanOptions,
    ValidBody,
    X,
    Y,
)
from .prepare import RowPlan, prepare, row_axes, rows_of, run_scan

_ACCEPTED = frozenset(Options.__annotations__) | {"length"}
_OF_FOLDS = frozenset(Options.__annotations__) | {"lengths"}
_NO_OUTPUTS = "it stacks no outputs. `treescan.accumulate` and `treescan.scan` do."
_FOLD_REFUSES = {"out_axes": _NO_OUTPUTS, "save": _NO_OUTPUTS}


@overload
def scan(
    f: Callable[[Carry, X], tuple[Carry, Y]],
    init: Carry,
    xs: X,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    **options: Unpack[ScanOptions],
) -> tuple[Carry, Y]: ...
@overload
def scan(
    f: Callable[[Carry, None], tuple[Carry, Y]],
    init: Carry,
    xs: None = None,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    **options: Unpack[ScanOptions],
) -> tuple[Carry, Y]: ...
@overload
def scan(
    f: KeyedBody[Carry, X, Y],
    init: Carry,
    xs: X,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    **options: Unpack[KeyedScan],
) -> tuple[Carry, Y]: ...
@overload
def scan(
    f: KeyedBody[Carry, None, Y],
    init: Carry,
    xs: None = None,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    **options: Unpack[KeyedScan],
) -> tuple[Carry, Y]: ...
@verb
def scan(
    f: Callable[..., Any],
    init: PyTree,
    xs: PyTree = None,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    _split_transpose: bool = False,
    *,
    in_axes: Axes = 0,
    out_axes: Axes = 0,
    key: Array | None = None,
    remat: RematLike | None = None,
    save: Save = "all",
    truncate: int | None = None,
    name: str | None = None,
    progress: ProgressLike = None,
    check_finite: FiniteCheck = False,
    **unknown: Any,
) -> tuple[Any, Any]:
    """Scans a function over the steps of `xs`, carrying state from step to step.

    A drop-in replacement for `jax.lax.scan`. The first six parameters are the same, and without further options both
    trace to the same jaxpr. It adds the options below, and checks, which run during the one trace and whose errors use
    the names in your body.

    `_split_transpose` is an experiment of JAX, and is passed on to `jax.lax.scan`. With it, the gradient of the loop is
    split into a scan, for the carry, and a map, for what each step reads. It may take more memory, and JAX may change
    or remove it.

    Args:
        f: the body, `f(carry, x) -> (carry, y)`. If it has jaxtyping annotations, they are checked.
        init: the carry that the first step receives: any pytree of arrays and scalars. Other leaves (a function, a
            string) stay outside of the loop. The body sees them in their place, and must return them unchanged.
        xs: the inputs to scan over: any pytree with leaves `[T, ...]`, or None for a loop without inputs.
        length: the number of steps T. It is needed without xs, and must agree with them otherwise.
        reverse: run from step T-1 to step 0. Each y is at the position of its x.
        unroll: how many steps are compiled into one iteration of the loop. 0 or True unrolls the whole loop.
        in_axes: the axis to scan over, for each leaf of xs (a prefix tree). Negative axes count from the end. With
            None, every step receives the whole leaf. Axes other than 0 cost a transposed copy of the leaf.
        out_axes: the axis of the steps, for each leaf of ys (a prefix tree). Axes other than 0 cost a transposed copy.
        key: a PRNG key. The body then receives `key=jax.random.fold_in(key, position)`, where `position` is that of the
            step in xs, also in reverse.
        remat: what the gradient recomputes instead of saving it. None: nothing. "auto": the plan that is expected to be
            the fastest, among those that save no more than None. "step": each step; of each step, only the carry is
            saved. "nested": chunks of about sqrt(T) steps, and each step within them; about 2 sqrt(T) carries are
            saved, and each step is evaluated once more. A `treescan.Remat` sets what a step saves, the number of
            levels, a budget in bytes, or another memory for carries.
        save: which ys to keep (a prefix tree of y). "all". "last": those of the last step that runs, without an axis of
            steps; 0 if there is no step. A number k: those at the positions k-1, 2k-1 and so on, also in reverse. None:
            None instead of the output. Outputs that are not kept take no memory, and operations that only they need are
            not run.
        truncate: the gradient of the carry is cut at the positions that are multiples of this number, also in reverse:
            truncated backpropagation through time. Leaves of the carry that no step changes, for example weights, are
            constants of the loop, and are not cut.
        name: the name of the loop in profilers (a `jax.named_scope`).
        progress: show the progress of the loop: True, a label for the bar, or a `treescan.Progress`. The loop is cut
            into at most 100 chunks, and reports after a chunk, five times a second at most. No step has a branch, and
            the gradient reports nothing. Under `jax.vmap` there is one bar for all elements.
        check_finite: check the carry after each step. If a leaf becomes NaN or infinite, a `NonFiniteError` names the
            leaf, the first step where it happened, the rows and the operation. `treescan.last_nonfinite()` returns the
            carry and x of that step. Under a transformation of JAX, it is JAX's runtime error with this text. An
            infinity that the carry had before the step is allowed. "backward" checks the cotangents of the carry
            instead, in reverse mode: a NaN or an infinity that the gradient makes on its way back through a step.

    Returns:
        The carry of the last step, and ys, the outputs of all steps, stacked to `[T, ...]`.

    Raises:
        ArgumentError: if an argument is out of range, conflicts with another, or does not fit xs.
        BodyError: if `f` is not callable, does not return a pair, or lacks a keyword.
        CarryError: if the returned carry differs from the given one in structure, shape, dtype or sharding.
        NonFiniteError: if `check_finite` finds something.
        SignatureError: if a jaxtyping annotation of the body does not hold.

    Examples:
        >>> import jax.numpy as jnp
        >>> import treescan
        >>> def step(total, x):
        ...     return total + x, total * x
        >>> total, products = treescan.scan(step, 0.0, jnp.array([1.0, 2.0, 3.0]))
        >>> print(total, products)
        6.0 [0. 2. 9.]
    """
    try:
        check_options(unknown, _ACCEPTED, {})
        lowering = (("_split_transpose", True),) if _split_transpose else ()
        return run_scan(
            SCAN,
            f,
            init,
            xs,
            length,
            reverse=reverse,
            unroll=unroll,
            in_axes=in_axes,
            out_axes=out_axes,
            key=key,
            remat=remat,
            save=save,
            truncate=truncate,
            name=name,
            progress=progress,
            check_finite=check_finite,
            lowering=lowering,
        )
    except Exception as error:
        explained = explain(error, "scan", f, init)
    raise explained


@overload
def fold(
    f: Callable[[Carry, X], Carry], init: Carry, xs: X, length: int | None = None, **options: Unpack[RaggedFold]
) -> Carry: ...
@overload
def fold(
    f: FoldBody[Carry, None], init: Carry, xs: None = None, length: int | None = None, **options: Unpack[RaggedFold]
) -> Carry: ...
@overload
def fold(
    f: KeyedFoldBody[Carry, X], init: Carry, xs: X, length: int | None = None, **options: Unpack[KeyedFold]
) -> Carry: ...
@overload
def fold(
    f: KeyedFoldBody[Carry, None], init: Carry, xs: None = None, length: int | None = None, **options: Unpack[KeyedFold]
) -> Carry: ...
@verb
def fold(f: Callable[..., Any], init: PyTree, xs: PyTree = None, length: int | None = None, **options: Any) -> Any:
    """Folds `xs` into one value: a scan whose body returns only the carry.

    Args:
        f: the body, `f(carry, x) -> carry`.
        init: the carry that the first step receives.
        xs: the inputs: any pytree with leaves `[T, ...]`, or None.
        length: the number of steps T; needed without xs.
        **options: `reverse`, `unroll`, `in_axes`, `key`, `remat`, `truncate`, `name`, `progress`, `check_finite`,
            as for `treescan.scan`; and `lengths`, int[*batch], as for `treescan.mask_scan`: row b of `xs`
            `[T, *batch, ...]` is folded over its first `lengths[b]` steps, and its padding is never read.

    Returns:
        The last step's carry.

    Raises:
        ArgumentError: as `treescan.scan`; also for `out_axes` and `save`, as there are no outputs.
        BodyError: as `treescan.scan`; also if the body returns a pair whose first item is the carry.
        CarryError: as `treescan.scan`.
        NonFiniteError: if `check_finite` finds something.
        SignatureError: as `treescan.scan`.

    Examples:
        >>> import jax.numpy as jnp
        >>> import treescan
        >>> print(
        ...     treescan.fold(
        ...         lambda total, x: total + x, 0.0, jnp.array([1.0, 2.0, 3.0])
        ...     )
        ... )
        6.0
    """
    try:
        check_options(options, _OF_FOLDS - _FOLD_REFUSES.keys(), _FOLD_REFUSES)
        return run_scan(FOLD, f, init, xs, length, **options)[0]
    except Exception as error:
        explained = explain(in_own_words(error), "fold", f, init)
    raise explained


@overload
def accumulate(
    f: Callable[[Carry, X], Carry], init: Carry, xs: X, length: int | None = None, **options: Unpack[RaggedOptions]
) -> Carry: ...
@overload
def accumulate(
    f: FoldBody[Carry, None], init: Carry, xs: None = None, length: int | None = None, **options: Unpack[RaggedOptions]
) -> Carry: ...
@overload
def accumulate(
    f: KeyedFoldBody[Carry, X], init: Carry, xs: X, length: int | None = None, **options: Unpack[KeyedRows]
) -> Carry: ...
@overload
def accumulate(
    f: KeyedFoldBody[Carry, None], init: Carry, xs: None = None, length: int | None = None, **options: Unpack[KeyedRows]
) -> Carry: ...
@verb
def accumulate(
    f: Callable[..., Any], init: PyTree, xs: PyTree = None, length: int | None = None, **options: Any
) -> Any:
    """Returns the carry after each step of a fold, stacked, like `itertools.accumulate`; without `init` itself.

    Args:
        f: the body, `f(carry, x) -> carry`.
        init: the carry that the first step receives. It must not contain static leaves, which cannot be stacked.
        xs: the inputs: any pytree with leaves `[T, ...]`, or None.
        length: the number of steps T; needed without xs.
        **options: `reverse`, `unroll`, `in_axes`, `out_axes`, `key`, `remat`, `save`, `truncate`, `name`, `progress`,
            `check_finite`, as for `treescan.scan`. `lengths`, int[*batch], as for `treescan.mask_scan`: the padding of
            `xs` `[T, *batch, ...]` is never read, and the carries of padded steps are 0.

    Returns:
        The carries, `[T, ...]`. In reverse, the carry after the step at position t is at t.

    Raises:
        ArgumentError: as `treescan.scan`.
        BodyError: as `treescan.fold`.
        CarryError: as `treescan.scan`.
        NonFiniteError: if `check_finite` finds something.
        SignatureError: as `treescan.scan`.

    Examples:
        >>> import jax.numpy as jnp
        >>> import treescan
        >>> print(
        ...     treescan.accumulate(
        ...         lambda total, x: total + x, 0.0, jnp.array([1.0, 2.0, 3.0])
        ...     )
        ... )
        [1. 3. 6.]
    """
    try:
        check_options(options, _OF_FOLDS, {})
        return run_scan(ACCUMULATE, f, init, xs, length, **options)[1]
    except Exception as error:
        explained = explain(in_own_words(error), "accumulate", f, init)
    raise explained


_NO_AXES = "it scans over indices, not over arrays. `treescan.fold` and `treescan.scan` do."
_TRACED_MOST = (
    "It is part of the compiled program: give an int, the largest number of steps that the loop may take. The "
    "bounds may be traced: the loop ends at `upper`."
)
_FORI_REFUSES = {
    "in_axes": _NO_AXES,
    "out_axes": _NO_AXES,
    "length": "its length is upper - lower, and `max_length` is the limit for traced bounds.",
}
_OF_FORI = frozenset((*ForiOptions.__annotations__, "key"))


@overload
def fori(
    lower: int | Array,
    upper: int | Array,
    f: Callable[[Array, Carry], Carry],
    init: Carry,
    **options: Unpack[RangeOptions],
) -> Carry: ...
@overload
def fori(
    lower: int | Array, upper: int | Array, f: KeyedIndexBody[Carry], init: Carry, **options: Unpack[KeyedRange]
) -> Carry: ...
@verb
def fori(
    lower: int | Array,
    upper: int | Array,
    f: Callable[..., Any],
    init: PyTree,
    *,
    max_length: int | None = None,
    **options: Any,
) -> Any:
    """Runs `carry = f(i, carry)` for i from `lower` up to, not including, `upper`; differentiable both ways.

    Args:
        lower: the first index, an int.
        upper: the index after the last one, an int; at or below `lower`, no step runs.
        f: the body, `f(i, carry) -> carry`, with i an int array of shape [], weakly typed as in `jax.lax.fori_loop`
            unless it starts from a traced bound.
        init: the carry that the first step receives.
        max_length: the most steps that the loop may take; needed if a bound is traced. The loop is then a
            `treescan.while_scan`: it runs only as many steps as there are indices, in the gradient too. A longer range
            is an error if it is known. If it is traced, it is cut to its first `max_length` indices.
        **options: `reverse` (from upper - 1 down to lower), `unroll`, `key`, `remat`, `name`, `progress`,
            `check_finite`, as for `treescan.scan`; a key is folded with i - lower. With a traced bound, `remat` is as
            for `treescan.while_scan`.

    Returns:
        The last step's carry, or `init` if no step runs.

    Raises:
        ArgumentError: as `treescan.scan`; also if the range exceeds `max_length`, or a bound is traced without it.
        BodyError: as `treescan.fold`.
        CarryError: as `treescan.scan`.
        NonFiniteError: if `check_finite` finds something.
        SignatureError: as `treescan.scan`.

    Examples:
        >>> import treescan
        >>> print(treescan.fori(0, 5, lambda i, total: total + i, 0))
        10
    """
    try:
        check_options(options, _OF_FORI, _FORI_REFUSES)
        check_callable(f, FORI.call)
        checks = options.pop("check_finite", False)
        remat, progress = options.pop("remat", None), options.pop("progress", None)
        most = check_length(max_length, "max_length", _TRACED_MOST)
        if most is not None and any(isinstance(bound, Tracer) for bound in (lower, upper)):
            # Here, not above: only loops that end early load what runs them.
            from .._transforms.until.program import Bounds, Until, remat_of

            bounds, plan = Bounds(_check_traced(lower, "lower"), _check_traced(upper, "upper")), remat_of(remat)
            call = prepare(FORI, f, init, length=most, **options)
            shown = refuse_backward(check_progress(progress, call.call.body, "fori"))
            check = call.checking(checks, indexed=True, ends_early=True)
            ended = Until(call.call, check=check, remat=plan, progress=shown).run(call.given, bounds)
            deliver(ended.ys)
            return call.restored((ended.state, None))[0]
        low = check_bound(lower, "lower")
        length = max(check_bound(upper, "upper") - low, 0)
        if most is not None and length > most:
            raise Misuse(
                f"{{verb}} over {{body}}: from `lower` to `upper` there are {length} steps, but `max_length` is "
                f"{most}.",
                "Known bounds need no `max_length`. For traced bounds, give the largest possible number of steps.",
            )
        call = prepare(FORI, f, init, length=length, **options)
        return call.run(Count(low), call.checking(checks, indexed=True), Recompute.of(remat), call.showing(progress))[0]
    except Exception as error:
        explained = explain(in_own_words(error), "fori", f, init)
    raise explained


def _check_traced(bound: Any, name: str) -> ArrayLike:
    """A checked bound, unchanged: a concrete int, or a traced int of shape []."""
    if not isinstance(bound, Tracer):
        return check_bound(bound, name)
    if bound.shape != () or not jnp.issubdtype(bound.dtype, jnp.integer):
        raise Fault(
            ArgumentTypeError,
            f"{{verb}} over {{body}}: `{name}` must be one int, got {describe_traced(bound)}.",
            "Give an int of shape []. For a batch of loops with different lengths, use `jax.vmap`.",
        )
    return bound


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
    f: Callable[[Carry, Any], tuple[Carry, Y]],
    init: Carry,
    xs: tuple[Rows[Any], *tuple[Any, ...]],
    **options: Unpack[MaskOptions],
) -> tuple[Carry, Y]: ...
@verb
def mask_scan(
    f: Callable[..., Any],
    init: PyTree,
    xs: PyTree = None,
    *_more: Any,
    lengths: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    resets: ArrayLike | None = None,
    reset_to: PyTree = None,
    time_axis: int = 0,
    length: int | None = None,
    fill: PyTree = 0,
    carry_axes: Axes = 0,
    x_axes: Axes = 0,
    y_axes: Axes = 0,
    chunk: int | None = None,
    compact: bool | tuple[int, ...] = False,
    **options: Any,
) -> tuple[Any, Any]:
    """Scans a batch of rows of unequal length. Padding is never read, and steps that are only padding are skipped.

    Values and gradients are those of the unpadded rows, each scanned on its own. Gradients with respect to the padding
    are exactly 0. Both hold whatever the padding contains, including NaN and inf, for bodies that treat rows
    independently. A body that reduces over rows must take the keyword `valid` and leave the other rows out. Chunks of
    steps in which no row is valid are skipped, forward, in the gradient, in reverse and under `jax.vmap`. With
    `compact=True`, the other chunks run only the rows that are valid.

    Args:
        f: the body, `f(carry, x) -> (carry, y)`, which runs once per step, on the whole batch. A body with a third
            parameter `valid` receives the step's mask, bool[*batch].
        init: the carry that each row starts from; leaves `[*batch, ...]`. The carry of a row does not change in steps
            that are not valid, and a row of length 0 returns its init.
        xs: the inputs; leaves `[T, *batch, ...]`. None needs `length`. A `treescan.Padded` or a `treescan.Packed`
            contains data together with lengths, or with mask and resets. It may also be a part of a tree,
            `(packed, extra)`: `f` then receives a step of its data in its place. Several of them must have the same
            rows.
        lengths: int[*batch], traced or not: row b is valid in its first `lengths[b]` steps. The shape is the batch
            shape: () for a single row, several axes for nested batches. Concrete lengths must lie between 0 and T;
            traced ones are clamped to that.
        mask: bool[T, *batch], instead of lengths: which steps are valid, in any pattern.
        resets: bool[T, *batch]: True where a segment begins (an episode, or one of several sequences in a row). Before
            that step, `init` is restored and the gradient is cut; in reverse, before the segment's last valid step. If
            `init` is a state that was stored in the middle of an episode, use `reset_to`: otherwise later segments
            start from the stored state too. Flags at steps that are not valid have no effect, and shared leaves are
            never reset. Without lengths and mask, every step is valid: nothing is masked or skipped, and the gradient
            follows `remat="auto"` of `treescan.scan`, or recomputes chunks of `chunk` steps if that is given.
        reset_to: the value that a reset restores instead of `init`: a number, an array for each leaf of init, a prefix
            tree of these (None for the value of `init`), or a function of init that returns one of these. It receives
            the gradient of the steps that follow. A flag at a row's first valid step resets it too. In reverse, a reset
            happens between two segments; the segment that a row runs first, its last in time, starts from `init`. All
            sequences of a `Packed` start from `reset_to`, in both directions. A `Packed` with an `init` for each
            sequence restores those instead, and a row without any sequence returns `init`.
        time_axis: the axis of the steps in xs, ys, `mask` and `resets`: 0, or 1 for data with the batch first.
            `in_axes` and `out_axes`, if given, replace it for xs and ys.
        length: the number of steps T; needed without xs.
        fill: the value of y at padded steps: a number; or "hold", the row's last valid y in the order of the run, and 0
            before there is one; or a prefix tree of y with these.
        carry_axes: the axis where the batch shape starts, for each leaf of the carry (a prefix tree). None: all rows
            share the leaf, and it changes in every step in which any row is valid.
        x_axes: the same for each leaf of one step's x. None: shared by all rows, for example a time index. A leaf with
            None in `in_axes` has rows only if `x_axes` is a tree that says so.
        y_axes: the same for each leaf of one step's y. None: it has no rows, and is `fill` if no row is valid.
        chunk: the number of steps that are skipped together if no row is valid. None: about 16, fewer for short loops.
            0: nothing is skipped, unless no step at all is valid. Results do not depend on it.
        compact: True: in each chunk, the rows that have a valid step are moved to the front, along the first axis of
            the batch, and the body runs on the smallest tier that holds them. The body must not close over arrays that
            have rows (pass them through the carry or xs), and must accept any number of rows. Tiers are 1, 2, 4, ..., B
            rows (at most seven, spaced evenly in ratio from 1 to B); a tuple sets other tiers. The body is traced and
            compiled once per tier. Steps at the end that fill no chunk run on all rows, if they run on any. Results
            return in the order of the rows.
        **options: `reverse`, `unroll`, `in_axes`, `out_axes`, `key`, `remat`, `save`, `truncate`, `name`, `progress`,
            `check_finite`, as for `treescan.scan`. Padding is not checked. Progress counts the steps in which any row
            is valid. In reverse, each row runs from its own last valid step to its first, and ys stay where their xs
            are. `key` excludes `compact`. If chunks are skipped, the gradient saves T/chunk carries and recomputes each
            chunk; the gradient of weights is one product per chunk. It recomputes nothing if the body has effects, or
            if all that it saves is less than about 16 MB and a step is expensive; with a `chunk` that is given, or with
            `compact`, it recomputes in that case too. `remat` saves less within a chunk, with or without effects; steps
            that it recomputes have their own products. With `save="last"`, each row has its own last valid y, and
            `fill` if it has none.

    Returns:
        The carry after each row's last valid step, and the outputs `[T, *batch, ...]`. A scan over a `Packed` returns
        the carry of each sequence instead: leaves `[N, ...]`, with an entry per sequence where init has one per row.
        `save="last"` keeps the last y of each sequence in the same form. A sequence of 0 steps ends with the carry that
        it starts from.

    Raises:
        ArgumentError: as `treescan.scan`; also if none of lengths, mask and resets is given, or lengths and mask both,
            if they do not fit xs, if the batch shape is not where the axes say, if `reset_to` or the inits of a
            `Packed` do not fit init, if y cannot hold `fill`, or if `compact` cannot order the rows (with
            `key`, `chunk=0`, a single row, rows spread over an explicit mesh, a mutable array in the body, or in a
            `jax.shard_map` with `check_vma=False`).
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
        check_positional(_more, "step, init, xs", "lengths")
        check_options(options, _OF_MASK_SCAN, {})
        check_callable(f, MASK_SCAN.call)
        time_axis, axes = check_time_axis(time_axis), row_axes(carry_axes, x_axes, y_axes)
        fill, chunk = check_fill(fill), check_chunk(chunk, compact)
        compact = check_compact(compact, keyed=options.get("key") is not None)
        xs, flags = rows_of(xs, RowFlags(lengths, mask, resets), time_axis, options.get("in_axes"))
        rows = RowPlan(flags, *axes, time_axis, reset_to, fill, chunk, compact)
        options = {"in_axes": time_axis, "out_axes": time_axis, **options}
        return run_scan(MASK_SCAN, f, init, xs, length, rows=rows, **options)
    except Exception as error:
        explained = explain(in_own_words(error), "mask_scan", f, init)
    raise explained


_OF_MASK_SCAN = frozenset(Options.__annotations__) | MaskOptions.__annotations__.keys()
