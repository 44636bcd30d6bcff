"""Answers that all elements of a vmap and all devices of a shard_map share: how much to run, whose values to borrow.

Under `jax.vmap` an element of the mapped axis may have nothing valid to offer. Both answers are `custom_vmap`
functions, so that they see the mapped axis as a whole: `most_of_all` stays one unbatched number (a branch chosen by it
stays a branch instead of becoming a select), and `lend` fills in the elements that have nothing from one that has.

Why a branch becomes a selection under vmap: https://github.com/jax-ml/jax/issues/8409.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from ..._avals import varying_axes
from ..._types import Array, PyTree
from .leaves import add_up, select


@custom_vmap
def most_of_all(counts: Array) -> Array:
    """`counts` itself; under vmap, nested or not, the largest of all elements. int32[...] to int32[...]."""
    return counts


@most_of_all.def_vmap
def _most_of_all_rule(axis_size: int, in_batched: list[bool], counts: Array) -> tuple[Array, bool]:
    if in_batched[0]:
        counts = jnp.max(counts, axis=0) if axis_size else jnp.zeros_like(counts, shape=counts.shape[1:])
    return most_of_all(counts), False


@custom_vmap
def _unless_alone(going: Array) -> Array:
    return jnp.ones_like(going)


@_unless_alone.def_vmap
def _unless_alone_rule(axis_size: int, in_batched: list[bool], going: Array) -> tuple[Array, bool]:
    del axis_size
    return (going, True) if in_batched[0] else (_unless_alone(going), False)


def unless_alone(going: Array) -> Array:
    """True, inside a branch that is taken if `going` is set. If others share the branch, `going` itself.

    These are the elements of a vmap and the devices of a shard_map: the branch is taken if any of them goes on.
    """
    return going if varying_axes(jax.typeof(going)) else _unless_alone(going)


def may_branch() -> bool:
    """Whether a branch may depend on data: not inside of a `shard_map` that does not tell which axes a value varies on.

    Devices that took different branches around a collective of the body's would wait for each other forever.
    """
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return not manual or bool(varying_axes(jax.typeof(jax.lax.axis_index(manual[0]))))


def most_of_devices(counts: Array) -> Array:
    """The largest counts over the manual mesh axes that they vary on, so that all devices take the same branch."""
    axes = tuple(sorted(varying_axes(jax.typeof(counts))))
    return jax.lax.pmax(counts, axes) if axes else counts


@custom_vmap
def _lend(have: Array, leaves: list[Array]) -> tuple[list[Array], list[Array]]:
    return leaves, [jnp.ones((), bool)] * len(leaves)


@_lend.def_vmap
def _lend_rule(
    axis_size: int, in_batched: list[Any], have: Array, leaves: list[Array]
) -> tuple[tuple[list[Array], list[Array]], tuple[list[bool], list[bool]]]:
    """Fills in the elements of one mapped axis, then asks the next axis out for those that found no lender in it."""
    have_batched, leaves_batched = in_batched
    if not have_batched:
        have_any, own, filled = have, have, leaves
    elif not axis_size:
        have_any, own, filled = jnp.zeros((), bool), have, leaves
    else:
        have_any, own, lender = jnp.any(have, axis=0), have, jnp.argmax(have, axis=0)
        filled = [
            _choose(own, leaf, leaf[lender]) if batched else leaf
            for leaf, batched in zip(leaves, leaves_batched, strict=True)
        ]
    # The next axis out lends to whole elements: a leaf that is mapped here keeps this axis as one of its own.
    lent, outer_own = _lend(have_any, filled)
    flags = [
        jnp.where(have_any, own, outer) if batched and have_batched else outer
        for outer, batched in zip(outer_own, leaves_batched, strict=True)
    ]
    flags_batched = [batched and have_batched for batched in leaves_batched]
    return (lent, flags), (list(leaves_batched), flags_batched)


_lend_traced_once = jax.jit(_lend, inline=True)  # for each list of types


def lend(have: Array, tree: PyTree) -> tuple[PyTree, list[Array]]:
    """Gives elements of mapped axes that have nothing good the values of one that has.

    Args:
        have: bool[], whether this element's values are good.
        tree: the values.

    Returns:
        The values, where `have` is set the element's own; and for each leaf a bool[] that tells whether the element's
        own value is there. A leaf that is the same for all elements stays so, and so does its flag.
    """
    leaves, structure = jax.tree.flatten(tree)
    lent, own = _lend_traced_once(*_across_devices(have, leaves))
    return jax.tree.unflatten(structure, lent), own


def lend_to_elements(have: Array, leaves: list[Array]) -> tuple[list[Array], list[Array]]:
    """The same for a list of leaves, between the elements of mapped axes alone: never between devices."""
    return _lend_traced_once(have, leaves) if leaves else ([], [])


def choose_own(mine: PyTree, lent: PyTree, own: list[Array]) -> PyTree:
    """A tree, each leaf this element's own where its flag in `own` is set, else the one that was lent."""
    leaves, structure = jax.tree.flatten(mine)
    pairs = zip(own, leaves, jax.tree.leaves(lent), strict=True)
    return jax.tree.unflatten(structure, [select(flag, leaf, other) for flag, leaf, other in pairs])


def _across_devices(have: Array, leaves: list[Array]) -> tuple[Array, list[Array]]:
    """Lends over the manual axes of a `shard_map` that `have` varies on, from the lowest device that has something."""
    for axis in sorted(varying_axes(jax.typeof(have))):
        rank = jax.lax.axis_index(axis)
        lender = jax.lax.pmin(jnp.where(have, rank, jax.lax.axis_size(axis)), axis)
        chosen = rank == lender
        leaves = [
            _choose(have, leaf, _from_device(leaf, chosen, axis)) if axis in varying_axes(jax.typeof(leaf)) else leaf
            for leaf in leaves
        ]
        have = jax.lax.pmax(have.astype(jnp.int32), axis) > 0
    return have, leaves


def _from_device(leaf: Array, chosen: Array, axis: str) -> Array:
    """The leaf of the one device on which `chosen` is set."""
    shaped = chosen.reshape((1,) * leaf.ndim)
    return add_up(leaf, shaped, lambda part: jax.lax.psum(part, axis))


def _choose(flag: Array, own: Array, other: Array) -> Array:
    """`own` where the flag is set, else `other`; the flag's axes lead the value's."""
    shaped = flag.reshape(flag.shape + (1,) * (own.ndim - flag.ndim))
    return select(shaped, own, other)
