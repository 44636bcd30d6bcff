"""The loop over the parts of a stream, on the host: what it refuses, its parts, its bar, and the calls of scan."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.experimental import multihost_utils

from ..._avals import Array, ArrayLike, PyTree, is_weak, promoted
from ..._body.call import takes_keyword
from ..._body.carry import read_carries
from ..._errors import Fault, Misuse, TracedMisuse, explain
from ..._loop.loop import Body
from ..._options.progress.meters import RUNS, Progress, Report, Site, probes_of
from ..._outputs.outputs import ALL, LAST, check_save, is_positions
from ..._rows.checks import check_lengths
from ..._tree import Prefix, freeze_static, leaves_with_path, map_leaves, short_html, short_repr, thaw_static
from ..._types import Carry, ProgressLike, Save, Y
from ...carries._registry import adopt
from .program import compare, is_of_all_processes
from .reader import Reader
from .sources import Read, Source, padded

if TYPE_CHECKING:
    from .checkpoint import Folder


@dataclass(frozen=True, repr=False)
class Part(Generic[Carry, Y]):
    """A part of a stream that has run.

    Attributes:
        start: the position of its first step in the whole run. With `reverse=True`, parts come from the last one on.
        length: the number of its steps.
        ys: the outputs of its steps, `[length, ...]`; with `save="last"`, the last output so far.

    Examples:
        >>> import jax.numpy as jnp
        >>> import treescan
        >>> def step(total, x):
        ...     return total + x, total
        >>> parts = treescan.stream(
        ...     step, jnp.float32(0), jnp.arange(5.0), part=2, parts=True
        ... )
        >>> for part in parts:
        ...     print(part.start, part.ys, part.carry)
        0 [0. 0.] 1.0
        2 [1. 3.] 6.0
        4 [6.] 10.0
    """

    start: int
    length: int
    ys: Y
    _carry: Carry | None = None
    _is_donated: bool = False

    @property
    def carry(self) -> Carry:
        """The carry after the last of its steps.

        Raises:
            ArgumentError: with `donate=True`, as its memory is that of the next carry.
        """
        if self._is_donated:
            says = f"{{verb}}: the carry of the part at step {self.start} was donated to the next part."
            raise explain(
                Misuse(says, "Leave `donate=True` out to read carries. A second one is then in memory."), "carry"
            )
        carry: Any = self._carry
        return carry

    def _shown(self) -> dict[str, PyTree]:
        carry = {} if self._is_donated else {"carry": self._carry}
        return {"start": np.asarray(self.start), "length": np.asarray(self.length), "ys": self.ys, **carry}

    def __repr__(self) -> str:
        return short_repr("Part", **self._shown())

    def _repr_html_(self) -> str:
        return short_html("Part", **self._shown())


Move: TypeAlias = Callable[[int, Mapping[str, Array]], None]
"""Moves a bar: the steps that are done, and the values beside it."""

NO_LIMIT = 2**31 - 1
"""The length of a masked loop without rows, before the end of its source."""


def lengths_of(lengths: ArrayLike | None, source: Source, body: Body, *, masks: bool) -> np.ndarray | None:
    """int32[*batch], of the rows; NO_LIMIT for a loop without rows that is masked. None: nothing is.

    Args:
        lengths: as the user gave them.
        source: what is read.
        body: the body, which may take `valid`.
        masks: whether a last part of fewer steps is masked.
    """
    if isinstance(lengths, jax.Array) and not (lengths.is_fully_addressable or lengths.is_fully_replicated):
        lengths = multihost_utils.process_allgather(lengths, tiled=True)  # each process needs those of all rows
    if lengths is not None:
        return np.asarray(check_lengths(lengths, source.length)).astype(np.int32)
    is_even = source.length is not None and source.length % source.part == 0
    if takes_keyword(body, "valid") or (masks and not is_even):
        return np.asarray(NO_LIMIT, np.int32)
    return None


def check_save_of(save: Save, source: Source) -> Prefix | None:
    """What is kept of y. The positions k-1, 2k-1 and so on are the same in each part and in the whole."""
    if any(map(is_positions, Prefix.of(save).leaves)):
        raise Misuse(
            "{call}: `save` has positions, which {verb} does not take.",
            "Keep all outputs, and pick those of each part: `part.ys` begins at the position `part.start`.",
        )
    keeps = check_save(save)
    for keep in [] if keeps is None or source.length == source.part else keeps.leaves:
        if keep and source.part % keep:
            raise Misuse(
                f"{{call}}: `save={keep}` needs a `part` that is a multiple of {keep}, got {source.part}.",
                f"Pass `part={max(1, source.part // keep) * keep}`, for example.",
            )
    return keeps


def refuse_tracers(init: PyTree, source: object) -> None:
    """Refuses values of a transformation of JAX in what a stream is given, and a stream that is called under one."""
    for name, tree in {"init": init, "source": None if isinstance(source, Iterator) else source}.items():
        for path, leaf in leaves_with_path(name, tree):
            refuse_traced(f"{path} is traced", [leaf])
    refuse_traced("this is called under a transformation", [jax.lax.stop_gradient(0.0)])


def refuse_traced(what: str, leaves: list[Any]) -> None:
    """Refuses values of a transformation of JAX."""
    if any(isinstance(leaf, Tracer) for leaf in leaves):
        raise TracedMisuse(
            f"{{call}}: {what}, but the loop over the parts runs on the host.",
            "Under a transformation of JAX, use `treescan.scan` or `treescan.mask_scan`. The body of a stream may use "
            "all of them.",
        )


class _Ran(NamedTuple):
    """A part that was sent to the device.

    Attributes:
        read: what was read of it.
        carry: the carry after it, until it is given to the next part.
        ys: its outputs.
        last: the leaves of y of which the last one is kept, so far.
        shown: the values beside the bar.
        probe: what is known once it has run.
    """

    read: Read
    carry: PyTree
    ys: PyTree
    last: list[Array]
    shown: dict[str, Array]
    probe: PyTree


@dataclass
class Run:
    """A stream that has not run yet.

    Attributes:
        call: runs a part: from (carry, xs, its steps, the position of the first, lengths) to (carry, ys).
        init: the carry that the first step is given.
        source: what is read.
        lengths: int32[*batch], of the rows; NO_LIMIT for a loop without rows that is masked. None: nothing is.
        keeps: what is kept of y, a prefix of it; None: all.
        donates: whether the memory of a carry is that of the next one.
        prefetch: how many parts are read ahead.
        bar: shows the progress; None: nothing does.
        folder: the checkpoints; None: there are none.
        program: makes what the run is, to be compared if all processes read parts together; None: it was compared.
    """

    call: Callable[[PyTree, PyTree, int, int, np.ndarray | None], tuple[PyTree, PyTree]]
    init: PyTree
    source: Source
    lengths: np.ndarray | None
    keeps: Prefix | None
    donates: bool
    prefetch: int
    bar: Bar | None = None
    folder: Folder | None = None
    program: Callable[[], dict[str, str]] | None = None

    def parts(self) -> Generator[Part[PyTree, PyTree], None, tuple[PyTree, PyTree]]:
        """Runs all parts. Each is given once the next one is on its way, and saved when the caller comes back."""
        with contextlib.ExitStack() as stack:
            carry, last, done, steps, state, is_new = self.init, list[Array](), 0, 0, None, True
            if self.folder is not None:
                stack.enter_context(self.folder.opened())
                if (saved := self.folder.latest(_bare(self.init))) is not None:
                    carry, last, is_new = _dressed(self.init, saved.carry), saved.last, False
                    done, steps, state = saved.done, saved.steps, saved.source
                    if saved.finished:
                        return carry, self._result(self._types_of_ys(), last)
            reads = self.source.read(done, state, self._is_due)
            if self.lengths is not None:
                reads = (padded(read, self.source.part) for read in reads)
            reader = Reader(reads, self.prefetch, once=self.source.reads_once)
            stack.callback(reader.close)
            bar = self.bar
            show = None if bar is None else stack.enter_context(bar.shown(steps, self.source.length))
            parts, ran = iter(reader), cast("_Ran | None", None)
            read = next(parts, None)
            if read is None:
                raise _no_steps(steps)
            if self.program is not None and is_of_all_processes(read.xs):
                compare(self.program())
            carry = self._begin(carry, read) if is_new else carry
            while read is not None:
                waiting, ran = ran, self._run(carry, last, read)
                carry, last = ran.carry, ran.last
                if waiting is not None:
                    yield from self._give(waiting, reader, show)
                read = next(parts, None)
                if read is None:
                    self._refuse_longer(ran.read.done)
                elif self.donates and self._is_due(ran.read.number):  # its carry is saved before the next part has it
                    yield from self._give(ran, reader, show)
                    ran = None
            assert ran is not None
            yield from self._give(ran, reader, show, final=True)
            return carry, self._result(ran.ys, last)

    @contextlib.contextmanager
    def noted(self, part: Part[PyTree, PyTree]) -> Generator[None]:
        """Adds to what `on_part` raises which part it was given, and what is kept."""
        try:
            yield
        except Exception as error:
            error.add_note(f"`on_part` of `treescan.stream` raised this for the part at step {part.start}.")
            if self.folder is not None:
                error.add_note(self.folder.says_what_is_kept())
            raise

    def _is_due(self, number: int) -> bool:
        return self.folder is not None and self.folder.is_due(number)

    def _begin(self, init: PyTree, read: Read) -> PyTree:
        """The carry of the first part: a copy that may be donated, of the types that the loop settles on.

        The loop gives Python numbers in `init` another dtype, once. Here this happens before the first part, so that
        all parts are one program.
        """
        leaves, structure = jax.tree.flatten(_bare(init))
        if any(map(is_weak, leaves)):
            types = jax.eval_shape(lambda: jax.tree.leaves(_bare(self._call(init, read)[0])))
            leaves = [promoted(leaf, type_)[0] for leaf, type_ in zip(leaves, types, strict=True)]
        if self.donates:
            leaves = [jnp.copy(jnp.asarray(leaf)) for leaf in leaves]
        return _dressed(init, jax.tree.unflatten(structure, leaves))

    def _call(self, carry: PyTree, read: Read) -> tuple[PyTree, PyTree]:
        if self.lengths is None:
            return self.call(carry, read.xs, read.steps, read.start, None)
        lengths = np.minimum(self.lengths, read.start + read.steps)
        return self.call(carry, read.xs, self.source.part, read.start, lengths)

    def _run(self, carry: PyTree, last: list[Array], read: Read) -> _Ran:
        """Sends a part to the device, and cuts its padding off its ys."""
        carry, ys = self._call(carry, read)
        leaves, structure = jax.tree.flatten(ys)
        refuse_traced("the body closes over a traced value", [*jax.tree.leaves(carry), *leaves])
        keeps = self._keeps_of(ys)
        earlier = iter(last)
        for i, keep in enumerate(keeps):
            if keep == LAST:
                leaves[i] = self._last(leaves[i], next(earlier, None), read)
            elif self.lengths is not None and read.steps < self.source.part:
                leaves[i] = leaves[i][: read.steps // keep]
        last = [leaf for leaf, keep in zip(leaves, keeps, strict=True) if keep == LAST]
        shown = {} if self.bar is None else self.bar.values(carry)
        probe = leaves or (probes_of(carry) if self.donates else carry)
        return _Ran(read._replace(xs=None), carry, jax.tree.unflatten(structure, leaves), last, shown, probe)

    def _keeps_of(self, ys: PyTree) -> list[int]:
        """What is kept of each leaf that is left of y."""
        return [ALL] * len(jax.tree.leaves(ys)) if self.keeps is None else self.keeps.spread(ys, "y")

    def _last(self, new: Array, old: Array | None, read: Read) -> Array:
        """The last y so far: that of an earlier part for rows which take no step of this one."""
        if old is None or self.lengths is None:
            return new
        runs = self.lengths > read.start
        if runs.all():
            return new
        return jnp.where(runs.reshape(*runs.shape, *(1,) * (new.ndim - runs.ndim)), new, old)

    def _give(
        self, ran: _Ran, reader: Reader, show: Move | None, *, final: bool = False
    ) -> Generator[Part[PyTree, PyTree], None, None]:
        """Waits for a part, gives it to the caller, and saves what is due when the caller comes back."""
        read = ran.read
        jax.block_until_ready(ran.probe)
        reader.part_is_done()
        if show is not None:
            show(read.done, ran.shown)
        is_donated = self.donates and not final
        yield Part(read.start, read.steps, ran.ys, None if is_donated else ran.carry, is_donated)
        if self.folder is not None and (final or self._is_due(read.number)):
            from .checkpoint import Saved

            self.folder.save(Saved(_bare(ran.carry), ran.last, read.number + 1, read.done, read.state, final))

    def _refuse_longer(self, steps: int) -> None:
        """Refuses rows that are longer than a source whose length was not known before."""
        longest = 0 if self.lengths is None else self.lengths.max(initial=0)
        if steps < longest < NO_LIMIT:
            raise Misuse(
                f"{{call}}: the source ended after {steps} steps, but the longest of `lengths` is {longest}.",
                "Pass the lengths of the rows that the source has.",
            )

    def _types_of_ys(self) -> PyTree:
        """The types of a part's ys, from the first part of the source, which is not run."""
        if self.keeps is None or LAST not in self.keeps.leaves:
            return None
        read = next(self.source.read(0, None, lambda number: False), None)
        if read is None:
            raise _no_steps(0)
        read = read if self.lengths is None else padded(read, self.source.part)
        return jax.eval_shape(lambda: self._call(self.init, read)[1])

    def _result(self, ys: PyTree, last: list[Array]) -> PyTree:
        """The tree of the last y, with None where it is not kept; None: it is kept of no leaf."""
        if self.keeps is None or LAST not in self.keeps.leaves:
            return None
        leaves = iter(last)
        return map_leaves(lambda _, keep: next(leaves) if keep == LAST else None, ys, self._keeps_of(ys))


