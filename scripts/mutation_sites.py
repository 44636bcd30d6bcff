"""Lists the places where a module can be changed so that its tests should notice, read off its syntax.

A change is small: an operator, a condition, a number, a bound, a dropped check, a name in a table. What no test could
notice is left out: docstrings, annotations, what only type checkers read, assertions, the texts of errors, decorators,
and hints that change nothing but speed. `scripts/mutants.py` makes the changes.
"""

from __future__ import annotations

import ast
import copy
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_HINTS = {"strict", "unique_indices", "indices_are_sorted", "propagate_source_info", "prevent_cse", "unroll"}
"""Keyword arguments that change no result."""

_COMPARED: dict[type[ast.cmpop], list[type[ast.cmpop]]] = {
    ast.Eq: [ast.NotEq],
    ast.NotEq: [ast.Eq],
    ast.Lt: [ast.LtE, ast.Gt],
    ast.LtE: [ast.Lt, ast.Gt],
    ast.Gt: [ast.GtE, ast.Lt],
    ast.GtE: [ast.Gt, ast.Lt],
    ast.Is: [ast.IsNot],
    ast.IsNot: [ast.Is],
    ast.In: [ast.NotIn],
    ast.NotIn: [ast.In],
}
_COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
    ast.Pow: ast.Mult,
}
_RENAMED = {
    "min": "max",
    "max": "min",
    "minimum": "maximum",
    "maximum": "minimum",
    "argmin": "argmax",
    "argmax": "argmin",
    "any": "all",
    "all": "any",
    "pmin": "pmax",
    "pmax": "pmin",
    "isdisjoint": "issuperset",
    "issuperset": "isdisjoint",
}
_SELECTIONS = {"where": 1, "cond": 1, "select_n": 1, "_choose": 1, "select": 1, "merge": 1, "choose_own": 0}
"""Functions of which two operands in turn are alternatives, and the place of the first; a method's are its first."""
_IDENTITIES = {"stop_gradient", "vary_over", "lend_rows", "lend_closed", "place_like", "typed_like", "array_of"}
"""Functions that return one of their operands, changed in what a type or a value does not show."""
_ADDED = ("mul", "sub", "sin", "cond", "scan", "while", "dot_general", "psum", "random_bits", "custom_jvp_call")
_NAMES_OF_A_TABLE = 2


@dataclass(frozen=True)
class Site:
    """A change.

    Attributes:
        module: the file, from the package on.
        function: the qualified name of the function, "" outside of any.
        line: where the change begins.
        statement: the line of the innermost statement of a function in which it is; 0 outside of any.
        table: the name that is assigned to where it is outside of any function.
        source: the line, without its indentation.
        kind: what is changed, in a word.
        before: the source of what is changed, in one line.
        after: what takes its place.
        start: its first byte in the file.
        end: the one after its last.
    """

    module: str
    function: str
    line: int
    statement: int
    table: str
    source: str
    kind: str
    before: str
    after: str
    start: int
    end: int

    @property
    def key(self) -> str:
        """Names the change within one state of the package."""
        return f"{self.module}:{self.line}:{self.start}: {self.before} -> {self.after}"

    def applied(self, source: bytes) -> bytes:
        """The changed source; what follows keeps its line."""
        lines = source[self.start : self.end].count(b"\n") if self.after == "pass" else 0
        after = self.after if self.after == "pass" else f"({self.after})" if _may_be_parted(self.after) else self.after
        return source[: self.start] + after.encode() + b"\n" * lines + source[self.end :]


def _may_be_parted(text: str) -> bool:
    try:
        return not isinstance(ast.parse(text, mode="eval").body, ast.Constant | ast.Name)
    except SyntaxError:  # no expression: a slice
        return False


def sites_of(root: Path, module: str, seed: int) -> list[Site]:
    """All changes of a module; of the names in its tables some, drawn by the seed."""
    source = (root / module).read_text()
    return list(_Finder(module, source, seed).sites())


