"""What a newcomer types into the search, in words of their own, finds the page that says how, among the first three."""

import pytest
from conftest import Open
from playwright.sync_api import expect

RECIPES = "recipes/index.html"
JOBS = {  # the query, and where its answer is: a page, or a section of it that the result names too
    "last hidden state of each row": f"{RECIPES}#the-last-hidden-state-of-each-row",
    "loss per sequence in a packed batch": f"{RECIPES}#the-loss-of-each-sequence-in-a-packed-batch",
    "generalized advantage estimation": f"{RECIPES}#returns",
    "convert a list of layers to stacked parameters": "guides/layers.html#make-a-stack",
    "merge statistics of two runs": f"{RECIPES}#merge-the-statistics-of-two-runs",
    "first step is different": f"{RECIPES}#a-first-step-that-is-different",
    "newton iteration until tolerance for each row": f"{RECIPES}#newtons-iteration-with-a-tolerance-for-each-row",
    "replace nn.RNN with masking": "guides/flax.html#recurrent-networks",
    "out of memory gradient of scan": "guides/memory.html",
    "early stopping decode until end token": f"{RECIPES}#decoding-greedy-and-beams",
    "dropout keys per step": "guides/random-keys.html",
    "nan gradient padding": "guides/debugging.html#why-is-my-gradient-nan",
    "scan with variable length": "guides/variable-length.html",
    "running mean in a scan": "guides/custom-carries.html",
    "reverse scan": "reference/scan.html",
    "skip computation on padding": "guides/variable-length.html#what-is-skipped-and-what-it-costs",
    "freeze some layers": f"{RECIPES}#freeze-some-layers-of-a-stack",
    "progress bar inside jit": "guides/progress.html",
    "carry type changed error": "errors.html#carryerror",
    "save only the last output": "guides/memory.html#keeping-fewer-outputs",
}


@pytest.mark.parametrize("query", JOBS)
def test_a_job_is_found_in_the_words_of_its_reader(server: str, visit: Open, query: str) -> None:
    wanted, _, section = JOBS[query].partition("#")
    page = visit(f"{server}/index.html")
    page.keyboard.press("/")
    page.keyboard.type(query)
    results = page.locator(".md-search-result__item")
    expect(results.first).to_be_attached(timeout=20_000)
    page.wait_for_timeout(300)  # the worker answers each letter
    first = results.evaluate_all(
        "items => items.slice(0, 3).map(item => [...item.querySelectorAll('a')].map(link => link.getAttribute('href')))"
    )
    # A result is a page and its sections; links mark the words that were typed (`?h=`).
    found = [
        {link.removeprefix(server).lstrip("/").partition("?")[0]: link.partition("#")[2] for link in links}
        | {link.partition("#")[2]: "" for link in links if "#" in link}
        for links in first
    ]
    (result,) = [links for links in found if any(link.partition("#")[0] == wanted for link in links)]
    assert not section or section in result


def test_stop_words_and_endings_do_not_matter(server: str, visit: Open) -> None:
    page = visit(f"{server}/index.html")
    page.keyboard.press("/")
    page.keyboard.type("how do I merge the statistic of my two run")
    section = page.locator(".md-search-result__item").first.locator("a[href*='#merge-the-statistics']")
    expect(section).to_be_attached(timeout=20_000)
