"""The picture of the steps that run: it shows what the library runs, for the lengths that one sets."""

import itertools
import re

import pytest
from conftest import Open
from playwright.sync_api import Locator, Page, expect
from plots import rows_of_steps

PAGE = "guides/skipping.html"
STEPS = 16


def shown(page: Page) -> Locator:
    return page.locator('svg[aria-labelledby="skipped-title"]')


def share(page: Page) -> str:
    return shown(page).locator("text").nth(1).inner_html()


@pytest.mark.parametrize(
    "lengths",
    [[6, 3, 11, 1, 4, 7, 2, 0], [16, 1, 1, 1, 1, 1, 1, 1], [0] * 8, [16] * 8, [5, 16, 9], [9, 9, 1, 1, 1, 1]],
    ids=str,
)
def test_the_numbers_are_those_of_the_library(server: str, visit: Open, lengths: list[int]) -> None:
    page = visit(f"{server}/{PAGE}")
    for chunk, compact in itertools.product((1, 3, 4, 5, 15, 16), (False, True)):
        found = page.evaluate("given => rowsThatRun(...given)", [lengths, STEPS, chunk, compact])
        ran = [len(rows) for steps, rows in found for _ in range(steps) if rows]
        assert ran == rows_of_steps(lengths, STEPS, chunk, compact), (chunk, compact)


def test_it_is_drawn_as_the_script_draws_it(root: str, visit: Open) -> None:
    page = visit(f"{root}/{PAGE}")

    def elements() -> str:
        return re.sub(r"></(rect|polyline)>|/>", ">", shown(page).inner_html())

    before = elements()
    page.get_by_role("checkbox", name="compact").check()
    assert elements() != before
    page.get_by_role("checkbox", name="compact").uncheck()
    assert elements().split() == before.split()


def test_the_keyboard_and_the_pointer_set_lengths(root: str, visit: Open) -> None:
    page = visit(f"{root}/{PAGE}")
    assert share(page) == "75 % run: 96 of 128 steps"
    handle = page.get_by_label("Length of row 2")
    handle.focus()
    for _ in range(4):
        page.keyboard.press("ArrowLeft")
    assert share(page) == "50 % run: 64 of 128 steps"
    expect(page.locator(".picture-says")).to_contain_text("lengths 6, 3, 7, 1, 4, 7, 2, 0 in 16 steps, chunk=4")
    box = handle.bounding_box()
    assert box is not None
    assert box["height"] >= 24
    page.mouse.move(box["x"] + box["width"] * 7 / 16, box["y"] + box["height"] / 2)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"], box["y"] + box["height"] / 2)
    page.mouse.up()
    assert share(page) == "100 % run: 128 of 128 steps"
    page.get_by_role("checkbox", name="compact").check()
    chunk = page.get_by_role("slider", name="chunk")
    chunk.focus()
    page.keyboard.press("ArrowRight")
    lengths = [6, 3, 16, 1, 4, 7, 2, 0]
    assert f": {sum(rows_of_steps(lengths, STEPS, 5, True))} of 128 steps" in share(page)


@pytest.mark.parametrize("phone", [False, True])
def test_a_handle_is_at_the_end_of_its_row(server: str, visit: Open, phone: bool) -> None:
    page = visit(f"{server}/{PAGE}", phone=phone)
    off = page.evaluate("""() => {
        const picture = document.querySelector('svg[aria-labelledby="skipped-title"]')
        const unit = picture.getBoundingClientRect().width / 400
        const left = picture.getBoundingClientRect().left, top = picture.getBoundingClientRect().top
        return [...document.querySelectorAll(".picture-stage > input")].map((handle, row) => {
            const box = handle.getBoundingClientRect()
            const ends = [box.left + 8 - left - 36 * unit, box.right - 8 - left - 388 * unit]
            return [...ends, box.top - top - (58 + 27 * row) * unit]
        }).flat().map(Math.abs)
    }""")
    assert len(off) == 3 * 8
    assert max(off) < 1


def test_without_javascript_the_picture_is_there(server: str, browser) -> None:
    with browser.new_context(java_script_enabled=False) as context:
        page = context.new_page()
        page.goto(f"{server}/{PAGE}")
        expect(shown(page)).to_be_visible()
        assert share(page) == "75 % run: 96 of 128 steps"
        expect(page.locator(".picture-stage")).to_have_count(0)
