"""What mkdocstrings shows as the signature of a verb: one that is typed, in place of what the verb is at run time.

At run time a verb takes `Callable[..., Any]` and `**options`. Its types are in its overloads, one for each kind of
body. The reference shows the first overload with every option spelled out, and their defaults. All overloads are below
the description, folded.
"""

import ast
from typing import Any

import griffe

# The verbs, by their modules, with what one overload does not say of `xs`.
VERBS = {
    "_verbs.scan.scan": "X | None",
    "_verbs.scan.fold": "X | None",
    "_verbs.scan.accumulate": "X | None",
    "_verbs.fori.fori": None,
    "_extras.chunk_map.verb.chunk_map": None,
    "_verbs.while_scan.while_scan": "X | None",
    "_verbs.mask_scan.mask_scan": "X | Padded[X] | Packed[X] | None",
    "_extras.stream.verb.stream": None,
    "_verbs.layers.scan_layers": "X | None",
    "_verbs.layers.fold_layers": "X | None",
}


class Signatures(griffe.Extension):
    """Gives each verb its ideal signature, once the package is read."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Called by griffe."""
        if pkg.name == "treescan":
            functions = {name: pkg[name] for name in VERBS}
            ideal = {name: parameters_of(pkg, function, VERBS[name]) for name, function in functions.items()}
            for name, function in functions.items():
                fold_overloads(function)
                function.returns = shown_of(function).returns
                function.parameters = ideal[name]


def shown_of(function: griffe.Function) -> griffe.Function:
    """The overload that is shown: the first one that is not only for `save="last"`."""
    overloads = list(function.overloads or ())
    return next(each for each in overloads if not any("Literal" in str(p.annotation) for p in each.parameters))


def fold_overloads(function: griffe.Function) -> None:
    """Writes the overloads below the docstring, as a section that opens with a click."""
    assert function.docstring
    code = "\n".join(map(source_of, function.overloads or ()))
    section = f"Overloads: All overloads, one for each kind of body\n```python\n{code}```"
    function.docstring.value += "\n\n" + section.replace("\n", "\n    ")


def source_of(overload: griffe.Function) -> str:
    """An overload as it would be written, an argument a line."""
    lines, keywords = [], False
    for parameter in overload.parameters:
        if parameter.kind is griffe.ParameterKind.keyword_only and not keywords:
            keywords = True
            lines.append("*")
        stars = "**" if parameter.kind is griffe.ParameterKind.var_keyword else ""
        default = "" if stars or parameter.default is None else f" = {parameter.default}"
        lines.append(f"{stars}{parameter.name}: {parameter.annotation}{default}")
    body = "".join(f"    {line},\n" for line in lines)
    return f"@overload\ndef {overload.name}(\n{body}) -> {overload.returns}: ...\n"


def parameters_of(package: griffe.Module, function: griffe.Function, xs: str | None) -> griffe.Parameters:
    """The parameters of a verb, less those that only catch mistakes, and with the options in place of `**options`."""
    typed = {parameter.name: parameter for parameter in shown_of(function).parameters}
    shown = []
    for given in function.parameters:
        if given.kind in (griffe.ParameterKind.var_positional, griffe.ParameterKind.var_keyword):
            continue
        annotation = typed[given.name].annotation if given.name in typed else given.annotation
        if given.name == "xs" and xs is not None:
            annotation = griffe.safe_get_expression(ast.parse(xs, mode="eval").body, parent=function.parent)
        if given.name == "key":
            annotation = given.annotation
        shown.append(griffe.Parameter(given.name, annotation=annotation, kind=given.kind, default=given.default))
    if "options" in typed:
        known = {parameter.name for parameter in shown}
        shown += options_of(package, str(typed["options"].annotation), known)
    return griffe.Parameters(*shown)


def options_of(package: griffe.Module, annotation: str, known: set[str]) -> list[griffe.Parameter]:
    """The options in `Unpack[MaskOptions]`, and `key`, with the defaults that other verbs give them."""
    verbs = [
        "_extras.stream.verb.stream",
        *(f"_verbs.{at}" for at in ("mask_scan.mask_scan", "scan.scan", "prepare_layers.prepare_layers")),
    ]
    defaults = {parameter.name: parameter.default for verb in verbs for parameter in package[verb].parameters}
    annotations: dict[str, Any] = {"key": package["_types.Options"].members["key"].annotation}
    annotations = options_in(package, annotation.removeprefix("Unpack[").removesuffix("]")) | annotations
    order = [name for name in defaults if name in annotations]
    return [
        griffe.Parameter(
            name, annotation=annotations[name], kind=griffe.ParameterKind.keyword_only, default=defaults[name]
        )
        for name in [*order, *(name for name in annotations if name not in order)]
        if name not in known
    ]


_WITH_OPTIONS = ("_types", "_extras.stream.verb")


def options_in(package: griffe.Module, name: str) -> dict[str, Any]:
    """The keys of a TypedDict, those of its bases first."""
    name, found = name.partition("[")[0], dict[str, Any]()  # a type for any carry and y has these in brackets
    kind = next(package[module].members[name] for module in _WITH_OPTIONS if name in package[module].members)
    for base in map(str, kind.bases):
        found |= {} if base.partition("[")[0] in ("TypedDict", "Generic") else options_in(package, base)
    return found | {name: each.annotation for name, each in kind.members.items() if each.is_attribute}
