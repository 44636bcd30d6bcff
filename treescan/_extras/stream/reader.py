"""The thread of a stream that reads parts ahead, under the settings of its caller."""

from __future__ import annotations

import contextlib
import contextvars
import queue
import threading
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from ..._avals import Array
from ..._errors import warn_user
from ..._verbs.progress import around, within
from .program import mesh_that_is_set
from .sources import Read

PATIENCE = 1.0
"""The seconds for which the end of a stream waits for a source. What it waits for may never come."""


class Reader:
    """Reads parts ahead: at most `prefetch` beside the one that runs.

    A source may be a function of the settings of JAX, which belong to a thread. So it is read by the thread ahead only
    if all of them are there what they are here, and else by the caller's thread.

    Args:
        parts: what is read.
        prefetch: how many parts are read ahead; 0: each part is read when it is needed, in the caller's thread.
        once: whether a part that was read is gone.
    """

    def __init__(self, parts: Iterator[Read], prefetch: int, *, once: bool = False) -> None:
        self._parts = parts
        self._once = once
        self._room = threading.Semaphore(prefetch + 1)
        self._ready = queue.SimpleQueue[Read | BaseException | None]()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        if prefetch:
            work, settings, are_here = contextvars.copy_context().run, Settings(), queue.SimpleQueue[bool]()
            given = (self._work, settings, are_here)
            thread = threading.Thread(target=work, args=given, name="treescan.stream", daemon=True)
            thread.start()
            if are_here.get():
                self._thread = thread

    def __iter__(self) -> Iterator[Read]:
        while True:
            found = self._read() if self._thread is None else self._ready.get()
            if found is None:
                return
            if isinstance(found, BaseException):
                raise found
            yield found

    def part_is_done(self) -> None:
        """One part has run: there is room for another one."""
        self._room.release()

    def close(self) -> None:
        """Ends the thread; one that waits for its source ends with what it waits for, and is not waited for long."""
        self._stopped.set()
        self._room.release()
        if self._thread is not None:
            self._thread.join(timeout=PATIENCE)
            if self._once and self._thread.is_alive():
                warn_user(
                    "`treescan.stream` has ended, but its thread still waits for the next part of the iterator that it "
                    "was given. It takes this part when it comes, and nobody receives it. Give another run an iterator "
                    "of its own.",
                    UserWarning,
                )

    def _work(self, settings: Settings, are_here: queue.SimpleQueue[bool]) -> None:
        with contextlib.ExitStack() as stack:
            goes_on = settings.enter(stack)
            are_here.put(goes_on)
            while goes_on:
                self._room.acquire()
                if self._stopped.is_set():
                    return
                found = self._read()
                self._ready.put(found)
                goes_on = isinstance(found, Read)

    def _read(self) -> Read | BaseException | None:
        """The next part on the device, or what was raised instead; None: it was the last."""
        try:
            read = next(self._parts, None)
            return None if read is None else read._replace(xs=jax.tree.map(_placed, read.xs))
        except BaseException as error:
            return error


def _placed(leaf: Array | np.ndarray) -> Array:
    """A leaf on the device: on the default one, or for arrays of JAX where they are, but not in memory of the host."""
    if isinstance(leaf, np.ndarray):
        return jax.device_put(leaf)
    sharding = leaf.sharding
    with contextlib.suppress(Exception):  # not all backends have several kinds of memory
        device: Any = next(iter(sharding.device_set))
        kind = device.default_memory().kind
        if sharding.memory_kind != kind:
            return jax.device_put(leaf, sharding.with_memory_kind(kind))
    return leaf


class Settings:
    """The settings of JAX in the thread that makes this: those of its configuration, and contexts.

    Public names enter most of them in another thread. Whether that was all is not left to a list of what JAX has:
    values are compared, and a function that JAX traces once under equal contexts is traced no second time.
    """

    def __init__(self) -> None:
        self._values, self._mesh, self._shown = _values(), mesh_that_is_set(), around()
        self._traces = list[None]()
        self._traced = jax.jit(lambda: self._traces.append(None))
        self._trace()

    def enter(self, stack: contextlib.ExitStack) -> bool:
        """Enters the settings in this thread; returns whether all of them are now what they were in the other."""
        try:
            for name, value in _values().items():
                manager: Any = getattr(jax, name.removeprefix("jax_"), None)
                if value != self._values[name] and name != _GUARD and manager is not None:
                    stack.enter_context(manager(self._values[name]))
            if self._mesh is not None:
                stack.enter_context(jax.set_mesh(self._mesh))
            stack.enter_context(within(self._shown))
            self._trace()
        except Exception:  # a setting of JAX to come may be entered in another way
            return False
        return len(self._traces) == 1 and _values() == self._values

    def _trace(self) -> None:
        with jax.no_tracing(False):
            jax.eval_shape(self._traced)


_GUARD = "jax_thread_guard"
"""It says that no other thread may run what this one runs."""


def _values() -> dict[str, object]:
    config: Any = jax.config
    return {name: getattr(config, name) for name in config.values if hasattr(config, name)}
