"""Starts several processes that make one JAX program over the loopback, and ends all of them whatever happens.

A program is a file, which can be run by hand too. It begins with `join()`.
"""

import contextlib
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import jax

DEVICES = "--xla_force_host_platform_device_count"


class Processes:
    """Processes that run, in their order.

    Args:
        running: the processes.
        outputs: the files that they write to.
    """

    def __init__(self, running: Sequence["subprocess.Popen[Any]"], outputs: Sequence[Path]) -> None:
        self.running = running
        self._outputs = outputs

    def lines(self, number: int) -> list[str]:
        """What a process has written so far."""
        return self._outputs[number].read_text().splitlines()

    def said(self) -> str:
        """What all have written so far, for the message of a test."""
        return "\n".join(f"process {i}: {line}" for i in range(len(self.running)) for line in self.lines(i))

    def wait_until(self, number: int, line: str, seconds: float) -> None:
        """Waits until a process has written a line that begins so."""
        until = time.monotonic() + seconds
        while not any(each.startswith(line) for each in self.lines(number)):
            assert time.monotonic() < until, f"process {number} has not written {line!r}\n{self.said()}"
            assert self.running[number].poll() is None, f"process {number} has ended\n{self.said()}"
            time.sleep(0.02)

    def ended(self, number: int, seconds: float) -> int:
        """Waits until a process has ended; its exit status."""
        try:
            return self.running[number].wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"process {number} still runs after {seconds} s\n{self.said()}") from None


@contextlib.contextmanager
def started(program: str | Path, *arguments: object, count: int = 2, devices: int = 1) -> Generator[Processes]:
    """Starts a program in several processes. All are killed where the `with` block ends.

    Args:
        program: the file, which is given its number, the count, an address and the arguments.
        *arguments: what else it is given.
        count: how many processes.
        devices: how many simulated devices each has.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    others = re.sub(rf"{DEVICES}=\d+", "", os.environ.get("XLA_FLAGS", ""))
    env = {**os.environ, "XLA_FLAGS": f"{others} {DEVICES}={devices}", "JAX_PLATFORMS": "cpu"}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    env.pop("JAX_NUM_CPU_DEVICES", None)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        outputs = [folder / f"{number}.txt" for number in range(count)]
        running: list[subprocess.Popen[Any]] = []
        stack.callback(_kill, running)
        for number, output in enumerate(outputs):
            command = [sys.executable, "-u", program, number, count, address, *arguments]
            with output.open("w") as file:
                running.append(subprocess.Popen([*map(str, command)], env=env, stdout=file, stderr=subprocess.STDOUT))
        yield Processes(running, outputs)


def _kill(running: "list[subprocess.Popen[Any]]") -> None:
    for process in running:
        process.kill()
        process.wait()


def printed_by_each(
    program: str | Path, *arguments: object, seconds: float, count: int = 2, devices: int = 1
) -> list[list[str]]:
    """The lines that each process printed. The test fails if one fails, or still runs after so many seconds."""
    until = time.monotonic() + seconds
    with started(program, *arguments, count=count, devices=devices) as processes:
        ends = [processes.ended(number, max(0.0, until - time.monotonic())) for number in range(count)]
        assert not any(ends), f"exit status {ends}\n{processes.said()}"
        return [processes.lines(number) for number in range(count)]


def join(**options: Any) -> tuple[int, int, list[str]]:
    """Makes this process one of them: its number, their count, and the other arguments of the program.

    Args:
        **options: those of `jax.distributed.initialize`.
    """
    number, count, address, *arguments = sys.argv[1:]
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if int(count) > 1:
        jax.distributed.initialize(address, int(count), int(number), **options)
    return int(number), int(count), arguments
