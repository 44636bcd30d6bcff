"""Code is whole on a desktop. Where it scrolls, on a phone, one sees that there is more. Buttons cover none of it."""

import pytest
from conftest import SITE, Open

PAGES = [str(page.relative_to(SITE)) for page in sorted(SITE.rglob("*.html"))]

CUT_OFF = """() => [...document.querySelectorAll("article pre > code")]
    .filter(code => code.scrollWidth > code.clientWidth)
    .map(code => code.innerText.split("\\n").sort((one, other) => other.length - one.length)[0])"""

COVERED = """() => [...document.querySelectorAll(".md-code__button")].filter(button => {
    const code = button.closest("pre").querySelector("code").getBoundingClientRect()
    return button.getBoundingClientRect().left < code.right - 1
}).length"""

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
    assert opened.evaluate(CUT_OFF) == []
    assert opened.evaluate(COVERED) == 0


@pytest.mark.parametrize("page", PAGES)
def test_a_phone_shows_that_there_is_more(server: str, visit: Open, page: str) -> None:
    opened = visit(f"{server}/{page}", phone=True)
    opened.wait_for_load_state("networkidle")
    opened.evaluate("() => document.querySelectorAll('details').forEach(one => one.open = true)")
    opened.wait_for_timeout(100)  # the sizes are observed
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
