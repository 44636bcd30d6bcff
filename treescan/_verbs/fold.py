"""`fold` and `accumulate`: scans whose body returns only the carry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Unpack, overload

from .._body.conventions import ACCUMULATE, FOLD
from .._checks.arguments import check_options
from .._errors import explain, verb
from .._types import Array, Carry, KeyedFoldBody, Options, PyTree, RaggedFoldOptions, RaggedOptions, X
from .run import run_scan

_NO_OUTPUTS = "it stacks no outputs. `treescan.accumulate` and `treescan.scan` do."
_FOLD_REFUSES = {"out_axes": _NO_OUTPUTS, "save": _NO_OUTPUTS}
_ACCEPTED = frozenset((*Options.__annotations__, "lengths"))


@overload
def fold(
    f: Callable[[Carry, X], Carry], init: Carry, xs: X, length: int | None = None, **options: Unpack[RaggedFoldOptions]
) -> Carry: ...
@overload
def fold(
    f: Callable[[Carry, None], Carry],
    init: Carry,
    xs: None = None,
    length: int | None = None,
    **options: Unpack[RaggedFoldOptions],
) -> Carry: ...
@overload
def fold(
    f: KeyedFoldBody[Carry, X],
    init: Carry,
    xs: X,
    length: int | None = None,
    *,
    key: Array,
    **options: Unpack[RaggedFoldOptions],
) -> Carry: ...
@overload
def fold(
    f: KeyedFoldBody[Carry, None],
    init: Carry,
    xs: None = None,
    length: int | None = None,
    *,
    key: Array,
    **options: Unpack[RaggedFoldOptions],
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
        check_options(options, _ACCEPTED - _FOLD_REFUSES.keys(), _FOLD_REFUSES)
        return run_scan(FOLD, f, init, xs, length, **options)[0]
    except Exception as error:
        explained = explain(error, "fold", f, init)
    raise explained


@overload
def accumulate(
    f: Callable[[Carry, X], Carry], init: Carry, xs: X, length: int | None = None, **options: Unpack[RaggedOptions]
) -> Carry: ...
@overload
def accumulate(
    f: Callable[[Carry, None], Carry],
    init: Carry,
    xs: None = None,
    length: int | None = None,
    **options: Unpack[RaggedOptions],
) -> Carry: ...
@overload
def accumulate(
    f: KeyedFoldBody[Carry, X],
    init: Carry,
    xs: X,
    length: int | None = None,
    *,
    key: Array,
    **options: Unpack[RaggedOptions],
) -> Carry: ...
@overload
def accumulate(
    f: KeyedFoldBody[Carry, None],
    init: Carry,
    xs: None = None,
    length: int | None = None,
    *,
    key: Array,
    **options: Unpack[RaggedOptions],
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
        check_options(options, _ACCEPTED, {})
        return run_scan(ACCUMULATE, f, init, xs, length, **options)[1]
    except Exception as error:
        explained = explain(error, "accumulate", f, init)
    raise explained