class _Finder:
    def __init__(self, module: str, source: str, seed: int) -> None:
        self.module, self.source, self.tree = module, source, ast.parse(source)
        self.random = random.Random(f"{seed} {module}")
        lines = source.encode().splitlines(keepends=True)
        self.offsets = [sum(map(len, lines[:i])) for i in range(len(lines) + 1)]

    def sites(self) -> Iterator[Site]:
        for statement in self.tree.body:
            yield from self._walk(statement, "", 0, "")

    def _walk(self, node: ast.AST, function: str, statement: int, table: str) -> Iterator[Site]:
        if isinstance(node, ast.Import | ast.ImportFrom | ast.Assert | ast.Raise | ast.Delete | ast.JoinedStr):
            return
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            inside = f"{function}.{node.name}".lstrip(".")
            for child in node.body:
                at = child.lineno if isinstance(node, ast.FunctionDef) else 0
                yield from self._walk(child, inside, at, "")
            return
        if isinstance(node, ast.stmt) and statement:
            statement = node.lineno
        if isinstance(node, ast.Assign | ast.AnnAssign) and not statement:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            table = ast.unparse(target)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            for child in node.orelse:
                yield from self._walk(child, function, statement, table)
            return
        for target, kind, after in self._changes(node):
            if after == ast.unparse(target):  # the other operand is the same, or the condition is True already
                continue
            start = self.offsets[target.lineno - 1] + target.col_offset  # type: ignore[attr-defined]
            end = self.offsets[target.end_lineno - 1] + target.end_col_offset  # type: ignore[attr-defined]
            before = " ".join(self.source.encode()[start:end].decode().split())
            line: int = target.lineno  # type: ignore[attr-defined]
            source = self.source.splitlines()[line - 1].strip()
            yield Site(self.module, function, line, statement, table, source, kind, before, after, start, end)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "isinstance":
            return  # its types are no operands
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "type_params"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.keyword) and child.arg in _HINTS:
                    continue
                if isinstance(child, ast.AST):
                    yield from self._walk(child, function, statement, table)

    def _changes(self, node: ast.AST) -> Iterator[tuple[ast.AST, str, str]]:
        """What is replaced, in a word how, and by what."""
        match node:
            case ast.Compare():
                for i, op in enumerate(node.ops):
                    for other in _COMPARED.get(type(op), []):
                        yield node, "comparison", _with(node, ops=[*node.ops[:i], other(), *node.ops[i + 1 :]])
            case ast.BinOp() if type(node.op) in _COMPUTED and not _fails_at_once(node):
                yield node, "operator", _with(node, op=_COMPUTED[type(node.op)]())
            case ast.BoolOp():
                yield node, "and/or", _with(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())
                for i in range(len(node.values)):
                    rest = [*node.values[:i], *node.values[i + 1 :]]
                    yield node, "operand dropped", _with(node, values=rest) if len(rest) > 1 else ast.unparse(rest[0])
            case ast.UnaryOp(op=ast.Not()):
                yield node, "not dropped", ast.unparse(node.operand)
            case ast.If():
                yield from _conditions(node.test)
                if len(node.body) == 1 and isinstance(node.body[0], ast.Raise) and not node.orelse:
                    yield node, "check dropped", "pass"
            case ast.IfExp() | ast.While():
                yield from _conditions(node.test)
            case ast.comprehension():
                for test in node.ifs:
                    yield test, "condition", "True"
            case ast.Constant(value=bool()):
                yield node, "constant", str(not node.value)
            case ast.Constant(value=int()):
                yield node, "constant", str(node.value + 1)
                yield node, "constant", str(node.value - 1)
            case ast.Slice():
                for bound in (node.lower, node.upper):
                    if bound is not None and not isinstance(bound, ast.Constant):
                        yield bound, "bound", f"({ast.unparse(bound)}) + 1"
                if node.step is not None:
                    yield node, "bound", ast.unparse(ast.Slice(node.lower, node.upper, None))
            case ast.Expr(value=ast.Call()):
                yield node, "call dropped", "pass"
            case ast.Call():
                yield from self._changed_calls(node)
            case _:
                pass
        if isinstance(node, ast.Set) and all(isinstance(each, ast.Constant) for each in node.elts):
            yield from self._changed_tables(node)

    def _changed_calls(self, node: ast.Call) -> Iterator[tuple[ast.AST, str, str]]:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in _RENAMED:
            function = copy.deepcopy(node.func)
            setattr(function, "attr" if isinstance(function, ast.Attribute) else "id", _RENAMED[name])
            yield node.func, "function", ast.unparse(function)
        if name in _SELECTIONS and len(node.args) >= 3:
            i = 0 if name == "select" and isinstance(node.func, ast.Attribute) else _SELECTIONS[name]
            swapped = [*node.args[:i], node.args[i + 1], node.args[i], *node.args[i + 2 :]]
            yield node, "operands swapped", _with(node, args=swapped)
        if name in _IDENTITIES and node.args:
            kept = node.args[1] if name == "typed_like" else node.args[0]
            yield node, "call dropped", ast.unparse(kept)
        for i, keyword in enumerate(node.keywords):
            if keyword.arg == "reverse":
                flipped = ast.keyword("reverse", ast.UnaryOp(ast.Not(), keyword.value))
                yield node, "argument", _with(node, keywords=[*node.keywords[:i], flipped, *node.keywords[i + 1 :]])

    def _changed_tables(self, node: ast.Set) -> Iterator[tuple[ast.AST, str, str]]:
        names = [each.value for each in node.elts if isinstance(each, ast.Constant)]
        for i in sorted(self.random.sample(range(len(names)), min(_NAMES_OF_A_TABLE, len(names)))):
            left = ", ".join(map(repr, [*names[:i], *names[i + 1 :]]))
            yield node, f"{names[i]} removed", "{" + left + "}" if left else "set()"
        others = [name for name in _ADDED if name not in names]
        for name in self.random.sample(others, _NAMES_OF_A_TABLE):
            yield node, f"{name} added", "{" + ", ".join(map(repr, [*names, name])) + "}"


