"""Makes notebooks of the tutorials: `python scripts/notebooks.py FOLDER`. The site has them beside the pages.

A page is the only source. Its `python` blocks become cells, the `text` block after one becomes the output of the cell,
and all else becomes text. `tests/docs/test_notebooks.py` runs them.
"""

from __future__ import annotations

import argparse
import base64
import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = ("vowels", "packed-vowels", "llama", "llama-cache", "solvers", "plugin")
FENCE = re.compile(
    r"^(?:<!-- raises: (?P<raises>\w+) -->\n)?"
    r'^```(?P<language>\w+)(?: title="(?P<title>[^"]*)")?\n(?P<code>.*?)^```\n',
    re.MULTILINE | re.DOTALL,
)
FIGURE = re.compile(
    r"<figure>\n--8<-- \"(?P<file>[^\"]+)\"\n<figcaption>\n(?P<caption>.*?)\n</figcaption>\n</figure>\n", re.DOTALL
)
INCLUDED = re.compile(r'^--8<-- "([^"]+)"\n', re.MULTILINE)
ROOT_CELL = """\
import os
from pathlib import Path

here = Path.cwd()  # somewhere in a clone of treescan
os.chdir(next(p for p in (here, *here.parents) if (p / "examples").is_dir()))"""
NEEDS = {"plugin": "%pip install --quiet examples/plugin"}


def notebook_of(page: Path, address: str = "") -> dict[str, Any]:
    """The notebook of a page.

    Args:
        page: its Markdown.
        address: where the site is served, for links; empty: they lead to where the page would be beside the notebook.
    """
    text = re.sub(r"\A---\n.*?\n---\n+", "", page.read_text(), flags=re.DOTALL)
    opening = [_code(ROOT_CELL)] if "examples/" in text else []
    opening += [_code(NEEDS[page.stem])] if page.stem in NEEDS else []
    cells = list(_cells(text, page, address))
    whole = [cells[0], *opening, *cells[1:]]
    return {
        "cells": [{"id": f"cell-{number}", **cell} for number, cell in enumerate(whole)],
        "metadata": {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def _cells(text: str, page: Path, address: str) -> Iterator[dict[str, Any]]:
    """The cells of a page, in its order."""
    prose, place = "", 0
    cell: dict[str, Any] | None = None  # whose output may follow
    for fence in FENCE.finditer(text):
        between = text[place : fence.start()]
        place = fence.end()
        if cell is not None and not between.strip() and fence["language"] == "text":
            cell["outputs"] = [_output(fence["code"], cell["metadata"].get("raises"))]
            yield from _done(cell)
            cell = None
            continue
        if cell is not None:
            yield from _done(cell)
            cell = None
        prose += between
        if fence["language"] == "python":
            yield from _text(prose, page, address)
            prose, cell = "", _code(fence["code"], fence["title"], fence["raises"])
        else:
            prose += _shown(fence)
    if cell is not None:
        yield from _done(cell)
    yield from _text(prose + text[place:], page, address)


def _done(cell: dict[str, Any]) -> Iterator[dict[str, Any]]:
    cell["metadata"].pop("raises", None)
    yield cell


def _code(code: str, title: str | None = None, raises: str | None = None) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    if title:
        metadata["title"] = title
    if raises:
        metadata |= {"raises": raises, "tags": ["raises-exception"]}
    return {
        "cell_type": "code",
        "execution_count": None,
        "metadata": metadata,
        "outputs": [],
        "source": code.rstrip("\n"),
    }


def _output(text: str, raises: str | None) -> dict[str, Any]:
    if raises is None:
        return {"output_type": "stream", "name": "stdout", "text": text}
    kind, _, message = text.rstrip("\n").partition(": ")
    return {"output_type": "error", "ename": kind, "evalue": message, "traceback": text.rstrip("\n").splitlines()}


def _shown(fence: re.Match[str]) -> str:
    """A block that is not run, with the file that it includes, below its name."""
    code = INCLUDED.sub(lambda found: (ROOT / found[1]).read_text(), fence["code"])
    name = f"`{fence['title']}`\n\n" if fence["title"] else ""
    language = "python" if fence["language"] == "py" else fence["language"]
    return f"{name}```{language}\n{code}```\n"


def _text(prose: str, page: Path, address: str) -> Iterator[dict[str, Any]]:
    """A cell of text, if there is any, with its pictures in it."""
    attachments = {}
    for figure in list(FIGURE.finditer(prose)):
        name = Path(figure["file"]).name
        attachments[name] = {"image/svg+xml": base64.b64encode(_standalone(ROOT / figure["file"]).encode()).decode()}
        caption = " ".join(re.sub(r"</?code>", "`", figure["caption"]).split())
        prose = prose.replace(figure[0], f"![{caption}](attachment:{name})\n\n*{caption}*\n")
    prose = re.sub(r"^(#+ .*?) \{ .* \}$", r"\1", prose, flags=re.MULTILINE)
    prose = re.sub(r"\]\(([^):#]+\.)(md|py)(#[\w.-]+)?\)", lambda link: f"]({_address(link, page, address)})", prose)
    prose = prose.strip("\n")
    if prose:
        cell = {"cell_type": "markdown", "metadata": {}, "source": prose}
        yield cell | ({"attachments": attachments} if attachments else {})


def _address(link: re.Match[str], page: Path, address: str) -> str:
    """Where a link of the page leads: on the site."""
    target = f"{link[1]}{'html' if link[2] == 'md' else link[2]}{link[3] or ''}"
    if not address:
        return target
    folder = page.parent.relative_to(DOCS)
    parts: list[str] = []
    for part in (*folder.parts, *target.split("/")):
        parts = parts[:-1] if part == ".." else [*parts, part]
    return address.rstrip("/") + "/" + "/".join(parts)


def _standalone(file: Path) -> str:
    """A picture with its colours in it, those of a light page."""
    style = (DOCS / "stylesheets" / "pictures.css").read_text()
    colours = dict(re.findall(r"(--picture-\w+): (#\w+);", style.partition("slate")[0]))
    colours |= {"--md-default-fg-color": "#000000de", "--md-default-fg-color--light": "#000000a6"}
    colours |= {"--md-default-fg-color--lightest": "#00000012", "--md-default-bg-color": "#fff"}
    colours["--md-code-font-family"] = "monospace"
    rules = re.findall(r"^(?:\.picture [^{]*|\.picture \.\w[^{]*)\{[^}]*\}", style, re.MULTILINE)
    plain = re.sub(r"var\((--[\w-]+)\)", lambda name: colours.get(name[1], "0"), "\n".join(rules))
    general = ".picture { fill: none; font-family: sans-serif; background: #fff; }\n"
    head, _, body = file.read_text().partition("\n")
    return f"{head}\n<style>\n{general}{textwrap.dedent(plain)}\n</style>\n{body}"


def written(page: str, address: str = "") -> str:
    """The file of the notebook of a tutorial."""
    return json.dumps(notebook_of(DOCS / "tutorials" / f"{page}.md", address), indent=1, ensure_ascii=False) + "\n"


def main(folder: Path) -> None:
    """Writes all notebooks into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for page in PAGES:
        (folder / f"{page}.ipynb").write_text(written(page))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the notebooks are written")
    main(parser.parse_args().folder)
