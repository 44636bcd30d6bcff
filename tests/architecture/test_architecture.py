"""The shape of the package, read off its syntax: what may import what, what is called where, how long things get."""

import ast
import functools
import graphlib
import importlib
import inspect
import re
import sys
import tomllib
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from modules import (
    BASE,
    CALLS,
    CORE as CORE_FOLDERS,
    EXTRAS,
    HEADS,
    LINE,
    PACKAGE,
    imports,
    modules,
    own_imports,
    place_of,
)

import treescan
from scripts import printed, script
from treescan._transforms.transform import Stage

TESTS = Path(__file__).parents[1]


def public_module(name: str) -> types.ModuleType:
    """One of the modules that list public names."""
    return importlib.import_module("treescan" if name == "__init__" else f"treescan.{name}")


CORE = script("core")
LONGEST_FILE, LONGEST_FUNCTION = 700, 60
PUBLIC = {name: getattr(module, name) for module in map(public_module, HEADS) for name in module.__all__}
VERBS = [name for name, value in PUBLIC.items() if inspect.isfunction(value)]


@functools.cache
def trees_of_tests() -> dict[str, ast.Module]:
    """The syntax of each file of the tests."""
    files = sorted(TESTS.rglob("*.py"))
    return {file.relative_to(TESTS).as_posix(): ast.parse(file.read_text(), str(file)) for file in files}


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


def folder_of(module: str) -> str:
    return module.split(".")[0]


def test_each_module_has_a_place() -> None:
    assert sorted((*LINE, *EXTRAS)) == sorted({folder_of(module) for module in modules()}), "say where it belongs"


FROM_ABOVE = {
    "_faster": (
        "_faster.in_bulk _faster.in_place",
        "They rewrite steps of the core, and are loaded when it first asks.",
    ),
    "_loop.loop": (
        "_body.call _rows.axes _trace.trace _transforms.call",
        "The types of a loop's fields. What it holds is made of loops further up, and all that does so imports it.",
    ),
    "_transforms.call": (
        "_rows.axes _until.end_early",
        "The types of what a verb was given for rows and for a range, which is checked and read there alone.",
    ),
    "_types": ("_options.progress.meters options", "The types of arguments: a `Progress`, and options of strangers."),
}
"""What modules import from above their place, for type checkers alone, and why."""


def test_imports_run_one_way() -> None:
    """Imports in functions and those for type checkers count as well as those at the heads of files."""
    up = {m: {o for o in own_imports(m, types=True) if place_of(o) > place_of(m)} for m in modules()}
    assert {m: found for m, found in up.items() if found} == {m: {*n.split()} for m, (n, _) in FROM_ABOVE.items()}
    assert not {m for m in modules() if m in FROM_ABOVE and not up[m].isdisjoint(own_imports(m))}, "for types alone"


def test_no_two_modules_import_each_other() -> None:
    graph = {m: {o for o in own_imports(m) if "." in o or place_of(o) < place_of(m)} for m in modules()}
    list(graphlib.TopologicalSorter(graph).static_order())  # raises a CycleError that names the circle


@pytest.mark.parametrize(
    "code", ["if TYPE_CHECKING:\n    {}", "def f():\n    {}", "{}"], ids=["types", "function", "head"]
)
def test_an_import_from_above_is_seen(code: str) -> None:
    assert place_of("_stacks.stack") < place_of("_verbs.scan")
    for line in ("from .._verbs.scan import scan", "from .._verbs import scan", "import treescan._verbs.scan"):
        assert list(own_imports("_stacks.stack", ast.parse(code.format(line)), types=True)) == ["_verbs.scan"]


def users_of(*folders: str) -> dict[str, set[str]]:
    """The modules that import from one of these folders from outside, each with what it imports."""
    found = {
        m: {o for o in own_imports(m) if folder_of(o) in folders} for m in modules() if folder_of(m) not in folders
    }
    return {module: others for module, others in found.items() if others}


def test_of_the_core_one_file_names_options() -> None:
    users = {module for module in users_of("_options") if folder_of(module) in (*BASE, *CORE_FOLDERS, "_faster")}
    assert users == {"_verbs.options", "_verbs.progress"}


WORDS = re.compile("progress|paced|report|(?<!para)meter|finite|evidence|truncat|resets|segment|foreign|stranger", re.I)
"""Words of options."""

KNOWN_WORDS = {
    "_loop": ("segments Segments", "The type of a field; see `_rows.axes`."),
    "_transforms": ("REPORT", "The place of what any option reports."),
    "_rows": ("resets segments Segments", "A mask and resets are given and laid along the loop together."),
    "_until": (
        "progress Progress in_progress",
        "The state of a loop that ends early, not what `progress` shows.",
    ),
    "_batches": (
        "resets segment_ids from_segment_ids num_segments",
        "A `Packed` has them: they go to the verb as if the user had given them.",
    ),
}
"""Those that the core has by folder, and why."""


