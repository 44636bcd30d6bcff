"""A stage as one trace, which all ticks run: what may be in it, and how a tick runs it or does nothing."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer, eval_jaxpr

from ..._avals import Array, PyTree, describe_leaf, devices_of, vary_over, varying_axes
from ..._body.call import call_body, carry_name
from ..._body.carry import check_carry, copied
from ..._body.closure import named_constants
from ..._body.signature import Convention, annotated
from ..._errors import BodyFault, Fault, Row
from ..._loop.loop import Body
from ..._remat.checkpoint import checkpoint, is_remat3
from ..._trace.equations import equations_within
from ..._trace.raw_keys import as_numbers, impls_of, keys_of
from ..._trace.smooth import is_smooth, smooth_part
from ..._trace.steps import array_of
from ..._trace.ties import tie
from ..._tree import thaw_static

PIPELINE = Convention(
    "pipeline",
    "pipeline(stage, params, xs, axis_name=axis_name)",
    ("params", "x", "first_layer"),
    place=1,
    spread=True,
    other="",
    further="Pass what all stages share as `args=(...)`, and what travels with a micro-batch as a part of `xs`",
)
Run = Callable[..., PyTree]
"""From (params of a round, x, args, the number of the first layer) to the next x."""

_COMMUNICATES = re.compile(
    r"(all_gather|all_to_all|pbroadcast|pgather|pmax|pmin|ppermute|psend|precv|psum|ragged_all|reduce_scatter|unreduced_).*"
)
"""The names of primitives that exchange anything, in any release of JAX."""
_SENDS = ("ppermute", "psend", "precv")
"""Of these, the ones from device to device. All devices of the mesh meet in each, whichever axis it names."""


def trace_stage(body: Body, given: tuple[Any, ...], axis: str) -> Run:
    """A stage, traced once for values of the types that each tick gives it.

    Raises:
        Fault: if x comes back in another type, or if devices of different stages would wait for each other.
    """
    called = _Flat(body)
    jaxpr = jax.make_jaxpr(called)(*given)
    _refuse_communication(jaxpr, axis)
    if called.fault is not None:
        raise called.fault
    _refuse_shared(body, jaxpr, axis)
    structure, kinds, closed = jax.tree.structure(given[1]), impls_of(jaxpr.consts), as_numbers(jaxpr.consts)

    def run(*given: Any) -> PyTree:
        consts = keys_of(closed, kinds)
        out = eval_jaxpr(jaxpr.jaxpr, consts, *jax.tree.leaves(given), propagate_source_info=True)
        return jax.tree.unflatten(structure, map(array_of, out, jaxpr.out_avals))

    return run


class _Flat:
    """The call of a stage, the next x as a list. It looks like the stage to JAX, whose messages then name that.

    Attributes:
        fault: what is wrong with the next x. It may be so because the stage communicates, so that is said first.
    """

    fault: Fault | None = None

    def __init__(self, body: Body) -> None:
        self.body, self.__wrapped__ = body, body.function

    def __call__(self, params: PyTree, x: PyTree, args: tuple[PyTree, ...], first_layer: Array) -> list[Any]:
        name = carry_name(self.body, PIPELINE)
        params, args = thaw_static(params), thaw_static(args)
        with annotated(self.body) as scope:
            arguments = (params, copied(x), first_layer, *args)
            if scope:
                scope.check_inputs(arguments)
            out = call_body(self.body, PIPELINE, arguments, {})
            try:
                check_carry(PIPELINE, name, x, out, None, out)
            except Fault as fault:
                self.fault = fault
                return [leaf for leaf in jax.tree.leaves(out) if isinstance(leaf, jax.Array)]
            if scope:
                scope.check_outputs(out, f"returned {name}")
        return jax.tree.leaves(out)


def _refuse_communication(jaxpr: Any, axis: str) -> None:
    """Refuses a stage that waits for devices of other stages, which are idle then, or have other micro-batches."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    for equation in equations_within(jaxpr.jaxpr):
        named = equation.params.get("axes", equation.params.get("axis_name"))
        axes = named if isinstance(named, tuple) else (named,)
        sends = any(getattr(var.aval, "size", 1) for var in equation.invars)  # a tie of ours has no entries
        name = equation.primitive.name.removesuffix("_invariant")
        if not sends or not _COMMUNICATES.fullmatch(name):
            continue
        if axis in axes:
            raise BodyFault(
                f"{{body}} waits for other stages: `{name}` communicates over {axis!r}, the axis of the pipeline. "
                "Other stages are idle at that time, or have another micro-batch.",
                "Communicate over other axes of the mesh within a stage, and over this one before or after the "
                "pipeline.",
                *[
                    "`mask_scan` and `while_scan` ask all devices on which their lengths or conditions vary. In a "
                    "stage, call `treescan.scan` and select what is valid in the step."
                ]
                * (name in ("pmax", "pmin")),
            )
        if name in _SENDS and (others := [other for other in axes if other in manual]):
            raise BodyFault(
                f"{{body}} waits for other stages: `{name}` over {others[0]!r} is a step that all devices of the mesh "
                "take together. Other stages are idle at that time.",
                f"`jax.lax.all_gather(x, {others[0]!r})[i]` is what device i has, and waits for the devices along "
                "this axis alone.",
            )


