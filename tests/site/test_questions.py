"""Six questions that people come with: each finds its answer in at most three clicks, and on the first two screens."""

import pytest
from conftest import DESKTOP, Open
from playwright.sync_api import Page, expect

PLACES = {"tab": ".md-tabs a", "menu": ".md-nav--primary a", "contents": ".md-nav--secondary a", "page": "article a"}
# The question, the clicks from the first page on, and a part of the answer.
QUESTIONS = {
    "My sequences have different lengths.": (["tab: Guides"], "mask_scan("),
    "How do I run the layers of a model as one loop?": (["tab: Guides", "menu: Stacks of layers"], "fold_layers"),
    "How do I write a carry, and ship it as a plugin?": (
        ["tab: Extending", "menu: A carry of your own", "contents: The carry"],
        "AbstractCarry",
    ),
    "What does this error mean?": (["tab: Errors", "contents: CarryError"], "What to do depends on the last column"),
    "Which loop, and which library?": (["menu: How to choose"], "jax.lax.cond"),
    "How is it maintained?": (["tab: Project", "menu: Contributing"], "make test"),
}
DISTANCE = """(text) => {
    const walker = document.createTreeWalker(document.querySelector("article"), NodeFilter.SHOW_ELEMENT)
    let nearest = Infinity
    for (let element = walker.nextNode(); element; element = walker.nextNode()) {
        const box = element.getBoundingClientRect()
        const own = element.innerText ?? ""
        if (own.includes(text) && box.height < innerHeight && box.top >= 0) nearest = Math.min(nearest, box.top)
    }
    return nearest
}"""


def click(page: Page, step: str) -> None:
    where, _, name = step.partition(": ")
    link = page.locator(PLACES[where]).filter(has_text=name).filter(visible=True).first
    expect(link).to_be_visible()
    box = link.bounding_box()
    assert box
    assert box["y"] < 2 * DESKTOP["height"], f"{step} is below the second screen"
    link.click()
    page.wait_for_load_state("networkidle")


@pytest.mark.parametrize("question", QUESTIONS)
def test_an_answer_is_near(server: str, visit: Open, question: str) -> None:
    clicks, answer = QUESTIONS[question]
    assert len(clicks) <= 3
    page = visit(f"{server}/index.html")
    for step in clicks:
        click(page, step)
    page.wait_for_timeout(300)  # it scrolls
    assert page.evaluate(DISTANCE, answer) < 2 * DESKTOP["height"]
