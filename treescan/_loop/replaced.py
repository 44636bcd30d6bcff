"""Calls `jax.lax.scan`, which a program may have replaced: a tool that observes loops, or with `treescan.scan`.

It is looked up in each call, so that a tool sees the loops that run while it is there. What it calls in turn has to be
JAX's own: a replacement may end in `treescan.scan`, which comes back here.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import importlib.util
from collections.abc import Callable, Generator
from typing import Any

import jax

from .._errors import is_verb


def find_own() -> Callable[..., Any]:
    """JAX's own scan, whatever is in its place by now: that of a second copy of `jax.lax`, which only holds names."""
    spec = importlib.util.find_spec("jax.lax")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.scan


own_scan = find_own()
_replaced: contextvars.ContextVar[bool] = contextvars.ContextVar("replaced", default=False)


def replacement() -> Callable[..., Any] | None:
    """What a program has put in the place of `jax.lax.scan`; None: nothing, or `treescan.scan`, with options or not."""
    found = jax.lax.scan
    if found is own_scan:
        return None
    function = found.func if isinstance(found, functools.partial) else found
    return None if is_verb(function) else found


def lax_scan(
    function: Callable[..., Any],
    init: Any,
    xs: Any,
    length: int | None,
    reverse: bool,
    unroll: int | bool,
    **lowering: Any,
) -> Any:
    """`jax.lax.scan`, or what is in its place, unless that has called this."""
    other = replacement()
    if other is None or is_replaced_call():
        return own_scan(function, init, xs, length, reverse, unroll, **lowering)
    with _within(replaced=True):
        return other(function, init, xs, length=length, reverse=reverse, unroll=unroll, **lowering)


def is_replaced_call() -> bool:
    """Whether what is in the place of `jax.lax.scan` runs a loop of this package now, and not yet a step of it."""
    return _replaced.get()


def in_step() -> contextlib.AbstractContextManager[None]:
    """Within it, what is in the place of `jax.lax.scan` is called again: a step may hold loops."""
    return _within(replaced=False)


@contextlib.contextmanager
def _within(*, replaced: bool) -> Generator[None]:
    token = _replaced.set(replaced)
    try:
        yield
    finally:
        _replaced.reset(token)
