"""Every link within the built site leads somewhere: to a file that is there, and to an id on it. Needs no browser."""

from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from conftest import SITE

PAGES = sorted(SITE.rglob("*.html"))


class Reader(HTMLParser):
    """The ids of a page, and what its links, scripts and images point to."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.targets: list[str] = []
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.ids |= {given[name] for name in ("id", "name") if name in given}
        self.targets += [given[name] for name in ("href", "src") if name in given]


READ = {page: Reader(page) for page in PAGES}


@pytest.mark.parametrize("page", [p for p in PAGES if p.name != "404.html"], ids=lambda p: str(p.relative_to(SITE)))
def test_links_lead_somewhere(page: Path) -> None:
    nowhere = []
    for target in READ[page].targets:
        parts = urlsplit(target)
        if parts.scheme or parts.netloc:
            continue
        file = (page.parent / unquote(parts.path)).resolve() if parts.path else page
        known = READ[file].ids if file in READ else set()
        if not file.is_file() or (parts.fragment and file in READ and unquote(parts.fragment) not in known):
            nowhere.append(target)
    assert not nowhere
