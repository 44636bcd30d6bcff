"""The shape of the package, read off its syntax: what may import what, what is called where, how long things get."""

import ast
import inspect
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import treescan

TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "treescan"

LAYERS = [  # a module imports from lines above its own only
    "_remat",
    "_types",
    "_avals",
    "_tree",
    "_errors",
    "carries._base",
    "carries._failures",
    "carries._registry",
    "carries._entries",
    "carries._keys",
    "carries._cast",
    "carries._window",
    "carries._ema",
    "carries._moments",
    "carries._sum",
    "carries._best",
    "carries._gradient",
    "carries._buffer",
    "carries",
    "_retrace",
    "_rewrite",
    "_loop",
    "_chunk",
    "_sizes",
    "_transforms",
    "_transforms.conventions",
    "_transforms.axes",
    "_transforms.signature",
    "_transforms.differences",
    "_transforms.invariance",
    "_transforms.batch_axes",
    "_transforms.carries",
    "_transforms.body",
    "_transforms.count",
    "_transforms.silence",
    "_transforms.equations",
    "_transforms.hoist",
    "_transforms.dependence",
    "_transforms.smooth",
    "_transforms.rows",
    "_transforms.branches",
    "_transforms.refuse",
    "_transforms.checkpoint",
    "_transforms.budget",
    "_transforms.remat",
    "_transforms.outputs",
    "_transforms.thin",
    "_transforms.nest",
    "_transforms.call",
    "_transforms.truncate",
    "_transforms.turns",
    "_transforms.pattern",
    "_transforms.lend",
    "_transforms.good_pairs",
    "_transforms.fill",
    "_transforms.mask",
    "_transforms.resets",
    "_transforms.keep_rows",
    "_transforms.compact",
    "_transforms.over_rows",
    "_transforms.products",
    "_transforms.sums",
    "_transforms.steps_at_once",
    "_transforms.deferred",
    "_transforms.in_bulk",
    "_transforms.schedule",
    "_transforms.in_place",
    "_transforms.skip",
    "_transforms.once",
    "_transforms.condition",
    "_transforms.early_exit",
    "_transforms.kept",
    "_transforms.tangents",
    "_transforms.step_by_step",
    "_transforms.all_steps",
    "_transforms.until",
    "_arguments",
    "_mask_arguments",
    "_prepare",
    "_run",
    "_plan_remat",
    "_scan",
    "_fold",
    "_while_scan",
    "_fori",
    "_stack",
    "_init_layers",
    "_state_dict",
    "_layer_arguments",
    "_layers",
    "_first_fit",
    "_sequences",
    "_pad",
    "_pack",
    "_mask_scan",
    "_filters",
    "_group_terms",
    "_groups",
    "_collections",
    "_lift",
    "testing",
    "__init__",
    "__main__",
    "integrations",
    "integrations.nnx._named",
    "integrations.nnx._metadata",
    "integrations.nnx._carry",
    "integrations.nnx._roles",
    "integrations.nnx._step",
    "integrations.nnx._scan",
    "integrations.nnx",
    "integrations.flax._scopes",
    "integrations.flax._scan",
    "integrations.flax._rnn_lift",
    "integrations.flax._rnn",
    "integrations.flax",
]
LONGEST_FILE, LONGEST_FUNCTION = 400, 45
PUBLIC = {
    name: value for name, value in vars(treescan).items() if not name.startswith("_") and not inspect.ismodule(value)
}
VERBS = [name for name, value in PUBLIC.items() if inspect.isfunction(value)]


def module_of(file: Path) -> str:
    dotted = ".".join(file.relative_to(PACKAGE).with_suffix("").parts)
    return dotted.removesuffix(".__init__")


MODULES = {module_of(file): ast.parse(file.read_text(), str(file)) for file in sorted(PACKAGE.rglob("*.py"))}
TEST_TREES = {file.name: ast.parse(file.read_text(), str(file)) for file in sorted(TESTS.rglob("*.py"))}


def imports(tree: ast.AST) -> Iterator[tuple[int, str, list[str]]]:
    """(level, module, names) of every import, wherever it stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((0, alias.name, []) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.level, node.module or "", [alias.name for alias in node.names]


def own_imports(module: str) -> Iterator[str]:
    """The package's own modules that one of them imports."""
    packages = ("_transforms", "carries", "integrations", "integrations.flax", "integrations.nnx")
    is_package = module in ("__init__", *packages)
    path = [] if module == "__init__" else module.split(".")
    for level, target, names in imports(MODULES[module]):
        if level:
            base = path[: len(path) - level + is_package] if path else []
            yield from _resolve([*base, *target.split(".")] if target else base, names)
        elif target.split(".")[0] == "treescan":
            yield from _resolve(target.split(".")[1:], names)


def _resolve(path: list[str], names: list[str]) -> Iterator[str]:
    """`from .package import name` imports the module `package.name` if there is one, else the package."""
    for name in names or [""]:
        inner = ".".join([*path, name])
        yield inner if inner in MODULES else ".".join(path) or "__init__"


