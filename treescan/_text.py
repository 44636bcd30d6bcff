"""Text for a terminal and for notebooks: paragraphs, tables, near misses of names, and pages of the documentation."""

from __future__ import annotations

import difflib
import html
import itertools
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
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
    "length": ("max_length", "maxlen", "num_steps", "n_steps", "steps", "num_layers", "n_layers"),
    "max_length": ("max_steps", "max_iter", "maxiter", "max_iterations", "length", "num_steps"),
    "lengths": ("seq_lens", "seq_lengths", "sequence_lengths", "num_valid"),
    "seq_lengths": ("lengths", "seq_lens", "sequence_lengths"),
    "mask": ("masks", "valid"),
    "in_axes": ("axis", "axes"),
    "chunk_size": ("chunk", "batch_size", "size"),
    "f": ("body", "body_fun", "step", "fn", "func"),
    "init": ("carry", "h0", "init_val", "init_carry", "initial_state", "initial_carry"),
    "state": ("states", "cache", "caches", "kv_cache"),
    "remat": ("checkpoint", "checkpoints", "rematerialize", "policy"),
    "key": ("rng", "rngs", "seed", "prng_key"),
    "progress": ("tqdm", "bar", "verbose"),
    "source": ("xs", "data", "dataset", "loader"),
    "part": ("chunk", "chunk_size", "batch_size", "steps"),
    "chunk": ("segment", "chunk_size"),
    "on_part": ("callback", "on_chunk"),
    "capacity": ("size", "max_size"),
    "n": ("num_layers", "n_layers", "depth", "length"),
}
"""What else the options are called: in other libraries, or for other functions of this one. They mean the same."""

_FIRST = "`resets` is True at the first step of each segment"
_FROM_LAST = "`resets=jnp.roll({}, 1, {{axis}}).at[{{zero}}].set(False)`"
_MARKED = f"{_FIRST}. If `{{name}}` is True at the last one: {_FROM_LAST.format('{name}')}."
_ENDED = f"{_FIRST}, and an episode ends with either: {_FROM_LAST.format('terminated | truncated')}."
_STOPPED = f"{_FIRST}. If `{{name}}` is 0 at the last one: {_FROM_LAST.format('{name} == 0')}."
_BEGUN = f"{_FIRST}. If that is what `{{name}}` is: `resets={{name}}`."
_TIMES = "`a` is what the state is multiplied by. For returns from the end: `linear_scan({name}, b, reverse=True)`."
_NUMBERED = (
    "A segment begins where `{name}` changes. If it is 0 at padding: "
    "`mask={name} != 0, resets=({name} != jnp.roll({name}, 1, {axis})).at[{zero}].set(False)`."
)
_PADDED = "`mask` is True at data. If `{name}` is True or 1 at padding: `mask=jnp.logical_not({name})`."
_BATCH_FIRST = "`{option}` is the axis of the steps. For `batch_first=True`: `{option}=1`."
_TIME_MAJOR = "`{option}` is the axis of the steps. For `time_major=False`: `{option}=1`."
_NEW = "`decay` is the weight of the past, and `{name}` that of a new value: `decay=1 - {name}`."
_RATE = "`updates` is how many updates a run has. For one in every k steps: `updates=length // k`."
_MEANINGS: dict[str, dict[str, str]] = {
    word: says
    for words, says in (
        ("done dones ends is_last terminals", {"resets": _MARKED}),
        ("terminated truncated", {"resets": _ENDED}),
        ("discount discounts", {"a": _TIMES, "resets": _STOPPED}),
        ("episode_start episode_starts is_first reset starts", {"resets": _BEGUN}),
        ("segment_ids segments", {"resets": _NUMBERED}),
        ("padding_mask key_padding_mask src_key_padding_mask pad_mask masked", {"mask": _PADDED}),
        ("padding paddings logit_paddings label_paddings", {"mask": _PADDED}),
        ("batch_first", {"time_axis": _BATCH_FIRST, "in_axes": _BATCH_FIRST}),
        ("time_major", {"time_axis": _TIME_MAJOR, "in_axes": _TIME_MAJOR}),
        ("alpha tau step_size", {"decay": _NEW}),
        ("every interval print_rate", {"updates": _RATE}),
    )
    for word in words.split()
}
"""Words of other libraries that mean something else: for the first option that there is, what to write.

That is one line of code, between the last backticks, and the tests run it.
"""

_WORDS = frozenset({*_MEANINGS, *_ALSO_CALLED, *itertools.chain(*_ALSO_CALLED.values())})


FORMER = {
    "name": 'Write the call in a `jax.named_scope`: `with jax.named_scope("..."):`.',
    "carry_axes": '`row_axes={"carry": ...}` replaces it.',
    "x_axes": '`row_axes={"x": ...}` replaces it.',
    "y_axes": '`row_axes={"y": ...}` replaces it.',
}
"""Options of earlier versions, and what to write in place of each."""


def converted(name: str, options: Iterable[str], time_axis: object = 0) -> str:
    """How a word of another meaning is said with one of these options; empty: there is no such word, or no option.

    Args:
        name: the word.
        options: what a function takes.
        time_axis: the axis of the steps in masks, as far as the user said.
    """
    known = set(options)
    option, says = next(
        ((option, says) for option, says in _MEANINGS.get(name, {}).items() if option in known), ("", "")
    )
    axis = time_axis.get("mask", 0) if isinstance(time_axis, Mapping) else time_axis
    spelled = (1, ":, 0") if type(axis) is int and axis == 1 else (0, "0")
    return says.format(name=name, option=option, axis=spelled[0], zero=spelled[1])


def advice(name: str, options: Iterable[str], time_axis: object = 0) -> str:
    """What to write in place of an option that does not exist: one that has this name elsewhere, or is misspelt.

    A similar name is a misspelt one only where the name is no word by itself. See `converted` for those that are.
    """
    if name in FORMER:
        return FORMER[name]
    known = list(options)
    if says := converted(name, known, time_axis):
        return says
    near = [option for option in known if name in _ALSO_CALLED.get(option, ())]
    if name not in _WORDS:
        near = near or difflib.get_close_matches(name, known, 1, 0.75)
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
