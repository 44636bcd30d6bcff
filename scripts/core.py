"""Prints which files make `scan`, `mask_scan` and `scan_layers` alone, or copies them into a project.

`python scripts/core.py FOLDER` copies the core into a folder of any name, which is then a package.
`python scripts/core.py FOLDER --while` also copies `while_scan`, and `--options` what the options need.

A verb's core are the files that are imported at the head of its own, and at the heads of these. What a function imports
is needed for an option. What `_faster` finds when it is asked makes the loop faster (`treescan.rewriting`).
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
ENDS_EARLY = ("_verbs.while_scan", "_until.condition", "_until.end_early")
"""`while_scan`, and what it imports when it is called."""
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


def core(*more: str) -> list[str]:
    """The modules that are loaded with the three verbs, and with some more."""
    return closure((*VERBS, *more), imported_at_the_head)


def late() -> list[str]:
    """The modules that functions of the core import, and all that is loaded with these."""
    there = core()
    head = {module: set(imported_at_the_head(module)) for module in there}
    verbs = [module for module in there if file_of(module).name != "__init__.py"]  # heads of packages list public names
    first = {each for module in verbs for each in set(own_imports(module)) - head[module]}
    first |= {module for module in modules() if module.startswith("_faster.")}
    return [module for module in core(*first) if module not in there]


def copied(*, ends_early: bool = False, options: bool = False) -> list[str]:
    """The modules of a copy: the core, what it needs in any program, and what its functions import for options."""
    more = core(*SURROUNDINGS, *(ENDS_EARLY if ends_early else ()))
    return sorted({*more, *(late() if options else ())})


def table(modules: list[str], total: list[str] | None = None) -> list[str]:
    """The files of some modules that have code, by folders, with their lines; and the sum of these, or of more."""
    folders = dict[str, list[tuple[str, int]]]()
    for module in modules:
        if count := lines_of(module):
            file = file_of(module).relative_to(PACKAGE)
            folders.setdefault(f"{file.parent}/".removeprefix("./"), []).append((file.name, count))
    counts = [count for module in total or modules if (count := lines_of(module))]
    rows = [
        f"| {f'`{folder}`' if folder else 'the package'} | {', '.join(f'`{name}` {count}' for name, count in files)} "
        f"| {sum(count for _, count in files):,} |"
        for folder, files in sorted(folders.items())
    ]
    return [
        "| folder | files, and their lines | lines |",
        "|---|---|--:|",
        *rows,
        f"| all | {len(counts)} files | {sum(counts):,} |",
        "",
    ]


def page() -> str:
    """The files of the core with their lines of code, those of `while_scan`, and those that functions import."""
    there, early = core(), core(*ENDS_EARLY)
    return "\n".join(
        [
            *table(there),
            "`while_scan` adds these (`--while`):",
            "",
            *table([module for module in early if module not in there], early),
            "What an option needs, or what makes a loop faster, is imported by a function of these (`--options`):",
            "",
            *table(late()),
        ]
    )


def copy(folder: Path, *, ends_early: bool = False, options: bool = False) -> None:
    """Copies the modules of a copy into a folder."""
    for module in copied(ends_early=ends_early, options=options):
        file = file_of(module)
        place = folder / file.relative_to(PACKAGE)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, place)


if __name__ == "__main__":
    match sys.argv[1:]:
        case []:
            print(page(), end="")  # noqa: T201
        case ["--help"]:
            print(__doc__)  # noqa: T201
        case [folder, *flags] if not folder.startswith("-") and set(flags) <= {"--while", "--options"}:
            copy(Path(folder), ends_early="--while" in flags, options="--options" in flags)
        case _:
            sys.exit(__doc__)
