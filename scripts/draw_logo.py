"""Draws the logo, docs/assets/logo.svg, and the card that other sites show beside a link, docs/assets/social.png.

Run `python scripts/draw_logo.py`. The card is drawn as an SVG, and a Chromium on PATH makes a PNG of it, because the
sites that show such cards take no SVG. The PNG holds a digest of the SVG, so that tests can tell that it is of today.

The logo is a tree, and an arrow that runs through its leaves: a scan.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import struct
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path

DIRECTORY = Path(__file__).parent.parent / "docs" / "assets"
CARD = 1200, 630
BLUE, INK, PAPER, SOFT = "#4a7de0", "#1d2230", "#ffffff", "#d9e4fb"
SIGNATURE = b"\x89PNG\r\n\x1a\n"
DIGEST = b"drawn-from"


def mark(colour: str) -> str:
    """The logo's shapes, in a square of 24 units."""
    return (
        f'<g fill="none" stroke="{colour}" stroke-width="1.8" stroke-linecap="round" stroke-linejoin="round">'
        '<path d="M9.5 5 2.9 18.5M9.5 5v13.5M9.5 5l6.6 13.5"/>'
        '<path d="M2.9 18.5h20M20.2 15.4l2.9 3.1-2.9 3.1"/></g>'
        f'<g fill="{colour}"><circle cx="9.5" cy="4.6" r="3.1"/><circle cx="2.9" cy="18.5" r="2.6"/>'
        '<circle cx="9.5" cy="18.5" r="2.6"/><circle cx="16.1" cy="18.5" r="2.6"/></g>'
    )


def logo() -> str:
    """The file of the logo, whose blue is seen on white and on black."""
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 24 24" role="img">'
        f"<title>treescan</title>{mark(BLUE)}</svg>\n"
    )


def card() -> str:
    """The card: the logo, what treescan is, and what a padded batch looks like to it."""
    width, height = CARD
    cells = []
    lengths, cell, left, top = (10, 5, 14, 3, 7), 36, 640, 344
    for row, length in enumerate(lengths):
        for step in range(14):
            kind = f'fill="{BLUE}"' if step < length else f'fill="none" stroke="{BLUE}" stroke-dasharray="3 4"'
            x, y = left + step * cell, top + row * cell
            cells.append(f'<rect x="{x}" y="{y}" width="{cell - 5}" height="{cell - 5}" rx="5" {kind}/>')
    text = (
        (118, 74, 800, INK, "treescan"),
        (188, 38, 400, INK, "Typed, checked scans over pytrees for JAX"),
    )
    lines = [
        f'<text x="230" y="{y}" font-size="{size}" font-weight="{weight}" fill="{colour}">{words}</text>'
        for y, size, weight, colour, words in text
    ]
    promises = ("padded batches without NaN", "stacks of layers as one loop", "errors about your code")
    for number, words in enumerate(promises):
        y = 386 + 64 * number
        lines.append(f'<circle cx="84" cy="{y - 11}" r="9" fill="{BLUE}"/>')
        lines.append(f'<text x="112" y="{y}" font-size="34" fill="{INK}">{words}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="DejaVu Sans, Helvetica, Arial, sans-serif">'
        f'<rect width="{width}" height="{height}" fill="{PAPER}"/>'
        f'<rect width="{width}" height="16" fill="{BLUE}"/><rect y="262" width="{width}" height="2" fill="{SOFT}"/>'
        f'<g transform="translate(60 64) scale(6)">{mark(BLUE)}</g>{"".join(lines)}{"".join(cells)}</svg>\n'
    )


def digest(svg: str) -> bytes:
    """What tells one drawing from another."""
    return hashlib.sha256(svg.encode()).hexdigest().encode()


def chunk(kind: bytes, data: bytes) -> bytes:
    """A chunk of a PNG."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def with_digest(png: bytes, svg: str) -> bytes:
    """The PNG with the digest of its SVG as a text, after its first chunk."""
    first = len(SIGNATURE) + 12 + 13
    return png[:first] + chunk(b"tEXt", DIGEST + b"\0" + digest(svg)) + png[first:]


def size_and_digest(png: bytes) -> tuple[int, int, bytes]:
    """Width, height and digest of a PNG that `with_digest` made."""
    assert png.startswith(SIGNATURE)
    width, height = struct.unpack(">II", png[16:24])
    begin = png.index(DIGEST + b"\0") + len(DIGEST) + 1
    return width, height, png[begin : begin + 64]


def photograph(svg: str) -> bytes:
    """What Chromium shows of an SVG, as a PNG."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("no chromium on PATH")
    with tempfile.TemporaryDirectory() as folder:
        page, picture = Path(folder) / "card.html", Path(folder) / "card.png"
        page.write_text(f"<!doctype html><style>body {{ margin: 0 }} svg {{ display: block }}</style>{svg}")
        size = ",".join(map(str, CARD))
        command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        command += [f"--window-size={size}", f"--screenshot={picture}", page.as_uri()]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
        return picture.read_bytes()


def main() -> None:
    """Writes both files."""
    DIRECTORY.mkdir(exist_ok=True)
    (DIRECTORY / "logo.svg").write_text(logo())
    (DIRECTORY / "social.png").write_bytes(with_digest(photograph(card()), card()))


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
