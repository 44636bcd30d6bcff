"""Imports: the processor time that a first import takes once JAX is there, in an interpreter of its own."""

import dataclasses
import functools
import os
import subprocess
import sys
from collections.abc import Iterator

from benchmarks._harness import Comparison, Elsewhere

VERBS = "from treescan import scan, mask_scan, scan_layers"

_PROGRAM = """
import time
import jax, jax.numpy
start = time.process_time()
{}
print(time.process_time() - start)
"""


@dataclasses.dataclass(frozen=True)
class Import(Elsewhere):
    """A statement that imports, in a new process for each call: the first compiles to bytecode, the others find it."""

    statement: str

    def __call__(self) -> object:
        """See `Elsewhere`; an import has no result."""
        self.seconds(1)
        return ()

    def seconds(self, calls: int) -> float:
        """See `Elsewhere`."""
        program = [sys.executable, "-c", _PROGRAM.format(self.statement)]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        run = functools.partial(subprocess.run, program, check=True, capture_output=True, env=environment)
        return sum(float(run().stdout) for _ in range(calls))


def comparisons() -> Iterator[Comparison]:
    """The comparisons of this suite."""
    for peer in ("equinox", "flax"):
        yield Comparison("three verbs", f"import {peer}", Import(VERBS), Import(f"import {peer}"), 1.0, blocks=3)
