"""scripts/docs_hooks.py: which names in code spans become links, and where they lead."""

from functools import reduce
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.ad_checkpoint
import jax.export
import pytest

from scripts import ROOT, script

hooks = script("docs_hooks")
REFERENCE = hooks.reference_urls(
    [
        ("reference/scan.html", "::: treescan.scan\n"),
        ("reference/carries.html", "# Carries\n\n::: treescan.carries.keys\n\n::: treescan.carries.as_seen\n"),
    ]
)
SCAN = "https://docs.jax.dev/en/latest/_autosummary/jax.lax.scan.html"


def linked(html: str, here: str = "guides/memory.html") -> str:
    return hooks.link_names(html, lambda name: hooks.url_of(name, REFERENCE, here))


@pytest.mark.parametrize(
    ("code", "url"),
    [
        ("jax.lax.scan", SCAN),
        ("lax.scan", SCAN),
        ("jax.lax.scan(f, init, xs)", SCAN),
        ("jnp.where", "https://docs.jax.dev/en/latest/_autosummary/jax.numpy.where.html"),
        ("jax.export", "https://docs.jax.dev/en/latest/jax.export.html"),
        ("treescan.scan", "../reference/scan.html#treescan.scan"),
        ("treescan.scan(f, init)", "../reference/scan.html#treescan.scan"),
        ("treescan.carries.keys", "../reference/carries.html#treescan.carries.keys"),
        ("as_seen", "../reference/carries.html#treescan.carries.as_seen"),
        ("treescan.scan(lambda c, x: (c &lt; x, None), 0)", "../reference/scan.html#treescan.scan"),
    ],
)
def test_names_become_links(code: str, url: str) -> None:
    assert linked(f"<p><code>{code}</code></p>") == f'<p><a href="{url}"><code>{code}</code></a></p>'


@pytest.mark.parametrize(
    "html",
    [
        "<p>jax.lax.scan</p>",
        "<p><code>scan</code> and <code>keys</code></p>",  # whose?
        "<p><code>jax.lax.no_such</code></p>",
        "<p><code>jax.lax.scan[0]</code></p>",
        "<h2 id='x'>Of <code>jax.lax.scan</code></h2>",
        "<pre><span></span><code>jax.lax.scan</code></pre>",
        '<p><a href="x"><code>jax.lax.scan</code></a></p>',
        '<p><a title="a > b" href="x">to <em><code>jax.lax.scan</code></em></a></p>',
        "<p><autoref optional identifier='x'><code>jax.lax.scan</code></autoref></p>",
    ],
)
def test_the_rest_stays(html: str) -> None:
    assert linked(html) == html


def test_a_section_links_a_name_once() -> None:
    code, link = "<code>lax.scan</code>", f'<a href="{SCAN}"><code>lax.scan</code></a>'
    assert linked(f"{code}{code}<h2>x</h2>{code}<pre>{code}</pre>") == f"{link}{code}<h2>x</h2>{link}<pre>{code}</pre>"


def test_links_are_relative() -> None:
    code = "<code>treescan.scan</code>"
    assert 'href="reference/scan.html#' in linked(code, "index.html")
    assert 'href="scan.html#' in linked(code, "reference/carries.html")
    assert linked(code, "reference/scan.html") == code, "it would lead to the page that one reads"


def test_mkdocs_reads_the_reference_first(tmp_path: Path) -> None:
    page = tmp_path / "scan.md"
    page.write_text("::: treescan.scan\n")
    reference = SimpleNamespace(src_uri="reference/scan.md", url="reference/scan.html", abs_src_path=str(page))
    other = SimpleNamespace(src_uri="index.md", url="index.html", abs_src_path="nowhere")
    hooks.on_files(SimpleNamespace(documentation_pages=lambda: [reference, other]), config=None)
    made = hooks.on_page_content("<code>treescan.scan</code>", SimpleNamespace(url="index.html", meta={}), config=None)
    assert made == '<a href="reference/scan.html#treescan.scan"><code>treescan.scan</code></a>'


def test_the_search_dialog_gets_a_name() -> None:
    dialog = '<div class="md-search" data-md-component="search" role="dialog">'
    assert hooks.on_post_page(dialog, page=None) == dialog.replace(">", ' aria-label="Search">')


def test_jax_has_the_names() -> None:
    """No more than that: whether the page is there, only the network knows."""
    for name in hooks.JAX_URLS:
        reduce(getattr, name.split(".")[1:], jax)


def test_names_that_are_ambiguous_are_ours() -> None:
    text = "\n".join(page.read_text() for page in (ROOT / "docs" / "reference").glob("*.md"))
    bare = {name.rpartition(".")[2] for name in hooks.reference_urls([("", text)])}
    assert "scan_layers" in bare
    assert all(f".{name}\n" in f"{text}\n" or name == "stop_gradient" for name in hooks.AMBIGUOUS.split())


def test_tables_are_left_out_of_the_search_where_a_page_says_so() -> None:
    for meta, made in (({}, "<table>"), ({"tables_in_search": False}, "<table data-search-exclude>")):
        assert hooks.on_page_content("<table>", SimpleNamespace(url="index.html", meta=meta)) == made


def test_what_code_prints_is_left_out_of_the_search_unless_a_page_says_otherwise() -> None:
    code = '<div class="highlight"><pre><span></span><code><span class="n">a</span> = 1</code></pre></div>\n'
    output = '<div class="highlight"><pre><span></span><code>a: 1\nb: 2\n</code></pre></div>'
    for meta, left_out in (({}, True), ({"output_in_search": True}, False)):
        made = hooks.on_page_content(code + output, SimpleNamespace(url="index.html", meta=meta))
        assert made.startswith(code)
        assert ("data-search-exclude" in made.removeprefix(code)) == left_out


def test_files_of_the_repository_are_left_out_of_the_search() -> None:
    for title, left_out in (("examples/vowels.py", True), ("src/a/b.py", True), ("model.py", False)):
        block = f'<div class="language-py highlight"><span class="filename">{title}</span>'
        made = hooks.on_page_content(block, SimpleNamespace(url="index.html", meta={}))
        assert ("data-search-exclude" in made) == left_out


def test_what_code_prints_wraps_unless_it_is_aligned() -> None:
    page = SimpleNamespace(meta={}, url="guides/memory.html")
    for text, wraps in (("a b c", True), ("  a\n  b", True), ("a   b", False), ("f(x)\n ^^^", False)):
        made = hooks.on_page_content(f'<div class="highlight"><pre><span></span><code>{text}</code></pre></div>', page)
        assert ("data-wraps" in made) == wraps
        assert "data-search-exclude" in made
