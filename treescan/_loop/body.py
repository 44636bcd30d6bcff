"""A handle of the user's body. It keeps everything that was made for the body while the body lives."""

from __future__ import annotations

import collections
import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from .._errors import is_from_jax
from .retrace import count_body

_T = TypeVar("_T")

_KEPT = 64


class Memo:
    """What was made for a body or for one call; the 64 last used things are kept."""

    def __init__(self) -> None:
        self._made: collections.OrderedDict[Hashable, Any] = collections.OrderedDict()
        self._lock = threading.Lock()
        self._joint: weakref.WeakKeyDictionary[Callable[..., Any], Memo] = weakref.WeakKeyDictionary()

    def __call__(self, key: Hashable, make: Callable[[], _T]) -> _T:
        """What was made under `key` before, else what `make` returns."""
        with self._lock:
            if key in self._made:
                self._made.move_to_end(key)
                return self._made[key]
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
        try:
            return _programs.setdefault(self.function, Memo())
        except Exception:  # as in `Body.of`
            return Memo()

    @functools.cached_property
    def parameters(self) -> tuple[inspect.Parameter, ...] | None:
        """The body's parameters; None if they cannot be known."""
        return _parameters(self.function)

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """The names of its positional parameters, as far as they can be known."""
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        return tuple(p.name for p in self.parameters or () if p.kind in positional)

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
    return function


_bodies: dict[_Reference, Body] = {}

_programs: weakref.WeakKeyDictionary[Callable[..., Any], Memo] = weakref.WeakKeyDictionary()
