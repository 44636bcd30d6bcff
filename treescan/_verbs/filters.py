"""Filters of collections, as flax has them: names, sets of names, predicates, complements."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

from .._avals import describe_argument
from .._errors import ArgumentTypeError, Fault

Filter: TypeAlias = "bool | str | Iterable[str] | Callable[[str], bool] | DenyList"
"""Of names: all or none of them, one, several, those for which a function is true, or all but some."""


@dataclass(frozen=True)
class DenyList:
    """All names except those that another filter matches.

    Attributes:
        deny: that filter.
    """

    deny: Any


@dataclass(frozen=True)
class In:
    """An axis along which a collection is scanned, but not returned.

    Attributes:
        axis: the axis.
    """

    axis: int


@dataclass(frozen=True)
class Out:
    """An axis along which a collection is stacked that the steps return, but do not receive.

    Attributes:
        axis: the axis.
    """

    axis: int


def check_filter(option: str, given: Any) -> Any:
    """A filter of these or of flax, in a form that can be asked again and again."""
    if isinstance(given, bool | str) or callable(given):
        return given
    if hasattr(given, "deny"):
        return DenyList(check_filter(option, given.deny))
    if isinstance(given, Iterable):
        names = tuple(given)
        if all(isinstance(name, str) for name in names):
            return names
    raise Fault(
        ArgumentTypeError,
        f"{{verb}} over {{body}}: `{option}` must be names of collections, got {describe_argument(given)}.",
        "Give a name, a set of names, True for all or False for none, a function of the name, or a "
        "`treescan.DenyList` of the names to leave out.",
    )


def is_for(checked: Any, name: str) -> bool:
    """Whether a checked filter is for this name."""
    match checked:
        case bool():
            return checked
        case str():
            return checked == name
        case DenyList():
            return not is_for(checked.deny, name)
        case tuple():
            return name in checked
        case _:
            return bool(checked(name))
