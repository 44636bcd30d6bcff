"""The built site, served on this machine, and a Chromium that reads it: `make test-site`.

The everyday tests leave this folder out (`collect_ignore` in tests/conftest.py): it needs Playwright, and a Chromium of
the machine's own, for Playwright's would have to be downloaded. Without one every test here is skipped.
"""

import functools
import http.server
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Locator, Page, Request, Response, sync_playwright

SITE = Path(__file__).parents[2] / "site"
PAGES = [str(page.relative_to(SITE)) for page in sorted(SITE.rglob("*.html"))]
DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}

Open = Callable[..., Page]


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Says nothing."""

    def send_error(self, code: int, *_: object) -> None:
        """Shows the site's own page where there is none."""
        page = (SITE / "404.html").read_bytes()
        self.send_response(code)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    """Where the site is served: `http://127.0.0.1:...`."""
    assert (SITE / "index.html").exists(), "there is no site: run `make docs`"
    handler = functools.partial(_Quiet, directory=SITE)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    executable = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if executable is None:
        pytest.skip("no chromium on PATH: the site was not tried in a browser")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture(params=["http", "file"])
def root(request: pytest.FixtureRequest) -> str:
    """Where the site is read: served, and from the file system."""
    return request.getfixturevalue("server") if request.param == "http" else SITE.as_uri()


@pytest.fixture
def visit(browser: Browser) -> Iterator[Open]:
    """`visit(url, phone=False, dark=False)`: opens a page in a browser that has seen nothing before.

    `answered` is called with each response. With `missing` there is no such page; with `moving` pictures may move.

    When the test is over, nothing may have gone wrong on it: no error in the console, no request that failed, and none
    to another host.
    """
    wrong: list[str] = []
    contexts = []

    def note_failure(request: Request) -> None:
        if request.failure != "net::ERR_ABORTED":  # the page was left before its icon had come
            wrong.append(f"failed: {request.url}: {request.failure}")

    def open_page(
        url: str,
        *,
        phone: bool = False,
        dark: bool = False,
        missing: bool = False,
        moving: bool = False,
        answered: Callable[[Response], None] | None = None,
    ) -> Page:
        context = browser.new_context(
            viewport=PHONE if phone else DESKTOP,
            has_touch=phone,
            color_scheme="dark" if dark else "light",
            permissions=["clipboard-read", "clipboard-write"],
            # Where things move, one would look at colours that are about to change.
            reduced_motion="no-preference" if moving else "reduce",
        )
        contexts.append(context)
        page = context.new_page()
        home = "file://" if url.startswith("file:") else "/".join(url.split("/")[:3])
        if not missing:
            page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("requestfailed", note_failure)
        page.on(
            "response",
            lambda answer: (
                wrong.append(f"{answer.status}: {answer.url}")
                if answer.status >= 400 and not (missing and answer.url.partition("?")[0] == url)
                else None
            ),
        )
        page.on(
            "request",
            lambda request: None if request.url.startswith((home, "data:", "blob:")) else wrong.append(request.url),
        )
        if answered is not None:
            page.on("response", answered)
        page.goto(url)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not wrong


def search(page: Page, query: str) -> Locator:
    """What the search finds, once it is there."""
    page.keyboard.press("/")
    page.keyboard.type(query)
    return page.locator(".md-search-result__item")
