"""The names of what a body closes over."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from .._tree import leaves_with_path

_DEEPEST = 4


def named_constants(function: Any, values: Sequence[Any]) -> list[str]:
    """For each array that a function closes over its path in the name that it has there, for example `params["w"]`.

    One that is not found, because the function makes it, is called by its number.
    """
    known = dict[int, str]()
    for name, value in _reachable(function, _DEEPEST, set()):
        for path, leaf in _leaves(name, value):
            known.setdefault(id(leaf), path)
    return [known.get(id(value), f"constant {number}") for number, value in enumerate(values)]


def _leaves(name: str, value: Any) -> list[tuple[str, Any]]:
    try:
        return leaves_with_path(name, value)
    except Exception:  # a container that JAX cannot take apart: dicts whose keys cannot be ordered
        return []


def _reachable(function: Any, depth: int, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """What a function refers to, by the names that it uses: arguments of a partial, cells, globals, attributes."""
    if not depth or id(function) in seen:
        return
    seen.add(id(function))
    for name, value in _named(function):
        yield name, value
        if callable(value) and not isinstance(value, type):
            yield from _reachable(value, depth - 1, seen)


def _named(function: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(function, functools.partial):
        names = _parameters(function.func)
        yield from zip([*names, *("args" for _ in function.args)], function.args, strict=False)
        yield from function.keywords.items()
        yield "func", function.func
        return
    if inspect.ismethod(function):
        yield "self", function.__self__
        yield "func", function.__func__
        return
    inner = inspect.unwrap(function)
    code = getattr(inner, "__code__", None)
    if code is None:
        yield from vars(inner).items() if hasattr(inner, "__dict__") else ()
        yield "self", inner
        return
    yield from _cells(inner)
    found = getattr(inner, "__globals__", {})
    yield from ((name, found[name]) for name in code.co_names if name in found and not inspect.ismodule(found[name]))


def _cells(function: Any) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # it is empty
            continue
    for default in inspect.signature(function).parameters.values():
        if default.default is not inspect.Parameter.empty and jax.tree.leaves(default.default):
            yield default.name, default.default


def _parameters(function: Any) -> list[str]:
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return []
