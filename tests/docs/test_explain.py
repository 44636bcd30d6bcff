"""`python -m treescan explain CarryError`, where treescan is installed from its wheel and no documentation is near."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from treescan.__main__ import main

ROOT = Path(__file__).parents[2]


def run(*arguments: str, cwd: Path, path: str = "") -> str:
    environment = os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_explains_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path), cwd=ROOT)
    (wheel,) = tmp_path.glob("*.whl")
    installed = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    program = "import treescan.__main__ as m; print(m.__file__); m.main(['explain', 'CarryError'])"
    place, _, printed = run("-c", program, cwd=tmp_path, path=str(installed)).partition("\n")
    assert Path(place).is_relative_to(installed)
    assert main(["explain", "CarryError"]) == 0
    assert printed == capsys.readouterr().out
    assert "carry cannot grow" in printed


def test_a_name_that_is_none_is_told_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["explain", "CaryError"])
    assert "RetraceWarning" in capsys.readouterr().err
