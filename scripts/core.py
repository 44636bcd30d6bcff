"""Prints which files make `scan`, `mask_scan` and `scan_layers` alone, or copies them into a project.

`python scripts/core.py FOLDER` copies the core into a folder of any name, which is then a package.
`python scripts/core.py FOLDER --options` also copies what the options need.

A verb's core are the files that are imported at the head of its own, and at the heads of these. What a function imports
is needed for an option, or makes the loop faster (`treescan.rewriting`).
"""

import ast
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "lib"))

from modules import PACKAGE, modules, own_imports

sys.path.pop(0)

VERBS = ("_verbs.scan", "_verbs.mask_scan", "_verbs.layers")
SURROUNDINGS = ("_body.modules", "_trace.raw_keys")
"""What functions of the core import not for an option, but where flax is imported, or for a flag of JAX or treescan."""


def file_of(module: str) -> Path:
    """The file of a module."""
    path = PACKAGE if module == "__init__" else PACKAGE / module.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def lines_of(module: str) -> int:
    """Lines of code: without docstrings, comments and blank lines."""
    docstrings = {
        line
        for node in ast.walk(modules()[module])
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None
        for line in range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)
    }
    lines = enumerate(file_of(module).read_text().splitlines(), 1)
    return sum(1 for n, line in lines if n not in docstrings and line.strip() and not line.strip().startswith("#"))


def imported_at_the_head(module: str) -> Iterator[str]:
    """The modules that are loaded when this one is."""
    body = modules()[module].body
    statements = list[ast.stmt](node for node in body if isinstance(node, ast.Import | ast.ImportFrom))
    yield from own_imports(module, ast.Module(statements, []))
    yield from ("__init__", *(".".join(module.split(".")[:i]) for i in range(1, module.count(".") + 1)))  # its packages


def closure(modules: tuple[str, ...], imports: Callable[[str], Iterator[str]]) -> list[str]:
    """The modules, and what is imported from there, and so on."""
    found, new = set[str](), list(modules)
    while new:
        module = new.pop()
        if module not in found:
            found.add(module)
            new.extend(imports(module))
    return sorted(found)


def core() -> list[str]:
    """The modules that are loaded with the three verbs."""
    return closure(VERBS, imported_at_the_head)


def late() -> list[str]:
    """The modules that functions of the core import, and all that is loaded with these."""
    there = core()
    head = {module: set(imported_at_the_head(module)) for module in there}
    verbs = [module for module in there if file_of(module).name != "__init__.py"]  # heads of packages list public names
    first = {each for module in verbs for each in set(own_imports(module)) - head[module]}
    return [module for module in closure(tuple(first), imported_at_the_head) if module not in there]


def page() -> str:
    """The files of the core with their lines of code, and those that its functions import."""
    rows = [(module, lines_of(module)) for module in core()]
    rest = [(module, lines_of(module)) for module in late()]

    def table(found: list[tuple[str, int]]) -> list[str]:
        name = lambda module: file_of(module).relative_to(PACKAGE).as_posix()  # noqa: E731
        return [f"| `{name(module)}` | {count} |" for module, count in found if count]

    head = ["| file | lines |", "|---|--:|"]
    return "\n".join(
        [
            *head,
            *table(rows),
            f"| all {len(table(rows))} | {sum(n for _, n in rows):,} |",
            "",
            "What an option needs, or what makes a loop faster, is imported by a function of these:",
            "",
            *head,
            *table(rest),
            f"| all {len(table(rest))} | {sum(n for _, n in rest):,} |",
            "",
        ]
    )


def copy(folder: Path, *, options: bool = False) -> None:
    """Copies the core into a folder, with what it needs in any program, and what its functions import for options."""
    for module in closure((*VERBS, *SURROUNDINGS), imported_at_the_head) + (late() if options else []):
        file = file_of(module)
        place = folder / file.relative_to(PACKAGE)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, place)


if __name__ == "__main__":
    match sys.argv[1:]:
        case []:
            print(page(), end="")  # noqa: T201
        case [folder] if not folder.startswith("-"):
            copy(Path(folder))
        case [folder, "--options"] if not folder.startswith("-"):
            copy(Path(folder), options=True)
        case ["--help"]:
            print(__doc__)  # noqa: T201
        case _:
            sys.exit(__doc__)