def references(tree: ast.AST) -> Iterator[str]:
    """Every dotted name that is read or imported: `jax.lax.scan`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield dotted(node)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
            owner, name = node.args[:2]
            if isinstance(name, ast.Constant):
                yield f"{dotted(owner)}.{name.value}"


def dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def test_the_layers_are_all_modules() -> None:
    assert set(LAYERS) == set(MODULES), "say in LAYERS where a new module belongs"


@pytest.mark.parametrize("module", MODULES)
def test_imports_run_one_way(module: str) -> None:
    above = set(LAYERS[: LAYERS.index(module)])
    assert set(own_imports(module)) <= above


def test_lax_scan_is_called_in_one_place() -> None:
    found = [
        (module, name) for module, tree in MODULES.items() for name in references(tree) if name.endswith("lax.scan")
    ]
    assert found == [("_loop", "jax.lax.scan")]


@pytest.mark.parametrize("module", MODULES)
def test_no_other_loop_primitive(module: str) -> None:
    loops = ("while_loop", "fori_loop", "map", "associative_scan", "scan_p", "while_p")
    assert not {n for n in references(MODULES[module]) if re.fullmatch(rf".*\blax\.({'|'.join(loops)})", n)}


@pytest.mark.parametrize("name", [*MODULES, *TEST_TREES])
def test_nothing_private_of_others(name: str) -> None:
    tree = MODULES.get(name) or TEST_TREES[name]
    foreign = [
        r for r in references(tree) if r.split(".")[0] in ("jax", "jaxlib", "jaxtyping", "beartype", "chex", "flax")
    ]
    imported = [target for level, target, _ in imports(tree) if not level and target.split(".")[0] != "treescan"]
    private = [r for r in (*foreign, *imported) if re.search(r"(^|\.)_(?!_)", r)]
    assert not private


@pytest.mark.parametrize("module", MODULES)
def test_only_declared_dependencies_are_imported(module: str) -> None:
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]
    declared = {re.split(r"[^\w-]", requirement)[0] for requirement in project["dependencies"]} | {"numpy"}  # JAX's own
    roots = {target.split(".")[0] for level, target, _ in imports(MODULES[module]) if not level}
    optional = {"flax"} if module.startswith("integrations.") else set()
    assert roots <= declared | sys.stdlib_module_names | optional


@pytest.mark.parametrize("module", MODULES)
def test_files_are_short(module: str) -> None:
    file = PACKAGE / f"{module.replace('.', '/')}.py"
    if file.exists():
        assert len(file.read_text().splitlines()) < LONGEST_FILE


def length_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """A function's lines, its signature included and its docstring not."""
    first, lines = function.body[0], (function.end_lineno or 0) - function.lineno + 1
    documented = ast.get_docstring(function) is not None
    return lines - ((first.end_lineno or 0) - first.lineno + 1 if documented else 0)


@pytest.mark.parametrize("module", MODULES)
def test_functions_are_short(module: str) -> None:
    functions = [node for node in ast.walk(MODULES[module]) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    assert not {f.name: length_of(f) for f in functions if length_of(f) > LONGEST_FUNCTION}


def test_init_holds_exports_and_nothing_else() -> None:
    docstring, *statements = MODULES["__init__"].body
    assert isinstance(docstring, ast.Expr)
    exported = []
    for statement in statements:
        if isinstance(statement, ast.Assign):
            assert [dotted(target) for target in statement.targets] == ["__version__"]
        else:
            assert isinstance(statement, ast.ImportFrom)
            assert all(alias.asname == alias.name for alias in statement.names), "`scan as scan`: an export"
            exported.extend(alias.name for alias in statement.names)
    assert sorted(exported) == sorted(PUBLIC)


def sections(value: Any) -> dict[str, str]:
    """A Google-style docstring's sections by their titles; the text before the first is under ''."""
    parts = re.split(r"^(\w+):\n", inspect.getdoc(value) or "", flags=re.MULTILINE)
    return {"": parts[0].strip(), **dict(zip(parts[1::2], parts[2::2], strict=True))}


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_are_documented(name: str) -> None:
    first_line = sections(PUBLIC[name])[""].splitlines()[0]
    assert first_line.endswith(".")
    assert PUBLIC[name].__doc__ not in {base.__doc__ for base in getattr(PUBLIC[name], "__mro__", (None,))[1:]}


@pytest.mark.parametrize("name", VERBS)
def test_verbs_document_what_they_take_give_and_raise(name: str) -> None:
    found = sections(PUBLIC[name])
    stars = {inspect.Parameter.VAR_KEYWORD: "**", inspect.Parameter.VAR_POSITIONAL: "*"}
    parameters = inspect.signature(PUBLIC[name]).parameters.values()
    documented = [p for p in parameters if not p.name.startswith("_") and p.name != "unknown"]  # `unknown` is refused
    expected = [stars.get(p.kind, "") + p.name for p in documented]
    assert re.findall(r"^    (\*{0,2}\w+): \S", found["Args"], re.MULTILINE) == expected
    assert found["Returns"].strip()
    errors = re.findall(r"^    (\w+): \S", found["Raises"], re.MULTILINE)
    assert errors == sorted(errors)
    assert all(issubclass(PUBLIC[error], treescan.TreescanError) for error in errors)
    assert ">>> " in found.get("Examples", found.get("Example", "")), "test_docs.py runs it"


def test_the_reader_of_imports_sees_what_it_should() -> None:
    tree = ast.parse(
        "import a.b\nfrom ..c import d\ndef f():\n    from jax.lax import scan\n    getattr(jax.lax, 'map')"
    )
    assert sorted(imports(tree)) == [(0, "a.b", []), (0, "jax.lax", ["scan"]), (2, "c", ["d"])]
    assert {"jax.lax.scan", "jax.lax.map", "a.b"} <= set(references(tree))
    assert {"_loop", "_retrace", "_transforms.body", "_transforms.nest"} <= set(own_imports("_transforms.call"))
    assert "_transforms.call" in set(own_imports("_prepare"))