def _conditions(test: ast.expr) -> Iterator[tuple[ast.AST, str, str]]:
    yield test, "condition", ast.unparse(ast.UnaryOp(ast.Not(), test))
    yield test, "condition", "True"
    yield test, "condition", "False"


def _with(node: ast.AST, **fields: object) -> str:
    new = copy.copy(node)
    for name, value in fields.items():
        setattr(new, name, value)
    return ast.unparse(new)


def _fails_at_once(node: ast.BinOp) -> bool:
    """Whether another operator could not be tried: on texts, on lists that are repeated, on types."""
    texts = any(isinstance(side, ast.JoinedStr | ast.List | ast.Tuple) for side in (node.left, node.right))
    return texts or any(isinstance(each, ast.Constant) and isinstance(each.value, str) for each in ast.walk(node))


def pick(sites: dict[str, list[Site]], count: int, seed: int) -> list[Site]:
    """Some changes, drawn by the seed: of each module at least one, else in proportion to what it has."""
    total = sum(map(len, sites.values()))
    shares = {module: count * len(all_) / total for module, all_ in sites.items()}
    wanted = {module: min(len(all_), max(1, int(shares[module]))) for module, all_ in sites.items()}
    while sum(wanted.values()) < min(count, total):
        short = [module for module, all_ in sites.items() if wanted[module] < len(all_)]
        wanted[max(short, key=lambda module: shares[module] - wanted[module])] += 1
    picked: list[Site] = []
    for module, all_ in sites.items():
        drawn = random.Random(f"{seed} {module}").sample(range(len(all_)), wanted[module])
        picked += [all_[i] for i in sorted(drawn)]
    return picked


def instrumented(root: Path, module: str) -> str:
    """The source of a module that records which statements of functions are run, as `module:line`."""
    tree = ast.parse((root / module).read_text())
    for function in [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]:
        for node in [function, *ast.walk(function)]:
            for name in ("body", "orelse", "finalbody"):
                body = getattr(node, name, None)
                if isinstance(body, list) and not isinstance(node, ast.ClassDef) and not hasattr(node, f"_{name}"):
                    setattr(node, name, [new for statement in body for new in _recorded(module, statement)])
                    setattr(node, f"_{name}", True)
    place = 0
    while isinstance(tree.body[place], ast.Expr) or getattr(tree.body[place], "module", None) == "__future__":
        place += 1
    tree.body.insert(place, ast.parse("import mutation_hits as _mutation_hits").body[0])
    return ast.unparse(ast.fix_missing_locations(tree))


def _recorded(module: str, statement: ast.stmt) -> list[ast.stmt]:
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return [statement]  # a docstring
    call = ast.parse(f"_mutation_hits.seen.add({f'{module}:{statement.lineno}'!r})").body[0]
    return [call, statement]
