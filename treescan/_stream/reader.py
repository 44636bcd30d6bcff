"""The thread that reads the next parts and puts them on the device while one runs."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from .sources import Read

_END: Any = object()


class Reader:
    """Reads parts ahead: at most `prefetch` beside the one that runs.

    Args:
        parts: what is read.
        prefetch: how many parts are read ahead; 0: each part is read when it is needed, in the caller's thread.
    """

    def __init__(self, parts: Iterator[Read], prefetch: int) -> None:
        self._parts = parts
        self._room = threading.Semaphore(prefetch + 1)
        self._ready: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        if prefetch:
            config: Any = jax.config  # settings belong to a thread
            settings = config.jax_default_device, config.jax_enable_x64
            self._thread = threading.Thread(target=self._work, args=settings, name="treescan.stream", daemon=True)
            self._thread.start()

    def __iter__(self) -> Iterator[Read]:
        while True:
            found = self._read() if self._thread is None else self._ready.get()
            if found is _END:
                return
            if isinstance(found, BaseException):
                raise found
            yield found

    def part_is_done(self) -> None:
        """One part has run: there is room for another one."""
        self._room.release()

    def close(self) -> None:
        """Ends the thread; one that waits for its source ends with what it waits for."""
        self._stopped.set()
        self._room.release()
        if self._thread is not None:
            self._thread.join(timeout=1.0)

    def _work(self, device: Any, x64: bool) -> None:
        with jax.default_device(device), jax.enable_x64(x64):
            while True:
                self._room.acquire()
                if self._stopped.is_set():
                    return
                found = self._read()
                self._ready.put(found)
                if not isinstance(found, Read):
                    return

    def _read(self) -> Any:
        """The next part on the device, the end, or what was raised instead."""
        try:
            read = next(self._parts, None)
            return _END if read is None else read._replace(xs=jax.tree.map(_placed, read.xs))
        except BaseException as error:
            return error


def _placed(leaf: Any) -> jax.Array:
    """A leaf on the device: on the default one, or for arrays of JAX where they are, but not in memory of the host."""
    if isinstance(leaf, np.ndarray):
        return jax.device_put(leaf)
    sharding = leaf.sharding
    with contextlib.suppress(Exception):  # not all backends have several kinds of memory
        kind = next(iter(sharding.device_set)).default_memory().kind
        if sharding.memory_kind != kind:
            return jax.device_put(leaf, sharding.with_memory_kind(kind))
    return leaf
