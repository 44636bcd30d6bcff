"""`Progress`, the meters that show it, and the reports of running loops that they receive.

Each run of a loop has a number, which a callback returns before the first step. With it the loop reports how far it has
come. Callbacks under `custom_vmap` are called once for all elements of a `jax.vmap`, which share a run. If
`jax.checkpoint` computes a loop again, JAX leaves out equations that have effects and no rule for it, so such a
callback is not repeated.
"""

from __future__ import annotations

import abc
import atexit
import contextlib
import importlib
import importlib.util
import itertools
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap

from ..._avals import Array, PyTree, is_key, is_sharded, unspread
from ..._errors import named_fields


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
        ... class Log(treescan.meters.AbstractProgressMeter):
        ...     def init(self, label, total):
        ...         print(f"{label}: {total} steps")
        ...
        ...     def step(self, bar, done, shown):
        ...         print(done, shown)
        ...
        ...     def close(self, bar):
        ...         print("done")
        >>> progress = treescan.meters.Progress("count", updates=2, meter=Log())
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
            None: at most 100, and no more than five a second, so that a bar costs next to nothing. For blocks that
            take turns, None is 20; for a loop that ends early it is 100.
        meter: the meter; None: `Tqdm()` if tqdm is installed, otherwise `Text()`.

    Examples:
        >>> import jax.numpy as jnp
        >>> import treescan
        >>> progress = treescan.meters.Progress(
        ...     "decay",
        ...     show=lambda h: {"h": h},
        ...     updates=10,
        ...     meter=treescan.meters.Text(),
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


MOST, FEW = 100, 20
"""The updates of a run for which the user gave no number: where they are paced, and where they are not."""


def has_tqdm() -> bool:
    """Whether tqdm is installed."""
    return "tqdm" in sys.modules or importlib.util.find_spec("tqdm") is not None


@named_fields
@dataclass(frozen=True)
class Tqdm(AbstractProgressMeter):
    """A bar of tqdm: in a terminal, or a widget in a notebook. It is the default if tqdm is installed.

    Examples:
        >>> import treescan
        >>> progress = treescan.meters.Progress("train", meter=treescan.meters.Tqdm())
    """

    def init(self, label: str, total: int | None) -> Any:
        """A new bar; that of a loop within another goes when it is done."""
        auto: Any = importlib.import_module("tqdm.auto")
        bar = auto.tqdm(total=total, desc=label, leave=None, dynamic_ncols=True)
        bar.leave = bar.pos == 0  # a widget makes nothing of None: it would go
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
    label: str
    total: int | None
    tenths: int = -1


@named_fields
@dataclass(frozen=True)
class Text(AbstractProgressMeter):
    """Lines of text on the standard error stream, one for each tenth of a run. It is the default without tqdm.

    Examples:
        >>> import treescan
        >>> progress = treescan.meters.Progress("train", meter=treescan.meters.Text())
    """

    def init(self, label: str, total: int | None) -> Any:
        """Writes the first line."""
        line = _Line(label, total)
        self.step(line, 0, {})
        return line

    def step(self, bar: Any, done: int, shown: Mapping[str, float]) -> None:
        """Writes a line, if a tenth more is done; if there is no total, in each step."""
        line: _Line = bar
        tenths = 10 * done // line.total if line.total else done
        if tenths > line.tenths:
            line.tenths = tenths
            of_total = f"{100 * done // line.total}%, {done}/{line.total}" if line.total else f"{done}"
            values = "".join(f", {name}={value:.4g}" for name, value in shown.items())
            sys.stderr.write(f"{line.label}: {of_total}{values}\n")
            sys.stderr.flush()

    def close(self, bar: Any) -> None:
        """Nothing is left to do."""


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


def packed(numbers: Array, values: Sequence[Array]) -> tuple[Array, list[Array]]:
    """Numbers and values in one array of words, and the values that do not fit a word.

    JAX moves each argument of a callback to the host by itself: one took 50 microseconds, and each further one 35.
    """
    words = [numbers]
    for value in values:
        if value.dtype.itemsize <= 4:
            floating = jnp.issubdtype(value.dtype, jnp.floating)
            word = jax.lax.bitcast_convert_type(value.astype(jnp.float32), jnp.int32) if floating else value
            words.append(word.astype(jnp.int32)[..., None])
    return jnp.concatenate(words, axis=-1), [value for value in values if value.dtype.itemsize > 4]


def unpacked(words: Any, wide: Sequence[Any], kinds: Sequence[Any]) -> Iterator[Any]:
    """The values again, of these dtypes."""
    others, places = iter(wide), itertools.count()
    for kind in kinds:
        if kind.itemsize > 4:
            yield next(others)
            continue
        one = np.float32 if jnp.issubdtype(kind, jnp.floating) else np.uint32 if kind.kind == "u" else np.int32
        yield np.ascontiguousarray(words[..., next(places)]).view(one)


INTERVAL = 0.2
"""The seconds from one report to the next."""

SHARE = 0.02
"""The part of the time that reports may take. If a meter is slow, it is told less often."""

GROWTH = 10
"""By which factor the steps that are done may grow between two reports: later steps may be slower than these."""

NEVER = 2**31 - 1
"""The steps after which the next report is due of a run that makes none."""


@dataclass
class Pace:
    """How fast a run is, from its last report to this one.

    Attributes:
        began: when the run began.
        since: when the last report had been shown; before the first, when the run began.
        done: the steps that were done then.
    """

    began: float = field(default_factory=time.monotonic)
    since: float = field(init=False)
    done: int = 0

    def __post_init__(self) -> None:
        self.since = self.began

    def due_of_the_next_run(self, done: int) -> int:
        """The steps after which the first report is due of the next run of the same loop, now that this one has ended.

        Args:
            done: the steps of this run.
        """
        return min(max(1, int(INTERVAL * done / max(time.monotonic() - self.began, 1e-9))), NEVER)

    def next_due(self, done: int, heard: float) -> int:
        """The steps after which the next report is due, now that this one was shown.

        Args:
            done: the steps that are done.
            heard: when this report came.
        """
        now = time.monotonic()
        interval = max(INTERVAL, (now - heard) / SHARE)
        further = int(interval * (done - self.done) / max(heard - self.since, 1e-9))
        self.since, self.done = now, done
        return min(done + max(1, further), max(1, GROWTH * done), NEVER)


NOBODY = -1
"""The number of a run that is not shown."""

PATIENCE, RATIO = 1.0, 5
"""A run may be taken for one that was abandoned if it is silent for so many seconds, and so many times as long as runs
of its loop were before. That it was is not known: if it reports again, it is shown again."""

DOUBTED = 100
"""How many of such runs are kept."""


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
    longest: float = 0.0
    pace: Pace = field(default_factory=Pace)
    bar: Any = None
    is_open: bool = False
    silent: set[int] = field(default_factory=set[int])

    def hear(self) -> None:
        """A report has come."""
        now = time.monotonic()
        self.longest, self.heard_of = max(self.longest, now - self.heard_of), now

    def seems_abandoned(self, longest: float) -> bool:
        """Whether it has been silent for too long; `longest` is for how long another run of its loop was."""
        silence = time.monotonic() - self.heard_of
        return silence >= PATIENCE and silence >= RATIO * max(self.longest, longest)


class Report(NamedTuple):
    """How far a run has come, as Python has it; see `Tick`."""

    total: int | None
    done: int
    first: bool
    last: bool


_Heard = tuple[int, Report, dict[str, float]]


class Runs:
    """The runs that are shown at the moment."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._open: dict[int, _Run] = {}
        self._doubted: dict[int, _Run] = {}
        self._first_due = weakref.WeakKeyDictionary[Site, int]()
        self._lock = threading.RLock()

    def begin(self, site: Site, total: int | None) -> int:
        """A new run, shown from now on."""
        with self._lock:
            number = next(self._numbers) % NEVER
            self._show(_Run(site, total, number))
            return number

    def step(self, site: Site, number: int, report: Report, shown: Mapping[str, float]) -> None:
        """So many steps of a run are done; after the last report it has ended."""
        with self._lock:
            doubted, run = self._doubted.pop(number, None), self._open.get(number)
            if doubted is not None and not report.first:
                run = doubted
                self._show(run)
            if report.first and (run is None or run.reported):  # the compiler made one number of those of two runs
                self._close(run)
                run = _Run(site, report.total, number)
                self._show(run)
            if run is None:
                return
            run.reported = True
            run.hear()
            if report.done > run.done:  # chunks of padding change nothing
                run.done = report.done
                if run.is_open:
                    self._tell(run, lambda: site.meter.step(run.bar, report.done, shown))
            for other in self._open.values():
                other.silent.discard(number)
            if report.last:
                self.end(number)

    def step_and_pace(self, site: Site, number: int, report: Report, shown: Mapping[str, float]) -> int:
        """So many steps of a run are done. Returns the number of steps after which the next report is due."""
        heard = time.monotonic()
        with self._lock:
            self.step(site, number, report, shown)
            run = self._open.get(number)
            return NEVER if run is None else run.pace.next_due(report.done, heard)

    def first_due(self, site: Site) -> int:
        """The steps after which the first report is due of a run: the first chunk's, if the loop has not run before."""
        with self._lock:
            return self._first_due.get(site, 1)

    def end(self, number: int) -> None:
        """A run has ended. One of the same loop that began earlier and was silent meanwhile may have been abandoned."""
        with self._lock:
            run = self._open.get(number)
            self._doubted.pop(number, None)
            if run is None:
                return
            if run.done:
                self._first_due[run.site] = run.pace.due_of_the_next_run(run.done)
            self._close(run)
            for other in map(self._open.get, run.silent):
                if other is not None and other.seems_abandoned(run.longest):
                    if other.is_open:
                        self._doubted[other.number] = other
                    self._close(other)
            for oldest in list(self._doubted)[:-DOUBTED]:
                del self._doubted[oldest]

    def close_all(self) -> None:
        """Closes what is open."""
        with self._lock:
            for run in list(self._open.values()):
                self._close(run)

    def _show(self, run: _Run) -> None:
        run.silent = {other.number for other in self._open.values() if other.site == run.site}
        self._open[run.number] = run

        def init() -> None:
            run.bar = run.site.meter.init(run.site.label, run.total)
            run.is_open = True

        self._tell(run, init)

    def _close(self, run: _Run | None) -> None:
        if run is not None and self._open.get(run.number) is run:
            del self._open[run.number]
            if run.is_open:
                run.is_open = False
                self._tell(run, lambda: run.site.meter.close(run.bar))

    @staticmethod
    def _tell(run: _Run, call: Callable[[], None]) -> None:
        """Calls the meter. If it fails, the run is no longer shown and its bar is closed, but the program continues."""
        try:
            call()
        except Exception as error:
            if run.is_open:
                run.is_open = False
                with contextlib.suppress(Exception):  # the meter that failed may fail here too
                    run.site.meter.close(run.bar)
            name = type(run.site.meter).__name__
            text = (
                f"the progress of `{run.site.label}` is shown no further, because the meter `{name}` failed: {error!r}"
            )
            warnings.warn(text, RuntimeWarning, stacklevel=1)


RUNS = Runs()
atexit.register(RUNS.close_all)


class Tick(NamedTuple):
    """What is reported of a chunk; an entry for each where there are several.

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

    @property
    def numbers(self) -> Array:
        """int32[5, ...]: all of it."""
        return jnp.stack([part.astype(jnp.int32) for part in self])


@dataclass(frozen=True)
class Reporter:
    """The callbacks of a loop."""

    site: Site

    def begin(self, total: Array, probes: Sequence[Array], *, paced: bool = False) -> Array:
        """int32[]: the number of a new run. If it is paced, int32[2]: also the `due` of its first report.

        Args:
            total: int32[], the number of steps; -1: not known.
            probes: what has to be known before.
            paced: whether a report is only made when it is due.
        """

        def told(numbers: Any) -> Any:
            total, device = np.asarray(numbers).tolist()
            run = NOBODY if device else RUNS.begin(self.site, _known(total))
            if not paced:
                return np.int32(run)
            return np.array([run, NEVER if device else -RUNS.first_due(self.site)], np.int32)

        def call(numbers: Array, *probes: Array) -> Array:
            types = jax.ShapeDtypeStruct((2,) if paced else (), jnp.int32)
            return jax.pure_callback(told, types, _after(numbers, probes))

        return self._once(call, has_result=True)(jnp.stack([total, _device()]), *probes)

    def step(self, tick: Tick, shown: Sequence[Array], probes: Sequence[Array]) -> None:
        """Reports how far a run has come, once the probes are known."""

        def told(words: Any, *wide: Any) -> None:
            heard = self._heard(kinds, words, wide)
            if heard is not None:
                RUNS.step(self.site, *heard)

        kinds = [np.dtype(value.dtype) for value in shown]
        call = self._once(lambda numbers, *others: jax.debug.callback(told, *self._words(numbers, others)))
        call(tick.numbers, *shown, *probes)

    def step_if_due(
        self, run: Array, total: Array, done: Array, due: Array, shown: Sequence[Array], probes: Sequence[Array]
    ) -> Array:
        """Reports how far a run has come, if `due` steps are done; but not that it has ended.

        The result has to be used, or JAX leaves the callback out: it has no effect that JAX knows of. So it is not
        called once more where `jax.checkpoint` computes the loop again, because nothing there needs its result.

        Returns:
            int32[], the steps after which the next report is due. Before the first report, `due` is less than 0.
        """

        def told(words: Any, *wide: Any) -> Any:
            heard = self._heard(kinds, words, wide)
            return np.int32(NEVER if heard is None else RUNS.step_and_pace(self.site, *heard))

        def call(numbers: Array, *others: Array) -> Array:
            return jax.pure_callback(told, jax.ShapeDtypeStruct((), jnp.int32), *self._words(numbers, others))

        def tell() -> Array:
            tick = Tick(run, total, done, first=due < 0, last=jnp.zeros((), bool))
            return self._once(call, has_result=True)(tick.numbers, *shown, *probes)

        kinds = [np.dtype(value.dtype) for value in shown]
        return jax.lax.cond((done >= jnp.abs(due)) & (done < total), tell, lambda: due)

    def _words(self, numbers: Array, others: Sequence[Array]) -> list[Array]:
        """What a callback is given, once the probes are known, which come after the values."""
        count = len(self.site.shown)
        words, wide = packed(_after(numbers, others[count:]), others[:count])
        return [words, *wide]

    def _heard(self, kinds: Sequence[Any], given: Any, wide: Sequence[Any]) -> _Heard | None:
        """The arguments of `Runs.step`; `kinds` are those of the values that are shown. None: it is not shown."""
        words, count = np.asarray(given), len(Tick._fields)
        run, total, done, first, last = words[:count].tolist()
        if run == NOBODY:
            return None
        values = unpacked(words[count:], [np.asarray(value) for value in wide], kinds)
        named = {name: value.item() for name, value in zip(self.site.shown, values, strict=True)}
        return run, Report(_known(total), done, bool(first), bool(last)), named

    def end(self, run: Array) -> None:
        """Reports the end of a run."""

        def told(run: Any) -> None:
            if int(run) != NOBODY:
                RUNS.end(int(run))

        self._once(lambda run: jax.debug.callback(told, run))(run)

    def _once(self, call: Callable[..., Any], *, has_result: bool = False) -> Callable[..., Any]:
        """A function that is called once for all elements of a vmap, with the values of the first one.

        Args:
            call: the function.
            has_result: whether it returns one array.
        """

        @custom_vmap
        def once(*args: Array) -> Any:
            result = call(*args)
            # Under `jax.set_mesh`, JAX cannot compile a function whose result is that of a callback itself.
            return jax.lax.optimization_barrier(result) if has_result else ()

        def rule(size: int, in_batched: Sequence[bool], *args: Array) -> Any:
            def given(arg: Array, is_batched: bool) -> Array:
                if not is_batched:
                    return arg
                return unspread(arg)[0] if size else jnp.zeros_like(arg, shape=arg.shape[1:])

            # Not by `once`: JAX keeps its trace, and this rule with it, until `once` is gone.
            again = self._once(call, has_result=has_result)
            return again(*map(given, args, in_batched)), False if has_result else ()

        once.def_vmap(rule)

        def compiled(*args: Array) -> Any:
            with jax.disable_jit(False):
                return jax.jit(once, inline=True)(*args)

        return compiled if has_result else once


def _known(total: int) -> int | None:
    return None if total < 0 else total


def _after(numbers: Array, probes: Sequence[Array]) -> Array:
    """The numbers, once the probes are known. Each argument of a callback takes time: what waits is one of them."""
    for probe in probes:
        real = jnp.real(probe).astype(jnp.float32)
        numbers = numbers + (jnp.isnan(real) & jnp.isinf(real)).astype(numbers.dtype)
    return numbers


def _device() -> Array:
    """int32[]: the number of this device among those of a `jax.shard_map`, of which the first reports."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return jax.lax.axis_index(tuple(manual)) if manual else jnp.zeros((), jnp.int32)


def probes_of(*trees: PyTree) -> list[Array]:
    """A number of each tree's largest array, which is known only once the tree is: callbacks wait for it."""
    probes = list[Array]()
    for leaves in map(jax.tree.leaves, trees):
        arrays = [leaf for leaf in leaves if isinstance(leaf, jax.Array) and leaf.size and not is_key(leaf)]
        if arrays:
            array = jax.lax.stop_gradient(max(arrays, key=lambda leaf: leaf.size))
            sharded = is_sharded(array)  # a slice of one would have a type of its own
            first = None if sharded else jax.lax.slice(array, (0,) * array.ndim, (1,) * array.ndim).reshape(())
            probes.append(jnp.any(array != array) if first is None else first)
    return probes


def probes_after(state: PyTree) -> list[Array]:
    """A number of each leaf of a loop's last state: a leaf that no step changes is known before the loop has run."""
    return probes_of(*jax.tree.leaves(state))
