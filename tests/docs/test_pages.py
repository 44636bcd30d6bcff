"""What every page of the documentation has: a description, and one name. And the logo is what its script draws."""

import re
import xml.etree.ElementTree as ET
from pathlib import Path

from test_docs import FRONT_MATTER

from scripts import ROOT, script

DOCS = ROOT / "docs"
PAGES = sorted(page for page in DOCS.rglob("*.md") if "pictures" not in page.parts)
NAV = re.search(r"^nav:.*?\n(.*?)^\S", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE | re.DOTALL)
DESCRIPTION = re.compile(r'\A---\n(?:.*\n)*?description: (?:"([^"]+)"|([^"\n]+))\n(?:.*\n)*?---\n')


def description(page: Path) -> str:
    found = DESCRIPTION.match(page.read_text())
    assert found, f"{page} does not begin with its description, which search engines and llms.txt show"
    return found[1] or found[2]


def test_each_page_has_a_description_of_its_own() -> None:
    found = {description(page): page for page in PAGES}
    assert len(found) == len(PAGES)
    assert not [page for text, page in found.items() if not 50 <= len(text) <= 160]  # what search engines show


GENERATED = re.compile(r"<!-- (figures|works): .*?<!-- /\1 -->|<!-- by scripts/messages.*", re.DOTALL)


def written(page: Path) -> str:
    """A page without what scripts write into it."""
    return GENERATED.sub("", FRONT_MATTER.sub("", page.read_text(), count=1))


def test_the_site_keeps_to_its_size() -> None:
    words = sum(len(written(page).split()) for page in PAGES if page.parent.name != "reference")
    assert len(PAGES) <= 80  # many, because each is read to its end
    # 50,000, and what came since: linear recurrences, many processes, options of one's own, flags of other libraries,
    # pipelines, segment ids, associative operators, recipes for decoders and their layers.
    assert words <= 58_700, f"{words} words, code and outputs among them: say something in fewer"


def test_files_that_pages_name_are_there() -> None:
    """A path in code is of the repository or of the package; so are names on pages about these, and in docstrings."""
    named = re.compile(r"`((?:[\w.-]+/)*(?:[\w.-]+\.(?:py|md|txt|json|svg|npz)|_\w+/))`")
    missing = set[tuple[str, str]]()
    for page in [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "treescan").rglob("*.py")]:
        is_about_files = page.suffix == ".py" or page.stem in ("design", "design-promises", "layout", "CONTRIBUTING")
        for path in named.findall(page.read_text()):
            there = any((place / path).exists() for place in (ROOT, ROOT / "treescan", page.parent))
            if not there and (is_about_files or "/" in path):
                missing.add((page.name, path))
    assert not missing


def test_the_navigation_names_pages_by_their_titles() -> None:
    assert NAV
    entries = re.findall(r"^ +- (?:(.+): )?(\S+\.md)$", NAV[1], re.MULTILINE)
    assert sorted(file for _, file in entries) == [str(page.relative_to(DOCS)) for page in PAGES]
    named = {file: name for name, file in entries if name}
    assert named.pop("index.md") == "Home"
    for file, name in named.items():  # a tab of one page
        assert re.search(rf"^# {name}$", (DOCS / file).read_text(), re.MULTILINE)


def test_the_logo_is_what_its_script_draws() -> None:
    draw = script("draw_logo")
    assert (draw.DIRECTORY / "logo.svg").read_text() == draw.logo(), "run `python scripts/draw_logo.py`"
    ET.fromstring(draw.card())
    width, height, digest = draw.size_and_digest((draw.DIRECTORY / "social.png").read_bytes())
    assert (width, height) == draw.CARD
    assert digest == draw.digest(draw.card()), "run `python scripts/draw_logo.py`"
