"""`Progress`, and the meters that show it."""

from __future__ import annotations

import abc
import importlib
import importlib.util
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

from ._text import named_fields


class AbstractProgressMeter(abc.ABC):
    """Shows the progress of a loop: a bar, lines of text, entries of a log.

    A meter must be hashable, as frozen dataclasses are, because it is part of the program. It holds no state of a run:
    `step` and `close` receive what `init` returned. They are called from the threads of JAX, one at a time, with Python
    numbers. If one of them raises an exception, you get a warning, and the run is no longer shown. If `step` raises,
    `close` is called.

    Examples:
        >>> import dataclasses
        >>> import jax
        >>> import treescan
        >>> @dataclasses.dataclass(frozen=True)
        ... class Log(treescan.AbstractProgressMeter):
        ...     def init(self, label, total):
        ...         print(f"{label}: {total} steps")
        ...
        ...     def step(self, bar, done, shown):
        ...         print(done, shown)
        ...
        ...     def close(self, bar):
        ...         print("done")
        >>> progress = treescan.Progress("count", updates=2, meter=Log())
        >>> total = treescan.fori(0, 4, lambda i, n: n + i, 0, progress=progress)
        count: 4 steps
        2 {}
        4 {}
        done
        >>> jax.effects_barrier()
    """

    @abc.abstractmethod
    def init(self, label: str, total: int | None) -> Any:
        """Begins a run, before its first step. What it returns is `bar` below. None: the total is not known."""

    @abc.abstractmethod
    def step(self, bar: Any, done: int, shown: Mapping[str, float]) -> None:
        """So many steps of the run are done, counted from 0. `shown` is what `Progress.show` returned."""

    @abc.abstractmethod
    def close(self, bar: Any) -> None:
        """The run has ended, or was abandoned."""


@named_fields
@dataclass(frozen=True)
class Progress:
    """Settings of the progress bar, for the option `progress` of the verbs.

    Attributes:
        label: the name of the bar; None: the name of the body.
        show: values to print next to the bar: a function of the carry, as the body sees it, that returns a dict
            of scalars. It is traced, and computed once for each update.
        updates: how many updates a run has. The loop is cut into at most this many chunks, and no step has a branch.
            None: at most 100, and no more than five a second, so that a bar costs next to nothing. With `backward`
            or `batched`, and for blocks that take turns, None is 20; for a loop that ends early it is 100.
        meter: the meter; None: `Tqdm()` if tqdm is installed, otherwise `Text()`.
        backward: whether the gradient has a bar too, with a label that says so. JAX then differentiates the loop
            only in reverse mode. Loops that end early cannot have one.
        batched: whether each element of a `jax.vmap` has its own bar, with its place in the label.

    Examples:
        >>> import jax.numpy as jnp
        >>> import treescan
        >>> progress = treescan.Progress(
        ...     "decay", show=lambda h: {"h": h}, updates=10, meter=treescan.Text()
        ... )
        >>> h = treescan.fold(
        ...     lambda h, x: h * x, 1.0, jnp.full(100, 0.5), progress=progress
        ... )
    """

    label: str | None = None
    _: KW_ONLY
    show: Callable[[Any], Mapping[str, Any]] | None = None
    updates: int | None = None
    meter: AbstractProgressMeter | None = None
    backward: bool = False
    batched: bool = False


MOST, FEW = 100, 20
"""The updates of a run for which the user gave no number: where they are paced, and where they are not."""


def has_tqdm() -> bool:
    """Whether tqdm is installed."""
    return "tqdm" in sys.modules or importlib.util.find_spec("tqdm") is not None


