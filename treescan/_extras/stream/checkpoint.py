"""Checkpoints of a stream, in a folder that orbax writes; it is imported when the first one is opened.

orbax writes a checkpoint under another name and renames it, so a folder never holds a part of one. Arrays are saved in
a list, which is put into the structure of `init` when it is restored.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import textwrap
import time
import weakref
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any, NamedTuple, TextIO, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from ..._avals import Array, PyTree, is_key
from ..._errors import CheckpointFault, Fault, Misuse, Row, expect, expect_int, warn_user
from ..._types import Checkpoint
from .program import bare_of

_LOCK = ".lock"

_locks = weakref.WeakSet[TextIO]()
"""The files whose locks this process holds. A process that it forks shares them, and would hold them while it runs."""


def _leave_locks() -> None:
    for file in _locks:
        file.close()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_leave_locks)


def check_checkpoint(given: str | os.PathLike[str] | Checkpoint) -> Checkpoint:
    """The settings of checkpoints, from a folder or a `Checkpoint`."""
    folder = given.folder if isinstance(given, Checkpoint) else given
    example = 'For example `checkpoint="runs/1"`, or `treescan.Checkpoint("runs/1", every=100)`.'
    kinds = "a folder or a `treescan.Checkpoint`"
    expect(isinstance(folder, str | os.PathLike), "checkpoint", kinds, folder, example)
    if not isinstance(given, Checkpoint):
        return Checkpoint(folder)
    expect_int(given.every, "every", "It counts parts.", least=1, small="`every=1` saves after each part.")
    expect_int(given.keep, "keep", "It counts checkpoints.", least=1, small="`keep=1` keeps the last one alone.")
    skips = "True continues from an older checkpoint if newer ones cannot be read."
    expect(isinstance(given.skip_damaged, bool), "skip_damaged", "True or False", given.skip_damaged, skips)
    if given.skip_damaged and jax.process_count() > 1:
        says = "{call}: `skip_damaged` is for a run of one process: others may have read what this one cannot."
        raise Misuse(says, "Leave it out. The error names the checkpoints to delete.")
    return given


class Saved(NamedTuple):
    """What a checkpoint holds.

    Attributes:
        carry: the carry, in the structure of `init`.
        last: the leaves of y of which the last one is kept, so far.
        done: how many parts had run.
        steps: how many steps these had.
        source: the state of the source, as a text.
        finished: whether these were all parts.
    """

    carry: PyTree
    last: list[Array]
    done: int
    steps: int
    source: str | None
    finished: bool


class LeafType(TypedDict):
    """What JSON can hold of the type of a leaf."""

    shape: list[int]
    dtype: str
    impl: str | None


class About(TypedDict):
    """What a checkpoint holds as JSON: the fields of `Saved`, with types in place of arrays, and what the run is."""

    carry: list[LeafType]
    last: list[LeafType]
    done: int
    steps: int
    source: str | None
    finished: bool
    program: dict[str, str]


class Folder:
    """The checkpoints of one run, while it runs.

    Args:
        settings: where and how often, as `check_checkpoint` returned it.
        program: what the run is, by names: another one must not continue from these checkpoints.
        part: the steps of a part, as the user gave them. In `program` they are no more than those of the run.
    """

    def __init__(self, settings: Checkpoint, program: dict[str, str], part: int) -> None:
        self.settings = settings
        folder = os.fspath(settings.folder)
        self._is_local = "://" not in folder
        self._path = Path(folder).absolute() if self._is_local else folder
        self._program = program
        self._part, self._length = part, _number(program["length"])
        self._manager: Any = None
        self._orbax: Any = None
        self._steps, self._shorter = dict[int, int](), set[int]()

    @contextlib.contextmanager
    def opened(self) -> Generator[None]:
        """Within it, the folder is this run's alone. After it, what was saved is on the disk."""
        if importlib.util.find_spec("orbax") is None:
            raise Misuse(
                "{call}: `checkpoint` needs orbax, which is not installed.",
                "`pip install 'treescan[checkpoint]'` installs it.",
            )
        self._orbax = importlib.import_module("orbax.checkpoint")
        with self._locked():
            options = self._orbax.CheckpointManagerOptions(max_to_keep=self.settings.keep)
            with self._writing("opened"):
                self._manager = self._orbax.CheckpointManager(self._path, options=options)
            try:
                yield
            except BaseException:
                with contextlib.suppress(Exception):  # what ended the run is what the user hears of
                    self._manager.close()
                raise
            with self._writing("written"):
                self._manager.wait_until_finished()
                self._manager.close()

    @contextlib.contextmanager
    def _locked(self) -> Generator[None]:
        """Holds the lock of the folder. The first process takes it, and all hear whether it did: none waits for it."""
        with contextlib.ExitStack() as held:
            refused = None
            if not jax.process_index():
                try:
                    held.enter_context(self._lock())
                except Fault as fault:
                    refused = fault
            if jax.process_count() > 1 and multihost_utils.broadcast_one_to_all(refused is not None):
                refused = refused or CheckpointFault(
                    f"{{call}}: the first process could not open the folder `{self.settings.folder}` of checkpoints.",
                    "Its own error says why.",
                )
            if refused is not None:
                raise refused
            yield

    @contextlib.contextmanager
    def _lock(self) -> Generator[None]:
        """Holds the lock, which the system gives up for a process that was killed."""
        if not self._is_local or importlib.util.find_spec("fcntl") is None:
            yield
            return
        import fcntl  # not on Windows

        path = Path(self._path)
        with self._writing("opened"):
            path.mkdir(parents=True, exist_ok=True)
            file = open(path / _LOCK, "a")  # noqa: SIM115, it is closed below
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise CheckpointFault(
                    f"{{call}}: another run writes its checkpoints to `{self.settings.folder}`.",
                    "Give each run a folder of its own, or wait until the other one has ended. A generator of "
                    "`parts=True` that is not exhausted ends with its `close()`.",
                ) from None
            _locks.add(file)
            try:
                yield
            finally:
                if not file.closed:  # this process was not forked within
                    fcntl.flock(file, fcntl.LOCK_UN)  # also for what has forked this one, in a way that Python misses

    @contextlib.contextmanager
    def _writing(self, what: str) -> Generator[None]:
        """Explains what the system, or orbax, raises of the folder."""
        try:
            yield
        except Fault:
            raise
        except Exception as error:
            raise CheckpointFault(
                f"{{call}}: the folder `{self.settings.folder}` of checkpoints could not be {what}: {_reason(error)}",
                f"{self.says_what_is_kept()} Make room, or choose a folder to which this process may write.".lstrip(),
                cause=error,
            ) from None

    def says_what_is_kept(self) -> str:
        """From where the same call continues; empty if that is not known."""
        there = list[int]()
        with contextlib.suppress(Exception):
            self._manager.wait_until_finished()
        try:
            self._manager.reload()
            there += set(self._manager.all_steps()) - self._shorter
        except Exception:
            return ""
        if not there:
            return "There is no checkpoint yet."
        if (after := self._steps.get(max(there))) is None:
            return f"The newest checkpoint is {self._named(max(there))}."
        return f"`{self.settings.folder}` has a checkpoint after {after} steps: the same call continues there."

    def _named(self, step: int) -> str:
        return f"`{os.path.join(os.fspath(self.settings.folder), str(step))}`"

    def is_due(self, number: int) -> bool:
        """Whether a checkpoint follows this part."""
        return (number + 1) % self.settings.every == 0

    def latest(self, init: PyTree) -> Saved | None:
        """The last checkpoint, its carry like `init`; None: there is none.

        Raises:
            Fault: for a `CheckpointError` if it is one of another program, or if it is damaged and not to be skipped.
        """
        damaged = dict[int, Exception]()
        for step in sorted(self._manager.all_steps(), reverse=True):
            try:
                saved = self._read(step, init)
            except Fault:
                raise
            except Exception as error:
                damaged[step] = error
                if jax.process_count() > 1:  # the others may have read it
                    break
                continue
            is_continued = saved.steps < self._length
            if saved.finished and is_continued and saved.steps % self._part:
                self._shorter.add(step)  # its last part was a shorter one, which the longer run does not have
                continue
            if damaged and not self.settings.skip_damaged:
                raise self._damaged(damaged, step, saved)
            if damaged:
                self._put_aside(damaged, step, saved)
            return saved._replace(finished=saved.finished and not is_continued)
        if self._shorter:
            raise CheckpointFault(
                f"{{call}}: the source is longer than when the run in `{self.settings.folder}` finished. Its last part "
                f"was shorter than `part={self._part}`, and no older checkpoint is left.",
                "Take the carry that the finished run returned as the `init` of a run over the steps that are new.",
            )
        if damaged:
            raise self._damaged(damaged)
        return None

    def _damaged(self, damaged: dict[int, Exception], step: int = -1, saved: Saved | None = None) -> Fault:
        """The error for checkpoints that cannot be read, the newest of which is the first; `step` is a whole one."""
        newest = next(iter(damaged))
        names = " and ".join(map(self._named, damaged))
        cure = "No whole one is left. To begin again, delete the folder, or choose another one."
        if older := [number for number in self._manager.all_steps() if number < min(damaged)]:
            cure = f"To continue from {self._named(max(older))}, the newest of the older ones, delete {names}."
        if saved is not None:
            cure = (
                f"{self._named(step)} is whole, after {saved.steps} steps. To continue from there, pass "
                f"`treescan.Checkpoint(folder, skip_damaged=True)`, or delete {names}."
            )
        says = f"{{call}}: the checkpoint {self._named(newest)} could not be read: {_reason(damaged[newest])}"
        return CheckpointFault(says, f"It may be damaged, or not be this run's. {cure}", cause=damaged[newest])

    def _put_aside(self, damaged: Iterable[int], step: int, saved: Saved) -> None:
        """Renames checkpoints that cannot be read. Stopped within, it renames the rest where the run begins again."""
        with self._writing("written"):
            for number in damaged:
                there = self._manager.directory / str(number)
                there.rename(self._manager.directory / f"{number}.damaged-{time.time_ns()}")
            self._manager.reload()
        names = " and ".join(map(self._named, damaged))
        warn_user(
            f"Checkpoints that could not be read were renamed, {names}. The run continues from {self._named(step)}, "
            f"after {saved.steps} steps.",
            UserWarning,
        )

    def _read(self, step: int, init: PyTree) -> Saved:
        args = self._orbax.args
        about: About = self._manager.restore(step, args=args.Composite(about=args.JsonRestore())).about
        self._refuse_another(about)
        leaves, structure = jax.tree.flatten(init)
        like = {
            "carry": [_target(leaf, type_) for leaf, type_ in zip(leaves, about["carry"], strict=True)],
            "last": [_target(None, type_) for type_ in about["last"]],
            "_": np.zeros(1),
        }
        found = self._manager.restore(step, args=args.Composite(state=args.StandardRestore(like))).state
        pairs = zip(leaves, found["carry"], about["carry"], strict=True)
        carry = jax.tree.unflatten(structure, [_like(leaf, value, type_) for leaf, value, type_ in pairs])
        last = [_like(None, value, type_) for value, type_ in zip(found["last"], about["last"], strict=True)]
        saved = Saved(carry, last, about["done"], about["steps"], about["source"], about["finished"])
        self._steps[step] = saved.steps
        return saved

    def save(self, saved: Saved) -> None:
        """Writes a checkpoint, in another thread: the carry is copied to the host before this returns.

        Its number is that of the parts that are done, unless one is there from which this run could not go on. It is
        the highest in any case. So nothing is changed before a run has something newer to save, and a run that is
        stopped until then finds what it found before.
        """
        args, leaves = self._orbax.args, {"carry": jax.tree.leaves(saved.carry), "last": saved.last}
        about = saved._asdict() | {name: list(map(_type_of, each)) for name, each in leaves.items()}
        state = {name: list(map(bare_of, each)) for name, each in leaves.items()}
        composite = args.Composite(
            state=args.StandardSave(state | {"_": np.zeros(1)}),  # orbax saves no tree without leaves
            about=args.JsonSave(about | {"program": self._program}),
        )
        with self._writing("written"):
            number = max(saved.done, (self._manager.latest_step() or 0) + 1)
            self._steps[number] = saved.steps
            self._manager.save(number, args=composite, force=True)

    def _refuse_another(self, about: About) -> None:
        before, now = about["program"], self._program
        rows = [
            Row(name, before.get(name, "(missing)"), now.get(name, "(missing)"))
            for name in before | now
            if before.get(name) != now.get(name)
            and not (_is_promoted(name, before, now) or _extends(name, before, now) or _was_cut(name, before, now))
        ]
        if rows:
            raise CheckpointFault(
                f"{{call}}: the checkpoints in `{self.settings.folder}` are those of another run.",
                "Choose another folder, or delete this one to begin again.",
                header=("", "checkpoint", "this run"),
                rows=rows,
            )


