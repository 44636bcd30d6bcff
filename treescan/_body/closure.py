"""What a function closes over, by the names that it has there."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence

from .._avals import Array
from .._tree import leaves_with_path

_DEEPEST = 4


def named_constants(function: Callable[..., object], values: Sequence[Array]) -> list[str]:
    """For each array that a function closes over its path in the name that it has there, for example `params["w"]`.

    One that is not found, because the function makes it, is called by its number.
    """
    known = dict[int, str]()
    for name, value in _reachable(function, _DEEPEST, set()):
        with contextlib.suppress(Exception):  # a container that JAX cannot take apart: dicts whose keys have no order
            for path, leaf in leaves_with_path(name, value):
                known.setdefault(id(leaf), path)
    return [known.get(id(value), f"constant {number}") for number, value in enumerate(values)]


def _reachable(function: Callable[..., object], depth: int, seen: set[int]) -> Iterator[tuple[str, object]]:
    """What a function refers to, by the names that it uses: arguments of a partial, cells, globals, attributes."""
    if not depth or id(function) in seen:
        return
    seen.add(id(function))
    for name, value in _named(function):
        yield name, value
        if callable(value) and not isinstance(value, type):
            yield from _reachable(value, depth - 1, seen)


def _named(function: Callable[..., object]) -> Iterator[tuple[str, object]]:
    if isinstance(function, functools.partial):
        names = list[str]()
        with contextlib.suppress(TypeError, ValueError):
            names += inspect.signature(function.func).parameters
        yield from zip([*names, *("args" for _ in function.args)], function.args, strict=False)
        yield from (*function.keywords.items(), ("func", function.func))
        return
    if inspect.ismethod(function):
        yield from (("self", function.__self__), ("func", function.__func__))
        return
    inner = inspect.unwrap(function)
    code = getattr(inner, "__code__", None)
    if code is None:
        yield from vars(inner).items() if hasattr(inner, "__dict__") else ()
        yield "self", inner
        return
    for name, cell in zip(code.co_freevars, inner.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # it is empty
            yield name, cell.cell_contents
    for parameter in inspect.signature(inner).parameters.values():
        if parameter.default is not inspect.Parameter.empty:
            yield parameter.name, parameter.default
    found = getattr(inner, "__globals__", {})
    yield from ((name, found[name]) for name in code.co_names if name in found and not inspect.ismodule(found[name]))
