"""A description as text of at most 78 columns, in colours where `rich` is there to show them."""

from __future__ import annotations

import importlib
import re
import textwrap
from collections.abc import Sequence
from typing import Any

from .._html import Section
from .._layout import WIDTH, wrap

_INDENT, _GAP = "  ", "  "
_CODE = re.compile(r"TS\d{3}")


def text_of(headline: str, sections: Sequence[Section]) -> str:
    """A headline and sections, as text."""
    return "\n\n".join(filter(None, [wrap(headline), *map(_section, sections)]))


def _section(section: Section) -> str:
    title = [wrap(section.title)] if section.title else []
    lines = [section.header, *section.rows] if any(section.header) else section.rows
    notes = [wrap(note) for note in section.notes]
    table = [_table(lines)] if section.rows else []
    if not section.title:
        return "\n\n".join([*table, *notes])
    return "\n".join([*title, *table, *(f"\n{note}" if table else textwrap.indent(note, _INDENT) for note in notes)])


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Rows with their columns aligned. What is left of the last column goes on below."""
    count = max(map(len, rows))
    widths = [max(len(row[i]) for row in rows) for i in range(count - 1)]
    taken = len(_INDENT) + sum(widths) + len(_GAP) * (count - 1)
    if taken > WIDTH - 16:
        return "\n".join(map(_stacked, rows))
    lines = list[str]()
    for row in rows:
        start = _INDENT + "".join(cell.ljust(width) + _GAP for cell, width in zip(row, widths, strict=False))
        first, *others = wrap(row[-1], WIDTH - taken).split("\n")
        lines += [(start + first).rstrip(), *(" " * taken + line for line in others)]
    return "\n".join(lines)


def _stacked(row: Sequence[str]) -> str:
    """A row whose cells are too wide for one line: the second begins the line, the others follow where they fit."""
    whole = _GAP.join(filter(None, row))
    return textwrap.fill(
        whole,
        WIDTH,
        initial_indent=_INDENT,
        subsequent_indent=_INDENT * 3,
        break_long_words=False,
        break_on_hyphens=False,
    )


def rich_text(text: str) -> Any:
    """The text for `rich`: its first line in bold, the codes of findings in colour."""
    styled = importlib.import_module("rich.text").Text(text)
    styled.stylize("bold", 0, len(text.partition("\n")[0]))
    for code in _CODE.finditer(text):
        styled.stylize("bold yellow", *code.span())
    return styled


def print_text(text: str) -> None:
    """Prints the text, by `rich` if that is installed."""
    try:
        console = importlib.import_module("rich.console").Console()
    except ImportError:
        print(text)  # noqa: T201, what it is for
        return
    console.print(rich_text(text), soft_wrap=True)
