"""The first screen: its pictures show what its code does, its code fits a phone, and the overview keeps to its words.

The code of README.md itself is run by `test_docs.py`, as that of all pages.
"""

import contextlib
import io
import re
import sys
import xml.etree.ElementTree as ET

import pytest
from test_docs import FENCE, FRONT_MATTER, ROOT

from scripts import script

draw_front = script("draw_front")
README = (ROOT / "README.md").read_text()
HOME = (ROOT / "docs" / "index.md").read_text()
PHONE = 42  # columns of code on a screen that is 390 pixels wide
SPACE = "{http://www.w3.org/2000/svg}"
ANSI = {"magenta": "35", "bold magenta": "1;35", "red": "31", "bold red": "1;31"}


def test_the_pictures_of_the_first_screen_are_what_the_script_draws() -> None:
    for name, text in draw_front.front_files().items():
        assert (draw_front.ASSETS / name).read_text() == text, "run `python scripts/draw_pictures.py`"
        ET.fromstring(text)


def test_the_readme_and_the_home_page_show_them() -> None:
    for name in draw_front.front_files():
        assert f"](docs/assets/{name})" in README
    assert "](assets/error.svg)" in HOME
    assert '--8<-- "docs/pictures/ragged.svg"' in HOME


def test_the_picture_has_the_numbers_of_the_first_block() -> None:
    code = next(fence["code"] for fence in FENCE.finditer(README) if fence["language"] == "python")
    names: dict[str, object] = {}
    with contextlib.redirect_stdout(io.StringIO()):
        exec(code, names)
    lengths = names["batch"].lengths.tolist()
    shown = [
        f"{float(panel[step, row]):g}"
        for panel in (names["batch"].data, names["sums"])
        for row, length in enumerate(lengths)
        for step in range(length)
    ]
    svg = ET.fromstring((ROOT / "docs" / "pictures" / "ragged.svg").read_text())
    texts = [line.text or "" for line in svg.iter(f"{SPACE}text")]
    assert [text for text in texts if text.isdigit()] == shown


def test_the_terminal_has_the_whole_error() -> None:
    error = draw_front.error_of_readme()
    svg = ET.fromstring((draw_front.ASSETS / "error.svg").read_text())
    printed = str(next(svg.iter(f"{SPACE}desc")).text).splitlines()
    message = "".join(error.format_exception_only()).splitlines()
    assert printed[-len(message) :] == message
    drawn = [line.text or "" for line in svg.iter(f"{SPACE}text")]
    assert "".join("".join(drawn).split()) == "".join("".join(printed).split())
    assert "step (train.py:10) does not match its annotations" in message[0].replace("`", "")
    assert README.split('title="train.py"\n')[1].splitlines()[9].startswith("def step")
    for page in (README, HOME):  # said to those who do not see the picture
        assert "step (train.py:10) does not match its annotations" in " ".join(page.split())


@pytest.mark.skipif(sys.version_info < (3, 13), reason="Python prints errors in colours from 3.13 on")
def test_the_colours_are_those_of_python() -> None:
    error = draw_front.error_of_readme()
    drawn = "\n".join(
        "".join(f"\x1b[{ANSI[colour]}m{text}\x1b[0m" if colour else text for text, colour in line)
        for line in draw_front.lines_of(error)
    )
    printed = "".join(error.format(colorize=True)).rstrip("\n")
    one_colour_a_line = re.sub(
        r"\x1b\[35m([^\x1b]*)\x1b\[0m",
        lambda found: "\n".join(f"\x1b[35m{line}\x1b[0m" for line in found[1].split("\n")),
        printed,
    )
    assert drawn == one_colour_a_line


def test_the_code_of_the_first_screen_fits_a_phone() -> None:
    blocks = [fence for fence in FENCE.finditer(README) if fence["language"] in ("python", "text")]
    assert [line for fence in blocks for line in fence["code"].splitlines() if len(line) > PHONE] == []


def test_the_overview_is_as_short_as_the_readme_says() -> None:
    page = FRONT_MATTER.sub("", (ROOT / "docs" / "overview.md").read_text(), count=1)
    assert "in 1,100 words" in README
    assert len(page.split()) <= 1100  # code and addresses included
