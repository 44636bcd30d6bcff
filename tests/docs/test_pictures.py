"""The pictures of the documentation: they are what the script draws, and what they show is so."""

import colorsys
import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from modules import ASKED, EXTRAS, LINE, modules, own_imports
from plots import rows_of_steps

import treescan
from scripts import ROOT, script
from treescan._program.program import Program

PICTURES = sorted((ROOT / "docs" / "pictures").glob("*.svg"))
STYLES = (ROOT / "docs" / "stylesheets" / "pictures.css").read_text()
PAGES = "\n".join(page.read_text() for page in (ROOT / "docs").rglob("*.md"))
RELEASE = json.loads((ROOT / "docs" / "what-works.json").read_text())["jax"]
READABLE = 4.5  # contrast, WCAG 2.2, 1.4.3
# mkdocs-material's colours of text (with its opacity) and of the page, in each scheme.
TEXT = {"default": ((0.0, 0.0, 0.0), 0.87), "slate": (colorsys.hls_to_rgb(225 / 360, 0.9, 0.15), 0.82)}
PAGE = {"default": (1.0, 1.0, 1.0), "slate": colorsys.hls_to_rgb(225 / 360, 0.14, 0.15)}


DRAW, draw_guides, draw_padding, draw_tutorials = (
    script(f"draw_{name}") for name in ("pictures", "guides", "padding", "tutorials")
)


def test_files_are_what_the_script_draws() -> None:
    for picture in (draw() for draw in DRAW.PICTURES):
        file = DRAW.DIRECTORY / f"{picture.name}.svg"
        assert file.read_text() == str(picture), f"run `python scripts/draw_pictures.py`: {picture.name}"


def test_all_pictures_are_drawn_and_shown() -> None:
    assert [file.stem for file in PICTURES] == sorted(draw.__name__ for draw in DRAW.PICTURES)
    shown = re.findall(r'^--8<-- "docs/pictures/(\w+)\.svg"$', PAGES, re.MULTILINE)
    assert sorted(set(shown)) == [file.stem for file in PICTURES]


@pytest.mark.parametrize("file", PICTURES, ids=lambda file: file.stem)
def test_a_picture_says_what_it_shows_and_stays_inside(file: Path) -> None:
    text = file.read_text()
    assert all(line.strip() for line in text.splitlines()), "a blank line ends the HTML in Markdown"
    svg = ET.fromstring(text)
    space = "{http://www.w3.org/2000/svg}"
    names = {svg.get("aria-labelledby"): f"{space}title", svg.get("aria-describedby"): f"{space}desc"}
    for child in list(svg)[:2]:
        assert names[child.get("id")] == child.tag
        assert child.text
    _, _, width, height = map(float, svg.get("viewBox", "").split())
    for rect in svg.iter(f"{space}rect"):
        x, y, w, h = (float(rect.get(name, "")) for name in ("x", "y", "width", "height"))
        assert min(x, y) >= 0
        assert (x + w, y + h) <= (width, height)
    for line in svg.iter(f"{space}text"):
        if "transform" in line.attrib:
            continue
        classes = line.get("class", "").split()
        letter = (12.5 if "small" in classes else 14) * (0.61 if "code" in classes else 0.55)
        length, x = letter * len(line.text or ""), float(line.get("x", ""))
        begin = x - length * {"start": 0, "middle": 0.5, "end": 1}[line.get("text-anchor", "start")]
        assert begin >= 0, line.text
        assert begin + length <= width, line.text
        assert 10 <= float(line.get("y", "")) <= height - 3


def test_classes_are_styled() -> None:
    used = set(" ".join(re.findall(r'class="([^"]+)"', "".join(file.read_text() for file in PICTURES))).split())
    selectors = "".join(re.findall(r"^ *[.\[].*[{,]$", STYLES, re.MULTILINE))
    assert used == set(re.findall(r"\.([\w-]+)", selectors)) - {"md-typeset"}


def luminance(colour: tuple[float, float, float]) -> float:
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: tuple[float, float, float], other: tuple[float, float, float]) -> float:
    bright, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("scheme", ["default", "slate"])
def test_text_and_data_stand_out(scheme: str) -> None:
    (block,) = re.findall(rf'\[data-md-color-scheme="{scheme}"\] {{(.*?)}}', STYLES, re.DOTALL)
    own = {
        name: tuple(int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4))
        for name, digits in re.findall(r"--picture-(\w+): #(\w{6});", block)
    }
    assert own.keys() == {"data", "soft", "strong"}
    text, opacity = TEXT[scheme]
    for ground in (PAGE[scheme], own["soft"], own["strong"]):
        seen = tuple(opacity * t + (1 - opacity) * g for t, g in zip(text, ground, strict=True))
        assert contrast(seen, ground) > READABLE
    assert contrast(own["data"], PAGE[scheme]) > READABLE


def test_the_house_stands() -> None:
    floors, beside = (
        [name for _, lines in part for line in lines for name in re.findall(r"\w+", line)]
        for part in (DRAW.FLOORS, DRAW.BESIDE)
    )
    assert floors[: -len(EXTRAS)] == [name for name in LINE if name not in ASKED], "in the order of the line"
    assert (sorted(floors[-len(EXTRAS) :]), sorted(beside)) == (sorted(EXTRAS), sorted(ASKED))
    for module in modules():
        floors = {DRAW.floor_of(other) for other in own_imports(module)}
        assert max(floors, default=0) <= DRAW.floor_of(module)


TABLES = [("transforms", DRAW.table), ("files", DRAW.files), ("folders", DRAW.folders), ("walk", DRAW.walk)]


