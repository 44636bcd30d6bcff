"""The static types: in `typing/pass.py` nothing is an error, in `typing/fail_*.py` exactly the lines marked so are."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "tests" / "typing").glob("*.py"))
Errors = dict[str, dict[int, str]]
"""For each file the lines that are errors, with what the checker says."""


def pyright() -> Errors:
    """Pyright in its strict mode, as the project configures it."""
    output = run("pyright", "--outputjson", "--pythonpath", sys.executable)
    errors: Errors = {file.name: {} for file in FILES}
    for found in json.loads(output)["generalDiagnostics"]:
        if found["severity"] == "error":
            errors[Path(found["file"]).name][found["range"]["start"]["line"] + 1] = found["message"]
    return errors


def mypy() -> Errors:
    """Mypy in its strict mode, as the project configures it."""
    output = run("mypy", "--no-error-summary", "--hide-error-context", "--no-pretty", "--show-absolute-path")
    errors: Errors = {file.name: {} for file in FILES}
    for file, line, message in re.findall(r"^(.+?\.py):(\d+): error: (.*)$", output, re.MULTILINE):
        errors[Path(file).name][int(line)] = message
    return errors


def run(checker: str, *options: str) -> str:
    if importlib.util.find_spec(checker) is None:
        pytest.skip(f"{checker} is not installed in this environment")
    command = [sys.executable, "-m", checker, *options, *map(str, FILES)]
    environment = os.environ | {"MYPYPATH": str(ROOT), "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stdout + done.stderr  # 1: there are errors, as there should be
    return done.stdout


def marked(file: Path) -> set[int]:
    return {i for i, line in enumerate(file.read_text().splitlines(), 1) if line.endswith("# error")}


@pytest.fixture(scope="module", params=[pyright, pytest.param(mypy, marks=pytest.mark.slow)], ids=["pyright", "mypy"])
def errors(request: pytest.FixtureRequest) -> Errors:
    check: Callable[[], Errors] = request.param
    return check()


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_exactly_the_marked_lines_are_errors(file: Path, errors: Errors) -> None:
    found, expected = errors[file.name], marked(file)
    assert bool(expected) is file.stem.startswith("fail")
    assert not {line: message for line, message in found.items() if line not in expected}
    assert not {line: file.read_text().splitlines()[line - 1] for line in expected - found.keys()}
