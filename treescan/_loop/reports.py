"""Reports of running loops, and the meters that receive them.

Each run of a loop has a number, which a callback returns before the first step. With it the loop reports how far it has
come. Callbacks under `custom_vmap` are called once for all elements of a `jax.vmap`. If `jax.checkpoint` computes a
loop again, JAX leaves out equations that have effects and no rule for it, so such a callback is not repeated.
"""

from __future__ import annotations

import atexit
import itertools
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap

from .._avals import is_key, is_sharded
from .._progress import AbstractProgressMeter
from .._types import Array, PyTree

NOBODY = -1
"""The number of a run that nobody shows."""

PATIENCE = 1.0
"""The seconds for which a run is silent before it may be taken for one that was abandoned."""


@dataclass(frozen=True, eq=False)
class Site:
    """A loop of a program that shows its progress: what its runs have in common. It is equal to itself alone.

    Attributes:
        label: what its bars are called.
        meter: what shows them.
        shown: the names of the values beside the bar.
    """

    label: str
    meter: AbstractProgressMeter
    shown: tuple[str, ...] = ()


@dataclass
class _Run:
    site: Site
    total: int | None
    number: int
    done: int = 0
    reported: bool = False
    heard_of: float = field(default_factory=time.monotonic)
    bar: Any = None
    is_open: bool = False
    silent: set[int] = field(default_factory=set[int])


class Report(NamedTuple):
    """How far a run has come, as Python has it; see `Tick`."""

    total: int | None
    done: int
    first: bool
    last: bool


