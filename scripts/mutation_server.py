"""A process that has imported JAX and runs pytest in copies of itself, for `scripts/mutation_tests.py`.

It reads orders from its input, one JSON object a line: the folder of the package to import, pytest's arguments, where
the answer goes, and where pytest's output goes. It writes the number of the copy, and a line when that has ended.
Nothing that it imports may import treescan: each copy imports it from the folder that it is given.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import sys
import warnings
from typing import Any, NoReturn

from pytest import hookimpl

LIBRARIES = ("jax", "jax.numpy", "numpy", "pytest", "hypothesis", "chex", "equinox", "optax", "flax", "haiku")


class Recorder:
    """A plugin of pytest that notes for each test how long it takes, whether it passes, and which statements it runs.

    The statements are known in a package that was instrumented.
    """

    def __init__(self, cases: int | None) -> None:
        self.cases = cases
        self.tests: dict[str, dict[str, Any]] = {}
        self.failed: str | None = None

    @hookimpl(trylast=True)  # by then those are gone that are slow
    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Leaves so many cases of each test, from the first to the last."""
        if self.cases is not None:
            by_test: dict[str, list[Any]] = {}
            for item in items:
                by_test.setdefault(item.nodeid.split("[")[0], []).append(item)
            items[:] = [item for found in by_test.values() for item in spread(found, self.cases)]

    def pytest_runtest_logstart(self) -> None:
        """A test begins."""
        if "mutation_hits" in sys.modules:
            sys.modules["mutation_hits"].seen.clear()

    def pytest_runtest_logreport(self, report: Any) -> None:
        """A part of a test has ended."""
        test = self.tests.setdefault(report.nodeid, {"seconds": 0.0, "passed": True, "hits": []})
        test["seconds"] += report.duration
        test["passed"] &= report.passed
        if report.failed and self.failed is None:
            self.failed = report.nodeid
        if report.when == "teardown" and "mutation_hits" in sys.modules:
            test["hits"] = sorted(sys.modules["mutation_hits"].seen)

    def pytest_collectreport(self, report: Any) -> None:
        """A file was imported."""
        if report.failed and self.failed is None:
            self.failed = f"the import of {report.nodeid}"


def spread(items: list[Any], count: int) -> list[Any]:
    """So many of them, the first and the last among them."""
    if len(items) <= count or count < 2:
        return items[:count] if count < 2 else items
    return [items[i * (len(items) - 1) // (count - 1)] for i in range(count)]


def run(package: str, arguments: list[str], answer: str, log: str, cases: int | None, devices: int) -> NoReturn:
    """Runs pytest, in a copy of this process."""
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    here = ("", os.getcwd(), os.path.dirname(__file__))
    sys.path[:] = [package, *(path for path in sys.path if path not in here)]
    os.environ["PYTHONPATH"] = package
    os.environ["JAX_NUM_CPU_DEVICES"] = str(devices)
    import jax
    import pytest

    jax.config.update("jax_num_cpu_devices", devices)  # JAX read the environment when it was imported

    recorder, code = Recorder(cases), 3
    try:
        code = int(pytest.main(arguments, plugins=[recorder]))
        imported = sys.modules.get("treescan")
        assert imported is None or str(imported.__file__).startswith(package), imported
    except BaseException as error:
        recorder.failed = recorder.failed or repr(error)[:200]
    with open(answer, "w") as file:
        json.dump({"code": code, "failed": recorder.failed, "tests": recorder.tests}, file)
    os._exit(0)


def serve() -> None:
    """Imports what tests import, and takes orders until there are no more."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in LIBRARIES:
            with contextlib.suppress(Exception):
                importlib.import_module(name)
    assert "treescan" not in sys.modules
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        child = os.fork()
        if not child:
            run(**json.loads(line))
        sys.stdout.write(f"{child}\n")
        sys.stdout.flush()
        os.waitpid(child, 0)
        sys.stdout.write("ended\n")
        sys.stdout.flush()


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    serve()
