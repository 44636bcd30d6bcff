"""How text is laid out for a terminal: paragraphs and tables of at most `WIDTH` columns."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence

WIDTH = 78
_INDENT = "  "
_GAP = "   "
_CODE = re.compile(r"`[^`]*`(?: \([^()\s]+:\d+\))?")  # `step` (model.py:42)


def wrap(text: str, width: int | None = None, *, taken: int = 0) -> str:
    """Breaks a paragraph into lines, but no piece of code, with its file and line, that has room on a line of its own.

    Args:
        text: the paragraph; code is between backticks.
        width: the most columns that a line has; None: `WIDTH`. A word that is longer gets a line to itself.
        taken: the columns of the first line in which something else is printed.
    """
    width = WIDTH if width is None else width
    glued = _CODE.sub(lambda code: code[0].replace(" ", "\0") if len(code[0]) < width else code[0], text)
    filled = textwrap.fill(glued, width, initial_indent="\1" * taken, break_long_words=False, break_on_hyphens=False)
    return filled.replace("\0", " ").removeprefix("\1" * taken)


def indented(paragraph: str) -> str:
    """A paragraph that is wrapped and two columns in, as under a headline."""
    return indent(wrap(paragraph, WIDTH - len(_INDENT)))


def indent(text: str) -> str:
    """The same lines, two columns in."""
    return textwrap.indent(text, _INDENT)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Lays out rows under their header, columns aligned, two columns in.

    A fourth column goes below its row where the line would be too wide, and if that is too wide too,
    each row becomes a list of its own.
    """
    lines = [header, *rows]
    whole = _aligned(lines)
    if _fits(whole):
        return indent("\n".join(whole))
    short = _aligned([line[:3] for line in lines])
    if _fits(short):
        notes = ["", *(row[3] if len(row) > 3 else "" for row in rows)]
        below = [indent(wrap(note, WIDTH - 2 * len(_INDENT))) for note in notes]
        return indent("\n".join(line + (f"\n{note}" if note else "") for line, note in zip(short, below, strict=True)))
    return "\n\n".join(_listed(header, row) for row in rows)


def _aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(line[i]) if i < len(line) else 0 for line in lines) for i in range(4)]
    return [_GAP.join(cell.ljust(width) for cell, width in zip(line, widths, strict=False)).rstrip() for line in lines]


def _fits(lines: Sequence[str]) -> bool:
    return all(len(line) <= WIDTH - len(_INDENT) for line in lines)


def _listed(header: Sequence[str], row: Sequence[str]) -> str:
    """One row as a list: each cell beside the title of its column."""
    titles = [*header, *[""] * (len(row) - len(header))]
    first = max(map(len, titles)) + len(_GAP)
    cells = [(title, wrap(cell, WIDTH - len(_INDENT) - first)) for title, cell in zip(titles, row, strict=True) if cell]
    return indent("\n".join(title.ljust(first) + cell.replace("\n", "\n" + " " * first) for title, cell in cells))
