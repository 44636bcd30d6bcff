"""The documentation runs: every `python` block of the README and of docs/, and every docstring's examples.

The blocks of a page are one module, in order. A block with `title="model.py"` is taken for that file by what names
files, as errors do. A block under `<!-- raises: CarryError -->` must end in that exception, of treescan or built in.
A `text` block that follows a `python` block is its output, or its error if it raises one. `TREESCAN_REGENERATE=1`
writes what came into the pages instead of comparing it.
"""

import builtins
import contextlib
import doctest
import io
import os
import re
import sys
import textwrap
import types
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import pytest

import treescan

ROOT = Path(__file__).parent.parent
FENCE = re.compile(
    r"^(?:<!-- raises: (?P<raises>\w+) -->\n)?"
    r'^(?P<indent> *)```(?P<language>\w+)(?: title="(?P<title>[^"]*)")?\n'
    r"(?P<code>.*?)"
    r"^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)


class Block(NamedTuple):
    """A `python` block, and the place of the `text` block with its output if it has one."""

    code: str
    line: int
    title: str | None
    raises: type[BaseException] | None
    output: tuple[int, int] | None
    indent: str


def blocks_of(text: str) -> Iterator[Block]:
    fences = list(FENCE.finditer(text))
    assert 2 * len(fences) == len(re.findall(r"^ *```", text, re.MULTILINE)), "a block that this test cannot read"
    for fence, following in zip(fences, [*fences[1:], None], strict=True):
        if fence["language"] != "python":
            continue
        adjacent = following is not None and not text[fence.end() : following.start()].strip()
        shown = following.span("code") if adjacent and following and following["language"] == "text" else None
        yield Block(
            code=textwrap.dedent(fence["code"]),
            line=text.count("\n", 0, fence.start("code")),
            title=fence["title"],
            raises=exception(fence["raises"]) if fence["raises"] else None,
            output=shown,
            indent=fence["indent"],
        )


def exception(name: str) -> type[BaseException]:
    found = getattr(treescan, name, None) or getattr(builtins, name)
    assert issubclass(found, BaseException)
    return found


def run(block: Block, page: str, namespace: dict[str, object]) -> str:
    """What the block prints, or its error as Python would print it."""
    # Lines count from the block's first where it is shown as a file of its own, else from the page's.
    source = block.code if block.title else "\n" * block.line + block.code
    code = compile(source, block.title or page, "exec", dont_inherit=True)
    printed = io.StringIO()
    if block.raises is None:
        with contextlib.redirect_stdout(printed):
            exec(code, namespace)
        return printed.getvalue()
    with pytest.raises(block.raises) as caught:
        exec(code, namespace)
    assert caught.type is block.raises, f"raised {caught.type}"
    return f"{caught.type.__name__}: {caught.value}"


def normal(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.strip().splitlines()) + "\n"


DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PUBLIC = [
    name
    for name, value in vars(treescan).items()
    if not name.startswith("_") and not isinstance(value, types.ModuleType)
]
PAGES = [page for page in DOCUMENTS if "```python" in page.read_text()]


@pytest.fixture(autouse=True)
def as_users_run_it() -> Iterator[None]:
    """With JAX as it comes: what the other tests forbid themselves is no business of the reader's."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_page_runs(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = page.read_text()
    module = types.ModuleType("page")  # registered, so that annotations given as strings can be looked up
    monkeypatch.setitem(sys.modules, "page", module)
    replacements: list[tuple[tuple[int, int], str]] = []
    for block in blocks_of(text):
        came = normal(run(block, page.name, vars(module)))
        if block.output is None:
            assert block.raises or not came.strip(), f"{page.name}:{block.line}: prints what no `text` block shows"
        elif os.environ.get("TREESCAN_REGENERATE") == "1":
            replacements.append((block.output, textwrap.indent(came, block.indent)))
        else:
            assert came == normal(textwrap.dedent(text[slice(*block.output)])), f"{page.name}:{block.line}"
    for (start, end), came in reversed(replacements):
        text = text[:start] + came + text[end:]
    if replacements:
        page.write_text(text)


def test_every_page_with_code_is_found() -> None:
    names = {str(page.relative_to(ROOT)) for page in PAGES}
    assert {"README.md", "docs/getting-started.md", "docs/guides/variable-length.md", "docs/guides/errors.md"} <= names


def test_all_public_names_are_documented() -> None:
    reference = "\n".join(page.read_text() for page in (ROOT / "docs" / "reference").glob("*.md"))
    documented = set(re.findall(r"^::: treescan\.(\w+)$", reference, re.MULTILINE))
    assert documented == set(PUBLIC)


@pytest.mark.parametrize("name", [name for name in PUBLIC if isinstance(getattr(treescan, name), types.FunctionType)])
def test_docstring_runs(name: str) -> None:
    (test,) = doctest.DocTestFinder(recurse=False).find(getattr(treescan, name), name, globs={})
    assert test.examples, "every verb shows how it is called"
    section = re.search(r"^ *Examples:$", str(test.docstring), re.MULTILINE)
    assert section, "the reference shows `Examples:` as code, and `Example:` as prose"
    report = io.StringIO()
    assert doctest.DocTestRunner().run(test, out=report.write).failed == 0, report.getvalue()
