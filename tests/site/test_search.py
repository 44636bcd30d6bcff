"""What people search for is found, also in words of their own, and a page with its search is light."""

import gzip

import pytest
from conftest import PAGES, Open, search
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
    result = search(visit(f"{server}/index.html"), query).first.locator("a").first
    expect(result).to_be_attached(timeout=20_000)
    address = result.get_attribute("href") or ""
    assert address.removeprefix(server).lstrip("/").split("?")[0].split("#")[0] == FIRST[query]


ROWS, NUMBERS = "recipes/rows.html", "recipes/numbers.html"
JOBS = {  # the query, and where its answer is: a page, or a section of it that the result names too
    "generalized advantage estimation": "recipes/agents.html#returns",
    "convert a list of layers to stacked parameters": "guides/layers.html#make-a-stack",
    "replace nn.RNN with masking": "guides/flax.html#recurrent-networks",
    "out of memory gradient of scan": "guides/memory.html",
    "early stopping decode until end token": "recipes/decoding.html",
    "dropout keys per step": "guides/random-keys.html",
    "running mean in a scan": "guides/custom-carries.html",
    "reverse scan": "reference/scan.html",
    "skip computation on padding": "guides/skipping.html",
    "freeze some layers": f"{NUMBERS}#freeze-some-layers-of-a-stack",
    "progress bar inside jit": "guides/progress.html",
    "carry type changed error": "errors.html#carryerror",
    "save only the last output": "guides/memory.html#keeping-fewer-outputs",
}


FIRST_OF_ALL = {  # a job of a newcomer, as one would say it: its page is the first that one opens
    "last hidden state of each row of a padded batch": f"{ROWS}#the-last-hidden-state-of-each-row",
    "last output of a padded lstm": f"{ROWS}#the-last-hidden-state-of-each-row",
    "loss per packed sequence": f"{ROWS}#the-loss-of-each-sequence-in-a-packed-batch",
    "GAE advantages over episodes with resets": "recipes/agents.html#returns",
    "scan over a list of layers": "guides/layers.html#make-a-stack",
    "merge running mean and variance of two parts of the data": f"{NUMBERS}#merge-the-statistics-of-two-runs",
    "do something else on the first step": f"{ROWS}#a-first-step-that-is-different",
    "special case for the first step": f"{ROWS}#a-first-step-that-is-different",
    "Newton with a tolerance per row": f"{NUMBERS}#newtons-iteration-with-a-tolerance-for-each-row",
    "replace flax nn.RNN": "guides/flax.html#recurrent-networks",
    "train over a sequence that does not fit in memory and resume after a kill": "guides/stream.html",
    "checkpoint and resume a long scan": "guides/stream.html#checkpoints",
    "cross entropy over a large vocabulary in chunks": "guides/stream.html#a-function-over-chunks",
    "chunked cross entropy": "guides/stream.html#a-function-over-chunks",
    "padded loss without NaN": "guides/variable-length.html#from-a-list-to-a-loss",
}


@pytest.mark.parametrize("query", [*JOBS, *FIRST_OF_ALL])
def test_a_job_is_found_in_the_words_of_its_reader(server: str, visit: Open, query: str) -> None:
    """Among the first three, or first of all."""
    wanted, _, section = (JOBS | FIRST_OF_ALL)[query].partition("#")
    page = visit(f"{server}/index.html")
    results = search(page, query)
    expect(results.first).to_be_attached(timeout=20_000)
    page.wait_for_timeout(300)  # the worker answers each letter
    first = results.evaluate_all(
        "(items, n) => items.slice(0, n).map(item => "
        "[...item.querySelectorAll('a')].map(link => link.getAttribute('href')))",
        1 if query in FIRST_OF_ALL else 3,
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
    results = search(visit(f"{server}/index.html"), "how do I merge the statistic of my two run")
    section = results.first.locator("a[href*='#merge-the-statistics']")
    expect(section).to_be_attached(timeout=20_000)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_light(server: str, visit: Open, page: str) -> None:
    answers: list[Response] = []
    opened = visit(f"{server}/{page}", answered=lambda answer: answers.append(answer))
    for _ in range(200):  # the index is asked for last, by a worker, however busy the machine is
        if any("search_index" in answer.url for answer in answers):
            break
        opened.wait_for_timeout(100)
    opened.wait_for_load_state("networkidle")
    assert 100_000 < sum(len(gzip.compress(answer.body())) for answer in answers) < LIMIT
