"""The documentation runs: every `python` block of the README and of docs/, and every docstring's examples.

The blocks of a page are one module, in order. A block with `title="model.py"` is taken for that file by what names
files, as errors do. A block under `<!-- raises: CarryError -->` must end in that exception, of treescan or built in.
A `text` block that follows a `python` block is its output, or its error if it raises one. `TREESCAN_REGENERATE=1`
writes what came into the pages instead of comparing it. A `py` block is shown and not run: it is a file of the
repository that has tests of its own. Pages run at the root of the repository, where `examples/data` is.
"""

import ast
import builtins
import contextlib
import doctest
import io
import os
import re
import subprocess
import sys
import textwrap
import tomllib
import types
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import pytest
from widths import too_wide

import treescan
import treescan.carries
import treescan.integrations.flax
import treescan.integrations.nnx
import treescan.options
import treescan.testing
from scripts import printed, script
from treescan.__main__ import main
from treescan._errors import Fault, explain
from treescan.carries import _registry

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
PLUGIN = EXAMPLES / "plugin"
TUTORIALS = ROOT / "docs" / "tutorials"
TUTORIAL = TUTORIALS / "plugin.md"
# What compiles more than a few programs: the rest is enough to see every day that pages run at all.
LONG = (
    *(TUTORIALS / f"{name}.md" for name in ("plugin", "vowels", "packed-vowels", "llama", "llama-cache", "solvers")),
    *(ROOT / "docs" / "guides" / f"{name}.md" for name in ("layers", "flax", "random-keys", "training")),
    *(
        ROOT / "docs" / "guides" / f"{name}.md"
        for name in ("variable-length", "packing", "skipping", "performance", "custom-carries")
    ),
    *(
        ROOT / "docs" / "guides" / f"{name}.md"
        for name in (
            "layers-patterns",
            "devices",
            "devices-layers",
            "pipeline",
            "migrating",
            "migrating-flax",
            "migrating-haiku",
        )
    ),
    *(ROOT / "docs" / "recipes" / f"{name}.md" for name in ("index", "rows", "numbers", "speech")),
    ROOT / "docs" / "frameworks.md",
)
OF_DEVICES = [ROOT / "docs" / "guides" / f"{name}.md" for name in ("devices", "devices-layers", "pipeline")]
FENCE = re.compile(
    r"^(?:<!-- raises: (?P<raises>\w+) -->\n)?"
    r'^(?P<indent> *)```(?P<language>\w+)(?: title="(?P<title>[^"]*)")?\n'
    r"(?P<code>.*?)"
    r"^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)

FRONT_MATTER = re.compile(r"(?:---\n.*?\n---\n+)?", re.DOTALL)  # no line of the page's text


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
    begin = len(FRONT_MATTER.match(text)[0])
    assert 2 * len(fences) == len(re.findall(r"^ *```", text, re.MULTILINE)), "a block that this test cannot read"
    for fence, following in zip(fences, [*fences[1:], None], strict=True):
        if fence["language"] != "python":
            continue
        adjacent = following is not None and not text[fence.end() : following.start()].strip()
        shown = following.span("code") if adjacent and following and following["language"] == "text" else None
        yield Block(
            code=textwrap.dedent(fence["code"]),
            line=text.count("\n", begin, fence.start("code")),
            title=fence["title"],
            raises=exception(fence["raises"]) if fence["raises"] else None,
            output=shown,
            indent=fence["indent"],
        )


def exception(name: str) -> type[BaseException]:
    found = getattr(treescan.errors, name, None) or getattr(builtins, name)
    assert issubclass(found, BaseException)
    return found


def run(block: Block, page: str, namespace: dict[str, object]) -> str:
    """What the block prints, or its error as Python would print it."""
    # Lines count from the block's first where it is shown as a file of its own, else from the page's title.
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
    module = "" if caught.type.__module__ == "builtins" else f"{caught.type.__module__}."
    return f"{module}{caught.type.__name__}: {caught.value}"


def normal(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.strip().splitlines()) + "\n"


DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [page for page in DOCUMENTS if "```python" in page.read_text()]


def public(module: types.ModuleType) -> dict[str, object]:
    """What a package exports."""
    names = {name: getattr(module, name) for name in dir(module) if not name.startswith("_")}
    return {name: value for name, value in names.items() if not isinstance(value, types.ModuleType)}


SUBMODULES = ("carries", "lifting", "meters", "state_dict", "types")
PUBLIC = {
    "treescan": public(treescan),
    **{f"treescan.{name}": public(getattr(treescan, name)) for name in SUBMODULES},
    "treescan.errors": {name: value for name, value in public(treescan.errors).items() if name != "TreescanError"},
    "treescan.options": {name: getattr(treescan.options, name) for name in treescan.options.__all__},
    "treescan.testing": {"check_carry": treescan.testing.check_carry},
    "treescan.integrations.flax": public(treescan.integrations.flax),
    "treescan.integrations.nnx": {name: getattr(treescan.integrations.nnx, name) for name in ("scan", "ModuleCarry")},
}


def is_error(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, treescan.TreescanError) and value is not treescan.TreescanError


FUNCTIONS = {
    f"{module}.{name}": value
    for module, names in PUBLIC.items()
    for name, value in names.items()
    if isinstance(value, types.FunctionType)
}


@pytest.fixture(autouse=True)
def as_users_run_it() -> Iterator[None]:
    """With JAX as it comes: what the other tests forbid themselves is no business of the reader's."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the repository's distributions declare, found as if both were installed: treescan, and the example."""
    for project in (ROOT, PLUGIN):
        metadata = tomllib.loads((project / "pyproject.toml").read_text())["project"]
        name, version = metadata["name"], metadata["version"]
        info = tmp_path / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        declared = metadata["entry-points"]["treescan.carries"]
        lines = [f"{package} = {value}\n" for package, value in declared.items()]
        (info / "entry_points.txt").write_text("[treescan.carries]\n" + "".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(PLUGIN / "src")
    monkeypatch.setattr(_registry, "_plugins", None)  # to be read anew


def marks(page: Path) -> list[pytest.MarkDecorator]:
    chosen = [(pytest.mark.slow, page in LONG), (pytest.mark.devices, page in OF_DEVICES)]
    return [mark for mark, is_chosen in chosen if is_chosen]


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=marks(page)) for page in PAGES], ids=lambda page: str(page.relative_to(ROOT))
)
def test_page_runs(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if page.name == "describe.md" and int(os.environ.get("TREESCAN_RELEASE_SHARE", "1")) > 1:
        pytest.skip("it prints bytes, which differ by a tenth of a kibibyte on other releases")
    text = page.read_text()
    monkeypatch.chdir(ROOT)
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
    assert {"README.md", "docs/getting-started.md", "docs/guides/variable-length.md", "docs/errors.md"} <= names


def test_the_design_names_tests_that_exist() -> None:
    text = (ROOT / "docs" / "design.md").read_text()
    promises, table = (
        text.split(f"{start}\n")[1].split("\n## ")[0] for start in ("## Promises", "tests that enforce them")
    )
    named = set(re.findall(r"tests/\w+/\w+\.py", table))
    assert named and all((ROOT / file).exists() for file in named)
    assert re.findall(r"^\| (\d+),", table, re.MULTILINE) == re.findall(r"^(\d+)\. ", promises, re.MULTILINE)


def test_all_public_names_are_documented() -> None:
    reference = "\n".join(page.read_text() for page in (ROOT / "docs" / "reference").glob("*.md"))
    documented = re.findall(r"^::: ([\w.]+)$", reference, re.MULTILINE)
    assert sorted(documented) == sorted(f"{module}.{name}" for module, names in PUBLIC.items() for name in names)


def test_errors_say_where_they_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    for kind in filter(is_error, PUBLIC["treescan.errors"].values()):
        (note,) = explain(Fault(kind, "{verb}"), "scan").__notes__
        command = re.fullmatch(r"More about it: python -m treescan (explain \w+)", note)
        assert command
        assert main(command[1].split()) == 0
        printed = capsys.readouterr().out
        assert printed.startswith(f"{kind.__name__}\n====")
        assert list(too_wide(printed)) == []
        assert not re.search(r"<!--|```|\]\(|\*\*|^## ", printed, re.MULTILINE)


def test_a_reader_of_an_explanation_may_have_enough() -> None:
    with subprocess.Popen(
        [sys.executable, "-u", "-m", "treescan", "explain", "CarryError"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as running:
        assert running.stdout is not None and running.stderr is not None
        running.stdout.close()
        assert running.stderr.read() == ""
    assert running.returncode == 0


def test_the_wheel_explains_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed("-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path, PYTHONDONTWRITEBYTECODE="1")
    (wheel,) = tmp_path.glob("*.whl")
    installed = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    program = "import treescan.__main__ as m; print(m.__file__); m.main(['explain', 'CarryError'])"
    text = printed("-c", program, cwd=tmp_path, PYTHONPATH=str(installed), PYTHONDONTWRITEBYTECODE="1")
    place, _, explained = text.partition("\n")
    assert Path(place).is_relative_to(installed)
    assert main(["explain", "CarryError"]) == 0
    assert main(["explain", "treescan.errors.carryerror"]) == 0  # as a traceback prints it, or carelessly
    assert capsys.readouterr().out == explained * 2
    assert "carry cannot grow" in explained


def test_a_report_of_a_bug_has_its_versions(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TREESCAN_REWRITE", "0")
    assert main([]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert f"jax {jax.__version__}" in printed
    assert f"devices: {jax.device_count()} x {jax.devices()[0].device_kind}" in printed
    assert printed[-1] == "TREESCAN_REWRITE=0"


def test_the_description_on_an_index_has_no_links_into_the_repository() -> None:
    readme, index = (ROOT / "README.md").read_text(), script("index_readme")
    plain = index.description(readme, None, "1.0")
    assert not re.search(r"\]\((?!https:)|\]\[|^\[\w+\]:|<!--", plain, re.MULTILINE)
    assert "## Documentation" not in plain  # a list of links
    linked = index.description(readme, "https://host/project", "1.0")
    assert "](https://host/project/blob/v1.0/docs/errors.md)" in linked
    assert "](https://host/project/raw/v1.0/docs/assets/ragged.svg)" in linked


def test_explain_without_a_name_lists_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain"]) == 0
    listed = re.findall(r"^  name +(\w+)$", capsys.readouterr().out, re.MULTILINE)
    assert set(listed) == {"TreescanError", *treescan.errors.__all__}
    for name in listed:
        assert main(["explain", name]) == 0


def test_the_command_has_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"{treescan.__version__}\n"


@pytest.mark.parametrize(("name", "told"), [("CaryError", "did you mean CarryError?"), ("foo", "PluginWarning")])
def test_a_name_that_is_none_is_told_another(name: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["explain", name])
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_docstring_runs(name: str) -> None:
    (test,) = doctest.DocTestFinder(recurse=False).find(FUNCTIONS[name], name, globs={})
    assert test.examples, "every function shows how it is called"
    section = re.search(r"^ *Examples:$", str(test.docstring), re.MULTILINE)
    assert section, "the reference shows `Examples:` as code, and `Example:` as prose"
    report = io.StringIO()
    assert doctest.DocTestRunner().run(test, out=report.write).failed == 0, report.getvalue()


def test_the_tutorial_shows_the_files_of_the_example() -> None:
    shown = {}
    for fence in FENCE.finditer(TUTORIAL.read_text()):
        if fence["title"]:
            whole = re.fullmatch(r'--8<-- "(.+)"\n', fence["code"])
            shown[fence["title"]] = (ROOT / whole[1]).read_text() if whole else fence["code"]
    assert shown
    for name, text in shown.items():
        assert text in (PLUGIN / name).read_text(), name
    sources = {str(file.relative_to(PLUGIN)) for file in (PLUGIN / "src").rglob("*.py")}
    assert sources | {"pyproject.toml", "tests/test_histograms.py"} == shown.keys()


@pytest.mark.usefixtures("installed")
def test_the_tutorial_shows_what_the_command_lists(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins"]) == 0
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    (shown,) = re.findall(r"^```text\n(  package .*?)^```$", TUTORIAL.read_text(), re.MULTILINE | re.DOTALL)
    assert [line for line in printed if line[0] in ("package", "flax", "histograms")] == [
        line.split() for line in shown.splitlines()
    ]


def definitions(code: str) -> Iterator[tuple[str, str]]:
    """The functions and classes of a module, by name, with their source."""
    lines = code.splitlines()
    for node in ast.parse(code).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            first = min(part.lineno for part in (node, *node.decorator_list))
            yield node.name, "\n".join(lines[first - 1 : node.end_lineno])


@pytest.mark.parametrize(
    ("pages", "examples", "leaves_out", "simpler"),
    [
        (["vowels.md", "packed-vowels.md"], ["vowels.py", "packed_vowels.py"], {"main"}, set()),
        (
            ["llama.md", "llama-cache.md"],
            ["llama.py"],
            {"mean_loss", "place", "stretches", "fit", "run", "main"},
            {"gathered", "init_params"},
        ),
        (["solvers.md"], ["early_exit.py"], {"Letters", "read_letters", "decode", "main"}, set()),
    ],
)
def test_a_tutorial_has_the_code_of_its_example(
    pages: list[str], examples: list[str], leaves_out: set[str], simpler: set[str]
) -> None:
    """All of it but what it leaves out; some of it in a simpler form."""
    text = "\n".join((TUTORIALS / page).read_text() for page in pages)
    fences = [fence for fence in FENCE.finditer(text) if "--8<--" not in fence["code"]]
    code = [fence["code"] for fence in fences if fence["language"] in ("python", "py")]
    shown = [definition for block in code for definition in definitions(block)]
    written = [found for file in examples for found in definitions((EXAMPLES / file).read_text())]
    names = {name for name, _ in written}
    assert names - leaves_out == names & {name for name, _ in shown}
    differ = {name for name, source in shown if name in names and (name, source) not in written}
    assert differ == simpler


def test_pages_link_to_all_examples() -> None:
    text = "\n".join(page.read_text() for page in DOCUMENTS)
    assert set(re.findall(r"\]\((?:\.\./)*examples/(\w+\.py)\)", text)) == {file.name for file in EXAMPLES.glob("*.py")}
