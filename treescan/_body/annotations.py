"""The jaxtyping annotations of a body: what they promise of the values that it is given and returns."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import sys
import types
import typing
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax.tree_util as jtu

from .._avals import describe_node
from .._errors import Fault, Row, SignatureError
from .._loop.loop import Body, outermost
from .._tree import path_str

_UNIONS = (typing.Union, types.UnionType)

Names: TypeAlias = "str | tuple[Names, ...]"
"""The name of a value; or of each of its parts, in its form."""


def _holds(value: object, hint: Any) -> bool:
    """Whether a value fits an annotation. beartype decides; it is loaded by the first annotated body."""
    from beartype.door import is_bearable

    return is_bearable(value, hint)


class _Part(NamedTuple):
    """An annotated value: where it is, its jaxtyping annotation, and itself."""

    path: str
    hint: Any
    value: object


class Signature(NamedTuple):
    """What a body's annotations promise of its positional parameters and of what it returns."""

    names: Sequence[str]
    inputs: Sequence[Any]
    outputs: Any

    @contextlib.contextmanager
    def scope(self) -> Generator[Scope]:
        """One scope of axis names for one call of the body."""
        import jaxtyping  # here, not above: a program without these annotations never loads it

        with jaxtyping.jaxtyped("context"):
            yield Scope(self)


class Scope:
    """Checks one call of a body, and remembers where an axis name got its size."""

    def __init__(self, signature: Signature) -> None:
        self._signature = signature
        self._sizes: dict[str, tuple[int, str]] = {}

    def check_inputs(self, values: Sequence[object]) -> None:
        """Checks what the body is given, in the order of its parameters."""
        parts = zip(self._signature.names, self._signature.inputs, values, strict=False)  # some may have defaults
        self._check([part for name, hint, value in parts for part in _parts(name, hint, value)])

    def check_outputs(self, out: object, names: Names) -> None:
        """Checks what the body returned. The names are one, or a tuple with a name for each part, in its form."""
        returned = _by_names(names, self._signature.outputs, out)
        self._check([part for name, hint, value in returned for part in _parts(name, hint, value)])

    def _check(self, parts: list[_Part]) -> None:
        bad = [
            Row(p.path, _hint_str(p.hint), describe_node(p.value), self._why(p)) for p in parts if not self._holds(p)
        ]
        if bad:
            raise Fault(
                SignatureError,
                "{body} does not match its annotations.",
                "Change the annotation or the value. Within a {step}, each axis name has one size.",
                header=("value", "annotated", "is"),
                rows=bad,
            )

    def _holds(self, part: _Part) -> bool:
        holds = _holds(part.value, part.hint)
        if holds:
            for name, size in _named_sizes(part):
                self._sizes.setdefault(name, (size, part.path))
        return holds

    def _why(self, part: _Part) -> str:
        clashes = [
            f"{name}: {self._sizes[name][0]} in {self._sizes[name][1]}, {size} in {part.path}"
            for name, size in _named_sizes(part)
            if name in self._sizes and self._sizes[name][0] != size
        ]
        return ", ".join(clashes) or _mismatch(part)


def _by_names(names: Names, hint: Any, value: Any) -> Iterator[tuple[str, Any, object]]:
    """The named parts of a value with their annotations, if it is annotated as a tuple of this many parts."""
    if isinstance(names, str):
        yield names, hint, value
        return
    items = typing.get_args(hint)
    if typing.get_origin(hint) is tuple and len(items) == len(names) and Ellipsis not in items:
        for name, item, part in zip(names, items, value, strict=True):
            yield from _by_names(name, item, part)


def _mismatch(part: _Part) -> str:
    """Why an array does not fit its annotation, whatever the axis names mean."""
    shape = getattr(part.value, "shape", None)
    if not _is_array_hint(part.hint) or shape is None:
        return ""
    dims = part.hint.dim_str.split()
    aligned = _align(dims, shape)
    if aligned is None:
        least = sum(not _is_variadic(dim) for dim in dims)
        return f"rank {least}{'' if least == len(dims) else ' or more'}, is {len(shape)}"
    sizes = [f"axis {i}: {dim}, is {shape[i]}" for i, dim in aligned if dim.isdigit() and int(dim) != shape[i]]
    if sizes:
        return ", ".join(sizes)
    any_shape = part.hint.dtype[part.hint.array_type, "..."]
    return "" if _holds(part.value, any_shape) else "dtype"


def signature_of(body: Body) -> Signature | None:
    """Reads the annotations of a body; None if they promise nothing in jaxtyping's terms."""
    hints = _hints(body.function)
    signature = Signature(body.names, [hints.get(name, Any) for name in body.names], hints.get("return", Any))
    return signature if any(map(_mentions_jaxtyping, (*signature.inputs, signature.outputs))) else None


