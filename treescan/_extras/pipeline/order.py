"""`to_stages` and `from_stages`: the layers of a stack in the order in which devices hold them."""

from __future__ import annotations

from typing import Any, TypeVar

import jax

from ..._avals import is_weak, unspread
from ..._errors import LayerFault, expect_int, verb
from ..._stacks.layer_axis import count_layers, freeze_shared
from ..._tree import thaw_static

Stack = TypeVar("Stack")


@verb
def to_stages(stack: Stack, stages: int, rounds: int = 1) -> Stack:
    """Puts the layers of a stack in the order of the devices of a `treescan.pipeline`.

    The first axis of the result is to be split over the axis of the stages, `PartitionSpec("stage")`. Each device then
    holds the layers of its rounds, one round after the other. With one round, the order is that of the layers.

    Args:
        stack: any pytree of arrays whose first axis is the layers, `[n, ...]`.
        stages: the number of stages, which is that of the devices along their axis.
        rounds: as for `treescan.pipeline`.

    Returns:
        The stack in the order of the devices, `[n, ...]`.

    Raises:
        ArgumentError: if a number is less than 1.
        ArgumentTypeError: if a number is not an int.
        LayerError: if the layers are not a multiple of stages and rounds.

    Examples:
        >>> import jax.numpy as jnp
        >>> import treescan
        >>> layers = jnp.arange(8)  # two stages, two rounds of two layers
        >>> print(treescan.to_stages(layers, 2, rounds=2))
        [0 1 4 5 2 3 6 7]
    """
    rounds, stages = expect_rounds(rounds), _expect_stages(stages)
    return _turned(stack, (rounds, stages), stages)


@verb
def from_stages(stack: Stack, stages: int, rounds: int = 1) -> Stack:
    """Puts the layers of a stack back in their own order: undoes `treescan.to_stages`.

    Args:
        stack: a stack in the order of the devices, `[n, ...]`, for example of gradients.
        stages: as for `treescan.to_stages`.
        rounds: the same.

    Returns:
        The stack in the order of the layers, `[n, ...]`. If types say that layers are on different devices, and there
        are several rounds, they no longer are: each device then receives all layers.

    Raises:
        ArgumentError: if a number is less than 1.
        ArgumentTypeError: if a number is not an int.
        LayerError: if the layers are not a multiple of stages and rounds.

    Examples:
        >>> import jax.numpy as jnp
        >>> import treescan
        >>> held = jnp.array([0, 1, 4, 5, 2, 3, 6, 7])
        >>> print(treescan.from_stages(held, 2, rounds=2))
        [0 1 2 3 4 5 6 7]
    """
    rounds, stages = expect_rounds(rounds), _expect_stages(stages)
    return _turned(stack, (stages, rounds), stages)


def expect_rounds(rounds: Any) -> int:
    """The number of rounds, checked."""
    cure = "It is how often a micro-batch comes past each device: an int of at least 1."
    return expect_int(rounds, "rounds", cure, least=1, small=cure)


def _expect_stages(stages: Any) -> int:
    cure = "It is the number of devices along the axis of the stages: an int of at least 1."
    return expect_int(stages, "stages", cure, least=1, small=cure)


def _turned(stack: Any, parts: tuple[int, int], stages: int) -> Any:
    """A stack whose layers are cut into so many parts of parts, with these two axes exchanged."""
    frozen = freeze_shared(stack)
    count, (outer, inner) = count_layers(jax.tree.map(_whole, frozen), "stack"), parts
    per, left = divmod(count, outer * inner)
    if left or not per:
        raise LayerFault(
            f"{{verb}}: the stack has {count} layers, which is no multiple of stages times rounds, {stages} * "
            f"{outer * inner // stages}.",
            "All stages hold equally many layers. Choose other numbers, or run the layers that are left over before "
            "or after the pipeline, on all devices.",
        )

    def turned(leaf: Any) -> Any:
        if not leaf.ndim or 1 in parts:
            return leaf
        apart = unspread(leaf).reshape(outer, inner, per, *leaf.shape[1:])
        return apart.swapaxes(0, 1).reshape(leaf.shape)

    return thaw_static(jax.tree.map(turned, frozen))


def _whole(leaf: Any) -> Any:
    """A leaf, of which an array of JAX is a type that is not split: how a stack is split does not matter here."""
    if not isinstance(leaf, jax.Array):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=is_weak(leaf))