def test_the_core_has_no_word_of_an_option() -> None:
    found: dict[str, set[str]] = {}
    for module, tree in modules().items():
        if folder_of(module) in LINE[LINE.index("_loop") : LINE.index("options")]:
            names = {name for name in identifiers(tree) if WORDS.search(name)}
            found.setdefault(folder_of(module), set()).update(names)
    assert {folder: names for folder, names in found.items() if names} == {
        folder: {*names.split()} for folder, (names, _) in KNOWN_WORDS.items()
    }


def identifiers(tree: ast.AST) -> Iterator[str]:
    """Every name that a module gives or uses."""
    for node in ast.walk(tree):
        yield from (str(getattr(node, field)) for field in ("id", "attr", "name", "arg") if getattr(node, field, None))


def test_the_core_asks_for_what_is_faster_by_the_names_at_its_head() -> None:
    assert set().union(*users_of("_faster").values()) == {"_faster"}


def test_nothing_imports_an_extra() -> None:
    users = users_of("_extras")
    assert {folder_of(module) for module in users} <= set(EXTRAS)
    extras = {module: set(own_imports(module)) for module in modules() if module.startswith("_extras.")}
    others = {
        m: {o for o in found if o.startswith("_extras.") and o.split(".")[1] != m.split(".")[1]}
        for m, found in extras.items()
    }
    assert not {module: found for module, found in others.items() if found}, "an extra imports another"


FOLDERS_OF_EXTRAS = {
    "associative": {"_transforms", "_rows", "_batches", "_options"},
    "chunk_map": {"_transforms", "_remat", "_options"},
    "describe": {"_transforms", "_remat", "_program", "_rows", "_until", "_outputs", "_faster", "_options"},
    "linear": {"_transforms", "_rows", "_batches", "_options"},
    "lift": {"_transforms", "_outputs", "_options"},
    "pipeline": {"_remat", "_stacks"},
    "state_dict": {"_stacks"},
    "stream": {"_outputs", "_rows", "_batches", "_options"},
}
"""What extras read of the core beside the verbs. `describe` explains what the core decides, so it reads all of it."""


def test_an_extra_imports_verbs_and_little_else() -> None:
    found: dict[str, set[str]] = {}
    for module in modules():
        if module.startswith("_extras."):
            used = {folder_of(other) for other in own_imports(module)}
            found.setdefault(module.split(".")[1], set()).update(used - set(BASE) - {"_extras", "_verbs", "_arguments"})
    assert found == FOLDERS_OF_EXTRAS


def test_lax_scan_is_called_in_one_place() -> None:
    found = [
        (module, name) for module, tree in modules().items() for name in references(tree) if name.endswith("lax.scan")
    ]
    assert found == [("_loop.replaced", "jax.lax.scan")]


def test_no_other_loop_primitive() -> None:
    loops = re.compile(r".*\blax\.(while_loop|fori_loop|map|scan_p|while_p)")
    assert not {m: n for m, tree in modules().items() for n in references(tree) if loops.fullmatch(n)}


def test_the_core_branches_in_one_place() -> None:
    branches = re.compile(r".*\blax\.(cond|switch|cond_p)")
    found = {m for m, tree in modules().items() for name in references(tree) if branches.fullmatch(name)}
    assert {module for module in found if folder_of(module) not in ("_options", *EXTRAS)} == {"_rows.run_or_leave"}


def private_names(tree: ast.AST) -> list[str]:
    """The private names of other packages that are read or imported."""
    others = ("jax", "jaxlib", "jaxtyping", "beartype", "chex", "flax")
    foreign = [name for name in references(tree) if name.split(".")[0] in others]
    imported = [target for level, target, _ in imports(tree) if not level and target.split(".")[0] != "treescan"]
    return [name for name in (*foreign, *imported) if re.search(r"(^|\.)_(?!_)", name)]


def test_nothing_private_of_others() -> None:
    assert not {name: found for name, tree in (modules() | trees_of_tests()).items() if (found := private_names(tree))}


def test_only_declared_dependencies_are_imported() -> None:
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]
    declared = {re.split(r"[^\w-]", requirement)[0] for requirement in project["dependencies"]} | {"numpy"}  # JAX's own
    for module, tree in modules().items():
        roots = {target.split(".")[0] for level, target, _ in imports(tree) if not level}
        optional = {"flax"} if module.startswith("integrations.") else set()
        assert roots <= declared | sys.stdlib_module_names | optional, module


def loaded_by(*programs: str, **environment: str) -> list[set[str]]:
    """The modules that each of some programs loads, one after another in a new process, once JAX is there."""
    code = ["import sys, jax, jax.numpy as jnp", "there = set(sys.modules)"]
    for program in programs:
        code += [program, "print(*set(sys.modules) - there)", "there = set(sys.modules)"]
    return [set(line.split()) for line in printed("-c", "\n".join(code), **environment).splitlines()]


