"""The two pictures of the first screen: a batch of rows of different lengths, and a terminal with an error.

`README.md` shows files, which take no colours from a page: `standalone` puts them into an SVG. The error is what Python
prints for the block `train.py` of README.md, in the colours of Python 3.13, without folders and treescan's own frames.
"""

from __future__ import annotations

import html
import linecache
import re
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import TypeAlias

import jax.numpy as jnp
from picture import WIDTH, Picture

import treescan

ROOT = Path(__file__).parent.parent
ASSETS = ROOT / "docs" / "assets"
ROWS = ((1, 2, 3, 4), (5, 6), (7, 8, 9))  # those at the top of README.md


# The batch, and what a scan makes of it.


def ragged() -> Picture:
    """Rows of different lengths in one array, and their running totals: padding is neither read nor written."""
    batch = treescan.pad([jnp.array(row, float) for row in ROWS])
    _, sums = treescan.mask_scan(lambda total, x: (total + x,) * 2, jnp.zeros(len(ROWS)), batch)
    lengths = [len(row) for row in ROWS]
    cell, top, right = 38, 30, WIDTH - 4 * 38
    bottom = top + len(ROWS) * cell
    picture = Picture(
        "ragged",
        bottom + 34,
        "A batch of rows of different lengths",
        f"Rows of {', '.join(map(str, lengths))} numbers in an array of {max(lengths)} steps. mask_scan computes the "
        "running total of each row, and leaves out the steps that are padding.",
    )
    for left, heading, numbers in ((0, "batch", batch.data), (right, "running totals", sums)):
        picture.text(left + 1, top - 10, heading)
        for row, length in enumerate(lengths):
            for step in range(max(lengths)):
                x, y = left + step * cell, top + row * cell
                picture.box(x + 1, y + 1, cell - 3, cell - 3, "strong box" if step < length else "absent")
                if step < length:
                    picture.text(x + cell / 2 - 0.5, y + cell / 2 + 4.5, f"{float(numbers[step, row]):g}", "", "middle")
    middle = top + len(ROWS) * cell / 2
    picture.arrow((4 * cell + 8, middle), (right - 8, middle))
    picture.text(WIDTH / 2, middle - 10, "mask_scan", "small code", "middle")
    picture.box(1, bottom + 13, 18, 16, "absent", round_=2)
    picture.text(27, bottom + 27, "padding: without effect, whatever it contains", "small")
    return picture


STYLE = """\
<style>
.picture {{ font-family: system-ui, sans-serif; fill: none; {light} }}
@media (prefers-color-scheme: dark) {{ .picture {{ {dark} }} }}
text {{ fill: var(--text); font-size: 14px; }}
.small {{ font-size: 12.5px; }}
.code {{ font-family: ui-monospace, monospace; }}
.line, .box, .absent {{ stroke: var(--line); stroke-width: 1.25px; }}
.absent {{ stroke-dasharray: 2 3; }}
.strong {{ fill: var(--strong); }}
.head {{ fill: var(--line); }}
</style>"""
LIGHT = "--text: #1f2328; --line: #59636e; --strong: #d9e4fb;"
DARK = "--text: #f0f6fc; --line: #9198a1; --strong: #33415f;"


def standalone(picture: Picture) -> str:
    """A picture with colours of its own, for pages that show it as a file."""
    head, *rest = str(picture).splitlines()
    style = STYLE.format(light=LIGHT, dark=DARK)
    width = re.sub("<svg ", f'<svg width="{WIDTH}" ', head)
    return "\n".join([width, style, *rest]) + "\n"


# The terminal.

LINE, LETTER, MARGIN, BAR = 17, 7.2, 14, 28
COLOURS = {  # of Python 3.13, as a dark terminal shows them: magenta, red, and both bold
    "": "#d7dae0",
    "magenta": "#e58af0",
    "bold magenta": "#e58af0",
    "red": "#ff8a80",
    "bold red": "#ff8a80",
    "ours": "#9aa1ad",  # no words of Python's: the command, and where frames are left out
}
SCRIPT = "train.py"

Line: TypeAlias = list[tuple[str, str]]
"""Pieces of text, each with its colour."""