class Runs:
    """The runs that are shown at the moment."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._open: dict[int, _Run] = {}
        self._lock = threading.RLock()

    def begin(self, site: Site, total: int | None) -> int:
        """A new run, shown from now on."""
        with self._lock:
            number = next(self._numbers) % 2**31
            self._show(_Run(site, total, number))
            return number

    def step(self, site: Site, number: int, report: Report, shown: Mapping[str, float]) -> None:
        """So many steps of a run are done; after the last report it has ended."""
        with self._lock:
            run = self._open.get(number)
            if report.first and (run is None or run.reported):  # the compiler made one number of those of two runs
                self._close(run)
                run = _Run(site, report.total, number)
                self._show(run)
            if run is None:
                return
            run.reported, run.heard_of = True, time.monotonic()
            if report.done > run.done:  # chunks of padding change nothing
                run.done = report.done
                self._tell(run, lambda: site.meter.step(run.bar, report.done, shown))
            for other in self._open.values():
                other.silent.discard(number)
            if report.last:
                self.end(number)

    def end(self, number: int) -> None:
        """A run has ended. One of the same loop that began earlier and was silent meanwhile was abandoned."""
        with self._lock:
            run = self._open.get(number)
            self._close(run)
            for other in [] if run is None else map(self._open.get, run.silent):
                if other is not None and time.monotonic() - other.heard_of >= PATIENCE:
                    self._close(other)

    def close_all(self) -> None:
        """Closes what is open."""
        with self._lock:
            for run in list(self._open.values()):
                self._close(run)

    def _show(self, run: _Run) -> None:
        run.silent = {other.number for other in self._open.values() if other.site == run.site}
        self._open[run.number] = run
        run.is_open = True

        def init() -> None:
            run.bar = run.site.meter.init(run.site.label, run.total)

        self._tell(run, init)

    def _close(self, run: _Run | None) -> None:
        if run is not None and self._open.get(run.number) is run:
            del self._open[run.number]
            self._tell(run, lambda: run.site.meter.close(run.bar))

    @staticmethod
    def _tell(run: _Run, call: Callable[[], None]) -> None:
        """Calls the meter. If it fails the run is shown no further: a program does not end for its meter."""
        if not run.is_open:
            return
        try:
            call()
        except Exception as error:
            run.is_open = False
            name = type(run.site.meter).__name__
            text = (
                f"the progress of `{run.site.label}` is shown no further, because the meter `{name}` failed: {error!r}"
            )
            warnings.warn(text, RuntimeWarning, stacklevel=1)


RUNS = Runs()
atexit.register(RUNS.close_all)


class Tick(NamedTuple):
    """What is reported after a chunk; an entry for each where there are several.

    Attributes:
        run: int32[...], the number of the run.
        total: int32[...], its steps; -1: not known.
        done: int32[...], the steps that are done then.
        first: bool[...], whether it is the first report of the run.
        last: bool[...], whether it is the last one.
    """

    run: Array
    total: Array
    done: Array
    first: Array
    last: Array


@dataclass(frozen=True)
class Reporter:
    """The callbacks of a loop."""

    site: Site

    def begin(self, total: Array, probes: Sequence[Array]) -> Array:
        """int32[]: the number of a new run.

        Args:
            total: int32[], the number of steps; -1: not known.
            probes: what has to be known before.
        """

        def told(numbers: Any) -> Any:
            total, device = np.asarray(numbers).tolist()
            return np.int32(NOBODY if device else RUNS.begin(self.site, _known(total)))

        def call(numbers: Array, *probes: Array) -> Array:
            return jax.pure_callback(told, jax.ShapeDtypeStruct((), jnp.int32), _after(numbers, probes))

        return _for_all(call, has_result=True)(jnp.stack([total, _device()]), *probes)

    def step(self, tick: Tick, shown: Sequence[Array], probes: Sequence[Array]) -> None:
        """Reports how far a run has come, once the probes are known."""
        names = self.site.shown

        def told(numbers: Any, *values: Any) -> None:
            run, total, done, first, last = np.asarray(numbers).tolist()
            if run != NOBODY:
                named = {name: np.asarray(value).item() for name, value in zip(names, values, strict=True)}
                RUNS.step(self.site, run, Report(_known(total), done, bool(first), bool(last)), named)

        def call(numbers: Array, *others: Array) -> None:
            jax.debug.callback(told, _after(numbers, others[len(names) :]), *others[: len(names)])

        _for_all(call)(jnp.stack([part.astype(jnp.int32) for part in tick]), *shown, *probes)

    def end(self, run: Array) -> None:
        """Reports the end of a run."""

        def told(run: Any) -> None:
            if int(run) != NOBODY:
                RUNS.end(int(run))

        _for_all(lambda run: jax.debug.callback(told, run))(run)


def _known(total: int) -> int | None:
    return None if total < 0 else total


def _after(numbers: Array, probes: Sequence[Array]) -> Array:
    """The numbers, once the probes are known. Each argument of a callback takes time: what waits is one of them."""
    for probe in probes:
        real = jnp.real(probe).astype(jnp.float32)
        numbers = numbers + (jnp.isnan(real) & jnp.isinf(real)).astype(numbers.dtype)
    return numbers


def _for_all(call: Callable[..., Any], *, has_result: bool = False) -> Callable[..., Any]:
    """A function that is called once for all elements of a vmap: with the values of the first."""

    @custom_vmap
    def once(*args: Array) -> Any:
        result = call(*args)
        return result if has_result else ()

    def rule(axis_size: int, in_batched: Sequence[bool], *args: Array) -> Any:
        pairs = zip(args, in_batched, strict=True)
        first = [_first(arg, axis_size) if batched else arg for arg, batched in pairs]
        return once(*first), (False if has_result else ())

    once.def_vmap(rule)
    return once


def _first(values: Array, size: int) -> Array:
    return values[0] if size else jnp.zeros_like(values, shape=values.shape[1:])


def _device() -> Array:
    """int32[]: the number of this device among those of a `jax.shard_map`, of which the first reports."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return jax.lax.axis_index(tuple(manual)) if manual else jnp.zeros((), jnp.int32)


def probes_of(*trees: PyTree) -> list[Array]:
    """A number of each tree's largest array, which is known only once the tree is: callbacks wait for it."""
    return [probe for tree in trees for probe in _probe_of(jax.tree.leaves(tree))]


def _probe_of(leaves: Sequence[Any]) -> list[Array]:
    arrays = [leaf for leaf in leaves if isinstance(leaf, jax.Array) and leaf.size and not is_key(leaf)]
    if not arrays:
        return []
    array = max(arrays, key=lambda leaf: leaf.size)
    array = jax.lax.stop_gradient(array)
    if is_sharded(array):  # a slice of one would have a type of its own
        return [jnp.any(array != array)]
    return [jax.lax.slice(array, (0,) * array.ndim, (1,) * array.ndim).reshape(())]
