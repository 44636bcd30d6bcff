"""Runs a script in several processes, which make one JAX program over the loopback, for a bounded time."""

import contextlib
import os
import pathlib
import re
import socket
import subprocess
import sys
import tempfile
import time
from typing import TextIO

import jax

_LIB = pathlib.Path(__file__).parent
_DEVICES = "--xla_force_host_platform_device_count"


def run_in_processes(script: str, *args: str, count: int = 2, seconds: float = 120) -> list[list[str]]:
    """The lines that each process printed. The script begins with `join()`.

    Args:
        script: its name in this folder.
        *args: further arguments of the script.
        count: how many processes there are, with two simulated devices each.
        seconds: after which all are killed, and the test fails with what they printed.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    paths = os.pathsep.join([str(_LIB), *filter(None, sys.path)])
    others = re.sub(rf"{_DEVICES}=\d+", "", os.environ.get("XLA_FLAGS", ""))
    env = {**os.environ, "XLA_FLAGS": f"{others} {_DEVICES}=2", "JAX_PLATFORMS": "cpu", "PYTHONPATH": paths}
    command = [sys.executable, "-u", str(_LIB / script)]
    with contextlib.ExitStack() as files:
        outputs = [files.enter_context(tempfile.TemporaryFile("w+")) for _ in range(count)]
        running = [
            subprocess.Popen([*command, str(i), str(count), port, *args], env=env, stdout=out, stderr=subprocess.STDOUT)
            for i, out in enumerate(outputs)
        ]
        ended = _wait(running, time.monotonic() + seconds)
        texts = list(map(_text, outputs))
    assert ended, "some process waits forever\n" + "\n".join(texts)
    assert not any(process.returncode for process in running), "\n".join(texts)
    return [text.splitlines() for text in texts]


def _wait(running: list[subprocess.Popen[bytes]], until: float) -> bool:
    """Whether all processes end by then; those that do not are killed."""
    try:
        for process in running:
            process.wait(max(0.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        return False
    finally:
        for process in running:
            process.kill()
            process.wait()
    return True


def _text(output: TextIO) -> str:
    output.seek(0)
    return output.read()


def join() -> int:
    """Makes this process one of those of a program; its number."""
    number, count, port = sys.argv[1:4]
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", int(count), int(number))
    return int(number)
