"""What MkDocs calls while it builds the site (`hooks` in mkdocs.yml): names in code spans become links.

`jax.lax.scan` leads to JAX's documentation, `mask_scan` and `treescan.scan(...)` to our reference. A name is a link
where a section first mentions it; headings, blocks of code and what is a link already stay as they are.
"""

import posixpath
import re
from collections.abc import Callable, Iterable
from html import unescape
from pathlib import Path
from typing import Any

JAX = "https://docs.jax.dev/en/latest/"
JAX_PAGES = {  # the names with a page of their own, `_autosummary/<name>.html`; what has none is not a link
    "jax": """Array ShapeDtypeStruct block_until_ready checkpoint checkpoint_policies.dots_saveable
        checkpoint_policies.dots_with_no_batch_dims_saveable checkpoint_policies.everything_saveable
        checkpoint_policies.nothing_saveable checkpoint_policies.save_only_these_names clear_caches custom_jvp
        custom_vjp debug.callback debug.print debug_nans device_get device_put devices disable_jit enable_x64
        eval_shape grad hessian jacfwd jacrev jit jvp linearize live_arrays make_jaxpr make_mesh named_scope pmap
        pure_callback set_mesh shard_map value_and_grad vjp vmap""",
    "jax.ad_checkpoint": "checkpoint_name",
    "jax.lax": """associative_scan cond custom_root dynamic_index_in_dim dynamic_slice dynamic_update_slice fori_loop
        map pmean psum scan select stop_gradient switch while_loop with_sharding_constraint""",
    "jax.nn": "gelu one_hot relu sigmoid silu softmax",
    "jax.numpy": """all any arange array asarray clip concatenate cumsum dot einsum expand_dims finfo flip isfinite
        isnan matmul max mean moveaxis nan_to_num ones pad result_type roll stack sum take tanh where zeros
        zeros_like""",
    "jax.random": "PRNGKey bernoulli bits categorical clone fold_in key key_data normal permutation split uniform",
    "jax.tree": "flatten leaves leaves_with_path map map_with_path reduce structure transpose unflatten",
    "jax.tree_util": """Partial keystr register_dataclass register_pytree_node register_pytree_node_class
        register_static""",
}
JAX_URLS = {
    **{
        f"{module}.{name}": f"{JAX}_autosummary/{module}.{name}.html"
        for module, names in JAX_PAGES.items()
        for name in names.split()
    },
    "jax.checkpoint_policies": f"{JAX}jax.html#checkpoint-policies",
    "jax.errors.ConcretizationTypeError": f"{JAX}errors.html#jax.errors.ConcretizationTypeError",
    "jax.errors.UnexpectedTracerError": f"{JAX}errors.html#jax.errors.UnexpectedTracerError",
    "jax.export": f"{JAX}jax.export.html",
    "jax.lax": f"{JAX}jax.lax.html",
    "jax.sharding.Mesh": f"{JAX}jax.sharding.html#jax.sharding.Mesh",
    "jax.sharding.NamedSharding": f"{JAX}jax.sharding.html#jax.sharding.NamedSharding",
    "jax.sharding.PartitionSpec": f"{JAX}jax.sharding.html#jax.sharding.PartitionSpec",
}
SHORT = {"lax.": "jax.lax.", "jnp.": "jax.numpy."}
AMBIGUOUS = """Best Buffer Cast Ema In Keys Moments Out RNN Statistics Window best buffer cast ema keys last moments
    pack pad scan stack stop_gradient window"""  # without a module before them these mean something else as often

NAME = re.compile(r"([A-Za-z_][\w.]*)(\(.*\))?", re.DOTALL)
TOKEN = re.compile(
    r"<code>(?P<code>[^<]*)</code>"
    r"|<(?P<close>/?)(?P<tag>h[1-6]|pre|a|autoref|svg)\b(?:[^>\"']|\"[^\"]*\"|'[^']*')*>"
)
FILE = re.compile(r'(<div class="[^"]*highlight")(><span class="filename">(?:examples|src|tests)/)')
OUTPUT = re.compile(  # a block that no lexer has coloured
    r'(<div class="highlight")(><pre><span></span><code>(?:(?!</code>|<span class=).)*</code></pre></div>)', re.DOTALL
)
ALIGNED = re.compile(r"[^\s>] {2,}\S|\^\^|~~")  # columns, and marks below a line

VARIANCE = re.compile(r"\b([A-Z]\w*?)_(?:co|contra)\b")  # how a type parameter varies is for type checkers
SEARCH = Path(__file__).parent / "search.js"

