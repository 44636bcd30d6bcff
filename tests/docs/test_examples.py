"""The examples do what their pages say of them."""

import re
from pathlib import Path

import pytest
from processes import printed_by_each

from scripts import ROOT, printed


def number(text: str, pattern: str) -> float:
    found = re.search(pattern, text)
    assert found, text
    return float(found[1])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vowels.py", "packed_vowels.py"])
def test_speakers_are_recognised(name: str) -> None:
    text = printed(f"examples/{name}")
    assert number(text, r"test accuracy +([\d.]+)%") >= 95
    if name.startswith("packed"):
        assert number(text, r"([\d.]+)% need not be run") > 20
        assert number(text, r"efficiency +([\d.]+)%") > 80


@pytest.mark.slow
def test_the_llama_learns_to_write() -> None:
    text = printed("examples/llama.py")
    assert number(text, r"held-out loss +([\d.]+) ->") > 4.5  # it knows nothing: 4.85 is the logarithm of 128
    assert number(text, r"held-out loss .* -> ([\d.]+)") < 1.9
    assert number(text, r"logits within ([\d.e+-]+) of") < 1e-4
    _, written = text.split("ROMEO:\n", maxsplit=1)
    assert len(written) == 301  # print ends it
    assert re.search(r"^[A-Z][A-Za-z ]+:$", written, re.MULTILINE)  # somebody else speaks


@pytest.mark.slow
def test_the_llama_is_the_same_on_eight_devices() -> None:
    one, eight = (
        printed("examples/llama.py", "--steps", "20"),
        printed("examples/llama.py", "--devices", "8", "--steps", "20"),
    )
    for pattern in (r"step +20 +loss ([\d.]+)", r"held-out loss +([\d.]+) ->", r"held-out loss .* -> ([\d.]+)"):
        assert number(eight, pattern) == pytest.approx(number(one, pattern), abs=5e-3)
    assert number(eight, r"logits within ([\d.e+-]+) of") < 1e-4

    whole = number(one, r"parameters +(\d+) bytes")
    assert number(one, r"(\d+) on each of 1 devices") == whole == number(eight, r"parameters +(\d+) bytes")
    assert number(eight, r"(\d+) on each of 8 devices") < 0.13 * whole  # an eighth of the matrices, and the norms


@pytest.mark.slow
def test_loops_end_when_they_are_done() -> None:
    text = printed("examples/early_exit.py")
    for slope, exactly in re.findall(r"slope ([\d.e+-]+), exactly ([\d.e+-]+)", text):
        assert float(slope) == pytest.approx(float(exactly), rel=1e-4)
    assert number(text, r"dx/dk = (-[\d.]+)") == pytest.approx(number(text, r"theorem (-[\d.]+)"), abs=1e-5)
    steps = list(map(int, re.findall(r"tolerance [\d.]+: (\d+) steps", text)))
    errors = list(map(float, re.findall(r"gradient by ([\d.e+-]+)", text)))
    assert len(steps) == 3
    assert steps == sorted(steps)
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-3
    assert re.findall(r"\((\d+) letters, ended\)", text) == ["2", "4", "4", "4"]


@pytest.mark.slow
def test_two_processes_train_and_a_second_run_has_nothing_left(tmp_path: Path) -> None:
    found = [
        [line for line in lines if line.startswith("process")]
        for _ in range(2)
        for lines in printed_by_each(ROOT / "examples" / "processes.py", tmp_path, seconds=200)
    ]
    losses = {number(*lines, r"loss ([\d.]+)$") for lines in found}
    assert len(found) == 4 and len(losses) == 1 and losses.pop() < 0.01
