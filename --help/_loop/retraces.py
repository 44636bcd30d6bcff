"""Warns of new traces of a body; loaded if the user asked for that (`TREESCAN_WARN_RETRACE`)."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from .._avals import PyTree, describe_leaf, is_weak, shape_of
from .._errors import RetraceWarning, describe_body, place_of_user, warn_user
from .._tree import is_static, leaves_with_path

_seen: collections.Counter[str] = collections.Counter()


def count_body(function: Callable[..., Any]) -> None:
    """Notes that a body was seen for the first time, and warns at the 2nd, 4th, 8th, ... one from the same place.

    Under an outer trace it is not called: there a new body costs nothing extra, because the outer trace is cached.
    """
    place = describe_body(function)
    _seen[place] += 1
    times = _seen[place]
    if _is_due(times):
        _warn(
            f"{place} was passed as {times} different function objects, so it was traced and compiled {times} "
            f"times. The last call passed a new object: {_how_it_is_new(function)}. Define the body once, outside of "
            "the code that calls the scan, or wrap that code in `jax.jit`."
        )


def _is_due(times: int) -> bool:
    """Whether this is the 2nd, 4th, 8th, ... time."""
    return times > 1 and times & (times - 1) == 0


def _how_it_is_new(function: Callable[..., Any]) -> str:
    """Why the body is a new object in each call, and on which line."""
    code, name = getattr(function, "__code__", None), getattr(function, "__qualname__", "")
    if isinstance(function, functools.partial):
        return f"the call at {place_of_user()} creates a new `functools.partial`"
    if getattr(function, "__self__", None) is not None:
        return f"the call at {place_of_user()} looks up a bound method, which is a new object each time"
    if code is None:
        return f"the call at {place_of_user()} creates a new `{type(function).__qualname__}`"
    kind = "lambda" if name.endswith("<lambda>") else "nested function" if "<locals>" in name else "function"
    owner = name.rpartition(".<locals>.")[0].rpartition(".<locals>.")[2]
    return f"line {code.co_firstlineno} creates a new {kind} each time that " + (
        f"`{owner}` runs" if owner else "it runs"
    )


class _Leaf(NamedTuple):
    """One leaf in the key of a trace: only text, so that nothing is kept alive."""

    path: str
    is_now: str
    shape: str
    weak: bool
    static: bool


class _Types(NamedTuple):
    leaves: tuple[_Leaf, ...]
    structure: str


def note_types(body: Callable[..., Any], memo: Callable[..., Any], verb: str, given: dict[str, PyTree]) -> None:
    """Warns at the 2nd, 4th, 8th, ... set of types of its arguments for which a body is traced.

    Args:
        body: the body.
        memo: keeps what this verb traced the body for so far, for as long as the body lives.
        verb: the name of the verb.
        given: the verb's arguments by their names. The number of steps, "length", counts where there are no xs.
    """
    if jax.tree.leaves(given.get("xs")):
        given = {name: tree for name, tree in given.items() if name != "length"}
    leaves = [pair for name, tree in given.items() for pair in leaves_with_path(name, tree)]
    now = _Types(tuple(_leaf(path, leaf) for path, leaf in leaves), str(jax.tree.structure(given)))
    before: list[_Types] = memo((_Types, verb), list[_Types])
    if now in before:
        return
    before.append(now)
    times = len(before)
    if _is_due(times):
        what, cure = _difference(before[-2], now)
        _warn(
            f"`{verb}` traced and compiled {describe_body(body)} for {times} sets of types. Since the last trace, "
            f"{what}. {cure}"
        )


def _leaf(path: str, leaf: Any) -> _Leaf:
    if path == "length":
        return _Leaf(path, str(leaf), "", weak=False, static=False)
    return _Leaf(path, describe_leaf(leaf), str(shape_of(leaf)), is_weak(leaf), is_static(leaf))


def _difference(last: _Types, now: _Types) -> tuple[str, str]:
    """The difference between two traces, with up to three leaves, and the advice."""
    old, new = ({leaf.path: leaf for leaf in types.leaves} for types in (last, now))
    if old.keys() != new.keys() or (old == new and last.structure != now.structure):
        added = [f"{path} is there" for path in new if path not in old]
        gone = [f"{path} is gone" for path in old if path not in new]
        return f"the structure changed: {_listed(added + gone) or 'containers of another type'}", _STRUCTURE
    pairs = [(old[path], new[path]) for path in new if old[path] != new[path]]
    changes = [f"{b.path} is {b.is_now}, was {a.is_now}" for a, b in pairs]
    for name, cure, differs in _KINDS:
        if any(differs(a, b) for a, b in pairs):
            return f"the {name} changed: {_listed(changes)}", cure
    return f"the dtype changed: {_listed(changes)}", _DTYPE


_STRUCTURE = "Pass trees with the same structure, with zeros for the parts that do not exist yet."
_DTYPE = "Cast to one dtype before the call."
_KINDS: tuple[tuple[str, str, Callable[[_Leaf, _Leaf], bool]], ...] = (
    (
        "number of steps",
        "It is compiled into the program. `treescan.fori` and `treescan.while_scan` accept a number that changes, "
        "up to a `max_length`.",
        lambda a, b: a.path == b.path == "length",
    ),
    (
        "static value",
        "A value that is not an array is compiled into the program. If it changes, pass an array.",
        lambda a, b: a.static or b.static,
    ),
    ("shape", "Pad to a few shapes: `treescan.pad` and `treescan.repad` do.", lambda a, b: a.shape != b.shape),
    ("weak type", "Pass an array instead of a Python number.", lambda a, b: a.weak != b.weak),
)


def _listed(parts: Sequence[str]) -> str:
    more = [f"and {len(parts) - 3} more"] if len(parts) > 3 else []
    return "; ".join([*parts[:3], *more])


def warn_second_trace(body: Callable[..., Any], leaves: list[tuple[str, str, str]]) -> None:
    """Says which weakly typed leaves of the init make JAX trace a body twice."""
    which = ", ".join(f"{path} ({given} to {returned})" for path, given, returned in leaves)
    _warn(
        f"{describe_body(body)} is traced twice, because the init is a Python scalar whose type the step changes: "
        f"{which}. Start from an array with the dtype that the step returns."
    )


def _warn(message: str) -> None:
    warn_user(message, RetraceWarning)
