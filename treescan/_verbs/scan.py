"""`scan`, `fold` and `accumulate`: the verbs over steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Unpack, overload

from .._arguments import check_options
from .._avals import Array, ArrayLike, PyTree
from .._body.signature import ACCUMULATE, FOLD, SCAN
from .._errors import RAGGED_WORDS, explain, in_own_words, verb
from .._loop.replaced import is_replaced_call, own_scan
from .._types import (
    Axes,
    Carry,
    FoldBody,
    KeyedBody,
    KeyedFold,
    KeyedFoldBody,
    KeyedRows,
    KeyedScan,
    Options,
    ProgressLike,
    RaggedFold,
    RaggedOptions,
    RematLike,
    Returned,
    Save,
    ScanOptions,
    X,
    Y,
)
from .prepare import returned, run_scan

if TYPE_CHECKING:
    from ..options import Option

ACCEPTED = frozenset(Options.__annotations__) | {"length"}
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
@overload
def scan(
    f: Callable[..., Any],
    init: Any,
    xs: Any = None,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    *,
    check_finite: Returned,
    **options: Any,
) -> Any: ...
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
    offset: ArrayLike | None = None,
    remat: RematLike | None = None,
    save: Save = "all",
    truncate: int | None = None,
    progress: ProgressLike = None,
    check_finite: bool | Returned = False,
    options: Sequence[Option] = (),
    **unknown: Any,
) -> Any:
    """Scans a function over the steps of `xs`, carrying state from step to step.

    A drop-in replacement for `jax.lax.scan`. The first seven parameters are the same, and without further options both
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
        offset: the position of the first step, where the loop is a part of a longer run: an int of at least 0, or an
            int array of shape [], traced or not; a traced one below 0 counts as 0. Keys, `truncate`, `save=k`, the
            `lengths` of rows and the steps that `check_finite` names then count from the first step of the run. So
            parts that are run in turn, in reverse the last one first, compute what one loop computes. `save="last"` and
            the bar of `progress` are those of the part. `save=k` needs a multiple of k, which a traced `offset` must be
            too, unchecked. `truncate` cannot be combined with `reverse`.
        remat: what the gradient recomputes instead of saving it. None: nothing. "auto": the plan that is expected to be
            the fastest, which may be nothing. "step": each step, of which only the carry is saved. "nested": chunks of
            about sqrt(T) steps, and each step within them; about 2 sqrt(T) carries are saved, and each step is
            evaluated three times, the forward pass included. A `treescan.Remat` sets what a step saves, the number of
            levels, a budget in bytes, or another memory for carries.
        save: which ys to keep (a prefix tree of y). "all" keeps every y. "last" keeps the y of the last step that runs,
            without an axis of steps; it is 0 if there is no step. A number k keeps every k-th y, at the positions k-1,
            2k-1 and so on, also in reverse. A `range` or a NumPy array, `np.array([4, 9, 99])`, keeps y at these
            positions, `[K, ...]`; the steps between compute it too. None keeps nothing. Work that only an output needs
            which k, "last" or None drops is skipped.
        truncate: the gradient of the carry is cut at the positions that are multiples of this number, also in reverse:
            truncated backpropagation through time. Leaves of the carry that no step changes, for example weights, are
            constants of the loop, and are not cut.
        progress: show the progress of the loop: True, a label for the bar, or a `treescan.meters.Progress`. The loop is
            cut into at most 100 chunks, and reports after a chunk, five times a second at most. No step has a branch,
            and the gradient reports nothing. Under `jax.vmap` there is one bar for all elements.
        check_finite: check the carry after each step. If a leaf becomes NaN or infinite, a `NonFiniteError` names the
            leaf, the first step where it happened, the rows and the operation. `treescan.last_nonfinite()` returns the
            carry and x of that step. Where values are traced, it is JAX's runtime error with this text. An
            infinity that the carry had before the step is allowed. "return" raises nothing. It returns a
            `treescan.types.FiniteReport` behind the other results, without a callback.
        options: options of your own, each a `treescan.options.Option`.

    Returns:
        The carry of the last step, and ys, the outputs of all steps, stacked to `[T, ...]`. With
        `check_finite="return"` a third item, the report.

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
        check_options(unknown, ACCEPTED, {})
        if is_replaced_call():  # of a loop that is lowered already: options are for those of the user's
            return own_scan(f, init, xs, length, reverse, unroll)
        lowering = (("_split_transpose", True),) if _split_transpose else ()
        result = run_scan(
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
            offset=offset,
            remat=remat,
            save=save,
            truncate=truncate,
            progress=progress,
            check_finite=check_finite,
            options=options,
            lowering=lowering,
        )
        return returned(result)
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
@overload
def fold(
    f: Callable[..., Any],
    init: Any,
    xs: Any = None,
    length: int | None = None,
    *,
    check_finite: Returned,
    **options: Any,
) -> Any: ...
@verb
def fold(f: Callable[..., Any], init: PyTree, xs: PyTree = None, length: int | None = None, **options: Any) -> Any:
    """Folds `xs` into one value: a scan whose body returns only the carry.

    Args:
        f: the body, `f(carry, x) -> carry`.
        init: the carry that the first step receives.
        xs: the inputs: any pytree with leaves `[T, ...]`, or None.
        length: the number of steps T; needed without xs.
        **options: `reverse`, `unroll`, `in_axes`, `key`, `offset`, `remat`, `truncate`, `progress`,
            `check_finite`, `options`, as for `treescan.scan`; and `lengths`, int[*batch], as for `treescan.mask_scan`:
            row b of `xs` `[T, *batch, ...]` is folded over its first `lengths[b]` steps, and its padding has no effect.

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
        return returned(run_scan(FOLD, f, init, xs, length, **options), 0)
    except Exception as error:
        explained = explain(in_own_words(error), "fold", f, init, RAGGED_WORDS)
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
@overload
def accumulate(
    f: Callable[..., Any],
    init: Any,
    xs: Any = None,
    length: int | None = None,
    *,
    check_finite: Returned,
    **options: Any,
) -> Any: ...
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
        **options: `reverse`, `unroll`, `in_axes`, `out_axes`, `key`, `offset`, `remat`, `save`, `truncate`,
            `progress`, `check_finite`, `options`, as for `treescan.scan`. `lengths`, int[*batch], as for
            `treescan.mask_scan`: the padding of `xs` `[T, *batch, ...]` has no effect, and the carries of padded steps
            are 0.

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
        return returned(run_scan(ACCUMULATE, f, init, xs, length, **options), 1)
    except Exception as error:
        explained = explain(in_own_words(error), "accumulate", f, init, RAGGED_WORDS)
    raise explained
