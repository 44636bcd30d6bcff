"""Where code or a table scrolls, on a phone, one sees that there is more: how. `test_pages.py` asks all pages."""

import pytest
from conftest import Open
from playwright.sync_api import expect


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
