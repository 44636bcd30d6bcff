"""Names of a flat checkpoint's arrays: what comes before and after the number of a layer."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.tree_util as jtu
import numpy as np

from .._avals import describe_argument, describe_leaf, shape_of
from .._errors import ArgumentTypeError, Fault, LayerError
from .._tree import KeyPath

Ignores: TypeAlias = Callable[[str], bool]


def leaf_name(path: KeyPath, names: Mapping[str, str]) -> str:
    """A leaf's name: its path joined by dots, or what `names` has for that."""
    plain = plain_name(path)
    return names.get(plain, plain)


def plain_name(path: KeyPath) -> str:
    """A leaf's path, joined by dots."""
    return jtu.keystr(path, simple=True, separator=".")


def full_name(prefix: str, number: int, name: str) -> str:
    """What a checkpoint calls an array of a layer."""
    return ".".join(part for part in (prefix, str(number), name) if part)


def layers_by_number(state: Mapping[str, Any], prefix: str, ignores: Ignores) -> list[dict[str, Any]]:
    """For each layer its arrays by name, but for those that are ignored."""
    found: dict[int, dict[str, Any]] = {}
    pattern = re.compile(rf"{re.escape(prefix + '.' if prefix else '')}(0|[1-9]\d*)(?:\.(.+))?", re.DOTALL)
    for name, value in state.items():
        match = pattern.fullmatch(name) if isinstance(name, str) else None
        if match and not ignores(name):
            found.setdefault(int(match[1]), {})[match[2] or ""] = _as_array(name, value)
    if not found:
        prefixes = sorted({part[1] or "" for name in state if (part := re.match(r"(?:(.*?)\.)?\d+(\.|$)", str(name)))})
        raise Fault(
            LayerError,
            f"{{verb}}: no name has the form `{full_name(prefix, 0, 'w')}`.",
            f"The names that contain a number have the prefix {', '.join(map(repr, prefixes))}: pass it as `prefix`."
            if prefixes
            else "Layers are found by the numbers in their names, but no name contains a number.",
        )
    missing = next(i for i in range(len(found) + 1) if i not in found)
    if missing < len(found):
        raise Fault(
            LayerError,
            f"{{verb}}: layers are missing: there is {full_name(prefix, max(found), '')}, but not "
            f"{full_name(prefix, missing, '')}.",
            "Layers are numbered from 0. If a checkpoint has several files, read all of them.",
        )
    return [found[i] for i in range(len(found))]


def _as_array(name: str, value: Any) -> Any:
    readable = hasattr(value, "shape") or isinstance(value, bool | int | float | complex)
    array = np.asarray(value) if readable and not isinstance(value, jax.Array) else value
    if not readable or shape_of(array) is None:
        raise Fault(
            LayerError,
            f"{{verb}}: `{name}` is not an array, but {describe_argument(value)}.",
            "`state` may contain arrays of NumPy or JAX, and values that NumPy can convert. Leave out all others.",
        )
    return array


def refuse_twice(names: Sequence[str]) -> None:
    """Refuses leaves of one name."""
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise Fault(
            LayerError,
            f"{{verb}}: two leaves would be called {', '.join(twice)}.",
            "Give one of them another name: `names={path: name}`.",
        )


def check_names(paths: Sequence[KeyPath], names: Mapping[str, str]) -> None:
    """Refuses names of leaves that are not there."""
    unknown = sorted(map(str, names.keys() - set(map(plain_name, paths))))
    if unknown:
        raise Fault(
            LayerError,
            f"{{verb}}: `names` has {', '.join(unknown)}, which is not in a layer.",
            f"The leaves of a layer are {', '.join(map(plain_name, paths))}.",
        )


def check_prefix(prefix: Any) -> str:
    """The prefix, without a dot at its end."""
    if not isinstance(prefix, str):
        raise Fault(
            ArgumentTypeError,
            f"{{verb}}: `prefix` must be a string, got {describe_argument(prefix)}.",
            'It is the text before the number: `prefix="model.layers"`.',
        )
    return prefix.removesuffix(".")


def check_mapping(names: Any) -> Mapping[str, str]:
    """What the checkpoint calls leaves."""
    if names is not None and not isinstance(names, Mapping):
        raise Fault(
            ArgumentTypeError,
            f"{{verb}}: `names` must be a mapping, got {describe_leaf(names)}.",
            'It maps paths in a layer to names in the checkpoint: `{"attention.q_proj": "q.weight"}`.',
        )
    return names or {}


def check_ignore(ignore: Any) -> Ignores:
    """Whether a name is ignored, from what the user said: patterns, or a function."""
    if ignore is None:
        return lambda name: False
    if callable(ignore):
        return lambda name: bool(ignore(name))
    globs = [ignore] if isinstance(ignore, str) else ignore
    if not isinstance(globs, list | tuple | set | frozenset) or not all(isinstance(glob, str) for glob in globs):
        raise Fault(
            ArgumentTypeError,
            f"{{verb}}: `ignore` must be a pattern of names, several patterns or a function, got "
            f"{describe_argument(ignore)}.",
            'For example `ignore="*.rotary_emb.inv_freq"`, or a function from the whole name to a bool.',
        )
    return lambda name: any(fnmatch.fnmatchcase(name, glob) for glob in globs)
