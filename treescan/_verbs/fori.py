"""`fori`: a loop over a range of indices."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Unpack, overload

import jax.numpy as jnp
from jax.core import Tracer

from .._arguments import check_length, check_options
from .._avals import Array, ArrayLike, PyTree, describe_traced
from .._body.call import check_callable
from .._body.signature import FORI
from .._errors import Misuse, TracedMisuse, expect, expect_int, explain, in_own_words, verb
from .._rows.fill import KeepRows
from .._rows.mask import Mask
from .._transforms.axes import Count
from .._types import Carry, ForiOptions, KeyedIndexBody, KeyedRange, RangeOptions, Returned
from .options import checking, recomputing, showing
from .prepare import prepare, returned

_NO_AXES = "it scans over indices, not over arrays. `treescan.fold` and `treescan.scan` do."
_TRACED_MOST = (
    "It is part of the compiled program: give an int, the largest number of steps that the loop may take. The "
    "bounds may be traced: the loop ends at `upper`."
)
_REFUSES = {
    "in_axes": _NO_AXES,
    "out_axes": _NO_AXES,
    "offset": "its keys count from `lower`. `treescan.fold` with `length` takes it.",
    "length": "its length is upper - lower, and `max_length` is the limit for traced bounds.",
}
_ACCEPTED = frozenset((*ForiOptions.__annotations__, "key"))


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
@overload
def fori(
    lower: Any, upper: Any, f: Callable[..., Any], init: Any, *, check_finite: Returned, **options: Any
) -> Any: ...
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
        **options: `reverse` (from upper - 1 down to lower), `unroll`, `key`, `remat`, `progress`, `check_finite`,
            `options`, as for `treescan.scan`; a key is folded with i - lower. With a traced bound, `remat` is as for
            `treescan.while_scan`.

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
        check_options(options, _ACCEPTED | {"max_length"}, _REFUSES)
        check_callable(f, FORI.call)
        checks = options.pop("check_finite", False)
        remat, progress = options.pop("remat", None), options.pop("progress", None)
        most = check_length(max_length, "max_length", _TRACED_MOST)
        if most is not None and any(isinstance(bound, Tracer) for bound in (lower, upper)):
            # Here, not above: only loops that end early load what runs them.
            from .._remat.remat import Recompute, check_remat
            from .._until.end_early import Bounds, EndEarly, refusing_forward_mode, staging_without_values

            plan = check_remat(remat)
            bounds = Bounds(_check_traced(lower, "lower"), _check_traced(upper, "upper"))
            call = prepare(FORI, f, init, length=most, **options)
            call = dataclasses.replace(call, given=call.given._replace(bounds=bounds))
            with refusing_forward_mode(), staging_without_values():
                result = call.run(
                    EndEarly(),
                    checking(checks, call, ends_early=True),
                    Mask.of(0),
                    KeepRows.of(None, 0),
                    Recompute.of(plan),
                    showing(progress, call),
                )
            return returned(result, 0)
        low = check_bound(lower, "lower")
        length = max(check_bound(upper, "upper") - low, 0)
        if most is not None and length > most:
            raise Misuse(
                f"{{verb}} over {{body}}: from `lower` to `upper` there are {length} steps, but `max_length` is "
                f"{most}.",
                "Known bounds need no `max_length`. For traced bounds, give the largest possible number of steps.",
            )
        call = prepare(FORI, f, init, length=length, **options)
        result = call.run(Count(low), checking(checks, call), recomputing(remat), showing(progress, call))
        return returned(result, 0)
    except Exception as error:
        explained = explain(in_own_words(error), "fori", f, init)
    raise explained


def _check_traced(bound: Any, name: str) -> ArrayLike:
    """A checked bound, unchanged: a concrete int, or a traced int of shape []."""
    if not isinstance(bound, Tracer):
        return check_bound(bound, name)
    batch = "Give an int of shape []. For a batch of loops with different lengths, use `jax.vmap`."
    expect(bound.shape == () and jnp.issubdtype(bound.dtype, jnp.integer), name, "one int", bound, batch)
    return bound


def check_bound(bound: object, name: str) -> int:
    """A concrete int: the end of a range of indices."""
    if isinstance(bound, Tracer):
        raise TracedMisuse(
            f"{{call}}: `{name}` is {describe_traced(bound)}.",
            "Pass `max_length=`, the largest number of steps that the loop may take. It runs only the steps up to "
            "the bound, and is differentiable. Or make the bound a static argument of the function under `jax.jit`.",
        )
    first = "The bounds come first, `treescan.fori(lower, upper, step, init)`, and count whole steps."
    return expect_int(bound, name, first)
