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
    package: str,
    homes: Mapping[str, str],
    moved: Mapping[str, str] | None = None,
    elsewhere: Mapping[str, str] | None = None,
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """`__all__`, `__getattr__` and `__dir__` of a module whose public names are imported when they are first read.

    Args:
        package: its name.
        homes: for each module the names that it holds, in one text; those of "." are modules themselves.
        moved: for each new name the old ones, in one text; `*` is an old name.
        elsewhere: the same of names that were never here, with what there is instead.
    """
    home_of = {name: home for home, names in homes.items() for name in names.split()}
    new_of, there_is = (
        {name: new.replace("*", name) for new, names in (table or {}).items() for name in names.split()}
        for table in (moved, elsewhere)
    )

    def find(name: str) -> Any:
        if name in new_of:
            raise AttributeError(f"`{package}.{name}` is now `{new_of[name]}`.")
        if name in there_is:
            raise AttributeError(f"module {package!r} has no attribute {name!r}. There is {there_is[name]}.")
        if name not in home_of:
            import difflib

            near = difflib.get_close_matches(name, home_of, 1)
            meant = f". Did you mean `{near[0]}`?" if near else ""
            raise AttributeError(f"module {package!r} has no attribute {name!r}{meant}")
        inside = sys.modules[package].__package__
        if home_of[name] == ".":
            return importlib.import_module(f".{name}", inside)
        value = getattr(importlib.import_module(f".{home_of[name]}", inside), name)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        there = vars(sys.modules[package]).items()
        return sorted({*home_of, *(name for name, value in there if name[0] == "_" or isinstance(value, ModuleType))})

    public = sorted(name for name, home in home_of.items() if home != ".")
    return public, find, names
