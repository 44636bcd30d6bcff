"""Counts how often a body is traced, and what JAX compiles."""

import functools
from collections.abc import Callable
from typing import Any

import jax


class Counted:
    """A body that counts how often it runs, which under JAX is how often it is traced."""

    def __init__(self, body: Callable[..., Any]) -> None:
        self.calls = 0

        @functools.wraps(body)
        def function(*args: Any, **keywords: Any) -> Any:
            self.calls += 1
            return body(*args, **keywords)

        self.body = function

    def traces(self, call: Callable[[Callable[..., Any]], Any]) -> int:
        """How often the body is traced in `call(body)`."""
        before = self.calls
        jax.block_until_ready(call(self.body))
        return self.calls - before


_compile_events: list[str] = []


def _note(event: str, duration: float, **_: Any) -> None:
    if event.startswith("/jax/core/compile/"):
        _compile_events.append(event)


jax.monitoring.register_event_duration_secs_listener(_note)  # for good: jax 0.8.2 has no way to take it back


def compilations(call: Callable[[], Any]) -> list[str]:
    """The traces, lowerings and compilations that JAX itself reports during a call."""
    before = len(_compile_events)
    jax.block_until_ready(call())
    return _compile_events[before:]
