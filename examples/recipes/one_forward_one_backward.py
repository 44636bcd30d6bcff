"""A pipeline with a stage forward and one backward in each tick: 1F1B.

`treescan.pipeline` runs all micro-batches forward before the first one goes
backward, so the gradient saves what goes into a stage for all of them. Here
the last stage sends the gradient of a micro-batch back as soon as it has its
loss. A device then holds what went in for `2 * stages - 1` micro-batches,
however many there are. For that, the loss is a part of the loop, and the loop
returns gradients: it is a training step, and no function to differentiate.

The schedule is that of PipeDream-flush, in lockstep: Narayanan et al.,
"Memory-Efficient Pipeline-Parallel DNN Training", 2021,
https://arxiv.org/abs/2006.09503
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import treescan

Array = jax.Array
Gradients = tuple[Array, Any, Array]
"""A loss, and its gradients by layers of a device and by a micro-batch."""


# --8<-- [start:step]
def gradients(
    stage: Callable[[Any, Array, Array], Array],
    loss: Callable[[Array, Any], Array],
    params: Any,
    xs: Array,
    targets: Any,
    *,
    axis_name: str,
) -> Gradients:
    """The mean loss of all micro-batches, and its gradients.

    Args:
        stage: as for `treescan.pipeline`; it may close over no array that
            is trained. Nothing here looks whether it waits for other stages,
            so it must not call `jax.lax.ppermute` over any axis.
        loss: `loss(y, target)`, of one micro-batch on this device.
        params: the layers of this device, in the order of the stack.
        xs: the micro-batches, `[M, ...]`.
        targets: any pytree of arrays `[M, ...]`.
        axis_name: the mesh axis of the stages.

    Returns:
        The loss, the gradient of the layers of this device, and that of
        xs. The first and the last are the same on all stages. Sum the first
        two over the devices that split the batch.
    """
    stages = jax.lax.axis_size(axis_name)
    device = jax.lax.axis_index(axis_name)
    params, xs, targets = varying((params, xs, targets), (xs, device))
    count, held_at_once = len(xs), 2 * stages - 1
    first_layer = device * len(jax.tree.leaves(params)[0])
    none = jax.tree.map(jnp.zeros_like, params)
    zero = jnp.zeros_like(xs[0])
    no_loss = jnp.sum(zero) * 0

    def run(params: Any, x: Array) -> Array:
        return stage(params, x, first_layer)

    def mean_loss(params: Any, x: Array, target: Any) -> Array:
        return loss(run(params, x), target) / count

    def last(params: Any, x: Array, back: Array, target: Any) -> Gradients:
        value, pull = jax.vjp(mean_loss, params, x, target)
        return value, *pull(jnp.ones_like(value))[:2]

    def between(params: Any, x: Array, back: Array, _: Any) -> Gradients:
        return no_loss, *jax.vjp(run, params, x)[1](back)

    def idle(*_: Any) -> Gradients:
        return no_loss, none, zero

    def tick(carry: Any, now: Array) -> Any:
        arrived, back, held, total, grads, of_xs = carry
        forth = now - device  # the micro-batches that this device runs now
        due = now - (2 * (stages - 1) - device)
        runs = (forth >= 0) & (forth < count) & (device < stages - 1)
        x = jnp.where(device == 0, at(xs, forth), arrived)
        held = held.at[forth % held_at_once].set(x)
        y = jax.lax.cond(runs, run, lambda params, x: x, params, x)
        ends = jnp.where(device == stages - 1, 2, 1)
        value, of_params, of_x = jax.lax.switch(
            jnp.where((due >= 0) & (due < count), ends, 0),
            (idle, between, last),
            *(params, held[due % held_at_once], back, at(targets, due)),
        )
        grads = jax.tree.map(jnp.add, grads, of_params)
        begins = (device == 0) & (due >= 0) & (due < count)  # xs came in here
        place = jnp.clip(due, 0, count - 1)
        kept = jnp.where(begins, of_x, at(of_xs, place))
        of_xs = jax.lax.dynamic_update_index_in_dim(of_xs, kept, place, 0)
        arrived = to_neighbour(y, axis_name, 1)
        back = to_neighbour(of_x, axis_name, -1)
        return arrived, back, held, total + value, grads, of_xs

    held = jnp.broadcast_to(zero, (held_at_once, *zero.shape))
    ticks = jnp.arange(count + 2 * (stages - 1))
    carry = (zero, zero, held, no_loss, none, jnp.zeros_like(xs))
    *_, total, grads, of_xs = treescan.fold(tick, carry, ticks)
    total, of_xs = jax.lax.psum((total, of_xs), axis_name)
    return total, grads, of_xs


def varying(tree: Any, like: Any) -> Any:
    """Arrays that vary over each mesh axis over which others do.

    A sum of gradients over devices then comes after the loop, not within it.
    """
    axes = frozenset[str]().union(*map(varies_over, jax.tree.leaves(like)))

    def of(leaf: Array) -> Array:
        lacks = tuple(sorted(axes - varies_over(leaf)))
        return jax.lax.pcast(leaf, lacks, to="varying") if lacks else leaf

    return jax.tree.map(of, tree)


def varies_over(leaf: Array) -> frozenset[str]:
    kind = jax.typeof(leaf)
    if hasattr(kind, "manual_axis_type"):
        return kind.manual_axis_type.varying
    return kind.vma  # before JAX 0.10


def at(tree: Any, i: Array) -> Any:
    """The micro-batch of a number, which is clamped."""
    pick = jax.lax.dynamic_index_in_dim
    return jax.tree.map(lambda leaf: pick(leaf, i, keepdims=False), tree)


def to_neighbour(leaf: Array, axis_name: str, by: int) -> Array:
    count = jax.lax.axis_size(axis_name)
    pairs = [(i, (i + by) % count) for i in range(count)]
    return jax.lax.ppermute(leaf, axis_name, pairs)


# --8<-- [end:step]
