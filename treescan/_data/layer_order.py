"""The order in which the layers of several stacks are numbered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .._avals import describe_argument, exact_int
from .._errors import ArgumentTypeError, Fault, LayerError, Row

TURNS = "turns"


def is_several(tree: Any) -> bool:
    """Whether a tree may be a sequence of stacks or of layers, which has no class of its own."""
    return type(tree) in (list, tuple)


def check_sequence(given: Any, name: str) -> tuple[Any, ...]:
    """A sequence with one item for each stack.

    Raises:
        Fault: for a `LayerError` if it is none.
    """
    if is_several(given) and given:
        return tuple(given)
    raise Fault(
        LayerError,
        f"{{verb}}: with `order`, `{name}` must be a sequence with one item for each stack, got "
        f"{describe_argument(given)}.",
        f"Give `[{name}_0, {name}_1, ...]`, or leave `order` out for a single stack.",
    )


def one_each(given: Any, count: int, name: str) -> tuple[Any, ...]:
    """What is given once for all stacks, or in a sequence with one for each.

    Raises:
        Fault: for a `LayerError` if the sequence has another length.
    """
    if not is_several(given):
        return (given,) * count
    if len(given) != count:
        raise Fault(
            LayerError,
            f"{{verb}}: there are {count} stacks, but `{name}` has {len(given)} item{'s'[: len(given) != 1]}.",
            "Give one item for each stack, or a single one for all.",
        )
    return tuple(given)


def check_order(order: Any, layers: int, stacks: int | None) -> tuple[int, ...]:
    """For each layer, in the order of their numbers, which stack holds it.

    Args:
        order: what the user said: "turns", or the number of a stack for each layer.
        layers: how many layers there are.
        stacks: how many stacks; None: as many as `order` names.

    Raises:
        Fault: for an `ArgumentTypeError` if it is neither, for a `LayerError` if it does not fit.
    """
    if isinstance(order, str) and order == TURNS:
        if stacks is None:
            raise Fault(
                ArgumentTypeError,
                '{verb}: the number of stacks is unknown. `order` is "turns", but `like` is not given.',
                "Give `like`, a sequence with one layer of each stack. Or give `order` as a sequence with the "
                "number of the stack for each layer.",
            )
        return tuple(i % stacks for i in range(layers))
    places = None if isinstance(order, str) or not _is_iterable(order) else [exact_int(place) for place in order]
    if places is None or None in places:
        raise Fault(
            ArgumentTypeError,
            f'{{verb}}: `order` must be "turns" or a sequence of ints, got {describe_argument(order)}.',
            "A sequence has the number of the stack for each layer, in the order of the layers: `[0] * 3 + [1] * 58`.",
        )
    return _check_places([place for place in places if place is not None], layers, stacks)


def _check_places(places: Sequence[int], layers: int, stacks: int | None) -> tuple[int, ...]:
    count = max(places, default=0) + 1 if stacks is None else stacks
    if len(places) != layers:
        raise Fault(
            LayerError,
            f"{{verb}}: `order` has {len(places)} layers, but there are {layers}.",
            "Give one item for each layer, in the order of the layers.",
        )
    wrong = sorted({place for place in places if not 0 <= place < count})
    if wrong:
        raise Fault(
            LayerError,
            f"{{verb}}: `order` names stack {wrong[0]}, but there are {count} stacks.",
            f"Stacks are numbered from 0 to {count - 1}.",
        )
    return tuple(places)


def _is_iterable(order: Any) -> bool:
    try:
        iter(order)
    except TypeError:
        return False
    return True


def check_counts(order: Sequence[int], counts: Sequence[int]) -> None:
    """Compares the number of layers in each stack with an order.

    Raises:
        Fault: for a `LayerError` that lists the stacks.
    """
    wanted = [order.count(place) for place in range(len(counts))]
    if wanted != list(counts):
        raise Fault(
            LayerError,
            "{verb}: the numbers of layers in the stacks do not match `order`.",
            '"turns" means the first layer of each stack, then the second of each, and so on. So only the first '
            "stacks may have one layer more. For another order, give a sequence with the number of the stack for "
            "each layer.",
            header=("stack", "by order", "is"),
            rows=[
                Row(f"stacked[{i}]", str(want), str(count), "")
                for i, (want, count) in enumerate(zip(wanted, counts, strict=True))
            ],
        )
