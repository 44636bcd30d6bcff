"""Text for a terminal and for notebooks: paragraphs, tables, near misses of names, and pages of the documentation."""

from __future__ import annotations

import difflib
import html
import re
import textwrap
from collections.abc import Iterable, Sequence
from typing import NamedTuple

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
    """The lines of a text, each moved in by two columns."""
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


_ALSO_CALLED = {
    "fill": ("value", "fill_value", "padding_value", "pad_value", "constant_values"),
    "length": ("lengths", "max_length", "maxlen", "num_steps", "n_steps", "steps", "num_layers", "n_layers"),
    "max_length": ("max_steps", "max_iter", "maxiter", "max_iterations", "length", "num_steps"),
    "lengths": ("seq_lens", "sequence_lengths", "num_valid"),
    "mask": ("masks", "padding_mask", "valid"),
    "time_axis": ("batch_first", "time_major"),
    "in_axes": ("axis", "axes", "batch_first", "time_major"),
    "resets": ("done", "dones", "reset", "is_first", "starts"),
    "f": ("body", "body_fun", "step", "fn", "func"),
    "init": ("carry", "h0", "init_val", "init_carry", "initial_state", "initial_carry"),
    "state": ("states", "cache", "caches", "kv_cache"),
    "remat": ("checkpoint", "checkpoints", "rematerialize", "policy"),
    "key": ("rng", "rngs", "seed", "prng_key"),
    "progress": ("tqdm", "bar", "verbose"),
    "updates": ("every", "interval", "print_rate"),
    "source": ("xs", "data", "dataset", "loader"),
    "part": ("chunk", "chunk_size", "batch_size", "steps"),
    "chunk": ("segment", "chunk_size"),
    "on_part": ("callback", "on_chunk"),
    "capacity": ("size", "max_size"),
    "n": ("num_layers", "n_layers", "depth", "length"),
}
"""What else the options are called: in other libraries, or for other functions of this one."""


FORMER = {
    "name": 'Write the call in a `jax.named_scope`: `with jax.named_scope("..."):`.',
    "carry_axes": '`row_axes={"carry": ...}` replaces it.',
    "x_axes": '`row_axes={"x": ...}` replaces it.',
    "y_axes": '`row_axes={"y": ...}` replaces it.',
}
"""Options of earlier versions, and what to write in place of each."""


def advice(name: str, options: Iterable[str]) -> str:
    """What to write in place of an option that does not exist: one that has this name elsewhere, or a similar name."""
    if name in FORMER:
        return FORMER[name]
    known = list(options)
    near = [option for option in known if name in _ALSO_CALLED.get(option, ())]
    near = near or difflib.get_close_matches(name, known, 1, 0.62)
    if not near and "*args" in known:
        return (
            f"What goes on to another function is passed by position. Or bind it, `functools.partial(..., {name}=...)`."
        )
    if not known:
        return "It takes none."
    return f"Did you mean `{near[0]}`?" if near else f"Its options are {', '.join(sorted(known))}."


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

    def cells(row: Sequence[str]) -> str:
        return "".join(f'<td style="{_CELL}">{escaped(text)}</td>' for text in row)

    head = "".join(f'<th style="{_CELL}">{escaped(cell)}</th>' for cell in header) if any(header) else ""
    body = "".join(f"<tr>{cells(row)}</tr>" for row in rows)
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
