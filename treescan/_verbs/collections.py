"""The role of each collection of variables and of each stream of keys in a lifted function."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from .._avals import describe_argument, describe_node, exact_int
from .._errors import ArgumentTypeError, BodyError, Fault
from .._types import PyTree
from .filters import check_filter, is_for
from .groups import Groups, Rngs

Collections: TypeAlias = dict[str, PyTree]


class Axis(NamedTuple):
    """A filter of `variable_axes`, and the axis of its collections on the way in and out; None: not that way."""

    filter: Any
    into: int | None
    out: int | None


def check_axes_of(variable_axes: Any) -> tuple[Axis, ...]:
    """The entries of `variable_axes`."""
    if not isinstance(variable_axes, Mapping):
        raise Fault(
            ArgumentTypeError,
            "{verb} over {body}: `variable_axes` must be a dict from names of collections to axes, got "
            f"{describe_argument(variable_axes)}.",
            'Write `variable_axes={"params": 0}`.',
        )
    return tuple(_axis(check_filter("variable_axes", name), axis) for name, axis in variable_axes.items())


def check_split(split_rngs: Any) -> tuple[tuple[Any, bool], ...]:
    """The entries of `split_rngs`."""
    wrong = split_rngs
    if isinstance(split_rngs, Mapping):
        others = [on for on in split_rngs.values() if not isinstance(on, bool)]
        if not others:
            return tuple((check_filter("split_rngs", names), on) for names, on in split_rngs.items())
        wrong = others[0]
    raise Fault(
        ArgumentTypeError,
        "{verb} over {body}: `split_rngs` must be a dict from names of streams to True or False, got "
        f"{describe_argument(wrong)}.",
        'Write `split_rngs={"dropout": True}`: each step has its own key.',
    )


def check_hook(option: str, hook: Any) -> None:
    """Refuses hooks that are not functions."""
    if hook is not None and not callable(hook):
        raise Fault(
            ArgumentTypeError,
            f"{{verb}} over {{body}}: `{option}` must be a function, got {describe_argument(hook)}.",
            "`data_transform(variables, rngs)` returns both, and `metadata_fn(collection, axis, added)` returns a "
            "collection.",
        )


def transformed(data_transform: Callable[..., Any] | None, variables: Any, rngs: Any) -> tuple[Any, Any]:
    """Variables and keys as a step is to see them."""
    if data_transform is None:
        return variables, rngs
    match data_transform(variables, rngs):
        case (variables, rngs):
            return variables, rngs
        case other:
            raise Fault(
                BodyError,
                f"`data_transform` of {{body}} must return a pair (variables, rngs), but returned "
                f"{describe_node(other)}.",
                "Return both, changed or not: `return variables, rngs`.",
            )


def _axis(names: Any, axis: Any) -> Axis:
    number = exact_int(getattr(axis, "axis", axis))
    if number is None:
        raise Fault(
            ArgumentTypeError,
            f"{{verb}} over {{body}}: an axis of `variable_axes` must be an int, got {describe_argument(axis)}.",
            "Or use `treescan.In(axis)` for a collection that is only read, and `treescan.Out(axis)` for one that "
            "is only written. Collections without an axis belong in `variable_broadcast` or `variable_carry`.",
        )
    kind = type(axis).__name__  # flax has an In and an Out of its own
    return Axis(names, None if kind == "Out" else number, None if kind == "In" else number)


@dataclass(frozen=True, eq=False)
class CollectionRoles:
    """Which role each collection has, and whether the keys of a stream are split.

    Attributes:
        broadcast: the filter of those that all steps share.
        carried: that of those that are carried.
        axes: those that are scanned or stacked.
        split: filters of streams of keys, each with whether its keys are split.
    """

    broadcast: Any
    carried: Any
    axes: tuple[Axis, ...]
    split: tuple[tuple[Any, bool], ...]

    def group(self, variables: Mapping[str, PyTree], *, out: bool) -> tuple[Groups, list[str]]:
        """Collections by their roles, those that are scanned one tree for each axis; and those that have no role."""
        broadcast: Collections = {}
        carried: Collections = {}
        scanned: list[Collections] = [{} for axis in self.axes if self._axis(axis, out) is not None]
        left = []
        for name, tree in variables.items():
            if is_for(self.broadcast, name):
                broadcast[name] = tree
            elif is_for(self.carried, name):
                carried[name] = tree
            elif (place := self._place(name, out)) is not None:
                scanned[place][name] = tree
            elif out or self._place(name, out=True) is None:
                left.append(name)
        return Groups(broadcast, carried, tuple(scanned)), left

    def is_only_read(self, name: str) -> bool:
        """Whether a collection goes in, but not out."""
        return self._place(name, out=False) is not None and self._place(name, out=True) is None

    @staticmethod
    def _axis(axis: Axis, out: bool) -> int | None:
        return axis.out if out else axis.into

    def _place(self, name: str, out: bool) -> int | None:
        axes = [axis for axis in self.axes if self._axis(axis, out) is not None]
        return next((place for place, axis in enumerate(axes) if is_for(axis.filter, name)), None)

    def numbers(self, *, out: bool) -> tuple[int, ...]:
        """The axis of each tree that is scanned, or stacked."""
        found = (self._axis(axis, out) for axis in self.axes)
        return tuple(number for number in found if number is not None)

    def rngs(self, rngs: Mapping[str, PyTree]) -> tuple[Rngs, list[str]]:
        """Keys by whether they are split, and the streams of which that is not said."""
        shared: Collections = {}
        split: Collections = {}
        left = []
        for name, key in rngs.items():
            found = next((flag for names, flag in self.split if is_for(names, name)), None)
            if found is None:
                left.append(name)
            else:
                (split if found else shared)[name] = key
        return Rngs(shared, split), left


def merged(groups: Groups) -> Collections:
    """The collections of all roles."""
    together: Collections = {**groups.broadcast, **groups.carried}
    for group in groups.scanned:
        together.update(group)
    return together


def listed(names: Iterable[str]) -> str:
    """Names, for a list in a message."""
    return ", ".join(repr(name) for name in names)
