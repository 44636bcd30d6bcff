"""The picture of chunks moves once, can be paused, and is still for those who prefer that."""

from conftest import SITE, Open
from playwright.sync_api import Page, expect

PAGE = next(
    str(page.relative_to(SITE))
    for page in sorted((SITE / "guides").glob("*.html"))
    if 'class="moves"' in page.read_text()
)
MOVING = """() => document.querySelector("svg.picture:has(.moves)").getAnimations({ subtree: true })
    .filter(animation => animation.playState === "running").length"""
FINISH = """() => document.querySelector("svg.picture:has(.moves)").getAnimations({ subtree: true })
    .forEach(animation => animation.finish())"""
LOOKS = """() => [...document.querySelectorAll("svg.picture:has(.moves) rect")]
    .map(box => [box.getBoundingClientRect().x, box.getBoundingClientRect().y])
    .map(([x, y]) => `${Math.round(x)} ${Math.round(y)}`).join()"""


def bring_into_view(page: Page) -> None:
    page.locator("svg.picture:has(.moves)").scroll_into_view_if_needed()


def test_it_is_still_where_nothing_is_to_move(server: str, visit: Open) -> None:
    page = visit(f"{server}/{PAGE}")
    bring_into_view(page)
    page.wait_for_timeout(300)
    assert page.evaluate(MOVING) == 0
    expect(page.locator(".picture-button")).to_have_count(0)
    faint = "() => [...document.querySelectorAll('.appears')].filter(e => getComputedStyle(e).opacity !== '1').length"
    assert page.evaluate(faint) == 0


def test_it_moves_pauses_and_ends(server: str, visit: Open) -> None:
    page = visit(f"{server}/{PAGE}", moving=True)
    bring_into_view(page)
    button = page.locator(".picture-button")
    expect(button).to_have_text("Pause")
    assert page.evaluate(MOVING) > 50
    button.click()
    expect(button).to_have_text("Go on")
    assert page.evaluate(MOVING) == 0
    button.click()
    expect(button).to_have_text("Pause")
    assert page.evaluate(MOVING) > 50
    page.evaluate(FINISH)
    expect(button).to_have_text("Play again")
    ended = page.evaluate(LOOKS)
    button.click()
    expect(button).to_have_text("Pause")
    assert page.evaluate(LOOKS) != ended  # rows are where they begin
