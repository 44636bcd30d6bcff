"""`plan_remat` tells what a `Remat` saves and how often it evaluates the body."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from .._body.conventions import (
    FOLD,
    FOLD_LAYERS,
    FOLD_LAYERS_WITH_STATE,
    SCAN,
    SCAN_LAYERS,
    SCAN_LAYERS_WITH_STATE,
)
from .._errors import LAYER_WORDS, STEP_WORDS, ArgumentError, Fault, explain, verb
from .._remat import Remat
from .._trace.hoist import Hoisted, hoist
from .._transforms.auto import AUTO, Auto, fastest
from .._transforms.budget import RematPlan, plan_of
from .._transforms.program import Arguments
from .._transforms.remat import check_remat, check_remat_or_auto
from .._types import Array, PyTree, RematLike
from .prepare import prepare
from .prepare_layers import prepare_layers


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
    layers: PyTree = None,
    args: tuple[Any, ...] = (),
    state: PyTree = None,
) -> RematPlan:
    """Counts the memory of a scan's gradient under a plan, and how often it evaluates the body. Runs nothing.

    Floating-point leaves of xs count as if they were differentiated, as parameters are.

    Args:
        f: the body, as for `treescan.scan`; with `layers` a block or a sequence of blocks, as for
            `treescan.scan_layers`.
        init: the carry of the first step, or the x of the first layer.
        xs: the inputs; leaves `[T, ...]`. Here, in `init` and in `layers`, types (`jax.ShapeDtypeStruct`) are enough.
        length: the number of steps T; needed without xs.
        remat: the plan; `treescan.Remat.fit(bytes)` and "auto" choose one.
        key: as for `treescan.scan`.
        pair: whether the body returns a pair (carry, y); False for one of `treescan.fold`, `treescan.accumulate` and
            `treescan.fold_layers`.
        layers: the stack, `[n, ...]`, or for a sequence of blocks one each, as for `treescan.scan_layers`.
        args: values that all layers share, as for `treescan.scan_layers`.
        state: a state that each layer reads and writes, as for `treescan.scan_layers`. It counts as if it were
            differentiated.

    Returns:
        The plan. Print it, or pass its `remat` to a verb instead of `Remat.fit`. Bytes are those of the types that the
        body sees: under `jax.vmap` those of one element, and with sharded arrays those of all devices together.

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
        >>> h, w = (
        ...     jax.ShapeDtypeStruct((8, 64), jnp.float32),
        ...     jax.ShapeDtypeStruct((1000, 64, 64), jnp.float32),
        ... )
        >>> plan = treescan.plan_remat(
        ...     step, h, w, remat=treescan.Remat.fit(1_000_000)
        ... )
        >>> print(plan.remat.segment, plan.evaluations, plan.needed_bytes)
        8 2 587776
    """
    try:
        if layers is not None:
            own = {"args": args, "key": key, "state": state}
            return _plan_layers(f, init, layers, xs, length, remat=remat, pair=pair, **own)
        if args:
            raise Fault(ArgumentError, "{verb} over {body}: `args` needs `layers`.", "Let the body close over it.")
        if state is not None:
            raise Fault(ArgumentError, "{verb} over {body}: `state` needs `layers`.", "Let the body carry it.")
        call = prepare(SCAN if pair else FOLD, f, init, xs, length, key=key)
        chosen = check_remat_or_auto(remat)
        if not call.call.length:
            return RematPlan(chosen, 0, (), 0, 0, 0, 0, 0, 0)
        return _traced(lambda given: _plan(hoist(call.call.lay(given)), chosen), call.given)
    except Exception as error:
        explained = explain(error, "plan_remat", f, init, STEP_WORDS if layers is None else LAYER_WORDS)
    raise explained


def _plan_layers(
    block: Any, x: PyTree, layers: PyTree, xs: PyTree, length: int | None, *, remat: Any, pair: bool, **options: Any
) -> RematPlan:
    if length is not None:
        raise Fault(
            ArgumentError,
            "{verb} over {body}: `length` cannot be given with `layers`.",
            "Leave it out: the stacks have the number of layers.",
        )
    plan = check_remat(remat)
    pairs, alone = SCAN_LAYERS, FOLD_LAYERS
    if options["state"] is not None:
        pairs, alone = SCAN_LAYERS_WITH_STATE, FOLD_LAYERS_WITH_STATE
    call = prepare_layers(pairs if pair else alone, block, x, layers, xs, remat=plan, **options)
    return _traced(call.pattern.plan, call.given)


def _plan(hoisted: Hoisted, remat: Remat | Auto | None) -> RematPlan:
    return fastest(hoisted) if remat == AUTO else plan_of(hoisted, remat)


def _traced(plan: Callable[[Arguments], RematPlan], given: Arguments) -> RematPlan:
    """Runs on types alone, because the arrays may be only types."""
    found: list[RematPlan] = []

    def look(given: Arguments) -> None:
        found.append(plan(given))

    jax.eval_shape(look, given)
    return found[0]