def own(loaded: set[str]) -> set[str]:
    """The modules of the package, as `modules` names them."""
    return {name.removeprefix("treescan").removeprefix(".") or "__init__" for name in loaded if "treescan" in name}


OF_OTHERS = {"beartype", "chex", "equinox", "flax", "jaxtyping", "tqdm"}


REWRITING = {
    "_cpu.writes", "_remat.budget",
    "_trace.cost", "_trace.dependence", "_trace.on_in_steps", "_trace.rules", "_trace.ties", "_trace.transposed",
    "_faster.in_bulk", "_faster.products", "_remat.remat", "_rows.compact",
    "_faster.in_place", "_faster.saved", "_faster.writing",
}  # fmt: skip


def test_the_import_loads_a_table_of_names_and_three_verbs_their_core_alone() -> None:
    importing, taking, calling = loaded_by(
        "import treescan, treescan.carries", "from treescan import mask_scan, scan, scan_layers", CALLS
    )
    assert own(importing) == {"__init__", "_lazy", "carries"}
    assert own(importing | taking) - {"carries"} == set(CORE.core()) - {"carries"}
    assert not {name.split(".")[0] for name in importing | taking} & OF_OTHERS
    assert own(calling) == REWRITING


def test_calls_without_rewriting_load_no_more_than_the_core() -> None:
    (loaded,) = loaded_by(CALLS, TREESCAN_REWRITE="0")
    assert own(loaded) == set(CORE.core())


def test_the_core_is_the_one_that_the_documentation_lists() -> None:
    assert (PACKAGE.parent / "docs" / "pictures" / "core.md").read_text() == CORE.page(), "run `scripts/core.py`"


def test_modules_can_be_loaded_while_jax_traces() -> None:
    names = [f"treescan.{module}" for module in modules() if not module.startswith(("__", "integrations."))]
    loaded_by(
        f"""
import importlib
def trace(x):
    for name in {names}:
        importlib.import_module(name)
    return x
with jax.checking_leaks():
    assert not jax.make_jaxpr(trace)(1.0).eqns
"""
    )


def test_files_are_short() -> None:
    lines = {file: len(file.read_text().splitlines()) for file in PACKAGE.rglob("*.py")}
    assert not {file.name: count for file, count in lines.items() if count >= LONGEST_FILE}


def length_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """A function's lines, its signature included and its docstring not."""
    first, lines = function.body[0], (function.end_lineno or 0) - function.lineno + 1
    documented = ast.get_docstring(function) is not None
    return lines - ((first.end_lineno or 0) - first.lineno + 1 if documented else 0)


def test_functions_are_short() -> None:
    nodes = [(module, node) for module, tree in modules().items() for node in ast.walk(tree)]
    functions = [(m, node) for m, node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    assert not {(m, f.name): length_of(f) for m, f in functions if length_of(f) > LONGEST_FUNCTION}


def test_docstrings_can_be_read_alone() -> None:
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    nodes = [(module, node) for module, tree in modules().items() for node in ast.walk(tree) if isinstance(node, kinds)]
    texts = [(module, ast.get_docstring(node) or "") for module, node in nodes]
    assert not [(module, text) for module, text in texts if re.match(r"(The same\b|As `|Likewise|See )", text)]


@pytest.mark.parametrize("package", [*HEADS, "carries", "_faster"])
def test_init_holds_exports_and_nothing_else(package: str) -> None:
    """What type checkers read at the head of a package is what the program finds there."""
    choice = modules()[package].body[-1]
    assert isinstance(choice, ast.If)
    exported = {}
    for statement in choice.body:
        assert isinstance(statement, ast.ImportFrom)
        assert all(alias.asname == alias.name for alias in statement.names), "`scan as scan`: an export"
        exported |= {alias.name: statement.module or "." for alias in statement.names}
    (found,) = choice.orelse
    assert isinstance(found, ast.Assign)
    assert isinstance(found.value, ast.Call)
    homes: dict[str, str] = ast.literal_eval(found.value.args[1])
    assert exported == {name: home for home, names in homes.items() for name in names.split()}
    module = public_module(package)
    shown = {name for name in dir(module) if not name.startswith("_")}
    loaded = {name for name in shown - set(exported) if isinstance(getattr(module, name), types.ModuleType)}
    assert set(exported) == shown - loaded - {"TYPE_CHECKING", "on_first_use"}
    assert set(module.__all__) == {name for name, home in exported.items() if home != "."}


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("masked_scan", "mask_scan"),
        ("while_loop", "while_scan"),
        ("fori_loop", "fori"),
        ("CaryError", "treescan.errors.CarryError"),
        ("check_cary", "treescan.testing.check_carry"),
    ],
)
def test_a_name_that_is_near_is_told(name: str, near: str) -> None:
    with pytest.raises(AttributeError, match=f"no attribute '{name}'. Did you mean `{near}`"):
        getattr(treescan, name)
    with pytest.raises(AttributeError, match=r"'zzz'$"):
        getattr(treescan, "zzz")  # noqa: B009


