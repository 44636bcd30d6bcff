"""What MkDocs publishes beside the pages.

Notebooks of the tutorials, the files of the examples and of the benchmarks, and `llms.txt`, a list of all pages for
programs.

One of the `hooks` in mkdocs.yml.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

INTRODUCTION = """\
Without options `treescan.scan` is the same program as `jax.lax.scan`. Carries, inputs and outputs are any pytrees.
`mask_scan` is for rows of different lengths, `while_scan` for loops that stop, `fold_layers` and `scan_layers` for the
layers of a model.
"""

ROOT = Path(__file__).parent.parent
PUBLISHED = (("examples", "*.py", "examples"), ("benchmarks/results", "*.txt", "results"))  # folder, files, place

_spec = importlib.util.spec_from_file_location("notebooks", Path(__file__).parent / "notebooks.py")
assert _spec
assert _spec.loader
notebooks: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(notebooks)

_navigation: list[Any] = []  # of the build that runs


def on_files(files: Any, config: Any, **_: object) -> None:
    """Adds the notebooks, the examples and the results of benchmarks, as files of MkDocs' own kind."""
    file: Any = type(next(iter(files)))
    for page in notebooks.PAGES:
        content = notebooks.written(page, config.site_url or "")
        files.append(file.generated(config, f"tutorials/{page}.ipynb", content=content))
    for folder, pattern, place in PUBLISHED:
        for each in sorted((ROOT / folder).glob(pattern)):
            files.append(file.generated(config, f"{place}/{each.name}", content=each.read_text()))


def on_nav(nav: Any, **_: object) -> None:
    """Keeps the navigation, for the list of pages."""
    _navigation[:] = nav.items


def on_page_content(html: str, page: Any, **_: object) -> str:
    """Leads from a tutorial to its notebook."""
    name = page.file.src_uri.removeprefix("tutorials/").removesuffix(".md")
    if page.file.src_uri.startswith("tutorials/") and name in notebooks.PAGES:
        link = f'<p><a href="{name}.ipynb" download>Download this page as a notebook</a></p>'
        return html.replace("</h1>", f"</h1>\n{link}", 1)
    return html


def on_post_build(config: Any, **_: object) -> None:
    """Writes `llms.txt` (https://llmstxt.org)."""
    text = listing(config.site_name, config.site_description, _navigation, config.site_url or "")
    Path(config.site_dir, "llms.txt").write_text(text)


def listing(name: str, description: str, navigation: Iterable[Any], address: str) -> str:
    """The list of all pages with their descriptions, a section for each tab."""
    parts = [f"# {name}\n", f"> {description}\n", INTRODUCTION]
    for item in navigation:
        parts.append(f"## {item.title}\n")
        lines = [f"- [{page.title}]({address}{page.url}): {page.meta['description']}" for page in pages_of(item)]
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def pages_of(item: Any) -> Iterator[Any]:
    """All pages of a part of the navigation."""
    if item.is_page:
        yield item
    for child in item.children or ():
        yield from pages_of(child)
