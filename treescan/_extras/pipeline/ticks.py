"""The loop over ticks: in each, every device runs its stage or nothing, and hands the result on to the next device."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ..._avals import Array, PyTree, devices_of, vary_over, varying_axes
from ..._loop.loop import Body
from ..._remat.checkpoint import checkpoint
from ..._trace.raw_keys import as_numbers, impls_of, keys_of
from ..._trace.smooth import is_smooth
from ..._verbs.scan import scan
from .schedule import Schedule
from .stage import run_or_idle, trace_stage


def run_ticks(body: Body, schedule: Schedule, per: int, params: PyTree, xs: PyTree, args: PyTree, axis: str) -> PyTree:
    """The result for each micro-batch, `[M, ...]`, on all devices of the axis.

    Args:
        body: the stage.
        schedule: when it runs.
        per: how many layers it has in a round.
        params: the layers of this device.
        xs: the micro-batches.
        args: what all stages share.
        axis: the mesh axis of the stages.
    """
    device, last = jax.lax.axis_index(axis), schedule.stages - 1
    # Keys travel as numbers: devices send and add these up, and before 0.10 JAX cannot differentiate branches on keys.
    kinds, of_x = impls_of((params, xs, args)), impls_of(xs)
    params, xs, args = _varying(device, *as_numbers((params, xs, args)))
    parts = jax.tree.map(
        lambda leaf: leaf.reshape(schedule.rounds, per, *leaf.shape[1:]) if leaf.ndim else leaf, params
    )
    fed = schedule.fed(xs)
    start = jax.tree.map(lambda leaf: jax.lax.stop_gradient(leaf[0]), fed)  # what no stage reads
    given = *keys_of((_part(parts, device * 0), start, args), kinds), device
    traced = trace_stage(body, given, axis)

    def run(layers: PyTree, x: PyTree, args: PyTree, first_layer: Array) -> PyTree:
        layers, x, args = keys_of((layers, x, args), kinds)
        return as_numbers(traced(layers, x, args, first_layer))

    def either(runs: Array, number: Array, parts: PyTree, x: PyTree, args: PyTree) -> PyTree:
        return run_or_idle(run, runs, _part(parts, number), x, args, (number * schedule.stages + device) * per)

    either = checkpoint(either, prevent_cse=devices_of((params, xs)) > 1)

    def tick(arrived: PyTree, given: tuple[Array, PyTree]) -> tuple[PyTree, PyTree]:
        now, fresh = given
        runs, number = schedule.at(now, device)
        begins = (device == 0) & (number == 0)
        x = jax.tree.map(lambda new, old: jnp.where(begins, new, old), fresh, arrived)
        y = either(runs, number, parts, x, args)
        return _to_next(y, axis, schedule.stages), y

    _, ys = scan(tick, start, (jnp.arange(schedule.ticks, dtype=jnp.int32), fed), progress=False)
    return keys_of(_from_device(last, schedule.last(ys), axis), of_x)


def _part(parts: PyTree, number: Array) -> PyTree:
    """The layers of a round."""

    def of(leaf: Array) -> Array:
        if not leaf.ndim:
            return leaf
        return leaf[0] if len(leaf) == 1 else jax.lax.dynamic_index_in_dim(leaf, number, keepdims=False)

    return jax.tree.map(of, parts)


def _varying(device: Array, params: PyTree, xs: PyTree, args: PyTree) -> tuple[PyTree, PyTree, PyTree]:
    """Lets all vary over the stages, and what is differentiated over all axes over which micro-batches vary.

    So a cotangent is summed over devices once, after the loop, and not in each layer at each tick.
    """
    axes = frozenset[str]().union(*(varying_axes(jax.typeof(leaf)) for leaf in (device, *jax.tree.leaves(xs))))

    def of(tree: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf: vary_over(leaf, axes) if is_smooth(leaf) else leaf, tree)

    return of(params), jax.tree.map(lambda leaf: vary_over(leaf, axes), xs), of(args)


def _to_next(tree: PyTree, axis: str, count: int) -> PyTree:
    pairs = [(i, (i + 1) % count) for i in range(count)]
    return jax.tree.map(lambda leaf: jax.lax.ppermute(leaf, axis, pairs), tree)


def _from_device(number: int, tree: PyTree, axis: str) -> PyTree:
    """What one device has, on all devices of an axis."""
    here = jax.lax.axis_index(axis) == number

    def of(leaf: Array) -> Array:
        own = jnp.where(here, leaf, jnp.zeros((), leaf.dtype))
        return jax.lax.psum(own, axis).astype(leaf.dtype)

    return jax.tree.map(of, tree)
