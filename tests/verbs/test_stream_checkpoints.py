"""Checkpoints of `stream`: an interrupted run continues to the same bits, also if it was killed."""

import ctypes
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from treescan import Checkpoint, mask_scan, scan, stream
from treescan.carries import keys
from treescan.errors import CheckpointError

pytest.importorskip("orbax.checkpoint")

T, B, F = 37, 3, 4
RNG = np.random.default_rng(0)
XS = RNG.normal(size=(T, F)).astype(np.float32)
ROWS = RNG.normal(size=(T, B, F)).astype(np.float32)
LENGTHS = np.array([37, 9, 0])
KEY = jax.random.key(7)
ROOT = Path(__file__).parents[2]


class Halted(Exception):
    pass


def step(state: Any, x: Any, *, key: Any) -> Any:
    h = jnp.tanh(0.9 * state["h"] + x + jax.random.normal(key, x.shape) * jax.random.uniform(state["own"]))
    return {**state, "h": h, "n": state["n"] + 1}, {"h": h, "sum": h.sum(-1)}


def init(*batch: int) -> Any:
    return {"h": jnp.zeros((*batch, F)), "n": jnp.zeros(batch, jnp.int32), "own": keys(KEY), "name": "cell"}


def interrupted(at: list[int], *args: Any, **options: Any) -> tuple[Any, Any, list[Any]]:
    """Runs a stream that is halted at these parts, in turn, and starts again; gives its parts too, the last of each."""
    found, halts = dict[int, Any](), list(at)

    def on_part(part: Any) -> None:
        if halts and part.start == halts[0]:
            halts.pop(0)
            raise Halted
        found[part.start] = jax.device_get(part.ys)

    while True:
        try:
            carry, last = stream(*args, on_part=on_part, **options)
        except Halted:
            continue
        assert not halts
        return carry, last, [found[start] for start in sorted(found)]


def equal(one: Any, other: Any) -> None:
    one, other = jax.tree.map(lambda leaf: None if isinstance(leaf, str) else leaf, (one, other))
    chex.assert_trees_all_equal(one, other)
    chex.assert_trees_all_equal_dtypes(one, other)


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("every", [1, 3])
def test_an_interrupted_run_is_the_unbroken_one(every: int, donate: bool, tmp_path: Path) -> None:
    options = {"checkpoint": Checkpoint(tmp_path / "run", every=every), "donate": donate, "key": KEY, "part": 5}
    carry, _, parts = interrupted([15, 15, 20], step, init(), XS, **options)
    expected, ys = scan(step, init(), XS, key=KEY)
    equal(carry, expected)
    equal(jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts), ys)


def test_the_last_y_of_rows_is_saved(tmp_path: Path) -> None:
    save = {"h": "last", "sum": None}
    options: dict[str, Any] = {"lengths": LENGTHS, "key": KEY, "save": save}
    expected = mask_scan(step, init(B), ROWS, **options)
    options |= {"checkpoint": tmp_path, "part": 16}
    carry, last, _ = interrupted([16, 32], step, init(B), ROWS, **options)
    equal((carry, last), expected)
    equal(stream(step, init(B), ROWS, **options), expected)  # it is finished: only read


def test_parts_after_the_last_checkpoint_are_given_again(tmp_path: Path) -> None:
    checkpoint, starts = Checkpoint(str(tmp_path), every=2), list[int]()

    def run() -> None:
        for part in stream(step, init(), XS, key=KEY, part=5, checkpoint=checkpoint, parts=True):
            starts.append(part.start)
            if starts in ([0, 5, 10], [0, 5, 10, 10]):
                return

    for _ in range(4):
        run()
    assert starts == [0, 5, 10, 10, *range(10, 37, 5)]


