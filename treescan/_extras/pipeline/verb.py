"""`pipeline`: the verb."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, overload

import jax

from ..._arguments import check_keywords
from ..._avals import Array, PyTree, as_arrays
from ..._errors import STEP_WORDS, expect, explain, verb
from ..._stacks.layer_axis import freeze_shared
from ..._tree import freeze_static
from ..._types import StackOptions
from ..._verbs.prepare import body_of
from .checks import check_axis, check_places, count_micro_batches, count_of_round
from .order import expect_rounds
from .schedule import Schedule
from .stage import PIPELINE
from .ticks import run_ticks

Params = TypeVar("Params")
X = TypeVar("X")

ELSEWHERE = {
    **dict.fromkeys(StackOptions.__annotations__, "`treescan.fold_layers` takes it, within the stage."),
    "key": "Within the stage, give it to the layers: `fold_layers(..., key=key, offset=first_layer)`.",
    "remat": "The gradient computes each stage again. For each layer of it, too: `fold_layers(..., remat=...)`.",
}
"""What other verbs take; see `named_options`."""
_WORDS = {**STEP_WORDS, "step": "stage", "init": "xs", "unit": "stage", "the_carry": "x", "a_carry": "an x"}


@overload
def pipeline(
    stage: Callable[[Params, X, Array], X], params: Params, xs: X, *, axis_name: str, rounds: int = 1
) -> X: ...
@overload
def pipeline(
    stage: Callable[..., X], params: Any, xs: X, *, axis_name: str, rounds: int = 1, args: tuple[Any, ...]
) -> X: ...
@verb
def pipeline(
    stage: Callable[..., Any],
    params: PyTree,
    xs: PyTree,
    *,
    axis_name: str,
    rounds: int = 1,
    args: tuple[Any, ...] = (),
) -> Any:
    """Runs the layers of a stack on different devices, at the same time, each on another micro-batch.

    It is called in the user's own `jax.shard_map`, whose axis `axis_name` has a device for each stage. Each device
    holds its own layers, and hands what its stage returns on to the next device. The result is that of all layers on
    each micro-batch:

        ys = [fold_layers(block, x, stack) for x in xs]

    Some devices are idle while the first micro-batches arrive and the last ones leave: the *bubble*, `stages - 1` ticks
    of `M * rounds + stages - 1`. Nothing runs there, and all gradients are exactly those of the micro-batches. The
    gradient saves what goes into a stage, and computes the stage again.

    Args:
        stage: `stage(params, x, first_layer, *args) -> x`, usually a `treescan.fold_layers` over `params`. It receives
            the layers of one round, and returns an x of the type that it was given. `first_layer` is the number of the
            first of these layers among all, int32[], for keys: `fold_layers(..., key=key, offset=first_layer)`. The
            stage may communicate over other axes of the mesh, but not with `ppermute`, and must not close over traced
            float arrays that all stages share: `args` are for these.
        params: the layers of this device: any pytree of arrays `[layers of the device, ...]`, in the order of
            `treescan.to_stages`.
        xs: the micro-batches: any pytree of arrays `[M, ...]`, the same on all devices of the axis. What travels with
            a micro-batch through all stages, for example its segments, is a part of it.
        axis_name: the mesh axis of the stages.
        rounds: how often a micro-batch comes past each device, the number that `treescan.to_stages` was given. With
            more than one, the schedule is circular: device s has several parts of the stack, of which stages lie
            between each two. The bubble is then shorter, and devices exchange more. M must be a multiple of the
            stages.
        args: values that all stages share, passed to each call. Arrays can be differentiated.

    Returns:
        What the last layer returns for each micro-batch, `[M, ...]`, on all devices of the axis. Every leaf varies over
        the other axes over which any leaf of xs does.

    Raises:
        ArgumentError: if the axis is not a manual one of a `jax.shard_map`, or if the micro-batches do not fit.
        BodyError: if the stage is not callable, waits for other stages, or closes over arrays that all stages share.
        CarryError: if the stage returns an x of another structure, shape, dtype or sharding than it was given.
        LayerError: if the layers of a device are not a multiple of the rounds.
        SignatureError: if a jaxtyping annotation of the stage does not hold.

    Examples:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import treescan
        >>> from jax.sharding import AxisType, PartitionSpec as P
        >>> def stage(params, x, first_layer):
        ...     return treescan.fold_layers(lambda w, x: x * w, x, params)
        >>> def of_device(params, xs):
        ...     return treescan.pipeline(stage, params, xs, axis_name="stage")
        >>> mesh = jax.make_mesh((1,), ("stage",), axis_types=(AxisType.Auto,))
        >>> run = jax.shard_map(
        ...     of_device, mesh=mesh, in_specs=(P("stage"), P()), out_specs=P()
        ... )
        >>> print(jax.jit(run)(jnp.array([2.0, 3.0]), jnp.ones(4)))
        [6. 6. 6. 6.]
    """
    try:
        expect(isinstance(args, tuple), "args", "a tuple", args, "It holds the arguments behind `first_layer`.")
        (body, _), axis, rounds = body_of(stage, PIPELINE), check_axis(axis_name), expect_rounds(rounds)
        takes = (*PIPELINE.takes, *(f"arg_{i}" for i in range(len(args))))
        check_keywords(body, {}, PIPELINE, takes, ELSEWHERE)
        params, args = as_arrays(freeze_shared(params)), freeze_static(args, scalars=True)
        xs, stages = as_arrays(xs), jax.lax.axis_size(axis)
        check_places(params, xs, axis)
        schedule = Schedule(stages, rounds, count_micro_batches(xs, stages, rounds))
        return run_ticks(body, schedule, count_of_round(params, rounds), params, xs, args, axis)
    except Exception as error:
        explained = explain(error, "pipeline", stage, words=_WORDS)
    raise explained
