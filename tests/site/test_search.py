"""What people search for is the first thing that is found, and a page with its search is light."""

import gzip

import pytest
from conftest import SITE, Open
from playwright.sync_api import Response, expect

LIMIT = 300_000  # bytes of a page with all that it loads, as servers compress it
FIRST = {
    "variable length": "guides/variable-length.html",
    "ragged": "guides/variable-length.html",
    "padding": "guides/variable-length.html",
    "early exit": "guides/early-exit.html",
    "NaN": "guides/debugging.html",
    "gradient is nan": "guides/debugging.html",
    "KV cache": "guides/layers.html",
    "OOM": "guides/memory.html",
    "scan": "reference/scan.html",
    "CarryError": "errors.html",
    "teacher forcing": "guides/training.html",
    "autoregressive": "guides/training.html",
}


@pytest.mark.parametrize("query", FIRST)
def test_the_first_result_is_the_page_about_it(server: str, visit: Open, query: str) -> None:
    page = visit(f"{server}/index.html")
    page.keyboard.press("/")
    page.keyboard.type(query)
    result = page.locator(".md-search-result__item a").first
    expect(result).to_be_attached(timeout=20_000)
    address = result.get_attribute("href") or ""
    assert address.removeprefix(server).lstrip("/").split("?")[0].split("#")[0] == FIRST[query]


@pytest.mark.parametrize("page", [str(page.relative_to(SITE)) for page in sorted(SITE.rglob("*.html"))])
def test_a_page_is_light(server: str, visit: Open, page: str) -> None:
    answers: list[Response] = []
    opened = visit(f"{server}/{page}", answered=lambda answer: answers.append(answer))
    for _ in range(200):  # the index is asked for last, by a worker, however busy the machine is
        if any("search_index" in answer.url for answer in answers):
            break
        opened.wait_for_timeout(100)
    opened.wait_for_load_state("networkidle")
    assert 100_000 < sum(len(gzip.compress(answer.body())) for answer in answers) < LIMIT
