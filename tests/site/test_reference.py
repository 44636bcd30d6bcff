"""The reference shows one typed signature for each verb, an argument a line. Needs no browser."""

import html
import re

import pytest
from conftest import SITE

import treescan
from treescan._types import Options

ROOT = SITE.parent
VERBS = ("scan", "fold", "accumulate", "fori", "while_scan", "mask_scan", "scan_layers", "fold_layers")
PAGE = {"fold": "scan", "accumulate": "scan", "fori": "scan", "fold_layers": "stacks"}  # the others have their own
STACKS_OUTPUTS = ("scan", "accumulate", "while_scan", "mask_scan", "scan_layers")
GUIDES = re.compile(r'<a href="\.\./(?:guides|tutorials|getting-started|choosing)[^"]*"')


def page_of(verb: str) -> str:
    return (SITE / "reference" / f"{PAGE.get(verb, verb)}.html").read_text()


def entry_of(verb: str) -> str:
    """The page from the heading of the verb on."""
    return page_of(verb).partition(f'<h2 id="treescan.{verb}"')[2]


def signature_of(verb: str) -> str:
    (shown,) = re.findall(r'<div class="[^"]*doc-signature[^"]*">(.*?)</div>', entry_of(verb), re.DOTALL)[:1]
    return shown


@pytest.mark.parametrize("verb", VERBS)
def test_a_signature_is_typed_and_has_an_argument_a_line(verb: str) -> None:
    text = html.unescape(re.sub(r"<[^>]+>", "", signature_of(verb))).strip()
    first, *lines, last = text.splitlines()
    assert first == f"{verb}("
    assert re.match(r"\) -> (tuple\[Carry, Y\]|Carry|WhileResult\[Carry, Y\])$", last)
    assert all(re.match(r"    (\*|\w+: .+),$", line) for line in lines)
    assert all(len(line) <= 78 for line in text.splitlines())


@pytest.mark.parametrize("verb", VERBS)
def test_a_signature_spells_out_the_options(verb: str) -> None:
    shown = signature_of(verb)
    text = re.sub(r"<[^>]+>", "", shown)
    options = set(Options.__annotations__)
    missing = {name for name in options if not re.search(rf"\b{name}: ", text)}
    assert missing <= {"in_axes", "out_axes", "save", "truncate", *(["offset"] if verb == "fori" else [])}, missing
    assert ("save" not in missing) == (verb in STACKS_OUTPUTS)
    assert "**" not in text
    for name in re.findall(r"\bAxes\w*", text):
        assert f'href="types.html#{name.lower()}"' in shown
    assert re.search(r'href="types\.html#rematlike"', shown)


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_leads_to_its_guides(verb: str) -> None:
    assert hasattr(treescan, verb)
    page = page_of(verb)
    before, _, _ = page[page.index("<article") :].partition("doc-signature")
    assert GUIDES.search(before)


@pytest.mark.parametrize("verb", VERBS)
def test_overloads_are_folded_below(verb: str) -> None:
    above, _, folded = entry_of(verb).partition('<details class="overloads"')
    assert "doc-signature" in above
    assert not re.match(r"[^>]* open\b", folded)
    text = html.unescape(re.sub(r"<[^>]+>", "", folded.partition("</details>")[0]))
    source = "".join(file.read_text() for file in (ROOT / "treescan" / "_verbs").glob("*.py"))
    assert text.count("@overload\n") == len(re.findall(rf"^@overload\ndef {verb}\(", source, re.MULTILINE)) > 1
    assert all(len(line) <= 78 for line in text.splitlines())


def test_the_parameters_of_mask_scan_are_grouped() -> None:
    table = page_of("mask_scan").partition('id="parameters-by-purpose"')[2].partition("</table>")[0]
    grouped = re.findall(r"<code>([a-z_]+)</code>", table)
    signature = re.sub(r"<[^>]+>", "", signature_of("mask_scan"))
    assert set(grouped) == set(re.findall(r"^    (\w+): ", signature, re.MULTILINE))


def test_options_show_their_constructors() -> None:
    for name, fields in {
        "Remat": "policy levels chunk offload budget",
        "meters.Progress": "label show updates",
    }.items():
        page = (SITE / "reference" / ("remat.html" if name == "Remat" else "progress.html")).read_text()
        signature = re.search(r"doc-signature.*?</div>", page.partition(f'id="treescan.{name}"')[2], re.DOTALL)
        assert signature
        text = re.sub(r"<[^>]+>", "", signature[0])
        assert all(f" {field}: " in text for field in fields.split())


def test_inner_names_are_not_shown() -> None:
    for page in (SITE / "reference").glob("*.html"):
        text = re.sub(r"<[^>]+>", "", page.read_text())
        assert not re.search(r"\b[A-Z]\w*_(?:co|contra)\b|\b_[A-Z]\w*", text), page


def test_an_argument_is_a_line_and_the_rest_unfolds() -> None:
    entry = entry_of("mask_scan")
    folded = re.findall(
        r'<details class="more"><summary><b><code>(\w+)</code></b>: (.*?)</summary>(.*?)</details>', entry, re.DOTALL
    )
    assert {"f", "xs", "lengths", "compact"} <= {name for name, _, _ in folded}
    for _, first, rest in folded:
        text = re.sub(r"<[^>]+>", "", first)
        assert text.endswith(".") and ". " not in text
        assert re.sub(r"<[^>]+>", "", rest).strip()
    assert re.search(r"<summary><span[^>]*>Raises:</span> +<code>ArgumentError</code>", entry)
