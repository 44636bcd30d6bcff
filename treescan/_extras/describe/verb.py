"""`describe` shows what a call would do, `plan_remat` what plans of memory cost, and `measure_remat` measures them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from ..._arguments import OF_MASK_SCAN, check_options
from ..._avals import Array, ArrayLike, PyTree, bytes_of, describe_argument
from ..._body.signature import FOLD, FOLD_LAYERS, SCAN, SCAN_LAYERS
from ..._errors import (
    LAYER_WORDS,
    MASK_WORDS,
    RAGGED_WORDS,
    STEP_WORDS,
    WHILE_WORDS,
    Misuse,
    TypeMisuse,
    describe_body,
    expect,
    explain,
    verb as public,
)
from ..._options.progress.meters import Progress
from ..._options.progress.show import check_progress
from ..._program.program import Taken, take
from ..._remat.budget import RematPlan, plan_of
from ..._remat.remat import AUTO, check_remat, check_remat_or_auto, fastest
from ..._trace.hoist import hoist
from ..._trace.smooth import is_smooth
from ..._transforms.call import Arguments
from ..._types import ProgressLike, Remat, RematLike
from ..._verbs.fori import fori
from ..._verbs.layers import fold_layers, scan_layers
from ..._verbs.mask_scan import mask_scan
from ..._verbs.prepare import prepare
from ..._verbs.prepare_layers import PreparedLayers, prepare_layers
from ..._verbs.progress import silent
from ..._verbs.scan import ACCEPTED, accumulate, fold, scan
from ..._verbs.while_scan import while_scan
from .description import Description
from .measured import OF_MEASURE, PLANS, Measurements, measure
from .plans import of_types


@public
def plan_remat(
    f: Callable[..., Any],
    init: PyTree,
    xs: PyTree = None,
    length: int | None = None,
    *,
    remat: RematLike | None,
    key: Array | None = None,
    offset: ArrayLike | None = None,
    pair: bool = True,
    layers: PyTree = None,
    args: tuple[Any, ...] = (),
    state: PyTree = None,
    **unknown: Any,
) -> RematPlan:
    """Estimates the memory of a scan's gradient under a plan, and how often it evaluates the body. Runs nothing.

    All that is floating-point counts as if it were differentiated: the carry, xs, and what the body closes over. For a
    call with more options, `save` for example, `treescan.describe` makes the same estimate.

    Args:
        f: the body, as for `treescan.scan`; with `layers` a block or a sequence of blocks, as for
            `treescan.scan_layers`.
        init: the carry of the first step, or the x of the first layer.
        xs: the inputs; leaves `[T, ...]`. Here, in `init` and in `layers`, types (`jax.ShapeDtypeStruct`) are enough.
        length: the number of steps T; needed without xs.
        remat: the plan; `treescan.Remat.fit(bytes)` and "auto" choose one.
        key: as for `treescan.scan`.
        offset: as for `treescan.scan`.
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
        >>> print(plan.remat.chunk, plan.evaluations, plan.needed_bytes)
        8 2 587776
    """
    try:
        check_options(unknown, _OF_PLANS, dict.fromkeys((ACCEPTED | OF_MASK_SCAN) - _OF_PLANS, _ALL_OPTIONS))
        expect(isinstance(pair, bool), "pair", "True or False", pair, "It says whether the body returns a pair.")
        if layers is not None:
            if length is not None:
                cure = "Leave it out: the stacks have the number of layers."
                raise Misuse("{call}: `length` cannot be given with `layers`.", cure)
            kind = SCAN_LAYERS if pair else FOLD_LAYERS
            blocks = prepare_layers(kind, f, init, layers, xs, args, key=key, offset=offset, state=state)
            with silent():
                return of_types(functools.partial(_plan_of_layers, blocks, check_remat(remat)), blocks.prepared.given)
        if args:
            raise Misuse("{call}: `args` needs `layers`.", "Let the body close over it.")
        if state is not None:
            raise Misuse("{call}: `state` needs `layers`.", "Let the body carry it.")
        call = prepare(SCAN if pair else FOLD, f, init, xs, length, key=key, offset=offset)
        chosen = check_remat_or_auto(remat)
        if not call.call.length:
            return RematPlan(chosen, 0, (), 0, 0, 0, 0, 0, 0)

        def plan(given: Arguments) -> RematPlan:
            loop = hoist(call.call.lay(given))
            picked = fastest(loop) if chosen == AUTO else chosen
            found = plan_of(loop, None if picked == AUTO else picked)
            return dataclasses.replace(found, remat=AUTO) if picked == AUTO else found

        with silent():
            return of_types(plan, call.given)
    except Exception as error:
        explained = explain(error, "plan_remat", f, init, STEP_WORDS if layers is None else LAYER_WORDS)
    raise explained


_OF_PLANS = frozenset({"key", "offset", "remat", "pair", "layers", "args", "state"})
_ALL_OPTIONS = (
    "it plans a loop of these arguments alone. `treescan.describe(treescan.scan, f, init, xs, remat=..., save=...)` "
    "takes all options of a call, and its `plan` has the same estimate."
)


def _plan_of_layers(blocks: PreparedLayers, remat: Remat | None, given: Arguments) -> RematPlan:
    """What the gradient needs under this `remat`, and a plan where that is a budget."""
    call, over_axes = blocks.prepared.call, blocks.prepared.over_axes
    loop = call.lay(given)
    plan = plan_of(hoist(loop if over_axes is None else over_axes(loop)), remat)
    if remat is not None or not blocks.caches:
        return plan
    caches = [own[-1] for own in (given.xs if call.others else (given.xs,))]
    carried = [jax.typeof(leaf) for leaf in jax.tree.leaves(caches) if is_smooth(leaf)]
    return dataclasses.replace(plan, needed_bytes=plan.needed_bytes + sum(map(bytes_of, carried)))  # their gradient


_VERBS: dict[Callable[..., object], tuple[Mapping[str, str], int]] = {
    scan: (STEP_WORDS, 0),
    fold: (RAGGED_WORDS, 0),
    accumulate: (RAGGED_WORDS, 0),
    fori: (STEP_WORDS, 2),
    mask_scan: (MASK_WORDS, 0),
    while_scan: (WHILE_WORDS, 1),
    scan_layers: (LAYER_WORDS, 0),
    fold_layers: (LAYER_WORDS, 0),
}
"""For each verb the words of its messages, and the place of its body among its arguments; the init comes next."""


@public
def describe(verb: Callable[..., Any], /, *args: Any, **options: Any) -> Description:
    """Shows what a call of a verb would do, from its arguments. The body is traced, and nothing is run.

    Args:
        verb: one of `treescan.scan`, `fold`, `accumulate`, `fori`, `mask_scan`, `while_scan`, `scan_layers` and
            `fold_layers`.
        *args: what the verb would be called with. Types with shapes (`jax.ShapeDtypeStruct`) will do for arrays in
            `init`, `xs` and `layers`.
        **options: its options.

    Returns:
        The description, to be printed: the leaves of the carry, of x, of y and what the body closes over; what each
        step saves for the gradient, line by line; what the gradient needs, under the call's own `remat` and under
        others; and findings, which may be mistakes that no error shows: random numbers that are the same in every step,
        and an x that the body ignores.

    Raises:
        ArgumentError: if it is none of these verbs, if the number of steps is symbolic, and as the verb itself.
        BodyError: as the verb itself.
        CarryError: as the verb itself.
        LayerError: as the verb itself.
        SignatureError: as the verb itself.

    Examples:
        >>> import jax.numpy as jnp
        >>> import treescan
        >>> def step(h, x):
        ...     return jnp.tanh(h + x), None
        >>> description = treescan.describe(
        ...     treescan.scan, step, jnp.zeros((8, 64)), jnp.ones((1000, 8, 64))
        ... )
        >>> print(description.carry[0].type, description.plan.evaluations)
        float32[8,64] 1
    """
    try:
        from .findings import gather  # here, not above: only a description needs it

        call = _taking("describe", verb, args, options)
        with silent(), jax.disable_jit(False):
            return gather(verb.__name__, _VERBS[verb][0]["unit"], call(), options.get("remat"), call)
    except Exception as error:
        explained = _explained(error, verb, args, options)
    raise explained


@public
def measure_remat(
    verb: Callable[..., Any],
    /,
    *args: Any,
    plans: Sequence[RematLike | None] | None = None,
    seconds: float = 60.0,
    progress: ProgressLike = True,
    **options: Any,
) -> Measurements:
    """Measures the gradient of a call of a verb under several plans: its time and its memory, on this device.

    The gradient is that of the sum of the squares of all results, with respect to all floating-point arrays that the
    call reads, those that the body closes over included. It is compiled for each plan. Then the plans take turns, so
    that other work on the machine slows all of them. Plans that make the same program are measured once.

    Args:
        verb: one of `treescan.scan`, `fold`, `accumulate`, `fori`, `mask_scan`, `while_scan`, `scan_layers` and
            `fold_layers`.
        *args: what the verb would be called with; arrays, not types.
        plans: the values of `remat` to measure. None: None, "auto", "step", "nested", `Remat(levels=3)` and
            `Remat("everything_saveable", levels=2)`.
        seconds: how long it may take. A gradient that is being compiled is compiled to the end, and each that was
            compiled is measured once at least.
        progress: a bar of the plans that are compiled: True, a label, a `treescan.meters.Progress` with a label and a
            meter, or False for none.
        **options: the other options of the verb.

    Returns:
        The measurements, to be printed. `best` is the fastest plan, `within(bytes)` the fastest that needs at most so
        many bytes. Write it into the call as `remat=`.

    Raises:
        ArgumentError: if it is none of these verbs, if arrays are only types or traced, and as the verb itself.
        ArgumentTypeError: as the verb itself.
        BodyError: as the verb itself.
        CarryError: as the verb itself.
        LayerError: as the verb itself.
        SignatureError: as the verb itself.

    Examples:
        >>> import jax.numpy as jnp
        >>> import treescan
        >>> def step(h, x):
        ...     return jnp.tanh(h + x), None
        >>> measured = treescan.measure_remat(
        ...     treescan.scan,
        ...     step,
        ...     jnp.zeros((8, 64)),
        ...     jnp.ones((100, 8, 64)),
        ...     plans=[None, "nested"],
        ...     progress=False,
        ... )
        >>> print([plan.bytes > 0 for plan in measured.plans])
        [True, True]
    """
    try:
        call = _taking("measure_remat", verb, args, options)
        if "remat" in options:
            cure = "`plans=[...]` lists the values of `remat` to measure."
            raise Misuse(OF_MEASURE + " `remat` cannot be given.", cure)
        chosen, taken = _check_plans(plans), call(None)
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds > 0:
            got = f"must be a positive number, got {describe_argument(seconds)}."
            raise TypeMisuse(f"{OF_MEASURE} `seconds` {got}", "`seconds=60` is a minute.")
        body = taken.program.call.body
        shown = check_progress(progress, body, "measure_remat")
        _refuse_details(shown)
        with silent(), jax.disable_jit(False):
            named = f"`{verb.__name__}` over {describe_body(body.function)}"
            return measure(named, call, lambda e: _explained(e, verb, args, options), chosen, seconds, shown)
    except Exception as error:
        explained = _explained(error, verb, args, options)
    raise explained


def _named(verb: object) -> str:
    """A function by its name and package: JAX has a `scan` too."""
    package = callable(verb) and str(getattr(verb, "__module__", "")).partition(".")[0]
    return describe_argument(verb) + (f" of `{package}`" if package else "")


def _taking(
    own: str, verb: Callable[..., object], args: tuple[Any, ...], options: dict[str, Any]
) -> Callable[..., Taken]:
    """What takes a call from its verb: as it was given, or with another `remat`."""
    if not any(verb is other for other in _VERBS):
        named = ", ".join(f"`{other.__name__}`" for other in _VERBS)
        raise Misuse(
            f"the first argument of `{own}` must be one of {named}, got {_named(verb)}.",
            f"Pass the verb, and then the arguments of its call: `treescan.{own}(treescan.scan, step, init, xs)`.",
        )

    def taken(*remat: RematLike | None) -> Taken:
        with silent():
            return take(verb, *args, **(options | ({"remat": remat[0]} if remat else {})))

    return taken


def _explained(error: Exception, verb: object, args: tuple[Any, ...], options: dict[str, Any]) -> Exception:
    """An error of a call that was taken from its verb, in the words of that verb."""
    words, place = next((known for other, known in _VERBS.items() if other is verb), (STEP_WORDS, 0))
    body, init = (
        args[place + i] if place + i < len(args) else next((options[name] for name in own if name in options), None)
        for i, own in enumerate((("f", "block"), ("init", "x")))
    )
    return explain(error, getattr(verb, "__name__", "describe"), body, init, words)


def _refuse_details(progress: Progress | None) -> None:
    """Refuses what a `Progress` says of the steps of a loop."""
    names = [] if progress is None else [n for n in ("show", "updates") if getattr(progress, n)]
    if names:
        given = " and ".join(f"`{name}`" for name in names)
        raise Misuse(
            f"{OF_MEASURE} its bar counts plans, so {given} of a `Progress` would have no effect.",
            "Give a label, or a `Progress` with a label and a meter.",
        )


def _check_plans(plans: Sequence[RematLike | None] | None) -> tuple[RematLike | None, ...]:
    """The plans, as a tuple."""
    if plans is None:
        return PLANS
    if isinstance(plans, str) or not isinstance(plans, Sequence) or not plans:
        raise TypeMisuse(
            f"{OF_MEASURE} `plans` must be a sequence of values for `remat`, got {describe_argument(plans)}.",
            '`plans=[None, "nested", treescan.Remat(levels=3)]`.',
        )
    for remat in plans:
        check_remat_or_auto(remat)
    return tuple(plans)