_reference: dict[str, str] = {}  # of the build that runs: public names, and bare ones, by where they are documented


def on_files(files: Any, **_: object) -> None:
    """Reads off the reference where each name is documented."""
    pages = [file for file in files.documentation_pages() if file.src_uri.startswith("reference/")]
    _reference.clear()
    _reference.update(reference_urls((file.url, Path(file.abs_src_path).read_text()) for file in pages))


def on_page_content(html: str, page: Any, **_: object) -> str:
    """Makes the links of a page, docstrings included, and drops links that only say what the heading below defines.

    The index of the search, which every page loads, is without overloads, without whole files of the repository,
    without what code prints unless a page has `output_in_search: true`, and without the tables of a page that has
    `tables_in_search: false`.

    What code prints may wrap on a phone, unless it is aligned.
    """
    html = html.replace('<details class="overloads" open>', '<details class="overloads" data-search-exclude>')
    html = FILE.sub(r"\1 data-search-exclude\2", html)
    unfound = "" if page.meta.get("output_in_search") is True else " data-search-exclude"

    def mark(output: re.Match[str]) -> str:
        wraps = "" if ALIGNED.search(output[2]) else " data-wraps"
        return f"{output[1]}{unfound}{wraps}{output[2]}"

    html = OUTPUT.sub(mark, html)
    if page.meta.get("tables_in_search") is False:
        html = html.replace("<table", "<table data-search-exclude")
    html = re.sub(r'<p><a href="" id="[\w.]+"></a></p>\n?', "", html)
    html = VARIANCE.sub(r"\1", html)
    linked = link_names(html, lambda name: url_of(name, _reference, page.url))
    return linked.replace(" -&gt; ", ' <span class="arrow">-&gt;</span> ')  # in tables: a phone breaks lines at hyphens


def on_post_page(output: str, **_: object) -> str:
    """Gives the theme's search dialog a name, which screen readers say."""
    dialog = 'data-md-component="search" role="dialog"'
    return output.replace(dialog, f'{dialog} aria-label="Search"')


def on_post_template(output_content: str, **_: object) -> str:
    """The same for the page that a server shows where there is none."""
    return on_post_page(output_content)


def on_post_build(config: Any, **_: object) -> None:
    """Lets the theme's search rank by all words of a query: appends `search.js` to its worker."""
    (worker,) = Path(config.site_dir, "assets", "javascripts", "workers").glob("search.*.min.js")
    worker.write_text(f"{worker.read_text()}\n{SEARCH.read_text()}")


def reference_urls(pages: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Where names are documented.

    Args:
        pages: url and Markdown of each page of the reference.

    Returns:
        Urls from the root of the site, by full names and by those bare ones that are not ambiguous.
    """
    urls = {name: f"{url}#{name}" for url, text in pages for name in re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE)}
    bare = {name.rpartition(".")[2]: url for name, url in urls.items()}
    return urls | {name: url for name, url in bare.items() if name not in AMBIGUOUS.split()}


def url_of(name: str, reference: dict[str, str], here: str) -> str | None:
    """Where a name is documented, as a link on the page `here`; None if that is nowhere, or on that page itself."""
    for short, long in SHORT.items():
        if name.startswith(short):
            name = name.replace(short, long, 1)
    if name in JAX_URLS:
        return JAX_URLS[name]
    page, _, anchor = reference.get(name, here).partition("#")
    return None if page == here else f"{posixpath.relpath(page, posixpath.dirname(here) or '.')}#{anchor}"


def link_names(html: str, url_of: Callable[[str], str | None]) -> str:
    """Makes links of names in code spans, and of calls: `name(...)`.

    Args:
        html: the content of a page.
        url_of: where a name leads, or None.

    Returns:
        The content with the first mention of each name in each section as a link.
    """
    within = 0  # how many elements are open in which nothing is linked
    linked: set[str] = set()

    def replace(token: re.Match[str]) -> str:
        nonlocal within
        if token["tag"]:
            within += -1 if token["close"] else 1
            if token["tag"].startswith("h"):
                linked.clear()
            return token[0]
        name = None if within else NAME.fullmatch(unescape(token["code"]))
        url = url_of(name[1]) if name and name[1] not in linked else None
        if name is None or url is None:
            return token[0]
        linked.add(name[1])
        return f'<a href="{url}">{token[0]}</a>'

    return TOKEN.sub(replace, html)
