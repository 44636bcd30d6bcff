"""What a step is fed, and slots: typed places in it that belong to one option each. The loop itself knows none."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar, cast

import jax

from .._avals import PyTree

T = TypeVar("T")


class Feed(NamedTuple):
    """What one step is fed: its slice of xs and, where an option asks for them, further arrays; else None.

    Attributes:
        x: the slice of xs.
        position: the step's position in xs.
        valid: which rows are data in this step.
        extra: what the slots of options hold, of the step or of a chunk; see `Slot`.
    """

    x: PyTree
    position: Any = None
    valid: Any = None
    extra: Extra | None = None


class Slot(Generic[T]):
    """The place of one option in a `Feed`. The option's own file holds the only reference to it.

    Args:
        name: for messages, and for the order of the leaves.
        rows: whether the batch shape leads in each of its arrays in one step; None: unknown, which `compact` refuses.
        of_chunks: whether it has an entry for each chunk of the `Level` that names it, not for each step.
    """

    __slots__ = ("name", "of_chunks", "rows")

    def __init__(self, name: str, *, rows: bool | None = None, of_chunks: bool = False) -> None:
        self.name, self.rows, self.of_chunks = name, rows, of_chunks

    def __repr__(self) -> str:
        return f"Slot({self.name})"

    def of(self, feed: Feed) -> T | None:
        """What is there; None: nothing is."""
        return None if feed.extra is None else cast("T | None", feed.extra.held.get(self))

    def put(self, feed: Feed, value: T | None) -> Feed:
        """The feed with this in its place; with None, nothing is there."""
        held = {} if feed.extra is None else dict(feed.extra.held)
        held.pop(self, None)
        if value is not None:
            held[self] = value
        return feed._replace(extra=Extra(held) if held else None)

    def take(self, feed: Feed) -> tuple[T, Feed]:
        """What is there, and the feed without it."""
        return cast("T", self.of(feed)), self.put(feed, None)


@jax.tree_util.register_pytree_node_class
class Extra:
    """What slots hold: a pytree whose structure is the slots."""

    __slots__ = ("held",)

    def __init__(self, held: dict[Slot[Any], Any]) -> None:
        self.held = held

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[Slot[Any], ...]]:
        """The values, and the slots in the order of their names."""
        slots = tuple(sorted(self.held, key=operator.attrgetter("name")))
        return tuple(map(self.held.__getitem__, slots)), slots

    @classmethod
    def tree_unflatten(cls, slots: tuple[Slot[Any], ...], values: tuple[Any, ...]) -> Extra:
        """With these slots."""
        return cls(dict(zip(slots, values, strict=True)))


class Keyword(NamedTuple):
    """A keyword of the body that an option passes, if the body takes it.

    Attributes:
        slot: where its value is in the feed of a step; it has the name of the keyword.
        values: of a loop with its mask and of where its segments begin, the values for all steps, [T, *batch].
    """

    slot: Slot[Any]
    values: Callable[[Any, Any], Any]


def of_steps(feed: Feed) -> Feed:
    """The feed without what is of chunks."""
    for slot, _ in slots_of(feed):
        feed = slot.put(feed, None) if slot.of_chunks else feed
    return feed


def slots_of(feed: Feed) -> Iterator[tuple[Slot[Any], Any]]:
    """The slots of a feed that hold something, with what they hold, in the order of their names."""
    held = {} if feed.extra is None else feed.extra.held
    return iter(sorted(held.items(), key=lambda item: item[0].name))
