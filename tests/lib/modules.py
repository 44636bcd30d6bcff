"""The modules of the package, and what they import: read off their syntax, and loaded by calls."""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "treescan"

# Each folder, and each file beside them, imports from those before it in `LINE`; no two modules import each other.
BASE = (
    *("_lazy", "_text", "_avals", "_cpu", "_tree", "_flax", "_errors", "_types", "carries"),
    *("_loop", "_trace", "_body"),
)
CORE = (
    *("_transforms", "_outputs", "_remat", "_program", "_rows", "_until", "_arguments", "_stacks", "_batches"),
    "_verbs",
)
ASKED = ("_faster", "options", "_options")
"""What the core asks for when a call needs it: `_faster` by the names at its head, which loads its files then."""
LINE = (*BASE, *CORE[:-1], *ASKED, CORE[-1])
"""From the ground up. The verbs are above options, which they load in functions."""
HEADS = ("__init__", "errors", "lifting", "meters", "state_dict", "types")
"""What lists public names, for type checkers and for who reads one first."""
EXTRAS = ("_extras", "testing", *HEADS, "__main__", "integrations")


# What loads all that three verbs need.
CALLS = """
from treescan import mask_scan, scan, scan_layers
step, block = lambda h, x: (jnp.tanh(h + x), h), lambda w, h: (h @ w, h)
h, xs, ws = jnp.zeros((4, 3)), jnp.ones((40, 4, 3)), jnp.ones((5, 3, 3))
verbs = (
    lambda h: scan(step, h, xs),
    lambda h: mask_scan(step, h, xs, lengths=jnp.array([40, 3, 9, 20])),
    lambda h: scan_layers(block, h, ws),
)
for verb in verbs:
    jax.eval_shape(jax.grad(lambda h: verb(h)[0].sum()), h)
    verb(h)
"""


def module_of(file: Path) -> str:
    dotted = ".".join(file.relative_to(PACKAGE).with_suffix("").parts)
    return dotted.removesuffix(".__init__")


@functools.cache
def modules() -> dict[str, ast.Module]:
    """The syntax of each, by its name within the package."""
    return {module_of(file): ast.parse(file.read_text(), str(file)) for file in sorted(PACKAGE.rglob("*.py"))}


def place_of(module: str) -> int:
    """The place of a module in `LINE`; what is built on top of it comes last.

    The head of `_faster` is a table of names, which imports nothing, so it comes first.
    """
    folder = module.split(".")[0]
    if module == "_faster":
        return 0
    return len(LINE) if folder in EXTRAS else LINE.index(folder)


def imports(tree: ast.AST, *, types: bool = False) -> Iterator[tuple[int, str, list[str]]]:
    """(level, module, names) of every import, wherever it is; with `types`, of those for type checkers alone too."""
    unread = {inner for node in ast.walk(tree) if _is_for_types(node) for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if node in unread and not types:
            continue
        if isinstance(node, ast.Import):
            yield from ((0, alias.name, []) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.level, node.module or "", [alias.name for alias in node.names]


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def own_imports(module: str, tree: ast.AST | None = None, *, types: bool = False) -> Iterator[str]:
    """The package's own modules that one of them imports, or a part of it."""
    is_package = module == "__init__" or (PACKAGE / module.replace(".", "/")).is_dir()
    path = [] if module == "__init__" else module.split(".")
    for level, target, names in imports(tree or modules()[module], types=types):
        if level:
            base = path[: len(path) - level + is_package] if path else []
            yield from _resolve([*base, *target.split(".")] if target else base, names)
        elif target.split(".")[0] == "treescan":
            yield from _resolve(target.split(".")[1:], names)


def _resolve(path: list[str], names: list[str]) -> Iterator[str]:
    """`from .package import name` imports the module `package.name` if there is one, else the package."""
    for name in names or [""]:
        inner = ".".join([*path, name])
        yield inner if inner in modules() else ".".join(path) or "__init__"