def _hints(body: Callable[..., object]) -> dict[str, Any]:
    """The annotations of a body, each resolved on its own; none if jaxtyping itself does the checking."""
    if _is_jaxtyped(body):
        return {}
    function: Any = outermost(body)
    if _promises_nothing(function):
        return {}
    while hasattr(function, "func") and hasattr(function, "keywords"):  # functools.partial
        function = outermost(function.func)
    if not inspect.isroutine(function) and not isinstance(function, type):
        function = type(function).__call__
    function = _unwrap_alike(function)
    annotations = getattr(function, "__annotations__", None)
    copied = hasattr(function, "__wrapped__")  # by functools.wraps, from a function with other parameters
    if not annotations or copied:
        return {}
    function = getattr(function, "__func__", function)
    try:
        names = {**function.__globals__, **inspect.getclosurevars(function).nonlocals}
    except (AttributeError, TypeError, ValueError):
        return {}
    return {name: _resolve(annotation, names) for name, annotation in dict(annotations).items()}


def _promises_nothing(function: object) -> bool:
    """Whether this is a plain function without annotations, as most bodies are: the answer that takes least time."""
    if not isinstance(function, types.FunctionType) or hasattr(function, "__wrapped__"):
        return False
    return not function.__annotations__


def _unwrap_alike(function: Any) -> Any:
    """What a wrapper wraps that takes what it wraps: the annotations that it copied are its own too."""
    with contextlib.suppress(TypeError, ValueError):
        while hasattr(function, "__wrapped__"):
            first, second = (inspect.signature(f, follow_wrapped=False) for f in (function, function.__wrapped__))
            if list(first.parameters) != list(second.parameters):
                break
            function = function.__wrapped__
    return function


def _resolve(annotation: object, names: dict[str, object]) -> Any:
    """One annotation, with the names in it looked up; Any if one of them is not to be found."""

    def stub() -> None: ...

    stub.__annotations__ = {"it": annotation}
    try:
        return typing.get_type_hints(stub, globalns=names, include_extras=True)["it"]
    except Exception:  # names in annotations resolve in the user's modules, which may raise anything
        return Any


def _is_jaxtyped(function: object) -> bool:
    """Whether the user has decorated the body with `jaxtyping.jaxtyped`, which then does the checking."""
    while function is not None:
        code = getattr(function, "__code__", None)
        if code is not None and "jaxtyping" in code.co_filename:
            return True
        function = getattr(function, "__wrapped__", None)
    return False


def _is_array_hint(hint: object) -> bool:
    return _is_of_jaxtyping(hint, "AbstractArray")


def _is_tree_hint(hint: object) -> bool:
    return _is_of_jaxtyping(hint, "PyTree") and hasattr(hint, "leaftype")


def _is_of_jaxtyping(hint: object, name: str) -> bool:
    """Whether an annotation is a class of jaxtyping. While nobody has imported jaxtyping, there is none."""
    jaxtyping = sys.modules.get("jaxtyping")
    return jaxtyping is not None and isinstance(hint, type) and issubclass(hint, getattr(jaxtyping, name))


def _fields(hint: Any) -> dict[str, Any]:
    """The annotated fields of a NamedTuple, a dataclass or a TypedDict; of a generic one with its arguments."""
    origin = typing.get_origin(hint)
    if isinstance(origin, type) and (fields := _fields(origin)):
        given = dict(zip(getattr(origin, "__parameters__", ()), typing.get_args(hint), strict=False))
        return {name: _with_arguments(field, given) for name, field in fields.items()}
    if not isinstance(hint, type):
        return {}
    named = dataclasses.is_dataclass(hint) or (issubclass(hint, tuple) and hasattr(hint, "_fields"))
    if not named and not typing.is_typeddict(hint):
        return {}
    try:
        hints = typing.get_type_hints(hint, include_extras=True)
    except Exception:  # as in `_resolve`
        module = sys.modules.get(hint.__module__)
        hints = {
            name: _resolve(part, dict(vars(module or typing))) for name, part in inspect.get_annotations(hint).items()
        }
    names: Any = getattr(hint, "_fields", hints)
    if dataclasses.is_dataclass(hint):
        names = [field.name for field in dataclasses.fields(hint)]
    return {name: hints[name] for name in names if name in hints}


def _with_arguments(hint: Any, given: Mapping[Any, Any]) -> Any:
    """An annotation with arguments in place of type variables."""
    if hint in given:
        return given[hint]
    parameters = getattr(hint, "__parameters__", ())
    return hint[tuple(given.get(name, name) for name in parameters)] if parameters else hint


def _inside(hint: Any) -> tuple[Any, ...]:
    """The annotations inside an annotation."""
    if _is_tree_hint(hint):
        return (hint.leaftype,)
    alias = getattr(hint, "__value__", None)  # a `type` statement
    return (*typing.get_args(hint), *_fields(hint).values(), *(() if alias is None else (alias,)))


