"""`plan_remat` tells what a `Remat` saves and how often it evaluates the body."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from .._body.conventions import FOLD, SCAN
from .._errors import explain, verb
from .._remat import Remat
from .._trace.hoist import Hoisted, hoist
from .._transforms.auto import AUTO, Auto, fastest
from .._transforms.budget import RematPlan, plan_of
from .._transforms.program import Arguments
from .._transforms.remat import check_remat_or_auto
from .._types import Array, PyTree, RematLike
from .prepare import prepare


@verb
def plan_remat(
    f: Callable[..., Any],
    init: PyTree,
    xs: PyTree = None,
    length: int | None = None,
    *,
    remat: RematLike | None,
    key: Array | None = None,
    pair: bool = True,
) -> RematPlan:
    """What the gradient of a scan would save under a plan, and how often it would evaluate the body. Nothing is run.

    Args:
        f: the body, as for `treescan.scan`.
        init: the carry that the first step is given.
        xs: what is scanned over; leaves `[T, ...]`. Types with shapes (`jax.ShapeDtypeStruct`) will do, here and in
            `init`.
        length: the number of steps T; needed without xs.
        remat: the plan; `treescan.Remat.fit(bytes)` and "auto" have one chosen.
        key: as for `treescan.scan`.
        pair: whether the body returns a pair (carry, y); False for one of `treescan.fold` and `treescan.accumulate`.

    Returns:
        The plan, to be printed; its `remat` may be passed on in place of `Remat.fit`. Bytes are those of the types
        that the body sees: under `jax.vmap` of one element, and of all devices together.

    Raises:
        ArgumentError: if no plan fits the budget, and as `treescan.scan`.
        BodyError: as `treescan.scan`.
        CarryError: as `treescan.scan`.
        SignatureError: as `treescan.scan`.

    Examples:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import treescan
        >>> def step(h, w):
        ...     return jnp.sin(h @ w), None
        >>> h, w = jax.ShapeDtypeStruct((8, 64), jnp.float32), jax.ShapeDtypeStruct((1000, 64, 64), jnp.float32)
        >>> plan = treescan.plan_remat(step, h, w, remat=treescan.Remat.fit(250_000))
        >>> print(plan.remat, plan.evaluations, plan.saved_bytes)
        Remat(policy="everything_saveable", levels=2, segment=20) 2 184320
    """
    try:
        call = prepare(SCAN if pair else FOLD, f, init, xs, length, key=key)
        chosen = check_remat_or_auto(remat)
        if not call.call.length:
            return RematPlan(chosen, 0, (), 0, 0, 0, 0)
        return _traced(lambda given: _plan(hoist(call.call.lay(given)), chosen), call.given)
    except Exception as error:
        explained = explain(error, "plan_remat", f, init)
    raise explained


def _plan(hoisted: Hoisted, remat: Remat | Auto | None) -> RematPlan:
    return fastest(hoisted) if remat == AUTO else plan_of(hoisted, remat)


def _traced(plan: Callable[[Arguments], RematPlan], given: Arguments) -> RematPlan:
    """What is found out from types alone, where the arrays may be nothing but these."""
    found: list[RematPlan] = []

    def look(given: Arguments) -> None:
        found.append(plan(given))

    jax.eval_shape(look, given)
    return found[0]
