"""What a step is fed, and slots: typed places in it that belong to one option each. The loop itself knows none."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar, cast

import jax

from .._avals import PyTree, is_sharded, is_weak, types_of, varying_axes

if TYPE_CHECKING:
    from .loop import Result

T = TypeVar("T")
Held = TypeVar("Held", "Feed", "Consts", "Result")


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


class Consts(NamedTuple):
    """What every step of a traced loop reads, and none changes.

    Each step reads its own part by its name, and hands on the whole: none knows what others read.

    Attributes:
        extra: what the slots of options hold; see `Slot`.
        unchanged: the leaves of the state that the traced step does not change.
        closed: what its body closes over; None: that is still in the trace. See `hoist.lift`.
        inner: what it read before it was traced.
    """

    extra: Extra | None = None
    unchanged: Sequence[Any] = ()
    closed: list[Any] | None = None
    inner: PyTree = None

    def spread(self, told: Consts) -> tuple[Any, ...]:
        """For each leaf what is told of it, in these same places, where a place has one item a leaf; else None."""
        parts = [*((value, slot.of(told)) for slot, value in slots_of(self)), *zip(self[1:], told[1:], strict=True)]
        return tuple(itertools.chain.from_iterable(itertools.starmap(spread, parts)))


def spread(part: PyTree, told: Any) -> tuple[Any, ...]:
    """For each leaf of a part of the consts what is told of it: one item a leaf, a record of such, or None."""
    if isinstance(part, Consts) and isinstance(told, Consts):  # those of before the trace
        return part.spread(told)
    return tuple(told) if told else (None,) * len(jax.tree.leaves(part))


class Slot(Generic[T]):
    """The place of one option in a `Feed`, in `Consts` or in a `Result`. The option's file holds the only reference.

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

    def of(self, feed: Feed | Consts | Result) -> T | None:
        """What is there; None: nothing is."""
        return None if feed.extra is None else cast("T | None", feed.extra.held.get(self))

    def read(self, feed: Feed | Consts | Result) -> T:
        """What is there, where something is."""
        return cast("T", self.of(feed))

    def put(self, feed: Held, value: T | None) -> Held:
        """The record with this in its place; with None, nothing is there."""
        held = {} if feed.extra is None else dict(feed.extra.held)
        held.pop(self, None)
        if value is not None:
            held[self] = value
        return feed._replace(extra=Extra(held) if held else None)

    def note(self, feed: Held, said: Sequence[Any]) -> Held:
        """A record of what is said of each array, with this for those in its place; see `Consts.spread`."""
        return self.put(feed, cast("T", said))

    def take(self, feed: Held) -> tuple[T, Held]:
        """What is there, and the record without it."""
        return self.read(feed), self.put(feed, None)


class Flag(Slot[tuple[()]]):
    """A place in the consts without arrays: what a step around others says to one of them, of the whole run."""

    __slots__ = ()

    def on(self, consts: Consts) -> bool:
        """Whether it was said."""
        return self.of(consts) is not None

    def raised(self, consts: Consts, on: bool = True) -> Consts:
        """The consts that say so, if `on`."""
        return self.put(consts, ()) if on else consts


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


def slots_of(feed: Feed | Consts) -> Iterator[tuple[Slot[Any], Any]]:
    """The slots of a feed that hold something, with what they hold, in the order of their names."""
    held = {} if feed.extra is None else feed.extra.held
    return iter(sorted(held.items(), key=lambda item: item[0].name))


def one_step(xs: Feed) -> Feed:
    """The types of what one step is fed."""

    def entry(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype, weak_type=is_weak(leaf))

    if not [leaf for leaf in jax.tree.leaves(xs) if is_sharded(leaf) or varying_axes(jax.typeof(leaf))]:
        return jax.tree.map(entry, xs)  # a trace of the indexing would say the same, and takes longer
    return types_of(lambda xs: jax.tree.map(lambda x: jax.lax.index_in_dim(x, 0, keepdims=False), xs), xs)
