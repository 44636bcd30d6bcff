"""What holds for every page: it loads without an error (see `visit`), fits a phone, and can be read by everybody."""

import re

import pytest
from axe_playwright_python.sync_playwright import Axe
from conftest import PAGES, SITE, Open
from playwright.sync_api import Page, expect

WIDER_THAN_THE_SCREEN = """() => [...document.querySelectorAll("main *")]
    .filter(element => element.getBoundingClientRect().right > document.documentElement.clientWidth + 1)
    .map(element => element.outerHTML.slice(0, 150)).slice(0, 5)"""

CUT_OFF = """() => [...document.querySelectorAll("article pre > code")]
    .filter(code => code.scrollWidth > code.clientWidth)
    .map(code => code.innerText.split("\\n").sort((one, other) => other.length - one.length)[0])"""

COVERED = """() => [...document.querySelectorAll(".md-code__button")].filter(button => {
    const code = button.closest("pre").querySelector("code").getBoundingClientRect()
    return button.getBoundingClientRect().left < code.right - 1
}).length"""

UNFOLD = "() => document.querySelectorAll('details').forEach(folded => { folded.open = true })"

SCROLLS = """() => {
    const all = [...document.querySelectorAll("article pre > code, article .md-typeset__scrollwrap")]
    return all.map(element => {
        const wide = element.scrollWidth > element.clientWidth + 1
        const fades = getComputedStyle(element).maskImage !== "none"
        return [wide, fades, element.dataset.more ?? "", element.innerText.slice(0, 60)]
    })
}"""

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
def test_page_on_a_phone(server: str, visit: Open, page: str) -> None:
    """It fits, and where code or a table scrolls, one sees that there is more."""
    opened = visit(f"{server}/{page}", phone=True)
    opened.wait_for_load_state("networkidle")
    scroll, client = opened.evaluate("[document.scrollingElement.scrollWidth, document.scrollingElement.clientWidth]")
    assert scroll <= client, opened.evaluate(WIDER_THAN_THE_SCREEN)
    assert not violations(opened, runOnly=["scrollable-region-focusable"])
    opened.evaluate(UNFOLD)
    opened.wait_for_timeout(500)  # the sizes are observed
    for wide, fades, more, text in opened.evaluate(SCROLLS):
        assert fades == wide, text
        assert more == ("right" if wide else ""), text
    assert opened.evaluate(COVERED) == 0


@pytest.mark.parametrize("page", ["benchmarks.html", "benchmarks-by-loop.html"])
def test_words_of_charts_are_not_cut_on_a_phone(server: str, visit: Open, page: str) -> None:
    opened = visit(f"{server}/{page}", phone=True)
    cut = """() => [...document.querySelectorAll(".ratios text")]
        .filter(text => text.getBoundingClientRect().right > document.documentElement.clientWidth)
        .map(text => text.textContent)"""
    assert not opened.evaluate(cut)


@pytest.mark.parametrize("page", PAGES)
def test_page_on_a_desktop(server: str, visit: Open, page: str) -> None:
    """Lines of code are whole, and everybody can read it, in both colours."""
    opened = visit(f"{server}/{page}")
    opened.wait_for_load_state("networkidle")
    opened.evaluate(UNFOLD)
    assert opened.evaluate(CUT_OFF) == []
    assert opened.evaluate(COVERED) == 0
    body = opened.locator("body")
    expect(body).to_have_attribute("data-md-color-scheme", "default")
    assert not violations(opened)
    opened.locator("form.md-header__option label:visible").click()
    expect(body).to_have_attribute("data-md-color-scheme", "slate")
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


def height_of(page: Page, chosen: str) -> float:
    """Where an element ends, from the top of the page."""
    return page.locator(chosen).first.evaluate("element => element.getBoundingClientRect().bottom + scrollY")


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_at_most_nine_screens(server: str, visit: Open, page: str) -> None:
    opened = visit(f"{server}/{page}")
    opened.set_viewport_size({"width": 1400, "height": 900})
    assert height_of(opened, "article") <= 9 * 900


@pytest.mark.parametrize("phone", [False, True])
def test_the_first_screen_has_code_its_result_and_its_picture(server: str, visit: Open, phone: bool) -> None:
    opened = visit(f"{server}/index.html", phone=phone)
    if not phone:
        opened.set_viewport_size({"width": 1400, "height": 900})
    height = opened.evaluate("innerHeight")
    assert opened.locator(".first-screen .highlight").count() == 2
    assert all(height_of(opened, f".first-screen {part}") <= height for part in (".highlight + .highlight", "svg"))
