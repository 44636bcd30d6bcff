"""`stream`: a scan over a source that need not fit into memory, in parts."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Generator
from typing import Any, Generic, Literal, Required, Unpack, overload

import numpy as np

from ..._arguments import check_length, check_options, check_reverse
from ..._avals import Array, ArrayLike, PyTree
from ..._body.signature import STREAM
from ..._errors import STREAM_WORDS, Misuse, expect, expect_int, expect_one_of, explain, verb
from ..._loop.loop import Body
from ..._types import (
    Carry,
    Checkpoint,
    CheckpointLike,
    KeyedBody,
    KeyedValidBody,
    KeyOption,
    ProgressLike,
    Save,
    ScanBody,
    StreamOptions,
    ValidBody,
    Y,
)
from ..._verbs.prepare import body_of, run_scan
from ..._verbs.progress import around
from .program import compare, is_of_all_processes, program_of, refused_together
from .run import Bar, Part, Run, bar_of, check_save_of, lengths_of, refuse_tracers
from .sources import source_of

_NO_GRADIENT = "no gradient flows between the parts of a stream. `treescan.scan` takes it."
_STEPS_FIRST = "the first axis of a source and of ys is the steps."
_REFUSES = {
    "truncate": _NO_GRADIENT,
    "remat": _NO_GRADIENT,
    "in_axes": _STEPS_FIRST,
    "out_axes": _STEPS_FIRST,
    "offset": "positions count from the first step of the source.",
}


class AsParts(StreamOptions, total=False):
    """The options of `stream` that gives its parts to a loop, less `key`."""

    save: Save
    parts: Required[Literal[True]]


class KeyedAsParts(AsParts, KeyOption):
    """The options of `stream` that gives its parts to a loop, for a body that takes a key."""


class EachPart(StreamOptions, Generic[Carry, Y], total=False):
    """The options of `stream`, less `key`."""

    save: Save
    parts: Literal[False]
    on_part: Callable[[Part[Carry, Y]], object] | None


class KeyedEach(EachPart[Carry, Y], KeyOption):
    """The options of `stream` for a body that takes a key."""


class LastPart(StreamOptions, Generic[Carry, Y], total=False):
    """The options of `stream` that keeps the last output, less `key`."""

    save: Required[Literal["last"]]
    parts: Literal[False]
    on_part: Callable[[Part[Carry, Y]], object] | None


class KeyedLast(LastPart[Carry, Y], KeyOption):
    """The options of `stream` that keeps the last output, for a body that takes a key."""


# One overload for each kind of body, with `save="last"` and without, and with `parts`.
@overload
def stream(
    f: ScanBody[Carry, Any, Y], init: Carry, source: Any = None, **options: Unpack[LastPart[Carry, Y]]
) -> tuple[Carry, Y]: ...
@overload
def stream(
    f: ScanBody[Carry, Any, Y], init: Carry, source: Any = None, **options: Unpack[EachPart[Carry, Y]]
) -> tuple[Carry, Any]: ...
@overload
def stream(
    f: ValidBody[Carry, Any, Y], init: Carry, source: Any = None, **options: Unpack[LastPart[Carry, Y]]
) -> tuple[Carry, Y]: ...
@overload
def stream(
    f: ValidBody[Carry, Any, Y], init: Carry, source: Any = None, **options: Unpack[EachPart[Carry, Y]]
) -> tuple[Carry, Any]: ...
@overload
def stream(
    f: KeyedBody[Carry, Any, Y], init: Carry, source: Any = None, **options: Unpack[KeyedLast[Carry, Y]]
) -> tuple[Carry, Y]: ...
@overload
def stream(
    f: KeyedBody[Carry, Any, Y], init: Carry, source: Any = None, **options: Unpack[KeyedEach[Carry, Y]]
) -> tuple[Carry, Any]: ...
@overload
def stream(
    f: KeyedValidBody[Carry, Any, Y], init: Carry, source: Any = None, **options: Unpack[KeyedLast[Carry, Y]]
) -> tuple[Carry, Y]: ...
@overload
def stream(
    f: KeyedValidBody[Carry, Any, Y], init: Carry, source: Any = None, **options: Unpack[KeyedEach[Carry, Y]]
) -> tuple[Carry, Any]: ...
@overload
def stream(
    f: ScanBody[Carry, Any, Y], init: Carry, source: Any = None, **options: Unpack[AsParts]
) -> Generator[Part[Carry, Y], None, tuple[Carry, Any]]: ...
@overload
def stream(
    f: ValidBody[Carry, Any, Y], init: Carry, source: Any = None, **options: Unpack[AsParts]
) -> Generator[Part[Carry, Y], None, tuple[Carry, Any]]: ...
@overload
def stream(
    f: KeyedBody[Carry, Any, Y], init: Carry, source: Any = None, **options: Unpack[KeyedAsParts]
) -> Generator[Part[Carry, Y], None, tuple[Carry, Any]]: ...
@overload
def stream(
    f: KeyedValidBody[Carry, Any, Y], init: Carry, source: Any = None, **options: Unpack[KeyedAsParts]
) -> Generator[Part[Carry, Y], None, tuple[Carry, Any]]: ...
@verb
def stream(
    f: Callable[..., Any],
    init: PyTree,
    source: Any = None,
    *,
    part: int,
    length: int | None = None,
    lengths: ArrayLike | None = None,
    remainder: Literal["run", "mask"] = "run",
    key: Array | None = None,
    save: Save = "all",
    reverse: bool = False,
    unroll: int | bool = 1,
    on_part: Callable[[Part[Any, Any]], object] | None = None,
    parts: bool = False,
    checkpoint: CheckpointLike = None,
    prefetch: int = 1,
    donate: bool | None = None,
    progress: ProgressLike = None,
    check_finite: bool = False,
    **unknown: Any,
) -> Any:
    """Scans over a source that need not fit into memory, in parts of `part` steps.

    Each part is one call of the same compiled scan. While it runs on the device, a thread reads the next part, and
    `on_part` receives the outputs of the one before. Carries, outputs and keys are those of one scan over the whole
    source. The memory is that of two parts.

    Args:
        f: the body, `f(carry, x) -> (carry, y)`, as for `treescan.scan`. It may take `key` and `valid`.
        init: the carry that the first step receives.
        source: what is scanned over: arrays `[T, ...]` in memory of the host, for example a `np.memmap`, or a tree of
            them; a function of (start, n) that returns the n steps from `start` on, with `length`; an iterator over
            parts of `part` steps, of which the last may be shorter; or None, with `length`.
        part: the number of steps of a part. The last part may have fewer.
        length: the number of steps T. An iterator is read no further; without it, to its end.
        lengths: int[*batch], as for `treescan.mask_scan`, over the whole run. The outputs of padded steps are 0.
        remainder: "run" runs a last part of fewer steps as a program of its own, whose bits are those of one scan.
            "mask" pads it: one program is compiled, whose steps are masked in all parts, so that it may round in
            another way. With `lengths`, or for a body that takes `valid`, it is always padded.
        key: a PRNG key, as for `treescan.scan`. Positions count over the whole run.
        save: which outputs to keep, as for `treescan.scan`, except for positions. A number must divide `part`.
        reverse: run from step T-1 to step 0. The parts come from the last to the first. An iterator cannot be reversed.
        unroll: how many steps are compiled into one iteration of the loop.
        on_part: called with each `treescan.types.Part` in turn, when the next part is on its way. Without it, outputs
            are dropped.
        parts: return the parts themselves, for a `for` loop. Each comes while the next one runs. Nothing runs before
            the first one is asked for. A loop that is left early ends the run: the thread that reads ends, and
            checkpoints stay. A checkpoint counts a part when the loop asks for the next one.
        checkpoint: a folder, or a `treescan.Checkpoint`, where the state of the run is saved: the same call continues
            from there. It needs `orbax-checkpoint`.
        prefetch: how many parts are read ahead, each of which takes memory, by a thread that has the caller's settings
            of JAX and `contextvars`. 0: parts are read in the caller's thread.
        donate: whether the memory of each carry becomes that of the next one. The carry of a `Part` can then not be
            read. None: only without `on_part` and `parts`. `init` is copied.
        progress: show a bar for the whole run, as for `treescan.scan`. It moves after each part.
        check_finite: True checks the carry after each step, as for `treescan.scan`. Each part is then waited for.

    Returns:
        The final carry, and what `save="last"` keeps: the last y of the run, or of each row. It is None for outputs
        that are kept otherwise. With `parts`, a generator of `treescan.types.Part`, whose `StopIteration` has this pair
        as its value. A run that a checkpoint says is finished has no further parts.

    Raises:
        ArgumentError: if an argument is out of range or does not fit; if the source ends before `length`, has no steps,
            or has a part of another type or length.
        BodyError: as `treescan.scan`.
        CarryError: as `treescan.scan`.
        CheckpointError: if a checkpoint cannot be written, or is that of another run.
        NonFiniteError: if `check_finite` finds something.
        SignatureError: as `treescan.scan`.
        TracedArgumentError: under a transformation of JAX. The loop over parts runs on the host.

    Examples:
        >>> import jax.numpy as jnp
        >>> import numpy as np
        >>> import treescan
        >>> def step(total, x):
        ...     return total + x, total + x
        >>> sums = []
        >>> total, _ = treescan.stream(
        ...     step,
        ...     jnp.float32(0),
        ...     np.arange(5, dtype=np.float32),
        ...     part=2,
        ...     on_part=lambda part: sums.extend(part.ys.tolist()),
        ... )
        >>> print(total, sums)
        10.0 [0.0, 1.0, 3.0, 6.0, 10.0]
        >>> xs = jnp.arange(5.0)
        >>> for part in treescan.stream(step, 0.0, xs, part=2, parts=True):
        ...     print(part.start, part.ys, part.carry)
        0 [0. 1.] 1.0
        2 [3. 6.] 6.0
        4 [10.] 10.0
    """
    try:
        check_options(unknown, _ACCEPTED, _REFUSES)
        expect(on_part is None or callable(on_part), "on_part", "a function of a `treescan.types.Part`", on_part)
        expect(isinstance(parts, bool), "parts", "True or False", parts, _PARTS)
        if parts and on_part is not None:
            raise Misuse("{call}: `parts=True` takes no `on_part`: the loop over its parts is there in its place.")
        donate = on_part is None and not parts if donate is None else donate
        options = {"reverse": reverse, "unroll": unroll, "key": key, "save": save}
        run = _run_of(
            f,
            init,
            source,
            part,
            length,
            lengths,
            remainder,
            checkpoint,
            prefetch,
            donate,
            progress,
            check_finite,
            options,
        )
        if parts:
            return _explained(run, f, init)
        with contextlib.closing(run.parts()) as ran:
            while True:
                try:
                    each = next(ran)
                except StopIteration as end:
                    return end.value
                if on_part is not None:
                    with run.noted(each):
                        on_part(each)
    except Exception as error:
        explained = explain(error, "stream", f, init, STREAM_WORDS)
    raise explained


_ACCEPTED = frozenset((*StreamOptions.__annotations__, "key", "save", "on_part", "parts", "source"))


def _explained(
    run: Run, f: Callable[..., object], init: PyTree
) -> Generator[Part[PyTree, PyTree], None, tuple[PyTree, PyTree]]:
    try:
        return (yield from run.parts())
    except Exception as error:
        explained = explain(error, "stream", f, init, STREAM_WORDS)
    raise explained


def _run_of(
    f: Callable[..., object],
    init: PyTree,
    source: object,
    part: int,
    length: int | None,
    lengths: ArrayLike | None,
    remainder: Literal["run", "mask"],
    checkpoint: CheckpointLike,
    prefetch: int,
    donate: bool,
    progress: ProgressLike,
    check_finite: bool,
    options: dict[str, Any],
) -> Run:
    """Checks the arguments of a stream."""
    refuse_tracers(init, source)
    is_shared = is_of_all_processes(init, options["key"], lengths, also=checkpoint is not None)
    with refused_together(is_shared=is_shared):
        body, alive = body_of(f, STREAM)
        part = expect_int(part, "part", "It is the number of steps of a part.", least=1, small="A part has steps.")
        parts = source_of(source, check_length(length), part, reverse=check_reverse(options["reverse"]))
        keeps = check_save_of(options["save"], parts)
        expect(isinstance(check_finite, bool), "check_finite", "True or False", check_finite, _NO_REPORT)
        expect(isinstance(donate, bool), "donate", "True or False", donate, _DONATES)
        expect_one_of(remainder, "remainder", ("run", "mask"), _REMAINDERS)
        prefetch = expect_int(prefetch, "prefetch", "It counts parts.", least=0, small=_READS)
        bar, saves = _bar_of(progress, body, alive), _saves_of(checkpoint)
    asked = {"part": part, "length": parts.length, "lengths": lengths, "remainder": remainder, **options}
    asked |= {"check_finite": check_finite, "checkpoint": saves and f"every={saves.every}, keep={saves.keep}"}
    asked["show of progress"] = bar is not None and bar.show is not None
    program = functools.partial(program_of, init, **asked)
    if is_shared:
        compare(program())
    given = lengths_of(lengths, parts, body, masks=remainder == "mask")

    def call(carry: PyTree, xs: PyTree, steps: int, start: int, lengths: np.ndarray | None) -> tuple[PyTree, PyTree]:
        at: dict[str, Any] = {"lengths": lengths, "offset": np.int32(start), "donates": donate}
        carry, ys = run_scan(
            STREAM, alive, carry, xs, steps, check_finite=check_finite, progress=False, **at, **options
        )
        return carry, ys

    folder = None
    if saves is not None:
        from .checkpoint import Folder

        kept = {"lengths": None if lengths is None else given, "masked": given is not None}
        kept |= {name: options[name] for name in ("reverse", "key", "save")}
        folder = Folder(saves, program_of(init, part=parts.part, length=parts.length, **kept), part)
    return Run(call, init, parts, given, keeps, donate, prefetch, bar, folder, None if is_shared else program)


def _bar_of(progress: ProgressLike, body: Body, alive: Callable[..., object]) -> Bar | None:
    if progress is None and (shown := around()) is not None:
        from ..._options.progress.show import label_of

        label = shown.label or f"stream {label_of(body, 'stream')}"
        progress = dataclasses.replace(shown, label=label, updates=None)
    return None if progress is None or progress is False else bar_of(progress, alive)


def _saves_of(checkpoint: CheckpointLike) -> Checkpoint | None:
    if checkpoint is None:
        return None
    from .checkpoint import check_checkpoint

    return check_checkpoint(checkpoint)


_READS = "0 reads in the caller's thread."
_DONATES = "It says whose memory the next carry takes."
_PARTS = "True gives the parts to a `for` loop. The number of steps of a part is `part`."
_REMAINDERS = "The last part, if it has fewer steps, is run as a program of its own, or padded and masked."
_NO_REPORT = "True checks the carry after each step of a part."