@dataclass(frozen=True)
class Tqdm(AbstractProgressMeter):
    """A bar of tqdm: in a terminal, or a widget in a notebook. It is the default if tqdm is installed.

    Examples:
        >>> import treescan
        >>> progress = treescan.Progress("train", meter=treescan.Tqdm())
    """

    def init(self, label: str, total: int | None) -> Any:
        """A new bar; that of a loop within another goes when it is done, and those of the elements of a vmap stay."""
        auto: Any = importlib.import_module("tqdm.auto")
        bar = auto.tqdm(total=total, desc=label, leave=None, dynamic_ncols=True)
        bar.leave = bar.pos == 0 or label.endswith("]")  # a widget makes nothing of None: it would go
        return bar

    def step(self, bar: Any, done: int, shown: Mapping[str, float]) -> None:
        """Moves the bar."""
        if shown:
            bar.set_postfix({name: f"{value:.4g}" for name, value in shown.items()}, refresh=False)
        if done == bar.total:  # `close` follows, and draws it
            bar.n = done
        else:
            bar.update(done - bar.n)

    def close(self, bar: Any) -> None:
        """Closes the bar."""
        bar.close()


@dataclass
class _Line:
    """The line of one run."""

    label: str
    total: int | None
    began: float = field(default_factory=time.monotonic)
    done: int = 0
    shown: Mapping[str, float] = field(default_factory=dict[str, float])
    tenths: int = -1

    def __str__(self) -> str:
        took = time.monotonic() - self.began
        rate = f"{self.done / took:.4g} steps/s" if self.done and took > 0 else ""
        part = f"{self.done}" if self.total is None else f"{self.done}/{self.total}"
        percent = f"{100 * self.done // self.total}%" if self.total else ""
        values = " ".join(f"{name}={value:.4g}" for name, value in self.shown.items())
        return f"{self.label}: " + ", ".join(filter(None, [percent, part, rate, values]))


_lines: list[_Line] = []  # those that a terminal shows, side by side, outermost first
_lock = threading.RLock()


@dataclass(frozen=True)
class Text(AbstractProgressMeter):
    """Text on the standard error stream: in a terminal one line that is updated, otherwise a line for each tenth.

    It is the default if tqdm is not installed.

    Examples:
        >>> import treescan
        >>> progress = treescan.Progress("train", meter=treescan.Text())
    """

    def init(self, label: str, total: int | None) -> Any:
        """A new line, beside those of the loops around."""
        line = _Line(label, total)
        with _lock:
            if sys.stderr.isatty():
                _lines.append(line)
        self.step(line, 0, {})
        return line

    def step(self, bar: Any, done: int, shown: Mapping[str, float]) -> None:
        """Writes the line."""
        line: _Line = bar
        line.done, line.shown = done, shown
        with _lock:
            if line in _lines:
                _rewrite()
                return
            tenths = 10 * done // line.total if line.total else done
            if tenths > line.tenths:
                line.tenths = tenths
                sys.stderr.write(f"{line}\n")
                sys.stderr.flush()

    def close(self, bar: Any) -> None:
        """Ends the line, where no other is beside it."""
        with _lock:
            if bar in _lines:
                if len(_lines) == 1:
                    sys.stderr.write("\n")
                _lines.remove(bar)
                if _lines:
                    _rewrite()
                sys.stderr.flush()


def _rewrite() -> None:
    room = shutil.get_terminal_size().columns - 1  # what is wider would be broken into lines that stay
    sys.stderr.write("\r\x1b[K" + " | ".join(map(str, _lines))[:room])
    sys.stderr.flush()


@dataclass(frozen=True)
class _ShowOf:
    """`show` of a `Progress`, of what is read from the state of a loop."""

    show: Callable[[Any], Any]
    read: Callable[[Any], Any]

    def __call__(self, state: Any) -> Any:
        return self.show(self.read(state))


def shown_as(progress: Any, read: Callable[[Any], Any]) -> Any:
    """What the user gave as `progress`, with a `show` that receives what is read from the state."""
    if isinstance(progress, Progress) and callable(progress.show):
        return replace(progress, show=_ShowOf(progress.show, read))
    return progress
