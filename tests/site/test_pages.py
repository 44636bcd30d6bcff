"""What holds for every page: it loads without an error (see `visit`), fits a phone, and can be read by everybody."""

import re

import pytest
from axe_playwright_python.sync_playwright import Axe
from conftest import PAGES, SITE, Open
from playwright.sync_api import Page

WIDER_THAN_THE_SCREEN = """() => [...document.querySelectorAll("main *")]
    .filter(element => element.getBoundingClientRect().right > document.documentElement.clientWidth + 1)
    .map(element => element.outerHTML.slice(0, 150)).slice(0, 5)"""

# Tokens of code look alike if they have the same class, and axe takes most of its time for their contrast: one of each.
UNMARK_REPEATED_TOKENS = """() => {
    const seen = new Set()
    for (const token of document.querySelectorAll("pre span[class]")) {
        const place = token.closest("pre").parentElement.className
        const looks = [token.className, token.parentElement.tagName, place].join()
        seen.has(looks) ? token.replaceWith(...token.childNodes) : seen.add(looks)
    }
}"""


def test_there_are_pages() -> None:
    assert "index.html" in PAGES


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_includes_is_there(page: str) -> None:
    text = re.sub(r"<[^>]+>", "", (SITE / page).read_text())
    assert not re.search(r"--8\s*&lt;", text)  # a formatter once took these lines for Python


@pytest.mark.parametrize("page", PAGES)
def test_page_fits_a_phone(server: str, visit: Open, page: str) -> None:
    opened = visit(f"{server}/{page}", phone=True)
    scroll, client = opened.evaluate("[document.scrollingElement.scrollWidth, document.scrollingElement.clientWidth]")
    assert scroll <= client, opened.evaluate(WIDER_THAN_THE_SCREEN)
    assert not violations(opened, runOnly=["scrollable-region-focusable"])


def test_words_of_charts_are_not_cut_on_a_phone(server: str, visit: Open) -> None:
    opened = visit(f"{server}/benchmarks.html", phone=True)
    cut = """() => [...document.querySelectorAll(".ratios text")]
        .filter(text => text.getBoundingClientRect().right > document.documentElement.clientWidth)
        .map(text => text.textContent)"""
    assert not opened.evaluate(cut)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("page", PAGES)
def test_page_is_accessible(server: str, visit: Open, page: str, dark: bool) -> None:
    opened = visit(f"{server}/{page}", dark=dark)
    assert opened.locator("body").get_attribute("data-md-color-scheme") == ("slate" if dark else "default")
    assert not violations(opened)


def violations(page: Page, **options: object) -> list[str]:
    """What axe finds on a page that shuts somebody out, in words."""
    page.wait_for_load_state()
    page.evaluate(UNMARK_REPEATED_TOKENS)
    found = Axe().run(page, options={"resultTypes": ["violations"], **options}).response["violations"]
    return [
        f"{violation['id']}: {node['html'][:200]}: {node['failureSummary']}"
        for violation in found
        if violation["impact"] in ("serious", "critical")
        for node in violation["nodes"]
    ]
