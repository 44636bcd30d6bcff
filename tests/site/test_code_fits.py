"""Code is whole on a desktop. Where it or a table scrolls, on a phone, one sees that there is more, and of what."""

import pytest
from conftest import PAGES, Open
from playwright.sync_api import expect

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


@pytest.mark.parametrize("page", PAGES)
def test_a_desktop_shows_whole_lines_of_code(server: str, visit: Open, page: str) -> None:
    opened = visit(f"{server}/{page}")
    opened.wait_for_load_state("networkidle")
    opened.evaluate(UNFOLD)
    assert opened.evaluate(CUT_OFF) == []
    assert opened.evaluate(COVERED) == 0


@pytest.mark.parametrize("page", PAGES)
def test_a_phone_shows_that_there_is_more(server: str, visit: Open, page: str) -> None:
    opened = visit(f"{server}/{page}", phone=True)
    opened.wait_for_load_state("networkidle")
    opened.evaluate(UNFOLD)
    opened.wait_for_timeout(500)  # the sizes are observed
    for wide, fades, more, text in opened.evaluate(SCROLLS):
        assert fades == wide, text
        assert more == ("right" if wide else ""), text
    assert opened.evaluate(COVERED) == 0


def test_the_edge_that_fades_is_where_there_is_more(server: str, visit: Open) -> None:
    page = visit(f"{server}/errors.html", phone=True)
    page.wait_for_selector("code[data-more=right]")
    code = page.locator("pre > code[data-more]").first.element_handle()
    assert code is not None
    code.evaluate("element => { element.scrollLeft = 40 }")
    page.wait_for_selector('code[data-more="left right"]')
    code.evaluate("element => { element.scrollLeft = element.scrollWidth }")
    page.wait_for_selector("code[data-more=left]")


LEFT = """table => [...table.querySelectorAll("tr > :first-child")].map(cell => cell.getBoundingClientRect().left)"""


@pytest.mark.parametrize("page", ["what-works.html", "choosing.html", "guides/memory.html"])
def test_the_first_column_of_a_wide_table_stays(server: str, visit: Open, page: str) -> None:
    opened = visit(f"{server}/{page}", phone=True)
    table = opened.locator(".md-typeset__scrollwrap[data-more=right]").first
    before = table.evaluate(LEFT)
    table.evaluate("table => { table.scrollLeft = 150 }")
    expect(opened.locator('.md-typeset__scrollwrap[data-more~="left"]')).to_have_count(1)
    after = opened.locator('.md-typeset__scrollwrap[data-more~="left"]').evaluate(LEFT)
    assert all(0 <= left <= first for left, first in zip(after, before, strict=True))
    assert max(after) < 1


def test_what_code_prints_wraps_on_a_phone(server: str, visit: Open) -> None:
    opened = visit(f"{server}/guides/variable-length.html", phone=True)
    outputs = opened.locator(".highlight[data-wraps] code")
    assert outputs.count() > 3
    assert outputs.evaluate_all("all => all.filter(one => one.scrollWidth > one.clientWidth).length") == 0
