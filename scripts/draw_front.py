"""The picture of the first screen: a batch of rows of different lengths.

`README.md` shows a file, which takes no colours from a page: `standalone` puts them into the SVG.
"""

from __future__ import annotations

import re
from pathlib import Path

import jax.numpy as jnp
from picture import WIDTH, Picture

import treescan

ROOT = Path(__file__).parent.parent
ASSETS = ROOT / "docs" / "assets"
ROWS = ((1, 2, 3, 4), (5,), (6, 7))  # those at the top of README.md


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


def front_files() -> dict[str, str]:
    """What is in docs/assets, by name."""
    return {"ragged.svg": standalone(ragged())}
