"""What MkDocs calls for the pages of the reference: each argument is a line, and the rest of its text unfolds.

One of the `hooks` in mkdocs.yml. It comes after `docs_hooks.py`, which makes the links.
"""

import re
from typing import Any

SECTION = re.compile(
    r'<p><span class="doc-section-title">(?P<title>[\w ]+):</span></p>\s*<ul>(?P<items>.*?)\n    </ul>', re.DOTALL
)
ITEM = re.compile(
    r'<li class="doc-section-item field-body">\s*(?P<head>.*?)\s*\u2013\s*'
    r'<div class="doc-md-description">\s*<p>(?P<first>.*?)</p>(?P<more>.*?)</div>\s*</li>',
    re.DOTALL,
)
SENTENCE = re.compile(r"(?P<own>.*?\.)\s+(?P<rest>(?:[A-Z]|<code>).*)", re.DOTALL)
SHORT = 60  # characters that are not worth a click
LINK = re.compile(r"</?(?:a|autoref)\b(?:[^>\"']|\"[^\"]*\"|'[^']*')*>")


def on_page_content(html: str, page: Any, **_: object) -> str:
    """Folds the lists of arguments, attributes and errors on pages of the reference."""
    return SECTION.sub(_folded, html) if page.file.src_uri.startswith("reference/") else html


def _folded(section: re.Match[str]) -> str:
    if section["title"] == "Raises":
        kinds = ", ".join(LINK.sub("", item["head"]) for item in ITEM.finditer(section["items"]))
        summary = f'<span class="doc-section-title">Raises:</span> {kinds}'
        return f'<details class="more"><summary>{summary}</summary>\n<ul>{section["items"]}\n    </ul></details>'
    typed = section["title"] == "Parameters"  # by the signature above them
    return ITEM.sub(lambda item: _line(item, typed=typed), section[0])


def _line(item: re.Match[str], *, typed: bool) -> str:
    """The name and the first sentence of an argument, and below it the rest."""
    head = re.sub(r"^(<b>.*?</b>).*", r"\1", item["head"], flags=re.DOTALL) if typed else item["head"]
    sentence = SENTENCE.fullmatch(item["first"])
    own, rest = (sentence["own"], f"<p>{sentence['rest']}</p>") if sentence else (item["first"], "")
    more = f"{rest}{item['more'].rstrip()}"
    if len(re.sub(r"<[^>]+>", "", more)) < SHORT:
        return f'<li class="field-body">{head}: {item["first"]}{item["more"].rstrip()}</li>'
    summary = LINK.sub("", f"<summary>{head}: {own}</summary>")  # what opens is no place for links
    return f'<li class="field-body"><details class="more">{summary}{more}</details></li>'
