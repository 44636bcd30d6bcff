"""Trees whose parts have the names that users know, for messages."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import jax
import jax.tree_util as jtu
from flax import nnx

from ..._tree import KeyPath, Root, leaves_with_path, path_str
from ..._types import PyTree

_GRAPH: dict[str, Any] = {"graph": True} if "graph" in inspect.signature(nnx.iter_graph).parameters else {}


@jtu.register_pytree_with_keys_class
class Named:
    """Values by their names. `structure` is what else there is to know, and static."""

    def __init__(self, names: tuple[str, ...], values: tuple[Any, ...], structure: Any = None) -> None:
        self.names = names
        self.values = values
        self.structure = structure

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Root, Any]], Any]:
        children = [(Root(name), value) for name, value in zip(self.names, self.values, strict=True)]
        return children, (self.names, self.structure)

    def tree_flatten(self) -> tuple[tuple[Any, ...], Any]:
        return self.values, (self.names, self.structure)

    @classmethod
    def tree_unflatten(cls, known: Any, values: tuple[Any, ...]) -> Named:
        return cls(known[0], tuple(values), known[1])


def named_state(state: PyTree, nodes: tuple[str, ...]) -> Named:
    """The arrays of the state of a list of nodes, which have these names."""
    leaves, structure = jtu.tree_flatten_with_path(state)
    names = tuple(nodes[path[0].key] + "".join(map(_attribute, path[1:])) for path, _ in leaves)
    return Named(names, tuple(leaf for _, leaf in leaves), structure)


def by_name(tree: PyTree) -> dict[str, Any]:
    """The arrays of a tree by their names in messages."""
    return dict(leaves_with_path("", tree))


def state_of(named: Named) -> PyTree:
    """The way back."""
    return jtu.tree_unflatten(named.structure, named.values)


def variables_of(named: Named, nodes: tuple[str, ...]) -> list[tuple[str, nnx.Variable[Any]]]:
    """The variables of the state of a list of nodes, which have these names."""
    found, _ = jtu.tree_flatten_with_path(state_of(named), is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
    return [(nodes[path[0].key] + "".join(map(_attribute, path[1:])), variable) for path, variable in found]


def _attribute(key: Any) -> str:
    match key:
        case jtu.GetAttrKey(name="value"):  # of a variable: its array is meant
            return ""
        case jtu.DictKey(key=str() as name) if name.isidentifier():
            return f".{name}"
        case _:
            return path_str("", (key,))


def is_node(leaf: Any) -> bool:
    """Whether nnx keeps the identity of an object: a module or whatever else holds variables, or a variable."""
    return isinstance(leaf, (nnx.Pytree, nnx.Variable))


def variables_in(node: Any) -> Iterator[tuple[tuple[Any, ...], nnx.Variable[Any]]]:
    """The variables of a node, each once, with their paths in it."""
    for path, value in nnx.iter_graph(node, **_GRAPH):
        if isinstance(value, nnx.Variable):
            yield path, value


def leaves_and_nodes(root: str, tree: PyTree) -> list[tuple[str, Any]]:
    """The leaves of a tree with their paths, where modules and variables are leaves."""
    return leaves_with_path(root, tree, is_leaf=is_node)


def replace_nodes(tree: PyTree, replace: Any) -> PyTree:
    """A tree with `replace(node)` in the places of its nodes."""
    return jax.tree.map(lambda leaf: replace(leaf) if is_node(leaf) else leaf, tree, is_leaf=is_node)


def part(path: KeyPath) -> str:
    """A key path below an unnamed root."""
    return path_str("", path)
