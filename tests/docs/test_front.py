"""The first screen: its picture shows what its code does, its code fits a phone, and its words are few.

The code of README.md itself is run by `test_docs.py`, as that of all pages.
"""

import contextlib
import io
import re
import tomllib
import xml.etree.ElementTree as ET

from test_docs import FENCE, ROOT

from scripts import script

draw_front = script("draw_front")
README = (ROOT / "README.md").read_text()
HOME = (ROOT / "docs" / "index.md").read_text()
PHONE = 42  # columns of code on a screen that is 390 pixels wide
SPACE = "{http://www.w3.org/2000/svg}"


def test_the_picture_of_the_first_screen_is_what_the_script_draws() -> None:
    for name, text in draw_front.front_files().items():
        assert (draw_front.ASSETS / name).read_text() == text, "run `python scripts/draw_pictures.py`"
        ET.fromstring(text)


def test_the_readme_and_the_home_page_show_it() -> None:
    for name in draw_front.front_files():
        assert f"](docs/assets/{name})" in README
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


def test_the_code_of_the_first_screen_fits_a_phone() -> None:
    blocks = [
        fence
        for fence in FENCE.finditer(README)
        if fence["language"] in ("python", "text") and not fence["code"].startswith("treescan.")  # an error scrolls
    ]
    assert [line for fence in blocks for line in fence["code"].splitlines() if len(line) > PHONE] == []


def test_the_home_page_has_the_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"Version {version}, " in HOME


def test_the_readme_is_short() -> None:
    prose = re.sub(r"<!--.*?-->|^```.*?^```$", "", README, flags=re.DOTALL | re.MULTILINE)
    assert len(prose.split()) <= 700