def _reason(error: Exception) -> str:
    """What the system, or orbax, says of a folder, in a line or two."""
    kind = "" if isinstance(error, OSError) else f"{type(error).__name__}: "
    said = (error.strerror if isinstance(error, OSError) else None) or f"{kind}{error}".strip() or type(error).__name__
    return textwrap.shorten(said.splitlines()[0], 200, placeholder=" ...")


def _is_promoted(name: str, before: dict[str, str], now: dict[str, str]) -> bool:
    """Whether a leaf of `init` is a Python number, of which the loop makes another dtype."""
    shape, weak = "[" + before.get(name, "").rpartition("[")[2], now.get(name, "")
    return weak.startswith("~") and weak.endswith(shape)


def _extends(name: str, before: dict[str, str], now: dict[str, str]) -> bool:
    """Whether the source has become longer. In reverse, the run began with its end."""
    return name == "length" and now["reverse"] == "False" and 0 <= _number(before[name]) < _number(now[name])


def _was_cut(name: str, before: dict[str, str], now: dict[str, str]) -> bool:
    """Whether the run was shorter than a part."""
    return name == "part" and _number(before[name]) == _number(before["length"]) < _number(now[name])


def _number(text: str) -> int:
    """The number of steps, -1 if it is not known."""
    return int(text) if text.isdigit() else -1


