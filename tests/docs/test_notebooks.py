"""The notebooks of the tutorials have the code of the pages and no other, and they run, from anywhere in a clone."""

import json
import re
import sys
import types
import xml.etree.ElementTree as ET
from base64 import b64decode
from pathlib import Path

import pytest
from test_docs import ROOT, TUTORIALS, Block, as_users_run_it, blocks_of, installed, normal, run

from scripts import script

notebooks = script("notebooks")
__all__ = ["as_users_run_it", "installed"]  # fixtures
GENERAL = {notebooks.ROOT_CELL, *notebooks.NEEDS.values()}


def cells_of(page: str, kind: str) -> list[dict]:
    return [cell for cell in notebooks.notebook_of(TUTORIALS / f"{page}.md")["cells"] if cell["cell_type"] == kind]


def printed(cell: dict) -> str:
    """What the notebook shows as the output of a cell."""
    (output,) = cell["outputs"] or [{"output_type": "stream", "text": ""}]
    return output["text"] if output["output_type"] == "stream" else "\n".join(output["traceback"])


def test_every_tutorial_with_code_is_a_notebook() -> None:
    assert {page.stem for page in TUTORIALS.glob("*.md") if "```python" in page.read_text()} == set(notebooks.PAGES)


@pytest.mark.parametrize("page", notebooks.PAGES)
def test_a_notebook_has_the_code_and_the_output_of_its_page(page: str) -> None:
    text = (TUTORIALS / f"{page}.md").read_text()
    blocks = list(blocks_of(text))
    cells = [cell for cell in cells_of(page, "code") if cell["source"] not in GENERAL]
    assert [cell["source"] for cell in cells] == [block.code.rstrip("\n") for block in blocks]
    for cell, block in zip(cells, blocks, strict=True):
        shown = text[slice(*block.output)] if block.output else ""
        assert normal(printed(cell)) == normal(shown)
        assert ("raises-exception" in cell["metadata"].get("tags", ())) == (block.raises is not None)


@pytest.mark.parametrize("page", notebooks.PAGES)
def test_a_notebook_is_a_notebook(page: str) -> None:
    made = json.loads(notebooks.written(page))
    assert (made["nbformat"], made["nbformat_minor"]) == (4, 5)
    names = [cell["id"] for cell in made["cells"]]
    assert len(set(names)) == len(names)
    prose = "\n".join(cell["source"] for cell in made["cells"] if cell["cell_type"] == "markdown")
    assert not re.search(r"--8<--|<figure|^!!! |^<!--|\{ #|data-search|\.md[)#]", prose, re.MULTILINE)
    assert prose.startswith("# ")
    pictures = {name: files for cell in made["cells"] for name, files in cell.get("attachments", {}).items()}
    assert set(re.findall(r"\(attachment:(.+?)\)", prose)) == pictures.keys()
    for files in pictures.values():
        drawn = b64decode(files["image/svg+xml"]).decode()
        ET.fromstring(drawn)
        assert "var(" not in drawn.partition("</style>")[0]


def test_links_lead_to_the_site_if_it_has_an_address() -> None:
    made = notebooks.written("llama", "https://example.org/docs/")
    assert "](https://example.org/docs/guides/layers.html)" in made
    assert not re.search(r"\]\((\.\./|\w+\.html)", made)


@pytest.mark.slow
@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("page", notebooks.PAGES)
def test_a_notebook_runs(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(TUTORIALS)
    module = types.ModuleType("notebook")
    monkeypatch.setitem(sys.modules, "notebook", module)
    raising = [block.raises for block in blocks_of((TUTORIALS / f"{page}.md").read_text())]
    for number, cell in enumerate(cells_of(page, "code")):
        if cell["source"].startswith("%"):
            continue  # pip: the fixture has the package
        raises = raising.pop(0) if cell["source"] not in GENERAL else None
        title = cell["metadata"].get("title")
        block = Block(code=cell["source"], line=0, title=title, raises=raises, output=None, indent="")
        came = run(block, f"cell {number}", vars(module))
        if cell["outputs"]:
            assert normal(came) == normal(printed(cell)), f"cell {number}"
    assert Path.cwd() == ROOT
