"""What a reader does: goes from page to page, searches, copies code, turns the lights off, uses the keyboard."""

import re
from urllib.parse import urldefrag

import pytest
from conftest import PAGES, Open, search
from playwright.sync_api import Page, expect

FOCUS = """() => {
    const focused = document.activeElement
    const element = focused.matches("input.md-option") ? focused.nextElementSibling : focused // its label is seen
    const style = getComputedStyle(element), box = element.getBoundingClientRect()
    return {
        name: element.outerHTML.slice(0, 120),
        outlined: style.outlineStyle !== "none" && parseFloat(style.outlineWidth) > 0,
        shown: box.width > 0 && box.height > 0 || element.matches(".md-search *"), // no results yet: no height
    }
}"""


def page_of(root: str, url: str) -> str:
    return urldefrag(url.split("?")[0]).url.removeprefix(root).lstrip("/")


def test_the_footer_leads_through_all_pages(server: str, visit: Open) -> None:
    page = visit(f"{server}/index.html")
    seen = [page_of(server, page.url)]
    while (following := page.locator("a.md-footer__link--next")).count():
        following.click()
        page.wait_for_load_state()
        seen.append(page_of(server, page.url))
        assert len(seen) == len(set(seen))
    assert set(seen) == {*PAGES} - {"404.html"}


def test_the_navigation_of_a_phone_opens(root: str, visit: Open) -> None:
    page = visit(f"{root}/choosing.html", phone=True)
    page.locator("label.md-header__button[for=__drawer]").click()
    link = page.locator(".md-nav--primary").get_by_role("link", name="Getting started", exact=True).first
    expect(link).to_be_in_viewport()
    link.click()
    expect(page).to_have_url(re.compile("getting-started.html"))


@pytest.mark.parametrize("query", ["mask_scan", "NaN", "flax"])
def test_search_finds(root: str, visit: Open, query: str) -> None:
    page = visit(f"{root}/index.html")
    result = search(page, query).locator("a:visible", has_text=re.compile(query, re.IGNORECASE)).first
    expect(result).to_be_visible(timeout=20_000)
    result.click()
    expect(page.locator("article mark").first).to_have_text(re.compile(query, re.IGNORECASE))


def test_what_is_nowhere_is_not_found(root: str, visit: Open) -> None:
    page = visit(f"{root}/index.html")
    search(page, "qzxjkv")
    expect(page.locator(".md-search-result__meta")).to_have_text("No matching documents", timeout=20_000)


def test_code_is_copied(root: str, visit: Open) -> None:
    page = visit(f"{root}/getting-started.html")
    block = page.locator("article .highlight", has_text="import treescan").first
    block.hover()
    block.get_by_role("button").first.click()
    expect(page.locator(".md-dialog")).to_contain_text("Copied")
    copied = page.evaluate("navigator.clipboard.readText()")
    assert "import treescan" in copied
    assert copied.strip() == block.locator("code").inner_text().strip()


def scheme(page: Page) -> str | None:
    return page.locator("body").get_attribute("data-md-color-scheme")


def test_the_dark_scheme_stays(root: str, visit: Open) -> None:
    page = visit(f"{root}/index.html")
    assert scheme(page) == "default"
    light = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.locator("form.md-header__option label:visible").click()
    assert scheme(page) == "slate"
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != light
    page.reload()
    assert scheme(page) == "slate"
    page.goto(f"{root}/guides/memory.html")
    assert scheme(page) == "slate"
    page.locator("form.md-header__option label:visible").click()
    assert scheme(page) == "default"


def test_the_first_tab_stop_skips_to_the_content(server: str, visit: Open) -> None:
    page = visit(f"{server}/guides/memory.html")
    page.keyboard.press("Tab")
    skip = page.locator("a.md-skip")
    expect(skip).to_be_focused()
    expect(skip).to_be_in_viewport()
    assert float(skip.evaluate("element => getComputedStyle(element).opacity")) == 1
    page.keyboard.press("Enter")
    assert "#" in page.url
    page.keyboard.press("Tab")
    assert page.evaluate("document.querySelector('article').contains(document.activeElement)")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("start", ["header", "article"])
def test_the_focus_is_visible(server: str, visit: Open, start: str, dark: bool) -> None:
    page = visit(f"{server}/guides/memory.html", dark=dark)
    expect(page.locator("form.md-header__option label:visible")).to_have_count(1)  # the theme is at work
    page.keyboard.press("Tab")
    if start == "article":
        page.keyboard.press("Enter")
    for _ in range(30):
        page.keyboard.press("Tab")
        focused = page.evaluate(FOCUS)
        assert focused["outlined"], focused
        assert focused["shown"], focused
