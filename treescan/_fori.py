"""`fori`: a loop over a range of indices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Unpack, overload

from ._arguments import check_bound, check_options
from ._errors import explain, verb
from ._run import run_verb
from ._transforms.body import check_callable
from ._transforms.conventions import FORI
from ._types import Array, Carry, IndexOptions, KeyedIndexBody, PyTree

_NO_AXES = "it scans over indices, not over arrays. `treescan.fold` and `treescan.scan` do."
_REFUSES = {"in_axes": _NO_AXES, "out_axes": _NO_AXES, "length": "its length is upper - lower."}
_ACCEPTED = frozenset((*IndexOptions.__annotations__, "key"))


@overload
def fori(
    lower: int, upper: int, f: Callable[[Array, Carry], Carry], init: Carry, **options: Unpack[IndexOptions]
) -> Carry: ...
@overload
def fori(
    lower: int, upper: int, f: KeyedIndexBody[Carry], init: Carry, *, key: Array, **options: Unpack[IndexOptions]
) -> Carry: ...
@verb
def fori(lower: int, upper: int, f: Callable[..., Any], init: PyTree, **options: Any) -> Any:
    """Runs `carry = f(i, carry)` for i from `lower` up to, not including, `upper`; differentiable both ways.

    Args:
        lower: the first index, a concrete int.
        upper: the index after the last one, a concrete int; at or below `lower`, no step runs.
        f: the body, `f(i, carry) -> carry`, with i an int array of shape [], weakly typed as in `jax.lax.fori_loop`.
        init: the carry that the first step is given.
        **options: `reverse` (from upper - 1 down to lower), `unroll`, `key`, `name`, as for `treescan.scan`; a key is
            folded with i - lower.

    Returns:
        The last step's carry, or `init` if no step runs.

    Raises:
        ArgumentError: as `treescan.scan`; also if a bound is traced, with what to do about it.
        BodyError: as `treescan.fold`.
        CarryError: as `treescan.scan`.
        SignatureError: as `treescan.scan`.

    Examples:
        >>> import treescan
        >>> print(treescan.fori(0, 5, lambda i, total: total + i, 0))
        10
    """
    try:
        check_options(options, _ACCEPTED, _REFUSES)
        check_callable(f, FORI.call)
        low, high = check_bound(lower, "lower"), check_bound(upper, "upper")
        return run_verb(FORI, f, init, length=max(high - low, 0), lower=low, **options)[0]
    except Exception as error:
        explained = explain(error, "fori", f, init)
    raise explained