def test_a_finished_run_returns_its_result_at_once(tmp_path: Path) -> None:
    def read(start: int, n: int) -> Any:
        assert not finished
        return XS[start : start + n]

    finished = False
    options: dict[str, Any] = {"part": 5, "length": T, "key": KEY, "checkpoint": tmp_path}
    first = stream(step, init(), read, **options)
    finished = True
    equal(stream(step, init(), read, **options), first)
    assert list(stream(step, init(), read, **options, parts=True)) == []


@pytest.mark.parametrize(("before", "keep"), [(20, 1), (18, 2), (37, 2)])
@pytest.mark.parametrize("interrupts", [False, True])
def test_a_longer_source_is_continued(before: int, keep: int, interrupts: bool, tmp_path: Path) -> None:
    """Also where the last part of the shorter one had fewer steps than the others."""
    options: dict[str, Any] = {"part": 5, "key": KEY, "checkpoint": Checkpoint(tmp_path, keep=keep)}
    longer = np.concatenate([XS, XS])
    if interrupts:
        halted = stream(step, init(), XS[:before], parts=True, **options)
        for part in halted:
            if part.start == 10:
                halted.close()
    else:
        stream(step, init(), XS[:before], **options)
    starts = list[int]()
    found = stream(step, init(), longer, on_part=lambda part: starts.append(part.start), **options)
    equal(found[0], scan(step, init(), longer, key=KEY)[0])
    assert starts[0] == (10 if interrupts else before // 5 * 5)
    equal(stream(step, init(), longer, **options)[0], found[0])
    with pytest.raises(CheckpointError, match="those of another run"):
        stream(step, init(), XS, **options)


def test_a_longer_source_cannot_be_continued(tmp_path: Path) -> None:
    checkpoints = [Checkpoint(tmp_path / name, keep=1) for name in "ab"]
    stream(step, init(), XS[:18], part=5, key=KEY, checkpoint=checkpoints[0])
    with pytest.raises(CheckpointError, match="no older checkpoint"):
        stream(step, init(), XS, part=5, key=KEY, checkpoint=checkpoints[0])
    stream(step, init(), XS[:20], part=5, key=KEY, checkpoint=checkpoints[1], reverse=True)
    with pytest.raises(CheckpointError, match="those of another run"):
        stream(step, init(), XS, part=5, key=KEY, checkpoint=checkpoints[1], reverse=True)


@pytest.mark.parametrize("keep", [1, 2])
def test_a_finished_run_that_goes_on_may_be_stopped_again_and_again(keep: int, tmp_path: Path) -> None:
    options: dict[str, Any] = {"part": 5, "key": KEY, "checkpoint": Checkpoint(tmp_path, keep=keep)}
    stream(step, init(), XS[:20], **options)
    there = names(tmp_path)
    for _ in range(4):  # before its next checkpoint
        assert starts_of_a_stopped_run(XS, **options) == [20]
        assert names(tmp_path) == there
    equal(stream(step, init(), XS, **options)[0], scan(step, init(), XS, key=KEY)[0])


def names(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


def test_what_is_kept_is_not_the_checkpoint_that_a_longer_run_passes_over(tmp_path: Path) -> None:
    options: dict[str, Any] = {"part": 5, "key": KEY, "checkpoint": tmp_path}
    stream(step, init(), XS[:18], **options)
    for start in (15, 20):  # before its next checkpoint, and after it
        with pytest.raises(Halted) as caught:
            stream(step, init(), XS, on_part=lambda part, at=start: halt(part.start == at), **options)
        assert f"has a checkpoint after {start} steps" in caught.value.__notes__[1]


def starts_of_a_stopped_run(xs: Any, **options: Any) -> list[int]:
    """The parts that a run begins which is stopped in the first of them."""
    starts = list[int]()

    def on_part(part: Any) -> None:
        starts.append(part.start)
        raise Halted

    with pytest.raises(Halted):
        stream(step, init(), xs, on_part=on_part, **options)
    return starts


def damage_two(folder: Path) -> None:
    for number in "34":
        (folder / number / "about" / "metadata").unlink()


RECOVERIES: dict[str, tuple[int, dict[str, Any], Any, int]] = {
    "finished": (20, {}, lambda folder: None, 20),
    "a shorter last part": (18, {}, lambda folder: None, 15),
    "damaged": (20, {"skip_damaged": True}, damage_two, 10),
}
"""How many steps had run, further settings, what happened then, and where the run goes on."""


@pytest.mark.parametrize("name", RECOVERIES)
@pytest.mark.filterwarnings("ignore:Checkpoints that could not be read were renamed")
def test_a_recovery_may_be_killed_anywhere(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a recovery changes in a folder, it can be killed before and after, twice, and loses nothing."""
    before, settings, happens, goes_on = RECOVERIES[name]

    def options(folder: Path) -> Any:
        return {"part": 5, "key": KEY, "checkpoint": Checkpoint(folder, keep=4, **settings)}

    stream(step, init(), XS[:before], **options(tmp_path / "0"))
    happens(tmp_path / "0")
    expected, _ = scan(step, init(), XS, key=KEY)
    first = folders_of_kills(tmp_path / "0", options, goes_on, monkeypatch)
    assert len(first) == {"finished": 1, "a shorter last part": 1, "damaged": 3}[name]
    for folder in first:
        again = folders_of_kills(folder, options, goes_on, monkeypatch)
        for each in again:
            equal(stream(step, init(), XS, **options(each))[0], expected)


def folders_of_kills(folder: Path, options: Any, goes_on: int, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """A run in this folder, stopped in its first part; gives copies of the folder, one for each kill on the way there.

    A copy is made before each change of the file system, and one at the end.
    """
    copies, now = list[Path](), threading.local()

    def copy() -> None:
        now.copies = True
        copies.append(folder.parent / f"{folder.name}.{len(copies)}")
        shutil.copytree(folder, copies[-1])
        now.copies = False

    def noting(change: Any) -> Any:
        def noted(path: Any, *args: Any, **kwargs: Any) -> Any:
            if not getattr(now, "copies", False):
                copy()
            return change(path, *args, **kwargs)

        return noted

    with monkeypatch.context() as patch:
        for change in ("rename", "replace", "unlink", "remove", "rmdir"):
            patch.setattr(os, change, noting(getattr(os, change)))
        assert starts_of_a_stopped_run(XS, **options(folder)) == [goes_on]
        copy()
    return copies


class Resumable:
    def __init__(self, state: Any = int) -> None:
        self.at, self.reads, self.state = 0, 0, state

    def __iter__(self) -> "Resumable":
        return self

    def __next__(self) -> Any:
        if self.at >= T:
            raise StopIteration
        self.at, self.reads = self.at + 5, self.reads + 1
        return XS[self.at - 5 : self.at]

    def get_state(self) -> Any:
        return self.state(self.at) if self.state is int else str(self.at).encode()

    def set_state(self, state: Any) -> None:
        self.at = int(state)


@pytest.mark.parametrize("kind", [int, bytes, None])
def test_iterators_continue_or_are_read_again(kind: Any, tmp_path: Path) -> None:
    made = list[Resumable]()
    starts = list[int]()

    def source() -> Any:
        made.append(Resumable(kind))
        return made[-1] if kind else map(np.asarray, made[-1])

    def on_part(part: Any) -> None:
        starts.append(part.start)
        if starts.count(20) == 1 and part.start == 20:
            raise Halted

    options: dict[str, Any] = {"part": 5, "key": KEY, "checkpoint": Checkpoint(tmp_path, every=3), "prefetch": 2}
    with pytest.raises(Halted):
        stream(step, init(), source(), on_part=on_part, **options)
    found = stream(step, init(), source(), on_part=on_part, **options)
    equal(found[0], scan(step, init(), XS, key=KEY)[0])
    assert starts == [0, 5, 10, 15, 20, 15, 20, 25, 30, 35]
    assert made[1].reads == (5 if kind else 8)
    equal(stream(step, init(), source(), on_part=on_part, **options), found)
    assert made[2].reads == 0


def test_an_iterator_of_grain(tmp_path: Path) -> None:
    grain = pytest.importorskip("grain")

    def source() -> Any:
        parts = grain.MapDataset.range(T).map(lambda i: XS[i]).to_iter_dataset().batch(5, drop_remainder=False)
        return iter(parts)

    halted = list[int]()

    def on_part(part: Any) -> None:
        if part.start == 20 and not halted:
            halted.append(20)
            raise Halted

    options: dict[str, Any] = {"part": 5, "key": KEY, "checkpoint": tmp_path, "on_part": on_part}
    with pytest.raises(Halted):
        stream(step, init(), source(), **options)
    equal(stream(step, init(), source(), **options)[0], scan(step, init(), XS, key=KEY)[0])


def test_weak_types_and_other_dtypes_come_back(tmp_path: Path) -> None:
    def body(carry: Any, x: Any) -> Any:
        weak, half, flag, number = carry
        y = half * weak
        return (weak + 1, half + x[0].astype(jnp.bfloat16), ~flag, number + x[0].astype(jnp.bfloat16)), y

    start = (1.0, jnp.zeros((), jnp.bfloat16), jnp.array(True), 0.0)
    carry, _, parts = interrupted([15], body, start, XS, part=5, checkpoint=tmp_path)
    expected, ys = scan(body, start, XS)
    equal((carry, np.concatenate(parts)), (expected, ys))


@pytest.mark.devices
def test_a_carry_comes_back_to_its_devices(tmp_path: Path) -> None:
    mesh = jax.make_mesh((8,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("rows"))
    start = {"h": jax.device_put(jnp.zeros((8, F)), spread), "n": jnp.int32(0)}

    def body(state: Any, x: Any) -> Any:
        h = jnp.sin(state["h"] + x[None])
        return {"h": h, "n": state["n"] + 1}, h.sum()

    carry, _, parts = interrupted([15], body, start, XS, part=5, checkpoint=tmp_path)
    assert carry["h"].sharding.is_equivalent_to(spread, 2)
    expected, ys = scan(body, start, XS)
    equal((carry, np.concatenate(parts)), (expected, ys))
    again, _ = stream(body, start, XS, part=5, checkpoint=tmp_path)
    assert again["h"].sharding.is_equivalent_to(spread, 2)
    equal(again, expected)


def test_another_program_is_refused(tmp_path: Path) -> None:
    def body(h: Any, x: Any) -> Any:
        return h + x.sum(), h

    run = {"part": 5, "checkpoint": tmp_path}
    stream(body, jnp.float32(0), XS, **run)
    for change in ({"part": 6}, {"reverse": True}, {"save": 5}, {"key": KEY}, {"lengths": 30}, {"source": XS[:35]}):
        function: Any = (lambda h, x, *, key: body(h, x)) if "key" in change else body
        with pytest.raises(CheckpointError, match="are those of another run"):
            stream(function, jnp.float32(0), **{"source": XS, **run, **change})
    for other in (jnp.zeros(3), jnp.int32(0), {"h": jnp.float32(0)}):
        with pytest.raises(CheckpointError, match=r"float32\[\]"):
            stream(body, other, XS, **run)


def test_two_runs_in_one_folder(tmp_path: Path) -> None:
    run: dict[str, Any] = {"part": 5, "checkpoint": tmp_path, "key": KEY}
    parts = stream(step, init(), XS, **run, parts=True)
    next(parts)
    with pytest.raises(CheckpointError, match="another run writes"):
        stream(step, init(), XS, **run)
    parts.close()
    stream(step, init(), XS, **run)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.parametrize("fork", ["Python's", "another's"])
@pytest.mark.filterwarnings("ignore:.*fork:RuntimeWarning", "ignore:.*fork:DeprecationWarning")
def test_a_process_that_is_forked_within_a_run_does_not_keep_its_folder(fork: str, tmp_path: Path) -> None:
    """As the workers of a loader are, which live on."""
    run: dict[str, Any] = {"part": 5, "checkpoint": tmp_path, "key": KEY}
    workers = list[int]()

    def read(start: int, n: int) -> Any:
        if not workers:
            workers.append(os.fork() if fork == "Python's" else ctypes.PyDLL(None).fork())
            if not workers[0]:
                time.sleep(60)
                os._exit(0)
        return XS[start : start + n]

    try:
        stream(step, init(), read, length=20, **run)
        found = stream(step, init(), read, length=T, **run)
    finally:
        os.kill(workers[0], signal.SIGKILL)
        os.waitpid(workers[0], 0)
    equal(found[0], scan(step, init(), XS, key=KEY)[0])


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="open files are not listed")
@pytest.mark.filterwarnings("ignore:.*fork:RuntimeWarning", "ignore:.*fork:DeprecationWarning")
def test_a_process_that_is_forked_has_no_lock_where_its_parent_is_killed(tmp_path: Path) -> None:
    def holds_the_lock() -> bool:
        return any(os.path.realpath(each) == str(tmp_path / ".lock") for each in Path("/proc/self/fd").iterdir())

    parts = stream(step, init(), XS, part=5, checkpoint=tmp_path, key=KEY, parts=True)
    next(parts)
    assert holds_the_lock()
    if not (child := os.fork()):
        os._exit(int(holds_the_lock()))
    assert os.waitpid(child, 0)[1] == 0
    with pytest.raises(CheckpointError, match="another run writes"):  # this process still has it
        stream(step, init(), XS, part=5, checkpoint=tmp_path, key=KEY)
    parts.close()


def test_what_is_half_written_is_not_used(tmp_path: Path) -> None:
    run: dict[str, Any] = {"part": 5, "checkpoint": Checkpoint(tmp_path, keep=9), "key": KEY}
    with pytest.raises(Halted):
        stream(step, init(), XS, on_part=lambda part: halt(part.start == 20), **run)
    (saved,) = [each for each in tmp_path.iterdir() if each.name == "4"]
    os.rename(saved, tmp_path / "4.orbax-checkpoint-tmp-1")  # as orbax leaves it until all is written
    starts = list[int]()
    found = stream(step, init(), XS, on_part=lambda part: starts.append(part.start), **run)
    assert starts[0] == 15
    equal(found[0], scan(step, init(), XS, key=KEY)[0])


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:99])


@pytest.mark.parametrize(
    ("damage", "newest"),
    [
        (lambda folder: (folder / "4" / "about" / "metadata").unlink(), "4"),
        (lambda folder: cut(folder / "4" / "about" / "metadata"), "4"),
        (lambda folder: cut(folder / "4" / "state" / "_METADATA"), "4"),
        (lambda folder: (folder / "6" / "of another program").mkdir(parents=True), "6"),
    ],
)
def test_a_damaged_checkpoint_is_named_and_may_be_skipped(damage: Any, newest: str, tmp_path: Path) -> None:
    run: dict[str, Any] = {"part": 5, "key": KEY, "checkpoint": Checkpoint(tmp_path, keep=3)}
    with pytest.raises(Halted):
        stream(step, init(), XS, on_part=lambda part: halt(part.start == 20), **run)
    damage(tmp_path)
    whole, steps = ("3", 15) if newest == "4" else ("4", 20)
    with pytest.raises(CheckpointError) as caught:
        stream(step, init(), XS, **run)
    said = " ".join(str(caught.value).split())
    assert f"the checkpoint `{tmp_path / newest}` could not be read" in said
    assert f"`{tmp_path / whole}` is whole, after {steps} steps" in said
    assert len(said) < 900
    assert (tmp_path / newest).exists()
    starts = list[int]()
    run["checkpoint"] = Checkpoint(tmp_path, keep=3, skip_damaged=True)
    with pytest.warns(UserWarning, match=rf"continues\s+from\s+`{tmp_path / whole}`"):
        found = stream(step, init(), XS, on_part=lambda part: starts.append(part.start), **run)
    assert starts[0] == steps
    equal(found[0], scan(step, init(), XS, key=KEY)[0])
    assert [each.name.split("-")[0] for each in tmp_path.glob("*damaged*")] == [f"{newest}.damaged"]
    equal(stream(step, init(), XS, **run), found)


def halt(now: bool) -> None:
    if now:
        raise Halted


def test_what_on_part_raises_says_what_is_kept(tmp_path: Path) -> None:
    with pytest.raises(Halted) as caught:
        stream(step, init(), XS, part=5, key=KEY, checkpoint=tmp_path, on_part=lambda part: halt(part.start == 10))
    assert caught.value.__notes__[1] == f"`{tmp_path}` has a checkpoint after 10 steps: the same call continues there."


def test_only_so_many_are_kept(tmp_path: Path) -> None:
    stream(step, init(), XS, part=5, key=KEY, checkpoint=Checkpoint(tmp_path, every=2, keep=3))
    assert sorted(each.name for each in tmp_path.iterdir() if each.name.isdigit()) == ["4", "6", "8"]


PROGRAM = """
import json, resource, sys, time
import jax, jax.numpy as jnp, numpy as np, treescan
folder, part, limit = sys.argv[1], 5, int(sys.argv[2])
xs = np.random.default_rng(0).normal(size=(200, 4)).astype(np.float32)

def step(h, x, *, key):
    h = jnp.tanh(0.9 * h + x + jax.random.normal(key, (4,)))
    return h, h

def on_part(part):
    if limit and part.start == 50:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    np.save(f"{folder}/ys-{part.start}.npy", part.ys)
    print(part.start, flush=True)
    time.sleep(0.005)

h, _ = treescan.stream(
    step, jnp.zeros(4), xs, part=part, key=jax.random.key(1), on_part=on_part, checkpoint=f"{folder}/checkpoints"
)
np.save(f"{folder}/h.npy", h)
"""


def started(folder: Path, limit: int = 0) -> "subprocess.Popen[str]":
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-c", PROGRAM, str(folder), str(limit)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def results(folder: Path) -> tuple[Any, Any]:
    return np.load(folder / "h.npy"), np.concatenate([np.load(folder / f"ys-{i}.npy") for i in range(0, 200, 5)])


def unbroken() -> tuple[Any, Any]:
    def cell(h: Any, x: Any, *, key: Any) -> Any:
        h = jnp.tanh(0.9 * h + x + jax.random.normal(key, (4,)))
        return h, h

    xs = np.random.default_rng(0).normal(size=(200, 4)).astype(np.float32)
    return scan(cell, jnp.zeros(4), xs, key=jax.random.key(1))


@pytest.mark.parametrize("kills", [1, pytest.param(20, marks=pytest.mark.slow)])
def test_a_run_that_is_killed_is_the_unbroken_one(kills: int, tmp_path: Path) -> None:
    left, moments = kills, list[str]()
    random.seed(kills)
    while True:
        process = started(tmp_path)
        assert process.stdout is not None
        wait = random.randint(1, max(1, 36 // kills)) if left else None
        while line := process.stdout.readline():
            wait = None if wait is None else wait - 1
            if wait == 0:
                time.sleep(random.uniform(0, 0.02))
                process.kill()
                moments.append(line.strip())
                left -= 1
                break
        error = process.communicate()[1]
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL, error
    assert len(moments) == kills, "it ended before it was killed as often"
    equal(results(tmp_path), unbroken())


@pytest.mark.slow
def test_a_full_disk(tmp_path: Path) -> None:
    process = started(tmp_path, limit=300)
    _, error = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "treescan.errors.CheckpointError" in error
    assert "could not be written: File too large" in " ".join(error.split())
    process = started(tmp_path)  # there is room again
    assert process.communicate(timeout=120) and process.returncode == 0
    equal(results(tmp_path), unbroken())
