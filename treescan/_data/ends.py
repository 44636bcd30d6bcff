"""`first` and `last`: the first and the last output of each sequence in a batch."""

from __future__ import annotations

from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np

from .._avals import is_key
from .._checks.arguments import check_reverse
from .._errors import ArgumentTypeError, Fault, explain, verb
from .._types import Array, Y
from .pack import Packed, PackIndex, not_packed
from .pad import Padded
from .sequences import check_lead


@overload
def first(packed: Packed[Any], ys: Y, *, reverse: bool) -> Y: ...
@overload
def first(packed: Padded[Any], ys: Y, *, reverse: bool) -> Y: ...
@verb
def first(packed: Packed[Any] | Padded[Any], ys: Y, *, reverse: bool | None = None) -> Y:
    """Returns the first y of each sequence's run. It is one gather, works on traced arrays, and is differentiable.

    Args:
        packed: the batch, a `Packed` or a `Padded`.
        ys: any pytree with leaves `[T, R, ...]`: the outputs of a scan over the batch, or its data.
        reverse: whether the scan that computed ys ran in reverse. Required, because ys do not show it. False: the y of
            a sequence's first step in time. True: the y of its last step in time, which ran first.

    Returns:
        A pytree with leaves `[N, ...]`, in the order of the sequences in `pack` or `pad`; 0 for a
        sequence of 0 steps.

    Raises:
        ArgumentError: if a leaf of ys does not start with the axes `[T, R]`.
        ArgumentTypeError: if `packed` is neither a `Packed` nor a `Padded`, or `reverse` is missing or not a bool.

    Examples:
        >>> import jax.numpy as jnp
        >>> import treescan
        >>> batch = treescan.pack(
        ...     [jnp.array([1, 2]), jnp.array([3, 4, 5, 6]), jnp.array([7])]
        ... )
        >>> print(treescan.first(batch, batch.data * 10, reverse=False))
        [10 30 70]
        >>> print(treescan.first(batch, batch.data * 10, reverse=True))
        [20 60 70]
    """
    try:
        return _at_ends(packed, ys, reverse, "first")
    except Exception as error:
        explained = explain(error, "first")
    raise explained


@overload
def last(packed: Packed[Any], ys: Y, *, reverse: bool) -> Y: ...
@overload
def last(packed: Padded[Any], ys: Y, *, reverse: bool) -> Y: ...
@verb
def last(packed: Packed[Any] | Padded[Any], ys: Y, *, reverse: bool | None = None) -> Y:
    """Returns the last y of each sequence. It is one gather, works on traced arrays, and is differentiable.

    With the `reverse` of the scan that computed ys, this is the y that `save="last"` keeps for each sequence. If y is
    the carry, it is the carry after each sequence.

    Args:
        packed: the batch, a `Packed` or a `Padded`.
        ys: any pytree with leaves `[T, R, ...]`: the outputs of a scan over the batch.
        reverse: whether the scan that computed ys ran in reverse. Required, because ys do not show it. False: the y of
            a sequence's last step in time. True: the y of its first step in time, which ran last.

    Returns:
        A pytree with leaves `[N, ...]`, in the order of the sequences in `pack` or `pad`; 0 for a
        sequence of 0 steps.

    Raises:
        ArgumentError: if a leaf of ys does not start with the axes `[T, R]`.
        ArgumentTypeError: if `packed` is neither a `Packed` nor a `Padded`, or `reverse` is missing or not a bool.

    Examples:
        >>> import jax.numpy as jnp
        >>> import treescan
        >>> batch = treescan.pack(
        ...     [jnp.array([1, 2]), jnp.array([3, 4, 5, 6]), jnp.array([7])]
        ... )
        >>> print(treescan.last(batch, batch.data * 10, reverse=False))
        [20 60 70]
        >>> print(treescan.last(batch, batch.data * 10, reverse=True))
        [10 30 70]
    """
    try:
        return _at_ends(packed, ys, reverse, "last")
    except Exception as error:
        explained = explain(error, "last")
    raise explained


def _at_ends(packed: Any, ys: Y, reverse: bool | None, name: str) -> Y:
    """The ys where each sequence's run began (`first`), or ended (`last`)."""
    if not isinstance(packed, Packed | Padded):
        raise not_packed(packed, "a `Packed` or a `Padded`", f"`{name}(packed, ys, reverse=False)`.")
    if reverse is None:
        raise _no_direction(name)
    backward = check_reverse(reverse) == (name == "last")
    if isinstance(packed, Packed):
        check_lead("ys", ys, (packed.rows,), packed.steps)
        where = _ends_of_spans(packed.index, packed.steps, backward)
    else:
        batch = np.shape(packed.lengths)
        steps = check_lead("data", packed.data, batch)
        check_lead("ys", ys, batch, steps)
        where = _ends_of_rows(packed.lengths, steps, backward)
    return jax.tree.map(lambda leaf: _gather(leaf, where), ys)


def _no_direction(name: str) -> Fault:
    does = {"last": ("end with their last step", "end"), "first": ("begin with their first step", "begin")}[name]
    other = {"last": "first", "first": "last"}[name]
    return Fault(
        ArgumentTypeError,
        "{verb} needs `reverse`: the direction of the scan that computed the ys.",
        f"Pass `reverse=False` for a forward scan, whose sequences {does[0]}, or `reverse=True` for one "
        f"that ran in reverse, whose sequences {does[1]} with their {other}.",
        "treescan cannot tell the direction from the ys, and the wrong direction would return the y of another step "
        "without an error.",
    )


def _ends_of_spans(index: PackIndex, steps: int, reverse: bool) -> tuple[Array, ...]:
    """The step and the row where each sequence ends in time, or begins in time where `reverse` is set.

    They are places outside, no two the same, for empty sequences.
    """
    some = index.length > 0
    numbers = jnp.arange(index.length.shape[0], dtype=jnp.int32)
    end = index.start if reverse else index.start + index.length - 1
    return jnp.where(some, end, steps), jnp.where(some, index.row, numbers)


def _ends_of_rows(lengths: Array, steps: int, reverse: bool) -> tuple[Array, ...]:
    counts = jnp.clip(jnp.asarray(lengths, jnp.int32), 0, steps)
    end = jnp.zeros_like(counts) if reverse else counts - 1
    return jnp.where(counts > 0, end, steps), *jnp.indices(counts.shape, dtype=jnp.int32)


def _gather(leaf: Any, where: tuple[Array, ...]) -> Array:
    """The leaf at each place, 0 for places outside. They are unique, so that the gradient is a scatter in no order."""
    if is_key(leaf):
        bits = _gather(jax.random.key_data(leaf), where)
        return jax.random.wrap_key_data(bits, impl=jax.random.key_impl(leaf))
    if 0 in leaf.shape[: len(where)]:  # which JAX refuses to gather from
        return jnp.zeros((*where[0].shape, *leaf.shape[len(where) :]), jax.typeof(leaf).dtype)
    return jnp.asarray(leaf).at[where].get(mode="fill", fill_value=0, unique_indices=True)