def _refuse_shared(body: Body, jaxpr: Any, axis: str) -> None:
    """Refuses floats that a stage closes over and all stages share.

    The types ask for the sum of their cotangents over the stages where each is used: within a branch that idle devices
    do not take. What a stage is given varies over the stages before the loop, so that this is summed once.
    """
    if axis not in varying_axes(jax.typeof(jax.lax.axis_index(axis))):
        return  # types do not say what varies
    bad = [
        value
        for value in jaxpr.consts
        if isinstance(value, Tracer) and is_smooth(value) and axis not in varying_axes(jax.typeof(value))
    ]
    if not bad:
        return
    raise BodyFault(
        "{body} closes over arrays that all stages share. Their gradients would be summed over the stages within each "
        "stage, where devices that are idle do not answer.",
        "Pass them to it: `pipeline(..., args=(a,))` calls `{step}(params, x, first_layer, a)`. They may have "
        "gradients, which are summed once.",
        header=("closed over", "", "is"),
        rows=[
            Row(name, "", describe_leaf(value))
            for name, value in zip(named_constants(body.function, bad), bad, strict=True)
        ],
    )


def run_or_idle(run: Run, runs: Array, layers: PyTree, x: PyTree, args: PyTree, first_layer: Array) -> PyTree:
    """The next x: what `run` returns, or x itself where nothing runs.

    Nothing runs in the bubble, so that nothing of it reaches a gradient: not even the NaN of a norm of zeros.
    """

    def running(layers: PyTree, x: PyTree, args: PyTree, first_layer: Array) -> PyTree:
        again = checkpoint(run, prevent_cse=devices_of((layers, x)) > 1)
        return again(layers, _reading(x, (layers, args)), args, first_layer)

    def idle(layers: PyTree, x: PyTree, args: PyTree, first_layer: Array) -> PyTree:
        del first_layer
        return _reading(x, (layers, args))

    return jax.lax.cond(runs, running, idle, layers, x, args, first_layer)


def _reading(x: PyTree, reads: PyTree) -> PyTree:
    """x, as values that depend on all that a stage reads.

    Before 0.12, JAX returns from a branch every array that its gradient reads, and zeros in its place from the other
    one: a copy of the weights. If both begin with this, both return the weights themselves, and XLA copies nothing.
    """
    part = smooth_part(x)
    smooth, others = part.split(x)
    large = [leaf for leaf in jax.tree.leaves(reads) if is_smooth(leaf)]
    if jax.__version_info__ >= (0, 12) or is_remat3() or not smooth or not large:
        return x

    def same(smooth: Sequence[Any], large: Sequence[Any]) -> list[Any]:
        def of(leaf: Any) -> Any:
            true = tie(vary_over(jnp.ones((), bool), varying_axes(jax.typeof(leaf))), large)
            return jnp.where(true, leaf, jnp.zeros_like(leaf))

        return list(map(of, smooth))

    return part.join(jax.checkpoint(same, prevent_cse=False)(smooth, large), others)
