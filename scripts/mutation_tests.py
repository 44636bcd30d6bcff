"""Runs tests of the checkout on a copy of the package, and finds out which of them run which statements."""

from __future__ import annotations

import compileall
import concurrent.futures
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mutation_sites import Site, instrumented

ROOT = Path(__file__).resolve().parent.parent

ENVIRONMENT = {
    "CI": "true",  # hypothesis then draws the same examples each time
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    "JAX_PLATFORMS": "cpu",
    "PYTHONDONTWRITEBYTECODE": "1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    # Compiles faster. The few tests that then fail unchanged are left out.
    "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
}
CASES = 3
"""How many cases of a test with many are looked at. Of those that are nothing but cases, all."""
ONLY_CASES = ("tests/promises/test_errors.py", "tests/promises/test_primitives.py", "tests/promises/test_generated.py")
QUIETLY = ["-q", "-p", "no:cacheprovider", "-m", "not slow", "-W", "ignore::pytest.PytestAssertRewriteWarning"]


NOTHING_SELECTED = 5
"""How pytest ends then."""


def _have_some_of_many_devices(argument: str) -> bool:
    file = ROOT / argument.split("::")[0]
    return file.is_dir() or (file.is_file() and "mark.devices" in file.read_text())


def say(line: str) -> None:
    """Prints a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


class Server:
    """A process that runs tests on a copy of the package; see `scripts/mutation_server.py`.

    Attributes:
        package: the folder in which the copy is.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="job-", dir=folder.resolve()))
        self.package = self._folder / "package"
        shutil.copytree(ROOT / "treescan", self.package / "treescan", ignore=shutil.ignore_patterns("__pycache__"))
        compileall.compile_dir(self.package, quiet=1)
        cache = {"JAX_COMPILATION_CACHE_DIR": str(folder.resolve() / "cache"), "PYTHONPATH": str(self.package)}
        environment = {**os.environ, **ENVIRONMENT, **cache}
        which = [sys.executable, "-c", "import treescan; print(treescan.__file__)"]
        found = subprocess.run(which, cwd=ROOT / "tests", env=environment, capture_output=True, text=True, check=True)
        assert found.stdout.startswith(str(self.package)), found.stdout
        command = [sys.executable, str(ROOT / "scripts" / "mutation_server.py")]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, cwd=ROOT, env=environment, stdin=pipe, stdout=pipe, text=True)
        assert self._read() == "ready"

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def run(self, arguments: list[str], seconds: float, cases: int | None = None) -> dict[str, Any]:
        """Runs pytest, of each test so many cases: those of one device, and those of eight.

        Returns:
            `code`, as pytest exits, -1 if it did not end in time, -2 if it crashed; `failed`, the first test that did;
            `tests`, what the recorder noted of each.
        """
        found = self._run(arguments, seconds, cases, 1)
        if (found["code"] and "-x" in arguments) or not any(map(_have_some_of_many_devices, arguments)):
            return found
        of_eight = self._run(arguments, seconds, cases, 8)
        worse = found["code"] == 0 and of_eight["code"] != NOTHING_SELECTED
        return {**(of_eight if worse else found), "tests": found["tests"] | of_eight["tests"]}

    def _run(self, arguments: list[str], seconds: float, cases: int | None, devices: int) -> dict[str, Any]:
        answer, log = self._folder / "answer.json", self._folder / "log.txt"
        answer.unlink(missing_ok=True)
        given = [*QUIETLY, *arguments]
        files = {"package": str(self.package), "answer": str(answer), "log": str(log)}
        order = {**files, "arguments": given, "cases": cases, "devices": devices}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        child = int(self._read())
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            ended = pool.submit(self._read)
            try:
                ended.result(seconds)
            except concurrent.futures.TimeoutError:
                os.killpg(child, signal.SIGKILL)
                return {"code": -1, "failed": None, "tests": {}}
        return json.loads(answer.read_text()) if answer.exists() else {"code": -2, "failed": None, "tests": {}}

    def close(self) -> None:
        """Ends it, and removes the copy."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        shutil.rmtree(self._folder)


@dataclasses.dataclass
class Coverage:
    """For each test that passes unchanged how long it takes, and which statements it runs, as `module:line`."""

    tests: dict[str, tuple[float, set[str]]]

    @classmethod
    def measured(cls, folder: Path, modules: list[str], tests: list[str]) -> Coverage:
        """Reads what was measured before, and measures what was not, one file of tests at a time."""
        files = {test: folder / "coverage" / f"{Path(test).stem}.json" for test in tests}
        missing = [test for test in tests if not files[test].exists()]
        if missing:
            (folder / "coverage").mkdir(exist_ok=True)
            server = Server(folder)
            for module in modules:
                (server.package / module).write_text(instrumented(ROOT, module))
            (server.package / "mutation_hits.py").write_text("seen = set()\n")
            for test in missing:
                began = time.time()
                found = server.run([test], 3600, None if test in ONLY_CASES else CASES)["tests"]
                assert found, test
                files[test].write_text(json.dumps(found))
                failed = [name for name, each in found.items() if not each["passed"]]
                say(f"{test}: {len(found)} tests, {time.time() - began:.0f} s; left out: {failed}")
            server.close()
        found = {name: each for file in files.values() for name, each in json.loads(file.read_text()).items()}
        return cls({name: (each["seconds"], set(each["hits"])) for name, each in found.items() if each["passed"]})

    def of(self, site: Site) -> list[str]:
        """The tests that run a statement: of each file the quickest one, then of each the next.

        What is outside of any function is taken for what all tests of the module run.
        """
        here = f"{site.module}:{site.statement or ''}"
        places: dict[str, int] = {}
        order = list[tuple[int, float, str]]()
        for name, (seconds, hits) in sorted(self.tests.items(), key=lambda item: item[1][0]):
            if here in hits or (not site.statement and any(hit.startswith(here) for hit in hits)):
                file = name.split("::")[0]
                places[file] = places.get(file, 0) + 1
                order.append((places[file], seconds, name))
        return [name for _, _, name in sorted(order)]

    def seconds(self, tests: Iterable[str]) -> float:
        """How long tests take unchanged."""
        return sum(self.tests[test][0] if test in self.tests else 100.0 for test in tests)

    def within(self, tests: list[str], seconds: float) -> list[str]:
        """The first of the tests that together take so long, at least one, file by file."""
        chosen, left = list[str](), seconds
        for test in tests:
            left -= self.tests[test][0] + 0.05
            if chosen and left < 0:
                break
            chosen.append(test)
        files = list(dict.fromkeys(test.split("::")[0] for test in chosen))
        return sorted(chosen, key=lambda test: files.index(test.split("::")[0]))
