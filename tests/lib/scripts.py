"""The modules of scripts/, for the tests of what they write."""

import importlib
import sys
from pathlib import Path
from types import ModuleType
from unittest import mock

ROOT = Path(__file__).parents[2]


def script(name: str) -> ModuleType:
    """A script as a module, which finds the scripts beside it."""
    with mock.patch.object(sys, "path", [str(ROOT / "scripts"), *sys.path]):
        return importlib.import_module(name)
