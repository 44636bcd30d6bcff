"""Tables for notebooks, as small pieces of HTML."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import NamedTuple

_CELL = "text-align:left;padding:1px 12px 1px 0"


class Section(NamedTuple):
    """A part of what is shown.

    Attributes:
        title: its title; empty: none.
        header: the titles of the columns, all empty for none.
        rows: a table.
        notes: paragraphs below it.
    """

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()


def page(headline: str, sections: Sequence[Section]) -> str:
    """A headline and sections, as HTML."""
    return f"<div><b>{escaped(headline)}</b>{''.join(map(_section, sections))}</div>"


def table_of(rows: Sequence[Sequence[str]], header: Sequence[str] = ()) -> str:
    """A table, as HTML."""
    head = "".join(f'<th style="{_CELL}">{escaped(cell)}</th>' for cell in header) if any(header) else ""
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return f"<table>{f'<tr>{head}</tr>' if head else ''}{body}</table>"


def escaped(text: str) -> str:
    """Text for HTML; what is between backticks is code."""
    parts = html.escape(text).split("`")
    if len(parts) % 2 == 0:  # a backtick alone
        return html.escape(text)
    return "".join(f"<code>{part}</code>" if number % 2 else part for number, part in enumerate(parts))


def _section(section: Section) -> str:
    title = f"<p><b>{escaped(section.title)}</b></p>" if section.title else ""
    table = table_of(section.rows, section.header) if section.rows else ""
    return title + table + "".join(f"<p>{escaped(note)}</p>" for note in section.notes)


def _cell(text: str) -> str:
    return f'<td style="{_CELL}">{escaped(text)}</td>'
