"""`python -m treescan explain CarryError`, where treescan is installed from its wheel and no documentation is near."""

import zipfile
from pathlib import Path

import pytest

from scripts import printed
from treescan.__main__ import main


def test_the_wheel_explains_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed("-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path, PYTHONDONTWRITEBYTECODE="1")
    (wheel,) = tmp_path.glob("*.whl")
    installed = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    program = "import treescan.__main__ as m; print(m.__file__); m.main(['explain', 'CarryError'])"
    text = printed("-c", program, cwd=tmp_path, PYTHONPATH=str(installed), PYTHONDONTWRITEBYTECODE="1")
    place, _, explained = text.partition("\n")
    assert Path(place).is_relative_to(installed)
    assert main(["explain", "CarryError"]) == 0
    assert explained == capsys.readouterr().out
    assert "carry cannot grow" in explained


def test_a_name_that_is_none_is_told_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["explain", "CaryError"])
    assert "RetraceWarning" in capsys.readouterr().err
