"""The text of every error: one golden file each, the same text in every mode of JAX.

A case is a function that makes treescan raise, of `tests/lib/*_error_cases.py`; `golden/<its name>.txt` is what the
user reads. `UPDATE_GOLDEN=1` rewrites the files: look at each as a user would.
"""

import ast
import contextlib
import importlib
import linecache
import os
import re
import sys
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from error_cases import CASES

import treescan
from treescan._text import WIDTH, wrap

pytestmark = pytest.mark.quick

TESTS = Path(__file__).parents[1]
GOLDEN = TESTS / "golden"
PACKAGE = Path(treescan.__file__).parent

for file in sorted((TESTS / "lib").glob("*_error_cases.py")):
    importlib.import_module(file.stem)

PLACE = r"(?P<file>[^\s(]*\b\w+_error_cases\.py):(?P<line>\d+)"
BODY = r"`(?P<name>[^`]+)` \(" + PLACE


def params(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.devices if CASES[name].devices else ()) for name in names]


def modes_of(name: str) -> list[str]:
    """Eagerly, and one of the other modes, which the name tells: a new case changes that of no other."""
    first, *others = CASES[name].modes
    return [first, others[zlib.crc32(name.encode()) % len(others)]] if others else [first]


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> list[re.Match[str]]:
    """The bodies that messages name, and their lines.

    Messages name `model.py:12` in their place, so that an edit of the cases moves no line break.
    """
    found: list[re.Match[str]] = []

    def wrapped(text: str, *args: Any, **options: Any) -> str:
        found.extend(re.finditer(BODY, text))
        return wrap(re.sub(PLACE, "model.py:12", text), *args, **options)

    for module in (treescan._errors, treescan._text):
        monkeypatch.setattr(module, "wrap", wrapped)
    return found


def text_of(error: BaseException) -> str:
    """The error as a user reads it, under the traceback."""
    return f"treescan.errors.{type(error).__name__}: {error}".rstrip() + "\n"


def as_spelled(text: str) -> str:
    """A text in the spelling of the newest JAX: older releases print types and specs, and vary values, otherwise."""
    if hasattr(jax.typeof(1.0), "manual_axis_type"):
        return text
    text = re.sub(r"(\[\])\{(\w+)\}", r"\1{V:\2}", text).replace("PartitionSpec(", "P(")
    return " ".join(text.split())  # columns are as wide as what is in them, and lines break elsewhere


def is_the_body(place: re.Match[str]) -> bool:
    source = linecache.getline(place["file"], int(place["line"]))
    name = place["name"].rsplit(".")[-1]
    expected = ("lambda",) if name == "<lambda>" else (f"def {name}(", f'named("{name}", lambda')
    return any(each in source for each in expected) or (place["name"] == "Counter" and "__call__" in source)


@pytest.mark.parametrize("name", params(CASES))
def test_text(name: str, places: list[re.Match[str]]) -> None:
    case, golden = CASES[name], GOLDEN / f"{name}.txt"
    for mode in modes_of(name):
        places.clear()
        with pytest.raises(case.error) as caught:
            case.provoke(mode)
        assert caught.type is case.error
        text = text_of(caught.value)
        assert not re.search(r"0x[0-9a-f]{4}|\{(?:body|verb|step|init)\}|site-packages|Tracer\(", text), text
        if mode == "eager":
            assert not case.body or (places and all(map(is_the_body, places))), places
            if os.environ.get("UPDATE_GOLDEN") == "1":
                golden.write_text(text)
        assert as_spelled(text) == as_spelled(golden.read_text()), mode
        assert [line for line in text.splitlines() if len(line) > WIDTH] == []


@pytest.mark.parametrize("name", params(name for name, case in CASES.items() if case.lax))
def test_is_what_lax_scan_raises(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    monkeypatch.setattr(sys.modules[case.run.__module__], "scan", jax.lax.scan)
    with pytest.raises((TypeError, ValueError)) as caught:
        case.provoke()
    assert issubclass(case.error, tuple(c for c in (TypeError, ValueError) if issubclass(caught.type, c)))


def test_every_golden_file_has_its_case() -> None:
    assert {file.stem for file in GOLDEN.iterdir()} == CASES.keys()


def fault_sites() -> Iterator[tuple[str, int, int]]:
    """Where the package finds faults: a file, the first and the last line.

    The integrations, of optional libraries, have error tests of their own.
    """
    for file in (file for file in PACKAGE.rglob("*.py") if "integrations" not in file.parts):
        for node in ast.walk(ast.parse(file.read_text())):
            called = node.func if isinstance(node, ast.Call) else None
            if isinstance(called, ast.Name) and re.search(r"([Ff]ault|Misuse)$|^expect$", called.id):
                yield file.name, node.lineno, node.end_lineno or node.lineno


@pytest.mark.devices
def test_every_fault_has_a_case(monkeypatch: pytest.MonkeyPatch) -> None:
    made: set[tuple[str, int]] = set()
    fault = treescan._errors.Fault
    initialise = fault.__init__

    def record(self: Any, *args: Any, **kwargs: Any) -> None:
        frames = (sys._getframe(1), sys._getframe(2))  # the second is that of a check which calls `expect`
        made.update((Path(frame.f_code.co_filename).name, frame.f_lineno) for frame in frames)
        initialise(self, *args, **kwargs)

    monkeypatch.setattr(fault, "__init__", record)
    for case in CASES.values():
        with contextlib.suppress(Exception):
            case.provoke()
    sites = set(fault_sites())
    assert sites
    assert {(f, a, z) for f, a, z in sites if not any((f, line) in made for line in range(a, z + 1))} == set()