def _type_of(leaf: Array) -> LeafType:
    impl = str(jax.random.key_impl(leaf)) if is_key(leaf) else None
    bare = bare_of(leaf)
    return {"shape": list(bare.shape), "dtype": bare.dtype.name, "impl": impl}


def _target(leaf: object, type_: LeafType) -> np.ndarray | jax.ShapeDtypeStruct:
    """What orbax restores a leaf into: an array of several devices as that, any other as one of NumPy."""
    shape, dtype = tuple(type_["shape"]), jnp.dtype(type_["dtype"])
    if isinstance(leaf, jax.Array) and len(leaf.sharding.device_set) > 1:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=bare_of(leaf).sharding)
    return np.broadcast_to(np.zeros((), dtype), shape)


def _like(leaf: Any, value: Array | np.ndarray, type_: LeafType) -> Array:
    """A value that was restored in place of a leaf of `init`: of its weak type, on its device."""
    if type_["impl"] is not None:
        return jax.random.wrap_key_data(jnp.asarray(value), impl=type_["impl"])
    if leaf is None or isinstance(value, jax.Array):
        return jnp.asarray(value)
    leaf = jnp.asarray(leaf)  # the loop may have given a Python number another dtype
    return leaf.at[...].set(value) if leaf.dtype == value.dtype else jnp.asarray(value)