def _mentions_jaxtyping(hint: object) -> bool:
    try:
        return _mentions_jaxtyping_hashable(hint)
    except TypeError:  # `Annotated` with what has no hash
        return _mentions(hint, ())


@functools.lru_cache(maxsize=64)
def _mentions_jaxtyping_hashable(hint: object) -> bool:
    return _mentions(hint, ())


def _mentions(hint: object, seen: tuple[object, ...]) -> bool:
    if any(hint is other for other in seen):
        return False
    return _is_array_hint(hint) or any(_mentions(part, (*seen, hint)) for part in _inside(hint))


def _parts(path: str, hint: object, value: object) -> Iterator[_Part]:
    """Takes an annotated value apart down to its arrays; what is annotated without jaxtyping is not checked."""
    if not _mentions_jaxtyping(hint):
        return
    items = None if _is_array_hint(hint) else _items(path, hint, value)
    if items is None:
        yield _Part(path, hint, value)
    else:
        for inner_path, inner, item in items:
            yield from _parts(inner_path, inner, item)


def _items(path: str, hint: Any, value: Any) -> list[tuple[str, Any, Any]] | None:
    """The annotated parts of a container; None where the value does not have the container's form."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return [(path, arguments[0], value)]
    if hasattr(hint, "__value__"):
        return [(path, hint.__value__, value)]
    if origin in _UNIONS:
        arm = next((arm for arm in arguments if _has_form(arm, value)), None)
        return None if arm is None or _is_array_hint(arm) else [(path, arm, value)]
    if not _has_form(hint, value):
        return None
    if _is_tree_hint(hint):
        leaves, _ = jtu.tree_flatten_with_path(value)
        return [(path_str(path, key), hint.leaftype, leaf) for key, leaf in leaves]
    fields = _fields(hint)
    if typing.is_typeddict(hint):
        return [(f'{path}["{name}"]', inner, value[name]) for name, inner in fields.items() if name in value]
    if fields:
        return [(f"{path}.{name}", inner, getattr(value, name)) for name, inner in fields.items()]
    if isinstance(value, Mapping):
        return [(path_str(path, (jtu.DictKey(key),)), arguments[1], item) for key, item in value.items()]
    hints = arguments if origin is tuple and Ellipsis not in arguments else arguments[:1] * len(value)
    return [(f"{path}[{i}]", inner, item) for i, (inner, item) in enumerate(zip(hints, value, strict=True))]


def _has_form(hint: Any, value: object) -> bool:
    """Whether a value is the container, or an array, that an annotation speaks of, whatever is in it."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if _is_array_hint(hint):
        return hasattr(value, "shape")
    if _is_tree_hint(hint) or origin is typing.Annotated or hasattr(hint, "__value__"):
        return True
    if typing.is_typeddict(hint):
        return isinstance(value, dict)
    if origin is tuple and isinstance(value, tuple) and Ellipsis not in arguments:
        return len(arguments) == len(value)
    kind = hint if origin is None else origin
    return isinstance(kind, type) and isinstance(value, kind)


def _hint_str(hint: Any) -> str:
    if _is_array_hint(hint):
        array = getattr(hint.array_type, "__name__", str(hint.array_type)).rsplit(".", 1)[-1]
        return f'{hint.dtype.__name__}[{array}, "{hint.dim_str}"]'
    return " | ".join(map(_hint_str, typing.get_args(hint))) or getattr(hint, "__name__", str(hint))


def _named_sizes(part: _Part) -> Iterator[tuple[str, int]]:
    """The plainly named axes of an array's annotation with the sizes that they have in the value."""
    hints = [part.hint] if _is_array_hint(part.hint) else [h for h in typing.get_args(part.hint) if _is_array_hint(h)]
    shape = getattr(part.value, "shape", None)
    for hint in hints[:1]:
        sizes = () if shape is None else tuple(shape)
        for i, name in _align(hint.dim_str.split(), sizes) or ():
            if name.isidentifier() and not name.startswith("_"):
                yield name, sizes[i]


def _is_variadic(dim: str) -> bool:
    return dim.startswith("*") or dim == "..."


def _align(dims: list[str], shape: tuple[int, ...]) -> list[tuple[int, str]] | None:
    """Which axis each of an annotation's dimensions is, but for one that allows any number; None if none fits."""
    variadic = [i for i, dim in enumerate(dims) if _is_variadic(dim)]
    if len(variadic) > 1 or len(dims) - len(variadic) > len(shape) or (not variadic and len(dims) != len(shape)):
        return None
    first = variadic[0] if variadic else len(dims)
    before, after = dims[:first], dims[first + 1 :]
    return [*enumerate(before), *enumerate(after, len(shape) - len(after))]
