"""The modules of scripts/, for the tests of what they write; and what programs print."""

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from unittest import mock

ROOT = Path(__file__).parents[2]


def script(name: str) -> ModuleType:
    """A script as a module, which finds the scripts beside it."""
    with mock.patch.object(sys, "path", [str(ROOT / "scripts"), *sys.path]):
        return importlib.import_module(name)


def printed(*arguments: object, cwd: Path = ROOT, **environment: str) -> str:
    """What Python prints when it is started with these arguments; nothing may fail where Python only says so."""
    command, given = [sys.executable, *map(str, arguments)], os.environ | environment
    done = subprocess.run(command, cwd=cwd, env=given, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0 and "Exception ignored" not in done.stderr, done.stderr
    return done.stdout