def _no_steps(done: int) -> Fault:
    if done:
        says = (
            f"{{call}}: the source ended after the {done} steps that a checkpoint has, which is not the end of its run."
        )
        return Misuse(says, "Pass the source of that run, or choose another folder for this one.")
    return Misuse("{call}: the source has no steps.", "An iterator can be read only once: pass a new one to each run.")


def _bare(carry: PyTree) -> PyTree:
    """The arrays of a carry, in the structure of a loop's state."""
    return freeze_static(adopt(carry).init)


def _dressed(init: PyTree, bare: PyTree) -> PyTree:
    """The arrays of a carry as the user has them, like `init`."""
    return adopt(init).restore(thaw_static(bare))


class Bar:
    """Shows how far a stream is, in the first process. All processes compute what it shows of the carry together.

    Args:
        progress: what the user said, with a label and a meter.
    """

    def __init__(self, progress: Progress) -> None:
        assert progress.label is not None and progress.meter is not None
        if progress.updates:
            why = "a stream moves its bar after each part."
            raise Misuse(f"{{call}}: `updates` of a `Progress` has no meaning here: {why}", "Leave it out.")
        self.show = progress.show
        self._site = Site(progress.label, progress.meter)

    def values(self, carry: PyTree) -> dict[str, Array]:
        """The values to show of a carry."""
        if self.show is None:
            return {}
        from ..._options.progress.showing import check_shown

        shown: Any = self.show(read_carries(adopt(carry).init, "carry"))
        return {name: jnp.copy(shown[name]) for name in check_shown(shown)}  # the carry itself may be donated

    @contextlib.contextmanager
    def shown(self, done: int, total: int | None) -> Generator[Move]:
        """Shows the bar; gives what moves it."""
        if jax.process_index():
            yield lambda done, shown: None
            return
        number = RUNS.begin(self._site, total)

        def move(done: int, shown: Mapping[str, Array]) -> None:
            values = {name: np.asarray(value).item() for name, value in shown.items()}
            RUNS.step(self._site, number, Report(total, done, first=False, last=False), values)

        try:
            if done:
                move(done, {})
            yield move
        finally:
            RUNS.end(number)


def bar_of(progress: ProgressLike, step: Callable[..., object]) -> Bar | None:
    """The bar that the user asked for; None: nothing is shown.

    Raises:
        Fault: for an `ArgumentError` if it cannot be had.
    """
    from ..._options.progress.show import check_progress

    checked = check_progress(progress, Body.of(step), "stream")
    return None if checked is None else Bar(checked)