def error_of_readme() -> traceback.TracebackException:
    """The error that the script of README.md ends in, with the frames of the script alone."""
    page, module = (ROOT / "README.md").read_text(), ModuleType("page")
    (code,) = re.findall(rf'^```python title="{SCRIPT}"\n(.*?)^```$', page, re.DOTALL | re.MULTILINE)
    linecache.cache[SCRIPT] = (len(code), None, code.splitlines(keepends=True), SCRIPT)
    sys.modules[module.__name__] = module  # for annotations
    try:
        exec(compile(code, SCRIPT, "exec", dont_inherit=True), vars(module))
    except treescan.TreescanError as error:
        shown = traceback.TracebackException.from_exception(error)
        shown.stack[:] = [frame for frame in shown.stack if frame.filename == SCRIPT]
        return shown
    finally:
        del sys.modules[module.__name__]
    raise AssertionError("the script of README.md raises no error")


def lines_of(error: traceback.TracebackException) -> list[Line]:
    """What Python 3.13 prints of an error in its colours, on any Python."""
    lines: list[Line] = [[("Traceback (most recent call last):", "")]]
    for frame in error.stack:
        lines.append(
            [
                ("  File ", ""),
                (f'"{frame.filename}"', "magenta"),
                (", line ", ""),
                (str(frame.lineno), "magenta"),
                (", in ", ""),
                (frame.name, "magenta"),
            ]
        )
        name, _, arguments = str(frame.line).partition("(")  # a call, and nothing but a call
        arguments = f"({arguments}"
        lines.append([("    ", ""), (name, "red"), (arguments, "bold red")])
        lines.append([("    ", ""), ("~" * len(name), "red"), ("^" * len(arguments), "bold red")])
    kind, _, message = "".join(error.format_exception_only()).rstrip("\n").partition(": ")
    notes = [line for note in error.__notes__ or () for line in note.splitlines()]
    first, *rest = message.splitlines()
    rest = rest[: len(rest) - len(notes)]
    lines.append([(kind, "bold magenta"), (": ", ""), (first, "magenta")])
    lines += [[(line, "magenta")] for line in rest]
    lines += [[(note, "")] for note in notes]
    return lines


def terminal() -> str:
    """The file: a terminal after `python train.py`."""
    lines = lines_of(error_of_readme())
    place = next(n for n, line in enumerate(lines) if line[0][1] == "bold magenta")
    shown = [[(f"$ python {SCRIPT}", "ours")], *lines[:place], [("  ...", "ours")], *lines[place:]]
    width = 2 * MARGIN + LETTER * max(sum(len(text) for text, _ in line) for line in shown)
    height = BAR + LINE * len(shown) + MARGIN
    said = "\n".join("".join(text for text, _ in line) for line in shown)
    pieces = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" role="img">',
        "<title>An error of treescan in a terminal</title>",
        f"<desc>{html.escape(said, quote=False)}</desc>",
        f'<rect x="0.5" y="0.5" width="{width - 1:g}" height="{height - 1:g}" rx="8" fill="#1b1f27" stroke="#4b5263"/>',
        *(f'<circle cx="{18 + 16 * n}" cy="15" r="4.5" fill="#4b5263"/>' for n in range(3)),
        '<g font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, DejaVu Sans Mono, monospace" font-size="12">',
    ]
    for row, line in enumerate(shown):
        column = 0
        for text, colour in line:
            for word in re.finditer(r"\S+(?: \S+)*", text):  # a place of its own after each gap, in whatever font
                x, y = MARGIN + LETTER * (column + word.start()), BAR + LINE * (row + 0.75)
                bold = ' font-weight="700"' if "bold" in colour else ""
                pieces.append(
                    f'<text x="{x:g}" y="{y:g}" textLength="{LETTER * len(word[0]):g}" fill="{COLOURS[colour]}"{bold}>'
                    f"{html.escape(word[0], quote=False)}</text>"
                )
            column += len(text)
    return "\n".join([*pieces, "</g>", "</svg>"]) + "\n"


def front_files() -> dict[str, str]:
    """What is in docs/assets, by name."""
    return {"ragged.svg": standalone(ragged()), "error.svg": terminal()}
