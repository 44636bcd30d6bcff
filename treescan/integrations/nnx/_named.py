"""Trees whose parts have the names that users know; variables in a carry, and their metadata."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import jax
import jax.tree_util as jtu
from flax import nnx

from ..._avals import Array, PyTree, describe_argument, describe_leaf
from ..._errors import Row
from ..._tree import KeyPath, Root, leaves_with_path, path_str
from ...carries._base import AbstractCarry
from ...carries._registry import register_carry


def differences(name: str, given: nnx.Variable[Any], now: nnx.Variable[Any]) -> list[Row]:
    """How two variables differ in type and metadata, under the name of the first."""
    if type(given) is not type(now):
        return [Row(name, type(given).__name__, type(now).__name__, "type")]
    old, new = given.get_metadata(), now.get_metadata()
    changed = [key for key in {**old, **new} if not (key in old and key in new and _same_metadata(old[key], new[key]))]
    return [Row(name, _entry(old, key), _entry(new, key), "metadata") for key in changed]


def _same_metadata(given: Any, now: Any) -> bool:
    try:
        return bool(given is now or given == now)
    except Exception:  # arrays, for example, whose `==` is no answer
        return False


def _entry(metadata: Mapping[str, Any], key: str) -> str:
    if key not in metadata:
        return f"(no {key})"
    value = metadata[key]
    return f"{key}={describe_leaf(value) if isinstance(value, tuple) else describe_argument(value)}"


_GRAPH: dict[str, Any] = {"graph": True} if "graph" in inspect.signature(nnx.iter_graph).parameters else {}


@jtu.register_pytree_with_keys_class
class Named:
    """Values by their names. `structure` is what else there is to know, and static."""

    def __init__(self, names: tuple[str, ...], values: tuple[Any, ...], structure: Any = None) -> None:
        self.names = names
        self.values = values
        self.structure = structure

    @classmethod
    def of(cls, state: PyTree, nodes: tuple[str, ...]) -> Named:
        """The arrays of the state of a list of nodes, which have these names."""
        leaves, structure = jtu.tree_flatten_with_path(state)
        return cls(tuple(_name(path, nodes) for path, _ in leaves), tuple(leaf for _, leaf in leaves), structure)

    def state(self) -> PyTree:
        """The state whose arrays these are."""
        return jtu.tree_unflatten(self.structure, self.values)

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Root, Any]], Any]:
        children = [(Root(name), value) for name, value in zip(self.names, self.values, strict=True)]
        return children, (self.names, self.structure)

    @classmethod
    def tree_unflatten(cls, known: Any, values: tuple[Any, ...]) -> Named:
        return cls(known[0], tuple(values), known[1])


def by_name(tree: PyTree) -> dict[str, Any]:
    """The arrays of a tree by their names in messages."""
    return dict(leaves_with_path("", tree))


def variables_of(state: PyTree, nodes: tuple[str, ...]) -> list[tuple[str, nnx.Variable[Any]]]:
    """The variables in a state of named nodes, each with its path from the node's name."""
    found = jtu.tree_leaves_with_path(state, is_leaf=is_variable)
    return [(_name(path, nodes), leaf) for path, leaf in found if is_variable(leaf)]


def _name(path: KeyPath, nodes: tuple[str, ...]) -> str:
    """What is at a path in a state of a list of nodes, which have these names."""
    return nodes[path[0].key] + "".join(map(_attribute, path[1:]))


def _attribute(key: Any) -> str:
    match key:
        case jtu.GetAttrKey(name="value"):  # of a variable: its array is meant
            return ""
        case jtu.DictKey(key=str() as name) if name.isidentifier():
            return f".{name}"
        case _:
            return path_str("", (key,))


def is_variable(leaf: Any) -> TypeGuard[nnx.Variable[Any]]:
    """Whether it is a variable."""
    return isinstance(leaf, nnx.Variable)


def is_node(leaf: Any) -> bool:
    """Whether nnx keeps the identity of an object: a module or whatever else holds variables, or a variable."""
    return isinstance(leaf, (nnx.Pytree, nnx.Variable))


def variables_in(node: Any) -> Iterator[tuple[tuple[Any, ...], nnx.Variable[Any]]]:
    """The variables of a node, each once, with their paths in it."""
    for path, value in nnx.iter_graph(node, **_GRAPH):
        if is_variable(value):
            yield path, value


def leaves_and_nodes(root: str, tree: PyTree) -> list[tuple[str, Any]]:
    """The leaves of a tree with their paths, where modules and variables are leaves."""
    return leaves_with_path(root, tree, is_leaf=is_node)


def replace_nodes(tree: PyTree, replace: Any) -> PyTree:
    """A tree with `replace(node)` in the places of its nodes."""
    return jax.tree.map(lambda leaf: replace(leaf) if is_node(leaf) else leaf, tree, is_leaf=is_node)


def spelled(name: str, path: Iterable[Any]) -> str:
    """The name of what is at a path of nnx in the node of this name."""
    return name + "".join(f".{key}" for key in path)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ModuleCarry(AbstractCarry[Any, Any]):
    """An nnx module in the loop. The body sees the module, may change its variables, and returns it.

    All rows of a `mask_scan` share it. It is updated in steps in which any row is valid.

    Attributes:
        state: its variables.
        graph: everything else, which is the same in every step.
    """

    state: PyTree
    graph: Any = field(metadata={"static": True})

    def read(self) -> Any:
        """The module."""
        return nnx.merge(self.graph, self.state)

    def write(self, returned: Any, valid: Array | None) -> ModuleCarry:
        """The variables of the module that was returned."""
        if not isinstance(returned, nnx.Pytree):
            raise TypeError(f"the step returned a {type(returned).__name__} instead of the module that it was given")
        graph, state = nnx.split(returned)
        if graph != self.graph:
            rows = _differences(self.read(), returned)
            changes = [f"{row.leaf} had {row.expected}, now {row.came}. " for row in rows]
            raise TypeError(
                f"the module that the step returned has another structure: {''.join(changes)}"
                "Submodules, variables, their metadata and settings must be the same in every step. Create all of "
                "them before the scan"
            )
        return ModuleCarry(state, self.graph)

    def rows(self) -> None:
        """Shared by all rows."""
        return None


def _differences(given: Any, now: Any) -> list[Row]:
    """What became of the variables that both modules have."""
    old, new = (dict(variables_in(module)) for module in (given, now))
    both = [path for path in old if path in new]
    return [row for path in both for row in differences(".".join(map(str, path)), old[path], new[path])]


def _to_carry(module: Any) -> ModuleCarry:
    graph, state = nnx.split(module)
    return ModuleCarry(state, graph)


register_carry(nnx.Pytree, _to_carry, ModuleCarry.read)
