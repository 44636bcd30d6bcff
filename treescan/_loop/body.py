"""A handle of the user's body: what was made for the body is kept while it lives, and new traces are noticed."""

from __future__ import annotations

import collections
import functools
import inspect
import os
import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
from jax.core import Tracer

from .._avals import describe_leaf, is_weak, shape_of
from .._errors import RetraceWarning, describe_body, is_from_jax, place_of_user, warn_user
from .._tree import is_static, leaves_with_path
from .._types import PyTree

_seen: collections.Counter[str] = collections.Counter()


def wanted() -> bool:
    """Whether the user asked for these warnings."""
    return os.environ.get("TREESCAN_WARN_RETRACE") == "1"


def under_a_trace() -> bool:
    """Whether operations are being recorded by an outer trace (as under `jax.jit`) instead of executed."""
    # Of all operations this is the cheapest: of a number without a trace, it is that number.
    return isinstance(jax.lax.stop_gradient(0.0), Tracer)


def count_body(function: Callable[..., Any]) -> None:
    """Notes that a body was seen for the first time, and warns at the 2nd, 4th, 8th, ... one from the same place.

    Under an outer trace a new body costs nothing extra, because the outer trace is cached.
    """
    if not wanted() or under_a_trace():
        return
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
    if not wanted() or under_a_trace():
        return
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
    if wanted():
        which = ", ".join(f"{path} ({given} to {returned})" for path, given, returned in leaves)
        _warn(
            f"{describe_body(body)} is traced twice, because the init is a Python scalar whose type the step changes: "
            f"{which}. Start from an array with the dtype that the step returns."
        )


def _warn(message: str) -> None:
    warn_user(message, RetraceWarning)


_T = TypeVar("_T")

_KEPT = 64
_UNKNOWN: Any = object()


class Memo:
    """What was made for a body or for one call; the 64 last used things are kept."""

    def __init__(self) -> None:
        self._made: collections.OrderedDict[Hashable, Any] = collections.OrderedDict()
        self._lock = threading.Lock()
        self._joint: weakref.WeakKeyDictionary[Callable[..., Any], Memo] = weakref.WeakKeyDictionary()

    def __call__(self, key: Hashable, make: Callable[[], _T]) -> _T:
        """What was made under `key` before, else what `make` returns."""
        with self._lock:
            known = self._made.get(key, _UNKNOWN)
            if known is not _UNKNOWN and len(self._made) > 1:  # a key takes long to hash, as steps hold others
                self._made.move_to_end(key)
        if known is not _UNKNOWN:
            return known
        value = make()
        with self._lock:
            value = self._made.setdefault(key, value)
            if len(self._made) > _KEPT:
                self._made.popitem(last=False)
        return value

    def joint(self, function: Callable[..., Any]) -> Memo:
        """What was made for this memo's body and another together: it goes with whichever of the two goes first."""
        try:
            return self._joint.setdefault(function, Memo())
        except Exception:  # as in `Body.of`
            return Memo()


class _Reference(weakref.ref[Any]):
    """A weak reference that is not shared.

    Python gives all who ask for a plain `weakref.ref` of an object the same one, and it keeps the hash that the object
    had when it was first asked. A body that hashes by value and was changed would be found under its old hash.
    """

    __slots__ = ()


class Body:
    """A handle on the user's body that does not keep it alive, and all that was made for it.

    `Body.of` gives equal bodies the same handle. Steps hold the handle, the handle holds the steps, and the table of
    handles holds bodies weakly: when the last reference to a body goes, everything made for it goes too. While a verb
    runs, its frame keeps the body alive.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        try:
            self._function: Callable[[], Any] = _Reference(function)
        except TypeError:  # this type has no weak references: the handle lives as long as the call
            self._function = lambda: function
        self.memo = Memo()

    @property
    def function(self) -> Callable[..., Any]:
        """The body itself."""
        return self._function()

    @property
    def programs(self) -> Memo:
        """What was compiled for the body.

        JAX keeps a program's trace for as long as the program lives, and a rule for derivatives in that trace refers
        to this handle. So the handle must not refer to the program: the two would keep each other, and all arrays that
        the body closes over, until `jax.clear_caches()`.
        """
        return _programs.joint(self.function)

    @functools.cached_property
    def parameters(self) -> tuple[inspect.Parameter, ...] | None:
        """The body's parameters; None if they cannot be known."""
        return _parameters(self.function)

    @property
    def positional(self) -> list[inspect.Parameter]:
        """Its positional parameters, as far as they can be known."""
        return [p for p in self.parameters or () if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """The names of its positional parameters, as far as they can be known."""
        return tuple(parameter.name for parameter in self.positional)

    @staticmethod
    def of(function: Callable[..., Any]) -> Body:
        """The handle of a body: shared by equal ones, new in each call for one without a hash or weak references."""
        try:
            known = _bodies.get(_Reference(function))
            if known is not None:
                return known
            new = Body(function)
            body = _bodies.setdefault(_Reference(function, _forget), new)
        except Exception:  # no hash, no weak references, or an `==` that fails: the user's types decide
            body = new = Body(function)
        if body is new:
            count_body(function)
        return body


def _forget(reference: _Reference) -> None:
    """The body is gone, and so is its handle."""
    _bodies.pop(reference, None)


def _parameters(function: Callable[..., Any], wrapped: bool = False) -> tuple[inspect.Parameter, ...] | None:
    try:
        return tuple(inspect.signature(outermost(function), follow_wrapped=wrapped).parameters.values())
    except (TypeError, ValueError):
        return None


def wrapped_parameters(function: Callable[..., Any]) -> tuple[inspect.Parameter, ...]:
    """The parameters of the innermost function that a wrapper says it wraps, as far as they can be known."""
    return _parameters(function, wrapped=True) or ()


def outermost(function: Any) -> Any:
    """The function whose parameters a call meets: JAX's own wrappers pass everything on, of others nothing is known."""
    while hasattr(function, "__wrapped__") and is_from_jax(function):
        function = function.__wrapped__
    # `inspect` takes the first parameter of a static `__call__` for `self`.
    static = isinstance(inspect.getattr_static(type(function), "__call__", None), staticmethod)
    return function.__call__ if static else function


_bodies: dict[_Reference, Body] = {}

_programs = Memo()
