"""One of several processes is killed: the others hear of it, none waits forever, and the rest go on."""

import time
from pathlib import Path

import jax
import numpy as np
import process_killed
import pytest
from process_killed import CHUNK, HEARTBEAT, INIT, XS, T, step
from processes import Processes, printed_by_each, started

PROGRAM = process_killed.__file__
ENDED = "JAX distributed service detected fatal errors"
NONE = -1  # the number of the process that raises an error alone
STARTS, ENDS = 200, HEARTBEAT + 30
"""Limits in seconds, for a busy machine: to start, and to have heard of the other's end."""


def starts_of(lines: list[str]) -> list[int]:
    return [int(line.split()[1]) for line in lines if line.startswith("part")]


def assert_went_on(folder: Path, count: int, at_least: int) -> None:
    """The rest runs the same program from where the checkpoint is, to the numbers of an unbroken run."""
    h, _ = jax.lax.scan(step, INIT, XS)
    expected = float(np.abs(h).sum()), float((np.asarray(h) ** 3).sum())
    for lines in printed_by_each(PROGRAM, folder, 0, NONE, count=count, seconds=STARTS):
        starts = starts_of(lines)
        assert starts == list(range(starts[0], T, CHUNK)) and starts[0] >= at_least
        (ends,) = [line.split()[1:] for line in lines if line.startswith("ends")]
        np.testing.assert_allclose(np.array(ends, float), expected, rtol=1e-4, atol=1e-4)


def kill(processes: Processes, victim: int) -> None:
    for number in range(len(processes.running)):
        processes.wait_until(number, f"part {4 * CHUNK}", STARTS)  # by now, there is a checkpoint
    processes.running[victim].kill()


def test_the_other_hears_of_it_and_goes_on_alone(tmp_path: Path) -> None:
    with started(PROGRAM, tmp_path, 0.2, NONE) as processes:
        kill(processes, 1)
        until = time.monotonic() + ENDS
        while not any(line.startswith("raised") for line in processes.lines(0)):
            if processes.running[0].poll() is not None:  # it waited for the other with a checkpoint
                assert processes.running[0].returncode and ENDED in processes.said()
                break
            assert time.monotonic() < until, processes.said()
            time.sleep(0.02)
    assert_went_on(tmp_path, count=1, at_least=2 * CHUNK)


@pytest.mark.slow
@pytest.mark.parametrize(("count", "victim"), [(2, 0), (4, 2)])  # the first process leads
def test_the_others_end_within_the_heartbeat(count: int, victim: int, tmp_path: Path) -> None:
    with started(PROGRAM, tmp_path, 0.2, NONE, count=count) as processes:
        kill(processes, victim)
        began = time.monotonic()
        others = [number for number in range(count) if number != victim]
        for number in others:
            assert processes.ended(number, began + ENDS - time.monotonic()) != 0
            said = "\n".join(processes.lines(number))
            assert "raised" in said or ENDED in said
        print(f"{count} processes, number {victim} killed: all ended after {time.monotonic() - began:.1f} s")
    assert_went_on(tmp_path, count=count - 1, at_least=2 * CHUNK)


@pytest.mark.slow
def test_all_hear_that_another_run_has_the_folder(tmp_path: Path) -> None:
    with started(PROGRAM, tmp_path, 0.2, NONE) as first:
        first.wait_until(0, "part", STARTS)
        with started(PROGRAM, tmp_path, 0, NONE) as second:
            for number, reason in enumerate(("another run writes", "the first process could not open")):
                assert second.ended(number, STARTS) == 1
                assert reason in " ".join(second.lines(number))


@pytest.mark.slow
def test_an_error_of_one_alone_ends_the_others_within_the_time_of_a_shutdown(tmp_path: Path) -> None:
    with started(PROGRAM, tmp_path, 0.2, 1) as processes:
        processes.wait_until(1, "raised ValueError", STARTS)
        began = time.monotonic()
        for number in range(2):
            assert processes.ended(number, began + ENDS - time.monotonic()) != 0
        assert ENDED in "\n".join(processes.lines(0))
        print(f"process 1 raised alone: all ended after {time.monotonic() - began:.1f} s")
    assert_went_on(tmp_path, count=2, at_least=2 * CHUNK)
