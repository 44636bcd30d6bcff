"""Modules that are loaded when they are first needed, by one rule for the package.

A module imports at its head what every call needs that enters it. What only some calls need has two places. Public
names are found when they are first read: the heads of `treescan` and of its public modules list them, once for type
checkers and once for `on_first_use`; so does the head of `_faster`, for the core. And a function imports in its own
first lines what only its option needs; `None` or False, which is what most calls say, is answered before.

No module makes arrays when it is loaded, so it may be loaded while JAX traces.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any


def on_first_use(
    package: str, homes: Mapping[str, str], elsewhere: Mapping[str, str] | None = None
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """`__all__`, `__getattr__` and `__dir__` of a module whose public names are imported when they are first read.

    Args:
        package: its name.
        homes: for each module the names that it holds, in one text; those of "." are modules themselves.
        elsewhere: names that its modules do not hold, in one text for each answer; `*` is the name.
    """
    home_of = {name: home for home, names in homes.items() for name in names.split()}

    def find(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}{hint(name)}")
        inside = sys.modules[package].__package__
        if home_of[name] == ".":
            return importlib.import_module(f".{name}", inside)
        value = getattr(importlib.import_module(f".{home_of[name]}", inside), name)
        setattr(sys.modules[package], name, value)
        return value

    def hint(name: str) -> str:
        """Where the name is, or one that is spelled much like it."""
        if name.startswith("_"):  # Python asks for many
            return ""
        import difflib

        there_is = {
            each: says.replace("*", each) for says, names in (elsewhere or {}).items() for each in names.split()
        }
        for module in homes.get(".", "").split():
            public = importlib.import_module(f"{package}.{module}").__all__
            there_is |= {each: f"`{package}.{module}.{each}`" for each in public}
        if name in there_is:
            return f". There is {there_is[name]}."
        near = difflib.get_close_matches(name, [*home_of, *there_is], 1)
        meant = [there_is.get(each, f"`{each}`") for each in near]
        return f". Did you mean {meant[0]}?" if meant else ""

    def names() -> list[str]:
        there = vars(sys.modules[package]).items()
        return sorted({*home_of, *(name for name, value in there if name[0] == "_" or isinstance(value, ModuleType))})

    public = sorted(name for name, home in home_of.items() if home != ".")
    return public, find, names
