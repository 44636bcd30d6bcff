"""Finds classes of flax and equinox. It imports nothing: without these libraries there are no such values."""

from __future__ import annotations

import importlib.util
import sys

import jax

from ._avals import PyTree


def check_installed(module: str) -> None:
    """Refuses to import a module that needs flax, where there is none."""
    if importlib.util.find_spec("flax") is None:
        says = f"`{module}` needs flax, which is not installed. `pip install 'treescan[flax]'` installs it."
        raise ModuleNotFoundError(says, name="flax")


def variable_classes() -> tuple[type, ...]:
    """The class of the variables of nnx, which a module changes in place."""
    return _class("flax.nnx", "Variable")


def box_classes() -> tuple[type, ...]:
    """The classes that hold an array and its metadata: the variables of nnx, and the boxes of linen."""
    return (*variable_classes(), *_class("flax.core.meta", "AxisMetadata"))


def module_classes() -> tuple[type, ...]:
    """The class of the modules of equinox."""
    return _class("equinox", "Module")


def refusals_of_changes() -> tuple[type[Exception], ...]:
    """The classes of errors that flax raises if a module is changed in another trace than the one that made it."""
    return (*_class("flax.errors", "TraceContextError"), *_class("flax.errors", "JaxTransformError"))


def holds(tree: PyTree, kinds: tuple[type, ...]) -> bool:
    """Whether there are values of these classes in a tree."""
    if not kinds:
        return False
    nodes = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, kinds))
    return any(isinstance(node, kinds) for node in nodes)


def _class(module: str, name: str) -> tuple[type, ...]:
    kind = getattr(sys.modules.get(module), name, None)
    return (kind,) if isinstance(kind, type) else ()