@pytest.mark.parametrize(("name", "drawn"), TABLES)
def test_a_table_is_read_off_the_package_and_the_map_off_what_runs(name: str, drawn: Callable[[], str]) -> None:
    if name == "walk" and jax.__version__ != RELEASE:
        pytest.skip(f"the map is of jax {RELEASE}: other releases call back in another order")
    assert (DRAW.DIRECTORY / f"{name}.md").read_text() == drawn(), "run `python scripts/draw_pictures.py`"
    assert f'--8<-- "docs/pictures/{name}.md"' in PAGES


@pytest.mark.skipif(jax.__version__ != RELEASE, reason="other releases of JAX call back more or less often")
def test_a_first_masked_scan_calls_few_functions() -> None:
    command = [sys.executable, ROOT / "scripts" / "walk.py", "--counts"]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    calls = {name: int(count) for name, count in re.findall(r"`(\w+)`: \d+ files, (\d+) calls", said)}
    assert calls["mask_scan"] <= 820  # 90 of them tie results to arguments, once for the same types
    assert calls["scan"] <= 185  # 30 of them are for the next call


@pytest.mark.parametrize("verb", ["scan", "fori", "mask_scan"])
def test_a_verb_runs_the_transforms_that_it_lists(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []

    def record(call, transforms):
        ran.append([type(transform).__name__ for transform in transforms])
        return Program(call, transforms)

    monkeypatch.setattr("treescan._verbs.prepare.Program", record)
    shown = treescan.meters.Progress(meter=treescan.meters.Text())
    every = {"out_axes": 0, "remat": "step", "save": (2, np.array([0, 2])), "truncate": 2, "progress": shown}
    run = {
        "scan": lambda: treescan.scan(
            add, 0.0, jnp.ones((1, 4)), in_axes=1, check_finite=True, **(every | {"out_axes": -1})
        ),
        "fori": lambda: treescan.fori(
            0, 3, lambda i, total: total + i, 0, remat="step", progress=shown, check_finite=True
        ),
        "mask_scan": lambda: treescan.mask_scan(
            add,
            jnp.zeros(2),
            treescan.pack([jnp.ones(4), jnp.ones(1)], rows=2, init=[jnp.ones(()), jnp.zeros(())]),
            check_finite=True,
            time_axis={"ys": 1},
            **{name: each for name, each in every.items() if name != "out_axes"},
        ),
    }
    run[verb]()
    assert ran == [DRAW.transforms_of(verb)]


def add(total, x):
    return total + jnp.sum(x) if jnp.ndim(total) == 0 else total + x, (x, x)


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize(
    ("lengths", "chunk"),
    [(draw_padding.LENGTHS, draw_padding.CHUNK), (draw_padding.LENGTHS, 5), ((0,) * 8, 5), ((0,) * 8, 16)],
)
def test_what_is_skipped_is_drawn_from_what_runs(lengths: tuple[int, ...], chunk: int, compact: bool) -> None:
    assert drawn_rows(lengths, chunk, compact) == rows_of_steps(lengths, draw_padding.STEPS, chunk, compact)


def drawn_rows(lengths: tuple[int, ...], chunk: int, compact: bool) -> list[int]:
    chunks = draw_padding.rows_that_run(lengths, draw_padding.STEPS, chunk, compact=compact)
    return [len(rows) for steps, rows in chunks for _ in range(steps) if rows]


def test_the_pictures_of_tutorials_show_what_is_so() -> None:
    visited = draw_tutorials.iterates()
    assert visited[-1] == pytest.approx(2**0.5, rel=1e-6)
    with np.load(draw_tutorials.VOWELS) as data:
        lengths = data["train_lengths"]
    drawn = re.findall(r'text-anchor="end">(\d+)<', (ROOT / "docs" / "pictures" / "vowels.svg").read_text())
    assert [int(length) for length in drawn] == lengths[: len(drawn)].tolist()


def test_the_timelines_reach_what_the_plans_save() -> None:
    for events, peak in draw_guides.timelines().values():
        assert max(held for _, held in events) == peak
        assert [kind for kind, _ in events].count("back") == draw_guides.T


def test_the_pictures_of_guides_show_what_is_so() -> None:
    where, mask = draw_guides.of_where(), draw_guides.of_mask()
    assert np.isnan(where["new"]) and np.isnan(where["into w"])
    assert where["into step"] == mask["into w"] == 0
    assert where["selected"] == pytest.approx(mask["selected"])
    sequences, rows, back = draw_guides.packed_names()
    assert sequences == back
    assert {name for row in rows for name in row} == {name for steps in sequences for name in steps}
    _, order = draw_guides.turns_of()
    assert order == list(range(draw_guides.DEPTH))
    told = draw_guides.moves()
    assert [done for done, _ in told] == [250, 500, 750, 1000]
    printed = re.findall(r"^cells: (\d+) h=(\S+)$", PAGES, re.MULTILINE)  # by the meter of the guide, in the same loop
    assert printed == [(str(done), f"{h:.3f}") for done, h in told]
    each, kept, smooth = draw_guides.losses()
    assert kept == each[draw_guides.KEPT - 1 :: draw_guides.KEPT]
    weights = 0.9 ** np.arange(draw_guides.SHOWN)[::-1]
    assert smooth[-1] == pytest.approx(np.sum(weights * each) / np.sum(weights), rel=1e-4)


def test_the_boxes_of_the_flowchart_are_links() -> None:
    svg = ET.fromstring((ROOT / "docs" / "pictures" / "choosing.svg").read_text())
    assert svg.get("role") == "group", "what is in an image is no link"
    links = list(svg.iter("{http://www.w3.org/2000/svg}a"))
    assert [link.get("aria-label") for link in links] == [*(" or ".join(v) for _, v, _ in DRAW.QUESTIONS), "scan"]
