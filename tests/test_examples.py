"""The examples do what their pages say of them."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def printed(name: str) -> str:
    done = subprocess.run([sys.executable, EXAMPLES / name], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def percent(text: str, pattern: str) -> float:
    found = re.search(pattern, text)
    assert found, text
    return float(found[1])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vowels.py", "packed_vowels.py"])
def test_speakers_are_recognised(name: str) -> None:
    text = printed(name)
    assert percent(text, r"test accuracy +([\d.]+)%") >= 95
    if name.startswith("packed"):
        assert percent(text, r"([\d.]+)% need not be run") > 20
        assert percent(text, r"efficiency +([\d.]+)%") > 80
