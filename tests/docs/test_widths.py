"""Code, output and errors in the documentation fit in 78 columns: they are read on narrow screens and in terminals.

What a block includes of other files (`--8<--`) counts, and so do the examples in public docstrings.
"""

import inspect
import re

from test_docs import DOCUMENTS, FENCE, PUBLIC, ROOT
from widths import too_wide

from treescan._text import table, wrap

INCLUDED = re.compile(r'^ *--8<-- "(?P<file>[^":]+)(?::(?P<section>\w+))?"$', re.MULTILINE)


def whole(text: str) -> str:
    """A page with the files that it includes, as far as a block holds them in full."""
    return INCLUDED.sub(lambda found: found[0] if found["section"] else (ROOT / found["file"]).read_text(), text)


def test_blocks_of_pages_fit() -> None:
    for page in DOCUMENTS:
        fences = list(FENCE.finditer(page.read_text()))
        lines = [line.removeprefix(f["indent"]) for f in fences for line in whole(f["code"]).splitlines()]
        assert list(too_wide("\n".join(lines))) == [], page


def test_examples_of_docstrings_fit() -> None:
    for value in (value for names in PUBLIC.values() for value in names.values()):
        members = vars(value).values() if inspect.isclass(value) else ()
        for documented in (value, *members):
            text = inspect.getdoc(documented) or ""
            for example in re.findall(r"^Examples?:\n(.*?)(?=^\S|\Z)", text, re.MULTILINE | re.DOTALL):
                assert list(too_wide(inspect.cleandoc(example))) == [], documented


def test_a_wide_line_is_found() -> None:
    assert list(too_wide("x" * 79 + "\n" + "x" * 78)) == ["x" * 79]
    assert list(too_wide("# https://example.org/" + "x" * 79)) == []
    assert len(whole('--8<-- "README.md"').splitlines()) > 50


# How messages are laid out where no golden file shows it.


def test_code_for_which_no_line_has_room_breaks() -> None:
    assert wrap("word `" + "code " * 20 + "`", 30).count("\n") == 3


def test_a_table_that_is_wider_still_is_a_list_of_rows() -> None:
    rows = [("leaf", "a" * 40, "b" * 40, "note"), ("other", "a", "b")]
    assert table(("leaf", "given", "is"), rows).splitlines() == [
        "  leaf    leaf",
        "  given   " + "a" * 40,
        "  is      " + "b" * 40,
        "          note",
        "",
        "  leaf    other",
        "  given   a",
        "  is      b",
    ]
