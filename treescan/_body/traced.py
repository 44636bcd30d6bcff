"""Errors of JAX about values that are not known while a body is traced: in the names of the body's own arguments.

JAX names the arguments of the function that it traces, and a loop packs those of the body together with its own. What
JAX calls a leaf that the body is given is in its error about that leaf.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
from jax.core import Tracer

from .._avals import PyTree, is_mutable
from .._flax import holds, module_classes
from .._tree import is_number, leaves_with_path

_SAYS = "This concrete value was not available in Python because it depends on the"
_ORIGIN = re.compile(
    rf"^(The error occurred while tracing the function .* for [^.\n]*\. ){_SAYS} values? of the arguments? (.*)\.$",
    re.MULTILINE,
)
"""What JAX says of where a value comes from: the function that was traced, and those of its arguments."""

_OF_TRACED_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)

_NAMES = "_treescan_names"
"""The attribute of an error with the names of what its value is computed from."""


def rename(error: Exception, trees: Iterable[tuple[str, PyTree]]) -> None:
    """Puts the names of leaves in place of JAX's, in an error about a value that is computed from them.

    Nothing is changed in an error about another function, for example one that the body puts under `jax.jit`.

    Args:
        error: the error.
        trees: what the body was given, by names.
    """
    text = error.args[0] if error.args else None
    origin = _ORIGIN.search(text) if isinstance(text, str) and _NAMES not in error.__dict__ else None
    if text is None or origin is None:
        return
    read = _names(origin)
    traced = [(name, leaf) for name, leaf in _leaves(trees) if isinstance(leaf, Tracer) and not is_mutable(leaf)]
    found = {name: own for name, own in _computed_from(read, traced, origin[1]) if own <= read}
    # A leaf may be computed from another one: the key of a step from its number, which is an argument in `fori`.
    names = [name for name, own in found.items() if not any(own < other for other in found.values())]
    if names:
        error.__dict__[_NAMES] = names
        named = _listed(names)
        if named.replace('"', "'") != origin[2]:
            many = "s" if len(names) > 1 else ""
            says = f"{origin[1]}{_SAYS} value{many} of the argument{many} {named}."
            error.args = (f"{text[: origin.start()]}{says}{text[origin.end() :]}", *error.args[1:])


def _computed_from(
    read: frozenset[str], leaves: Sequence[tuple[str, Any]], where: str
) -> Iterator[tuple[str, frozenset[str]]]:
    """Of leaves that are computed from some of the arguments `read`, the names and JAX's names of what they come from.

    JAX walks the whole trace for each answer, so it is asked of many leaves together. The trace has failed, so that it
    may have another operation.
    """
    if not leaves:
        return
    first, *others = (leaf for _, leaf in leaves)
    value = jax.lax.optimization_barrier((first, *others))[0] if others else first
    own = _ORIGIN.search(str(jax.errors.ConcretizationTypeError(value)))
    if own is None or own[1] != where or not read & _names(own):
        return
    if not others:
        yield leaves[0][0], _names(own)
        return
    for half in (leaves[: len(leaves) // 2], leaves[len(leaves) // 2 :]):
        yield from _computed_from(read, half, where)


def _leaves(trees: Iterable[tuple[str, PyTree]]) -> Iterator[tuple[str, Any]]:
    return (leaf for name, tree in trees for leaf in leaves_with_path(name, tree))


def _names(origin: re.Match[str]) -> frozenset[str]:
    return frozenset(re.split(r", and |, | and ", origin[2]))


def _listed(names: Sequence[str]) -> str:
    if len(names) < 3:
        return " and ".join(names)
    return f"{', '.join(names[:-1])}, and {names[-1]}"


def note_block(error: Exception) -> None:
    """Adds what to do where a block needs to know a value that is traced."""
    if isinstance(error, _OF_TRACED_VALUES):
        error.add_note(
            "A block is traced once for all layers of its stack, so values in `layers` or `xs` are traced. If a "
            "value must be known when the program is traced, and differs between layers, for example a window size, "
            "use a pattern: `local = functools.partial(block, window=512)` and so on, `[local, local, global_]` "
            "with a stack for each. Pass a value that all layers share as `args`."
        )


def note_numbers(error: Exception, trees: Sequence[tuple[str, PyTree]], *, has_args: bool) -> None:
    """Adds what to do where the value of an error is computed from a bool or a number that Python knew.

    Args:
        error: what a verb raised. The innermost verb that it passes is the one whose body was traced.
        trees: what the verb was given, by names in the body.
        has_args: whether the verb has arguments that stay Python's.
    """
    names = error.__dict__.pop(_NAMES, ())
    if not names:
        return
    numbers = [f"{name} was {leaf!r}" for name, leaf in _leaves(trees) if name in names and is_number(leaf)]
    if not numbers:
        return
    cure = f"If it never changes, close over it{', or pass it in `args`' if has_args else ''}."
    if holds(trees, module_classes()):
        cure += (
            " Or give the loop the arrays of the module alone: `arrays, rest = eqx.partition(module, eqx.is_array)` "
            "before the loop, and `eqx.combine(arrays, rest)` in the body."
        )
    error.add_note(
        f"{_listed(numbers)} before the loop. A loop makes an array of a number or a bool that it is given, as "
        f"`jax.lax.scan` does. {cure}"
    )
