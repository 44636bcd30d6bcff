"""An SVG that is put together piece by piece, as `scripts/draw_*.py` do.

Colours, sizes of text and movements are in docs/stylesheets/pictures.css, so that the pictures follow the page's colour
scheme. They are included in the pages inline, which is why no line of a file is blank.
"""

from __future__ import annotations

import contextlib
import html
import math
from collections.abc import Generator

WIDTH = 400


class Picture:
    """An SVG that is put together piece by piece; positions are in its own units, `WIDTH` of them from left to right.

    Args:
        name: the file's.
        height: in units.
        title: its name to those who do not see it.
        describes: what it shows, to the same.
        links: whether it has links, which an image cannot have.
    """

    def __init__(self, name: str, height: float, title: str, describes: str, *, links: bool = False) -> None:
        self.name = name
        role = "group" if links else "img"
        self.lines = [
            f'<svg class="picture" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" role="{role}" '
            f'aria-labelledby="{name}-title" aria-describedby="{name}-desc" data-search-exclude="">',
            f'<title id="{name}-title">{html.escape(title)}</title>',
            f'<desc id="{name}-desc">{html.escape(describes)}</desc>',
        ]

    def box(self, x: float, y: float, width: float, height: float, kind: str = "box", *, round_: float = 3) -> None:
        """A rectangle of a kind that the stylesheet knows."""
        corners = f' rx="{round_:g}"' if round_ else ""
        self.lines.append(f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"{corners}/>')

    def text(self, x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> None:
        """A line of text; `y` is its baseline."""
        style = f' class="{kind}"' if kind else ""
        where = f' text-anchor="{anchor}"' if anchor != "start" else ""
        self.lines.append(f'<text{style} x="{x:g}" y="{y:g}"{where}>{html.escape(text, quote=False)}</text>')

    def line(self, *points: tuple[float, float], kind: str = "line") -> None:
        """A line through some points."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self.lines.append(f'<polyline class="{kind}" points="{path}"/>')

    def area(self, *points: tuple[float, float], kind: str = "box") -> None:
        """A polygon."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self.lines.append(f'<polygon class="{kind}" points="{path}"/>')

    def dot(self, x: float, y: float, radius: float) -> None:
        """A dot of a diagram."""
        self.lines.append(f'<circle class="data" cx="{x:g}" cy="{y:g}" r="{radius:g}"/>')

    def arrow(self, *points: tuple[float, float]) -> None:
        """A line through some points that ends in a head."""
        (x0, y0), (x1, y1) = points[-2:]
        length = math.hypot(x1 - x0, y1 - y0)
        dx, dy = (x1 - x0) / length, (y1 - y0) / length
        foot = (x1 - 9 * dx, y1 - 9 * dy)
        self.line(*points[:-1], foot)
        sides = [(foot[0] - side * dy, foot[1] + side * dx) for side in (4.5, -4.5)]
        self.area((x1, y1), *sides, kind="head")

    @contextlib.contextmanager
    def link(self, to: str, says: str) -> Generator[None]:
        """A group that leads to a page of the site, and its name to those who do not see it."""
        self.lines.append(f'<a href="{html.escape(to)}" aria-label="{html.escape(says)}">')
        yield
        self.lines.append("</a>")

    @contextlib.contextmanager
    def moving(self, kind: str, at: float, **by: float) -> Generator[None]:
        """A group that moves as the stylesheet says of its kind, from so many seconds on.

        Everything is drawn where it is in the end, which is what those see who want nothing to move.
        """
        values = "".join(f";--{name}:{value:g}" for name, value in by.items())
        self.lines.append(f'<g class="{kind}" style="--at:{at:g}{values}">')
        yield
        self.lines.append("</g>")

    def __str__(self) -> str:
        """The file."""
        return "\n".join([*self.lines, "</svg>"]) + "\n"