@pytest.mark.parametrize(
    "home",
    [
        "carries",
        "errors",
        "lifting",
        "meters",
        "options",
        "state_dict",
        "testing",
        "types",
        "integrations.flax",
        "integrations.nnx",
    ],
)
def test_names_of_public_modules_are_found(home: str) -> None:
    module = importlib.import_module(f"treescan.{home}")
    names = {name for name in dir(module) if name[0] != "_"}
    assert names == set(getattr(module, "__all__", names))
    for name in names - set(treescan.__all__):
        where = f"from treescan.{home} import {name}" if home.startswith("integrations") else f"treescan.{home}.{name}"
        with pytest.raises(AttributeError, match=rf"no attribute '{name}'. There is `{where}`"):
            getattr(treescan, name)


@pytest.mark.parametrize(
    ("module", "name", "there_is"),
    [
        (treescan, "integrations", "`import treescan.integrations.flax`, and `import treescan.integrations.nnx`"),
        (treescan.carries, "mean", r"`moments\(\)`, with the mean and the variance"),
        (treescan.carries, "moving_average", r"`ema\(start, decay\)`"),
    ],
)
def test_a_name_of_something_else_is_told_ours(
    module: Any, name: str, there_is: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(vars(module), name, raising=False)  # a module that another test has imported
    with pytest.raises(AttributeError, match=f"no attribute '{name}'. There is {there_is}."):
        getattr(module, name)


def sections(value: Any) -> dict[str, str]:
    """A Google-style docstring's sections by their titles; the text before the first is under ''."""
    parts = re.split(r"^(\w+):\n", inspect.getdoc(value) or "", flags=re.MULTILINE)
    return {"": parts[0].strip(), **dict(zip(parts[1::2], parts[2::2], strict=True))}


def test_public_names_are_documented() -> None:
    for name, value in PUBLIC.items():
        first_line = sections(value)[""].splitlines()[0]
        assert first_line.endswith("."), name
        assert value.__doc__ not in {base.__doc__ for base in getattr(value, "__mro__", (None,))[1:]}, name


@pytest.mark.parametrize("name", VERBS)
def test_verbs_document_what_they_take_give_and_raise(name: str) -> None:
    found = sections(PUBLIC[name])
    stars = {inspect.Parameter.VAR_KEYWORD: "**", inspect.Parameter.VAR_POSITIONAL: "*"}
    parameters = inspect.signature(PUBLIC[name]).parameters.values()
    documented = [p for p in parameters if not p.name.startswith("_") and p.name != "unknown"]  # `unknown` is refused
    expected = [stars.get(p.kind, "") + p.name for p in documented]
    if not expected:  # what is given nothing has nothing to refuse
        found = {"Args": "", "Raises": ""} | found
    assert re.findall(r"^    (\*{0,2}\w+): \S", found["Args"], re.MULTILINE) == expected
    assert found["Returns"].strip()
    errors = re.findall(r"^    (\w+): \S", found["Raises"], re.MULTILINE)
    assert errors == sorted(errors)
    assert all(issubclass(PUBLIC[error], treescan.TreescanError) for error in errors)


def test_what_is_listed_as_slow_is_there() -> None:
    listed = {line.split("[")[0] for line in (TESTS / "slow.txt").read_text().splitlines()}
    functions = {
        f"tests/{file}::{node.name}"
        for file, tree in trees_of_tests().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
    }
    assert listed and listed <= functions


def test_the_reader_of_imports_sees_what_it_should() -> None:
    tree = ast.parse(
        "import a.b\nfrom ..c import d\ndef f():\n    from jax.lax import scan\n    getattr(jax.lax, 'map')"
    )
    assert sorted(imports(tree)) == [(0, "a.b", []), (0, "jax.lax", ["scan"]), (2, "c", ["d"])]
    assert {"jax.lax.scan", "jax.lax.map", "a.b"} <= set(references(tree))
    program = set(own_imports("_program.program"))
    assert {"_loop.loop", "_loop.run", "_transforms.call", "_program.nest"} <= program
    assert "_program.program" in set(own_imports("_verbs.prepare"))


def test_stages_have_transforms_and_reasons() -> None:
    named = {
        ast.unparse(node.value)
        for tree in modules().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.AnnAssign) and node.value and ast.unparse(node.annotation) == "ClassVar[Stage]"
    }
    assert named == {str(stage) for stage in Stage}
    assert all(stage.value.endswith(".") for stage in Stage)
