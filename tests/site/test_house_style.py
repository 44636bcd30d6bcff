"""One name for each page, a description, a card for links, a page for what is not there, and a sheet that prints."""

import html
import json
import re
import struct
from pathlib import Path

import pytest
from conftest import PAGES as ALL, SITE, Open
from playwright.sync_api import expect

PAGES = [page for page in ALL if page != "404.html"]
META = re.compile(r'<meta (?:name|property)="([\w:]+)" content="([^"]*)">')


def text_of(found: str) -> str:
    return " ".join(html.unescape(re.sub(r"<a class=\"headerlink.*?</a>|<[^>]+>", "", found, flags=re.DOTALL)).split())


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_one_name(page: str) -> None:
    source = (SITE / page).read_text()
    head, _, _ = source.partition("</head>")  # a picture has titles too
    (title,) = re.findall(r"<title>(.*?)</title>", head)
    (heading,) = re.findall(r"<h1.*?>(.*?)</h1>", source, re.DOTALL)
    name = text_of(heading)
    assert text_of(title) == ("treescan" if page == "index.html" else f"{name} - treescan")
    here = re.findall(r'<a href="[^"]*" class="md-nav__link md-nav__link--active">(.*?)</a>', source, re.DOTALL)
    assert {text_of(found) for found in here} <= {name, "Home" if page == "index.html" else name}
    assert here


@pytest.mark.parametrize("page", PAGES)
def test_a_link_to_a_page_shows_a_card(page: str) -> None:
    meta = dict(META.findall((SITE / page).read_text()))
    assert 50 <= len(html.unescape(meta["description"])) <= 160
    assert meta["og:description"] == meta["description"]
    assert meta["og:title"]
    card = (SITE / page).parent / meta["og:image"]
    assert struct.unpack(">II", card.read_bytes()[16:24]) == (1200, 630)
    assert (meta["og:image:width"], meta["og:image:height"]) == ("1200", "630")


def test_what_is_not_there_leads_on(server: str, visit: Open) -> None:
    page = visit(f"{server}/guides/ragged-batches.html", missing=True)
    expect(page.locator("h1")).to_have_text("Page not found")
    links = [link.get_attribute("href") or "" for link in page.locator("article ul a").all()]
    assert len(links) >= 6
    assert all((SITE / link.lstrip("/")).is_file() for link in links), links
    search = page.get_by_role("link", name="Search for “guides ragged batches”")
    search.click()
    expect(page.locator(".md-search-result__item a").first).to_be_visible(timeout=20_000)


@pytest.mark.parametrize("paper", ["A4", "Letter"])
def test_the_cheat_sheet_is_one_sheet(server: str, visit: Open, tmp_path: Path, paper: str) -> None:
    page = visit(f"{server}/cheat-sheet.html")
    page.wait_for_load_state("networkidle")
    edge = dict.fromkeys(("top", "right", "bottom", "left"), "10mm")
    printed = page.pdf(format=paper, margin=edge)
    assert len(re.findall(rb"/Type\s*/Page\b", printed)) == 1


def test_programs_find_every_page() -> None:
    listed = re.findall(r"^- \[.+\]\((.+?)\): .{50,160}$", (SITE / "llms.txt").read_text(), re.MULTILINE)
    assert sorted(listed) == PAGES


@pytest.mark.parametrize("name", ["vowels", "packed-vowels", "llama", "llama-cache", "solvers", "plugin"])
def test_a_tutorial_has_its_notebook(server: str, visit: Open, name: str) -> None:
    page = visit(f"{server}/tutorials/{name}.html")
    with page.expect_download() as download:
        page.get_by_role("link", name="Download this page as a notebook").click()
    assert json.loads(download.value.path().read_text())["nbformat"] == 4


@pytest.mark.parametrize("page", ["index.html", "guides/memory.html", "reference/scan.html", "frameworks.html"])
def test_the_sidebar_fits_a_laptop(server: str, visit: Open, page: str) -> None:
    opened = visit(f"{server}/{page}")
    opened.set_viewport_size({"width": 1280, "height": 800})
    scrolled = opened.locator(".md-sidebar--primary .md-sidebar__scrollwrap")
    expect(scrolled).to_be_visible()
    opened.wait_for_function(
        """() => {
        const found = document.querySelector(".md-sidebar--primary .md-sidebar__scrollwrap")
        return found.clientHeight < 700 && found.scrollHeight <= found.clientHeight
    }""",
        timeout=5_000,
    )
