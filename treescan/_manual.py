"""The pages of errors and of findings in the documentation, for a terminal: a section for each of them."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

from ._layout import WIDTH

_HERE = Path(__file__).parent
_FOLDERS = (_HERE, _HERE.parent / "docs")  # in a wheel, in a checkout
_FENCE = re.compile(r"^(```\w+[^\n]*\n.*?^```)$", re.MULTILINE | re.DOTALL)
_ITEM = re.compile(r"^(?=- )", re.MULTILINE)


def section(title: str, page_name: str) -> str:
    """What a page says about one error, warning or finding, without what only a browser uses, its lines wrapped."""
    page = _read(page_name)
    _, text = page.split(f"\n## {title}\n")
    text = re.sub(r"<!--.*?-->\n", "", text.split("\n## ")[0])
    return "\n\n".join([f"{title}\n{'=' * len(title)}", *_paragraphs(text)])


def _read(page_name: str) -> str:
    places = [folder / page_name for folder in _FOLDERS]
    return next(place for place in places if place.exists()).read_text(encoding="utf-8")


def _paragraphs(text: str) -> Iterator[str]:
    for number, part in enumerate(_FENCE.split(text)):
        if number % 2:
            yield _block(part)
            continue
        for paragraph in filter(None, map(str.strip, part.split("\n\n"))):
            yield "\n".join(map(_wrapped, filter(None, _ITEM.split(_without_links(paragraph)))))


def _block(fence: str) -> str:
    """A block of code or output: the name of its file in place of what marks a block."""
    head, *lines, _ = fence.splitlines()
    title = re.search(r'title="(.*)"', head)
    code = "\n".join(lines)
    return f"# {title[1]}\n{code}" if title else code


def _without_links(text: str) -> str:
    return re.sub(r"\*\*|\[([^]]*)\]\([^)]*\)", lambda link: link[1] or "", text)


def _wrapped(text: str) -> str:
    indent = "  " if text.startswith("- ") else ""
    text = " ".join(text.split())
    return textwrap.fill(text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
